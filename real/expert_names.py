"""How checkpoints name the tensors of their experts; knows names, not weights."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from real.errors import RealError
from real.shards import Entry, Shards
from sim.types import ConfigError

_PLACE = (
    r"^(?P<trunk>.*?(?:layers|blocks)\.)(?P<layer>\d+)\.(?P<block>(?:(?!attention|attn|shared).)*)"
)
_SINGLE = re.compile(
    _PLACE + r"experts\.(?P<expert>\d+)\."
    r"(?P<part>gate_proj|up_proj|down_proj|w1|w2|w3)\.(?P<kind>weight|bias)$"
)
_FUSED = re.compile(
    _PLACE + r"(?:experts\.(?P<part>gate_up_proj|up_proj|down_proj)(?P<bias>_bias)?"
    r"|(?P<linear>input_linear|output_linear)\.weight)$"
)
_PACKED = re.compile(
    _PLACE + r"experts\..*(_blocks|_scales|qweight|weight_packed|weight_scale_inv)$"
)
_ROLES = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "gate_up_proj": "gate_up"}
_ROLES |= {"down_proj": "down", "w2": "down", "input_linear": "gate_up", "output_linear": "down"}
_DEPTHS = ("num_layers", "num_hidden_layers", "n_layers")

Parts = dict[tuple[str, int | None], Entry]
"""The tensors of a layer by (role, expert); expert None holds all experts."""


def find_layers(shards: Shards, config: Mapping[str, Any]) -> dict[int, Parts]:
    """Return the experts' tensors by layer of the model.

    Layers behind the model's last one, which predict further tokens, are left out.

    Raises
    ------
    ConfigError
        There are none, or they are quantised.
    RealError
        One has too many dimensions, or too few.
    """
    text = config.get("text_config", config)
    depth = next((text[name] for name in _DEPTHS if isinstance(text.get(name), int)), None)
    layers: dict[int, Parts] = defaultdict(dict)
    for name, entry in shards.entries.items():
        found = _SINGLE.match(name) or _FUSED.match(name)
        if not found or "mtp" in found["trunk"]:
            continue
        if depth is None or int(found["layer"]) < depth:
            layers[int(found["layer"])][_role(found)] = _checked(entry, *_role(found))
    if not layers:
        raise _no_experts(shards)
    return dict(layers)


def _checked(entry: Entry, role: str, expert: int | None) -> Entry:
    """Return a tensor that has as many dimensions as its name tells."""
    wanted = (1 if role.endswith("_bias") else 2) + (expert is None)
    if len(entry.shape) != wanted:
        raise RealError(
            f"{entry.where}: has shape {list(entry.shape)}: must have {wanted} dimensions"
        )
    return entry


def _role(found: re.Match[str]) -> tuple[str, int | None]:
    """Return role and expert of a tensor's name."""
    parts = found.groupdict()
    role = _ROLES[parts.get("part") or parts["linear"]]
    has_suffix = parts.get("kind") == "bias" or parts.get("bias") is not None
    expert = parts.get("expert")
    return role + "_bias" * has_suffix, None if expert is None else int(expert)


def _no_experts(shards: Shards) -> ConfigError:
    packed = next((entry for name, entry in shards.entries.items() if _PACKED.match(name)), None)
    if packed is not None:
        return ConfigError(
            f"{packed.where}: the experts are quantised: must be F32, BF16 or F16; load the model "
            "dequantised and save it"
        )
    return ConfigError(f"{shards.folder}: has no experts by a name that is known")
