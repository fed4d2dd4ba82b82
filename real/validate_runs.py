"""Runs that take turns: every policy's replay and the reference runs, a few steps at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from real.device import Device
from real.executor import Executor
from real.experts import ExpertFormat
from real.observed import Observed
from real.replay import Replay, dense_work
from real.rig import Tier, build_executor, machine_for, priced, real_scenario
from real.store import Store
from sim.composing import compose_config
from sim.counter import STEP_COLUMNS
from sim.types import Phase

_PHASE, _START, _END = (STEP_COLUMNS.index(name) for name in ("phase", "start_ns", "end_ns"))


@dataclass(frozen=True, slots=True)
class Setting:
    """What the runs of one block share.

    overrides    of the configuration, as on the command line: trace, model, engine, workload
    turn_steps   decode steps of one turn
    """

    tier: Tier
    batch_size: int
    overrides: tuple[str, ...]
    form: ExpertFormat
    device: Device
    threads: int
    turn_steps: int
    seed: int = 0


@dataclass(slots=True)
class Run:
    """One policy at one cache ratio: its configuration, what it has done so far, turn by turn."""

    policy: str
    ratio: float
    config: dict[str, Any]
    replay: Replay
    turns: list[tuple[int, int]] = field(default_factory=list)
    """First step of each turn, and the first after it."""
    is_done: bool = False

    @property
    def executor(self) -> Executor:
        """What carries the run out."""
        return self.replay.executor

    @property
    def observed(self) -> Observed:
        """What the run showed of the machine."""
        return self.executor.accounts.observed

    def play(self, steps: int) -> None:
        """Run some steps more."""
        first = len(self.turns) and self.turns[-1][1]
        done = 0
        while done < steps and not self.is_done:
            self.is_done = self.replay.step() is None
            done += not self.is_done
        if done:
            self.turns.append((first, first + done))

    def steps(self) -> np.ndarray:
        """Return the rows of the step table so far, int64[steps, columns]."""
        return np.concatenate(list(self.replay.tables.steps.blocks()))


def config_of(
    setting: Setting, policy: str, ratio: float, machine: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the configuration of a run on a machine."""
    config = priced(_composed(setting, policy, ratio), setting.form)  # a copy
    config["machine"] = machine_for(machine, setting.tier)
    return config


@lru_cache(maxsize=256)
def _composed(setting: Setting, policy: str, ratio: float) -> dict[str, Any]:
    """Compose a run's configuration; kept, for composing takes a tenth of a second."""
    given = [
        *(f"policy={policy}", f"cache.ratio={ratio}"),
        *(f"workload.batch_size={setting.batch_size}", *setting.overrides),
    ]
    return compose_config("config", given)


@contextmanager
def opened(
    setting: Setting,
    store: Store,
    machine: Mapping[str, Any],
    wanted: Sequence[tuple[str, float]],
) -> Iterator[list[Run]]:
    """Open runs of (policy, ratio) over one store; they are closed at the end."""
    with ExitStack() as stack:
        runs = []
        for policy, ratio in wanted:
            config = config_of(setting, policy, ratio, machine)
            scenario = real_scenario(config)
            executor = build_executor(scenario, store, setting.device, setting.tier)
            stack.callback(executor.close)
            dense = dense_work(scenario, setting.device, setting.form, setting.seed)
            runs.append(Run(policy, ratio, config, Replay(scenario, executor, dense)))
        yield runs


def take_turns(
    runs: Sequence[Run],
    turn_steps: int,
    rng: np.random.Generator,
    is_over: Callable[[], bool] = lambda: False,
) -> None:
    """Let every run play a turn after another, in an order drawn anew, until all are done or time is over.

    Between two rounds all have done the same steps, so that ``is_over`` ends them at the same step.
    """
    while not all(run.is_done for run in runs) and not is_over():
        for place in rng.permutation(len(runs)).tolist():
            runs[place].play(turn_steps)


def decode_ns(rows: np.ndarray, first: int = 0, after: int | None = None) -> np.ndarray:
    """Return how long each decode step of a range of steps took, ns."""
    part = rows[first:after]
    part = part[part[:, _PHASE] == Phase.DECODE]
    found: np.ndarray = part[:, _END] - part[:, _START]
    return found
