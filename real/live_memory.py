"""The memory of a live run: what a budget leaves for experts, and what was really taken.

On a CPU the compute device's memory is the host's, so that two figures are told: what the run holds by its
own account (dense weights and the arena), and what the process took beyond where it began.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from real.adapters import ModelExperts
from real.device import Device
from real.experts import ExpertFormat
from sim.types import ConfigError

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # what the kernel takes for "forget the peak of resident memory"
_ACTIVATIONS = 16
"""Tensors of a layer's width that a forward pass holds at one time, at most: an estimate."""


class Reserve(NamedTuple):
    """What a device needs beside experts: dense weights and buffers, KV cache, activations; in bytes."""

    dense_bytes: int
    kv_bytes: int = 0
    activation_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return sum(self)


def model_bytes(model: Any) -> int:
    """Return the bytes of a model's parameters and buffers that are in memory, shared ones once."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers()) if not t.is_meta}
    return sum(tensor.nbytes for tensor in tensors.values())


def dense_bytes(model: Any, experts: ModelExperts) -> int:
    """Return the bytes of a model in memory without its experts."""
    return model_bytes(model) - experts.bytes_held()


def reserve_of(
    model: Any, experts: ModelExperts, device: Device, batch_size: int, longest: int
) -> Reserve:
    """Return what a run needs beside experts, with requests of at most ``longest`` tokens.

    On a CPU KV cache and activations are not counted, for nothing tells how much they really take.
    """
    dense = dense_bytes(model, experts)
    if device.kind == "cpu":
        return Reserve(dense)
    config = model.config.get_text_config(decoder=True)
    rows = batch_size * longest
    item_bytes = model.dtype.itemsize
    kv = config.num_hidden_layers * _kv_width(config) * rows * item_bytes
    width = config.hidden_size * _ACTIVATIONS
    return Reserve(dense, kv, rows * width * 4 + batch_size * config.vocab_size * 4 * 2)


def _kv_width(config: Any) -> int:
    """Return how many numbers a layer's cache keeps of one token."""
    heads = config.num_attention_heads
    if getattr(
        config, "kv_lora_rank", None
    ):  # transformers caches the keys and values of all heads
        key = config.qk_nope_head_dim + config.qk_rope_head_dim
        return int(heads * (key + config.v_head_dim))
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    return int(2 * groups * head)


def within(
    config: Mapping[str, Any],
    memory_bytes: int,
    reserve: Reserve,
    formats: Sequence[ExpertFormat],
    most_staging: int,
) -> dict[str, Any]:
    """Return a configuration whose expert cache and staging slots fit in a budget beside the rest.

    Half of the slots at most, and ``most_staging``, are for staging.

    Raises
    ------
    ConfigError
        Not even one slot fits; the message says what the least is.
    """
    slot_bytes = sum(form.slot_bytes for form in formats)
    left = memory_bytes - reserve.total_bytes
    slots = left // slot_bytes
    if slots < 1:
        least = reserve.total_bytes + slot_bytes
        beside = f" + {least - reserve.dense_bytes - slot_bytes} for KV cache and activations"
        raise ConfigError(
            f"--memory = {memory_bytes}: must be at least {least} bytes ({reserve.dense_bytes} for dense "
            f"weights{beside if reserve.total_bytes > reserve.dense_bytes else ''} + {slot_bytes} for one "
            "expert); give more, or a smaller model"
        )
    made = copy.deepcopy(dict(config))
    asked = made["cache"]["staging_slots"]
    staging = min(slots, asked) if asked else min(most_staging, max(1, slots // 2))
    made["cache"] |= {
        "staging_slots": staging,
        "bytes": left - staging * slot_bytes,
        "ratio": 0,
    }
    return made


# -- what was taken --------------------------------------------------------------------------------


class PeakMemory:
    """Watches the memory that a run takes on its device, and of the process.

    Parameters
    ----------
    device
        Whose memory it is.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._base_bytes: int | None = None
        self._is_reset = False

    def set_base(self, held_bytes: int) -> None:
        """Learn that the run begins to take memory; it holds ``held_bytes`` of the process's already."""
        resident = _status_bytes("VmRSS")
        self._base_bytes = None if resident is None else resident - held_bytes

    def begin(self) -> None:
        """Forget the peaks so far: the experts have left the model, and the arena is there."""
        if self._device.kind == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device.torch_device)
        with suppress(OSError):
            _CLEAR.write_text(_RESET_PEAK)
            self._is_reset = True

    def device_bytes(self, dense: int, arena: int) -> int:
        """Return the peak since: CUDA's own count, or on a CPU the weights and buffers that were held."""
        if self._device.kind == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device.torch_device))
        return dense + arena

    def process_bytes(self) -> int | None:
        """Return what the process took at most, beyond its base; None where the system does not say."""
        peak = _status_bytes("VmHWM")
        if peak is None or self._base_bytes is None or not self._is_reset:
            return None
        return peak - self._base_bytes


def _status_bytes(name: str) -> int | None:
    with suppress(OSError, ValueError):
        for line in _STATUS.read_text(encoding="utf-8").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None
