"""Carriers: every byte comes, a throttled link is never faster than it says, no copy is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from real.carriers import RAMCarrier, StorageCarrier, ThrottledCarrier
from real.copies import Carrier, Copy, CopyEngine
from real.device import open_device
from real.experts import ExpertFormat
from real.store import build_ram
from real.store_file import FileStore, build_file
from real.synthetic import Synthetic
from sim.events import Kind
from sim.types import ConfigError
from tests.strategies import LAW

torch.set_num_threads(1)

SOURCE = Synthetic(2, 6, ExpertFormat(32, 32, "float32"))  # three pages each
STORE = build_ram(SOURCE, open_device("cpu"))


def drain(engine: CopyEngine) -> list[Copy]:
    """Wait for all that is under way."""
    found = []
    while engine.num_under_way or engine.has_news:
        found += engine.wait()
    return found


# -- carriers ----------------------------------------------------------------------------------------------


def carriers(folder: Path) -> Iterator[tuple[str, Carrier]]:
    device = open_device("cpu")
    yield "ram", RAMCarrier(STORE, device)
    yield "ram in chunks", RAMCarrier(STORE, device, chunks=3)
    yield "link", ThrottledCarrier(RAMCarrier(STORE, device, chunks=2), 200_000_000, 1_000)
    path = build_file(SOURCE, folder / "experts.bin")
    for block_bytes, depth in ((4096, 3), (8192, 2), (1 << 20, 32)):
        with FileStore(path) as store:
            yield f"storage {block_bytes}", StorageCarrier(store, device, block_bytes, depth)


def test_every_carrier_brings_every_byte(tmp_path: Path) -> None:
    for name, carrier in carriers(tmp_path):
        arena = open_device("cpu").buffer(12 * 12_288).view(12, -1)
        with CopyEngine(carrier) as engine:
            for key in range(12):
                kind = Kind.PREFETCH if key % 3 else Kind.LOAD
                engine.submit(Copy(key, kind, arena[key]))
            assert sorted(copy.key for copy in drain(engine)) == list(range(12))
        for key in range(12):
            assert torch.equal(arena[key], STORE.bytes_of(key)), name


@pytest.mark.parametrize("num_pieces", [1, 3])
def test_an_emulated_link_is_never_faster_than_its_rate(num_pieces: int) -> None:
    rate, setup_ns = 100_000_000, 30_000
    inner = RAMCarrier(STORE, open_device("cpu"), chunks=num_pieces)
    with CopyEngine(ThrottledCarrier(inner, rate, setup_ns)) as engine:
        for keys in ((0, 1, 2), (3,), (4, 5)):
            kinds = [Kind.PREFETCH if key % 2 else Kind.LOAD for key in keys]
            targets = torch.empty(len(keys), 12_288, dtype=torch.uint8)
            copies = list(map(Copy, keys, kinds, targets))
            for copy in copies:
                engine.submit(copy)
            drain(engine)  # the link is idle, so that the next one has its setup again
            least_ns = setup_ns + sum(copy.num_bytes for copy in copies) * 1_000_000_000 // rate
            ends_ns = max(copy.end_ns for copy in copies)
            assert ends_ns - copies[0].queued_ns >= least_ns


def test_carriers_refuse_what_they_cannot_do(tmp_path: Path) -> None:
    device = open_device("cpu")
    with FileStore(build_file(SOURCE, tmp_path / "experts.bin")) as store:
        for wrong in (0, 100, 5000):
            with pytest.raises(ConfigError, match=f"storage_block_bytes = {wrong}: must be"):
                StorageCarrier(store, device, wrong, 4)
        with pytest.raises(ConfigError, match="one piece at a time"):
            ThrottledCarrier(StorageCarrier(store, device, 4096, 4), 1000)
    with pytest.raises(ConfigError, match="link_bytes_per_s = 0: must be >= 1"):
        ThrottledCarrier(RAMCarrier(STORE, device), 0)


# -- all together --------------------------------------------------------------------------------------------

OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["demand", "ahead", "promote", "cancel", "hold"]), st.integers(0, 11)
    ),
    max_size=40,
)


@settings(LAW)
@given(operations=OPERATIONS, chunks=st.sampled_from([1, 3]))
def test_every_copy_comes_once_or_was_dropped_before_it_began(
    operations: list[tuple[str, int]], chunks: int
) -> None:
    asked: dict[int, Copy] = {}
    with CopyEngine(RAMCarrier(STORE, open_device("cpu"), chunks)) as engine:
        for what, key in operations:
            with engine.held():
                is_under_way = key in engine._under_way
                if what in ("demand", "ahead") and key not in asked:
                    kind = Kind.LOAD if what == "demand" else Kind.PREFETCH
                    asked[key] = Copy(key, kind, torch.zeros(12_288, dtype=torch.uint8))
                    engine.submit(asked[key])
                elif what == "promote" and is_under_way:
                    engine.promote(key)
                elif what == "cancel" and engine.cancel(key):
                    assert asked.pop(key).begin_ns == -1
        arrived = drain(engine)
        started = engine.take_started()
    assert sorted(copy.key for copy in arrived) == sorted(asked)
    assert {id(copy) for copy in started} == {id(copy) for copy in arrived}
    assert [copy.begin_ns for copy in started] == sorted(copy.begin_ns for copy in started)
    for copy in arrived:
        assert torch.equal(copy.target, STORE.bytes_of(copy.key))
