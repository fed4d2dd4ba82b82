"""Files to be written: whether they can be, before any work is done, and then whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from traces.trace import TraceError


def check_out(out: Path, suffix: str | None = ".parquet", called: str = "--out is") -> None:
    """Refuse a path that a file cannot be written to, or that ends in anything but ``suffix``.

    Raises TraceError, in which ``called`` stands before the path.
    """
    if suffix is not None and out.suffix != suffix:
        raise TraceError(f"{called} {out}: must end in {suffix}")
    if out.is_dir():
        raise TraceError(f"{called} {out}: is a folder: must be a file")
    if not out.parent.is_dir():
        raise TraceError(f"{called} {out}: the folder {out.parent} does not exist")
    if not os.access(out.parent, os.W_OK):
        raise TraceError(f"{called} {out}: the folder cannot be written to")


def check_out_folder(folder: Path, called: str = "--out is") -> None:
    """Refuse a path that can neither be a folder to write to nor be made one.

    Raises TraceError, in which ``called`` stands before the path.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        what = "is a file" if there == folder else f"{there} is a file"
        raise TraceError(f"{called} {folder}: {what}: must be a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise TraceError(f"{called} {folder}: the folder {there} cannot be written to")


UNFINISHED = ".tmp-"
"""How a file is called that is not whole yet, or not to last; then comes the number of the process."""


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give a path to write to, which takes the name ``path`` when the block ends well, or vanishes."""
    special = is_special(path)
    partial = path if special else partial_of(path)
    try:
        yield partial
        if not special:
            os.replace(partial, path)
    except OSError as error:
        if error.filename == str(partial):  # speak of the file that is meant
            error.filename = str(path)
        raise
    finally:
        if not special:
            partial.unlink(missing_ok=True)


@contextmanager
def whole_output(path: Path) -> Iterator[Path]:
    """Do as :func:`whole_file`; what the system refuses is a TraceError that names ``path``."""
    try:
        with whole_file(path) as partial:
            yield partial
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else " ".join(str(error).split())
        raise TraceError(f"{path}: {reason}") from None


def partial_of(path: Path) -> Path:
    """Return the name of a file that is not whole yet: it tells which process writes it."""
    if not path.name:
        raise TraceError(f"{path}: is a folder: must be a file")
    return path.with_name(f"{UNFINISHED}{os.getpid()}-{path.name}")


def is_special(path: Path) -> bool:
    """Tell whether a path is a device, a pipe or the like, which is written to and must not be replaced."""
    if path.absolute().parts[1:2] in (("dev",), ("proc",)):
        return True
    return path.exists() and not path.is_file() and not path.is_dir()
