"""All figures by name: what each shows, what it needs, and the function that draws it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from sim.figures.source import Source, Wanted
from sim.settings import did_you_mean
from sim.types import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Entry(NamedTuple):
    """A figure: in words what it ``shows`` and ``needs``, and where its function is."""

    shows: str
    needs: str
    target: str

    @property
    def draw(self) -> Callable[..., Figure]:
        """The function that draws it, of a source and optionally of what is wanted."""
        module, _, name = self.target.partition(":")
        found: Callable[..., Figure] = getattr(import_module(f"sim.figures.{module}"), name)
        return found


_SIZES = "a sweep over two cache sizes or more"
_EVENTS = "a run with output.events=true"
FIGURES: dict[str, Entry] = {
    "throughput_by_cache": Entry(
        "tokens/s over the share of experts on the GPU, a line a policy",
        _SIZES,
        "by_size:draw_throughput",
    ),
    "tpot_by_cache": Entry(
        "time of an output token over the share of experts on the GPU",
        _SIZES,
        "by_size:draw_tpot",
    ),
    "hit_rate_by_cache": Entry(
        "hit rate over the share of experts on the GPU, below the band of Belady's optimum",
        f"{_SIZES}; the band: output.belady=true",
        "hits:draw_hit_rate",
    ),
    "stall_breakdown": Entry(
        "what the time of an output token goes to, a bar a run of the middle cache size",
        "a run or a sweep",
        "stalls:draw_stalls",
    ),
    "speed_by_bytes": Entry(
        "tokens/s over the bytes moved for a token, and the runs that no other one beats in both",
        "a sweep",
        "pareto:draw_pareto",
    ),
    "league": Entry(
        "the league table: each policy's speed over the baseline's, mean, worst and best",
        "a sweep of three policies or more, one of them the baseline, in two settings or more",
        "standings:draw_league",
    ),
    "relative_by_cache": Entry(
        "speed over the baseline's by the share of experts on the GPU, a panel a setting",
        f"{_SIZES}, with a baseline",
        "relative:draw_relative",
    ),
    "roofline": Entry(
        "speed against the limit of each resource: of one run, or of a sweep's runs",
        "output.roofline=true",
        "rooflines:draw_roofline",
    ),
    "predicted_by_measured": Entry(
        "predicted against measured or published speed, and the errors",
        "what `greenroom validate` or `greenroom published` has written",
        "measured:draw_measured",
    ),
    "what_if": Entry(
        "what each change of the machine would bring: a tornado",
        "a run with output.what_if=true",
        "tornado:draw_what_if",
    ),
    "gantt": Entry(
        "what each resource does in some steps, and where the GPU waits",
        _EVENTS,
        "gantt:draw_gantt",
    ),
    "heatmap": Entry(
        "which experts of a layer are used over time, with the boundaries of reasoning stages",
        f"{_EVENTS}, or --trace FILE",
        "heatmap:draw_heatmap",
    ),
    "residency": Entry(
        "which experts of a layer are in GPU memory over time, and how full the cache is",
        _EVENTS,
        "residency:draw_residency",
    ),
}


def check_names(names: list[str]) -> None:
    """Raise ConfigError for the first name that is no figure's."""
    for name in names:
        if name not in FIGURES:
            near = did_you_mean(name, FIGURES)
            known = "" if near else f" (known: {', '.join(FIGURES)})"
            raise ConfigError(f"figure = {name}: no such figure{near}{known}")


def draw(name: str, source: Source, wanted: Wanted | None = None) -> Figure:
    """Draw a figure; NotDrawableError, with the reason, where the source lacks what it shows."""
    from sim.plot_style import styled

    check_names([name])
    with styled():
        return FIGURES[name].draw(source, wanted)
