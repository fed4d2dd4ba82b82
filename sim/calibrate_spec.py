"""What a calibration is told: a YAML file with rows, parameters, bounds and priors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from hwmodels.fitting import LOSSES
from sim.settings import did_you_mean, is_finite
from sim.types import ConfigError

SCALES = ("log", "linear")
ALONE = "row"
_MOST_VALUES = 1_000_000
_MOST = 1e24
"""No figure comes near it, and squares of quotients of two such stay finite in a fit."""


@dataclass(frozen=True, slots=True)
class Wish:
    """A parameter as a specification gives it; a start that is not given is the file's value."""

    name: str
    low: float
    high: float
    start: float | None = None
    prior_mean: float | None = None
    prior_sd: float | None = None
    scale: str | None = None
    why: str | None = None
    """Where the prior comes from."""


@dataclass(frozen=True, slots=True)
class Specification:
    """A calibration: which rows, which parameters, and how they are weighed.

    ``sigma`` is the relative error that a row may have, the model's own included. ``leave_out`` names the
    column whose rows of one value are left out together (``row``: each alone). Rows of the kinds
    ``expert_cpu`` and ``storage`` that miss by more than ``tolerance`` are written as tables. ``whole``:
    all files of the machine are made from the rows (:mod:`sim.calibrate_machine`).
    """

    name: str
    path: Path
    rows: Path
    wishes: tuple[Wish, ...]
    machine: str | None = None
    engine: str | None = None
    select: Mapping[str, Any] = field(default_factory=dict)
    exclude: Mapping[str, Any] = field(default_factory=dict)
    sigma: float = 0.05
    loss: str = "linear"
    leave_out: str = ALONE
    tolerance: float = 0.1
    whole: bool = False


_KEYS = (
    *("rows", "machine", "engine", "select", "exclude", "sigma", "loss", "leave_out"),
    *("tolerance", "parameters", "whole"),
)
_PARAMETER_KEYS = ("start", "bounds", "prior", "scale")


def known_specifications() -> list[str]:
    """Return the names of those that come with it."""
    folder = resources.files("conf") / "calibration"
    if not folder.is_dir():
        return []
    names = [file.name for file in folder.iterdir() if file.name.endswith(".yaml")]
    return sorted(name.removesuffix(".yaml") for name in names)


def read_specification(
    name: str, rows: str | None = None, machine: str | None = None
) -> Specification:
    """Read one that comes with it, or a file; ``rows`` and ``machine`` stand for what it says.

    Raises ConfigError for the first mistake.
    """
    path = _find(name)
    given = read_yaml(path)
    if not isinstance(given, Mapping):
        raise ConfigError(f"{path}: must be a mapping with rows and parameters")
    for key in given:
        if key not in _KEYS:
            raise ConfigError(f"{path}: {key}: unknown key{did_you_mean(str(key), _KEYS)}")
    given = {key: value for key, value in given.items() if value is not None}
    if machine is not None:
        given["machine"] = machine
    for key in ("machine", "engine"):
        if not isinstance(given.get(key, ""), str):
            raise ConfigError(f"{path}: {key} = {given[key]}: must be the name of an option")
    return Specification(
        name=path.stem,
        path=path,
        rows=_rows_path(path, given.get("rows"), rows),
        wishes=_wishes(path, given.get("parameters")),
        machine=given.get("machine"),
        engine=given.get("engine"),
        select=_filters(path, "select", given.get("select", {})),
        exclude=_filters(path, "exclude", given.get("exclude", {})),
        sigma=_number(path, "sigma", given.get("sigma", 0.05)),
        loss=_one_of(path, "loss", given.get("loss", "linear"), LOSSES),
        leave_out=str(given.get("leave_out", ALONE)),
        tolerance=_number(path, "tolerance", given.get("tolerance", 0.1)),
        whole=_flag(path, "whole", given.get("whole", False)),
    )


def read_yaml(path: Path) -> Any:
    """Return what a YAML file holds; the error for what cannot be read names the file."""
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
        num_values = values_written_out(found, {})
    except RecursionError:
        raise ConfigError(f"{path}: nested too deep, or a part of it holds itself") from None
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}:" if mark is not None else ""
        raise ConfigError(f"{path}:{line} {getattr(error, 'problem', None) or error}") from error
    if num_values > _MOST_VALUES:
        rule = f"must be at most {_MOST_VALUES}"
        raise ConfigError(f"{path}: {num_values:.2g} values where aliases are written out: {rule}")
    return found


def values_written_out(value: Any, known: dict[int, int]) -> int:
    """Return how many values there are when aliases are written out; RecursionError for one of itself.

    ``known`` holds what is known by the identity of lists and mappings.
    """
    if not isinstance(value, list | dict):
        return 1
    if id(value) not in known:
        items = [*value, *value.values()] if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(values_written_out(item, known) for item in items)
    return known[id(value)]


def _find(name: str) -> Path:
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise ConfigError(f"{name}: no such file")
        return path
    known = known_specifications()
    if name not in known:
        hint = did_you_mean(name, known) or (f" (known: {', '.join(known)})" if known else "")
        raise ConfigError(f"calibration = {name}: no such calibration{hint}")
    return Path(str(resources.files("conf") / "calibration" / f"{name}.yaml"))


def _rows_path(path: Path, given: Any, instead: str | None) -> Path:
    """Return where the rows are: as given by hand, else relative to the specification."""
    if instead is not None:
        found = Path(instead)
    elif isinstance(given, str) and given:
        found = Path(os.path.realpath(path.parent / given))  # which stands a link to itself
    else:
        raise ConfigError(f"{path}: rows: missing, must be given (here, or with --rows TABLE)")
    if not found.is_file():
        raise ConfigError(f"{found}: no such file")
    return found


def _wishes(path: Path, given: Any) -> tuple[Wish, ...]:
    if not isinstance(given, Mapping) or not given:
        raise ConfigError(f"{path}: parameters: must map at least one name to its bounds")
    return tuple(_wish(path, str(name), value) for name, value in given.items())


def _wish(path: Path, name: str, given: Any) -> Wish:
    where = f"parameters.{name}"
    if not isinstance(given, Mapping):
        raise ConfigError(f"{path}: {where} = {given}: must be a mapping with bounds")
    for key in given:
        if key not in _PARAMETER_KEYS:
            hint = did_you_mean(str(key), _PARAMETER_KEYS)
            raise ConfigError(f"{path}: {where}.{key}: unknown key{hint}")
    bounds = given.get("bounds")
    if not isinstance(bounds, list) or len(bounds) != 2:
        raise ConfigError(f"{path}: {where}.bounds = {bounds}: must be [low, high]")
    low, high = (_number(path, f"{where}.bounds", value, None) for value in bounds)
    if low >= high:
        raise ConfigError(f"{path}: {where}.bounds = {bounds}: must be [low, high], low < high")
    start, scale = given.get("start"), given.get("scale")
    if start is not None and not low <= _number(path, f"{where}.start", start, None) <= high:
        raise ConfigError(f"{path}: {where}.start = {start}: must lie within bounds = {bounds}")
    if scale is not None:
        _one_of(path, f"{where}.scale", scale, SCALES)
    return Wish(
        name, low, high, start, *_prior(path, where, given.get("prior")), scale, _why(given)
    )


def _prior(path: Path, where: str, given: Any) -> tuple[float | None, float | None]:
    if given is None:
        return None, None
    if not isinstance(given, Mapping) or set(given) != {"mean", "sd", "why"}:
        rule = "must have mean, sd and why (where it comes from)"
        raise ConfigError(f"{path}: {where}.prior = {given}: {rule}")
    return (
        _number(path, f"{where}.prior.mean", given["mean"], None),
        _number(path, f"{where}.prior.sd", given["sd"]),
    )


def _why(given: Mapping[str, Any]) -> str | None:
    return str(given["prior"]["why"]) if given.get("prior") else None


def _filters(path: Path, key: str, given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise ConfigError(f"{path}: {key} = {given}: must map columns to values")
    return {str(column): value for column, value in given.items()}


def _number(path: Path, key: str, value: Any, least: float | None = 0) -> float:
    """Return a finite number, which must be above ``least``."""
    if not is_finite(value):
        raise ConfigError(f"{path}: {key} = {value}: must be a finite number")
    if abs(value) > _MOST or (least is not None and 0 < value < 1 / _MOST):
        rule = f"must be at most {_MOST:g} in size, and no nearer to 0 than {1 / _MOST:g}"
        raise ConfigError(f"{path}: {key} = {value}: {rule}")
    if least is not None and value <= least:
        raise ConfigError(f"{path}: {key} = {value}: must be > {least}")
    return float(value)


def _flag(path: Path, key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{path}: {key} = {value}: must be true or false")
    return value


def _one_of(path: Path, key: str, value: Any, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ConfigError(f"{path}: {key} = {value}: must be {' or '.join(known)}")
    return str(value)
