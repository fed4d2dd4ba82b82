"""Which figures of a machine a prediction rests on that nobody measured: by the parts of time they make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hwmodels.layer_time import (
    CPU_EXPERTS,
    DENSE,
    GPU_EXPERTS,
    HANDOVER,
    LAUNCH,
    LINK,
    STEP,
    STORAGE,
)
from hwmodels.predict import Prediction

WEAK = {"M": "from memory", "I": "inferred"}
"""Trust classes of figures that rest on no file and no measurement of the thing itself."""
_MATTERS = 0.1
"""Share of a decode step from which on a part's figures are listed."""
_STREAM = ("gpu.memory_bytes_per_s", "gpu.memory_derate")
_FIGURES = {
    CPU_EXPERTS: (
        *("cpu.memory_bytes_per_s", "cpu.memory_derate", "cpu.thread_bytes_per_s"),
        *("cpu.rate_by_bits", "cpu.decode_weights_per_s", "cpu.expert_table"),
        *("cpu.expert_setup_ns", "cpu.threads_used"),
    ),
    LINK: (
        *("link.h2d_bytes_per_s", "link.rate_derate", "link.pageable_bytes_per_s", "link.pinned"),
        *("link.copy_setup_ns", "link.copy_gap_ns"),
    ),
    STORAGE: ("storage.curve", "storage.setup_ns"),
    GPU_EXPERTS: (*_STREAM, "gpu.rate_by_bits", "gpu.kernel_floor_ns"),
    DENSE: (*_STREAM, "gpu.attention_floor_ns", "gpu.kernel_floor_ns", "gpu.vector_flops"),
    LAUNCH: ("gpu.launch_ns", "gpu.graph_launch_ns", "cpu.launch_issue_ns"),
    HANDOVER: ("cpu.handover_ns",),
    STEP: ("gpu.step_overhead_ns", *_STREAM),
}
"""The figures that make each part, the weightiest first."""
_WITHOUT_GPU = {
    DENSE: (
        "cpu.memory_bytes_per_s",
        "cpu.memory_derate",
        "cpu.dispatch_ns",
        "cpu.expert_setup_ns",
    ),
    STEP: ("cpu.memory_bytes_per_s", "cpu.memory_derate"),
}


def weak_figures(
    prediction: Prediction, machine: Mapping[str, Any], changed: frozenset[str]
) -> list[dict[str, str]]:
    """Return the figures behind the largest parts of decoding that are remembered or inferred.

    ``machine`` is the machine as plain values, which tell whether a figure is given at all; ``changed`` are
    the dotted figures that the user gave. Each row: figure, part, trust (letter), source.
    """
    sources = prediction.case.costs.machine.sources
    total = prediction.tpot_ns
    parts = sorted(prediction.decode.ns.items(), key=lambda item: -item[1])
    rows: dict[str, dict[str, str]] = {}
    for part, time_ns in parts:
        if time_ns < _MATTERS * total:
            break
        for figure in _figures_of(part, prediction):
            letter = sources.get(figure, "")[:1]
            if letter not in WEAK or figure in changed or not _plays(figure, machine, prediction):
                continue
            source = sources[figure][2:].strip()
            row = {"figure": figure, "part": part, "trust": letter, "source": source}
            rows.setdefault(figure, row)
    return list(rows.values())


def _figures_of(part: str, prediction: Prediction) -> tuple[str, ...]:
    if prediction.case.costs.machine.gpu is None and part in _WITHOUT_GPU:
        return _WITHOUT_GPU[part]
    return _FIGURES[part]


def _plays(figure: str, machine: Mapping[str, Any], prediction: Prediction) -> bool:
    """Tell whether a figure is given and does something here: no null, no derate of 1, no idle way."""
    part, _, field = figure.partition(".")
    value = (machine.get(part) or {}).get(field)
    if value is None or value == 0 or (field.endswith("_derate") and value == 1):
        return False
    costs = prediction.case.costs
    link = costs.machine.link
    idle = {
        "link.pageable_bytes_per_s": link is not None and link.pinned,
        "gpu.vector_flops": costs.engine.attention_vector_ratio is None,
        "gpu.launch_ns": costs.engine.graph,
        "gpu.graph_launch_ns": not costs.engine.graph,
        "cpu.launch_issue_ns": costs.engine.graph or not costs.engine.launch_issue_ratio,
    }
    return not idle.get(figure, False)
