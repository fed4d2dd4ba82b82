"""The parts of a policy set from the ``policy`` group of the configuration.

A policy's constructor says by its parameter names what it needs from outside the configuration:
``popularity`` (uses of each expert in the calibration requests), ``calibration`` (those requests
themselves), ``predictor`` (the policy's own, shared by all parts), ``rng`` (random numbers of its own),
``num_layers``, ``num_experts``, ``top_k``, ``scoring`` and ``normalized`` of the trace; ``next_use``,
``future``, ``stage_uses`` and ``token_keys`` (of the very run; only an oracle may ask for them). A
parameter whose value has a ``_target_`` is a part as well.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from sim.answers import check_verb
from sim.kinds import check_type
from sim.policies.base import (
    BatchFormer,
    CachePolicy,
    PlacementPolicy,
    Policy,
    PolicySet,
    Predictor,
    PrefetchPolicy,
    RepackPolicy,
    RoutingPolicy,
    SizingPolicy,
    StageDetector,
    overriding,
)
from sim.policies.history import History
from sim.policies.oracle import MOST_CHOICES, Future, NextUse
from sim.settings import OPTIONAL_ROLES, did_you_mean
from sim.stage_replay import stage_uses
from sim.targets import locate_class
from sim.types import ConfigError, LayerRouting
from sim.workload import Workload

ROLES: dict[str, type] = {
    "cache": CachePolicy,
    "placement": PlacementPolicy,
    "prefetch": PrefetchPolicy,
    "routing": RoutingPolicy,
    "repack": RepackPolicy,
    "stages": StageDetector,
    "host": CachePolicy,
    "predictor": Predictor,
    "sizing": SizingPolicy,
    "former": BatchFormer,
}


def build_policies(
    config: Mapping[str, Any],
    supply: Supply,
    num_pools: int,
    sizing: SizingPolicy | None = None,
) -> PolicySet:
    """Build one cache policy a pool and the other roles from the ``policy`` group.

    ``sizing`` is the role of that name, which has been built already (see :func:`build_sizing`).
    """
    group = config["policy"]
    roles = [
        role for role in OPTIONAL_ROLES if role in group and role not in ("predictor", "sizing")
    ]
    if "predictor" in group:
        supply.predictor = _make(group, "predictor", supply)
    caches = [_make(group, "cache", supply) for _ in range(num_pools)]
    others = {role: _make(group, role, supply) for role in roles}
    found = PolicySet(caches, predictor=supply.predictor, sizing=sizing, **others)
    found.insert_cap = group.get("insert_cap")
    found.calibrated = supply.has_given("popularity", "calibration")
    return found


def build_sizing(config: Mapping[str, Any], supply: Supply) -> SizingPolicy | None:
    """Build the role that shares memory among layers, which is needed before the others; None if none."""
    group = config["policy"]
    if "sizing" not in group:
        return None
    made: SizingPolicy = _make(group, "sizing", supply)
    return made


def build_detector(
    config: Mapping[str, Any], workload: Workload, calibration: History
) -> StageDetector:
    """Build only the role that finds stage boundaries."""
    return _detector(config["policy"], Supply(config, workload, calibration))


def _detector(group: Mapping[str, Any], supply: Supply) -> StageDetector:
    if "stages" not in group:
        raise ConfigError(f"policy/{group.get('name')}: needs stages: policy.stages must be given")
    made: StageDetector = _make(group, "stages", supply)
    return made


def build_former(config: Mapping[str, Any], workload: Workload, supply: Supply) -> None:
    """Let the role that chooses who decodes, if there is one, form the batches of a workload.

    Its choices decide the steps and so the memory of KV, which is needed before the other roles; they
    are replayed without a run, so that it can learn nothing from one.
    """
    group = config["policy"]
    if "former" not in group:
        return
    where = f"policy/{group.get('name')}: former"
    former = _make(group, "former", supply)  # mistakes are found now
    for hook in ("begin_step", "observe"):
        if overriding([former], hook):
            raise ConfigError(
                f"{where}: {type(former).__name__}.{hook} must not be overridden: a former's choices are "
                "worked out before the run as well, when there is nothing to learn"
            )
    key = json.dumps(dict(group["former"]), sort_keys=True, default=str)
    workload.form_batches(lambda: _make(group, "former", supply), key)


class Supply:
    """What constructors may ask for by parameter name, computed once and only when asked.

    All roles of a run share one. ``warm_up`` is replayed before ``workload``: an oracle must know it too.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        workload: Workload,
        calibration: History,
        warm_up: Workload | None = None,
    ) -> None:
        works = [workload] if warm_up is None else [warm_up, workload]

        def events() -> Iterator[LayerRouting]:
            for work in works:
                for step in work.steps():
                    yield from work.routings(step)

        meta = workload.trace.meta
        self._makers: dict[str, Callable[[], Any]] = {
            "popularity": calibration.popularity,
            "calibration": lambda: calibration,
            "next_use": lambda: NextUse(events()),
            "future": lambda: Future(events()),
            "stage_uses": lambda: stage_uses(_detector(config["policy"], self), works),
            "token_keys": workload.token_keys,
            "num_layers": lambda: meta.num_layers,
            "num_experts": lambda: meta.num_experts,
            "top_k": lambda: meta.top_k,
            "scoring": lambda: meta.scoring,
            "normalized": lambda: meta.normalized,
        }
        self._made: dict[str, Any] = {}
        self._seed = config["workload"]["seed"]
        self._columns = workload.trace.columns
        self.predictor: Predictor | None = None
        self.has_low = config["policy"].get("low") is not None
        self.is_open = workload.is_open
        self.num_choices = workload.num_choices

    def get(self, name: str, role: str) -> Any:
        """Return one supply; a generator of random numbers is each role's own."""
        if name == "rng":
            return np.random.default_rng([self._seed, *role.encode()])
        if name == "predictor":
            return self.predictor
        if name not in self._made:
            self._made[name] = self._makers[name]()
        return self._made[name]

    def has_given(self, *names: str) -> bool:
        """Tell whether any of these was asked for."""
        return any(name in self._made for name in names)

    def check_columns(self, needed: Sequence[str], where: str) -> None:
        """Refuse a trace that lacks what a policy cannot work without."""
        for name in needed:
            if name not in self._columns:
                flag = _HOW_TO_RECORD.get(name, "")
                raise ConfigError(f"{where}: needs {name}, which the trace does not have{flag}")

    def __contains__(self, name: str) -> bool:
        return name in self._makers or name in ("rng", "predictor")


_HOW_TO_RECORD = {
    "router_logits": "; greenroom record --logits writes it",
    "next_gate_ids": "; greenroom record writes it unless --no-next-gate is given",
    "next_gate_ids_2": "; greenroom record --gates-ahead 2 writes it",
    "next_gate_ids_3": "; greenroom record --gates-ahead 3 writes it",
}
_EVENTS = ("next_use", "future", "stage_uses")
_FUTURE = (*_EVENTS, "token_keys")
_OURS = (
    *("popularity", "calibration", "predictor", "rng", "num_layers", "num_experts"),
    *_FUTURE,
)
"""Supplies that no file may give instead."""


def _make(group: Mapping[str, Any], role: str, supply: Supply) -> Any:
    """Build the object of one role; errors name policy, role, parameter and rule."""
    where = f"policy/{group.get('name')}: {role}"
    if not isinstance(group[role], Mapping):
        raise ConfigError(f"{where} = {group[role]}: must be a group with a _target_")
    return _build(group[role], role, where, ROLES[role], supply)


def _build(settings: Mapping[str, Any], role: str, where: str, kind: type, supply: Supply) -> Any:
    """Build a part, and the parts within it."""
    params = dict(settings)
    target = params.pop("_target_", None)
    maker = locate_class(target, where, kind)
    known = _parameters(maker, where, target, kind)
    for name, value in params.items():
        if name not in known:
            raise ConfigError(
                f"{where}.{name}: {target} has no such parameter{did_you_mean(name, known)}"
            )
        is_part = isinstance(value, Mapping) and "_target_" in value
        if name in _OURS and not is_part:
            raise ConfigError(f"{where}.{name}: is filled in for you: must be left out")
        if is_part:
            params[name] = _build(value, role, f"{where}.{name}", Policy, supply)
        else:
            check_type(f"{where}.{name}", value, known[name])
    _check_future(known, maker, where, target, supply)
    supply.check_columns(getattr(maker, "needs", ()), where)
    if getattr(maker, "needs_low", False) and not supply.has_low:
        raise ConfigError(f"{where}: {target} needs low-precision copies: policy.low must be given")
    given = [name for name in known if name in supply and name not in params]
    params |= {name: supply.get(name, role) for name in given if _wants(known[name], supply)}
    try:
        part = maker(**params)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{where}: {_said(error)}") from error
    if not isinstance(part, kind):
        raise ConfigError(f"{where}._target_ = {target}: must be a {kind.__name__}")
    check_verb(part, f"{where}: {target}")
    return part


def _wants(parameter: inspect.Parameter, supply: Supply) -> bool:
    """Tell whether to supply a parameter: one with a default may do without a predictor."""
    optional = parameter.default is not inspect.Parameter.empty
    return not (optional and parameter.name == "predictor" and supply.predictor is None)


def _parameters(
    maker: Callable[..., Any], where: str, target: str, kind: type
) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(maker).parameters
    except (ValueError, TypeError) as error:  # some built-in classes tell nothing of themselves
        raise ConfigError(f"{where}._target_ = {target}: must be a {kind.__name__}") from error


def _check_future(
    known: Mapping[str, Any], maker: Callable[..., Any], where: str, target: str, supply: Supply
) -> None:
    """Let only oracles know the future, and only where there is one beforehand."""
    asked = [name for name in _FUTURE if name in known]
    if asked and not getattr(maker, "oracle", False):
        raise ConfigError(f"{where}: {target} takes {asked[0]} but is not marked oracle = True")
    asked = [name for name in asked if name in _EVENTS]
    if asked and supply.is_open:
        raise ConfigError(
            f"{where}: {target} must know the future, which workload.arrivals leave to the clock: "
            "must run with workload.arrivals = closed"
        )
    if asked and supply.num_choices > MOST_CHOICES:
        rule = f"must be at most {MOST_CHOICES:.0e} (workload.requests)"
        size = f"{supply.num_choices:.2g} choices of experts in memory"
        raise ConfigError(f"{where}: {target} keeps {size}: {rule}")
    if asked and where.partition(": ")[2].startswith("former"):
        raise ConfigError(
            f"{where}: {target} takes {asked[0]}, which depends on a former's own choices"
        )
    if "predictor" in known and supply.predictor is None and _is_required(known["predictor"]):
        raise ConfigError(f"{where}: {target} needs a predictor: policy.predictor must be given")


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is inspect.Parameter.empty


def _said(error: BaseException) -> str:
    """Return what an error says; with its kind, unless it is one that a constructor raises on purpose."""
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
