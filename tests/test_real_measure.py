"""Measuring: turns that interleave, probes that do what they say, and a file that leaves nothing behind."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from hwmodels.microbench import Measurement
from real import measure_storage
from real.device import CPUDevice
from real.experts import ExpertFormat
from real.kernels import Kernels
from real.machine_facts import FileSystem
from real.measure import Facts, Samples, take_turns
from real.measure_beside import Beside
from real.measure_copies import copy_probe
from real.measure_host import InSituProbe
from real.measure_kernels import KernelProbe
from real.measure_plan import DTYPES, Setting, fill_pools, plan
from real.measure_rows import rows_of, summary_of
from real.measure_storage import FILE_NAME, RECORD_BYTES, open_scratch
from real.weight_pool import WeightPool, plain_format, pool_bytes
from sim.types import ConfigError
from tests.measured_sizes import KIB, MIB, SMALL

torch.set_num_threads(1)


class Clock:
    """A clock that goes on by what is done."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Fake:
    """A piece of work that takes a second of a clock and says that it took ``time_ns``."""

    def __init__(self, name: str, log: list[str], clock: Clock, time_ns: float = 4e6) -> None:
        self.facts: Facts = {"kind": name}
        self._log, self._clock, self._time_ns = log, clock, time_ns

    def run(self) -> float:
        self._log.append(str(self.facts["kind"]))
        self._clock.now += 1
        return self._time_ns


# -- turns -----------------------------------------------------------------------------------------


def test_every_piece_has_its_turn_before_any_has_another() -> None:
    log: list[str] = []
    clock = Clock()
    found = take_turns([Fake(name, log, clock) for name in "abcd"], 19.5, clock=clock)
    rounds = [log[i : i + 4] for i in range(0, 20, 4)]
    assert all(sorted(one) == list("abcd") for one in rounds)
    assert len({tuple(one) for one in rounds}) > 1  # in another order each time
    assert found.num_rounds == 4  # the fifth was cut by the time
    # the first round warms up
    assert Counter(log[4:]) == {s.facts["kind"]: len(s.times_ns) for s in found.samples}


def test_short_work_is_repeated_within_its_turn_and_long_work_is_not() -> None:
    log: list[str] = []
    clock = Clock()
    probes = [Fake("short", log, clock, 1e5), Fake("long", log, clock, 9e6)]
    found = take_turns(probes, 14, clock=clock)
    times = {str(s.facts["kind"]): len(s.times_ns) for s in found.samples}
    assert times == {"short": 5 * times["long"], "long": times["long"]}


def test_the_same_seed_gives_the_same_order_and_another_seed_another() -> None:
    def order(seed: int) -> list[str]:
        log: list[str] = []
        clock = Clock()
        take_turns([Fake(n, log, clock) for n in "abcdefgh"], 40, seed=seed, clock=clock)
        return log

    assert order(3) == order(3) != order(4)


def test_ctrl_c_ends_the_turns_and_keeps_what_was_measured() -> None:
    log: list[str] = []
    clock = Clock()

    class Stopped(Fake):
        def run(self) -> float:
            if clock.now >= 9:
                raise KeyboardInterrupt
            return super().run()

    found = take_turns([Stopped(name, log, clock) for name in "abc"], 100, clock=clock)
    assert found.was_cut
    assert [len(samples.times_ns) for samples in found.samples] == [2, 2, 2]


def test_work_beside_other_work_keeps_both_times_and_both_ratios() -> None:
    class Other:
        left, is_beside = 0, False

        def __init__(self) -> None:
            self.facts: Facts = {"kind": "copy"}

        def start(self, count: int) -> None:
            self.left = count

        def is_running(self) -> bool:
            self.is_beside = self.left > 0
            self.left -= 1
            return self.is_beside

        def finish(self) -> float:
            ended, self.left = (30.0 if self.left < 0 else 20.0), 0
            self.is_beside = False
            return ended

    other = Other()

    class Work:
        def __init__(self) -> None:
            self.facts: Facts = {"kind": "expert_gpu"}

        def run(self) -> float:
            return 12.0 if other.is_beside else 10.0

    pair = Beside(Work(), other, ("kernels", "copies"), 4)
    assert pair.run() == ((12.0, 30.0), (1.2, 1.5))
    assert [facts["beside"] for facts in pair.facts] == ["copies", "kernels"]
    found = take_turns([pair], 2.5, clock=iter([i / 10 for i in range(1000)]).__next__)
    assert set(found.ratios["kernels_beside_copies"]) == {1.2}
    assert set(found.ratios["copies_beside_kernels"]) == {1.5}


def test_one_interruption_moves_neither_the_median_nor_the_spread() -> None:
    times = [100.0, 104, 96, 102, 98] * 8
    usual, interrupted = Samples({}, times), Samples({}, [*times, 1e6])
    assert interrupted.median_ns == usual.median_ns == 100
    assert interrupted.spread == pytest.approx(usual.spread, rel=0.2)
    assert interrupted.mean_ratio > 100  # which the note of a row tells


def test_a_summary_says_how_work_slowed_down_and_that_it_was_cut() -> None:
    clock = Clock()
    measured = take_turns([Fake("handover", [], clock)], 5, clock=clock)
    measured.was_cut = True
    measured.ratios["kernels_beside_copies"] = [1.0, 1.1, 1.2, 5.0]
    told = summary_of(measured, {"cpu": "x"}, {"threads": 1})
    assert told["stopped_early"]
    assert told["slowdown"]["kernels_beside_copies"]["median"] == pytest.approx(1.15)


# -- memory ----------------------------------------------------------------------------------------


def test_a_pool_is_gone_through_before_any_of_it_comes_again() -> None:
    pool = WeightPool(CPUDevice().buffer(40 * KIB))
    places = [pool.place(size, multiple) for size, multiple in [(9000, 4096), (8192, 8192)] * 3]
    # 8192 behind 24576 + 9000 would begin at 40960, where the pool ends
    assert places == [0, 16384, 24576, 0, 8192, 24576]
    with pytest.raises(ValueError, match="of a pool of 40960"):
        pool.place(41 * KIB, 4096)


def test_a_pool_has_usual_numbers_in_every_dtype() -> None:
    pool = WeightPool(CPUDevice().buffer(1 * MIB))
    for dtype, least in ((torch.float32, 1e-9), (torch.bfloat16, 1e-9), (torch.float16, 1e-7)):
        values = pool.window(512 * KIB).view(dtype).float().abs()
        assert values.isfinite().all()
        assert (values > least).float().mean() > 0.99  # hardly any that is slow to compute with
    assert len(pool.window(64 * KIB).view(torch.int8).unique()) > 100


def test_a_pool_is_far_larger_than_the_caches_unless_memory_is_short() -> None:
    assert pool_bytes(300 * MIB, 100 << 30, MIB) == 1200 * MIB
    assert pool_bytes(300 * MIB, 600 * MIB, MIB) == 100 * MIB
    assert pool_bytes(1 * MIB, 100 << 30, 128 * MIB) == 384 * MIB
    assert plain_format(1 * MIB).slot_bytes == 1 * MIB


# -- probes ----------------------------------------------------------------------------------------


def test_copies_bring_the_bytes_alone_and_queued() -> None:
    device = CPUDevice()
    host, target = WeightPool(device.host_buffer(MIB)), WeightPool(device.buffer(MIB), seed=1)
    assert not torch.equal(host.buffer, target.buffer)
    for queued, most in ((0, 4), (2, 2)):
        target.buffer.zero_()
        probe = copy_probe(device, host, target, 256 * KIB, queued=queued)
        assert all(probe.run() > 0 for _ in range(most))
        probe.close()
        assert torch.equal(host.buffer, target.buffer)  # all four places of it, each once


def test_kernels_compute_the_expert_that_the_executor_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, form = CPUDevice(), ExpertFormat(32, 16, "float32")
    pool, seen = WeightPool(device.buffer(4 * form.slot_bytes)), []
    kernels = Kernels(form)
    real = kernels.expert

    def watched(weights: Any, rows: torch.Tensor) -> torch.Tensor:
        seen.append((weights.gate_up.data_ptr(), tuple(rows.shape)))
        return real(weights, rows)

    monkeypatch.setattr(kernels, "expert", watched)
    for probe in (KernelProbe(device, kernels, pool, 5), KernelProbe(device, kernels, pool, 1)):
        assert probe.run() > 0
    inside = InSituProbe(device, kernels, pool, 2, threads=1)
    assert inside.run() > 0
    inside.close()
    assert [shape for _, shape in seen] == [(5, 32), (1, 32), (2, 32)]
    assert len({place for place, _ in seen}) == 3  # weights of another place each time


@pytest.fixture
def small(tmp_path: Path) -> Iterator[tuple[list[Any], Setting]]:
    """All probes of a CPU, tiny."""
    device = CPUDevice()
    with ExitStack() as stack:
        store = stack.enter_context(open_scratch(tmp_path, SMALL.scratch_bytes))
        setting = Setting(device, SMALL, DTYPES["cpu"], 2, 1, store)
        pools = fill_pools(device, SMALL, 1 * MIB, 64 * MIB)
        yield plan(setting, pools, stack), setting


def test_all_that_a_machine_needs_is_measured_once_and_is_a_row(
    small: tuple[list[Any], Setting],
) -> None:
    probes, _ = small
    clock = iter(i / 10 for i in range(10**6)).__next__
    found = take_turns(probes, 0.2 * 2.4 * len(probes), clock=clock)
    rows = rows_of(found, "here")
    read = [
        Measurement.from_mapping({k: v for k, v in row.items() if k not in ("machine", "note")}, "")
        for row in rows
    ]
    names = [(one.kind, *one.arguments.items()) for one in read]
    assert len(set(names)) == len(names)
    kinds = {"expert_gpu", "expert_cpu", "gemv", "gemm", "attention", "launch", "launch_issue"}
    kinds |= {"copy", "copy_issue", "handover", "storage", "storage_read"}
    assert {one.kind for one in read} == kinds
    experts = [one.arguments for one in read if one.kind == "expert_gpu"]
    alone = {(a["bits"], a["num_tokens"]) for a in experts if a["beside"] == "nothing"}
    assert alone == {(bits, n) for bits in (8, 16, 32) for n in SMALL.tokens}
    assert {one.arguments["threads"] for one in read if one.kind == "expert_cpu"} == {1, 2}
    assert set(found.ratios) == {
        f"{a}_beside_{b}"
        for one, other in (("kernels", "copies"), ("kernels", "reads"), ("kernels", "cpu_experts"),
                           ("cpu_experts", "copies"))
        for a, b in ((one, other), (other, one))
    }  # fmt: skip


def test_blocks_come_from_all_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    with open_scratch(tmp_path, 2 * RECORD_BYTES) as store:
        real = store.read

        def read(key: int, offset: int, target: torch.Tensor) -> None:
            seen.append((key, offset))
            real(key, offset, target)

        monkeypatch.setattr(store, "read", read)
        memory = WeightPool(CPUDevice().host_buffer(2 * MIB))
        probe = measure_storage.BlockProbe(store, memory, 64 * KIB, 4)
        assert probe.run() > 0
        probe.close()
    assert len(seen) == 16
    assert len({offset for _, offset in seen}) > 8
    assert {key for key, _ in seen} == {0, 1}


# -- the scratch file ------------------------------------------------------------------------------


def test_a_scratch_file_has_no_name_while_it_is_used(tmp_path: Path) -> None:
    with open_scratch(tmp_path, 2 * RECORD_BYTES) as store:
        assert list(tmp_path.iterdir()) == []
        store.verify(1)


def test_a_kept_scratch_file_serves_again(tmp_path: Path) -> None:
    open_scratch(tmp_path, 2 * RECORD_BYTES, keep=True).close()
    (path,) = tmp_path.iterdir()
    before = path.stat().st_mtime_ns
    open_scratch(tmp_path, 2 * RECORD_BYTES).close()
    assert path.name == FILE_NAME
    assert path.stat().st_mtime_ns == before
    with pytest.raises(ConfigError, match="must hold 1 layers x 3 experts"):
        open_scratch(tmp_path, 3 * RECORD_BYTES)


def test_scratch_in_memory_or_nowhere_or_without_space_is_told_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"--scratch .*nowhere: no such folder"):
        open_scratch(tmp_path / "nowhere", MIB)
    usage = os.statvfs(tmp_path)
    with pytest.raises(ConfigError, match=r"bytes free: must have \d+; name another folder"):
        open_scratch(tmp_path, usage.f_bavail * usage.f_frsize)
    tmpfs = FileSystem("tmpfs", "tmpfs", "")
    monkeypatch.setattr(measure_storage, "file_system_of", lambda path: tmpfs)
    with pytest.raises(ConfigError, match=r"lies in memory \(tmpfs\); must be a folder on storage"):
        open_scratch(tmp_path, MIB)
    assert list(tmp_path.iterdir()) == []
