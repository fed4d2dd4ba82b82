"""What ``greenroom advise`` shows on stdout: the best, what it beats and why, and the frontier."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from hwmodels.units import GB
from sim.advise import AS_GIVEN, Point, Wish, short
from sim.advise_reserve import left_words
from sim.advise_standing import alike_speed, best_held, rests_on_hits, rows_words
from sim.advise_table import Ground
from sim.frontier import (
    best_by,
    best_of,
    fastest_of,
    frontier,
    level_of,
    loses_by,
    too_large,
    ways_by_level,
)
from sim.limits import limit_words
from sim.predict_report import new_console, number

_MOST_STEPS = 12
"""Points of the frontier shown; the files have all."""


def print_advice(
    points: Sequence[Point],
    wish: Wish,
    ground: Ground,
    runs: Sequence[Mapping[str, Any]] | None,
    compared: Sequence[Mapping[str, Any]] | None,
    spent_s: float,
) -> None:
    """Print the advice; ``runs`` and ``compared`` are rows of runs and machines, None if not wished."""
    console, best = new_console(), best_of(points)

    def say(line: str) -> None:
        console.print(line, highlight=False, soft_wrap=True, markup=False)

    say(_title(points, wish, spent_s))
    for note in ground.notes:
        say(note)
    if best is None:
        say("Nothing fits. What needs least, by engine:")
    else:
        _print_best(console, say, points, best, ground)
        if too_large(points):
            say("Faster, but does not fit:")
    for line in _lacking(too_large(points)):
        say(line)
    if compared is not None:
        console.print(_machines(compared))
        for row in compared[::2]:
            if row["tokens_per_s"] is None:
                say(f"{row['machine']}: nothing fits; of what needs least: {row['lacks']}")
    if runs is not None:
        _print_runs(console, runs)


def _print_best(
    console: Console,
    say: Callable[[str], None],
    points: Sequence[Point],
    best: Point,
    ground: Ground,
) -> None:
    """Print the best, the best that published rows stand behind, and the tables of what fits."""
    held, held_as = best_held(points, ground.rows)
    flag = "" if ground.rows.get(best.engine, 0) else " (no published row near it)"
    for line in _best(f"Best{flag}", best, ground):
        say(line)
    other = fastest_of([p for p in points if p.has_room] if best.fit == "barely" else points)
    if other is not None and other is not best:
        say(_other(other, best))
    if held is best:
        say(f"{held_as}: the same.")
    elif held is not None:
        for line in _best(held_as, held, ground):
            say(line)
    console.print(_quants(points, ground.rows))
    levels = ways_by_level(points)
    for level in sorted({max(levels), level_of(best)}, reverse=True):
        console.print(_ways(level, levels[level], ground.rows, level == max(levels)))
    console.print(_steps(points, best, ground.rows))
    say(_COLUMNS_WORDS)
    if any(point.fit == "barely" for point in points):
        say(best.reserve.words)


_COLUMNS_WORDS = (
    "rows: complete published decode rows of the engine, which its speeds are held against. used alike: "
    "tokens/s of a cache if all experts were used alike, the worst for it; - where none matters."
)


def _title(points: Sequence[Point], wish: Wish, spent_s: float) -> str:
    case = points[0].case
    words = [point.fit for point in points]
    barely = f" ({words.count('barely')} barely)" if "barely" in words else ""
    fitting = len(words) - words.count("no")
    return (
        f"{case.costs.shape.name} on {case.costs.machine.name}, {case.batch_size} at one time, "
        f"{case.context_tokens} tokens of context, prompt of {case.prompt_tokens}, experts of at least "
        f"{wish.quality_floor:g} bits a weight: {len(points)} ways tried in {spent_s:.1f} s, "
        f"{fitting} fit{barely}. "
        f"Expert use: {case.usage.name}."
    )


def _best(title: str, best: Point, ground: Ground) -> list[str]:
    interval, alike = ground.intervals[best.engine], alike_speed(best)
    around = interval.of(best.speed)
    ends = "" if around is None else f" (80% interval {number(around[0])} to {number(around[1])})"
    limit = limit_words(best.found, best.found.bottleneck)
    part = best.found.decode.ns[best.found.bottleneck] / best.found.tpot_ns
    fits = "fits" if best.has_room else "fits barely"
    rows = rows_words(ground.rows.get(best.engine, 0), ground.rows_here.get(best.engine, 0))
    hits = ", and it rests on an assumed hit rate" if rests_on_hits(best) else ""
    lines = [
        f"{title}: engine={best.engine} {best.settings}, experts {_scheme(best)}: {number(best.speed)} "
        f"tokens/s{ends}, prefill {number(best.found.prefill_tokens_per_s)} tokens/s; {fits}, with "
        f"{left_words(best.left)}; {rows}{hits}.",
        f"Its bottleneck: {best.found.bottleneck}, {100 * part:.0f}% of a token's time: {limit}.",
    ]
    if alike is not None:
        worst = "If all experts were used alike, the worst for a cache"
        lines.append(f"{worst}: {number(alike)} tokens/s.")
    return [*lines, f"Interval, {interval.words}."]


def _other(other: Point, best: Point) -> str:
    """Tell of what is faster than the best and fits barely, or leaves the reserve and is too much slower."""
    if best.has_room:
        tight = left_words(one for one in other.left if not one.is_enough)
        more = 100 * (other.speed / best.speed - 1)
        how = f"Faster by {more:.1f}%, but it fits barely, with {tight}"
    else:
        less = 100 * (1 - other.speed / best.speed)
        how = f"Slower by {less:.1f}%, but with {left_words(other.left)}"
    return (
        f"{how}: engine={other.engine} {other.settings}, experts {_scheme(other)}: "
        f"{number(other.speed)} tokens/s."
    )


def _scheme(point: Point) -> str:
    name = "as the model file has them" if point.quant == AS_GIVEN else point.quant
    return f"{name} ({point.bits:.3g} bits)"


_NUMBERS = ("rows", "tokens/s", "used alike", "prefill t/s", "GPU GB", "host GB")
_RIGHT = (*_NUMBERS, "bits", "change")


def _new_table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in columns:
        justify: Any = "right" if name in _RIGHT else "left"
        table.add_column(name, justify=justify, no_wrap=name != "why")
    return table


def _figures(point: Point, rows: Mapping[str, int]) -> list[str]:
    found, alike = point.found, alike_speed(point)
    return [
        str(rows.get(point.engine, 0)),
        number(point.speed),
        "-" if alike is None else number(alike),
        number(found.prefill_tokens_per_s),
        f"{found.gpu_bytes / GB:.1f}",
        f"{found.host_bytes / GB:.1f}",
        point.fit,
    ]


def _quants(points: Sequence[Point], rows: Mapping[str, int]) -> Table:
    columns = ("experts", "bits", "engine", "placement", *_NUMBERS, "fits", "bottleneck")
    table = _new_table("The best of each precision", *columns)
    for point in sorted(best_by(points, "quant"), key=lambda p: -p.bits):
        cells = [point.quant, f"{point.bits:.3g}", point.engine, short(point.settings)]
        table.add_row(*cells, *_figures(point, rows), point.found.bottleneck)
    return table


def _ways(level: int, ways: Sequence[Point], rows: Mapping[str, int], is_highest: bool) -> Table:
    """Return the best of each engine and kind of placement at one level, and what it loses by."""
    which = "the highest precision that fits" if is_highest else "the precision of the best"
    title = (
        f"The best of each way at {level} bits, {which}; of an engine's {level}-bit schemes that fit, "
        "one as near in bits to the others' as it has"
    )
    columns = ("engine", "placement", "experts", "bits", *_NUMBERS, "fits", "why it is slower")
    table = _new_table(title, *columns)
    for point in ways:
        cells = [point.engine, short(point.settings), point.quant, f"{point.bits:.3g}"]
        table.add_row(*cells, *_figures(point, rows), _why(point, ways[0]))
    return table


def _why(point: Point, best: Point) -> str:
    if point is best:
        return "-"
    told = [f"{part} +{ns / 1e6:.2f} ms" for part, ns in loses_by(point, best)[:2] if ns > 1e4]
    return ", ".join(told) or "as fast"


def _steps(points: Sequence[Point], best: Point, rows: Mapping[str, int]) -> Table:
    """Return the frontier at the best's precision: what each further part of the memory brings."""
    steps = [point for point in frontier(points) if point.bits >= best.bits - 1e-9]
    steps = sorted((p for p in steps if p.quant == best.quant), key=lambda p: p.memory_bytes)
    steps = _evenly(steps)
    title = f"What memory brings, experts {_scheme(best)}"
    table = _new_table(title, "engine", "placement", *_NUMBERS, "fits", "bottleneck")
    for point in steps:
        cells = [point.engine, short(point.settings), *_figures(point, rows)]
        table.add_row(*cells, point.found.bottleneck)
    return table


def _evenly(steps: Sequence[Point]) -> list[Point]:
    """Return at most so many of the points as are shown, about evenly by memory, both ends included."""
    if len(steps) <= _MOST_STEPS:
        return list(steps)
    first, last = steps[0].memory_bytes, steps[-1].memory_bytes
    wanted = [first + i * (last - first) / (_MOST_STEPS - 1) for i in range(_MOST_STEPS)]
    nearest = [min(steps, key=lambda p: abs(p.memory_bytes - size)) for size in wanted]
    return sorted({id(p): p for p in nearest}.values(), key=lambda p: p.memory_bytes)


def _lacking(points: Sequence[Point]) -> list[str]:
    return [
        f"  engine={point.engine} {point.settings}, experts {_scheme(point)}: {number(point.speed)} "
        "tokens/s; " + "; ".join(point.found.problems)
        for point in points
    ]


def _machines(compared: Sequence[Mapping[str, Any]]) -> Table:
    """Return what the best of each changed machine comes to, over the machine as it is."""
    columns = ("machine", "of", "engine", "placement", "experts", "fits", "rows", "tokens/s")
    title = "On changed machines: the best, and the best held against published rows"
    table = _new_table(title, *columns, "used alike", "change")
    ways = [tuple(row.get(key) for key in ("engine", "settings", "quant")) for row in compared]
    is_same = ways[::2] == ways[1::2]
    for row in compared[::2] if is_same else compared:
        cells = [row["machine"], "both" if is_same else row["of"]]
        if row["tokens_per_s"] is None:
            table.add_row(*cells, "none fits", *["-"] * 7)
            continue
        alike, gain = row["used_alike_tokens_per_s"], row["gain"]
        table.add_row(
            *(
                *cells,
                row["engine"],
                short(row["settings"]),
            ),
            *(
                row["quant"],
                "barely" if row["fits_barely"] else "yes",
                str(row["published_rows"]),
                number(row["tokens_per_s"]),
            ),
            *(
                "-" if alike is None else number(alike),
                "-" if gain is None else f"{100 * gain:+.0f}%",
            ),
        )
    return table


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
