"""Whose gates are trained: the bundled model, or a Hugging Face MoE from a folder with a user's texts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from real.remoe_texts import FileTexts, Texts, TinyTexts
from sim.types import ConfigError
from traces.record_subject import UsageError, plain_errors

TINY = "tiny"
HELD_OUT_EVERY = 10
"""One text in so many is held out, where no texts were given for it."""


@dataclass(frozen=True, slots=True)
class GateSubject:
    """A model, its tokenizer, the texts for its gates, and what a result says of it."""

    model: Any
    tokenizer: Any
    texts: Texts
    described: Mapping[str, Any]
    is_tiny: bool


def load_gate_subject(
    model: str, texts: Path | None, held_out: Path | None, settings: Mapping[str, Any]
) -> GateSubject:
    """Load what ``--model``, ``--texts`` and ``--held-out`` name; ``settings`` as in conf/remoe.yaml.

    Raises
    ------
    ConfigError
        It cannot be loaded, or texts are missing.
    """
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()  # the command shows its own
    logging.set_verbosity_error()
    train = settings["train"]
    torch.set_num_threads(train["threads"])
    try:
        with plain_errors():
            device = torch.device(train["device"])
            if device.type == "meta":
                raise ConfigError("train.device = meta: must be a device that computes")
            if model == TINY:
                return _tiny(settings, texts, held_out, device)
            return _folder(Path(model), settings, texts, held_out, device)
    except UsageError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise ConfigError(str(error)) from error


def _tiny(
    settings: Mapping[str, Any], texts: Path | None, held_out: Path | None, device: Any
) -> GateSubject:
    import torch

    from traces.tiny.experts import register
    from traces.tiny.model import load_model

    for name, given in (("--texts", texts), ("--held-out", held_out)):
        if given is not None:
            raise ConfigError(
                f"{name} {given}: the bundled model has texts of its own; must be left out"
            )
    train = settings["train"]
    model: Any
    model, tokenizer = load_model()
    model.set_experts_implementation(register())
    found = TinyTexts(
        tokenizer,
        batch=train["batch"],
        seed=train["seed"],
        num_held_out=settings["evaluate"]["texts"],
    )
    model = model.to(device=device, dtype=getattr(torch, train["dtype"]))
    return GateSubject(model, tokenizer, found, _described(TINY, train), True)


def _folder(
    path: Path, settings: Mapping[str, Any], texts: Path | None, held_out: Path | None, device: Any
) -> GateSubject:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from real.remoe_gates import weights_digest

    if not path.is_dir():
        raise ConfigError(f"--model {path}: must be '{TINY}' or a folder")
    if texts is None:
        raise ConfigError("--texts is missing: a model from a folder needs texts to train on")
    known = AutoConfig.from_pretrained(path, local_files_only=True)
    vocabulary = known.get_text_config(decoder=True).vocab_size
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    rows = read_texts(texts, tokenizer, vocabulary)
    kept = None
    if held_out is not None:
        kept = read_texts(held_out, tokenizer, vocabulary, "--held-out")
    if kept is None:
        kept = rows[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
        rows = [
            row for index, row in enumerate(rows) if index % HELD_OUT_EVERY != HELD_OUT_EVERY - 1
        ]
    train = settings["train"]
    found = FileTexts(
        rows,
        kept[: settings["evaluate"]["texts"]],
        length_tokens=train["length"],
        batch=train["batch"],
        seed=train["seed"],
        pad_id=_pad_id(tokenizer),
    )
    dtype = getattr(torch, train["dtype"])
    model = AutoModelForCausalLM.from_pretrained(path, local_files_only=True, dtype=dtype)
    # Neither the folder's name nor the settings tell other texts and weights apart.
    described = _described(path.resolve().name, train) | {
        "texts_sha256": sha256(json.dumps([rows, kept]).encode()).hexdigest(),
        "weights_sha256": weights_digest(model),
    }
    return GateSubject(model.to(device).eval(), tokenizer, found, described, False)


def _described(name: str, train: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a run, besides the loss and the steps, changes what comes out."""
    return {"model": name, **{key: train[key] for key in ("batch", "length", "seed", "dtype")}}


def _pad_id(tokenizer: Any) -> int:
    for name in ("pad_token_id", "eos_token_id"):
        found = getattr(tokenizer, name, None)
        if isinstance(found, int):
            return found
    return 0


def read_texts(
    path: Path, tokenizer: Any, vocabulary: int, flag: str = "--texts"
) -> list[list[int]]:
    """Return token ids of a file's texts, a line each; of a .jsonl strings, ids, or objects with ``text``.

    Ids must be below ``vocabulary``; ``flag`` named the file.

    Raises
    ------
    ConfigError
        The file cannot be read, a line is none of these, or an id is none of the model's.
    """
    try:
        # Not splitlines: a JSON string may hold U+2028 and the like as they are.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{flag} {path}: cannot be read: {reason}") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            found = _parsed(line, f"{path} line {number}") if path.suffix == ".jsonl" else line
            row = found if isinstance(found, list) else list(tokenizer(found)["input_ids"])
            for token in row:
                if not 0 <= token < vocabulary:
                    told = f"token id {token}: must be in 0..{vocabulary - 1}"
                    raise ConfigError(f"{path} line {number}: {told}")
            rows.append(row)
    return rows


def _parsed(line: str, where: str) -> str | list[int]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    if isinstance(found, dict):
        found = found.get("tokens", found.get("text"))
    is_ids = isinstance(found, list) and all(type(token) is int for token in found)
    if not is_ids and not isinstance(found, str):
        raise ConfigError(f"{where}: must be a text, a list of token ids, or an object with 'text'")
    return found
