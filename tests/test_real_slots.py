"""The arena: it holds what it is given, where nobody else's weights lie, and can never be over-filled."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from real.device import open_device
from real.errors import RealError
from real.experts import ExpertFormat
from real.slots import Arena
from tests.strategies import LAW

torch.set_num_threads(1)

FULL = ExpertFormat(16, 8, "float32")
LOW = ExpertFormat(16, 8, "int8", activation_dtype="float32")
NUM_KEYS = 8
"""Of each format: the first eight keys are in full precision."""


def arena_of(full: int = 3, low: int = 2) -> Arena:
    format_of_key = [0] * NUM_KEYS + [1] * NUM_KEYS
    return Arena(open_device("cpu"), (FULL, LOW), (full, low), format_of_key)


@settings(LAW, max_examples=60)
@given(
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    calls=st.lists(st.tuples(st.booleans(), st.integers(0, 2 * NUM_KEYS - 1)), max_size=60),
)
def test_an_arena_can_never_be_overfilled(
    sizes: tuple[int, int], calls: list[tuple[bool, int]]
) -> None:
    arena = arena_of(*sizes)
    num_bytes, held = arena.num_bytes, set[int]()
    for is_take, key in calls:
        of_kind = [other for other in held if other // NUM_KEYS == key // NUM_KEYS]
        is_full = len(of_kind) == sizes[key // NUM_KEYS]
        if is_take and (key in held or is_full):
            with pytest.raises(RuntimeError, match=r"has a slot already|finds no free slot"):
                arena.take(key)
        elif is_take:
            arena.take(key).fill_(key)
            held.add(key)
        elif key in held:
            arena.free(key)
            held.remove(key)
        else:
            with pytest.raises(RuntimeError, match=f"key {key} has no slot"):
                arena.free(key)
        assert arena.keys() == held
        taken = [sum(other // NUM_KEYS == kind for other in held) for kind in (0, 1)]
        assert arena.num_free == [size - used for size, used in zip(sizes, taken, strict=True)]
        for other in held:  # nobody wrote over anybody
            assert (arena.weights(other).down.contiguous().view(torch.uint8) == other).all()
    assert arena.num_bytes == num_bytes == sizes[0] * FULL.slot_bytes + sizes[1] * LOW.slot_bytes


def test_a_full_arena_says_so() -> None:
    arena = arena_of(full=2)
    arena.take(0)
    arena.take(1)
    with pytest.raises(RuntimeError, match="key 2 finds no free slot: all 2 are taken"):
        arena.take(2)
    arena.take(NUM_KEYS)  # the other format has room of its own
    arena.free(1)
    arena.take(2)


def test_weights_and_stacked_weights_are_the_bytes_of_the_slot() -> None:
    arena = arena_of()
    for key in (5, 2, 9):
        row = arena.take(key)
        row.copy_(torch.arange(row.numel(), dtype=torch.int64).add(key).to(torch.uint8))
        form = (FULL, LOW)[arena.format_index(key)]
        stacked = arena.stacked(arena.format_index(key))
        for part, wanted in form.view(row)._asdict().items():
            found = getattr(arena.weights(key), part)
            if wanted is None:
                assert found is None
                continue
            assert found.data_ptr() == wanted.data_ptr()
            assert getattr(stacked, part)[arena.slot_of(key)].data_ptr() == wanted.data_ptr()


def test_memory_is_taken_once_and_given_back_once() -> None:
    device = open_device("cpu")
    arena = Arena(device, (FULL,), (3,), [0] * NUM_KEYS)
    assert device.held_bytes == arena.num_bytes == 3 * FULL.slot_bytes
    arena.close()
    arena.close()
    assert device.held_bytes == 0
    assert device.peak_bytes() == 3 * FULL.slot_bytes


def test_an_arena_without_a_slot_is_refused_before_any_memory_is_taken() -> None:
    device = open_device("cpu")
    with pytest.raises(RealError, match="an arena of 0 slots of 4096 bytes: must be >= 1"):
        Arena(device, (FULL, LOW), (3, 0), [0] * NUM_KEYS)
    assert device.held_bytes == 0
