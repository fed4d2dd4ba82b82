"""Files to be written: whether they can be, before any work is done, and then whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from traces.trace import TraceError


def check_out(out: Path, suffix: str | None = ".parquet") -> None:
    """Refuse a path that a file cannot be written to, or that ends in anything but ``suffix``.

    Raises TraceError, which calls the path ``--out``.
    """
    if suffix is not None and out.suffix != suffix:
        raise TraceError(f"--out is {out}: must end in {suffix}")
    if out.is_dir():
        raise TraceError(f"--out is {out}: is a folder: must be a file")
    if not out.parent.is_dir():
        raise TraceError(f"--out is {out}: the folder {out.parent} does not exist")
    if not os.access(out.parent, os.W_OK):
        raise TraceError(f"--out is {out}: the folder cannot be written to")


def check_out_folder(folder: Path) -> None:
    """Refuse a path that can neither be a folder to write to nor be made one.

    Raises TraceError, which calls the path ``--out``.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        what = "is a file" if there == folder else f"{there} is a file"
        raise TraceError(f"--out is {folder}: {what}: must be a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise TraceError(f"--out is {folder}: the folder {there} cannot be written to")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give a name beside ``path`` to write to, which becomes ``path`` if the block ends well.

    Nothing stays behind otherwise. What the system refuses is a TraceError that names ``path``.
    """
    special = is_special(path)
    temporary = path if special else path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        yield temporary
        if not special:
            temporary.replace(path)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else " ".join(str(error).split())
        raise TraceError(f"{path}: {reason}") from None
    finally:
        if not special:
            temporary.unlink(missing_ok=True)


def is_special(path: Path) -> bool:
    """Tell whether a path is a device, a pipe or the like, which is written to and must not be replaced."""
    if path.absolute().parts[1:2] in (("dev",), ("proc",)):
        return True
    return path.exists() and not path.is_file() and not path.is_dir()
