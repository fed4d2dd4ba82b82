"""Read the calls that a router recorder sees: arguments, router outputs, device tensors."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from traces.schema import TraceError


class RoutedBlock(Protocol):
    """What ``read_router`` needs of an MoE layer."""

    @property
    def block(self) -> nn.Module:
        """The module that owns the router."""
        ...

    @property
    def router(self) -> nn.Module:
        """The router itself."""
        ...

    @property
    def path(self) -> str:
        """Where the block is, for messages."""
        ...


@dataclass(frozen=True, slots=True)
class Segment:
    """One request's part of a packed decoder call (continuous batching), as its engine tells it."""

    request: int
    num_tokens: int
    end: int  # tokens of the request that have been processed after this call
    yields: bool  # whether the call gives the request a new token


@dataclass(frozen=True)
class Rows:
    """Which token each row of a decoder call is; tensors are [batch, length], on the device."""

    token_id: Tensor | None  # int32; None where the model was given embeddings
    position: Tensor  # int32, place in its own sequence, padding not counted
    real: Tensor  # uint8, 0 for padding
    segments: tuple[Segment, ...] = ()  # of a packed call, in the order of its rows
    ends: Tensor | None = None  # int32[segments + 1], where the call itself parts them


def name_arguments(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call of ``module`` by name."""
    if not args:
        return dict(kwargs)
    names = list(inspect.signature(module.forward).parameters)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def locate(arguments: Mapping[str, Any], segments: Sequence[Segment] = ()) -> Rows:
    """Tell which token each row of a decoder call is; tensors are cloned, for callers reuse them.

    ``segments`` are the requests of a packed call (continuous batching). Raises TraceError for
    such a call without them, for its rows do not say whose they are.
    """
    if arguments.get("cu_seq_lens_q") is not None:
        if not segments:
            raise TraceError(
                "packed sequences (continuous batching) without their requests: use "
                "traces.record_continuous, or generate()"
            )
        return _locate_packed(arguments, tuple(segments))
    tokens, embeds = arguments.get("input_ids"), arguments.get("inputs_embeds")
    source = tokens if tokens is not None else embeds
    if source is None:
        raise TraceError("the decoder was called with neither input_ids nor inputs_embeds")
    batch, length = source.shape[:2]
    cache = arguments.get("cache")
    cache = arguments.get("past_key_values") if cache is None else cache
    past = 0 if cache is None else cache.get_seq_length()
    slots = torch.arange(length, device=source.device) + past
    real = _real_rows(arguments.get("attention_mask"), slots, batch)
    return Rows(
        token_id=None if tokens is None else tokens.to(torch.int32, copy=True),
        position=_positions(arguments, slots, batch).to(torch.int32, copy=True),
        real=real.to(torch.uint8, copy=True),
    )


def _locate_packed(arguments: Mapping[str, Any], segments: tuple[Segment, ...]) -> Rows:
    """Tell which token each row of a packed call [1, total] is; the rows after the last segment pad."""
    tokens, position = arguments.get("input_ids"), arguments.get("position_ids")
    if not isinstance(position, Tensor):
        raise TraceError("packed sequences without position_ids: cannot tell the rows apart")
    slots = torch.arange(position.shape[-1], device=position.device)
    num_tokens = sum(segment.num_tokens for segment in segments)
    return Rows(
        token_id=None if tokens is None else tokens.to(torch.int32, copy=True),
        position=position.to(torch.int32, copy=True),
        real=(slots < num_tokens).to(torch.uint8).expand(position.shape).clone(),
        segments=segments,
        ends=arguments["cu_seq_lens_q"].to(torch.int32, copy=True),
    )


def owners(segments: Sequence[Segment], ends: np.ndarray) -> np.ndarray:
    """Return the request of every row of a packed call, int32[rows without padding].

    Raises TraceError where ``ends``, the call's own cumulative lengths, part the rows otherwise.
    """
    lengths = [segment.num_tokens for segment in segments]
    if not np.array_equal(np.diff(ends)[: len(lengths)], lengths):
        raise TraceError(
            f"a packed call has segments of {np.diff(ends).tolist()} tokens: must be {lengths}, "
            "as its engine scheduled them"
        )
    return np.repeat([segment.request for segment in segments], lengths).astype(np.int32)


def _real_rows(mask: Any, slots: Tensor, batch: int) -> Tensor:
    """Return [batch, length], true for tokens that are not padding.

    A mask of [batch, seen] says so itself. A prepared mask of [batch, 1, length, seen] (static
    caches) does so on its diagonal: only a padding token may not attend to itself.
    """
    if isinstance(mask, Mapping):
        mask = mask.get("full_attention", next(iter(mask.values()), None))
    length = slots.shape[0]
    if not isinstance(mask, Tensor) or mask.ndim not in (2, 4):
        return torch.ones((batch, length), dtype=torch.bool, device=slots.device)
    if mask.ndim == 2:
        return mask[:, -length:] != 0
    columns = slots.clamp(max=mask.shape[-1] - 1)
    own = mask[:, 0].gather(2, columns.expand(mask.shape[0], length)[..., None])[..., 0]
    allowed = own if own.dtype == torch.bool else own >= 0
    return allowed.expand(batch, length)


def _positions(arguments: Mapping[str, Any], slots: Tensor, batch: int) -> Tensor:
    """Return the position of every row, [batch, length]; that of padding means nothing."""
    length = slots.shape[0]
    given = arguments.get("position_ids")
    if isinstance(given, Tensor):
        given = given[0] if given.ndim == 3 else given
        return given[..., -length:].expand(batch, length)
    mask = arguments.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        return (mask != 0).cumsum(dim=1)[:, -length:] - 1
    return slots.expand(batch, length)


def used_routing(values: Iterable[Any]) -> tuple[Tensor, Tensor] | None:
    """Find (ids, weights), each [n, k], among the arguments of an experts call, or None."""
    matrices = [value for value in values if isinstance(value, Tensor) and value.ndim == 2]
    ids = [matrix for matrix in matrices if not matrix.is_floating_point()]
    weights = [matrix for matrix in matrices if matrix.is_floating_point()]
    if len(ids) != 1 or len(weights) != 1 or ids[0].shape != weights[0].shape:
        return None
    return ids[0], weights[0]


def read_router(output: Any, layer: RoutedBlock) -> tuple[Tensor, Tensor, Tensor]:
    """Return (logits [n, E], ids [n, k], weights [n, k]) of a router's output.

    Most routers return all three. Llama-4 returns (scores, logits), both [n, E]; DBRX logits
    alone; JetMoe logits after what its kernels need. These choose by the logits, so do we.
    """
    values = [output] if isinstance(output, Tensor) else list(output)
    matrices = [item for item in values if isinstance(item, Tensor) and item.ndim >= 2]
    matrices = [matrix.reshape(-1, matrix.shape[-1]) for matrix in matrices]
    ids = [matrix for matrix in matrices if not matrix.is_floating_point()]
    floats = [matrix for matrix in matrices if matrix.is_floating_point()]
    if len(ids) == 1 and len(floats) == 2:
        return floats[0], ids[0], floats[1]
    if not ids and len(floats) == 2 and floats[0].shape == floats[1].shape:
        chosen = floats[1].topk(_top_k(layer), dim=-1).indices
        return floats[1], chosen, floats[0].gather(1, chosen)
    if not ids and len(floats) == 1:
        top = floats[0].topk(_top_k(layer), dim=-1)
        return floats[0], top.indices, torch.softmax(top.values, dim=-1)
    raise TraceError(f"{layer.path}: cannot read the output of {type(layer.router).__name__}")


def _top_k(layer: RoutedBlock) -> int:
    for owner in (layer.router, layer.block):
        if isinstance(getattr(owner, "top_k", None), int):
            return int(getattr(owner, "top_k"))  # noqa: B009 - a Tensor attribute to mypy
    raise TraceError(f"{layer.path}: neither the router nor its block has a top_k")


_HOST_TYPES = {
    torch.int32: np.int32,
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.uint8: np.uint8,
}


def to_host(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Copy tensors of one device to the host in a single transfer; keys and shapes are kept."""
    names = sorted(tensors, key=lambda name: -tensors[name].element_size())  # keeps views aligned
    flat = [tensors[name].contiguous().reshape(-1).view(torch.uint8) for name in names]
    joined = torch.cat(flat).cpu().numpy()
    arrays: dict[str, np.ndarray] = {}
    start = 0
    for name, part in zip(names, flat, strict=True):
        tensor = tensors[name]
        view = joined[start : start + part.numel()].view(_HOST_TYPES[tensor.dtype])
        arrays[name] = view.reshape(tuple(tensor.shape))
        start += part.numel()
    return arrays
