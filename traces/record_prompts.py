"""The prompts of a recording: a file with one on each line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class UsageError(Exception):
    """What the user asked for cannot be done; the message is one line."""


def prompt_lines(path: Path, wanted: int | None) -> list[tuple[str, Any]]:
    """Return (where, prompt) of the first ``wanted`` prompts of a file; None is all of them.

    A line of a ``.jsonl`` file is any JSON value, of an object that under ``tokens``, ``messages``
    or ``prompt``; a line of another file is text. Blank lines count for nothing. Raises UsageError
    for a file that cannot be read or has too few.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    prompts = []
    for number, line in enumerate(lines, start=1):
        where = f"{path} line {number}"
        if line.strip():
            prompts.append((where, _parsed(line, where) if path.suffix == ".jsonl" else line))
    if not prompts or (wanted or 0) > len(prompts):
        raise UsageError(f"{path} has {len(prompts)} prompts: must have {wanted or 1}")
    return prompts[:wanted]


def _parsed(line: str, where: str) -> Any:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not JSON: {error}") from error
    if isinstance(value, dict):
        value = value.get("tokens", value.get("messages", value.get("prompt")))
    return value
