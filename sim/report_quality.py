"""What a lossy run's quality ledger says, as columns of the table and as a line about one run."""

from __future__ import annotations

from collections.abc import Callable

from sim.labels import Row

Cell = Callable[[Row], str]


def _rate(row: Row, *kinds: str, unit: str) -> float | None:
    """Return the sum of rates of these kinds, by mass or slot; of decode steps where there are any."""
    prefix = "" if row.get("decode_route_agreement") is None else "decode_"
    rates = [row.get(f"{prefix}{kind}_{unit}_rate") for kind in kinds]
    return None if None in rates else sum(rate for rate in rates if rate is not None)


def _shown(rate: float | None) -> str:
    return "-" if rate is None else f"{100 * rate:.1f}%"


def _by_mass(*kinds: str) -> Cell:
    """Return a column: the share of router mass, or of slots in a trace without weights."""

    def cell(row: Row) -> str:
        if not row["lossy"]:
            return "-"
        mass = _rate(row, *kinds, unit="mass")
        return _shown(_rate(row, *kinds, unit="slot")) + " slots" if mass is None else _shown(mass)

    return cell


def _is_some(kind: str) -> Callable[[Row], bool]:
    return lambda row: bool(row.get(f"{kind}_slot_rate"))


QUALITY: dict[str, Cell] = {
    "slots changed": lambda row: (
        _shown(_rate(row, "substituted", "dropped", unit="slot")) if row["lossy"] else "-"
    ),
    "mass changed": _by_mass("substituted", "dropped"),
    "low bits": _by_mass("low"),
    "late": _by_mass("deferred"),
}
"""Columns for sweeps with lossy runs, never left out there."""
WHEN: dict[str, Callable[[Row], bool]] = {
    "slots changed": lambda row: bool(row["lossy"]),
    "mass changed": lambda row: bool(row["lossy"]),
    "low bits": _is_some("low"),
    "late": _is_some("deferred"),
}
"""Which of the rows make such a column worth showing."""
LEGEND = (
    "~ changes the model's answer. slots changed: experts of a token that another one, or none, stands in "
    "for. mass changed: the router's weight on them; low bits, late: that computed in low precision, or "
    "added a layer late; while decoding."
)


def ledger_lines(row: Row) -> list[str]:
    """Return the quality ledger of one lossy run in words; nothing for a lossless one."""
    if not row["lossy"]:
        return []
    lines = [_ledger_line(row, "decode_", "while decoding"), _ledger_line(row, "", "in all steps")]
    return [line for line in lines if line]


def _ledger_line(row: Row, prefix: str, when: str) -> str:
    if row.get(f"{prefix}route_agreement") is None:
        return ""
    parts = []
    for kind, words in _WORDS.items():
        slots = row[f"{prefix}{kind}_slot_rate"]
        if slots:
            mass = row[f"{prefix}{kind}_mass_rate"]
            of_mass = "" if mass is None else f" ({_shown(mass)} of the router's weight)"
            parts.append(f"{_shown(slots)} {words}{of_mass}")
    kl = row[f"{prefix}route_kl"]
    told = "" if kl is None else f"; divergence {kl:.4f} nats a token and layer"
    changes = ", ".join(parts) or "nothing given up"
    return f"Quality ledger, {when}, of the experts that tokens chose: {changes}{told}."


_WORDS = {
    "substituted": "replaced",
    "dropped": "dropped",
    "low": "in low precision",
    "deferred": "a layer late",
}
