"""Kernels as pieces of work to be timed, over weights that no cache holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from real.device import Device
from real.experts import ExpertFormat, ExpertWeights
from real.kernels import Kernels
from real.measure import Facts
from real.pairs import OneToken, Scattered
from real.tokens import LayerTokens
from real.weight_pool import WeightPool

_IN_A_ROW = 8
"""Kernels between two stamps of a CUDA device, so that the way to it counts once for all."""


class OneExpert(LayerTokens):
    """Tokens that all go to one expert, and may do so again and again."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden
        self._pairs = (
            OneToken(hidden, [0], False)
            if len(hidden) == 1
            else Scattered(hidden, np.zeros((len(hidden), 1), np.int64), None, False)
        )

    def run(self, kernels: Kernels, key: int, weights: ExpertWeights) -> None:
        """Compute the expert."""
        self._pairs.run(kernels, 0, weights)

    def rows(self, key: int) -> list[Tensor]:
        """Return the tokens, to be computed elsewhere."""
        return self._pairs.rows(0)

    def put(self, key: int, results: Sequence[Tensor]) -> None:
        """Take what was made elsewhere."""
        self._pairs.put(0, results)


def on_device_ns(device: Device, works: Sequence[Callable[[], object]]) -> float:
    """Return what each of several pieces of work takes in ns, by the device's own clock."""
    begin = device.stamp()
    for work in works:
        work()
    end = device.stamp()
    return max(1, device.time_ns(end) - device.time_ns(begin)) / len(works)


def times_in_a_row(device: Device) -> int:
    """Return how often work is done between two stamps."""
    return 1 if device.kind == "cpu" else _IN_A_ROW


class KernelProbe:
    """One expert on the compute device, with its tokens' gathering and scattering.

    Parameters
    ----------
    device, kernels
        What computes; ``kernels.format`` is that of the expert.
    pool
        Weights in the device's memory.
    num_tokens
        Tokens of the expert.
    """

    def __init__(self, device: Device, kernels: Kernels, pool: WeightPool, num_tokens: int) -> None:
        self.facts: Facts = expert_facts("expert_gpu", kernels.format, num_tokens)
        self._device = device
        self._kernels = kernels
        self._pool = pool
        self._tokens = OneExpert(activations(kernels.format, num_tokens, device))
        self._count = times_in_a_row(device)

    @torch.no_grad()
    def run(self) -> float:
        """Compute, and return the ns of one expert."""
        return on_device_ns(self._device, [self._work() for _ in range(self._count)])

    def _work(self) -> Callable[[], None]:
        tokens, kernels, form = self._tokens, self._kernels, self._kernels.format
        weights = form.view(self._pool.window(form.slot_bytes))
        return lambda: tokens.run(kernels, 0, weights)


class MatmulProbe:
    """Rows times one large matrix: ``gemv`` for one row, ``gemm`` for several.

    Parameters
    ----------
    device, pool
        What computes, and weights in its memory.
    dtype
        Of rows and matrix, a float one.
    m, n, k
        Rows, outputs and inputs.
    """

    def __init__(
        self, device: Device, pool: WeightPool, dtype: str, m: int, n: int, k: int
    ) -> None:
        form = ExpertFormat(k, 1, dtype)
        self._num_bytes = n * k * form.torch_dtype.itemsize
        size = {"num_bytes": self._num_bytes} if m == 1 else {"m": m, "n": n, "k": k}
        self.facts: Facts = {
            "kind": "gemv" if m == 1 else "gemm",
            **size,
            "bits": bits_of(dtype),
        }
        self._device = device
        self._pool = pool
        self._rows = activations(form, m, device)
        self._shape = (n, k)
        self._count = times_in_a_row(device)

    @torch.no_grad()
    def run(self) -> float:
        """Multiply, and return the ns."""
        return on_device_ns(self._device, [self._work() for _ in range(self._count)])

    def _work(self) -> Callable[[], Tensor]:
        window = self._pool.window(self._num_bytes)
        matrix = window.view(self._rows.dtype).view(self._shape)
        return lambda: functional.linear(self._rows, matrix)


class AttentionProbe:
    """Decode attention of one layer and one sequence, heads of a group as tokens (real/dense.py).

    Parameters
    ----------
    device, pool
        What computes, and keys and values in its memory.
    dtype
        A float one.
    kv_tokens
        Entries that are read.
    num_heads, num_kv_heads, head_dim
        The shape of the heads.
    """

    def __init__(
        self,
        device: Device,
        pool: WeightPool,
        dtype: str,
        kv_tokens: int,
        num_heads: int = 16,
        num_kv_heads: int = 4,
        head_dim: int = 128,
    ) -> None:
        self.facts: Facts = {
            "kind": "attention",
            "kv_tokens": kv_tokens,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "kv_bits": bits_of(dtype),
        }
        form = ExpertFormat(num_heads * head_dim, 1, dtype)
        self._device = device
        self._pool = pool
        grouped = (1, num_kv_heads, num_heads // num_kv_heads, head_dim)
        self._query = activations(form, 1, device).view(grouped)
        self._shape = (1, num_kv_heads, kv_tokens, head_dim)
        self._num_bytes = num_kv_heads * kv_tokens * head_dim * form.torch_dtype.itemsize
        self._count = times_in_a_row(device)

    @torch.no_grad()
    def run(self) -> float:
        """Attend, and return the ns."""
        return on_device_ns(self._device, [self._work() for _ in range(self._count)])

    def _work(self) -> Callable[[], Tensor]:
        keys, values = self._cached(), self._cached()
        return lambda: functional.scaled_dot_product_attention(self._query, keys, values)

    def _cached(self) -> Tensor:
        return self._pool.window(self._num_bytes).view(self._query.dtype).view(self._shape)


class LaunchProbe:
    """Operations on one number in a row, from a stream or from a CUDA graph.

    ``mode`` is ``stream``, ``graph``, or ``issue``: what asking for them takes of the host's time.
    """

    def __init__(self, device: Device, mode: str, count: int = 100) -> None:
        self.facts: Facts = {"kind": "launch", "mode": mode, "count": count}
        if mode == "issue":
            self.facts = {"kind": "launch_issue", "count": count}
        self._device = device
        self._count = count
        self._mode = mode
        self._value = device.to_device(torch.zeros(1))
        self._graph: torch.cuda.CUDAGraph | None = None
        if mode == "graph":
            self._ask()  # what it allocates must be there before it is recorded
            device.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._ask()

    @torch.no_grad()
    def run(self) -> float:
        """Launch, and return the ns of all."""
        self._device.synchronize()
        if self._mode == "issue":
            begin_ns = time.perf_counter_ns()
            self._ask()
            return time.perf_counter_ns() - begin_ns
        work = self._ask if self._graph is None else self._graph.replay
        return on_device_ns(self._device, [work])

    def _ask(self) -> None:
        value = self._value
        for _ in range(self._count):
            value.neg_()


def expert_facts(kind: str, form: ExpertFormat, num_tokens: int) -> dict[str, object]:
    """Return what a row says of an expert."""
    return {
        "kind": kind,
        "num_bytes": form.slot_bytes,
        "bits": bits_of(form.dtype),
        "num_tokens": num_tokens,
    }


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let the calling thread have so many threads for its kernels meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def activations(form: ExpertFormat, num_tokens: int, device: Device | None = None) -> Tensor:
    """Return random rows as a format's experts take them, [num_tokens, hidden_size]."""
    generator = torch.Generator().manual_seed(num_tokens)
    rows = torch.randn(num_tokens, form.hidden_size, generator=generator).to(form.compute_dtype)
    return rows if device is None else device.to_device(rows)


def bits_of(dtype: str) -> int:
    """Return the bits of a weight."""
    return ExpertFormat(1, 1, dtype).torch_dtype.itemsize * 8


def is_supported(device: Device, kernels: Kernels, pool: WeightPool) -> bool:
    """Tell whether the device computes experts of a format at all."""
    try:
        KernelProbe(device, kernels, pool, 1).run()
        device.synchronize()
    except (RuntimeError, NotImplementedError):
        return False
    return True
