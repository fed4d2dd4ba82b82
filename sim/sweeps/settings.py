"""The settings of a sweep itself: the group ``sweep`` of its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sim.settings import SWITCH, TEXT, Rule, at_least, did_you_mean, one_of, or_null
from sim.types import ConfigError

SEARCHES = ("grid", "list", "random", "lhs", "optuna")
ENGINES = ("pool", "serial", "slurm", "ray")
_RULES: dict[str, Rule] = {
    "dir": or_null(TEXT),
    "search": one_of(*SEARCHES),
    "list": or_null(TEXT),
    "points": or_null(at_least(1)),
    "seed": at_least(0),
    "batch": at_least(1),
    "objective": TEXT,
    "direction": one_of("maximize", "minimize"),
    "engine": one_of(*ENGINES),
    "workers": or_null(at_least(1)),
    "chunk": or_null(at_least(1)),
    "tables": SWITCH,
    "strikes": at_least(1),
    "retry_failed": SWITCH,
    "overwrite": SWITCH,
    "dry_run": SWITCH,
}
SHARED = tuple(name for name in _RULES if name not in ("engine", "workers"))
"""The settings that do not belong to an engine."""


@dataclass(frozen=True, slots=True)
class SweepSettings:
    """What ``conf/sweep/*.yaml`` says; ``own`` are the settings of the engine alone."""

    dir: str | None
    search: str
    list: str | None
    points: int | None
    seed: int
    batch: int
    objective: str
    direction: str
    engine: str
    workers: int | None
    chunk: int | None
    tables: bool
    strikes: int
    retry_failed: bool
    overwrite: bool
    dry_run: bool
    own: Mapping[str, Any] = field(default_factory=dict)


OF_THE_POINTS = ("search", "list", "points", "seed", "batch", "objective", "direction", "tables")
"""The settings that decide what is run; the others only where, when and how fast."""


def settings_of(group: Any) -> SweepSettings:
    """Return the settings of a composed ``sweep`` group.

    Raises ConfigError for a value that breaks its rule.
    """
    if not isinstance(group, Mapping):
        raise ConfigError(f"sweep = {group}: must be a group of settings")
    missing = [name for name in _RULES if name not in group]
    if missing:
        raise ConfigError(f"sweep.{missing[0]}: must be given")
    for name, (is_good, words) in _RULES.items():
        if not is_good(group[name]):
            raise ConfigError(f"sweep.{name} = {group[name]}: {words}{_near(name, group[name])}")
    own = {str(name): value for name, value in group.items() if name not in _RULES}
    return SweepSettings(**{name: group[name] for name in _RULES}, own=own)


def _near(name: str, value: Any) -> str:
    choices = {"search": SEARCHES, "engine": ENGINES, "direction": ("maximize", "minimize")}
    return did_you_mean(str(value), choices[name]) if name in choices else ""
