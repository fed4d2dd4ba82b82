"""What ``greenroom sim`` shows on stdout: one run, or the table of a sweep, and where the files are."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sim.labels import Row, device, how, origin, value, varying
from sim.league import league
from sim.metrics import LANES, STALLS
from sim.perfetto import TIMELINE
from sim.report_batch import UNION, batch_lines
from sim.report_batch import WHEN as WHEN_BATCH
from sim.report_quality import LEGEND, QUALITY, WHEN, ledger_lines
from sim.report_roofline import print_roofline


def print_run(summary: Row, folder: Path, more: Sequence[Any] = ()) -> None:
    """Print one run's figures, ``more`` lines and tables, and its folder, the folder last."""
    console = _console()
    _print_table(console, [summary])
    for line in (*_details(summary), *more):
        console.print(line, highlight=False)
    if summary.get("what_if"):
        console.print(_what_if_table(summary))
    if summary.get("roofline"):
        print_roofline(console, summary, folder)
    if (folder / TIMELINE).exists():
        where = f"Timeline: {folder / TIMELINE} (open it in https://ui.perfetto.dev)"
        console.print(where, highlight=False, soft_wrap=True)
    console.print(f"Results: {folder}", highlight=False, soft_wrap=True)


def print_sweep(rows: Sequence[Row], folder: Path) -> None:
    """Print a sweep's table, draw its figures, and say where everything is."""
    from sim.plots import plot_sweep
    from sim.report_league import print_league, write_league

    figures = plot_sweep(rows, folder)  # first: a reader who goes away must not cost them
    console = _console()
    _print_table(console, rows)
    union = [_UNION] if any(_RARE["union"](row) for row in rows) else []
    for note in [_LEGEND, *union, *_notes(rows)]:
        console.print(note, highlight=False)
    baseline, standings = league(rows, rows[0].get("baseline"))
    if standings:
        print_league(console, rows, baseline, standings)
        league_file = write_league(folder, baseline, standings)
        console.print(f"League: {league_file}", highlight=False, soft_wrap=True)
    for figure in figures:
        console.print(f"Figure: {figure}", highlight=False, soft_wrap=True)
    console.print(f"Results: {folder}", highlight=False, soft_wrap=True)


def _console() -> Console:
    """Return a console that keeps tables whole when stdout is a file or a pipe."""
    return Console(width=None if sys.stdout.isatty() else 200, markup=False)


def _print_table(console: Console, rows: Sequence[Row]) -> None:
    """Print the widest table that fits; narrow terminals lose columns, never digits."""
    console.print(origin(rows), highlight=False)
    wanted = [name for name in _COLUMNS if name not in _RARE or any(_RARE[name](r) for r in rows)]
    columns = list(wanted)
    while True:
        table = _table(rows, columns)
        if _width(console, table) <= console.width or len(columns) <= _FEWEST:
            break
        spare = next((name for name in _DISPENSABLE if name in columns), None)
        if spare is None:
            break
        columns.remove(spare)
    console.print(table)
    if len(columns) < len(wanted):
        left_out = ", ".join(name for name in wanted if name not in columns)
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


def _matters(share: float | None) -> bool:
    """Tell whether a share shows as more than 0.0%."""
    return share is not None and share >= 0.0005


def _bound(cause: str | None, row: Row) -> str:
    """Return a cause in a word, where a machine without a GPU computes on its CPU."""
    return device(row).lower() if cause == "gpu" else cause or "-"


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
    **QUALITY,
    **UNION,
    "GB moved": lambda row: f"{(row['h2d_bytes'] or row['read_bytes']) / 1e9:.1f}",
    "GPU": lambda row: _share(row["gpu_share"]),
    "link stall": lambda row: _share(row["link_stall_share"]),
    "CPU stall": lambda row: _share(row["cpu_stall_share"]),
    "storage stall": lambda row: _share(row["storage_stall_share"]),
    "DRAM stall": lambda row: _share(row["dram_stall_share"]),
    "host stall": lambda row: _share(row["host_stall_share"]),
    "refused": lambda row: str(row["refused"]),
    "bottleneck": lambda row: _bound(row["bottleneck"], row),
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
_FEWEST = 3
_VERY_WIDE = 10_000
_DISPENSABLE = (
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
_LEGEND = (
    "hit rate: experts found where they compute / experts used, by (step, layer). to Belady: how many "
    "more the optimum of the same size has. GB moved: to there."
)
_UNION = "union: experts of a layer that a decode step uses."


def _notes(rows: Sequence[Row]) -> list[str]:
    notes = ["* knows the future."] if any(row["oracle"] for row in rows) else []
    notes += [LEGEND] if any(row["lossy"] for row in rows) else []
    for note in dict.fromkeys(note for row in rows for note in row["notes"]):
        concerned = ", ".join(dict.fromkeys(row["policy"] for row in rows if note in row["notes"]))
        notes.append(f"Note on {concerned}: {note}.")
    return notes


def _details(row: Row) -> list[str]:
    ttft = row["ttft_ns_p50"]
    served = row["requests"] - row["refused"]
    refused = f" ({row['refused']} more refused: they never fit)" if row["refused"] else ""
    lines = [
        f"{served} request{'s' * (served != 1)}{refused}, {row['prompt_tokens']} prompt and "
        f"{row['output_tokens']} output tokens in {row['total_ns'] / 1e9:.3f} s {how(row)}; "
        f"TTFT p50 {'-' if ttft is None else f'{ttft / 1e6:.1f} ms'}; {device(row)} memory used "
        f"{row['gpu_bytes'] / 1e9:.2f} GB, {row['cache_bytes'] / 1e9:.2f} GB of it expert cache.",
    ]
    if row["prefetch_useful_rate"] is not None:
        lines.append(
            f"{row['prefetches']} experts were loaded ahead; {_share(row['prefetch_useful_rate'])} of them "
            "were used before they were dropped."
        )
    if row.get("stage_recall") is not None and row["stages"]:
        lines.append(
            f"{row['stages']} stage boundaries were found; {_share(row['stage_precision'])} of them are "
            f"right by the trace's annotation, and {_share(row['stage_recall'])} of those annotated "
            "were found."
        )
    return (
        lines
        + _distance_lines(row)
        + batch_lines(row)
        + ledger_lines(row)
        + _time_lines(row)
        + _notes([row])
    )


def _distance_lines(row: Row) -> list[str]:
    """Say how far the optimum is and why, and what replay expert by expert would have said."""
    lines = []
    if row.get("gap_by_victim") is not None:
        lines.append(
            f"The optimum of this size hits {_share(row['belady_hit_rate'])}: of the distance "
            f"{100 * row['gap_by_admission']:+.1f} pp is whom to keep out, and "
            f"{100 * row['gap_by_victim']:+.1f} pp whom to drop."
        )
    if row.get("sequential_miss_rate") is not None and row["miss_rate"]:
        inflation = row["sequential_miss_rate"] / row["miss_rate"] - 1
        lines.append(
            f"Misses {_share(row['miss_rate'])} by layer; expert by expert they would be "
            f"{_share(row['sequential_miss_rate'])} ({100 * inflation:+.0f}%)."
        )
    return lines


def _time_lines(row: Row) -> list[str]:
    """Say what the time goes to, how busy each resource is, and which of them is the bottleneck."""
    if not row["total_ns"]:
        return []
    shares = {"gpu": row["gpu_share"], **{name: row[f"{name}_stall_share"] for name in STALLS}}
    who = device(row)
    waits = [f"{_CAUSES[c]} {_share(shares[c])}" for c in STALLS if _matters(shares[c])]
    time = f"Time: the {who} works {_share(shares['gpu'])}"
    time += f" and waits for {', '.join(waits)}" if waits else ""
    idle = row["idle_ns"] / row["total_ns"]
    time += f"; nothing to run {_share(idle)}" if _matters(idle) else ""
    used = {name: row[f"{name}_utilisation"] for name in (*LANES, "dram")}
    words = {**_RESOURCES, "gpu": who}
    busy = [f"{words[name]} {_share(part)}" for name, part in used.items() if _matters(part)]
    first, second = sorted(shares, key=lambda name: -shares[name])[:2]
    bottleneck = f"Bottleneck: {_is_bottleneck(first, shares[first], who)}"
    bottleneck += (
        f"; next, {_is_bottleneck(second, shares[second], who)}" if _matters(shares[second]) else ""
    )
    return [f"{time}.", f"In use: {', '.join(busy)}.", f"{bottleneck}."]


def _is_bottleneck(name: str, share: float, who: str) -> str:
    if name == "gpu":
        return f"the {who}, which works {_share(share)} of the time"
    return f"{_CAUSES[name]}, for which the {who} waits {_share(share)} of the time"


_CAUSES = {
    "link": "the link",
    "storage": "storage",
    "dram": "the bandwidth of host memory",
    "host": "the host thread",
    "cpu": "experts on the CPU",
}
_RESOURCES = {
    "h2d": "link to the GPU",
    "d2h": "link from the GPU",
    "cpu": "CPU experts",
    "storage": "storage",
    "dram": "host memory",
}


def _what_if_table(run: Row) -> Table:
    """Return what each change would bring, the best first."""
    table = Table(title="What if", title_justify="left")
    table.add_column("change", no_wrap=True)
    for name in ("tokens/s", "gain", "TPOT"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("then bound by", no_wrap=True)
    table.add_column("")
    for row in run["what_if"]:
        speed, note = row["tokens_per_s"], row["note"] or ""
        changes = [_change(row["tokens_per_s_change"]), _change(row["tpot_change"])]
        shown = "-" if speed is None else f"{speed:.1f}"
        table.add_row(row["name"], shown, *changes, _bound(row["bottleneck"], run), note)
    return table


def _change(ratio: float | None) -> str:
    return "-" if ratio is None else f"{100 * ratio:+.1f}%"
