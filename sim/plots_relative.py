"""A sweep's policies against one of them, by cache size: a panel for each setting beside that."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sim.labels import Row, value, varying
from sim.league import kind_of
from sim.plot_style import caption, look, new_panels

_MOST_LINES = 9
_MOST_PANELS = 8
_FIELD = "0.78"
"""The colour of policies that are not highlighted: the field."""


def relative_by_cache(rows: Sequence[Row], baseline: str) -> Figure | None:
    """Draw speed over the baseline's by the share of experts on the GPU; None where it would be a tangle.

    Policies named by ``output.highlight`` are drawn in colour, the others as the field behind them.
    """
    fields = [field for field in varying(rows) if not field.startswith("policy.")]
    panels: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        panels.setdefault(tuple(value(row, field) for field in fields), []).append(row)
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    shown = rows[0].get("highlight") or policies
    if len(shown) > _MOST_LINES or not 1 <= len(panels) <= _MOST_PANELS:
        return None
    columns = min(2, len(panels))
    wide = 2 * columns  # columns of the legend: so many names fit beside each other
    legend_rows = -(-(len(shown) + 1) // wide)
    size = (3.6 if columns == 1 else 2.9, 2.1)
    figure, grid = new_panels(-(-len(panels) // columns), columns, *size, 0.5 + 0.15 * legend_rows)
    order = [name for name in policies if name not in shown] + [n for n in policies if n in shown]
    for axes, (setting, members) in zip(grid, sorted(panels.items()), strict=False):
        _panel(axes, members, baseline, order, shown)
        pairs = zip(fields, setting, strict=True)
        axes.set_title(", ".join(_words(field, text) for field, text in pairs), fontsize=7)
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=wide)
    caption(figure, rows)
    return figure


def _panel(
    axes: Axes, rows: Sequence[Row], baseline: str, order: Sequence[str], shown: Sequence[str]
) -> None:
    base = {row["cache_ratio"]: row["tokens_per_s"] for row in rows if row["policy"] == baseline}
    drawn_field = False
    for policy in order:
        own = [row for row in rows if row["policy"] == policy and row["cache_ratio"] in base]
        points = sorted((r["cache_ratio"], r["tokens_per_s"] / base[r["cache_ratio"]]) for r in own)
        if not points:
            continue
        sizes, ratios = [100 * size for size, _ in points], [ratio for _, ratio in points]
        if policy not in shown:
            label = None if drawn_field else "the other policies"
            axes.plot(sizes, ratios, color=_FIELD, linewidth=0.8, zorder=1, label=label)
            drawn_field = True
            continue
        colour, marker = look(policy)
        hollow = kind_of(own[0]) == "oracle"
        face = "none" if hollow else colour
        name = f"{policy} (oracle)" if hollow else policy
        axes.plot(sizes, ratios, color=colour, marker=marker, markerfacecolor=face, label=name)
    ticks = sorted(100 * size for size in base)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:.4g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("experts in GPU memory (%)")
    axes.set_ylabel(f"speed over {baseline}'s")


def _words(field: str, text: str) -> str:
    return f"batch {text}" if field == "batch_size" else text
