"""The roofline of a run as a table, and as a file beside its summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sim.labels import Row
from sim.results import ROOFLINE as ROOFLINE
from sim.results import write_csv
from sim.roofline import KERNELS

_STEPS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_COLUMNS = ("for a token", "achieved /s", "limit /s", "rated /s", "of limit", "busy", "busy: of limit",
            "step waits", "least ms", "roof tokens/s", "times from it")  # fmt: skip


def print_roofline(console: Console, run: Row, folder: Path) -> None:
    """Print a run's roofline, and draw it."""
    from sim.figures.rooflines import plot_run

    console.print(roofline_table(run["roofline"]))
    console.print(roofline_line(run["roofline"]), highlight=False)
    figure = plot_run(run, folder / "roofline")
    console.print(f"Figure: {figure}", highlight=False, soft_wrap=True)


def roofline_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of a roofline's rows; what the columns mean is at the head of sim/roofline.py."""
    table = Table(title="Roofline", title_justify="left")
    table.add_column("resource", no_wrap=True)
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        unit = row["unit"]
        table.add_row(
            row["resource"],
            amount(row["amount_per_token"], unit),
            *(amount(row[f"{name}_per_s"], unit) for name in ("achieved", "limit", "rated")),
            *(_share(row[name]) for name in ("utilisation", "busy_share", "busy_utilisation")),
            _share(row["waited_share"]),
            f"{row['least_ns_per_token'] / 1e6:.3g}",
            f"{row['tokens_per_s_limit']:.4g}",
            f"{row['times_from_limit']:.3g}",
        )
    return table


def roofline_line(rows: Sequence[Mapping[str, Any]]) -> str:
    """Say in a sentence which resource binds, and how far from it the run is."""
    row = rows[0]
    return (
        f"Roofline: bound by {row['resource']}: {row['tokens_per_s']:.1f} of "
        f"{row['tokens_per_s_limit']:.1f} tokens/s, {row['times_from_limit']:.2f} times from its limit; "
        f"a token takes at least {amount(row['amount_per_token'], row['unit'])} at "
        f"{amount(row['limit_per_s'], row['unit'])}/s."
    )


def write_roofline(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the rows as CSV."""
    write_csv(path, rows)


def amount(value: float | None, unit: str) -> str:
    """Return an amount with its unit, as ``25.2 GB``; a dash for None."""
    if value is None:
        return "-"
    scale, prefix = next(((s, p) for s, p in _STEPS if value >= s), (1, ""))
    return f"{value / scale:.3g} {prefix}{'' if unit == KERNELS else unit}".rstrip()


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"
