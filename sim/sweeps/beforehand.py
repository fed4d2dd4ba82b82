"""What is done about a sweep's points before any runs: hopeless ones are refused, all are written down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hwmodels.errors import HardwareError
from sim.point import overridden, resolved_yaml
from sim.settings import check_settings
from sim.sweeps.chunk import Point, config_of, plain
from sim.types import ConfigError
from traces.schema import TraceError

Bases = Mapping[int, Mapping[str, Any]]
_MOST_SHOWN = 8


def refuse_hopeless(points: Sequence[Point], bases: Bases) -> None:
    """Raise the error that every point of a sweep would end in, if it is the same one in all.

    Settings, model, machine and engine are looked at, but no trace is read: at all points only if the
    first ones fail. An error that some points have for themselves is theirs, and left to them.
    """
    first: str | None = None
    for point in points:
        error = _mistake(config_of(bases[point.base], point.edits))
        if error is None or str(error) != (first or str(error)):
            return
        first = str(error)
    if first is not None:
        raise ConfigError(first)


def _mistake(config: Mapping[str, Any]) -> Exception | None:
    """Return what is wrong with a configuration by itself, or that its trace is not there."""
    from sim.build import described, load_trace, resolve_path

    try:
        check_settings(config)
        described(config)
        if not resolve_path(config["trace"]["path"]).exists():
            load_trace(config["trace"]["path"])  # which says so
    except (ConfigError, HardwareError, TraceError) as error:
        return error
    except Exception:  # a defect: the point itself will tell of it
        return None
    return None


def first_config(points: Sequence[Point], bases: Bases, num_points: int) -> str:
    """Return the resolved configuration of the first point as YAML, with a comment on what the others vary.

    ``points`` are those known beforehand, of ``num_points`` in all.
    """
    first = points[0]
    config = resolved_yaml(config_of(bases[first.base], first.edits))
    if num_points == 1:
        return f"# Resolved configuration of the one point.\n{config}"
    lines = [f"# Resolved configuration of point {first.number} of {num_points}. Varied:"]
    lines += [f"#   {key}: {_listed(values)}" for key, values in _varied(points).items()]
    if len(points) < num_points:
        lines.append(f"# as far as the first {len(points)} tell: the others follow from results")
    return "\n".join([*lines, config])


def _varied(points: Sequence[Point]) -> dict[str, list[str]]:
    """Return what points set differently, or not all: keys, with their values in the order of the points."""
    found: dict[str, list[str]] = {}
    for point in points:
        for key, value in overridden(point.overrides).items():
            found.setdefault(key, []).append(value)
    distinct = {key: list(dict.fromkeys(values)) for key, values in found.items()}
    some = {key for key, values in found.items() if len(values) < len(points)}
    return {key: values for key, values in distinct.items() if len(values) > 1 or key in some}


def _listed(values: Sequence[str]) -> str:
    """Return values as one line that a comment can hold."""
    more = f", ... ({len(values)} values)" if len(values) > _MOST_SHOWN else ""
    return plain(", ".join(values[:_MOST_SHOWN])) + more
