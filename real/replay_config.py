"""What a replay is asked, checked, and the same run as the simulator is asked it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hwmodels.machine import Machine
from real.device import Device, open_device
from real.experts import DTYPES, PAGE_BYTES, ExpertFormat
from real.rig import TIERS, Tier, format_of_model, machine_for, priced
from sim.composing import compose_config
from sim.own_options import with_folders
from sim.settings import (
    SWITCH,
    TEXT,
    Rule,
    at_least,
    check_group,
    check_settings,
    did_you_mean,
    is_number,
    is_whole,
    or_null,
)
from sim.types import ConfigError

CUDA_ENGINE = "greenroom_cuda"
_LARGEST_RATE = 10**15


def _is_rate(value: Any) -> bool:
    return is_number(value) and 1 <= value <= _LARGEST_RATE and value == int(value)


def _is_tier(value: Any) -> bool:
    return value in TIERS


REAL_SETTINGS: dict[str, Rule] = {
    "tier": (_is_tier, f"must be one of {', '.join(TIERS)}"),
    "device": TEXT,
    "dtype": or_null(TEXT),
    "store": or_null(TEXT),
    "link_bytes_per_s": (_is_rate, f"must be a whole number >= 1, at most {_LARGEST_RATE:g}"),
    "link_setup_ns": at_least(0),
    "threads": or_null(at_least(1)),
    "lockstep": SWITCH,
    "seed": at_least(0),
    "sim": SWITCH,
}
"""The group ``real``; what each means stands in conf/replay.yaml."""


@dataclass(frozen=True, slots=True)
class RealSettings:
    """The group ``real`` of a replay; see conf/replay.yaml."""

    tier: str
    device: str
    dtype: str | None
    store: str | None
    link_bytes_per_s: int
    link_setup_ns: int
    threads: int | None
    lockstep: bool
    seed: int
    sim: bool

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RealSettings:
        """Read the group; ConfigError for the first setting that is wrong."""
        if "real" not in config:
            raise ConfigError("real: missing, must be given")
        found = config["real"]
        for name, known in (("tier", TIERS), ("dtype", DTYPES)):
            value = found.get(name) if isinstance(found, Mapping) else None
            if isinstance(value, str) and value not in known:
                hint = did_you_mean(value, known)
                raise ConfigError(f"real.{name} = {value}: must be one of {', '.join(known)}{hint}")
        check_group("real", found, REAL_SETTINGS)
        settings = cls(**{**found, "link_bytes_per_s": int(found["link_bytes_per_s"])})
        if settings.store is not None and settings.tier != "storage":
            raise ConfigError(
                f"real.store = {settings.store}: must be null with real.tier = {settings.tier}, whose "
                "experts are in host memory"
            )
        return settings

    @property
    def own_tier(self) -> Tier:
        """Return where experts wait."""
        return Tier(self.tier, self.link_bytes_per_s, self.link_setup_ns)


def compose_replay(
    overrides: Sequence[str], config_dirs: Sequence[str] = ()
) -> tuple[dict[str, Any], Device]:
    """Compose conf/replay.yaml and open its device, whose engine it is unless one was named."""
    given = with_folders(overrides, config_dirs)
    config = compose_config("replay", given)
    device = open_device(RealSettings.from_config(config).device)
    named = any(text.partition("=")[0] == "engine" for text in overrides)
    if device.kind == "cuda" and not named:
        config = compose_config("replay", [f"engine={CUDA_ENGINE}", *given])
    return config, device


def simulated_config(
    config: Mapping[str, Any], settings: RealSettings, form: ExpertFormat
) -> dict[str, Any]:
    """Return a replay's configuration as ``greenroom sim`` takes it.

    Experts have the bytes of a slot, all other weights the dtype of the kernels, and the machine is as the
    tier makes it. Raises ConfigError for what cannot be measured.
    """
    plain = {key: value for key, value in config.items() if key != "real"}
    _check(plain, settings)
    made = priced(plain, form)
    bits = form.compute_dtype.itemsize * 8
    made["model"] |= {"dense_bits": bits, "kv_bits": bits, "shared_bits": None, "head_bits": None}
    made["machine"] = _machine(made["machine"], settings)
    return made


def format_of_replay(config: Mapping[str, Any], settings: RealSettings) -> ExpertFormat:
    """Return how an expert lies in a slot."""
    return format_of_model(config["model"], settings.dtype)


def _machine(given: Mapping[str, Any], settings: RealSettings) -> dict[str, Any]:
    name = f"machine/{given.get('name')}"
    kind = Machine.from_mapping(given, name).kind
    if settings.tier != "storage" and kind != "discrete":
        raise ConfigError(
            f"real.tier = {settings.tier}: {name} is a {kind} machine, where experts come from storage "
            "alone; must be storage, or the machine one with a GPU and a link"
        )
    machine = machine_for(given, settings.own_tier)
    if settings.tier == "link":
        rate, setup_ns = settings.link_bytes_per_s, settings.link_setup_ns
        machine["link"] = {
            **machine["link"],
            "h2d_bytes_per_s": rate,
            "rate_derate": 1.0,
            "pinned": True,
            "copy_setup_ns": setup_ns,
            "copy_gap_ns": 0,
            "copy_issue_ns": 0,
        }
    return machine


_WHY_NOT = "it is of a simulation; must be false, or ask `greenroom sim`"


def _check(config: Mapping[str, Any], settings: RealSettings) -> None:
    """Refuse what a measured run cannot have, so that nothing is silently left out."""
    check_settings(config)
    output, engine = config["output"], config["engine"]
    for name in ("what_if", "roofline"):
        if output[name]:
            raise ConfigError(f"output.{name} = true: {_WHY_NOT}")
    policy, block_bytes = config["policy"], engine.get("storage_block_bytes")
    if settings.tier == "storage" and policy.get("placement") is not None:
        raise ConfigError(
            f"policy/{policy['name']}: placement: with real.tier = storage no expert is in host memory, "
            "where it could be computed; must be left out, or real.tier ram or link"
        )
    if is_whole(block_bytes) and block_bytes % PAGE_BYTES:
        raise ConfigError(
            f"engine.storage_block_bytes = {block_bytes}: must be a multiple of {PAGE_BYTES}"
        )
    wrong = {
        "storage_access": (engine.get("storage_access") == "page_cache", "must be direct"),
        "graph": (engine.get("graph") is True, "must be false"),
        "tensor_parallel": (engine.get("tensor_parallel") is True, "must be false"),
    }
    for name, (is_wrong, rule) in wrong.items():
        if is_wrong:
            raise ConfigError(
                f"engine.{name} = {engine[name]}: the real backend cannot do this; {rule}"
            )
