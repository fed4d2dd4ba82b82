"""What the operating system keeps of files in memory, and what a process read from storage.

A mapped or buffered read is served from the page cache where the pages are there. Linux only in part:
where a call is missing, the functions say so by their result.
"""

from __future__ import annotations

import os
from pathlib import Path

_BLOCK_BYTES = 1 << 22
_READ_BYTES = "read_bytes:"


def write_through(folder: Path) -> None:
    """Wait until the files below ``folder`` are on storage: unwritten pages cannot be dropped."""
    for file in files_below(folder):
        handle = os.open(file, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def drop_pages(folder: Path) -> bool:
    """Drop the cached pages of all files below ``folder``; pages that are mapped now stay.

    Returns False where the platform has no such call. A file system in memory ignores it.
    """
    if not hasattr(os, "posix_fadvise"):
        return False
    for file in files_below(folder):
        handle = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
    return True


def load_pages(folder: Path) -> None:
    """Read all files below ``folder`` once, so that their pages are cached if memory allows."""
    for file in files_below(folder):
        with file.open("rb", buffering=0) as handle:
            while handle.read(_BLOCK_BYTES):
                pass


def storage_bytes_read() -> int | None:
    """Return the bytes this process has caused to be read from storage, read-ahead included.

    None where the system does not count them. Reads that the page cache served do not count.
    """
    try:
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    counts = [line.removeprefix(_READ_BYTES) for line in lines if line.startswith(_READ_BYTES)]
    return int(counts[0]) if counts else None


def read_ahead_bytes(folder: Path) -> int | None:
    """Return how far the system reads ahead on the device below ``folder``; None if no device is known.

    A page fault in a mapped file may read this much, whatever was asked for.
    """
    device = folder.stat().st_dev
    setting = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    try:
        return int(setting.read_text(encoding="ascii")) * 1024
    except (OSError, ValueError):
        return None


def files_below(folder: Path) -> list[Path]:
    """Return all plain files below ``folder``, in order of their names."""
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]
