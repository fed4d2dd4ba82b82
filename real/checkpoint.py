"""Experts of real models: out of a Hugging Face folder, or out of a model that is loaded.

Folders name experts in several ways: one matrix an expert (``experts.3.gate_proj.weight``, or w1, w3
and w2), or one for all (``experts.gate_up_proj``, or input_linear and output_linear). Either way
an expert becomes its gate rows followed by its up rows, and its down matrix, as a loaded model
holds them. MoE layers are counted from 0, in the order of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from real.errors import RealError
from real.expert_names import find_layers
from real.experts import DTYPES, ExpertFormat, ExpertWeights
from real.shards import FLOATS, Entry, Shards, read_json
from sim.types import ConfigError


class Layout(NamedTuple):
    """How the two matrices of an expert say its sizes."""

    hidden_size: int
    intermediate_size: int
    is_transposed: bool


class CheckpointExperts:
    """Experts of a Hugging Face folder, read without loading the model.

    Parameters
    ----------
    folder
        With ``config.json`` and safetensors files, single or sharded.
    dtype
        That a store shall hold; None leaves the folder's own.

    Raises
    ------
    RealError
        A file is missing, cut or damaged; a tensor is missing or has another shape.
    ConfigError
        There are no experts, or they are quantised in a way that is not read.
    """

    def __init__(self, folder: Path | str, dtype: str | None = None) -> None:
        self._shards = Shards(Path(folder))
        try:
            self._config = read_json(self._shards.folder / "config.json")
            self._layers = find_layers(self._shards, self._config)
            self.layer_indices = tuple(sorted(self._layers))
            self.num_layers = len(self._layers)
            self.num_experts = self._count_experts()
            self._own_format = self._find_format()
            own = self._own_format.dtype
            self.format = _converted(self._own_format, dtype or own)
        except BaseException:
            self.close()
            raise

    @property
    def source(self) -> dict[str, object]:
        """Where the weights come from."""
        return {
            "kind": "checkpoint",
            "folder": self._shards.folder.name,
            "model_type": self._config.get("model_type", "unknown"),
            "dtype": self._own_format.dtype,
        }

    def expert(self, layer: int, expert: int) -> ExpertWeights:
        """Return the weights of one expert, in the folder's own dtype.

        Raises
        ------
        RealError
            A tensor is missing, has another shape, is cut, or holds values that are not finite.
        """
        tensors = {}
        for part in self._own_format.parts:
            target = torch.empty(part.shape, dtype=part.dtype)
            role, suffix = part.name.removesuffix("_bias"), part.name.endswith("_bias") * "_bias"
            if role == "gate_up" and not self._has(layer, f"gate_up{suffix}"):
                roles = ("gate", "up") if self.format.has_gate else ("up",)
                for name, rows in zip(roles, target.chunk(len(roles)), strict=True):
                    self._read(layer, expert, name + suffix, rows)
            else:
                self._read(layer, expert, part.name, target)
            tensors[part.name] = target
        return ExpertWeights(**tensors)

    def close(self) -> None:
        """Close the files."""
        self._shards.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _read(self, layer: int, expert: int, role: str, target: Tensor) -> None:
        parts = self._layers[self.layer_indices[layer]]
        index = None if (role, expert) in parts else expert
        entry = parts.get((role, expert)) or parts.get((role, None))
        if entry is None or (index is not None and index >= entry.shape[0]):
            raise RealError(
                f"{self._shards.folder}: layer {self.layer_indices[layer]}, expert {expert}: "
                f"its {role} tensor is missing"
            )
        entry.read(target, index)
        if not torch.isfinite(target.sum(dtype=torch.float32)):
            raise RealError(
                f"{entry.where}: expert {expert} holds values that are not finite: the file is corrupt, "
                "so download or save it again"
            )

    def _has(self, layer: int, role: str) -> bool:
        return any(name == role for name, _ in self._layers[self.layer_indices[layer]])

    def _count_experts(self) -> int:
        counts = {
            max(
                entry.shape[0] if expert is None else expert + 1
                for (role, expert), entry in parts.items()
                if role == "down"
            )
            for parts in self._layers.values()
        }
        if len(counts) != 1:
            raise ConfigError(
                f"{self._shards.folder}: layers have {sorted(counts)} experts: must have equally many"
            )
        return counts.pop()

    def _find_format(self) -> ExpertFormat:
        """Return the format that the first layer's first expert has; the others are held to it."""
        parts = self._layers[self.layer_indices[0]]
        first = {role: entry for (role, expert), entry in parts.items() if expert in (0, None)}
        up = first.get("gate_up") or first.get("up")
        down = first.get("down")
        if up is None or down is None:
            missing = "up" if up is None else "down"
            raise RealError(
                f"{self._shards.folder}: layer {self.layer_indices[0]}, expert 0: "
                f"its {missing} tensor is missing"
            )
        halves = 2 if "gate" in first else 1
        shape = (up.shape[-2] * halves, up.shape[-1])
        has_gate = "gate" in first or "gate_up" in first
        layout = _layout(shape, down.shape[-2:], has_gate, up.where)
        return ExpertFormat(
            layout.hidden_size,
            layout.intermediate_size,
            _dtype(up),
            has_gate=has_gate,
            has_bias=any(role.endswith("_bias") for role in first),
            is_transposed=layout.is_transposed,
        )


class ModuleExperts:
    """Experts of a loaded model: modules that hold all experts of a layer as stacked parameters.

    Parameters
    ----------
    modules
        One a MoE layer, in order, with ``gate_up_proj`` (or ``up_proj``) [experts, rows, columns],
        ``down_proj``, and biases if they have any.
    dtype
        That a store shall hold; None leaves the modules' own.

    Raises
    ------
    ConfigError
        No modules, or modules whose shapes differ.
    """

    def __init__(self, modules: Sequence[Module], dtype: str | None = None) -> None:
        if not modules:
            raise ConfigError("model: it has no experts modules with stacked weights")
        self._modules = tuple(modules)
        self.num_layers = len(self._modules)
        self.num_experts = _stacked(self._modules[0])["down"].shape[0]
        own = _module_format(self._modules[0])
        for module in self._modules[1:]:
            if _module_format(module) != own or len(_stacked(module)["down"]) != self.num_experts:
                raise ConfigError("model: its layers have experts of several shapes: must have one")
        self.format = _converted(own, dtype or own.dtype)

    @property
    def source(self) -> dict[str, object]:
        """Where the weights come from."""
        return {"kind": "model", "experts": type(self._modules[0]).__name__}

    def expert(self, layer: int, expert: int) -> ExpertWeights:
        """Return the weights of one expert: views of the parameters, not to be written to."""
        stacked = _stacked(self._modules[layer])
        return ExpertWeights(**{name: tensor[expert] for name, tensor in stacked.items()})


def experts_modules(model: Module) -> list[tuple[str, Module]]:
    """Return name and module of every layer's experts in a model, in order; shared experts are none."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if _is_stacked(module, "down_proj")
        and (_is_stacked(module, "gate_up_proj") or _is_stacked(module, "up_proj"))
    ]


def _is_stacked(module: Module, name: str) -> bool:
    value = getattr(module, name, None)
    return isinstance(value, Parameter) and value.ndim == 3


def _stacked(module: Module) -> dict[str, Tensor]:
    """Return the stacked parameters of a module under the names of an expert's parts."""
    first = "gate_up_proj" if _is_stacked(module, "gate_up_proj") else "up_proj"
    tensors = {}
    for part, name in (("gate_up", first), ("down", "down_proj")):
        tensors[part] = getattr(module, name).detach()
        bias = getattr(module, f"{name}_bias", None)
        if bias is not None:
            tensors[f"{part}_bias"] = bias.detach()
    return tensors


def _module_format(module: Module) -> ExpertFormat:
    stacked = _stacked(module)
    has_gate = _is_stacked(module, "gate_up_proj")
    where = type(module).__name__
    layout = _layout(stacked["gate_up"].shape[1:], stacked["down"].shape[1:], has_gate, where)
    names = {dtype: name for name, dtype in DTYPES.items() if dtype.is_floating_point}
    dtype = names.get(stacked["gate_up"].dtype)
    if dtype is None:
        raise ConfigError(f"{where}: dtype = {stacked['gate_up'].dtype}: must be one of {[*names]}")
    return ExpertFormat(
        layout.hidden_size,
        layout.intermediate_size,
        dtype,
        has_gate=has_gate,
        has_bias="down_bias" in stacked,
        is_transposed=getattr(module, "is_transposed", layout.is_transposed),
    )


def _layout(gate_up: Sequence[int], down: Sequence[int], has_gate: bool, where: str) -> Layout:
    """Return the sizes that two matrices agree on, [out, in] before [in, out].

    With a gate at most one of the two can be true, since the intermediate size is not zero.
    """
    halves = 2 if has_gate else 1
    for is_transposed in (False, True):
        rows, columns = gate_up[::-1] if is_transposed else gate_up
        outputs, inputs = down[::-1] if is_transposed else down
        if columns == outputs and rows == halves * inputs:
            return Layout(columns, inputs, is_transposed)
    raise RealError(
        f"{where}: shapes {list(gate_up)} and {list(down)} of an expert's two matrices do not fit"
    )


def _converted(own: ExpertFormat, dtype: str) -> ExpertFormat:
    """Return a format in another dtype; int8 experts work on activations of their own old dtype."""
    if dtype == own.dtype:
        return own
    return replace(own, dtype=dtype, activation_dtype=own.dtype if dtype == "int8" else None)


def _dtype(entry: Entry) -> str:
    names = {dtype: name for name, dtype in DTYPES.items()}
    if entry.type not in FLOATS:
        raise ConfigError(
            f"{entry.where}: is {entry.type}: must be F32, BF16 or F16; load the model dequantised "
            "and save it"
        )
    return names[FLOATS[entry.type]]
