"""What a replay computes beside routed experts: attention with a KV cache, norms, router, embedding and head.

Weights are random, sizes those of the model; what the router says is not used, for the routing is recorded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from hwmodels.model_shape import ModelShape
from real.device import Device
from sim.types import ConfigError, StepInfo


class DenseWork:
    """Random layers of a model's sizes, with grouped-head attention.

    Parameters
    ----------
    shape
        Sizes; its MoE layers are computed, dense-only ones are refused.
    device, dtype
        Where, and in which precision.
    places, max_tokens
        Requests that are in memory at one time, and tokens of the longest.
    seed
        Of the random weights.
    """

    def __init__(
        self,
        shape: ModelShape,
        device: Device,
        dtype: torch.dtype,
        places: int,
        max_tokens: int,
        seed: int = 0,
    ) -> None:
        _check(shape)
        self._heads, self._kv_heads = shape.num_attention_heads, shape.num_kv_heads
        self._head_dim = shape.head_dim
        self._top_k = shape.top_k
        rng = torch.Generator().manual_seed(seed)

        def matrix(rows: int, columns: int) -> Tensor:
            values = torch.randn(rows, columns, generator=rng) * 0.02
            return values.to(device.torch_device, dtype)

        hidden, inner = shape.hidden_size, self._heads * self._head_dim
        kv = self._kv_heads * self._head_dim
        layers = range(shape.num_moe_layers)
        self._qkv = [matrix(inner + 2 * kv, hidden) for _ in layers]
        self._out = [matrix(hidden, inner) for _ in layers]
        self._router = [matrix(shape.num_experts, hidden) for _ in layers]
        self._embedding = matrix(shape.vocab_size, hidden)
        cache = (shape.num_moe_layers, 2, places, self._kv_heads, max_tokens, self._head_dim)
        self._cache = torch.zeros(cache, device=device.torch_device, dtype=dtype)
        self._free = list(range(places - 1, -1, -1))
        self._place: dict[int, int] = {}
        self._length: dict[int, int] = {}
        self._parts: list[
            tuple[int, int, int, int]
        ] = []  # request's place, tokens [from, to), length before
        self._is_decode = False

    @property
    def num_bytes(self) -> int:
        """Bytes of weights and KV cache."""
        parts = (*self._qkv, *self._out, *self._router, self._embedding, self._cache)
        return sum(part.numel() * part.element_size() for part in parts)

    # -- a step -----------------------------------------------------------------------------------

    def begin_step(self, info: StepInfo) -> None:
        """Give every request of a step a place for its keys and values."""
        self._parts, begin = [], 0
        ids = info.request_ids
        while begin < len(ids):
            request, end = ids[begin], begin
            while end < len(ids) and ids[end] == request:
                end += 1
            place = self._place.get(request)
            if place is None:
                place = self._place[request] = self._free.pop()
                self._length[request] = 0
            before = self._length[request]
            self._length[request] = before + end - begin
            self._parts.append((place, begin, end, before))
            begin = end
        self._is_decode = all(end - begin == 1 for _, begin, end, _ in self._parts)

    def end_step(self, finished: Sequence[int]) -> None:
        """Free the places of requests that have ended."""
        for request in finished:
            self._free.append(self._place.pop(request))
            del self._length[request]

    @torch.no_grad()
    def embed(self, rows: Sequence[int]) -> Tensor:
        """Return the first layer's input of some tokens, [num_tokens, hidden_size]."""
        index = torch.tensor([row % len(self._embedding) for row in rows])
        return self._embedding[index.to(self._embedding.device, non_blocking=True)]

    @torch.no_grad()
    def layer(self, layer: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual stream after attention, and what the experts get of it."""
        mixed = self._attend(layer, _norm(hidden))
        hidden = hidden + functional.linear(mixed, self._out[layer])
        inner = _norm(hidden)
        scores = functional.linear(inner, self._router[layer]).softmax(dim=-1)
        scores.topk(self._top_k, dim=-1)
        return hidden, inner

    @torch.no_grad()
    def head(self, hidden: Tensor, num_outputs: int) -> Tensor:
        """Return the next token of each of the last ``num_outputs`` rows."""
        return functional.linear(_norm(hidden[-num_outputs:]), self._embedding).argmax(dim=-1)

    # -- attention --------------------------------------------------------------------------------

    def _attend(self, layer: int, inner: Tensor) -> Tensor:
        heads, kv_heads, dim = self._heads, self._kv_heads, self._head_dim
        sizes = [heads * dim, kv_heads * dim, kv_heads * dim]
        query, key, value = functional.linear(inner, self._qkv[layer]).split(sizes, dim=-1)
        keys, values = self._cache[layer]
        num_tokens = len(inner)
        key, value = key.view(num_tokens, kv_heads, dim), value.view(num_tokens, kv_heads, dim)
        if self._is_decode:
            return self._decode(query, key, value, keys, values)
        found = []
        for place, begin, end, before in self._parts:
            after = before + end - begin
            keys[place, :, before:after] = key[begin:end].transpose(0, 1)
            values[place, :, before:after] = value[begin:end].transpose(0, 1)
            own = query[begin:end].view(end - begin, heads, dim).transpose(0, 1).unsqueeze(0)
            reach = torch.ones(end - begin, after, dtype=torch.bool, device=own.device)
            out = functional.scaled_dot_product_attention(
                own,
                keys[place : place + 1, :, :after],
                values[place : place + 1, :, :after],
                attn_mask=reach.tril(before),
                enable_gqa=True,
            )
            found.append(out[0].transpose(0, 1).reshape(end - begin, heads * dim))
        return torch.cat(found)

    def _decode(
        self, query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Attend from one new token of each request; heads of a group are as tokens of one sequence."""
        places = [place for place, *_ in self._parts]
        lengths = [before for *_, before in self._parts]
        for row, (place, before) in enumerate(zip(places, lengths, strict=True)):
            keys[place, :, before] = key[row]
            values[place, :, before] = value[row]
        longest, count = max(lengths) + 1, len(places)
        mask = None
        if min(lengths) + 1 < longest:
            reach = torch.tensor(lengths, device=query.device)[:, None] + 1
            mask = (torch.arange(longest, device=query.device) < reach)[:, None, None]
        ascending = places == list(range(places[0], places[0] + count))
        chosen = slice(places[0], places[0] + count) if ascending else places
        grouped = query.view(count, self._kv_heads, self._heads // self._kv_heads, self._head_dim)
        out = functional.scaled_dot_product_attention(
            grouped, keys[chosen][:, :, :longest], values[chosen][:, :, :longest], attn_mask=mask
        )
        return out.reshape(count, self._heads * self._head_dim)


def _norm(values: Tensor) -> Tensor:
    return functional.rms_norm(values, values.shape[-1:])


def _check(shape: ModelShape) -> None:
    if shape.num_dense_only_layers or shape.num_shared_experts or shape.kv_lora_rank:
        raise ConfigError(
            f"model/{shape.name}: a replay computes layers of grouped-head attention and routed experts; "
            "must have no dense-only layers, shared experts or latent attention"
        )
