"""Prints what a test of a trace's stages found, and the answer in plain words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sim.screen import screen
from sim.stage_answer import answer
from sim.stage_draws import NULLS, SHIFTED
from sim.stage_findings import Findings
from sim.stage_inference import Contrast

_WIDTH = 150
_MOST_LAYERS = 16
"""Layers shown; of more, every second, third, ... one."""


def print_findings(found: Findings) -> None:
    """Print the tables and the answer."""
    console = screen(_WIDTH)

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    say(
        f"{found.source}: {found.num_stages} stages ({found.by}) in what {found.num_texts} requests "
        f"decode, {found.mean_length} tokens each in the mean"
    )
    for title, table in _tables(found):
        say(f"\n{title}")
        console.print(table)
    for line in _notes(found):
        say(line)
    say("\nIs there stage structure beyond token locality?")
    for line in answer(found):
        say(line)


def _tables(found: Findings) -> Iterator[tuple[str, Any]]:
    yield "Pairs of tokens at equal distance: experts in common, % of top-k", _pairs(found)
    yield "Two adjacent windows: cosine of their uses", _splits(found)
    yield "By layer, in points of the experts in common", _layers(found)
    if found.captures:
        yield "Uses that fall on a set fixed before the stage, %", _captures(found)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:
    from rich.table import Table

    table = Table()
    for number, title in enumerate(titles):
        table.add_column(title, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _pairs(found: Findings) -> Any:
    pairs, beyond = found.pairs, found.beyond
    edges = pairs.edges.tolist()
    rows = []
    for band, contrast in enumerate(pairs.by_band):
        low, high = edges[band], edges[band + 1]
        counts = [int(n[low:high].sum()) for n in (pairs.num_within, pairs.num_across)]
        rest = None if beyond is None else beyond.by_band[band]
        rows.append([f"{low + 1}-{high}", *_pair_cells(counts, pairs.sides(band), contrast, rest)])
    counts = [int(pairs.num_within.sum()), int(pairs.num_across.sum())]
    rest = None if beyond is None else beyond.overall
    rows.append(["all", *_pair_cells(counts, pairs.sides(), pairs.overall, rest)])
    for name, against in list(pairs.against.items())[1:]:
        rest = None if beyond is None else beyond.against[name]
        null = [_points(against.null_mean), _p(against), "", _p(rest)]
        rows.append([f"all: {name}", "", "", "", "", "", *null])
    titles = ("tokens apart", "pairs within", "pairs across", "within", "across")
    return _table(
        (*titles, "difference [95 %]", "random cuts", "p", "beyond the token's identity", "p"), rows
    )


def _pair_cells(
    counts: Sequence[int], sides: tuple[float, float], contrast: Contrast, rest: Contrast | None
) -> list[str]:
    values = [_percent(side) for side in sides]
    null = [_points(contrast.null_mean), _p(contrast)]
    more = ["-", "-"] if rest is None else [_with_interval(rest, _points), _p(rest)]
    return [*map(str, counts), *values, _with_interval(contrast, _points), *null, *more]


def _splits(found: Findings) -> Any:
    rows = [
        [
            f"{split.window} tokens each",
            _plain(split.within),
            _plain(split.across),
            _with_interval(split.against[SHIFTED], _plain),
            *(cell for c in split.against.values() for cell in (_plain(c.null_mean), _p(c))),
            _plain(split.windows_within),
            _plain(split.windows_across),
        ]
        for split in found.splits
    ]
    titles = ("", "within", "across", "difference [95 %]")
    nulls = [title for name in NULLS for title in (name, "p")]
    fixed = f"windows of {found.mean_length}: within"
    return _table((*titles, *nulls, fixed, "across"), rows)


def _layers(found: Findings) -> Any:
    columns = [
        ("within less across", found.pairs.by_layer),
        ("beyond the token's identity", found.beyond and found.beyond.by_layer),
        ("same kind less other kinds, other requests", found.kinds and found.kinds.by_layer),
    ]
    told = [(title, contrasts) for title, contrasts in columns if contrasts]
    num_layers = len(found.pairs.by_layer)
    rows = []
    for layer in range(0, num_layers, -(-num_layers // _MOST_LAYERS)):
        pairs = [(_with_interval(by[layer], _points), _p(by[layer])) for _, by in told]
        rows.append([str(layer), *(cell for pair in pairs for cell in pair)])
    return _table(("layer", *(word for title, _ in told for word in (title, "p"))), rows)


def _captures(found: Findings) -> Any:
    rows = []
    for own, window in zip(found.captures, found.window_captures, strict=True):
        held = own.held
        kinds = ["-", "-"] if found.kinds is None else [held["kind"], held["other"]]
        fixed = [window.held[rule] for rule in ("kind", "before", "itself")]
        cells = [held["all"], *kinds, held["before"], held["itself"], *fixed]
        rows.append([str(own.slots), *(c if isinstance(c, str) else _percent(c) for c in cells)])
    titles = ("experts a layer", "all stages", "same kind", "other kinds", "stage before")
    fixed_titles = ("window of that number", "window before", "window itself")
    return _table((*titles, "stage itself", *fixed_titles), rows)


def _notes(found: Findings) -> list[str]:
    return [
        f"p: share of {found.draws} random cuts of the same requests with as large a difference. Cuts: the "
        "stages' own boundaries shifted around their request together (shifted; what is not named), their "
        f"lengths in random order (shuffled), windows of {found.mean_length} tokens from a random one on "
        "(windows). Intervals: of resampled requests. Prompts are left out. Layers and "
        "bands are tested one by one: of twenty without structure one has p <= .05.",
        "The sets are learnt from the other requests (all stages, same kind, other kinds, window of that "
        "number), from the same request (stage or window before), or from the stage itself.",
    ]


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:.1f}"


def _points(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:+.2f}"


def _plain(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"


def _with_interval(contrast: Contrast, form: Callable[[float], str]) -> str:
    if math.isnan(contrast.low):
        return form(contrast.value)
    return f"{form(contrast.value)} [{form(contrast.low)}, {form(contrast.high)}]"


def _p(contrast: Contrast | None) -> str:
    if contrast is None or math.isnan(contrast.p_value):
        return "-"
    return f"{contrast.p_value:.3f}"
