"""Where reasoning stages begin: as a trace is annotated, and as a detector found them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from sim.figures.source import Source
from sim.policies.detectors import StageChanges, num_decoded
from sim.policy_looks import BLACK, VERMILION
from sim.types import ConfigError
from sim.workload import Workload
from traces.schema import TraceError

_ANNOTATED: dict[str, Any] = {"color": VERMILION, "linestyle": "-", "linewidth": 0.7}
_FOUND: dict[str, Any] = {"color": BLACK, "linestyle": (0, (2, 2)), "linewidth": 0.7}


class Boundaries(NamedTuple):
    """Places of boundaries; None where the trace has no annotation, or nobody looked for them.

    ``by`` names who found them.
    """

    annotated: NDArray[np.int64] | None
    found: NDArray[np.int64] | None
    by: str


def boundaries_of_run(source: Source) -> Boundaries:
    """Return the steps at which stages begin in a run."""
    steps, stages = source.steps["step"], source.steps["stage"]
    found = steps[1:][np.diff(stages) > 0]
    work = work_of(source)
    annotated = None if work is None or work.trace.stage is None else _annotated_steps(work)
    return Boundaries(annotated, found if stages.max() > 0 else None, source.run["policy"])


def work_of(source: Source) -> Workload | None:
    """Return the work that a run did, or None if its trace is not there any more, or is another one."""
    from sim.simulate import file_sha256
    from sim.stage_hold import load_work

    if not source.config:
        return None
    try:
        path, wanted = source.config["trace"]["path"], source.run["provenance"].get("trace_sha256")
        if not isinstance(path, str) or file_sha256(path) != wanted:
            return None
        return load_work(source.config)[0]
    except (ConfigError, TraceError, OSError, KeyError, TypeError):  # it is a help only
        return None


def _annotated_steps(work: Workload) -> NDArray[np.int64]:
    changes, found = StageChanges(), []
    for number, step in enumerate(work.steps()):
        if changes.num_begun(step.info) and num_decoded(step.info):
            found.append(number)
    return np.array(found, np.int64)


def draw_boundaries(axes: Axes, where: Boundaries, span: tuple[float, float]) -> list[Artist]:
    """Draw the boundaries within a span of the horizontal axis; return their entries of a legend.

    Annotated ones have a mark at the top and found ones at the bottom, for print without colours.
    """
    handles: list[Artist] = []
    kinds = (
        (where.annotated, _ANNOTATED, "v", 1.0, "stage begins, annotated"),
        (where.found, _FOUND, "^", 0.0, f"stage found by {where.by}"),
    )
    for places, style, marker, height, label in kinds:
        if places is None:
            continue
        inside = [at for at in places.tolist() if span[0] <= at <= span[1]]
        if not inside:
            continue
        for at in inside:
            axes.axvline(at, **style)
        axes.plot(inside, [height] * len(inside), marker, color=style["color"], markersize=3.5,
                  transform=axes.get_xaxis_transform(), clip_on=False)  # fmt: skip
        handles.append(Line2D([], [], **style, marker=marker, markersize=3.5, label=label))
    return handles
