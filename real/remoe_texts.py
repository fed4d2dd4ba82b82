"""The texts that gates are trained and judged on, as batches of token ids padded on the right.

A batch follows from the seed and its number alone, so that two runs, or a run that was stopped, see the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from sim.types import ConfigError

LEAST_TOKENS = 2
"""A shorter text has no token to predict."""


@dataclass(frozen=True, slots=True)
class TextBatch:
    """Token ids [batch, time]; which are real; which of the targets [batch, time - 1] belong to an answer."""

    ids: Tensor
    real: Tensor
    answer: Tensor

    @property
    def num_tokens(self) -> int:
        """Real tokens."""
        return int(self.real.sum())


class Texts(Protocol):
    """A source of batches."""

    def batches(self, start: int) -> Iterator[TextBatch]:
        """Yield the training batches ``start``, ``start + 1``, ... without end."""
        ...

    def held_out(self) -> list[TextBatch]:
        """Return the batches of texts that are never trained on."""
        ...


def pad(rows: Sequence[Sequence[int]], answers_from: Sequence[int], pad_id: int) -> TextBatch:
    """Return texts as a batch; ``answers_from`` gives each one's first token that is answer."""
    length = max(map(len, rows))
    ids = torch.full((len(rows), length), pad_id)
    real = torch.zeros(len(rows), length, dtype=torch.bool)
    answer = torch.zeros(len(rows), length, dtype=torch.bool)
    for index, (row, first) in enumerate(zip(rows, answers_from, strict=True)):
        ids[index, : len(row)] = torch.tensor(list(row))
        real[index, : len(row)] = True
        answer[index, first : len(row)] = True
    return TextBatch(ids, real, answer[:, 1:])


class FileTexts:
    """Texts of a user's own, as token ids: cut to pieces, in an order drawn anew each time round.

    Parameters
    ----------
    rows
        The texts to train on.
    held_out_rows
        Those to judge by.
    length_tokens
        Longer texts are cut into pieces of so many tokens.
    batch
        Texts a batch.

    Raises
    ------
    ConfigError
        There are not enough.
    """

    def __init__(
        self,
        rows: Sequence[Sequence[int]],
        held_out_rows: Sequence[Sequence[int]],
        *,
        length_tokens: int,
        batch: int,
        seed: int,
        pad_id: int,
    ) -> None:
        self._rows = _pieces(rows, length_tokens)
        self._held_out = _pieces(held_out_rows, length_tokens)
        self._batch, self._seed, self._pad_id = batch, seed, pad_id
        for name, found, least in (
            ("to train on", self._rows, batch),
            ("held out", self._held_out, 1),
        ):
            if len(found) < least:
                raise ConfigError(
                    f"--texts: {len(found)} texts {name} of {LEAST_TOKENS} tokens or more: must be "
                    f"at least {least}"
                )

    def batches(self, start: int) -> Iterator[TextBatch]:
        """Yield the training batches from number ``start`` on."""
        each = len(self._rows) // self._batch
        number = start
        while True:
            turn, place = divmod(number, each)
            order = np.random.default_rng([self._seed, turn]).permutation(len(self._rows))
            chosen = order[place * self._batch : (place + 1) * self._batch]
            yield pad([self._rows[index] for index in chosen], [1] * self._batch, self._pad_id)
            number += 1

    def held_out(self) -> list[TextBatch]:
        """Return the batches of texts that are never trained on."""
        groups = _by_length(self._held_out, self._batch)
        return [pad(group, [1] * len(group), self._pad_id) for group in groups]


class TinyTexts:
    """The bundled model's word problems: those of its training split, and others that were held out.

    The whole text counts in training; in judging, the solution is the answer.
    """

    def __init__(self, tokenizer: Any, *, batch: int, seed: int, num_held_out: int) -> None:
        self._tokenizer = tokenizer
        self._batch, self._seed, self._num_held_out = batch, seed, num_held_out

    def batches(self, start: int) -> Iterator[TextBatch]:
        """Yield the training batches from number ``start`` on, texts of like length together."""
        from traces.tiny.batching import batches
        from traces.tiny.config import TrainConfig

        steps = TrainConfig.focus_until  # only texts, each character with the same weight
        plain = TrainConfig(
            seed=self._seed, batch=self._batch, drills=0, question_weight=1.0, focus_from=10 * steps**2
        )  # fmt: skip
        for found in batches(plain, self._tokenizer, start):
            real = found.ids != self._tokenizer.pad_id
            yield TextBatch(found.ids, real, real[:, 1:])

    def held_out(self) -> list[TextBatch]:
        """Return the first held-out problems of the seed that the bundled evaluation uses."""
        from itertools import islice

        from traces.tiny.data import problems
        from traces.tiny.evaluate import EVAL_SEED

        texts = islice(problems(EVAL_SEED, held_out=True), self._num_held_out)
        encode = self._tokenizer.encode
        rows = [(encode(text.text, bos=True, eos=True), len(text.prompt) + 1) for text in texts]
        rows.sort(key=lambda row: len(row[0]))
        found = []
        for first in range(0, len(rows), self._batch):
            group = rows[first : first + self._batch]
            ids, answers_from = zip(*group, strict=True)
            found.append(pad(ids, answers_from, self._tokenizer.pad_id))
        return found


def _pieces(rows: Sequence[Sequence[int]], length_tokens: int) -> list[list[int]]:
    """Cut texts into pieces; what is too short to predict anything is left out."""
    starts = [(row, first) for row in rows for first in range(0, len(row), length_tokens)]
    found = [list(row[first : first + length_tokens]) for row, first in starts]
    return [piece for piece in found if len(piece) >= LEAST_TOKENS]


def _by_length(rows: Sequence[list[int]], size: int) -> list[list[list[int]]]:
    ordered = sorted(rows, key=len)
    return [ordered[first : first + size] for first in range(0, len(ordered), size)]
