"""Which experts of a layer are used over time, with the boundaries of reasoning stages."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from sim.figures.boundaries import Boundaries, boundaries_of_run, draw_boundaries, work_of
from sim.figures.event_rows import EXPERT, STEP, check_window, events_path, uses_of_layer
from sim.figures.source import TRACE, NotDrawableError, Source, Wanted
from sim.plot_style import PAGE, caption, new_figure, write_below
from sim.policy_looks import BLUE
from sim.types import ConfigError

MOST_COLUMNS = 320
"""Steps that have a column each; more share one."""
_MAP = LinearSegmentedColormap.from_list("uses", ("white", "#9ecae1", BLUE, "#08204d"))
_USUAL_DETECTORS = ("cues", "drift")


class Uses(NamedTuple):
    """Which experts were used when.

    used        bool[num_experts, num_steps]
    first       the first step
    boundaries  where stages begin
    """

    used: NDArray[np.bool_]
    first: int
    boundaries: Boundaries


def draw_heatmap(source: Source, wanted: Wanted | None = None) -> Figure:
    """Draw the experts of a layer by step: of a run's events, or of a request of a trace."""
    wanted = wanted or Wanted()
    if source.kind == TRACE:
        return _draw_trace(source, wanted)
    run, layer = source.run, wanted.layer or 0
    events_path(source)
    uses = uses_of_run(source, layer, window_of(source, wanted))
    figure = _figure(uses, "step", f"expert of layer {layer}")
    whom = f"{run['policy']}, layer {layer}"
    caption(figure, [run], whom if wanted.request is None else f"{whom}, request {wanted.request}")
    return figure


def window_of(source: Source, wanted: Wanted) -> tuple[int, int]:
    """Return the first and the last step to draw of a run: those of a request, a window, or all."""
    num_steps = int(source.steps["step"].max()) + 1
    if wanted.request is not None:
        return steps_of_request(source, wanted.request)
    return check_window(wanted.window or (0, num_steps - 1), num_steps)


def steps_of_request(source: Source, request: int) -> tuple[int, int]:
    """Return the first and the last step of a request of a run that takes one at a time."""
    if source.run["batch_size"] > 1:
        raise NotDrawableError(
            "needs workload.batch_size=1 for --request, for events do not tell requests apart"
        )
    requests, steps = source.requests, source.steps
    places = np.flatnonzero(requests["request_id"] == request)
    if not len(places):
        known = sorted(requests["request_id"].tolist())
        raise ConfigError(f"--request {request}: must be one of the run's: {_range(known)}")
    start_ns, end_ns = (int(requests[name][places[0]]) for name in ("start_ns", "end_ns"))
    inside = steps["step"][(steps["start_ns"] >= start_ns) & (steps["end_ns"] <= end_ns)]
    if not len(inside):
        raise NotDrawableError(f"has no step of request {request}: it was refused")
    return int(inside.min()), int(inside.max())


def uses_of_run(source: Source, layer: int, window: tuple[int, int]) -> Uses:
    """Return which experts of a layer computed in which step; low-precision copies count as the expert."""
    rows = uses_of_layer(source, layer)
    rows = rows[(rows[:, STEP] >= window[0]) & (rows[:, STEP] <= window[1])]
    if not len(rows):
        raise NotDrawableError("has no expert that computes in these steps")
    work = work_of(source)
    num_experts = int(rows[:, EXPERT].max()) + 1 if work is None else work.num_experts
    used = np.zeros((num_experts, window[1] - window[0] + 1), bool)
    used[rows[:, EXPERT] % num_experts, rows[:, STEP] - window[0]] = True
    return Uses(used, window[0], boundaries_of_run(source))


def binned(used: NDArray[np.bool_], most: int = MOST_COLUMNS) -> tuple[NDArray[np.float64], int]:
    """Return the share of steps that use each expert, float64[experts, columns], and steps a column."""
    width = -(-used.shape[1] // most)
    starts = np.arange(0, used.shape[1], width)
    counts = np.diff([*starts, used.shape[1]])
    return np.add.reduceat(used.astype(np.float64), starts, axis=1) / counts, width


def _figure(uses: Uses, what: str, ylabel: str) -> Figure:
    shares, width = binned(uses.used)
    num_experts, num_steps = uses.used.shape
    figure, axes = new_figure(PAGE, min(5.0, 1.25 + 0.045 * num_experts))
    edge = uses.first + width * shares.shape[1]
    image = axes.imshow(shares, aspect="auto", interpolation="nearest", cmap=_MAP, vmin=0, vmax=1,
                        origin="lower", extent=(uses.first, edge, -0.5, num_experts - 0.5))  # fmt: skip
    axes.set_xlim(uses.first, uses.first + num_steps)
    handles = draw_boundaries(axes, uses.boundaries, (uses.first, uses.first + num_steps))
    per = f" (a column: {width} {what}s)" if width > 1 else ""
    axes.set(xlabel=f"{what}{per}", ylabel=ylabel)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=False)
    if width > 1:
        figure.colorbar(image, ax=axes, label=f"share of {what}s that use it", pad=0.01)
    if handles:
        figure.legend(handles=handles, loc="outside upper center", ncols=2)
    return figure


# -- a trace ---------------------------------------------------------------------------------------


def _draw_trace(source: Source, wanted: Wanted) -> Figure:
    from importlib.metadata import version

    from sim.stage_hold import compose_stages, load_work
    from sim.sweeps.grammar import quoted

    assert source.trace is not None
    name, path = source.trace
    config, detectors = compose_stages([f"trace.path={quoted(path)}"])
    work, calibration = load_work(config)
    meta = work.trace.meta
    layer = meta.num_layers // 2 if wanted.layer is None else wanted.layer
    if not 0 <= layer < meta.num_layers:
        raise ConfigError(
            f"--layer {layer}: must be a layer of the trace, 0 to {meta.num_layers - 1}"
        )
    request = _request(work.trace, wanted.request)
    uses = _uses_of_trace(request, layer, (config, detectors), (work, calibration))
    if wanted.window is not None:
        first, last = check_window(wanted.window, uses.used.shape[1])
        uses = uses._replace(used=uses.used[:, first : last + 1], first=first)
    figure = _figure(uses, "token", f"expert of layer {layer}")
    kind = meta.provenance.kind
    text = f"{kind} trace {name}, request {request.request_id}, decoded tokens; layer {layer}; "
    write_below(figure, f"{text}greenroom {version('greenroom')}")
    return figure


def _request(trace: Any, wanted: int | None) -> Any:
    """Return a request of a trace, by default the one that decodes most."""
    from sim.tiling import select_requests

    requests = [r for r in select_requests(trace, None, "--request") if len(r.decode_rows)]
    if wanted is None:
        if not requests:
            raise NotDrawableError("needs a trace with decoded tokens")
        return max(requests, key=lambda request: len(request.decode_rows))
    found = [request for request in requests if request.request_id == wanted]
    if not found:
        known = sorted(request.request_id for request in requests)
        raise ConfigError(f"--request {wanted}: must be one that decodes: {_range(known)}")
    return found[0]


def _uses_of_trace(request: Any, layer: int, settings: Any, works: Any) -> Uses:
    """Return which experts each decoded token uses, and where its stages begin."""
    from sim.stage_cuts import annotated_texts, found_texts
    from sim.stage_hold import detect, missing_column
    from sim.workload import Workload
    from traces.schema import NO_EXPERT

    (config, detectors), (work, calibration) = settings, works
    own = Workload(work.trace, requests=[request])
    ids = work.trace.expert_ids[request.decode_rows][:, layer].astype(np.int64)
    used = np.zeros((work.num_experts, len(ids)), bool)
    tokens = np.broadcast_to(np.arange(len(ids))[:, None], ids.shape)
    there = ids != NO_EXPERT
    used[ids[there], tokens[there]] = True
    annotated = None
    if work.trace.stage is not None:
        annotated = annotated_texts(own)[0].cut[1:-1]
    by = next(name for name in _USUAL_DETECTORS if not missing_column(detectors[name], own))
    steps = detect(by, detectors[by], config, (own, calibration))
    return Uses(used, 0, Boundaries(annotated, found_texts(own, steps)[0].cut[1:-1], by))


def _range(numbers: list[int]) -> str:
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers[:20])) + (", ..." if len(numbers) > 20 else "")
