"""The league table of a sweep: every policy against one of them, setting by setting.

A *setting* is all that rows of a sweep may share: trace, model, machine, engine, batch, cache size and
overrides other than a policy's own. In each the speed of a policy is divided by that of the baseline;
the table has the geometric mean of these ratios, the worst and the best of them. Policies that know the
future, whose accuracy is assumed, or that change the answer have tables of their own: theirs is another
game. A policy that did not run in every setting is compared where it did, and the count says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sim.labels import UNSET, Row, short_names, value, varying

CLASSES = ("lossless", "lossy", "oracle")
_TITLES = {
    "lossless": "lossless, online or calibrated beforehand",
    "lossy": "lossy: they change the model's answer",
    "oracle": "oracles, and assumed accuracy: they are given the future",
}
_BASELINES = ("ablation_base", "lru", "on_demand")
"""What others are compared with if nobody says otherwise, the first that is there."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A policy's place: ``mean``, ``worst`` and ``best`` are speeds over the baseline's.

    ``wins`` counts the settings in which nobody of its class was faster; ``hit_rate`` is the mean,
    ``moved`` the geometric mean of bytes over the baseline's (None where either moves none), ``given_up``
    the mean share of router mass that was not computed as chosen (None if lossless or unknown).
    """

    policy: str
    kind: str
    settings: int
    mean: float
    worst: float
    best: float
    wins: int
    hit_rate: float | None
    moved: float | None
    given_up: float | None


def league(
    rows: Sequence[Row],
    baseline: str | None = None,
    *,
    least_policies: int = 3,
    least_settings: int = 2,
) -> tuple[str, list[Standing]]:
    """Return the baseline and the standings: by class, the fastest first.

    Empty where the rows have no baseline, or fewer policies or settings than these.
    """
    cells = settings_of(rows)
    names = list(dict.fromkeys(names_of(rows)))
    if baseline is None:
        baseline = usual_baseline(names)
    if baseline not in names or len(names) < least_policies or len(cells) < least_settings:
        return "", []
    shared = {cell: rows_of for cell, rows_of in cells.items() if baseline in rows_of}
    found = [_standing(name, baseline, shared) for name in names]
    places = {kind: place for place, kind in enumerate(CLASSES)}
    kept = [standing for standing in found if standing is not None]
    return baseline, sorted(kept, key=lambda s: (places[s.kind], -s.mean, s.policy))


def title_of(kind: str) -> str:
    """Return what a class of policies is, in words."""
    return _TITLES[kind]


def kind_of(row: Row) -> str:
    """Return the class that a policy plays in."""
    if row["oracle"] or row.get("assumed"):
        return "oracle"
    return "lossy" if row["lossy"] else "lossless"


def usual_baseline(names: Sequence[str]) -> str | None:
    """Return whom these are compared with if nobody says otherwise; None where no such policy ran."""
    return next((name for name in _BASELINES if name in names), None)


def names_of(rows: Sequence[Row]) -> list[str]:
    """Return a policy's name for each row, with those of its parameters that were set and vary."""
    own = [field for field in varying(rows) if field.startswith("policy.")]
    return [" ".join([row["policy"], *_parameters(row, own)]) for row in rows]


def _parameters(row: Row, fields: Sequence[str]) -> list[str]:
    told = ((name, value(row, field)) for field, name in short_names(fields).items())
    return [f"{name}={text}" for name, text in told if text != UNSET]


def names_by_row(rows: Sequence[Row]) -> dict[int, str]:
    """Return :func:`names_of` by the ``id()`` of each row, for whoever goes on with some of the rows."""
    return dict(zip(map(id, rows), names_of(rows), strict=True))


def rows_by_name(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of each of :func:`names_of`, in order."""
    groups: dict[str, list[Row]] = {}
    for name, row in zip(names_of(rows), rows, strict=True):
        groups.setdefault(name, []).append(row)
    return groups


def settings_of(rows: Sequence[Row]) -> dict[tuple[Any, ...], dict[str, Row]]:
    """Return the rows that have a speed by setting, and there by name.

    A setting is the texts of :func:`setting_fields`, and last the cache ratio.
    """
    fields = setting_fields(rows)
    cells: dict[tuple[Any, ...], dict[str, Row]] = {}
    for name, row in zip(names_of(rows), rows, strict=True):
        if row["tokens_per_s"]:
            cell = (*(value(row, field) for field in fields), row["cache_ratio"])
            cells.setdefault(cell, {})[name] = row
    return cells


def setting_fields(rows: Sequence[Row]) -> list[str]:
    """Return the fields, beside the cache ratio, whose values tell settings of these rows apart."""
    return [field for field in varying(rows) if not field.startswith("policy.")]


def _standing(
    name: str, baseline: str, cells: dict[tuple[Any, ...], dict[str, Row]]
) -> Standing | None:
    pairs = [(cell[name], cell[baseline]) for cell in cells.values() if name in cell]
    if not pairs:
        return None
    ratios = [row["tokens_per_s"] / base["tokens_per_s"] for row, base in pairs]
    kind = kind_of(pairs[0][0])
    moved = [_bytes(row) / _bytes(base) for row, base in pairs if _bytes(row) and _bytes(base)]
    return Standing(
        policy=name,
        kind=kind,
        settings=len(pairs),
        mean=geometric(ratios),
        worst=min(ratios),
        best=max(ratios),
        wins=sum(_leads(name, kind, cell) for cell in cells.values() if name in cell),
        hit_rate=_mean(row["hit_rate"] for row, _ in pairs),
        moved=geometric(moved) if len(moved) == len(pairs) else None,
        given_up=_mean(given_up_by(row) for row, _ in pairs),
    )


def _leads(name: str, kind: str, cell: dict[str, Row]) -> bool:
    """Tell whether nobody of a class is faster than one of its policies, in a setting in which that ran."""
    fastest = max(row["tokens_per_s"] for row in cell.values() if kind_of(row) == kind)
    return bool(cell[name]["tokens_per_s"] >= fastest)


def _bytes(row: Row) -> int:
    return int(row["h2d_bytes"] or row["read_bytes"])


def given_up_by(row: Row) -> float | None:
    """Return the share of router mass (of slots, where weights are unknown) not computed as chosen."""
    for what in ("mass", "slot"):
        shares = [row.get(f"{kind}_{what}_rate") for kind in GIVEN_UP]
        known = [share for share in shares if share is not None]
        if known:
            return float(sum(known))
    return None


GIVEN_UP = ("substituted", "dropped", "low", "deferred")


def geometric(ratios: Sequence[float]) -> float:
    """Return the geometric mean."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def _mean(values: Iterable[float | None]) -> float | None:
    known = [one for one in values if one is not None]
    return sum(known) / len(known) if known else None
