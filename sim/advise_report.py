"""What ``greenroom advise`` shows on stdout: the best, what it beats and why, and the frontier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from hwmodels.units import GB
from sim.advise import AS_GIVEN, Point, Wish
from sim.frontier import best_by, best_of, frontier, loses_by, too_large
from sim.interval import Interval
from sim.limits import limit_words
from sim.predict_answer import used_alike
from sim.predict_report import new_console, number

_MOST_STEPS = 12
"""Points of the frontier shown; the files have all."""


def print_advice(
    points: Sequence[Point],
    wish: Wish,
    interval: Mapping[str, Interval],
    runs: Sequence[Mapping[str, Any]] | None,
    spent_s: float,
) -> None:
    """Print the advice; ``runs`` are the rows of simulated runs, None if not wished."""
    console, best = new_console(), best_of(points)

    def say(line: str) -> None:
        console.print(line, highlight=False, soft_wrap=True, markup=False)

    say(_title(points, wish, spent_s))
    if best is None:
        say("Nothing fits. What needs least, by engine:")
        for line in _lacking(too_large(points)):
            say(line)
        return
    for line in _best(best, interval[best.engine]):
        say(line)
    console.print(_quants(points))
    console.print(_ways(points, best))
    console.print(_steps(points, best))
    if too_large(points):
        say("Faster, but does not fit:")
    for line in _lacking(too_large(points)):
        say(line)
    if runs is not None:
        _print_runs(console, runs)


def _title(points: Sequence[Point], wish: Wish, spent_s: float) -> str:
    case = points[0].case
    fitting = sum(point.fits for point in points)
    return (
        f"{case.costs.shape.name} on {case.costs.machine.name}, {case.batch_size} at one time, "
        f"{case.context_tokens} tokens of context, prompt of {case.prompt_tokens}, experts of at least "
        f"{wish.quality_floor:g} bits a weight: {len(points)} ways tried in {spent_s:.1f} s, {fitting} fit. "
        f"Expert use: {case.usage.name}."
    )


def _best(best: Point, interval: Interval) -> list[str]:
    around = interval.of(best.speed)
    ends = "" if around is None else f" (80% interval {number(around[0])} to {number(around[1])})"
    limit = limit_words(best.found, best.found.bottleneck)
    part = best.found.decode.ns[best.found.bottleneck] / best.found.tpot_ns
    return [
        f"Best: engine={best.engine} {best.settings}, experts {_scheme(best)}: {number(best.speed)} "
        f"tokens/s{ends}, prefill {number(best.found.prefill_tokens_per_s)} tokens/s, GPU memory "
        f"{best.found.gpu_bytes / GB:.1f} GB, host memory {best.found.host_bytes / GB:.1f} GB.",
        f"Its bottleneck: {best.found.bottleneck}, {100 * part:.0f}% of a token's time: {limit}.",
        f"If all experts were used alike, the worst for a cache: {number(used_alike(best.found.case))} "
        "tokens/s.",
        f"Interval, {interval.words}.",
    ]


def _scheme(point: Point) -> str:
    name = "as the model file has them" if point.quant == AS_GIVEN else point.quant
    return f"{name} ({point.bits:.3g} bits)"


_NUMBERS = ("tokens/s", "prefill t/s", "GPU GB", "host GB")


def _new_table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in columns:
        justify: Any = "right" if name in _NUMBERS or name == "bits" else "left"
        table.add_column(name, justify=justify, no_wrap=name != "why")
    return table


def _figures(point: Point) -> list[str]:
    found = point.found
    return [
        number(point.speed),
        number(found.prefill_tokens_per_s),
        f"{found.gpu_bytes / GB:.1f}",
        f"{found.host_bytes / GB:.1f}",
    ]


def _quants(points: Sequence[Point]) -> Table:
    columns = ("experts", "bits", "engine", "placement", *_NUMBERS, "bottleneck")
    table = _new_table("The best of each precision", *columns)
    for point in sorted(best_by(points, "quant"), key=lambda p: -p.bits):
        cells = [point.quant, f"{point.bits:.3g}", point.engine, _short(point)]
        table.add_row(*cells, *_figures(point), point.found.bottleneck)
    return table


def _ways(points: Sequence[Point], best: Point) -> Table:
    """Return the best of each engine and kind of placement, and what it loses by.

    At the best's own precision where the engine has it, else at its own best.
    """
    table = _new_table(
        "The best of each way", "engine", "placement", "experts", *_NUMBERS, "why it is slower"
    )
    same = [p for p in points if abs(p.bits - best.bits) < 0.5]
    shown = {(p.engine, p.kind): p for p in best_by(points, "engine", "kind")}
    shown |= {(p.engine, p.kind): p for p in best_by(same, "engine", "kind")}
    for point in sorted(shown.values(), key=lambda p: -p.speed):
        table.add_row(point.engine, _short(point), point.quant, *_figures(point), _why(point, best))
    return table


def _why(point: Point, best: Point) -> str:
    if point is best:
        return "-"
    told = [f"{part} +{ns / 1e6:.2f} ms" for part, ns in loses_by(point, best)[:2] if ns > 1e4]
    return ", ".join(told) or "as fast"


def _steps(points: Sequence[Point], best: Point) -> Table:
    """Return the frontier at the best's precision: what each further part of the memory brings."""
    steps = [point for point in frontier(points) if point.bits >= best.bits - 1e-9]
    steps = sorted((p for p in steps if p.quant == best.quant), key=lambda p: p.memory_bytes)
    steps = _evenly(steps)
    title = f"What memory brings, experts {_scheme(best)}"
    table = _new_table(title, "engine", "placement", *_NUMBERS, "bottleneck")
    for point in steps:
        table.add_row(point.engine, _short(point), *_figures(point), point.found.bottleneck)
    return table


def _evenly(steps: Sequence[Point]) -> list[Point]:
    """Return at most so many of the points as are shown, about evenly by memory, both ends included."""
    if len(steps) <= _MOST_STEPS:
        return list(steps)
    first, last = steps[0].memory_bytes, steps[-1].memory_bytes
    wanted = [first + i * (last - first) / (_MOST_STEPS - 1) for i in range(_MOST_STEPS)]
    nearest = [min(steps, key=lambda p: abs(p.memory_bytes - size)) for size in wanted]
    return sorted({id(p): p for p in nearest}.values(), key=lambda p: p.memory_bytes)


def _short(point: Point) -> str:
    """Return the placement without the words that its column says."""
    return point.settings.replace("placement=", "").replace("placement.", "")


def _lacking(points: Sequence[Point]) -> list[str]:
    return [
        f"  engine={point.engine} {point.settings}, experts {_scheme(point)}: {number(point.speed)} "
        "tokens/s; " + "; ".join(point.found.problems)
        for point in points
    ]


def _print_runs(console: Console, runs: Sequence[Mapping[str, Any]]) -> None:
    table = Table(title="Simulated, the fastest first", title_justify="left")
    for name in ("engine", "placement", "policy"):
        table.add_column(name, no_wrap=True)
    for name in ("simulated t/s", "hit rate", "closed form t/s", "simulated / closed form"):
        table.add_column(name, justify="right", no_wrap=True)
    notes = dict.fromkeys(note for row in runs for note in row["notes"])
    for row in runs:
        if row["tokens_per_s"] is None:
            continue
        ratio = row["tokens_per_s"] / row["predicted_tokens_per_s"]
        table.add_row(
            *(row["engine"], row["placement"], row["policy"], number(row["tokens_per_s"])),
            *(
                f"{100 * row['hit_rate']:.1f}%",
                number(row["predicted_tokens_per_s"]),
                f"{ratio:.2f}",
            ),
        )
    console.print(table)
    for note in notes:
        console.print(note, highlight=False, soft_wrap=True, markup=False)
