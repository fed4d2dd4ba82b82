"""Experts in host memory and in a file: the same bytes, however they are read."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from real.aligned_io import aligned_bytes
from real.device import open_device
from real.experts import ExpertFormat, dequantise
from real.store import RAMStore, StoreShape, build_ram, shape_of, with_low_copies
from real.store_file import FileStore, build_file, read_header
from real.synthetic import Synthetic
from sim.types import ConfigError

torch.set_num_threads(1)

FORMAT = ExpertFormat(48, 32, "bfloat16")  # 9,216 bytes in a slot of 12,288
SOURCE = Synthetic(3, 5, FORMAT, seed=2)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return build_file(SOURCE, tmp_path / "experts.bin")


def record(store: FileStore, key: int) -> Tensor:
    target = aligned_bytes(store.format_of(key).slot_bytes)
    store.read(key, 0, target)
    return target


def in_ram(source: Any) -> RAMStore:
    return build_ram(source, open_device("cpu"))


@pytest.mark.parametrize("source", [SOURCE, with_low_copies(SOURCE, "int8")])
@pytest.mark.parametrize("direct", [True, False])
def test_memory_and_file_hold_the_weights_of_the_source(
    source: Any, direct: bool, tmp_path: Path
) -> None:
    path = build_file(source, tmp_path / "experts.bin")
    with in_ram(source) as memory, FileStore(path, shape_of(source), direct) as file:
        assert memory.shape == file.shape
        assert len(memory.keys) == 15 * memory.num_copies
        for key in range(len(memory.keys)):
            assert torch.equal(memory.bytes_of(key), record(file, key))
        for key in range(15):
            view = FORMAT.view(memory.bytes_of(key))
            assert torch.equal(view.gate_up, source.expert(key // 5, key % 5).gate_up)
            assert torch.equal(view.down, source.expert(key // 5, key % 5).down)
        file.verify()


def test_low_copies_are_banks_of_their_own_near_the_full_ones() -> None:
    with in_ram(with_low_copies(SOURCE, "int8")) as store:
        assert [format.dtype for format in store.formats] == ["bfloat16"] * 3 + ["int8"] * 3
        assert store.num_layers == 3
        assert store.num_copies == 2
        key = store.keys.key(1, 3)
        low = store.format_of(store.keys.low(key)).view(store.bytes_of(store.keys.low(key)))
        exact = FORMAT.view(store.bytes_of(key)).down.float()
        assert low.down_scale is not None
        error = (dequantise(low.down, low.down_scale) - exact).abs()
        assert (error <= low.down_scale[:, None] / 2 * 1.001).all()
        assert error.any()
        assert store.format_of(store.keys.low(key)).compute_dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16", "int9"])
def test_low_copies_must_be_smaller(dtype: str) -> None:
    with pytest.raises(ConfigError, match=f"dtype = {dtype}: must be smaller than bfloat16"):
        with_low_copies(SOURCE, dtype)


def test_records_are_whole_pages_one_after_another(path: Path) -> None:
    header = read_header(path)
    assert header.first_record_bytes % 4096 == 0
    assert path.stat().st_size == header.first_record_bytes + 15 * 12288
    assert header.source == {"kind": "synthetic", "seed": 2, "std": 0.02}
    with in_ram(SOURCE) as memory:
        data = path.read_bytes()[header.first_record_bytes :]
        assert data == b"".join(memory.bytes_of(key).numpy().tobytes() for key in range(15))
        assert memory.bytes_of(4).data_ptr() % 4096 == 0


def test_equal_sources_make_equal_files(path: Path, tmp_path: Path) -> None:
    again = build_file(Synthetic(3, 5, FORMAT, seed=2), tmp_path / "again.bin")
    assert again.read_bytes() == path.read_bytes()


def test_progress_counts_the_experts(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    build_file(SOURCE, tmp_path / "x.bin", lambda done, total: seen.append((done, total)))
    build_ram(SOURCE, open_device("cpu"), lambda done, total: seen.append((done, total)))
    assert seen == [(n, 15) for n in range(1, 16)] * 2


def test_pieces_are_read_by_many_threads_at_once(path: Path) -> None:
    with in_ram(SOURCE) as memory, FileStore(path) as file:

        def read(job: int) -> bool:
            key, page = divmod(job % 45, 3)
            target = aligned_bytes(4096)
            file.read(key, page * 4096, target)
            return torch.equal(target, memory.bytes_of(key)[page * 4096 : (page + 1) * 4096])

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(read, range(450)))


@pytest.mark.parametrize(
    ("offset", "target", "message"),
    [
        (1, aligned_bytes(4096), "multiples of 4096"),
        (0, aligned_bytes(8192)[:100], "multiples of 4096"),
        (0, aligned_bytes(8192)[64 : 64 + 4096], "multiples of 4096"),
        (8192, aligned_bytes(8192), "outside a record of 12288"),
        (-4096, aligned_bytes(4096), "outside a record of 12288"),
    ],
)
def test_a_read_outside_the_rules_is_refused(
    path: Path, offset: int, target: Tensor, message: str
) -> None:
    with FileStore(path) as store, pytest.raises(ValueError, match=message):
        store.read(0, offset, target)


def test_a_closed_store_reads_no_more_and_closes_twice(path: Path) -> None:
    file, memory = FileStore(path), in_ram(SOURCE)
    for store in (file, memory, file, memory):
        store.close()
    with pytest.raises(ValueError, match="the store is closed"):
        file.read(0, 0, aligned_bytes(4096))
    with pytest.raises(ValueError, match="the store is closed"):
        memory.bytes_of(0)


def test_open_files_are_given_back(path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        FileStore(path).close()
        build_file(SOURCE, path)
        with pytest.raises(ConfigError):
            FileStore(path, StoreShape(1, 1, (FORMAT,)))
    assert len(os.listdir("/proc/self/fd")) == before


# -- without O_DIRECT ----------------------------------------------------------------------------------


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = os.open

    def opened(name: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_DIRECT == os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return plain(name, flags, *rest, **named)

    monkeypatch.setattr(os, "open", opened)


def test_without_o_direct_reads_are_buffered_and_it_says_so(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("real.aligned_io._is_in_memory", lambda path: False)
    refuse_direct(monkeypatch)
    with FileStore(path) as store:
        assert not store.is_direct
        assert store.why_not.startswith("the file system refuses O_DIRECT: buffered reads")
        store.verify()


def test_a_file_in_memory_is_no_storage(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("real.aligned_io._is_in_memory", lambda path: True)
    with FileStore(path) as store:
        assert not store.is_direct
        assert "tmpfs" in store.why_not


def is_cached(path: Path, offset: int) -> bool:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.preadv(descriptor, [bytearray(4096)], offset, os.RWF_NOWAIT) == 4096
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)


def test_a_buffered_read_leaves_nothing_in_the_page_cache(path: Path) -> None:
    first = read_header(path).first_record_bytes
    path.read_bytes()
    try:
        if not is_cached(path, first):
            pytest.skip("this file system keeps nothing in the page cache")
    except OSError as error:
        pytest.skip(f"this file system does not tell what it has cached: {error}")
    with FileStore(path, direct=False) as store:

        def leaves_nothing() -> bool:
            record(store, 0)
            return not is_cached(path, first)

        # The kernel may keep a page that it works on when it is told that nobody needs it.
        assert any(leaves_nothing() for _ in range(20))


@pytest.mark.cuda
def test_host_memory_is_pinned_and_copies_to_the_device() -> None:
    device = open_device("cuda")
    with build_ram(SOURCE, device) as store:
        assert store.bytes_of(0).is_pinned()
        target = device.buffer(12288)
        device.copy(target, store.bytes_of(7))
        assert torch.equal(device.to_host(target), store.bytes_of(7))
