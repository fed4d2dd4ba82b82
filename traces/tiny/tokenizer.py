"""Character tokenizer of the tiny model: one token per character, plus PAD, BOS and EOS."""

from __future__ import annotations

import json
import string
from collections.abc import Iterable
from pathlib import Path

SPECIALS = ("<pad>", "<bos>", "<eos>")
CHARACTERS = "\n " + string.digits + "+-*/=.,:?'" + string.ascii_letters
VOCAB_FILE = "vocab.json"


class CharTokenizer:
    """Map text to token ids and back; ``vocab`` lists the tokens in the order of their ids."""

    pad_id = 0
    bos_id = 1
    eos_id = 2

    def __init__(self, vocab: Iterable[str] | None = None) -> None:
        """Use ``vocab`` (specials first), or the built-in character set."""
        self.vocab = list(vocab) if vocab is not None else [*SPECIALS, *CHARACTERS]
        if tuple(self.vocab[: len(SPECIALS)]) != SPECIALS:
            raise ValueError(f"a vocabulary must start with {SPECIALS}")
        self._ids = {token: index for index, token in enumerate(self.vocab)}

    def __len__(self) -> int:
        """Return the number of tokens, specials included."""
        return len(self.vocab)

    def encode(self, text: str, bos: bool = False, eos: bool = False) -> list[int]:
        """Return one id per character of ``text``, with BOS and EOS around it on request."""
        try:
            ids = [self._ids[character] for character in text]
        except KeyError as error:
            raise ValueError(f"character {error.args[0]!r} is not in the vocabulary") from None
        return [self.bos_id] * bos + ids + [self.eos_id] * eos

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ``ids``; PAD, BOS and EOS decode to nothing."""
        return "".join(self.vocab[index] for index in ids if index >= len(SPECIALS))

    def save(self, folder: Path) -> None:
        """Write the vocabulary to ``folder/vocab.json``."""
        text = json.dumps(self.vocab, ensure_ascii=True)
        (folder / VOCAB_FILE).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> CharTokenizer:
        """Read the vocabulary from ``folder/vocab.json``."""
        return cls(json.loads((folder / VOCAB_FILE).read_text(encoding="utf-8")))
