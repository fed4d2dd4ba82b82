"""The simulator against this machine: the same policies measured and predicted in the same minutes.

In order: decisions compared in lockstep | a first look at each block, by its references | distance to the
limit | block by block, all runs turn and turn about, then their prediction. No printing, no files but
temporary ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

from hwmodels.model_shape import ModelShape
from real.device import Device, open_device
from real.experts import ExpertFormat
from real.limits import LimitResult, against_peer, distance_to_limit
from real.machine_facts import machine_facts, num_cores, storage_facts
from real.measure_kernels import torch_threads
from real.observed import Observed, sum_of
from real.rig import format_of_model
from real.store import Store
from real.store_file import FileStore
from real.validate_blocks import (
    Block,
    blocks_of,
    config_of_runs,
    dtype_of,
    host_policies,
    room_bytes_of,
    run_bytes_of,
    setting_of,
    tiny_setting,
)
from real.validate_config import Matrix
from real.validate_machine import first_guess, machine_of
from real.validate_parity import TINY, Parity, check_parity
from real.validate_predict import predict
from real.validate_result import Played, Silent, Validation, Watch
from real.validate_runs import Run, Setting, decode_ns, opened, take_turns
from real.validate_stores import Stores
from sim.build import load_trace
from sim.bundled import trace_name
from sim.types import ConfigError

_LOOK_TURNS = 2
"""Turns of each reference in a first look."""
_FIRST_OVERHEAD = 6
"""Before any block has ended: what opening and predicting its runs takes, over what opening them takes."""


@dataclass(frozen=True, slots=True)
class Looked:
    """What the references of a block showed at first, and how long things took, seconds."""

    block: Block
    setting: Setting
    observed: Observed
    round_s: float
    opening_s: float


def validate(matrix: Matrix, watch: Watch | None = None) -> Validation:
    """Run a validation; ConfigError for a mistake, RealError for a fault of a file or the machine."""
    device = open_device(matrix.device)
    cores = num_cores()
    usual = cores if device.kind == "cuda" else 1
    threads = usual if matrix.threads is None else matrix.threads
    if threads > cores:
        raise ConfigError(
            f"threads = {threads}: must be in [1, {cores}], the cores of this machine"
        )
    watch = watch or Silent()
    with (
        device.faults(),
        torch_threads(threads),
        Stores(device, matrix.scratch, matrix.seed, _making(watch)) as stores,
    ):
        return _Work(matrix, device, threads, stores, watch).run()


def _making(watch: Watch) -> Callable[[str], Callable[[int, int], None]]:
    def begin(what: str) -> Callable[[int, int], None]:
        watch.stage(what)
        return lambda done, count: watch.progress(done / count)

    return begin


class _Work:
    """One validation under way."""

    def __init__(
        self, matrix: Matrix, device: Device, threads: int, stores: Stores, watch: Watch
    ) -> None:
        self._begun_s = time.monotonic()
        self._matrix, self._device, self._threads = matrix, device, threads
        self._stores, self._watch = stores, watch
        config = config_of_runs(matrix, device)
        self._form = format_of_model(config["model"], dtype_of(matrix, device))
        self._on_host = host_policies(matrix, (*matrix.policies, *matrix.references))
        self._shape = _shape_of(config)
        self._blocks = self._plan()
        self._rng = np.random.default_rng(matrix.seed)
        asked = {
            "model": config["model"]["name"],
            "engine": config["engine"]["name"],
            "trace": trace_name(config["trace"]),
            "dtype": self._form.dtype,
            "threads": threads,
            "expert_bytes": self._form.slot_bytes,
            "num_layers": self._shape.num_moe_layers,
            "num_experts": self._shape.num_experts,
            "top_k": self._shape.top_k,
            "hidden_size": self._form.hidden_size,
            "intermediate_size": self._form.intermediate_size,
        }
        self._found = Validation(matrix, asked, machine_facts(device))

    def run(self) -> Validation:
        """Do all of it."""
        found = self._found
        self._notes()
        found.parity = self._parity()
        looked = [self._look(block) for block in self._blocks]
        found.limits = self._limits(looked)
        overhead_s: float | None = None
        for index, own in enumerate(looked):
            overhead_s = self._play(own, looked[index:], overhead_s)
        found.seconds = time.monotonic() - self._begun_s
        return found

    # -- what there is ------------------------------------------------------------------------------

    def _plan(self) -> list[Block]:
        form, shape = self._form, self._shape
        store_bytes = shape.num_moe_layers * shape.num_experts * form.slot_bytes
        room_bytes = room_bytes_of(self._device, store_bytes)
        return blocks_of(
            self._matrix, self._on_host, run_bytes_of(self._matrix, shape, form), room_bytes
        )

    def _notes(self) -> None:
        notes, matrix = self._found.notes, self._matrix
        left_out = [name for name in matrix.policies if name in self._on_host]
        if "storage" in matrix.tiers and left_out:
            notes.append(
                f"{', '.join(left_out)}: not with storage, for a host that has no experts computes none"
            )
        if "storage" not in matrix.tiers:
            return
        store = self._store("storage", self._form)
        self._found.facts["storage"] = storage_facts(self._stores.folder)
        assert isinstance(store, FileStore)
        self._found.facts["storage"]["is_direct"] = store.is_direct
        if not store.is_direct:
            notes.append(f"storage is read through the page cache: {store.why_not}")
            self._watch.say(notes[-1])

    def _store(self, tier: str, form: ExpertFormat) -> Store:
        return self._stores.of(tier, form, self._shape.num_moe_layers, self._shape.num_experts)

    # -- decisions ----------------------------------------------------------------------------------

    def _parity(self) -> list[Parity]:
        """Compare the decisions of every policy of the matrix, at its first ratio, tier by tier."""
        matrix, found = self._matrix, []
        config = config_of_runs(matrix, self._device, TINY)
        form = format_of_model(config["model"], self._form.dtype)
        seen: set[tuple[str, int, str]] = set()
        todo = []
        for block in self._blocks:
            for policy, ratio in block.wanted:
                if (block.tier, block.batch_size, policy) not in seen:
                    seen.add((block.tier, block.batch_size, policy))
                    todo.append((block, policy, ratio))
        stores = {block.tier: self._store(block.tier, form) for block in self._blocks}
        self._watch.stage("decisions in lockstep")
        for index, (block, policy, ratio) in enumerate(todo):
            steps = matrix.parity_steps
            setting = setting_of(matrix, block, form, self._device, self._threads, steps)
            setting = tiny_setting(setting, form)
            machine = self._machine(first_guess(), setting)
            found.append(check_parity(setting, stores[block.tier], machine, policy, ratio))
            self._watch.progress((index + 1) / len(todo))
        return found

    # -- time ---------------------------------------------------------------------------------------

    def _machine(self, observed: Observed, setting: Setting) -> dict[str, Any]:
        tier, batch_size = setting.tier, setting.batch_size
        return machine_of(observed, self._device, tier, batch_size, self._threads)

    def _look(self, block: Block) -> Looked:
        """Let a block's references play a little: what policies believe, and how long a round takes."""
        setting = setting_of(self._matrix, block, self._form, self._device, self._threads)
        store = self._store(block.tier, self._form)
        self._watch.stage(f"first look: {block.name}")
        begun_s = time.monotonic()
        machine = self._machine(first_guess(), setting)
        with opened(setting, store, machine, block.references) as runs:
            opening_s = time.monotonic() - begun_s
            for run in runs:
                run.play(_prompt_steps(setting) + _LOOK_TURNS * setting.turn_steps)
            observed = sum_of(run.observed for run in runs)
            step_ns = float(np.mean([_mean_step_ns(run) for run in runs]))
        per_run_s = setting.turn_steps * step_ns / 1e9
        opening_s *= len(block.wanted) / len(block.references)
        return Looked(block, setting, observed, per_run_s * len(block.wanted), opening_s)

    def _play(self, own: Looked, left: Sequence[Looked], overhead_s: float | None) -> float:
        """Measure and predict one block of those that are left; return what opening and predicting took.

        Time is shared so that all blocks have as many rounds: those of long steps have more of it.
        """
        block, setting, watch = own.block, own.setting, self._watch
        num_runs = len(block.wanted)
        per_run_s = overhead_s or _FIRST_OVERHEAD * own.opening_s / num_runs
        reserve_s = per_run_s * sum(len(one.block.wanted) for one in left)
        spent_s = time.monotonic() - self._begun_s
        room_s = max(0.0, 60 * self._matrix.minutes - spent_s - reserve_s)
        share_s = room_s * own.round_s / sum(one.round_s for one in left)
        believed = self._machine(own.observed, setting)
        store = self._store(block.tier, self._form)
        watch.stage(f"{block.name}: {num_runs} runs")
        begun_s = time.monotonic()
        with opened(setting, store, believed, block.wanted) as runs:
            for run in runs:
                run.play(_prompt_steps(setting))
            rounds = _Rounds(share_s, self._matrix.least_rounds, runs, self._matrix.steps, watch)
            take_turns(runs, setting.turn_steps, self._rng, rounds.are_over)
            played_s = rounds.seconds
            watch.stage(f"{block.name}: predicting")
            references = runs[: len(block.references)]
            compared = {
                (one.policy, one.ratio): one for one in predict(setting, runs, references, believed)
            }
            observed = sum_of(run.observed for run in references)
        self._found.references += [compared[wanted] for wanted in block.references]
        self._found.rows += [compared[wanted] for wanted in block.runs]
        self._found.played.append(Played(block, played_s, len(runs[0].turns) - 1, observed))
        return (time.monotonic() - begun_s - played_s) / num_runs

    # -- limits -------------------------------------------------------------------------------------

    def _limits(self, looked: Sequence[Looked]) -> list[LimitResult]:
        """Hold loading on demand from storage against its limit, and the backend against a peer."""
        matrix, watch = self._matrix, self._watch
        found: list[LimitResult] = []
        from_storage = {own.block.batch_size: own for own in looked if own.block.tier == "storage"}
        for own in from_storage.values() if matrix.limit_steps else ():
            block = own.block
            watch.stage(f"distance to the limit: batch {block.batch_size}")
            setting = setting_of(
                matrix, block, self._form, self._device, self._threads, matrix.limit_steps
            )
            store = self._store("storage", self._form)
            assert isinstance(store, FileStore)
            found += distance_to_limit(setting, store, self._machine(own.observed, setting))
        for own in list(from_storage.values())[:1] if matrix.peer_tokens else ():
            if find_spec("accelerate") is None:
                self._found.notes.append("no peer was timed: accelerate is not installed")
                break
            watch.stage("distance to the limit: the peer")
            store = self._store("storage", self._form)
            assert isinstance(store, FileStore)
            machine = self._machine(own.observed, own.setting)
            folder, tokens = self._stores.folder, matrix.peer_tokens
            found += against_peer(own.setting, store, machine, folder, tokens)
        return found


def _shape_of(config: Mapping[str, Any]) -> ModelShape:
    """Return the model's shape with the trace's layers and experts."""
    meta = load_trace(config["trace"]["path"]).meta
    shape = ModelShape.from_mapping(config["model"], f"model/{config['model'].get('name')}")
    return shape.priced_as(meta.num_layers, meta.num_experts, meta.top_k)


class _Rounds:
    """Tells when a block's rounds are over: by time, after a least number; asked before each round."""

    def __init__(
        self, share_s: float, least: int, runs: Sequence[Run], steps: int, watch: Watch
    ) -> None:
        self._begun_s = time.monotonic()
        self._share_s, self._least, self._runs = share_s, least, runs
        self._steps, self._watch = steps, watch
        self._num_rounds = 0

    @property
    def seconds(self) -> float:
        """Time since the first round began."""
        return time.monotonic() - self._begun_s

    def are_over(self) -> bool:
        """Tell whether no further round begins."""
        turns = self._runs[0].turns
        by_steps = turns[-1][1] / self._steps if turns else 0.0
        by_time = self.seconds / self._share_s if self._share_s else 1.0
        self._watch.progress(min(1.0, max(by_steps, min(by_time, self._num_rounds / self._least))))
        is_over = self._num_rounds >= self._least and self.seconds >= self._share_s
        self._num_rounds += 1
        return is_over


def _prompt_steps(setting: Setting) -> int:
    """Return the steps before the first one that decodes: a prompt each."""
    return setting.batch_size


def _mean_step_ns(run: Run) -> float:
    times_ns = decode_ns(run.steps())
    return float(times_ns.mean()) if len(times_ns) else 1.0
