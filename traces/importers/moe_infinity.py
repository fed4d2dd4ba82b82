"""Reads MoE-Infinity's expert activation matrices: tokens an expert of each layer had, by sequence.

``np.save`` of floats [capacity, num_layers, num_experts]; places of the collection that no sequence took
are zero. Prompt and output are counted together, and the order of the tokens is lost: counts.
"""

from __future__ import annotations

from pathlib import Path

from traces.counts import ExpertCounts
from traces.importers.counted import counted
from traces.importers.routed import Origin
from traces.importers.sources import read_npy
from traces.importers.told import Told
from traces.trace import TraceError


def read(path: Path, told: Told) -> ExpertCounts:
    """Return the matrices, one sample a sequence; raises TraceError for anything else."""
    matrices = read_npy(path)
    if (
        matrices.ndim != 3 or matrices.dtype.kind != "f"
    ):  # whole numbers are expert ids of an engine
        rule = "must be floats [sequences, layers, experts]"
        raise TraceError(f"{path}: holds {matrices.dtype}{matrices.shape}: {rule}")
    origin = Origin(
        file=str(path),
        what="MoE-Infinity activation matrices",
        recorder="MoE-Infinity ExpertTracer",
        notes=("uses of prompt and output tokens together",),
    )
    return counted(matrices, told, origin, "sequence")
