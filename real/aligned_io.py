"""Reads of whole pages past the page cache, and files that appear complete or not at all.

O_DIRECT moves bytes from the device straight into our memory, where offset, length and address are
multiples of a page. Where a file system refuses it, reads go through the page cache, which is told to
drop what was read: without that a second read would measure memory.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from real.errors import RealError
from real.experts import PAGE_BYTES

O_DIRECT = getattr(os, "O_DIRECT", 0)


class OpenFile(NamedTuple):
    """A file that is open for reading, and whether its reads pass the page cache by."""

    descriptor: int
    is_direct: bool
    why_not: str


def aligned_bytes(num_bytes: int) -> Tensor:
    """Return uint8[num_bytes] of zeros in memory of its own, which begins at a page."""
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8, count=num_bytes)


def bytes_view(target: Tensor) -> memoryview:
    """Return the memory of a contiguous uint8 tensor on the host, without a copy."""
    return target.numpy().data


def open_for_reads(path: Path, direct: bool = True) -> OpenFile:
    """Open a file for page-aligned reads, with O_DIRECT unless it is refused or not wanted.

    Raises
    ------
    RealError
        The file cannot be opened.
    """
    opened: OpenFile | str = "O_DIRECT is not asked for"
    if direct:
        opened = _try_direct(path) if O_DIRECT else "this system has no O_DIRECT"
    if isinstance(opened, OpenFile):
        return opened
    descriptor = _open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # reading ahead would hide the cost
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    return OpenFile(
        descriptor, False, f"{opened}: buffered reads, the page cache dropped after each"
    )


def read_exactly(
    file: OpenFile, path: Path, offset: int, target: memoryview, what: str = "bytes"
) -> None:
    """Fill ``target`` from the file; blocks, and holds no lock meanwhile.

    Raises
    ------
    RealError
        The file ends before, or the device fails.
    """
    done = 0
    while done < len(target):
        try:
            count = os.preadv(file.descriptor, [target[done:]], offset + done)
        except OSError as error:
            raise RealError(
                f"{path}: {what}: cannot read at byte {offset}: {error.strerror}"
            ) from error
        if count == 0 or (file.is_direct and count % PAGE_BYTES and done + count < len(target)):
            raise RealError(
                f"{path}: {what}: short read at byte {offset}: {done + count} of {len(target)} bytes; "
                f"the file was cut, or is not complete"
            )
        done += count
    if not file.is_direct:
        os.posix_fadvise(file.descriptor, offset, len(target), os.POSIX_FADV_DONTNEED)


def write_exactly(descriptor: int, path: Path, offset: int, source: memoryview) -> None:
    """Write all of ``source`` at ``offset``.

    Raises
    ------
    RealError
        No space is left, or the device fails.
    """
    done = 0
    while done < len(source):
        with fault_of(path, "cannot write"):
            done += os.pwrite(descriptor, source[done:], offset + done)


@contextmanager
def fault_of(path: Path, what: str) -> Iterator[None]:
    """Turn an error of the system into a RealError that names the file."""
    try:
        yield
    except OSError as error:
        hint = "; free some, or choose another folder" if error.errno == errno.ENOSPC else ""
        raise RealError(f"{path}: {what}: {error.strerror}{hint}") from error


@contextmanager
def written_whole(path: Path, num_bytes: int) -> Iterator[int]:
    """Give a descriptor to write a file of ``num_bytes``; it gets its name when all went well.

    Space is taken at the start, so that a full device is told of before anything is written. Until the
    end the file has no name where the system can do that, so that even a killed process leaves nothing;
    else it has a temporary one, which goes when anything is raised, Ctrl-C included.

    Raises
    ------
    RealError
        No space, no such folder, or no permission to write there.
    """
    with fault_of(path, "cannot write"):
        descriptor, temporary = _open_nameless(path)
    try:
        with fault_of(path, f"cannot take {num_bytes} bytes"):
            os.posix_fallocate(descriptor, 0, num_bytes)
        yield descriptor
        with fault_of(path, "cannot finish"):
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            if temporary is None:
                temporary = _give_name(descriptor, path)
            os.replace(temporary, path)
            _sync_folder(path.parent)
    except BaseException:
        if temporary is not None:
            with suppress(FileNotFoundError):
                temporary.unlink()
        raise
    finally:
        os.close(descriptor)


def _try_direct(path: Path) -> OpenFile | str:
    """Return the file opened with O_DIRECT, or why that cannot be; one page is read to be sure."""
    if _is_in_memory(path):
        return "the file lies in memory (tmpfs), so that reads measure memory and not storage"
    try:
        descriptor = os.open(path, os.O_RDONLY | O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise RealError(f"{path}: cannot open: {error.strerror}") from error
        return "the file system refuses O_DIRECT"
    try:
        os.preadv(descriptor, [bytes_view(aligned_bytes(PAGE_BYTES))], 0)
    except OSError as error:
        os.close(descriptor)
        return f"a read with O_DIRECT fails ({error.strerror})"
    return OpenFile(descriptor, True, "")


def _is_in_memory(path: Path) -> bool:
    """Tell whether a file's system keeps it in memory, where recent kernels accept O_DIRECT as well."""
    with fault_of(path, "cannot open"):
        device = os.stat(path).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    found = [line.split(" - ")[1].split()[0] for line in mounts if line.split()[2] == name]
    return bool({"tmpfs", "ramfs"} & set(found))


def _open(path: Path, flags: int) -> int:
    with fault_of(path, "cannot open"):
        return os.open(path, flags)


def _temporary_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")


def _open_nameless(path: Path) -> tuple[int, Path | None]:
    """Return a new file in the folder of ``path``, and its temporary name if it has to have one."""
    try:
        return os.open(path.parent, os.O_RDWR | os.O_TMPFILE, 0o644), None
    except (OSError, AttributeError) as error:
        refused = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)
        if isinstance(error, OSError) and error.errno not in refused:
            raise
    temporary = _temporary_name(path)
    return os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644), temporary


def _give_name(descriptor: int, path: Path) -> Path:
    temporary = _temporary_name(path)
    # A folder's descriptor makes Python call linkat, which alone follows the link to the open file.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.link(f"/proc/self/fd/{descriptor}", temporary, src_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)
    return temporary


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
