"""What ``greenroom sim`` shows on stdout: one run, or the table of a sweep, and where the files are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sim.labels import Row, device, how, origin
from sim.league import league
from sim.metrics import LANES, STALLS
from sim.perfetto import TIMELINE
from sim.report_batch import batch_lines
from sim.report_quality import ledger_lines
from sim.report_roofline import print_roofline
from sim.report_table import (
    COLUMNS_LEGEND,
    DISPENSABLE,
    FEWEST,
    UNION_LEGEND,
    bound_word,
    note_lines,
    results_table,
    share_of,
    wanted_columns,
)
from sim.results import TABLE
from sim.screen import screen


def print_run(summary: Row, folder: Path, more: Sequence[Any] = ()) -> None:
    """Print one run's figures, ``more`` lines and tables, and its folder, the folder last."""
    console = _console()
    _print_table(console, [summary])
    for line in (*details(summary), *more):
        console.print(line, highlight=False)
    if summary.get("what_if"):
        console.print(what_if_table(summary))
    if summary.get("roofline"):
        print_roofline(console, summary, folder)
    if (folder / TIMELINE).exists():
        where = f"Timeline: {folder / TIMELINE} (open it in https://ui.perfetto.dev)"
        console.print(where, highlight=False, soft_wrap=True)
    console.print(f"Results: {folder}", highlight=False, soft_wrap=True)


def print_sweep(rows: Sequence[Row], folder: Path) -> None:
    """Print a sweep's table, draw its figures, and say where everything is."""
    from sim.figures.sweep import plot_sweep
    from sim.report_league import LEAGUE, print_league, write_league

    figures = plot_sweep(rows, folder)  # first: a reader who goes away must not cost them
    console = _console()
    shown = _fastest(rows)
    _print_table(console, shown)
    if len(shown) < len(rows):
        told = f"The {len(shown)} fastest of {len(rows)} runs; all are in {folder / TABLE}."
        console.print(told, highlight=False, soft_wrap=True)
    union = [UNION_LEGEND] if "union" in wanted_columns(rows) else []
    for note in [COLUMNS_LEGEND, *union, *note_lines(rows)]:
        console.print(note, highlight=False)
    baseline, standings = league(rows, rows[0].get("baseline"))
    if standings:
        print_league(console, rows, baseline, standings)
        league_file = write_league(folder, baseline, standings)
        console.print(f"League: {league_file}", highlight=False, soft_wrap=True)
    else:  # that of an earlier sweep there
        (folder / LEAGUE).unlink(missing_ok=True)
    for figure in figures:
        console.print(f"Figure: {figure}", highlight=False, soft_wrap=True)
    console.print(f"Results: {folder}", highlight=False, soft_wrap=True)


def _fastest(rows: Sequence[Row]) -> Sequence[Row]:
    """Return no more rows than anybody reads, the fastest, in the order in which they were."""
    if len(rows) <= _MOST_ROWS:
        return rows
    order = sorted(range(len(rows)), key=lambda i: -(rows[i]["tokens_per_s"] or 0.0))
    return [rows[i] for i in sorted(order[:_MOST_ROWS])]


def _console() -> Console:
    """Return a console that keeps tables whole when stdout is a file or a pipe."""
    return screen()


def _print_table(console: Console, rows: Sequence[Row]) -> None:
    """Print the widest table that fits; narrow terminals lose columns, never digits."""
    console.print(origin(rows), highlight=False)
    wanted = wanted_columns(rows)
    columns = list(wanted)
    while True:
        table = results_table(rows, columns)
        if _width(console, table) <= console.width or len(columns) <= FEWEST:
            break
        spare = next((name for name in DISPENSABLE if name in columns), None)
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


def details(row: Row) -> list[str]:
    """Say in lines what came of one run and where its time went."""
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
            f"{row['prefetches']} experts were loaded ahead; {share_of(row['prefetch_useful_rate'])} of them "
            "were used before they were dropped."
        )
    if row.get("stage_recall") is not None and row["stages"]:
        lines.append(
            f"{row['stages']} stage boundaries were found; {share_of(row['stage_precision'])} of them are "
            f"right by the trace's annotation, and {share_of(row['stage_recall'])} of those annotated "
            "were found."
        )
    return (
        lines
        + _distance_lines(row)
        + batch_lines(row)
        + ledger_lines(row)
        + _time_lines(row)
        + note_lines([row])
    )


def _matters(share: float | None) -> bool:
    """Tell whether a share shows as more than 0.0%."""
    return share is not None and share >= 0.0005


def _distance_lines(row: Row) -> list[str]:
    """Say how far the optimum is and why, and what replay expert by expert would have said."""
    lines = []
    if row.get("gap_by_victim") is not None:
        lines.append(
            f"The optimum of this size hits {share_of(row['belady_hit_rate'])}: of the distance "
            f"{100 * row['gap_by_admission']:+.1f} pp is whom to keep out, and "
            f"{100 * row['gap_by_victim']:+.1f} pp whom to drop."
        )
    if row.get("sequential_miss_rate") is not None and row["miss_rate"]:
        inflation = row["sequential_miss_rate"] / row["miss_rate"] - 1
        lines.append(
            f"Misses {share_of(row['miss_rate'])} by layer; expert by expert they would be "
            f"{share_of(row['sequential_miss_rate'])} ({100 * inflation:+.0f}%)."
        )
    return lines


def _time_lines(row: Row) -> list[str]:
    """Say what the time goes to, how busy each resource is, and which of them is the bottleneck."""
    if not row["total_ns"]:
        return []
    shares = {"gpu": row["gpu_share"], **{name: row[f"{name}_stall_share"] for name in STALLS}}
    who = device(row)
    waits = [f"{CAUSES[c]} {share_of(shares[c])}" for c in STALLS if _matters(shares[c])]
    time = f"Time: the {who} works {share_of(shares['gpu'])}"
    time += f" and waits for {', '.join(waits)}" if waits else ""
    idle = row["idle_ns"] / row["total_ns"]
    time += f"; nothing to run {share_of(idle)}" if _matters(idle) else ""
    used = {name: row[f"{name}_utilisation"] for name in (*LANES, "dram")}
    words = {**_RESOURCES, "gpu": who}
    busy = [f"{words[name]} {share_of(part)}" for name, part in used.items() if _matters(part)]
    first, second = sorted(shares, key=lambda name: -shares[name])[:2]
    bottleneck = f"Bottleneck: {_is_bottleneck(first, shares[first], who)}"
    bottleneck += (
        f"; next, {_is_bottleneck(second, shares[second], who)}" if _matters(shares[second]) else ""
    )
    return [f"{time}.", f"In use: {', '.join(busy)}.", f"{bottleneck}."]


def _is_bottleneck(name: str, share: float, who: str) -> str:
    if name == "gpu":
        return f"the {who}, which works {share_of(share)} of the time"
    return f"{CAUSES[name]}, for which the {who} waits {share_of(share)} of the time"


_VERY_WIDE = 10_000
_MOST_ROWS = 200
CAUSES = {
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


def what_if_table(run: Row) -> Table:
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
        table.add_row(row["name"], shown, *changes, bound_word(row["bottleneck"], run), note)
    return table


def _change(ratio: float | None) -> str:
    return "-" if ratio is None else f"{100 * ratio:+.1f}%"
