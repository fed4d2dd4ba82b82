"""Reuse against quality: gates trained with the locality weights times one factor after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from real.remoe_config import RemoeConfig
from real.remoe_metrics import GateQuality
from real.remoe_run import Judgement, Tell, judged, losses_of, train_arm
from real.remoe_subject import GateSubject
from sim.results import write_csv

FOLDER, TABLE, FIGURE = "frontier", "frontier.csv", "remoe_frontier"
BOUND_PERCENT = 2.0
"""Of perplexity, by which gates are judged."""


@dataclass(frozen=True, slots=True)
class Point:
    """One set of gates: what the locality weights were multiplied with, None for the model as it was."""

    factor: float | None
    judgement: Judgement

    @property
    def name(self) -> str:
        """What a table calls it."""
        if self.factor is None:
            return "before"
        return f"x{self.factor:g}" if self.factor else "control"


def run_frontier(
    subject: GateSubject,
    config: RemoeConfig,
    folder: Path,
    *,
    tell: Tell | None = None,
    say: Callable[[str], None] | None = None,
) -> list[Point]:
    """Train and judge a point a factor, besides the control and the model as it was; write table and figure.

    A point that was judged is kept in its folder and not trained again while the settings are the same.
    """
    factors = (None, 0.0, *(f for f in config.plain["frontier"]["factors"] if f))
    points = []
    for factor in factors:
        point = Point(factor, _judged(subject, config, factor, folder / FOLDER, tell, say))
        points.append(point)
        if say is not None:
            quality = point.judgement.quality
            say(f"{point.name}: EOR {quality.mean_eor:.3f}, perplexity {quality.perplexity:.4f}")
    write_table(points, folder / TABLE)
    plot_frontier(points, folder / FIGURE, _caption(subject, config))
    return points


def _judged(
    subject: GateSubject,
    config: RemoeConfig,
    factor: float | None,
    folder: Path,
    tell: Tell | None,
    say: Callable[[str], None] | None,
) -> Judgement:
    """Return a point's figures; it is trained and judged unless that was done with these settings."""
    settings = replace(config.train, steps=config.plain["frontier"]["steps"])
    weights = losses_of("control", config.loss) if not factor else config.loss.scaled(factor)
    evaluate = {**config.plain["evaluate"], "problems": config.plain["frontier"]["problems"]}
    name = "before" if factor is None else f"x{factor:g}"
    values, made = None, {}
    if factor is not None:
        made = {**asdict(settings), **asdict(weights)}
        values = train_arm(subject, name, weights, settings, folder / name, resume=True, tell=tell)
    return judged(folder / name, subject, values, evaluate, made, say)


def row_of(point: Point) -> dict[str, Any]:
    """Return a point as one row of the table."""
    quality = point.judgement.quality
    return {
        "point": point.name,
        "factor": point.factor,
        "eor": quality.mean_eor,
        "eor_of_load": quality.eor_of_load,
        "perplexity": quality.perplexity,
        "answer_perplexity": quality.answer_perplexity,
        **{f"lru_{size}": rate for size, rate in quality.lru_hit_rate.items()},
        "load_cv": float(np.mean(quality.load_cv)),
        "load_entropy": float(np.mean(quality.load_entropy)),
        "gate_entropy": float(np.mean(quality.gate_entropy)),
        "trust": float(np.mean(quality.trust)),
        **{f"accuracy_{name}": task.accuracy for name, task in point.judgement.tasks.items()},
        **{f"se_{name}": task.standard_error for name, task in point.judgement.tasks.items()},
    }


def write_table(points: Sequence[Point], path: Path) -> None:
    """Write one row a point as CSV."""
    write_csv(path, [row_of(point) for point in points])


def _caption(subject: GateSubject, config: RemoeConfig) -> str:
    loss, train = config.plain["loss"], config.plain["train"]
    weights = ", ".join(f"{name} {loss[name]:g}" for name in ("reuse", "smooth", "lag", "window"))
    return (
        f"{subject.described['model']}; x1 is {weights}, trust {loss['trust']:g}; "
        f"{config.plain['frontier']['steps']} steps of {train['batch'] * train['accumulate']} texts; "
        f"judged on {config.plain['evaluate']['texts']} held-out texts at most"
    )


def plot_frontier(points: Sequence[Point], stem: Path, text: str) -> Path:
    """Draw reuse against perplexity, accuracy and load, to PNG and PDF; return the PNG's path."""
    from sim.plot_style import PAGE, new_panels, save, styled, write_below

    with styled():
        has_tasks = all(point.judgement.tasks for point in points)
        count = 3 if has_tasks else 2
        figure, axes = new_panels(1, count, PAGE / count, 2.3, 0.2)
        before = points[0].judgement.quality
        _costs(axes[0], points, before)
        _load(axes[1], points)
        if has_tasks:
            _tasks(axes[2], points)
        write_below(figure, text)
        return save(figure, stem)


def _costs(axes: Any, points: Sequence[Point], before: GateQuality) -> None:
    """Draw what perplexity rises by, in percent of the model as it was."""
    eor = [100 * point.judgement.quality.mean_eor for point in points]
    order = np.argsort(eor)
    for label, marker, colour, name in (
        ("whole text", "o", "#0072B2", "perplexity"),
        ("answer alone", "s", "#D55E00", "answer_perplexity"),
    ):
        found = np.array([getattr(point.judgement.quality, name) for point in points])
        rise = 100 * (found / getattr(before, name) - 1)
        axes.plot(np.array(eor)[order], rise[order], marker=marker, color=colour, label=label)
    _name_points(axes, eor, points)
    axes.axhline(BOUND_PERCENT, color="0.45", linewidth=0.8, ls=":", marker="", label="bound")
    axes.set(xlabel=_REUSE, ylabel="perplexity (% over before)")
    axes.legend()


def _name_points(axes: Any, eor: Sequence[float], points: Sequence[Point]) -> None:
    """Write the points' names above a panel, each joined to its place, so far apart that none overlap."""
    panel = axes.figure.get_figwidth() / len(axes.figure.axes)
    least = _NAME_INCHES / panel * (max(eor) - min(eor))
    last = -np.inf
    for x, point in sorted(zip(eor, points, strict=True), key=lambda pair: pair[0]):
        last = max(x, last + least)
        axes.annotate(
            point.name, (x, 1), (last, 1.04), ("data", "axes fraction"), rotation=90, ha="center",
            va="bottom", fontsize=6.5, color="0.35",
            arrowprops={"arrowstyle": "-", "lw": 0.4, "color": "0.35", "shrinkA": 0, "shrinkB": 0},
        )  # fmt: skip


_REUSE = "experts of the token before (EOR, %)"
_NAME_INCHES = 0.175
"""What a name on its side takes, with the share of a panel that is no axes."""


def _load(axes: Any, points: Sequence[Point]) -> None:
    """Draw how uneven the load becomes, and what an LRU hits."""
    eor = np.array([100 * point.judgement.quality.mean_eor for point in points])
    order = np.argsort(eor)
    cv = np.array([np.mean(point.judgement.quality.load_cv) for point in points])
    axes.plot(eor[order], cv[order], "^--", color="0.5", label="CV of experts' load")
    sizes = points[0].judgement.quality.lru_hit_rate
    for size, (colour, mark) in zip(sizes, _SIZES, strict=False):
        rate = np.array([point.judgement.quality.lru_hit_rate[size] for point in points])
        axes.plot(
            eor[order], rate[order], mark, ls="-", color=colour, label=f"LRU hits, {size} slots"
        )
    axes.set(xlabel=_REUSE, ylabel="CV, hit rate", ylim=(0, None))
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, columnspacing=0.8)


_SIZES = (
    ("#56B4E9", "o"), ("#0072B2", "s"), ("#332288", "D"),
    ("#000000", "v"), ("#117733", "P"), ("#882255", "X"),
)  # fmt: skip


def _tasks(axes: Any, points: Sequence[Point]) -> None:
    """Draw problems solved, with standard errors."""
    eor = [100 * point.judgement.quality.mean_eor for point in points]
    looks = {"greedy": ("#0072B2", "o"), "sampled": ("#D55E00", "s")}
    for name in points[0].judgement.tasks:
        colour, marker = looks[name]
        tasks = [point.judgement.tasks[name] for point in points]
        axes.errorbar(
            eor,
            [100 * task.accuracy for task in tasks],
            yerr=[100 * task.standard_error for task in tasks],
            color=colour, marker=marker, ls="", elinewidth=0.6, label=name,
        )  # fmt: skip
    axes.set(xlabel=_REUSE, ylabel="problems solved (%)")
    axes.legend()
