"""What the verdict says of policies that play another game: lossy ones and oracles."""

from __future__ import annotations

from collections.abc import Mapping

from sim.html.contest import TIE, Contest, Setting
from sim.html.words import listed, percent, span, times
from sim.league import given_up_by

_MINE = {"lossless": "lossless policy", "lossy": "lossy policy"}


def lossy_note(played: Mapping[str, Contest]) -> str:
    """Compare the lossy policies with the lossless ones; empty where either did not run."""
    found = _against(played, "lossy")
    if not found:
        return ""
    faster = [(setting, ratio) for setting, ratio in found if ratio > 1 + TIE]
    if not faster:
        best = max(ratio for _, ratio in found)
        return f"No lossy policy is faster than the lossless ones: {times(best)} their fastest at most."
    names = list(dict.fromkeys(setting.of("lossy")[0] for setting, _ in faster))
    rows = [setting.rows[setting.of("lossy")[0]] for setting, _ in faster]
    shares = [share for share in map(given_up_by, rows) if share is not None]
    much = f" ({span(shares, percent)} of what the router chose)" if shares else ""
    return (
        f"{listed(names)}, which {_verb(names, 'change')} the model's answer{much}, "
        f"{_verb(names, 'are', 'is')} faster than every lossless policy in {len(faster)} of "
        f"{len(found)} settings, {_by(faster)}."
    )


def oracle_note(played: Mapping[str, Contest]) -> str:
    """Compare those who know the future with those who do not; empty where either did not run."""
    main = next(kind for kind in played)
    found = _against(played, "oracle") if main != "oracle" else []
    if not found:
        return ""
    faster = [(setting, ratio) for setting, ratio in found if ratio > 1 + TIE]
    if not faster:
        best = max(ratio for _, ratio in found)
        return f"No oracle is faster than the fastest {_MINE[main]}: {times(best)} at most."
    names = list(dict.fromkeys(setting.of("oracle")[0] for setting, _ in faster))
    return (
        f"{listed(names)}, which {_verb(names, 'know')} the future, {_verb(names, 'are', 'is')} faster "
        f"than the fastest {_MINE[main]} in {len(faster)} of {len(found)} settings, {_by(faster)}."
    )


def _against(played: Mapping[str, Contest], kind: str) -> list[tuple[Setting, float]]:
    """Return the best of a class over the best of the first one, in the settings that have both."""
    main = next(iter(played.values()))
    if kind not in played or main.kind == kind:
        return []
    both = [setting for setting in played[kind].settings if setting.of(main.kind)]
    return [(s, s.speed(s.of(kind)[0]) / s.speed(s.of(main.kind)[0])) for s in both]


def _by(faster: list[tuple[Setting, float]]) -> str:
    return f"by {span([ratio for _, ratio in faster], times)}"


def _verb(names: list[str], plural: str, singular: str | None = None) -> str:
    return plural if len(names) > 1 else singular or f"{plural}s"
