"""Faults in the middle of a real run: a clear error, and no threads, files or memory left behind."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from real.carriers import RAMCarrier, StorageCarrier
from real.copies import Copy, CopyEngine
from real.device import open_device
from real.errors import RealError
from real.insitu import InSitu
from real.kernels import Kernels
from real.rig import build_executor, real_scenario
from real.slots import Arena
from real.store_file import FileStore, read_header
from sim.events import Kind
from sim.types import ConfigError
from tests.real_cases import EXPERTS, MIXED, ONE, TIERS, config_of, ram_store, store_of, tiny_trace
from tests.real_runs import Run, check_same, expected, play, ram_run, run_of


def our_threads() -> set[str]:
    names = {thread.name for thread in threading.enumerate()}
    return {name for name in names if name.startswith(("copies-", "insitu"))}


def open_files() -> set[str]:
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:  # that of the listing itself
            continue
    return found


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(tmp_path: Path) -> Iterator[None]:
    assert not our_threads()
    yield
    assert not our_threads()
    assert not {name for name in open_files() if name.startswith(str(tmp_path))}
    assert {file.name for file in tmp_path.iterdir()} <= {"experts-False.bin", "experts-True.bin"}


def check_fails(run: Run, error: type[BaseException], match: str | None = None) -> None:
    """Check that a run ends with an error of one line, and gives its memory back."""
    with pytest.raises(error, match=match) as caught:
        run.play()
    assert "\n" not in str(caught.value)
    assert run.executor.parts.device.held_bytes == 0
    assert not our_threads()


# -- a copy fails ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "kind"),
    [
        ("lru", Kind.LOAD),
        ("on_demand", Kind.BYPASS),
        ("prefetch_next_gate", Kind.PREFETCH),
        ("saem", Kind.PREFETCH),
    ],
)
def test_a_copy_that_fails_ends_the_run(
    policy: str, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether somebody waits for it or nobody: then the next layer learns of it."""
    carry, failed = RAMCarrier.carry, list[int]()

    def failing(carrier: RAMCarrier, copy: Copy, offset: int, size: int) -> None:
        if copy.kind is kind and copy.key >= EXPERTS and not failed:
            failed.append(copy.key)
            raise RealError("experts.bin: layer 1: Input/output error")
        carry(carrier, copy, offset, size)

    monkeypatch.setattr(RAMCarrier, "carry", failing)
    run = ram_run(config_of(policy, *MIXED))
    check_fails(run, RealError, "^experts.bin: layer 1: Input/output error$")
    assert failed


def test_what_is_there_from_the_beginning_can_fail_too(tmp_path: Path) -> None:
    """The executor is not made then, so that nobody could close it."""
    config = config_of("static", *ONE, tier="storage")
    store = store_of(config, "storage", tmp_path)
    assert isinstance(store, FileStore)
    os.truncate(store.path, read_header(store.path).first_record_bytes)
    scenario, device = real_scenario(config, tiny_trace()), open_device("cpu")
    assert any(scenario.offloader.residency.resident())
    with store, pytest.raises(RealError, match="short read"):
        build_executor(scenario, store, device, TIERS["storage"])
    assert device.held_bytes == 0


# -- the file ------------------------------------------------------------------------------------------------


def change_at(run: Run, number: int, change: Callable[[], None]) -> None:
    """Do something before a step of a run."""
    begin_step, steps = run.executor.begin_step, list[Any]()

    def changed(info: Any) -> None:
        steps.append(info)
        if len(steps) == number:
            change()
        begin_step(info)

    run.executor.begin_step = changed  # type: ignore[method-assign]


@pytest.mark.parametrize("is_cut", [True, False])
@pytest.mark.parametrize("policy", ["on_demand", "prefetch_next_gate"])
def test_a_file_that_changes_under_a_run_ends_it(policy: str, is_cut: bool, tmp_path: Path) -> None:
    config = config_of(policy, *MIXED, tier="storage")
    store = store_of(config, "storage", tmp_path)
    assert isinstance(store, FileStore)
    path, run = store.path, run_of(config, store, TIERS["storage"])
    if is_cut:
        change_at(run, 3, lambda: os.truncate(path, read_header(path).first_record_bytes))
        message = "short read"
    else:
        change_at(run, 3, lambda: os.utime(path, ns=(1, 1)))
        message = "the file changed while in use"
    with store:
        check_fails(run, RealError, message)
    assert 2 <= len(run.executor.tables.steps.rows) <= 3


# -- Ctrl-C ------------------------------------------------------------------------------------------------


def interrupting(function: Callable[..., Any], number: int) -> Callable[..., Any]:
    """Return a function that is interrupted when it is called the ``number``-th time."""
    calls: list[int] = []

    def interrupted(*given: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == number:
            raise KeyboardInterrupt
        return function(*given, **named)

    return interrupted


@pytest.mark.parametrize(
    ("policy", "kind", "name"),
    [
        ("lru", Kernels, "expert"),
        ("ablation_cpu", Kernels, "expert"),  # some of them in threads of the host
        ("ktransformers_deferral", InSitu, "put_back"),
        ("lru", CopyEngine, "wait_for_any"),
        ("on_demand", CopyEngine, "submit"),
        ("prefetch_next_gate", CopyEngine, "take_arrived"),
        ("lfu", Arena, "take"),
    ],
)
def test_an_interrupt_leaves_nothing_behind(
    policy: str, kind: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ram_run(config_of(policy, *MIXED))
    monkeypatch.setattr(kind, name, interrupting(getattr(kind, name), 9))
    check_fails(run, KeyboardInterrupt)
    monkeypatch.undo()
    again = config_of(policy, *MIXED)
    check_same(play(again, lockstep=True), expected(again))  # what tests share is as it was


@pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(),
    reason="signals go to the main thread",
)
@pytest.mark.usefixtures("heeds_sigint")
@pytest.mark.parametrize("tier", ["storage", "link"])
def test_ctrl_c_while_waiting_for_a_copy_leaves_nothing_behind(
    tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes while a thread carries what the main one waits for."""
    kind = StorageCarrier if tier == "storage" else RAMCarrier
    carry, sent = kind.carry, list[int]()

    def signalling(carrier: Any, copy: Copy, offset: int, size: int) -> None:
        if copy.key >= EXPERTS and not sent:
            sent.append(copy.key)
            signal.raise_signal(signal.SIGINT)
        carry(carrier, copy, offset, size)

    monkeypatch.setattr(kind, "carry", signalling)
    config = config_of("on_demand", *ONE, tier=tier)
    store = store_of(config, tier, tmp_path)
    run = run_of(config, store, TIERS[tier])
    check_fails(run, KeyboardInterrupt)
    assert sent
    if tier == "storage":
        store.close()


# -- what cannot begin -------------------------------------------------------------------------------------


def test_blocks_that_are_no_pages_are_refused(tmp_path: Path) -> None:
    config = config_of("lru", *ONE, "engine.storage_block_bytes=5000", tier="storage")
    scenario, device = real_scenario(config, tiny_trace()), open_device("cpu")
    with (
        store_of(config, "storage", tmp_path) as store,
        pytest.raises(ConfigError, match=r"storage_block_bytes = 5000: must be a multiple of 4096"),
    ):
        build_executor(scenario, store, device, TIERS["storage"])
    assert device.held_bytes == 0


def test_memory_that_cannot_be_had_is_told_of() -> None:
    config = config_of("lru", *ONE)
    scenario, device = real_scenario(config, tiny_trace()), open_device("cpu")

    def refuse(num_bytes: int) -> Any:
        raise RealError(f"{num_bytes} bytes cannot be had")

    device.buffer = refuse  # type: ignore[method-assign]
    with pytest.raises(RealError, match=r"\d+ bytes cannot be had"):
        build_executor(scenario, ram_store(False), device, TIERS["ram"])


def test_a_store_of_other_experts_is_refused() -> None:
    config = config_of("hobbit", *ONE)
    scenario, device = real_scenario(config, tiny_trace()), open_device("cpu")
    with pytest.raises(ConfigError, match="must be 3 layers of 8 with low copies"):
        build_executor(scenario, ram_store(False), device, TIERS["ram"])
    assert device.held_bytes == 0
