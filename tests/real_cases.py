"""Tiny cases for tests of the real backend: a trace with all columns, policies, stores, and exact results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from torch import Tensor

from real.device import open_device
from real.experts import ExpertFormat, dequantise
from real.rig import (
    Tier,
    machine_for,
    priced,
)
from real.store import ExpertSource, RAMStore, Store, build_ram, with_low_copies
from real.store_file import FileStore, build_file
from real.synthetic import Synthetic
from sim.types import NO_EXPERT, LayerRouting
from tests.configs import CONF, composed
from traces.schema import DECODE, GATE_COLUMNS, PREFILL, Provenance, Trace, TraceMeta

torch.set_num_threads(1)

LAYERS, EXPERTS, TOP_K, REQUESTS = 3, 8, 2, 12
PROMPT, DECODED = 5, 4
FORMAT = ExpertFormat(32, 32, "float32")  # three pages
TIERS = {
    "ram": Tier("ram"),
    "storage": Tier("storage"),
    "link": Tier("link", link_bytes_per_s=400_000_000, link_setup_ns=5_000),
}
ONE = ("workload.requests=[3,5]",)
"""Requests one after another."""
MIXED = ("workload.batch_size=8", "workload.mixed=true", "workload.prefill_chunk=12")
"""Eight requests together, prompts in chunks beside decoding; the ninth waits for a place."""
_TEXTS = ("So it goes.\n", "Wait, no.\n", "Step 1: two and two.\n", "Check it.\n", "Plan: add.\n")


# -- what is run -----------------------------------------------------------------------------------


@cache
def tiny_trace() -> Trace:
    """Return ten requests with weights, scores, gates ahead, stages and text; routing has locality."""
    rng = np.random.default_rng(5)
    rows, length = REQUESTS * (PROMPT + DECODED), PROMPT + DECODED
    scores = rng.normal(size=(rows, LAYERS, EXPERTS)) - np.log(np.arange(1, EXPERTS + 1))
    for row in range(1, rows):
        scores[row] = 0.7 * scores[row - 1] + 0.7 * scores[row]
    logits = scores.astype(np.float16)
    best = np.argsort(-logits, axis=-1, kind="stable").astype(np.uint16)[..., :TOP_K]
    weights = np.exp(np.take_along_axis(logits.astype(np.float64), best.astype(np.intp), axis=-1))
    ahead = {name: np.full_like(best, NO_EXPERT) for name in GATE_COLUMNS}
    for distance, name in enumerate(GATE_COLUMNS, start=1):
        ahead[name][:, :-distance] = best[:, distance:]
    weights /= weights.sum(axis=-1, keepdims=True)
    unused = rng.random((rows, LAYERS)) < 0.05
    best[unused, 1], weights[unused, 1] = NO_EXPERT, 0
    meta = TraceMeta(
        model="tiny",
        num_layers=LAYERS,
        num_experts=EXPERTS,
        top_k=TOP_K,
        layer_indices=tuple(range(LAYERS)),
        provenance=Provenance("synthetic", "tests/real_cases.py"),
        weight_semantics="applied",
        stage_names=("plan", "work"),
    )
    position = np.tile(np.arange(length, dtype=np.int32), REQUESTS)
    return Trace(
        meta,
        request_id=np.repeat(np.arange(REQUESTS, dtype=np.int32), length),
        position=position,
        phase=np.where(position < PROMPT, PREFILL, DECODE).astype(np.uint8),
        step=position,
        expert_ids=best,
        expert_weights=weights.astype(np.float16),
        router_logits=logits,
        **ahead,
        stage=(position // 4 % 2).astype(np.int16),
        text=[_TEXTS[row % len(_TEXTS)] for row in range(rows)],
    )


@cache
def _policy(name: str) -> Any:
    """Return a policy's file; composed only if it stands on others: that takes long."""
    own = OmegaConf.load(CONF / "policy" / f"{name}.yaml")
    if "defaults" not in own:
        return OmegaConf.to_container(own, resolve=True)
    with initialize_config_module("conf", version_base="1.3"):
        found = compose(f"policy/{name}")
    return OmegaConf.to_container(found, resolve=True)["policy"]  # type: ignore[call-overload, index]


_SHORT = {"short": 1, "long": 2, "cooldown": 1, "min_steps": 1, "refractory": 0, "streak": 1}
"""Stages that end within the few tokens of these requests."""


def policy_of(name: str) -> dict[str, Any]:
    """Return a policy's settings; low-precision copies are int8, all that there is, and stages short."""
    settings: dict[str, Any] = deepcopy(_policy(name))
    if settings.get("low"):
        settings["low"]["bits"] = 8
    stages = settings.get("stages") or {}
    stages |= {part: value for part, value in _SHORT.items() if part in stages}
    return settings


def config_of(policy: str, *overrides: str, tier: str = "ram") -> dict[str, Any]:
    """Return the configuration of a run over tiny experts; no machine is too small for it."""
    sizes = ("model=tiny", "model.hidden_size=32", "model.expert_intermediate_size=32")
    heads = ("model.num_attention_heads=2", "model.num_kv_heads=1", "model.head_dim=8")
    blocks = ("engine.storage_block_bytes=4096", "engine.storage_queue_depth=3")
    given = (*sizes, *heads, "model.expert_bits=32", *blocks, "cache.ratio=0.5", *overrides)
    config = priced(composed(*given) | {"policy": policy_of(policy)}, FORMAT)
    config["machine"] = machine_for(config["machine"], Tier(tier))
    return config


@cache
def source(is_low: bool = False) -> ExpertSource:
    """Return the experts' weights, with int8 copies if asked."""
    full = Synthetic(LAYERS, EXPERTS, FORMAT, seed=3)
    return with_low_copies(full) if is_low else full


@cache
def ram_store(is_low: bool) -> RAMStore:
    """Return a store that all tests share: nobody writes to it."""
    return build_ram(source(is_low), open_device("cpu"))


def store_of(config: Mapping[str, Any], tier: str, folder: Path) -> Store:
    """Return the store of a run."""
    is_low = bool(config["policy"].get("low"))
    if tier != "storage":
        return ram_store(is_low)
    path = folder / f"experts-{is_low}.bin"
    return FileStore(path if path.exists() else build_file(source(is_low), path))


# -- what experts make of tokens ----------------------------------------------------------------------


class Reference:
    """What experts make of tokens, in float64 and by plain formulas, from the bytes of a store."""

    def __init__(self, store: RAMStore) -> None:
        banks = range(len(store.formats))
        self._parts = [[self._matrices(store, bank, at) for at in range(2)] for bank in banks]

    @staticmethod
    def _matrices(store: RAMStore, bank: int, index: int) -> Tensor:
        found = []
        for key in range(bank * store.num_experts, (bank + 1) * store.num_experts):
            weights = store.format_of(key).view(store.bytes_of(key))
            matrix = weights[index]
            if matrix.dtype == torch.int8:
                matrix = dequantise(matrix, weights[index + 4])
            found.append(matrix.double())
        return torch.stack(found)  # [experts, out, in]

    def output(
        self,
        routing: LayerRouting,
        hidden: Tensor,
        keys: Sequence[int],
        num_layers: int,
        weights: Any = None,
    ) -> Tensor:
        """Return the sum of those experts of a layer that ``keys`` names; ``weights`` None: the routing's."""
        ids = np.asarray(routing.topk_ids).astype(np.int64)
        weights = routing.topk_weights if weights is None else weights
        by_slot = np.full(ids.shape, 1 / ids.shape[1]) if weights is None else np.asarray(weights)
        is_low = np.zeros(ids.shape, bool) if routing.low_slots is None else routing.low_slots
        bank = routing.layer + is_low * num_layers
        counted = np.isin(bank * EXPERTS + ids, list(keys)) & (ids != NO_EXPERT)
        total = torch.zeros(hidden.shape, dtype=torch.float64)
        for of_bank in np.unique(bank[counted]).tolist():
            made = self._all(of_bank, hidden.double())  # [experts, tokens, hidden]
            tokens, slots = np.nonzero(counted & (bank == of_bank))
            shares = torch.tensor(by_slot[tokens, slots].astype(np.float64))
            rows = made[ids[tokens, slots], tokens] * shares[:, None]
            total.index_add_(0, torch.from_numpy(tokens), rows)
        return total

    def _all(self, bank: int, hidden: Tensor) -> Tensor:
        gate_up, down = self._parts[bank]
        inner = torch.einsum("eoh,nh->eno", gate_up, hidden)
        gate, up = inner.chunk(2, dim=-1)
        return torch.einsum("ehi,eni->enh", down, gate * torch.sigmoid(gate) * up)


@cache
def reference(is_low: bool) -> Reference:
    """Return the reference of all tests."""
    return Reference(ram_store(is_low))
