"""From a configuration and a model at hand to the scenario of a live run, which has no trace to replay.

Policies are built by the simulator's own builder, over a made-up trace of the model's shape that nobody
replays. What needs more than a model that runs (the future, an annotation, a calibration) is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from real.experts import ExpertFormat
from real.rig import Tier, machine_for, priced, real_scenario
from sim.build import Scenario, load_trace
from sim.composing import compose_config
from sim.own_options import with_folders
from sim.types import ConfigError
from traces.schema import DECODE, GATE_COLUMNS, NO_EXPERT, PREFILL, Provenance, Trace, TraceMeta

BUNDLED_TRACE = "pkg://traces.tiny/trace.parquet"
_AMPLE_BYTES = 10**15
"""Memory of the machine that policies believe in: what really fits is found out by taking it."""
_WORKLOAD = (
    "waiting",
    "requests",
    "prefill_chunk",
    "length",
    "rate_per_s",
    "warm_up",
    "kv_limit_tokens",
)
_USUAL: dict[str, dict[str, Any]] = {
    "workload": {"mixed": False, "arrivals": "closed", "cut": False, "repeat": 1},
    "cache": {},
    "output": {"what_if": False, "roofline": False, "sequential": False},
}
_CACHE = ("host_bytes", "joint_bytes", "kv_bytes")
_MADE_UP_TOKENS = 32


@dataclass(frozen=True, slots=True)
class LiveShape:
    """What must be known of a model to build its policies.

    Parameters
    ----------
    name
        What it is called.
    num_layers, num_experts, top_k
        MoE layers, experts of each, and how many a token uses.
    num_all_layers
        Layers of the decoder, those without experts included.
    format
        How an expert lies in a slot.
    scoring, normalized
        How the router scores, where it is known (see TraceMeta).
    """

    name: str
    num_layers: int
    num_experts: int
    top_k: int
    num_all_layers: int
    format: ExpertFormat
    scoring: str = "unknown"
    normalized: bool | None = None


def compose_live(overrides: Sequence[str], config_dirs: Sequence[str] = ()) -> dict[str, Any]:
    """Compose ``conf/config.yaml`` for a live run.

    Raises ConfigError for settings of what a live run takes from the model and its prompts.
    """
    for text in overrides:
        key = text.lstrip("+~").partition("=")[0].strip()
        if key == "model" or key.startswith("model."):
            raise ConfigError(
                f"{text}: the model is the one that runs; must be left out, see --model"
            )
        if key == "workload.batch_size":
            raise ConfigError(f"{text}: must be left out, see --batch-size")
    return compose_config("config", with_folders(["model=tiny", *overrides], config_dirs))


def live_config(
    config: Mapping[str, Any], shape: LiveShape, batch_size: int, tier: Tier
) -> dict[str, Any]:
    """Return a configuration whose model is the one at hand and whose machine has memory enough."""
    made = copy.deepcopy(dict(config))
    _check_unused(made, "workload", _WORKLOAD)
    _check_unused(made, "cache", _CACHE)
    _check_unused(made, "output", ("perfetto",))
    made["workload"]["batch_size"] = batch_size
    form = shape.format
    made["model"] |= {
        "name": shape.name,
        "num_layers": shape.num_all_layers,
        "num_moe_layers": shape.num_layers,
        "num_experts": shape.num_experts,
        "top_k": shape.top_k,
        "hidden_size": form.hidden_size,
        "expert_intermediate_size": form.intermediate_size,
        "expert_matrices": 3 if form.has_gate else 2,
        "dense_intermediate_size": form.intermediate_size,
    }
    machine = made["machine"]
    for part in ("gpu", "cpu"):
        if machine.get(part) is not None:
            machine[part] = {**machine[part], "memory_bytes": _AMPLE_BYTES}
    if machine.get("storage") is not None:
        machine["storage"] = {**machine["storage"], "capacity_bytes": _AMPLE_BYTES}
    if machine.get("cpu") is not None:
        machine["cpu"]["threads_used"] = torch.get_num_threads()  # of experts computed in place
    made["machine"] = machine_for(machine, tier)
    return priced(made, form)


def live_scenario(
    config: Mapping[str, Any], shape: LiveShape, tier: Tier, is_bundled: bool = False
) -> Scenario:
    """Build the policies of a live run from what :func:`live_config` gave.

    ``is_bundled``: the model is the bundled one, so that policies may learn from the bundled trace.

    Raises
    ------
    ConfigError
        The policy needs what a live run does not have; the message says what.
    """
    made: dict[str, Any] = copy.deepcopy(dict(config))
    policy = made["policy"]
    where = f"policy/{policy.get('name')}"
    if "host" in policy:
        raise ConfigError(
            f"{where}: host: a live run has no tier below host memory; must be left out"
        )
    if tier.kind == "storage" and "placement" in policy:
        raise ConfigError(
            f"{where}: placement: computes experts where their weights lie, which is a file with --tier "
            "storage; must run with --tier ram"
        )
    source = _learns_from(made, is_bundled)
    made["calibration"] |= {
        "trace": source,
        "allow_overlap": True,
    }  # its requests are not run here
    try:
        scenario = real_scenario(made, _made_up(shape))
    except ConfigError as error:
        if "which the trace does not have" not in str(error):
            raise
        reason = str(error).partition(", which the trace")[0]
        raise ConfigError(f"{reason}, which only a recorded trace has, not a live run") from error
    found = scenario.offloader.policies
    if found.oracle:
        raise ConfigError(
            f"{where}: knows the future, which a live run does not have; choose another"
        )
    if found.calibrated and source is None:
        raise ConfigError(
            f"{where}: learns from a trace beforehand; trace.path must name one that greenroom record made "
            "of this model"
        )
    return scenario


def _check_unused(config: Mapping[str, Any], group: str, names: Sequence[str]) -> None:
    """Refuse settings that a live run does not follow."""
    settings = config[group]
    for name in names:
        if settings[name] is not None:
            raise ConfigError(f"{group}.{name} = {settings[name]}: must be null in a live run")
    for name, usual in _USUAL[group].items():
        if settings[name] != usual:
            said = f"{group}.{name} = {settings[name]}: must be {usual} in a live run"
            raise ConfigError(said.replace("True", "true").replace("False", "false"))


def _learns_from(config: Mapping[str, Any], is_bundled: bool) -> str | None:
    """Return the path of the trace that policies may learn from; None if there is none of this model."""
    given = config["calibration"]["trace"]
    if given is not None:
        return str(given)
    path = str(config["trace"]["path"])
    if path == BUNDLED_TRACE and not is_bundled:
        return None
    load_trace(path)  # a mistake in it is told as one of trace.path
    return path


def _made_up(shape: LiveShape) -> Trace:
    """Return a trace of a model's shape that has all columns a live run can give, and no meaning."""
    draw = np.random.default_rng(0)
    rows, layers, experts = _MADE_UP_TOKENS, shape.num_layers, shape.num_experts
    logits = draw.normal(size=(rows, layers, experts)).astype(np.float16)
    ids = np.argsort(-logits, axis=-1, kind="stable")[..., : shape.top_k].astype(np.uint16)
    gates: dict[str, Any] = {}
    for distance, name in enumerate(GATE_COLUMNS, start=1):
        gates[name] = ids.copy()
        gates[name][:, max(0, layers - distance) :] = NO_EXPERT
    order = np.arange(rows, dtype=np.int32)
    half = rows // 2
    meta = TraceMeta(
        model=shape.name,
        num_layers=layers,
        num_experts=experts,
        top_k=shape.top_k,
        layer_indices=tuple(range(layers)),
        provenance=Provenance(kind="synthetic", source="the shape of a model that runs"),
        scoring=shape.scoring,
        normalized=shape.normalized,
        weight_semantics="applied",
    )
    return Trace(
        meta,
        request_id=np.zeros(rows, dtype=np.int32),
        position=order,
        phase=np.where(order < half, PREFILL, DECODE).astype(np.uint8),
        step=np.maximum(0, order - half + 1).astype(np.int32),
        expert_ids=ids,
        token_id=np.zeros(rows, dtype=np.int32),
        text=[""] * rows,
        expert_weights=np.full(ids.shape, 1 / shape.top_k, dtype=np.float16),
        router_logits=logits,
        **gates,
    )
