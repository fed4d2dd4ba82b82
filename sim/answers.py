"""What policies may answer: checks that name the class and the rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.policies.base import (
    BatchFormer,
    CachePolicy,
    PlacementPolicy,
    Policy,
    Predictor,
    PrefetchPolicy,
    RepackPolicy,
    RoutingPolicy,
    SizingPolicy,
    StageDetector,
)
from sim.settings import did_you_mean
from sim.types import ConfigError, KeySpace, LayerRouting

_VERBS = {
    CachePolicy: "choose_victim",
    PrefetchPolicy: "propose",
    PlacementPolicy: "place",
    RoutingPolicy: "rewrite",
    StageDetector: "is_boundary",
    Predictor: "scores",
    SizingPolicy: "slots",
    BatchFormer: "choose",
}


def check_verb(part: object, where: str) -> None:
    """Raise ConfigError if a class does not say how it does what its role is for."""
    for kind, verb in _VERBS.items():
        hook = getattr(part, verb, None)
        if isinstance(part, kind) and getattr(hook, "__func__", None) is getattr(kind, verb):
            raise ConfigError(f"{where}.{verb}: must be defined, see {kind.__name__}.{verb}")
    _check_hooks(part, where)


def _check_hooks(part: object, where: str) -> None:
    """Raise ConfigError for a method that looks like a hook and is none, so that nobody would call it."""
    known = {name for kind in (Policy, *_VERBS) if isinstance(part, kind) for name in dir(kind)}
    for name in dir(part):
        if name.startswith("on_") and name not in known and callable(getattr(part, name)):
            raise ConfigError(f"{where}.{name}: no such hook{did_you_mean(name, known)}")


def check_boundary(detector: StageDetector, found: Any) -> None:
    """Raise ConfigError if a detector says neither yes nor no."""
    if not isinstance(found, bool | np.bool_):
        raise ConfigError(f"{type(detector).__name__}.is_boundary = {found}: must be True or False")


def check_groups(repack: RepackPolicy, groups: Sequence[NDArray[np.intp]], num_tokens: int) -> None:
    """Raise ConfigError if micro-batches are no partition of a step's tokens."""
    tokens = np.sort(np.concatenate(groups)) if len(groups) else np.empty(0)
    if not np.array_equal(tokens, np.arange(num_tokens)):
        raise ConfigError(
            f"{type(repack).__name__}.repack: must be a partition of the step's {num_tokens} tokens, each "
            "in exactly one group"
        )


def check_rewritten(
    policy: RoutingPolicy, made: LayerRouting, recorded: LayerRouting, keys: KeySpace
) -> None:
    """Raise ConfigError if a policy's routing is none for the layer and tokens at hand."""
    where = f"{type(policy).__name__}.rewrite"
    if not policy.lossy:
        raise ConfigError(f"{where}: changes the answer: the class must be marked lossy = True")
    if not isinstance(made, LayerRouting) or made.layer != recorded.layer:
        raise ConfigError(f"{where} = {made}: must be a LayerRouting of layer {recorded.layer}")
    rows, slots = recorded.id_rows(), made.id_rows()
    if rows is not None and (slots is None or list(map(len, slots)) != list(map(len, rows))):
        raise ConfigError(
            f"{where}: topk_ids must be int[{len(rows)}, {len(rows[0])}], as recorded in layer {made.layer}"
        )
    num_layers, num_experts, layer = keys.num_layers, keys.num_experts, made.layer
    for bank in {key // num_experts for key in made.experts}:
        if bank != layer and not (bank == layer + num_layers and keys.num_copies > 1):
            key = next(key for key in made.experts if key // num_experts == bank)
            raise ConfigError(
                f"{where}: key {key} is no expert of layer {layer}: topk_ids must be in "
                f"[0, {num_experts}), and low_slots None without policy.low"
            )
