"""The table of a sweep's runs: which columns, how each is written, in which order; and notes on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table

from sim.labels import Row, device, value, varying
from sim.report_batch import UNION
from sim.report_batch import WHEN as WHEN_BATCH
from sim.report_quality import LEGEND, QUALITY, WHEN


def wanted_columns(rows: Sequence[Row]) -> list[str]:
    """Return the columns of COLUMNS in which these rows have something to say."""
    return [name for name in COLUMNS if name not in _RARE or any(_RARE[name](r) for r in rows)]


def results_table(rows: Sequence[Row], columns: Sequence[str]) -> Table:
    """Return a line for each row: setting by setting, and there the fastest first."""
    table = Table()
    fields = varying(rows)
    for name in ("policy", *fields):
        table.add_column(name, no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    groups = sorted({_group(row, fields) for row in rows}, key=natural)
    for group in groups:
        members = [row for row in rows if _group(row, fields) == group]
        for row in sorted(members, key=lambda row: -(row["tokens_per_s"] or 0.0)):
            name = row["policy"] + (" *" if row["oracle"] else "") + (" ~" if row["lossy"] else "")
            cells = [value(row, field) for field in fields]
            table.add_row(name, *cells, *(COLUMNS[column](row) for column in columns))
        table.add_section()
    return table


def _group(row: Row, fields: Sequence[str]) -> tuple[Any, ...]:
    """Return what runs must share to be compared: all but the policy and its own parameters."""
    shared = [value(row, field) for field in fields if not field.startswith("policy.")]
    return (*shared, row["cache_ratio"])


def natural(group: tuple[Any, ...]) -> list[tuple[float, str]]:
    """Return a key that sorts numbers by size and words by letters."""
    keys = []
    for part in map(str, group):
        try:
            keys.append((float(part), ""))
        except ValueError:
            keys.append((math.inf, part))
    return keys


def share_of(value: float | None) -> str:
    """Return a share as percent; a dash for None."""
    return "-" if value is None else f"{100 * value:.1f}%"


def bound_word(cause: str | None, row: Row) -> str:
    """Return a cause in a word, where a machine without a GPU computes on its CPU."""
    return device(row).lower() if cause == "gpu" else cause or "-"


def _gap(row: Row) -> str:
    gap = row["belady_gap"]
    return "-" if gap is None else f"{100 * gap:+.1f} pp"


COLUMNS: dict[str, Callable[[Row], str]] = {
    "cache": lambda row: share_of(row["cache_ratio"]),
    "tokens/s": lambda row: "-" if row["tokens_per_s"] is None else f"{row['tokens_per_s']:.1f}",
    "TPOT p50 ms": lambda row: (
        "-" if row["tpot_ns_p50"] is None else f"{row['tpot_ns_p50'] / 1e6:.2f}"
    ),
    "hit rate": lambda row: share_of(row["hit_rate"]),
    "to Belady": _gap,
    **QUALITY,
    **UNION,
    "GB moved": lambda row: f"{(row['h2d_bytes'] or row['read_bytes']) / 1e9:.1f}",
    "GPU": lambda row: share_of(row["gpu_share"]),
    "link stall": lambda row: share_of(row["link_stall_share"]),
    "CPU stall": lambda row: share_of(row["cpu_stall_share"]),
    "storage stall": lambda row: share_of(row["storage_stall_share"]),
    "DRAM stall": lambda row: share_of(row["dram_stall_share"]),
    "host stall": lambda row: share_of(row["host_stall_share"]),
    "refused": lambda row: str(row["refused"]),
    "bottleneck": lambda row: bound_word(row["bottleneck"], row),
}


_RARE_SHARE = 0.01
_RARE: dict[str, Callable[[Row], bool]] = {
    "storage stall": lambda row: (row["storage_stall_share"] or 0.0) >= _RARE_SHARE,
    "DRAM stall": lambda row: (row["dram_stall_share"] or 0.0) >= _RARE_SHARE,
    "host stall": lambda row: (row["host_stall_share"] or 0.0) >= _RARE_SHARE,
    "refused": lambda row: row["refused"] > 0,
    **WHEN,
    **WHEN_BATCH,
}
"""Columns to show only where one of the rows has something to say in them."""
FEWEST = 3
DISPENSABLE = (
    "host stall",
    "DRAM stall",
    "storage stall",
    "CPU stall",
    "link stall",
    "GPU",
    "union",
    "TPOT p50 ms",
    "GB moved",
    "refused",
    "bottleneck",
    "to Belady",
)
"""Columns to leave out where there is no room, the first first."""
COLUMNS_LEGEND = (
    "hit rate: experts found where they compute / experts used, by (step, layer). to Belady: how many "
    "more the optimum of the same size has. GB moved: to there."
)
UNION_LEGEND = "union: experts of a layer that a decode step uses."


def note_lines(rows: Sequence[Row]) -> list[str]:
    """Return what a reader of the rows must know of them."""
    notes = ["* knows the future."] if any(row["oracle"] for row in rows) else []
    notes += [LEGEND] if any(row["lossy"] for row in rows) else []
    for note in dict.fromkeys(note for row in rows for note in row["notes"]):
        concerned = ", ".join(dict.fromkeys(row["policy"] for row in rows if note in row["notes"]))
        notes.append(f"Note on {concerned}: {note}.")
    return notes
