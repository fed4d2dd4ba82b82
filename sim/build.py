"""From a composed configuration to the objects of a run; every user's mistake is found here.

A policy's constructor says by its parameter names what it needs from outside the configuration:
``popularity`` (uses of each expert in the calibration requests) and ``next_use`` (the future of the
very run; only an oracle may ask for it).
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from hwmodels.cost import CostModel
from hwmodels.machine import Machine
from hwmodels.model_shape import ModelShape
from sim.budget import Budget, plan_memory
from sim.offloader import Offloader
from sim.policies.base import (
    CachePolicy,
    PlacementPolicy,
    PolicySet,
    PrefetchPolicy,
    RepackPolicy,
    RoutingPolicy,
    StageDetector,
)
from sim.policies.oracle import NextUse
from sim.residency import Residency
from sim.settings import check_settings, did_you_mean
from sim.types import ConfigError, KeySpace
from sim.workload import Workload, select_requests
from traces.schema import NO_EXPERT, Trace, TraceError
from traces.store import read_trace

ROLES: dict[str, type] = {
    "cache": CachePolicy,
    "placement": PlacementPolicy,
    "prefetch": PrefetchPolicy,
    "routing": RoutingPolicy,
    "repack": RepackPolicy,
    "stages": StageDetector,
}


@dataclass(slots=True)
class Scenario:
    """All that a driver needs, fresh for one run, and what must be told about it."""

    workload: Workload
    offloader: Offloader
    costs: CostModel
    budget: Budget
    shape: ModelShape
    machine: Machine
    calibration: Calibration

    @property
    def calibration_overlaps(self) -> bool:
        """Tell whether the run replays requests that calibration has seen."""
        return self.calibration.overlaps(self.workload)


def build(config: Mapping[str, Any]) -> Scenario:
    """Build a run from a resolved configuration (plain dicts and lists)."""
    check_settings(config)
    trace = load_trace(config["trace"]["path"])
    calibration = _calibration(config, trace)
    workload = _workload(config, trace, calibration)
    shape = ModelShape.from_mapping(config["model"], f"model/{config['model'].get('name')}")
    meta = trace.meta
    shape = shape.priced_as(meta.num_layers, meta.num_experts, meta.top_k)
    machine = Machine.from_mapping(config["machine"], f"machine/{config['machine'].get('name')}")
    costs = CostModel(shape, machine)
    budget = plan_memory(config, shape, machine, workload)
    keys = KeySpace(meta.num_layers, meta.num_experts)
    residency = Residency(keys, budget.layer_bytes, budget.pool_of_layer, budget.pool_bytes)
    policies = build_policies(config, workload, len(budget.pool_bytes), calibration)
    budget.check_event(policies, meta.top_k)
    limit = config["cache"]["prefetch_limit"]
    offloader = Offloader(residency, policies, costs, budget.staging_slots, limit)
    return Scenario(workload, offloader, costs, budget, shape, machine, calibration)


# -- traces ----------------------------------------------------------------------------------------


def load_trace(path: str) -> Trace:
    """Read a trace; ``pkg://package/file`` names one that is bundled."""
    real_path = os.path.realpath(resolve_path(path))
    try:
        return _read_trace(real_path)
    except TraceError as error:  # speak of the file as the user does
        raise TraceError(str(error).replace(real_path, path)) from error


def resolve_path(path: str) -> Path:
    """Return the file behind a trace path of the configuration."""
    if path.startswith("pkg://"):
        package, _, name = path.removeprefix("pkg://").partition("/")
        try:
            return Path(str(resources.files(package))) / name
        except (ImportError, ValueError, TypeError) as error:
            raise ConfigError(f"trace.path = {path}: no such package: {package!r}") from error
    return Path(path).expanduser()


@lru_cache(maxsize=2)
def _read_trace(path: str) -> Trace:
    """Keep the last traces: the points of a sweep share them."""
    return read_trace(path)


@dataclass(frozen=True, slots=True)
class Calibration:
    """The requests from which policies may learn before a run."""

    trace: Trace
    span: tuple[int, int]

    def popularity(self) -> NDArray[np.float64]:
        """Uses of each expert, float64[num_layers, num_experts]."""
        meta = self.trace.meta
        requests = select_requests(self.trace, self.span, "calibration.requests")
        rows = np.concatenate([np.r_[r.prompt_rows, r.decode_rows] for r in requests])
        ids = self.trace.expert_ids[rows].astype(np.int64)
        used = ids != NO_EXPERT
        keys = (ids + np.arange(meta.num_layers)[:, None] * meta.num_experts)[used]
        counts = np.bincount(keys, minlength=meta.num_layers * meta.num_experts)
        return counts.reshape(meta.num_layers, meta.num_experts).astype(np.float64)

    def overlaps(self, workload: Workload) -> bool:
        """Tell whether a workload replays requests that these are."""
        if workload.trace is not self.trace:
            return False
        seen = select_requests(self.trace, self.span, "calibration.requests")
        known = {request.request_id for request in seen}
        return any(request.request_id in known for request in workload.requests)


def _calibration(config: Mapping[str, Any], trace: Trace) -> Calibration:
    """Return the part of the trace, or of another one, that policies may learn from."""
    path = config["calibration"]["trace"]
    source = trace
    if path is not None:
        try:
            source = load_trace(path)
        except TraceError as error:
            raise ConfigError(f"calibration.trace: {error}") from error
        _same_shape(source, trace, path)
    span = config["calibration"]["requests"]
    first, last = span if span is not None else (0, max(1, source.num_requests // 4))
    select_requests(source, (first, last), "calibration.requests")  # raises for a bad range
    return Calibration(source, (first, source.num_requests if last is None else last))


def _workload(config: Mapping[str, Any], trace: Trace, calibration: Calibration) -> Workload:
    """Return the requests to run: those asked for, by default all that calibration leaves."""
    batch_size, span = config["workload"]["batch_size"], config["workload"]["requests"]
    workload = Workload(trace, batch_size, tuple(span) if span else None)
    if span is None and calibration.trace is trace:
        low, high = calibration.span
        rest = [*workload.requests[:low], *workload.requests[high:]]
        workload.requests = rest or workload.requests
    return workload


def _same_shape(source: Trace, trace: Trace, path: str) -> None:
    found, wanted = (
        (t.meta.num_layers, t.meta.num_experts) for t in (source, trace)
    )  # fmt: skip
    if found != wanted:
        raise ConfigError(
            f"calibration.trace = {path}: has {found[0]} layers of {found[1]} experts, "
            f"must have {wanted[0]} of {wanted[1]} like the trace of the run"
        )


# -- policies --------------------------------------------------------------------------------------


def build_policies(
    config: Mapping[str, Any], workload: Workload, num_pools: int, calibration: Calibration
) -> PolicySet:
    """Build one cache policy a pool and the other roles from the ``policy`` group."""
    group = config["policy"]
    supply = _Supply(workload, calibration)
    caches = [_make(group, "cache", supply) for _ in range(num_pools)]
    others = {
        role: _make(group, role, supply) for role in ROLES if role != "cache" and role in group
    }
    return PolicySet(caches, **others)


class _Supply:
    """What constructors may ask for by parameter name, computed once and only when asked."""

    def __init__(self, workload: Workload, calibration: Calibration) -> None:
        self._makers: dict[str, Callable[[], Any]] = {
            "popularity": calibration.popularity,
            "next_use": lambda: NextUse(
                routing for step in workload.steps() for routing in workload.routings(step)
            ),
        }
        self._made: dict[str, Any] = {}

    def get(self, name: str) -> Any:
        """Return one supply."""
        if name not in self._made:
            self._made[name] = self._makers[name]()
        return self._made[name]

    def __contains__(self, name: str) -> bool:
        return name in self._makers


def _make(group: Mapping[str, Any], role: str, supply: _Supply) -> Any:
    """Build the object of one role; errors name policy, role, parameter and rule."""
    where = f"policy/{group.get('name')}: {role}"
    params = dict(group[role])
    target = params.pop("_target_", None)
    if not isinstance(target, str):
        raise ConfigError(
            f"{where}._target_ = {target}: must name a class, as package.module.Class"
        )
    maker = _locate(target, where)
    known = inspect.signature(maker).parameters
    for name in params:
        if name not in known:
            raise ConfigError(
                f"{where}.{name}: {target} has no such parameter{did_you_mean(name, known)}"
            )
        _check_type(f"{where}.{name}", params[name], known[name])
    if "next_use" in known and not getattr(maker, "oracle", False):
        raise ConfigError(f"{where}: {target} takes next_use but is not marked oracle = True")
    params |= {name: supply.get(name) for name in known if name in supply}
    try:
        part = maker(**params)
    except Exception as error:
        raise ConfigError(f"{where}: {_said(error)}") from error
    if not isinstance(part, ROLES[role]):
        raise ConfigError(f"{where}._target_ = {target}: must be a {ROLES[role].__name__}")
    return part


def _said(error: Exception) -> str:
    """Return what an error says; with its kind, unless it is one that a constructor raises on purpose."""
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


def _check_type(where: str, value: Any, parameter: inspect.Parameter) -> None:
    """Refuse a value of another kind than the parameter's annotation, where that is a plain one."""
    kinds: dict[str, tuple[type, ...]] = {
        "bool": (bool,),
        "int": (int,),
        "float": (int, float),
        "str": (str,),
    }
    annotation = parameter.annotation
    word = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    if word not in kinds:
        return
    if not isinstance(value, kinds[word]) or (isinstance(value, bool) and word != "bool"):
        raise ConfigError(f"{where} = {value}: must be a{'n' if word == 'int' else ''} {word}")


def _locate(target: str, where: str) -> Callable[..., Any]:
    from importlib import import_module

    module_name, _, name = target.rpartition(".")
    try:
        module = import_module(module_name)
    except Exception as error:  # a user's module may fail in any way
        raise ConfigError(
            f"{where}._target_ = {target}: cannot be imported: {_said(error)}"
        ) from error
    if not callable(getattr(module, name, None)):
        raise ConfigError(
            f"{where}._target_ = {target}: no such class{did_you_mean(name, dir(module))}"
        )
    return cast("Callable[..., Any]", getattr(module, name))
