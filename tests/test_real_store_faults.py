"""Faults of a file of experts and of its build: each is a clear error, and nothing is left behind."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from real.aligned_io import aligned_bytes
from real.errors import RealError
from real.experts import ExpertFormat, ExpertWeights
from real.store import shape_of
from real.store_file import FileStore, build_file, read_header
from real.synthetic import Synthetic
from sim.types import ConfigError

torch.set_num_threads(1)

FORMAT = ExpertFormat(48, 32, "bfloat16")  # 9,216 bytes in a slot of 12,288
SOURCE = Synthetic(3, 5, FORMAT, seed=2)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return build_file(SOURCE, tmp_path / "experts.bin")


def record(store: FileStore, key: int) -> torch.Tensor:
    target = aligned_bytes(store.format_of(key).slot_bytes)
    store.read(key, 0, target)
    return target


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


# -- faults of a file ----------------------------------------------------------------------------------


def test_a_corrupt_record_is_found_and_named(path: Path) -> None:
    first = read_header(path).first_record_bytes
    at = first + 7 * 12288 + 100
    byte = path.read_bytes()[at]
    overwrite(path, at, bytes([byte ^ 1]))
    with FileStore(path) as store:
        store.verify(6)
        with pytest.raises(RealError, match="layer 1, expert 2: its checksum is wrong"):
            store.verify(7)
        with pytest.raises(RealError, match="layer 1, expert 2"):
            store.verify()


def test_a_file_that_is_cut_under_a_run_is_a_short_read(path: Path) -> None:
    first = read_header(path).first_record_bytes
    for direct in (True, False):
        build_file(SOURCE, path)
        with FileStore(path, direct=direct) as store:
            os.truncate(path, first + 14 * 12288 + 4096)
            record(store, 13)
            with pytest.raises(
                RealError, match=r"layer 2, expert 4: short read.*4096 of 12288 bytes"
            ):
                record(store, 14)
            with pytest.raises(RealError, match="changed while in use"):
                store.check_unchanged()


def touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def replace_by_equal(path: Path) -> None:
    stamps = path.stat()
    build_file(SOURCE, path)
    os.utime(path, ns=(stamps.st_atime_ns, stamps.st_mtime_ns))


@pytest.mark.parametrize("change", [touch, replace_by_equal, lambda path: os.truncate(path, 9)])
def test_a_file_that_changes_under_a_run_is_told_of(
    path: Path, change: Callable[[Path], None]
) -> None:
    with FileStore(path) as store:
        store.check_unchanged()
        change(path)
        with pytest.raises(RealError, match="the file changed while in use"):
            store.check_unchanged()


def test_a_file_that_goes_away_is_told_of(path: Path) -> None:
    with FileStore(path) as store:
        path.unlink()
        record(store, 14)  # what is open stays readable
        with pytest.raises(RealError, match="the file went away while in use: No such file"):
            store.check_unchanged()


@pytest.mark.parametrize(
    ("offset", "data", "message"),
    [
        (0, b"PK", "is no file of experts"),
        (8, b"\7\0\0\0", "version = 7: must be 1"),
        (12, b"\xff\xff\xff\xff", "its header is damaged"),
        (40, b"!", "its header is damaged"),
        (16, b"\0\0\0\0", "its header is damaged"),
    ],
)
def test_a_wrong_header_is_told_of(path: Path, offset: int, data: bytes, message: str) -> None:
    overwrite(path, offset, data)
    with pytest.raises(RealError, match=message):
        FileStore(path)


def test_no_damage_of_the_header_goes_unseen(path: Path) -> None:
    whole = path.read_bytes()
    used = len(whole[:4096].rstrip(b"\0"))
    for offset in range(0, used, 7):
        overwrite(path, offset, bytes([whole[offset] ^ 0x11]))
        with pytest.raises(RealError):
            FileStore(path)
        overwrite(path, offset, whole[offset : offset + 1])
    FileStore(path).close()


@pytest.mark.parametrize(("kept", "message"), [(4, "is no file"), (60, "header is damaged")])
def test_a_file_cut_in_its_header_is_told_of(path: Path, kept: int, message: str) -> None:
    os.truncate(path, kept)
    with pytest.raises(RealError, match=message):
        FileStore(path)


@pytest.mark.parametrize("change_bytes", [-4096, 1])
def test_a_file_of_another_length_is_told_of(path: Path, change_bytes: int) -> None:
    os.truncate(path, path.stat().st_size + change_bytes)
    with pytest.raises(RealError, match=r"has \d+ bytes: must have \d+, as its header says"):
        FileStore(path)


def test_a_missing_file_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(RealError, match=r"none\.bin: cannot open: No such file"):
        FileStore(tmp_path / "none.bin")


def test_a_file_of_other_experts_is_told_of(path: Path) -> None:
    wanted = shape_of(Synthetic(3, 4, ExpertFormat(48, 32, "float32")))
    message = (
        "holds 3 layers x 5 experts of 48 x 32 bfloat16: must hold 3 layers x 4 experts "
        "of 48 x 32 float32"
    )
    with pytest.raises(ConfigError, match=message):
        FileStore(path, wanted)


# -- faults of a build -----------------------------------------------------------------------------------


class Watched(Synthetic):
    """A source that does something at its eighth expert."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__(3, 5, FORMAT)
        self.act = act

    def expert(self, layer: int, expert: int) -> ExpertWeights:
        if (layer, expert) == (1, 2):
            self.act()
        return super().expert(layer, expert)


def refuse_nameless(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = os.open

    def opened(name: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return plain(name, flags, *rest, **named)

    monkeypatch.setattr(os, "open", opened)


@pytest.mark.parametrize("is_nameless", [True, False])
def test_an_interrupted_build_leaves_nothing_and_keeps_what_was_there(
    is_nameless: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    if not is_nameless:
        refuse_nameless(monkeypatch)
    path = tmp_path / "experts.bin"
    path.write_bytes(b"before")
    with pytest.raises(KeyboardInterrupt):
        build_file(Watched(interrupt), path)
    assert os.listdir(tmp_path) == ["experts.bin"]
    assert path.read_bytes() == b"before"
    build_file(SOURCE, path)
    assert os.listdir(tmp_path) == ["experts.bin"]
    FileStore(path).close()


def test_a_file_has_no_name_before_it_is_whole(tmp_path: Path) -> None:
    try:
        os.close(os.open(tmp_path, os.O_RDWR | os.O_TMPFILE))
    except OSError:
        pytest.skip("this file system has no files without a name")
    seen: list[list[str]] = []
    build_file(Watched(lambda: seen.append(os.listdir(tmp_path))), tmp_path / "experts.bin")
    assert seen == [[]]  # so that not even a killed process leaves anything


def full_device(*arguments: Any) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("is_nameless", [True, False])
@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "fsync"])
def test_no_space_is_told_of_and_nothing_is_left(
    call: str, is_nameless: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_nameless:
        refuse_nameless(monkeypatch)
    monkeypatch.setattr(os, call, full_device)
    with pytest.raises(RealError, match="No space left on device; free some") as caught:
        build_file(SOURCE, tmp_path / "experts.bin")
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_not_there_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(RealError, match="cannot write: No such file"):
        build_file(SOURCE, tmp_path / "nowhere" / "experts.bin")
