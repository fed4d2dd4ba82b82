"""The same wish on changed machines: what would another part, or another machine, bring?"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sim.advise import Point
from sim.advise_standing import best_with_rows
from sim.advise_table import row_of
from sim.frontier import best_of, too_large
from sim.types import ConfigError

_CHANGE = re.compile(r",(?=\s*[~+]*machine\b[\w./@]*\s*=|\s*~machine\b|\s*$)")
"""A comma between two machines, not one inside a value; in front of a next key, or last."""
_MACHINE = re.compile(r"[~+]*machine([/.@][\w./@]+)?")


def changes_of(text: str) -> list[tuple[str, ...]]:
    """Return the changed machines of ``--compare``: by commas, several overrides of one by spaces.

    Raises ConfigError for what does not change the machine.
    """
    found = [change for part in _CHANGE.split(text) for change in _options(tuple(part.split()))]
    for change in found:
        if not change:
            raise ConfigError(f"--compare {text}: must be changed machines by commas")
        for override in change:
            key, equals, value = override.partition("=")
            is_whole = value != "" if equals else override.startswith("~")
            if not _MACHINE.fullmatch(key) or not is_whole:
                raise ConfigError(
                    f"--compare {override}: must change the machine, as machine/gpu=rtx4090 or "
                    "machine=rtx5090_9950x3d"
                )
    return found


def _options(change: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return one change for each option that a single one names: machine=a,b is two machines."""
    key, _, value = "".join(change).partition("=")
    if len(change) != 1 or "." in key or "," not in value:
        return [change]
    return [(f"{key}={option}",) for option in value.split(",")]


def changed(overrides: Sequence[str], change: Sequence[str]) -> list[str]:
    """Return overrides with a change in place of what it replaces.

    Another machine replaces all that was said of the first, another part what was said of that part.
    """
    keys = [_key(text) for text in change]
    return [*(text for text in overrides if not _is_replaced(_key(text), keys)), *change]


def _lacks(points: Sequence[Point]) -> str | None:
    """Return what the way that needs least lacks, where none fits."""
    if best_of(points) is not None:
        return None
    return "; ".join(min(too_large(points), key=lambda p: p.memory_bytes).found.problems)


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def _is_replaced(key: str, by: Sequence[str]) -> bool:
    if "machine" in by and key.startswith(("machine/", "machine.", "machine@")):
        return True
    parts = [other.replace("/", ".") + "." for other in by if "/" in other]
    return key in by or any(key.startswith(part) for part in parts)


def compare(
    points: Sequence[Point],
    changes: Sequence[Sequence[str]],
    search_with: Callable[[Sequence[str]], list[Point]],
    rows: Mapping[str, int],
) -> list[dict[str, Any]]:
    """Search on each changed machine; return the best, and the best held, of it and of the first.

    ``gain`` is tokens/s over those of the first machine's - 1; None where either has none that fits.
    """
    machines = [("as it is", points)]
    machines += [(" ".join(change), search_with(change)) for change in changes]
    found: list[dict[str, Any]] = []
    for name, its in machines:
        bests = {"best": best_of(its), "best held": best_with_rows(its, rows)}
        found += [
            {"machine": name, "name": its[0].case.costs.machine.name, "of": of, "gain": None}
            | (
                {"tokens_per_s": None, "lacks": _lacks(its)}
                if point is None
                else row_of(point, rows)
            )
            for of, point in bests.items()
        ]
    first: dict[Any, Any] = {row["of"]: row["tokens_per_s"] for row in found[:2]}
    for row in found[2:]:
        before, now = first[row["of"]], row["tokens_per_s"]
        row["gain"] = now / before - 1 if before and now else None
    return found
