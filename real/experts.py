"""How the weights of one expert lie in bytes: views of a buffer, and packing into one.

An expert is one run of bytes, so that one copy moves all of it: the gate and up rows, the down
matrix, then biases and scales. Knows nothing of stores, devices or models.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from sim.settings import did_you_mean
from sim.types import ConfigError

PAGE_BYTES = 4096
"""What slots are rounded up to: the block that O_DIRECT reads."""
PART_BYTES = 64
"""What the parts of an expert are aligned to: a cache line, and more than any kernel asks for."""
INT8_MAX = 127

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
}


class ExpertWeights(NamedTuple):
    """The tensors of one expert, or of many stacked along a first dimension.

    ``gate_up`` is [2 x intermediate, hidden] (without a gate [intermediate, hidden]) and ``down``
    [hidden, intermediate]; transposed formats swap the two. Scales are float32, one an output row.
    """

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    gate_up_scale: Tensor | None = None
    down_scale: Tensor | None = None


class Part(NamedTuple):
    """Where one tensor lies in an expert's bytes."""

    name: str
    offset_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def end_bytes(self) -> int:
        """Return the first byte after the part."""
        return self.offset_bytes + prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class ExpertFormat:
    """Shape and precision of an expert's weights, and so their place in its bytes.

    Parameters
    ----------
    hidden_size, intermediate_size
        Width of the model, and of the expert between its two matrices.
    dtype
        Of the matrices: float32, bfloat16, float16 or int8 (symmetric, one scale an output row).
    has_gate
        Whether gate and up rows are both there, so 2 x intermediate rows; else up rows only.
    has_bias
        Whether both matrices have a bias.
    is_transposed
        Whether the matrices are [in, out], as gpt-oss has them, instead of [out, in].
    activation_dtype
        Of activations and biases; None is ``dtype``, or float32 for int8.

    Raises
    ------
    ConfigError
        A size below one, or a dtype that is not known.
    """

    hidden_size: int
    intermediate_size: int
    dtype: str
    has_gate: bool = True
    has_bias: bool = False
    is_transposed: bool = False
    activation_dtype: str | None = None

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"expert: {name} = {getattr(self, name)}: must be at least 1")
        if self.dtype not in DTYPES:
            known = ", ".join(DTYPES)
            raise ConfigError(
                f"expert: dtype = {self.dtype}: must be one of {known}{did_you_mean(self.dtype, DTYPES)}"
            )
        floats = [name for name in DTYPES if name != "int8"]
        if self.activation_dtype not in (None, *floats):
            raise ConfigError(
                f"expert: activation_dtype = {self.activation_dtype}: must be one of {', '.join(floats)}"
            )

    @property
    def is_quantised(self) -> bool:
        """Tell whether the matrices are integers with scales."""
        return self.dtype == "int8"

    @property
    def torch_dtype(self) -> torch.dtype:
        """Dtype of the matrices."""
        return DTYPES[self.dtype]

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of activations and biases."""
        fallback = "float32" if self.is_quantised else self.dtype
        return DTYPES[self.activation_dtype or fallback]

    @property
    def gate_up_rows(self) -> int:
        """Outputs of the first matrix: 2 x intermediate with a gate."""
        return self.intermediate_size * (2 if self.has_gate else 1)

    @property
    def num_weights(self) -> int:
        """Number of matrix weights; biases and scales not counted."""
        return (self.gate_up_rows + self.intermediate_size) * self.hidden_size

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The tensors in the order they lie in: matrices, biases, scales."""
        wanted = [*self._matrices()]
        outputs = (("gate_up", self.gate_up_rows), ("down", self.hidden_size))
        if self.has_bias:
            wanted += [(f"{name}_bias", (rows,), self.compute_dtype) for name, rows in outputs]
        if self.is_quantised:
            wanted += [(f"{name}_scale", (rows,), torch.float32) for name, rows in outputs]
        parts: list[Part] = []
        for name, shape, dtype in wanted:
            offset = _round_up(parts[-1].end_bytes, PART_BYTES) if parts else 0
            parts.append(Part(name, offset, shape, dtype))
        return tuple(parts)

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return self.parts[-1].end_bytes

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of a slot that holds one such expert: ``num_bytes`` rounded up to a page."""
        return _round_up(self.num_bytes, PAGE_BYTES)

    def bits_per_weight(self) -> float:
        """Return bits of a slot for each matrix weight; a model priced so costs the slot's bytes."""
        return self.slot_bytes * 8 / self.num_weights

    def view(self, buffer: Tensor) -> ExpertWeights:
        """Return the typed tensors of an expert's bytes, without a copy.

        ``buffer`` is uint8[at least num_bytes], or uint8[slots, at least num_bytes] for stacked
        tensors [slots, ...]; its last dimension is contiguous and starts at a multiple of 64 bytes.
        """
        tensors = {}
        for name, offset, shape, dtype in self.parts:
            size = prod(shape) * dtype.itemsize
            typed = buffer[..., offset : offset + size].view(dtype)
            tensors[name] = typed.unflatten(-1, shape) if len(shape) > 1 else typed
        return ExpertWeights(**tensors)

    def pack(self, weights: ExpertWeights, target: Tensor) -> None:
        """Write an expert's tensors into ``target`` (uint8[at least num_bytes]), converted to this format.

        Float tensors of any dtype will do. Matrices that are int8 already bring their scales. Bytes
        between the parts and after them become zero, so that equal weights make equal records.

        Raises
        ------
        ConfigError
            A tensor is missing or has another shape.
        """
        views = self.view(target)
        for part, following in zip(self.parts, (*self.parts[1:], None), strict=True):
            end = target.numel() if following is None else following.offset_bytes
            target[part.end_bytes : end].zero_()
            if not part.name.endswith("_scale"):
                self._pack_part(part, weights, views)

    def _pack_part(self, part: Part, weights: ExpertWeights, views: ExpertWeights) -> None:
        source = getattr(weights, part.name)
        _check_shape(part, source)
        view = getattr(views, part.name)
        if part.dtype != torch.int8:
            view.copy_(_dequantised(part.name, weights, self.is_transposed))
            return
        scale_view = getattr(views, f"{part.name}_scale")
        if source.dtype == torch.int8:
            view.copy_(source)
            scale_view.copy_(getattr(weights, f"{part.name}_scale"))
        else:
            quantise(source, view, scale_view, self.is_transposed)

    def _matrices(self) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        shapes = {
            "gate_up": (self.gate_up_rows, self.hidden_size),
            "down": (self.hidden_size, self.intermediate_size),
        }
        return [
            (name, shape[::-1] if self.is_transposed else shape, self.torch_dtype)
            for name, shape in shapes.items()
        ]


def quantise(matrix: Tensor, target: Tensor, scales: Tensor, is_transposed: bool) -> None:
    """Write ``matrix`` as int8 into ``target`` and its scales, one an output, into ``scales``.

    The largest weight of an output becomes 127, so an error is at most half a scale.
    """
    exact = matrix.float()
    across = 0 if is_transposed else 1
    largest = exact.abs().amax(dim=across)
    scales.copy_(torch.where(largest > 0, largest / INT8_MAX, torch.ones_like(largest)))
    target.copy_((exact / scales.unsqueeze(across)).round_().clamp_(-INT8_MAX, INT8_MAX))


def dequantise(matrix: Tensor, scales: Tensor, is_transposed: bool = False) -> Tensor:
    """Return the float32 matrix that int8 weights and their scales stand for."""
    return matrix.float() * scales.unsqueeze(0 if is_transposed else 1)


def _dequantised(name: str, weights: ExpertWeights, is_transposed: bool) -> Tensor:
    """Return a tensor in floats: as it is, or dequantised where it is int8."""
    source: Tensor = getattr(weights, name)
    if source.dtype != torch.int8:
        return source
    return dequantise(source, getattr(weights, f"{name}_scale"), is_transposed)


def _check_shape(part: Part, source: Tensor | None) -> None:
    if source is None:
        raise ConfigError(f"expert: {part.name} is missing: must be of shape {list(part.shape)}")
    if tuple(source.shape) != part.shape:
        raise ConfigError(
            f"expert: {part.name} has shape {list(source.shape)}: must be {list(part.shape)}"
        )


def _round_up(num_bytes: int, multiple: int) -> int:
    return -(-num_bytes // multiple) * multiple
