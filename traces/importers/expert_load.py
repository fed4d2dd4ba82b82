"""Reads expert loads as EPLB, SGLang and ktransformers take them: ``weight`` or ``logical_count``.

EPLB's input is an array [num_layers, num_experts] of loads; SGLang's ``--init-expert-location`` takes
``{"logical_count": [num_layers, num_experts] or [steps, num_layers, num_experts]}`` as JSON or ``.pt``, and
ktransformers ``{"activation_freq": [num_layers, num_experts]}``. All hidden layers are there, dense ones 0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.counts import ExpertCounts
from traces.importers.counted import counted
from traces.importers.routed import Origin
from traces.importers.sources import read_json, read_npy
from traces.importers.told import Told
from traces.trace import TraceError, near_match

KEYS = ("logical_count", "weight", "activation_freq")
"""Names under which loads are kept."""


def read(path: Path, told: Told) -> ExpertCounts:
    """Return the loads of a ``.json``, ``.npy`` or ``.pt`` file; raises TraceError for anything else."""
    name, loads = _named(path, _load(path))
    try:
        loads = np.asarray(loads)
    except ValueError as error:
        raise TraceError(f"{path}: {name} is no array: {error}") from None
    if loads.ndim not in (2, 3) or loads.dtype.kind not in "iuf" or 0 in loads.shape:
        rule = "must be numbers [layers, experts] or [steps, layers, experts], none of them 0"
        raise TraceError(f"{path}: {name} is {loads.dtype}{loads.shape}: {rule}")
    unit = "step" if loads.ndim == 3 else "recording"
    notes = ("loads, perhaps scaled or averaged: only their proportions count",)
    origin = Origin(
        file=str(path), what=f"expert loads ({name})", recorder="EPLB input", notes=notes
    )
    return counted(loads.reshape(-1, *loads.shape[-2:]), told, origin, unit)


def _load(path: Path) -> Any:
    suffix = path.suffix.lower()
    if suffix == ".json":
        return read_json(path)
    if suffix in (".pt", ".pth"):
        from traces.importers.torch_file import load_torch

        return load_torch(path)
    if suffix != ".npy":
        raise TraceError(f"{path}: ends in {suffix!r}: must be .json, .npy or .pt")
    return read_npy(path)


def _named(path: Path, found: Any) -> tuple[str, NDArray[np.generic] | list[Any]]:
    """Return the loads and what the file calls them."""
    if isinstance(found, np.ndarray | list):
        return "weight", found
    if not isinstance(found, dict):
        raise TraceError(f"{path}: holds {type(found).__name__}: must be an array or a dict of one")
    for key in KEYS:
        if key in found:
            return key, found[key]
    if "physical_to_logical_map" in found:
        raise TraceError(f"{path}: holds a placement of experts, physical_to_logical_map: no loads")
    hint = near_match(next(iter(map(str, found)), ""), KEYS)
    raise TraceError(f"{path}: has none of {', '.join(KEYS)}{hint}")
