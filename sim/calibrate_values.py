"""Parameters as a fit takes them, and the rows' times at some values of theirs.

A row is composed once; values are changed in memory, and what does not change is not built again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from hwmodels.devices import CPU, GPU, Link, Storage
from hwmodels.engine import Engine
from hwmodels.errors import HardwareError
from hwmodels.fitting import Parameter
from hwmodels.machine import Machine
from hwmodels.model_shape import ModelShape
from hwmodels.placement import Placement
from sim.calibrate_names import MISSING, Field, Keys, Options, is_felt, numbers_in, value_at
from sim.calibrate_rows import Row
from sim.calibrate_spec import Specification, Wish
from sim.settings import did_you_mean
from sim.types import ConfigError

_KEPT = 20_000
_BUILT: dict[str, Any] = {"machine": Machine, "engine": Engine}
"""What is built from its group alone; of the others the whole case is built anew."""
_MACHINE_PARTS = ("gpu", "link", "cpu", "storage")
_KINDS = {f.name: str(f.type) for part in (ModelShape, Placement, Engine, GPU, Link, CPU, Storage)
          for f in fields(part)}  # fmt: skip


def parameter_of(spec: Specification, wish: Wish, field: Field, row: Row) -> Parameter:
    """Return a parameter as a fit takes it; it starts at the value that ``row`` has now."""
    value = value_at(row.composed.config, field.path)
    where = f"{spec.path}: parameters.{wish.name}"
    if value is MISSING or isinstance(value, bool) or not isinstance(value, int | float):
        around = value_at(row.composed.config, field.path[:-1])
        known = list(numbers_in(around)) if isinstance(around, Mapping) else []
        shown = "missing" if value is MISSING else f"{value}"
        hint = did_you_mean(str(field.at[-1]), known)
        raise ConfigError(f"{where}: is {shown}, must be a number in its file{hint}")
    start = value if wish.start is None else wish.start
    if wish.start is None and not wish.low <= start <= wish.high:
        start = min(wish.high, max(wish.low, start))
    is_log = wish.scale == "log" if wish.scale else wish.low > 0
    try:
        return Parameter(
            name=field.name,
            start=float(start),
            low=wish.low,
            high=wish.high,
            prior_mean=wish.prior_mean,
            prior_sd=wish.prior_sd,
            log=is_log,
            whole=_is_whole(field, value),
        )
    except HardwareError as error:
        raise ConfigError(f"{spec.path}: {error}") from error


def _is_whole(field: Field, value: Any) -> bool:
    name = next(key for key in reversed(field.at) if isinstance(key, str))
    kind = _KINDS.get(name, "float").removesuffix(" | None")
    if kind == "Rows":
        return isinstance(value, int)
    return kind == "int"


# -- predictions -----------------------------------------------------------------------------------


class Predictions:
    """The times of rows at some values of parameters, each asked once.

    Parameters
    ----------
    rows
        The rows, composed.
    fields
        The parameters.
    options
        Which file sets what.
    """

    def __init__(self, rows: Sequence[Row], fields: Sequence[Field], options: Options) -> None:
        self._rows = rows
        self.felt = [
            _topmost([f for f in fields if _may_count(f, r) and is_felt(f, r, options)])
            for r in rows
        ]
        self._names = [[field.name for field in own] for own in self.felt]
        self._groups = [[str(field.path[0]) for field in own] for own in self.felt]
        self._bases = {
            group: [json.dumps(row.composed.config[group], sort_keys=True) for row in rows]
            for group in _BUILT
        }
        self._known: list[dict[tuple[float, ...], float]] = [{} for _ in rows]
        self._parts: dict[tuple[Any, ...], Any] = {}

    def __call__(self, values: Mapping[str, float]) -> list[float]:
        """Return the times in ns of all rows; HardwareError names a row that cannot be."""
        return [self._time_ns(i, values) for i in range(len(self._rows))]

    def _time_ns(self, i: int, values: Mapping[str, float]) -> float:
        known = self._known[i]
        key = tuple([values[name] for name in self._names[i]])
        if key not in known:
            if len(known) > _KEPT:
                known.clear()
            known[key] = self._new_time_ns(i, key)
        return known[key]

    def _new_time_ns(self, i: int, values: tuple[float, ...]) -> float:
        row = self._rows[i]
        try:
            machine, engine = (self._part(i, group, values) for group in _BUILT)
            config = None
            if not _BUILT.keys() >= set(self._groups[i]):
                config = changed(row.composed.config, dict(zip(self.felt[i], values, strict=True)))
            return row.time_ns(machine, engine, config)
        except HardwareError as error:
            raise HardwareError(f"row {row.name}: {error}") from error

    def _part(self, i: int, group: str, values: tuple[float, ...]) -> Any:
        """Return a machine or engine with its values, built once for all rows that are composed alike."""
        named = zip(self._names[i], self._groups[i], values, strict=True)
        own = [(name, value) for name, of, value in named if of == group]
        key = (group, self._bases[group][i], *own)
        if key not in self._parts:
            if len(self._parts) > _KEPT:
                self._parts.clear()
            by_name = dict(own)
            fields = {f: by_name[f.name] for f in self.felt[i] if f.name in by_name}
            config = changed(self._rows[i].composed.config, fields)
            self._parts[key] = _BUILT[group].from_mapping(config[group], group)
        return self._parts[key]


def _may_count(field: Field, row: Row) -> bool:
    """Tell whether a row may depend on a field: a microbenchmark does on one part of the machine only."""
    group, part, *_ = (*field.path, "")
    if row.measurement is None or group != "machine" or part not in _MACHINE_PARTS:
        return True
    return row.measurement.depends_on(str(part))


def _topmost(fields: Sequence[Field]) -> list[Field]:
    """Return the fields without those that another one stands above, as a whole machine's above a part's."""
    depth = {f.path: min(g.group.count("/") for g in fields if g.path == f.path) for f in fields}
    return [f for f in fields if f.group.count("/") == depth[f.path]]


def changed(config: Mapping[str, Any], values: Mapping[Field, float]) -> dict[str, Any]:
    """Return a configuration with other values; the one given stays as it is."""
    tree: Any = config
    for field, value in values.items():
        tree = _with(tree, field.path, value)
    return dict(tree)


def _with(tree: Any, path: Keys, value: Any) -> Any:
    if not path:
        return value
    copy = list(tree) if isinstance(tree, list | tuple) else dict(tree)
    copy[path[0]] = _with(tree[path[0]], path[1:], value)  # type: ignore[index]
    return copy
