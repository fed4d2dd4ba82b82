"""What ``greenroom sim`` shows on stdout: one run, or the table of a sweep, and where the files are."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

_SWEPT = ("trace", "model", "machine", "batch_size", "cache_ratio")
Row = Mapping[str, Any]


def print_run(summary: Row, folder: Path) -> None:
    """Print one run's figures and its folder, the folder last."""
    console = _console()
    console.print(_table([summary], title=_title(summary)))
    for line in _details(summary):
        console.print(line, highlight=False)
    console.print(f"Results: {folder}", highlight=False, soft_wrap=True)


def print_sweep(rows: Sequence[Row], folder: Path) -> None:
    """Print a sweep's table, draw its figures, and say where everything is."""
    from sim.plots import plot_sweep

    figures = plot_sweep(rows, folder)  # first: a reader who goes away must not cost them
    console = _console()
    ordered = sorted(rows, key=lambda row: (*(str(row[k]) for k in _SWEPT[:3]), *_order(row)))
    console.print(_table(ordered, title=_title(rows[0])))
    console.print(_legend(), highlight=False)
    for note in _notes(rows):
        console.print(note, highlight=False)
    for figure in figures:
        console.print(f"Figure: {figure}", highlight=False, soft_wrap=True)
    console.print(f"Results: {folder}", highlight=False, soft_wrap=True)


def _order(row: Row) -> tuple[float, float, float]:
    return row["batch_size"], row["cache_ratio"], -(row["tokens_per_s"] or 0.0)


def _console() -> Console:
    """Return a console that keeps tables whole when stdout is a file or a pipe."""
    return Console(width=None if sys.stdout.isatty() else 140)


def _table(rows: Sequence[Row], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    varying = [
        key for key in _SWEPT if len({row[key] for row in rows}) > 1 and key != "cache_ratio"
    ]
    table.add_column("policy")
    for key in varying:
        table.add_column(key)
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    last = None
    for row in rows:
        group = tuple(row[key] for key in _SWEPT)
        if last not in (None, group):
            table.add_section()
        last = group
        name = row["policy"] + (" *" if row["oracle"] else "") + (" ~" if row["lossy"] else "")
        cells = [name, *(str(row[key]) for key in varying)]
        table.add_row(*cells, *(show(row) for show in _COLUMNS.values()))
    return table


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


def _title(row: Row) -> str:
    origin = row["provenance"]
    kind = origin["trace_kind"]
    return (
        f"{kind} trace {row['trace']} ({origin['trace_model']}), priced as {origin['priced_as']}, "
        f"on {row['machine']}"
    )


def _legend() -> str:
    return (
        "* knows the future. hit rate: experts found on the GPU / experts used, by (step, layer). "
        "to Belady: hits the optimum of the same size has more. GB moved: host to GPU."
    )


def _notes(rows: Sequence[Row]) -> list[str]:
    notes = []
    if any(row["provenance"]["calibration_overlaps_workload"] for row in rows):
        notes.append("Note: calibration saw requests of the workload; its policies look too good.")
    if any(row["lossy"] for row in rows):
        notes.append("~ changes the model's answer.")
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
