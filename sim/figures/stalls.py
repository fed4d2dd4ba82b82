"""Where the time of an output token goes, by cause of waiting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from matplotlib.figure import Figure

from sim.figures.source import NotDrawableError, Source, Wanted
from sim.labels import Row, device, names
from sim.plot_style import PAGE, caption, new_figure
from sim.policy_looks import BLUE, GREEN, ORANGE, PINK, SKY, VERMILION

PARTS = (
    ("gpu_share", "GPU busy", GREEN, ""),
    ("link_stall_share", "waits for link", BLUE, "////"),
    ("storage_stall_share", "waits for storage", SKY, "xxxx"),
    ("dram_stall_share", "waits for host memory", PINK, "\\\\\\\\"),
    ("host_stall_share", "waits for host thread", VERMILION, "++++"),
    ("cpu_stall_share", "waits for CPU", ORANGE, "...."),
    ("idle_ns", "nothing to run", "#DDDDDD", ""),
)
"""Column, words, colour and hatches of each part of the time."""
WAITS = {
    column.removesuffix("_stall_share"): words.removeprefix("waits for ")
    for column, words, *_ in PARTS
    if column.endswith("_stall_share")
}
"""What a run waits for in the words of this figure, by the name that a bottleneck has in a table."""
MOST_BARS = 40
_LEGEND_COLUMNS = 4
_LONGEST = 40


def draw_stalls(source: Source, wanted: Wanted | None = None) -> Figure:
    """Draw, for the middle cache size of the rows, time for each output token by what it goes to."""
    chosen = of_middle_size(source.timed)
    if len(chosen) > MOST_BARS:
        raise NotDrawableError(
            f"would have {len(chosen)} bars at the middle cache size, and at most {MOST_BARS} are drawn: "
            "--policies A,B,... names those to draw"
        )
    size = chosen[0]["cache_ratio"]
    chosen.sort(key=lambda row: row["tokens_per_s"])
    labels = [shortened(name) for name in names(chosen)]
    spent = {part: [_spent_ms(row, part[0]) for row in chosen] for part in PARTS}
    parts = [part for part, widths in spent.items() if any(widths)]
    if not parts:
        raise NotDrawableError("needs runs that spend time on a token, and these spend none")
    legend_rows = -(-len(parts) // _LEGEND_COLUMNS)
    figure, axes = new_figure(PAGE, 0.19 * len(chosen) + 0.75 + 0.17 * legend_rows)
    places, left = range(len(chosen)), [0.0] * len(chosen)
    for part in parts:
        _, words, colour, hatch = part
        label = words.replace("GPU", device(chosen[0])) if part is PARTS[0] else words
        axes.barh(places, spent[part], 0.72, left=left, color=colour, hatch=hatch,
                  edgecolor="white", linewidth=0.3, label=label)  # fmt: skip
        left = [start + width for start, width in zip(left, spent[part], strict=True)]
    axes.set_yticks(places, labels)
    axes.set_ylim(-0.6, len(chosen) - 0.4)
    axes.set_xlim(right=1.04 * max(left))
    axes.set_xlabel(
        f"ms for an output token, {100 * size:.3g}% of experts in {device(chosen[0])} memory"
    )
    axes.grid(axis="y", visible=False)
    figure.legend(loc="outside upper center", ncols=_LEGEND_COLUMNS)
    caption(figure, chosen)
    return figure


def of_middle_size(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the middle cache size, the lower of two.

    Sizes of less than half the runs that another size has do not count: of drawn sizes most have few.
    """
    runs = Counter(row["cache_ratio"] for row in rows)
    sizes = sorted(size for size, count in runs.items() if 2 * count >= max(runs.values()))
    return [row for row in rows if row["cache_ratio"] == sizes[(len(sizes) - 1) // 2]]


def shortened(name: str, longest: int = _LONGEST) -> str:
    """Return a label that leaves room for the figure beside it: both ends, for these tell names apart."""
    if len(name) <= longest:
        return name
    head = (longest - 1) // 2
    return f"{name[:head]}…{name[head + 1 - longest :]}"


def _spent_ms(row: Row, column: str) -> float:
    """Return what a share of the time is for an output token."""
    share = row[column] / row["total_ns"] if column.endswith("_ns") else row[column]
    return float(share * 1e3 / row["tokens_per_s"])
