"""What ``greenroom sim`` shows on stdout: one run, or the table of a sweep, and where the files are."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sim.labels import Row, origin, value, varying


def print_run(summary: Row, folder: Path) -> None:
    """Print one run's figures and its folder, the folder last."""
    console = _console()
    _print_table(console, [summary])
    for line in _details(summary):
        console.print(line, highlight=False)
    console.print(f"Results: {folder}", highlight=False, soft_wrap=True)


def print_sweep(rows: Sequence[Row], folder: Path) -> None:
    """Print a sweep's table, draw its figures, and say where everything is."""
    from sim.plots import plot_sweep

    figures = plot_sweep(rows, folder)  # first: a reader who goes away must not cost them
    console = _console()
    _print_table(console, rows)
    for note in [_LEGEND, *_notes(rows)]:
        console.print(note, highlight=False)
    for figure in figures:
        console.print(f"Figure: {figure}", highlight=False, soft_wrap=True)
    console.print(f"Results: {folder}", highlight=False, soft_wrap=True)


def _console() -> Console:
    """Return a console that keeps tables whole when stdout is a file or a pipe."""
    return Console(width=None if sys.stdout.isatty() else 200)


def _print_table(console: Console, rows: Sequence[Row]) -> None:
    """Print the widest table that fits; narrow terminals lose columns, never digits."""
    console.print(origin(rows), highlight=False)
    columns = list(_COLUMNS)
    while True:
        table = _table(rows, columns)
        if _width(console, table) <= console.width or len(columns) <= _FEWEST:
            break
        columns.remove(next(name for name in _DISPENSABLE if name in columns))
    console.print(table)
    if len(columns) < len(_COLUMNS):
        left_out = ", ".join(name for name in _COLUMNS if name not in columns)
        console.print(f"Left out for want of width: {left_out}.", highlight=False)


def _width(console: Console, table: Table) -> int:
    """Return the width at which a table shows every cell in full."""
    return table.__rich_measure__(console, console.options.update(max_width=_VERY_WIDE)).maximum


def _table(rows: Sequence[Row], columns: Sequence[str]) -> Table:
    table = Table()
    fields = varying(rows)
    for name in ("policy", *fields):
        table.add_column(name, no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    groups = sorted({_group(row, fields) for row in rows}, key=_natural)
    for group in groups:
        members = [row for row in rows if _group(row, fields) == group]
        for row in sorted(members, key=lambda row: -(row["tokens_per_s"] or 0.0)):
            name = row["policy"] + (" *" if row["oracle"] else "") + (" ~" if row["lossy"] else "")
            cells = [value(row, field) for field in fields]
            table.add_row(name, *cells, *(_COLUMNS[column](row) for column in columns))
        table.add_section()
    return table


def _group(row: Row, fields: Sequence[str]) -> tuple[Any, ...]:
    """Return what runs must share to be compared: all but the policy and its own parameters."""
    shared = [value(row, field) for field in fields if not field.startswith("policy.")]
    return (*shared, row["cache_ratio"])


def _natural(group: tuple[Any, ...]) -> list[tuple[float, str]]:
    """Return a key that sorts numbers by size and words by letters."""
    keys = []
    for part in map(str, group):
        try:
            keys.append((float(part), ""))
        except ValueError:
            keys.append((math.inf, part))
    return keys


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"


def _gap(row: Row) -> str:
    gap = row["belady_gap"]
    return "-" if gap is None else f"{100 * gap:+.1f} pp"


_COLUMNS: dict[str, Callable[[Row], str]] = {
    "cache": lambda row: _share(row["cache_ratio"]),
    "tokens/s": lambda row: "-" if row["tokens_per_s"] is None else f"{row['tokens_per_s']:.1f}",
    "TPOT p50 ms": lambda row: (
        "-" if row["tpot_ns_p50"] is None else f"{row['tpot_ns_p50'] / 1e6:.2f}"
    ),
    "hit rate": lambda row: _share(row["hit_rate"]),
    "to Belady": _gap,
    "GB moved": lambda row: f"{row['h2d_bytes'] / 1e9:.1f}",
    "GPU": lambda row: _share(row["gpu_share"]),
    "link stall": lambda row: _share(row["link_stall_share"]),
    "CPU stall": lambda row: _share(row["cpu_stall_share"]),
    "bottleneck": lambda row: str(row["bottleneck"]),
}


_FEWEST = 3
_VERY_WIDE = 10_000
_DISPENSABLE = (
    "CPU stall",
    "link stall",
    "GPU",
    "TPOT p50 ms",
    "GB moved",
    "bottleneck",
    "to Belady",
)
"""Columns to leave out where there is no room, the first first."""
_LEGEND = (
    "hit rate: experts found on the GPU / experts used, by (step, layer). to Belady: how many more the "
    "optimum of the same size has. GB moved: host to GPU."
)


def _notes(rows: Sequence[Row]) -> list[str]:
    notes = ["* knows the future."] if any(row["oracle"] for row in rows) else []
    for note in dict.fromkeys(note for row in rows for note in row["notes"]):
        concerned = ", ".join(dict.fromkeys(row["policy"] for row in rows if note in row["notes"]))
        notes.append(f"Note on {concerned}: {note}.")
    return notes


def _details(row: Row) -> list[str]:
    ttft = row["ttft_ns_p50"]
    lines = [
        f"{row['requests']} requests, {row['prompt_tokens']} prompt and {row['output_tokens']} output "
        f"tokens in {row['total_ns'] / 1e9:.3f} s simulated; "
        f"TTFT p50 {'-' if ttft is None else f'{ttft / 1e6:.1f} ms'}; GPU memory used "
        f"{row['gpu_bytes'] / 1e9:.2f} GB, {row['cache_bytes'] / 1e9:.2f} GB of it expert cache.",
    ]
    return lines + _notes([row])
