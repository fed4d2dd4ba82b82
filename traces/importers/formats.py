"""The formats that can be imported, by name: what each is and which module reads it.

A reader is ``read(path, told) -> Trace | ExpertCounts``; ``path`` is a file or, where the format is a
file a rank, a folder. It raises ``TraceError`` for whatever the format's own writer cannot have made.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from traces.counts import ExpertCounts
from traces.importers.told import Told
from traces.trace import Trace, TraceError, near_match

Reader = Callable[[Path, Told], Trace | ExpertCounts]


class Format(NamedTuple):
    """A format: its name, the module in ``traces.importers`` that reads it, a line on what it is.

    ``takes`` are the lengths of ``Told`` that it uses where they are told.
    """

    name: str
    module: str
    what: str
    takes: tuple[str, ...] = ()

    def reader(self) -> Reader:
        """Return the reader; imports its module."""
        read: Reader = import_module(f"traces.importers.{self.module}").read
        return read


_PROMPT, _CONTEXT = ("prompt_tokens",), ("context_tokens",)

FORMATS = tuple(
    Format(*row)
    for row in (
        (
            "experts-npz",
            "experts_npz",
            "llama-moe-trace archive: `experts` [layers, tokens, k]",
            _CONTEXT,
        ),
        ("route-csv", "route_csv", "BigMoeOnEdge route_trace v1: routing, weights, residency"),
        (
            "sglang-recorder",
            "sglang_recorder",
            "SGLang expert distribution recorder, .pt (all modes)",
        ),
        (
            "routed-experts",
            "routed_experts",
            "what SGLang and vLLM return: int32, npy, answers in JSON",
            _PROMPT,
        ),
        (
            "rl-tensors",
            "rl_tensors",
            "routed experts of slime, verl and verifiers, .pt or JSON",
            _PROMPT,
        ),
        ("moe-balance", "moe_balance", "moe-balance: one npz a request, or its JSONL", _PROMPT),
        (
            "megatron-trace",
            "megatron_trace",
            "Megatron --moe-routing-trace-path: JSONL a rank",
            _PROMPT + _CONTEXT,
        ),
        ("moe-policylang", "moe_policylang", "moe-policylang traces: Parquet or JSONL", _PROMPT),
        ("moe-trace-csv", "moe_trace_csv", "llama.cpp examples/moe-trace: layer,expert a line"),
        ("moe-trace-bin", "moe_trace_bin", "llama-moe-trace's binary stream", _CONTEXT),
        (
            "finemoe",
            "finemoe",
            "FineMoE pickles of routing by token (read by a restricted unpickler)",
        ),
        (
            "vllm-patch",
            "vllm_patch",
            "JSONL of home-made vLLM patches: meta, then a route a line",
            _PROMPT,
        ),
        (
            "lattice",
            "lattice",
            "lattice JSONL: layer_idx, token_idx, selected_ids, gate_weights",
            _PROMPT,
        ),
        ("imp", "imp_json", "imp's moe_expert_trace JSON: [layer, e0, ...] by record"),
        ("mpt", "moepager", "moepager .mpt, version 1"),
        ("eplb", "expert_load", "EPLB weights or logical_count: loads, as counts"),
        (
            "moe-infinity",
            "moe_infinity",
            "MoE-Infinity activation matrices, .npy: counts a sequence",
        ),
        ("imatrix", "imatrix", "llama.cpp imatrix GGUF: tokens an expert, as counts"),
        ("megatron-counts", "megatron_counts", "Megatron tokens_per_expert JSONL, as counts"),
    )
)


def format_named(name: str) -> Format:
    """Return the format called ``name``; raises TraceError with a near match."""
    for known in FORMATS:
        if known.name == name:
            return known
    names = [known.name for known in FORMATS]
    hint = near_match(name, names) or f" (known: {', '.join(names)})"
    raise TraceError(f"format {name!r}: no such format{hint}")
