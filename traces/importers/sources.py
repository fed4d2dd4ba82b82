"""Finds the files of a source, which is one file or a folder with a file a rank, and reads plain ones."""

from __future__ import annotations

import json
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.trace import TraceError

NOT_NPY = (ValueError, TypeError, EOFError, SyntaxError, TokenError, MemoryError)
"""What numpy raises for a damaged ``.npy`` header or body, beside OSError."""


def files_of(path: Path, *suffixes: str) -> list[Path]:
    """Return ``path`` itself, or the files in that folder that end in one of ``suffixes``, by name.

    Raises TraceError if there is none.
    """
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.iterdir() if file.suffix.lower() in suffixes)
    if not found:
        raise TraceError(f"{path}: no file in it ends in {' or '.join(suffixes)}")
    return found


def read_bytes(path: Path) -> bytes:
    """Return what a file holds; raises TraceError if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None


def read_text(path: Path) -> str:
    """Return the text of a file, without the mark that Windows begins it with.

    Raises TraceError if it cannot be read, or is no UTF-8.
    """
    try:
        return read_bytes(path).decode("utf-8-sig")
    except UnicodeError:
        raise TraceError(f"{path}: not UTF-8 text") from None


def read_json(path: Path) -> Any:
    """Return what a JSON file holds; raises TraceError if it cannot be read."""
    try:
        return json.loads(read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}: not JSON: {' '.join(str(error).split())}") from None


def read_npy(path: Path) -> NDArray[Any]:
    """Return the array of a ``.npy`` file; raises TraceError if it cannot be read, or holds objects."""
    try:
        with path.open("rb") as file:
            return np.lib.format.read_array(file, allow_pickle=False)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    except NOT_NPY as error:
        reason = " ".join(str(error).split())[:120]
        raise TraceError(f"{path}: not a whole .npy file of numbers: {reason}") from None
