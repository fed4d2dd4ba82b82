"""The parts of a policy set from the ``policy`` group of the configuration.

A policy's constructor says by its parameter names what it needs from outside the configuration:
``popularity`` (uses of each expert in the calibration requests) and ``next_use`` (the future of the
very run; only an oracle may ask for it).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

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
from sim.settings import OPTIONAL_ROLES, did_you_mean
from sim.types import ConfigError
from sim.workload import Workload

ROLES: dict[str, type] = {
    "cache": CachePolicy,
    "placement": PlacementPolicy,
    "prefetch": PrefetchPolicy,
    "routing": RoutingPolicy,
    "repack": RepackPolicy,
    "stages": StageDetector,
    "host": CachePolicy,
}


class Counted(Protocol):
    """Anything that knows how often each expert was used beforehand."""

    def popularity(self) -> NDArray[np.float64]:
        """Uses of each expert, float64[num_layers, num_experts]."""
        ...


def build_policies(
    config: Mapping[str, Any], workload: Workload, num_pools: int, calibration: Counted
) -> PolicySet:
    """Build one cache policy a pool and the other roles from the ``policy`` group."""
    group = config["policy"]
    supply = _Supply(workload, calibration)
    caches = [_make(group, "cache", supply) for _ in range(num_pools)]
    others = {role: _make(group, role, supply) for role in OPTIONAL_ROLES if role in group}
    return PolicySet(caches, **others)


class _Supply:
    """What constructors may ask for by parameter name, computed once and only when asked."""

    def __init__(self, workload: Workload, calibration: Counted) -> None:
        self._makers: dict[str, Callable[[], Any]] = {
            "popularity": calibration.popularity,
            "next_use": lambda: NextUse(
                routing for step in workload.steps() for routing in workload.routings(step)
            ),
        }
        self._made: dict[str, Any] = {}
        self.is_open = workload.is_open

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
    try:
        known = inspect.signature(maker).parameters
    except (ValueError, TypeError) as error:  # some built-in classes tell nothing of themselves
        raise ConfigError(
            f"{where}._target_ = {target}: must be a {ROLES[role].__name__}"
        ) from error
    for name in params:
        if name not in known:
            raise ConfigError(
                f"{where}.{name}: {target} has no such parameter{did_you_mean(name, known)}"
            )
        _check_type(f"{where}.{name}", params[name], known[name])
    if "next_use" in known and not getattr(maker, "oracle", False):
        raise ConfigError(f"{where}: {target} takes next_use but is not marked oracle = True")
    if "next_use" in known and supply.is_open:
        raise ConfigError(
            f"{where}: {target} must know the future, which workload.arrivals leave to the clock: "
            "must run with workload.arrivals = closed"
        )
    params |= {name: supply.get(name) for name in known if name in supply}
    try:
        part = maker(**params)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{where}: {_said(error)}") from error
    if not isinstance(part, ROLES[role]):
        raise ConfigError(f"{where}._target_ = {target}: must be a {ROLES[role].__name__}")
    return part


def _said(error: BaseException) -> str:
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
