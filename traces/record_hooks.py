"""Watch the routers of a Hugging Face MoE model while it runs.

Every MoE block of transformers v5 has a router (``gate`` or ``router``) beside its ``experts``.
A recorder hooks three places: the call of the experts gives the ids and the weights that were
really used, the router's output gives its logits, and the call of the decoder tells which token
of which sequence each row is. All of it is cloned and stays on the device until the decoder has
returned; then one copy brings it to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from traces.record_calls import (
    Rows,
    Segment,
    locate,
    name_arguments,
    owners,
    read_router,
    to_host,
    used_routing,
)
from traces.record_layers import MoeLayer, find_moe_layers
from traces.schema import GATE_COLUMNS, NO_EXPERT, TraceError


@dataclass(frozen=True)
class ForwardRecord:
    """The routing of one call of the decoder, without padding rows.

    n rows, L MoE layers, k slots ordered by falling weight (ties as the router gave them).
    """

    step: int  # index of the call, from 0
    batch_row: np.ndarray  # int32[n], which sequence of the batch; of a packed call, which request
    position: np.ndarray  # int32[n], place in that sequence, padding not counted
    token_id: np.ndarray | None  # int32[n]; None where the model was given embeddings
    expert_ids: np.ndarray  # uint16[n, L, k]; NO_EXPERT for an expert without weights
    expert_weights: np.ndarray  # float32[n, L, k], as the experts applied them
    router_logits: np.ndarray | None  # float16[n, L, E], identity experts after the others
    next_gate_ids: np.ndarray | None  # uint16[n, L, k]; NO_EXPERT in the last layer
    next_gate_ids_2: np.ndarray | None  # the same two layers on
    next_gate_ids_3: np.ndarray | None  # and three


class RouterRecorder:
    """Record the routing of every call of ``model``'s decoder, as a context manager.

    ``logits`` also keeps the router logits. ``gates_ahead`` (0 to 3) is for how many d the picks
    of the router of MoE layer l + d on the input of the router of layer l are kept too (that input
    are the hidden states that enter layer l's MoE block, already normed by layer l's own norm):
    the speculation of next-gate prefetching. Neither changes what the model computes, which must
    be in evaluation mode. ``segments`` is asked at every packed call (continuous batching) whose
    rows it has, in their order; without it such a call is refused.
    """

    def __init__(
        self,
        model: Any,
        *,
        logits: bool = False,
        gates_ahead: int = 1,
        segments: Callable[[], Sequence[Segment]] | None = None,
    ) -> None:
        if not 0 <= gates_ahead <= len(GATE_COLUMNS):
            raise TraceError(f"gates_ahead is {gates_ahead}: must be 0 to {len(GATE_COLUMNS)}")
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            raise TraceError("encoder-decoder models are unsupported")
        self.decoder: nn.Module = model.get_decoder() if hasattr(model, "get_decoder") else model
        self.layers = find_moe_layers(self.decoder)
        self.num_experts = self.layers[0].num_experts
        self.num_steps = 0
        self.num_padding_rows = 0
        self._keep_logits = logits
        self._segments = segments
        self._distances = range(1, gates_ahead + 1)
        self._records: list[ForwardRecord] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._flagged: list[nn.Module] = []
        self._begin(None)

    def __enter__(self) -> RouterRecorder:
        self.attach()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.detach()

    def attach(self) -> None:
        """Put the hooks on the model; a second call before ``detach`` is an error."""
        if self._handles:
            raise TraceError("the recorder is already attached")
        add = self._handles.append
        add(self.decoder.register_forward_pre_hook(self._on_call, with_kwargs=True))
        for slot, layer in enumerate(self.layers):
            said, used = partial(self._on_router, slot), partial(self._on_experts, slot)
            add(layer.router.register_forward_hook(said, with_kwargs=True))
            add(layer.experts.register_forward_pre_hook(used, with_kwargs=True))
            self._flag(layer.experts)
        add(self.decoder.register_forward_hook(self._on_return))

    def _flag(self, experts: nn.Module) -> None:
        """Make an mxfp4 gpt-oss block call its modules: it bypasses both unless told so."""
        if hasattr(experts, "forward_routed") and not hasattr(experts, "_is_hooked"):
            experts._is_hooked = True  # type: ignore[assignment]
            self._flagged.append(experts)

    def detach(self) -> None:
        """Take every hook off again; the model is as it was. Harmless when not attached."""
        for handle in self._handles:
            handle.remove()
        for experts in self._flagged:
            del experts._is_hooked
        self._handles, self._flagged = [], []
        self._begin(None)

    def take(self) -> list[ForwardRecord]:
        """Return the records since the last call, oldest first, and forget them.

        The model may run in another thread meanwhile: what that adds is kept for the next call.
        """
        records = self._records[:]
        del self._records[: len(records)]
        return records

    def _begin(self, rows: Rows | None) -> None:
        count = len(self.layers)
        self._rows = rows
        self._inputs: list[Tensor] = []  # of the routers called last, the newest first
        self._output: Any = ()
        self._used: list[tuple[Tensor, Tensor] | None] = [None] * count
        self._early: dict[int, list[tuple[Tensor, Tensor] | None]] = {
            distance: [None] * count for distance in self._distances
        }
        self._logits: list[Tensor | None] = [None] * count

    def _on_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training:
            raise TraceError("the model is in training mode: call model.eval() before recording")
        arguments = name_arguments(module, args, kwargs)
        packed = arguments.get("cu_seq_lens_q") is not None
        segments = self._segments() if self._segments is not None and packed else ()
        self._begin(locate(arguments, segments))

    def _on_router(
        self, slot: int, _module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any
    ) -> None:
        """Keep what a router said, and let it judge the inputs of the routers before it."""
        if self._rows is None:
            return
        layer = self.layers[slot]
        self._output = output
        if self._keep_logits:
            logits, _, _ = read_router(output, layer)
            self._logits[slot] = logits.detach().to(torch.float16, copy=True)
        if self._distances:
            if not args:
                raise TraceError(f"{layer.path}: its router was called without positional input")
            hidden = args[0].detach()
            for distance, earlier in enumerate(self._inputs, start=1):
                early = self._judge(layer, earlier.to(hidden.device), args[1:], kwargs)
                self._early[distance][slot - distance] = early
            self._inputs = [hidden.clone(), *self._inputs][: len(self._distances)]

    def _judge(
        self, layer: MoeLayer, hidden: Tensor, rest: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Run a router on other hidden states; ``forward`` itself, so that no hook fires."""
        with torch.no_grad():
            _, ids, weights = read_router(layer.router.forward(hidden, *rest, **kwargs), layer)
        return ids.clone(), weights.to(torch.float32, copy=True)

    def _on_experts(
        self, slot: int, _module: nn.Module, args: tuple[Any, ...], kwargs: Any
    ) -> None:
        """Keep the ids and weights that the experts are called with."""
        if self._rows is None:
            return
        routing = used_routing((*args[1:], *kwargs.values()))
        if routing is None:  # Llama-4 and JetMoe sort the tokens by expert first
            routing = read_router(self._output, self.layers[slot])[1:]
        ids, weights = routing
        self._used[slot] = (ids.detach().clone(), weights.detach().to(torch.float32, copy=True))

    def _on_return(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        rows = self._rows
        if rows is None:
            return
        missing = [
            layer.path for layer, used in zip(self.layers, self._used, strict=True) if not used
        ]
        if missing:
            raise TraceError(
                f"{missing[0]}: its experts were not called in this forward pass; a compiled graph "
                "or a fused kernel may bypass the modules"
            )
        self._records.append(self._collect(rows))
        self.num_steps += 1
        self._begin(None)

    def _collect(self, rows: Rows) -> ForwardRecord:
        """Copy everything of one decoder call to the host, and drop padding rows."""
        parts = {"used": self._used}
        ids, weights = self._used[-1] or (Tensor(), Tensor())
        for distance, early in self._early.items():
            beyond = min(distance, len(early))
            early[-beyond:] = [(torch.full_like(ids, NO_EXPERT), weights)] * beyond
            parts[GATE_COLUMNS[distance - 1]] = early
        device = rows.position.device
        tensors: dict[str, Tensor] = {"position": rows.position, "real": rows.real}
        optional = {"token_id": rows.token_id, "ends": rows.ends}
        tensors |= {name: tensor for name, tensor in optional.items() if tensor is not None}
        for name, routing in parts.items():
            tensors[f"{name}_ids"] = _stack([pair[0] for pair in routing if pair], device)
            tensors[f"{name}_weights"] = _stack([pair[1] for pair in routing if pair], device)
        if self._keep_logits:
            tensors["logits"] = _stack([item for item in self._logits if item is not None], device)
        return self._record(to_host(tensors), rows.segments)

    def _record(self, host: dict[str, np.ndarray], segments: Sequence[Segment]) -> ForwardRecord:
        real = host["real"].astype(bool)
        self.num_padding_rows += int(real.size - real.sum())
        flat = real.reshape(-1)
        tokens, logits = host.get("token_id"), host.get("logits")
        batch_row = owners(segments, host["ends"]) if segments else np.nonzero(real)[0]
        ids, weights = self._order(host["used_ids"][flat], host["used_weights"][flat])
        early: dict[str, np.ndarray | None] = dict.fromkeys(GATE_COLUMNS)
        for name in (GATE_COLUMNS[distance - 1] for distance in self._distances):
            early[name], _ = self._order(host[f"{name}_ids"][flat], host[f"{name}_weights"][flat])
        return ForwardRecord(
            step=self.num_steps,
            batch_row=batch_row.astype(np.int32),
            position=host["position"][real],
            token_id=None if tokens is None else tokens[real],
            expert_ids=ids,
            expert_weights=weights,
            router_logits=None if logits is None else logits[flat],
            **early,
        )

    def _order(self, ids: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Order the slots of [n, L, k] by falling weight; an expert without weights is none."""
        absent = ids >= self.num_experts
        ids = np.where(absent, NO_EXPERT, ids).astype(np.uint16)
        weights = np.where(absent, np.float32(0), weights)
        order = np.argsort(np.where(absent, np.inf, -weights), axis=-1, kind="stable")
        return np.take_along_axis(ids, order, -1), np.take_along_axis(weights, order, -1)


def _stack(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Stack per-layer [n, w] tensors to [n, L, w]; integers become int32."""
    if len({tensor.shape for tensor in tensors}) != 1:
        shapes = sorted({tuple(tensor.shape) for tensor in tensors})
        raise TraceError(f"MoE layers differ in their number of rows or slots: {shapes}")
    stacked = torch.stack([tensor.to(device) for tensor in tensors], dim=1)
    return stacked if stacked.is_floating_point() else stacked.to(torch.int32)
