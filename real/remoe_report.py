"""What ``greenroom remoe`` prints: results to stdout, as tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from real.remoe_frontier import FIGURE, TABLE, Point, row_of
from real.remoe_metrics import GateQuality
from real.remoe_run import RESULT, Judgement
from real.remoe_speed import SPEED, Speed
from real.remoe_tasks import difference
from sim.screen import screen

PAPER = {
    "eor": (0.273, 0.345),
    "cv": (0.0409, 0.1608),
    "entropy": (0.9998, 0.9971),
    "lru_6": (0.3187, 0.3687),
}
"""DeepSeek-V2-Lite before and after, arXiv 2605.27081."""


def console() -> Console:
    """Return a console that keeps tables whole when stdout is a file or a pipe."""
    return screen(highlight=False)


def print_run(found: Mapping[str, Judgement], folder: Path) -> None:
    """Print gates before, trained and of the control, side by side."""
    out = console()
    before = found["before"].quality
    out.print(
        f"{before.num_texts} held-out texts, {before.num_tokens} tokens; changes against the model as it was"
    )
    table = Table("", *found)
    for label, get, form in _MEASURES:
        table.add_row(label, *_cells(found, get, form))
    for size in before.lru_hit_rate:
        rates = [judgement.quality.lru_hit_rate[size] for judgement in found.values()]
        table.add_row(f"LRU hits, {size} slots a layer", *_with_change(rates, "{:.4f}"))
    for lag in before.eor_by_lag:
        if lag > 1:
            rates = [judgement.quality.eor_by_lag[lag] for judgement in found.values()]
            table.add_row(f"EOR at lag {lag}", *_with_change(rates, "{:.4f}"))
    _add_tasks(table, found)
    out.print(table)
    out.print(_by_layer(found))
    for line in verdict(found):
        out.print(line)
    out.print(f"Results: {folder / RESULT}", soft_wrap=True)


Get = Callable[[GateQuality], float]
_MEASURES: tuple[tuple[str, Get, str], ...] = (
    ("EOR at lag 1", lambda q: q.mean_eor, "{:.4f}"),
    ("EOR of its load, any order", lambda q: q.eor_of_load, "{:.4f}"),
    ("perplexity, whole text", lambda q: q.perplexity, "{:.4f}"),
    ("perplexity, answer", lambda q: q.answer_perplexity, "{:.4f}"),
    ("loss, answer (nats a token)", lambda q: q.answer_loss, "{:.5f}"),
    ("CV of experts' load", lambda q: float(np.mean(q.load_cv)), "{:.4f}"),
    ("entropy of the load / log E", lambda q: float(np.mean(q.load_entropy)), "{:.4f}"),
    ("entropy of a token's gate / log E", lambda q: float(np.mean(q.gate_entropy)), "{:.4f}"),
    ("KL to the old gates", lambda q: float(np.mean(q.trust)), "{:.4f}"),
    ("experts a text visits", lambda q: float(np.mean(q.distinct)), "{:.2f}"),
    ("experts all texts visit", lambda q: float(np.mean(q.distinct_overall)), "{:.2f}"),
)


def _cells(found: Mapping[str, Judgement], get: Get, form: str) -> list[str]:
    return _with_change([get(judgement.quality) for judgement in found.values()], form)


def _with_change(values: Sequence[float], form: str) -> list[str]:
    """Return values, each but the first with how far it is from the first."""
    first = values[0]
    cells = [form.format(first)]
    for value in values[1:]:
        change = f" ({100 * (value / first - 1):+.1f} %)" if first else ""
        cells.append(form.format(value) + change)
    return cells


def _add_tasks(table: Table, found: Mapping[str, Judgement]) -> None:
    before = found["before"].tasks
    for name, task in before.items():
        cells = []
        for judgement in found.values():
            mine = judgement.tasks.get(name)
            told = "" if mine is None else f"{100 * mine.accuracy:.1f} % +- "
            cells.append(told + ("" if mine is None else f"{100 * mine.standard_error:.1f}"))
        table.add_row(f"problems solved of {len(task.right)}, {name}", *cells)


def _by_layer(found: Mapping[str, Judgement]) -> Table:
    layers = len(found["before"].quality.eor)
    table = Table("EOR at lag 1, by layer", *map(str, range(layers)))
    for name, judgement in found.items():
        table.add_row(name, *(f"{rate:.3f}" for rate in judgement.quality.eor))
    return table


def verdict(found: Mapping[str, Judgement]) -> list[str]:
    """Return, in sentences, what the trained gates gain and cost, beside the paper's figures."""
    before, after = found["before"], found["remoe"]
    cost = after.quality.perplexity / before.quality.perplexity - 1
    answer = after.quality.answer_perplexity / before.quality.answer_perplexity - 1
    low, high = PAPER["eor"]
    lines = [
        f"EOR {_gain(after, before)} (the paper, DeepSeek-V2-Lite: {100 * (high / low - 1):+.1f} %)",
        f"Perplexity of the whole text {100 * cost:+.2f} %, of the answers {100 * answer:+.2f} %",
    ]
    if "control" in found:
        lines[0] += f"; the control, cross entropy alone: {_gain(found['control'], before)}"
    for name, task in after.tasks.items():
        change, error = difference(task, before.tasks[name])
        lines.append(
            f"Problems solved, {name}: {100 * change:+.2f} points +- {100 * error:.2f} "
            f"(standard error, {len(task.right)} problems pair by pair)"
        )
    return lines


def _gain(after: Judgement, before: Judgement) -> str:
    """Return the change of EOR, relative where there was any before."""
    now, was = after.quality.mean_eor, before.quality.mean_eor
    return f"{100 * (now / was - 1):+.1f} %" if was else f"{100 * now:.1f} % from none"


def print_frontier(points: Sequence[Point], folder: Path) -> None:
    """Print the table of a frontier, and where it and the figure are."""
    rows = [row_of(point) for point in points]
    shown = [name for name in rows[0] if name not in ("factor", "load_entropy")]
    table = Table(*shown)
    for row in rows:
        table.add_row(*(_cell(row[name]) for name in shown))
    out = console()
    out.print(table)
    out.print(f"Table: {folder / TABLE}", soft_wrap=True)
    out.print(f"Figure: {folder / FIGURE}.png", soft_wrap=True)


def _cell(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def print_speed(found: Speed, folder: Path) -> None:
    """Print what new gates gain in time, beside what the paper measured."""
    out = console()
    eor = ", ".join(f"{name} {rate:.3f}" for name, rate in found.eor.items())
    out.print(f"EOR of the decoded tokens that are simulated: {eor}")
    table = Table(*_SPEED_COLUMNS)
    for row in found.rows:
        table.add_row(*_speed_cells(row))
    out.print(table)
    for line in (*PAPER_SPEED, *_live_lines(found.live)):
        out.print(line)
    out.print(f"Results: {folder / SPEED}", soft_wrap=True)


_SPEED_COLUMNS = (
    *("where", "policy", "cache", "gates", "TPOT ms", "change", "hit rate", "MB a token"),
    "mass given up",
)
PAPER_SPEED = (
    "The paper: vLLM with CPU offload on an RTX 3090, TPOT 254.31 to 242.99 ms (-4.5 %), +8.4 % tokens/s;",
    "llama.cpp from an SSD on a Jetson Orin NX, TPOT -43.6 to -49.8 %.",
)


def _speed_cells(row: Mapping[str, Any]) -> list[str]:
    error, mass = row.get("change_error"), row.get("decode_substituted_mass_rate")
    change = f"{100 * row['change']:+.1f} %" + (f" +- {100 * error:.1f}" if error else "")
    return [
        row["where"],
        row["policy"],
        f"{100 * row['ratio']:g} %",
        row["gates"],
        f"{row['tpot_ns_mean'] / 1e6:.2f}",
        change if row["gates"] != "before" else "",
        f"{row['decode_hit_rate']:.3f}",
        f"{row['bytes_per_token'] / 1e6:.0f}",
        "" if mass is None else f"{100 * mass:.1f} %",
    ]


def _live_lines(live: Mapping[str, Any] | None) -> list[str]:
    if live is None:
        return []
    return [
        f"Answers with the transform at EOR {live['target_eor']:.3f} instead of training: "
        f"{100 * live['accuracy']:.1f} % +- {100 * live['accuracy_error']:.1f} of {live['problems']} "
        f"problems; perplexity {live['perplexity']:.4f} (trained gates {live['perplexity_trained']:.4f}, "
        f"before {live['perplexity_before']:.4f}, {live['perplexity_tokens']} tokens); "
        f"{100 * live['token_agreement']:.1f} % of tokens as before"
    ]
