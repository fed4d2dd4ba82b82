"""Reads the lines of Megatron's router trace, a file a rank, into forward passes of whole models.

Line: ``{step, stage, block, mtp_idx?, layer, rank, num_tokens, topk, top_indices}`` for one router call;
``logits_rank<r>.bin`` beside it may hold the bfloat16 logits of the call. Under pipeline parallelism each
rank has some layers only, which Megatron may number from 0 in each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.importers.json_file import json_lines
from traces.trace import TraceError

_KEYS = ("step", "layer", "num_tokens", "topk", "top_indices")


@dataclass(slots=True)
class Pass:
    """One forward pass of a rank, then of a whole model: ids int32[num_tokens, k] by layer."""

    step: int
    ids: dict[int, NDArray[np.int32]] = field(default_factory=dict)
    logits: dict[int, NDArray[np.float16]] = field(
        default_factory=dict
    )  # [num_tokens, num_experts]

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the pass."""
        return len(next(iter(self.ids.values())))

    def equals(self, other: Pass) -> bool:
        """Tell whether the other pass chose the same experts in the same layers."""
        return self.ids.keys() == other.ids.keys() and all(
            np.array_equal(ids, other.ids[layer]) for layer, ids in self.ids.items()
        )


def read_rank(file: Path) -> tuple[list[Pass], list[str]]:
    """Return a rank's passes in order, and what was left out of the file.

    A pass is what its layers hold at one place in a step: training runs several micro-batches a step.
    Passes that repeat another of their step, as recomputation of activations makes them, are dropped, and
    so is a last pass that was cut short.

    Raises
    ------
    TraceError
        For lines that are none of Megatron's, sizes that do not fit, and passes that lack a layer.
    """
    passes: dict[tuple[int, int], Pass] = {}  # by step and place in it
    seen: dict[tuple[int, int], int] = {}  # calls of a layer in a step so far
    num_mtp = 0
    logits = _open_logits(file)
    for number, record in json_lines(file):
        where = f"{file}: line {number}"
        _check_keys(record, where)
        if record.get("block") == "mtp":
            num_mtp += 1
            continue
        step, layer = record["step"], record["layer"]
        place = seen.get((step, layer), 0)
        seen[step, layer] = place + 1
        held = passes.setdefault((step, place), Pass(step))
        held.ids[layer] = _ids(record, where)
        if logits is not None and "logit_offset" in record:
            held.logits[layer] = _logits(record, logits, where)
    if not passes:
        rule = "were the routers in CUDA graphs? --cuda-graph-impl none runs their hooks"
        raise TraceError(f"{file}: no router call in it: {rule}")
    notes = [f"{num_mtp} calls of multi-token prediction heads were left out"] if num_mtp else []
    return _whole(list(passes.values()), file, notes)


def _check_keys(record: Any, where: str) -> None:
    if not isinstance(record, dict) or any(key not in record for key in _KEYS):
        keys = ", ".join(map(str, list(record)[:8])) if isinstance(record, dict) else repr(record)
        raise TraceError(f"{where} has {keys}: must have {', '.join(_KEYS)}")
    for key in _KEYS[:-1]:
        value = record[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise TraceError(f"{where}: {key} is {value!r}: must be a whole number >= 0")


def _ids(record: dict[str, Any], where: str) -> NDArray[np.int32]:
    shape = (record["num_tokens"], record["topk"])
    try:
        ids = np.asarray(record["top_indices"])
    except ValueError:
        raise TraceError(f"{where}: top_indices are of unequal lengths: must be {shape}") from None
    if ids.shape != shape or 0 in shape or ids.dtype.kind not in "iu":
        rule = f"must be whole numbers {list(shape)}, as num_tokens and topk"
        raise TraceError(f"{where}: top_indices are {ids.dtype}{list(ids.shape)}: {rule}")
    if ids.min() < -1 or ids.max() >= 2**16 - 1:
        raise TraceError(f"{where}: top_indices go from {ids.min()} to {ids.max()}: must be ids")
    return ids.astype(np.int32)


def _open_logits(file: Path) -> NDArray[np.uint16] | None:
    """Return the rank's logits as bits of bfloat16, None where there is no such file."""
    beside = file.with_name(file.name.replace("router_trace_", "logits_")).with_suffix(".bin")
    if beside == file or not beside.is_file() or beside.stat().st_size < 2:
        return None
    return np.memmap(beside, dtype="<u2", mode="r")


def _logits(record: dict[str, Any], bits: NDArray[np.uint16], where: str) -> NDArray[np.float16]:
    """Return the logits of one call; float16 keeps more digits than bfloat16, of less range."""
    offset, size, shape = (record.get(f"logit_{key}") for key in ("offset", "bytes", "shape"))
    num_tokens = record["num_tokens"]
    experts = shape[1] if isinstance(shape, list) and len(shape) == 2 else None
    if not isinstance(experts, int) or experts < 1 or shape != [num_tokens, experts]:
        raise TraceError(f"{where}: logit_shape is {shape}: must be [{num_tokens}, experts]")
    needed = 2 * num_tokens * experts
    if size != needed:
        raise TraceError(f"{where}: logit_bytes is {size}: must be {needed} (bfloat16)")
    if not isinstance(offset, int) or offset % 2 or not 0 <= offset <= 2 * len(bits) - needed:
        rule = f"must be even, and the logits within {2 * len(bits)} bytes of the file"
        raise TraceError(f"{where}: logit_offset is {offset}: {rule}")
    part = np.asarray(bits[offset // 2 : (offset + needed) // 2], dtype=np.uint32)
    with np.errstate(over="ignore"):  # -inf marks experts out of reach
        return (part << 16).view(np.float32).astype(np.float16).reshape(num_tokens, experts)


def _whole(passes: list[Pass], file: Path, notes: list[str]) -> tuple[list[Pass], list[str]]:
    """Return the passes that have every layer, each once."""
    layers = sorted({layer for held in passes for layer in held.ids})
    if len(passes) > 1 and len(passes[-1].ids) < len(layers):
        passes = passes[:-1]
        notes.append("repaired: the last pass was cut short and dropped")
    for place, held in enumerate(passes):
        lacking = [layer for layer in layers if layer not in held.ids]
        if lacking:
            where = f"{file}: pass {place} (step {held.step}) lacks layer {lacking[0]}"
            raise TraceError(f"{where}: must have all {len(layers)} (CUDA graphs run no hooks)")
        if len({len(ids) for ids in held.ids.values()}) > 1:
            counts = sorted({len(ids) for ids in held.ids.values()})
            where = f"{file}: pass {place} (step {held.step})"
            raise TraceError(f"{where}: layers have {counts} tokens: must be one number")
    kept: list[Pass] = []
    for held in passes:
        same_step = (other for other in reversed(kept) if other.step == held.step)
        if not any(held.equals(other) for other in same_step):
            kept.append(held)
    if len(kept) < len(passes):
        told = f"repaired: {len(passes) - len(kept)} passes that repeat another of their step were dropped"
        notes.append(f"{told} (recomputation)")
    return kept, notes


def joined_stages(stages: Sequence[Sequence[Pass]], renumbered: bool) -> list[Pass]:
    """Return the passes of pipeline stages, in the order of their layers, as those of the whole model.

    ``renumbered``: layers count from 0 through all stages, as the stages' own numbers overlap. Ends with the
    stage that has fewest passes.

    Raises TraceError if the stages' tokens differ.
    """
    whole = []
    for place, parts in enumerate(zip(*stages, strict=False)):
        joined = Pass(parts[0].step)
        for part in parts:
            if part.num_tokens != parts[0].num_tokens:
                raise TraceError(
                    f"pass {place}: pipeline stages have {parts[0].num_tokens} and {part.num_tokens} tokens: "
                    "must be alike"
                )
            base = len(joined.ids) if renumbered else None
            for at, layer in enumerate(sorted(part.ids)):
                number = layer if base is None else base + at
                joined.ids[number] = part.ids[layer]
                if layer in part.logits:
                    joined.logits[number] = part.logits[layer]
        whole.append(joined)
    return whole
