"""A Hugging Face model that runs with its experts behind a policy.

The model calls its decoder, its routers and its experts as always; hooks turn the first into steps, the
second into what policies read, and the seam of real/adapters.py hands the third to the executor, which the
same Offloader drives as in a simulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from real.adapters import Attachment, ModelExperts
from real.aligned_io import aligned_bytes
from real.errors import RealError
from real.executor import Executor
from real.experts import ExpertWeights
from real.live_routing import LiveChoices, Order, RouterTaps, by_weight, routing_of
from real.live_steps import LiveBatch, LiveStep
from real.store import RAMStore, Store
from real.store_file import FileStore
from sim.events import Kind
from sim.requests import RequestClock
from traces.record_calls import locate, name_arguments


class Live:
    """Runs a model's experts by an executor, as a context manager; afterwards the model is as it was.

    Between :meth:`begin_batch` and :meth:`end_batch` the model may be called, say by ``generate``.

    Parameters
    ----------
    model
        In evaluation mode, its weights on the executor's device.
    experts
        Its experts, from ``find_experts``.
    executor
        Of the same shape; its store holds the experts' weights as they are in the model now.
    order
        What puts an event's experts in order (``sim.routing.ordering``).
    """

    def __init__(
        self, model: Any, experts: ModelExperts, executor: Executor, order: Order | None = None
    ) -> None:
        self._model = model
        self._layers = experts.layers
        self._executor = executor
        self._order = order
        self._keys = executor.offloader.residency.keys
        self._num_experts = experts.num_experts
        read = _Reader(executor.parts.store).read
        self._attachment = Attachment(model, experts, self._compute, read)
        self._requests = RequestClock(executor.tables.requests)
        self._taps: RouterTaps | None = None
        self._handles: list[Any] = []
        self._num_steps = 0
        self._batch: LiveBatch | None = None
        self._arrival_ns = 0
        self._steps: list[tuple[LiveStep, int, int]] = []  # of the batch, with begin and end
        self._step: LiveStep | None = None
        self._choices: LiveChoices | None = None
        self._since: Any = None  # the moment since which the model computes by itself

    def __enter__(self) -> Live:
        self._attachment.attach()
        self._taps = RouterTaps(self._layers)
        decoder = self._model.get_decoder()
        self._handles = [
            decoder.register_forward_pre_hook(self._on_call, with_kwargs=True),
            decoder.register_forward_hook(self._on_return),
        ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._taps is not None:
            self._taps.remove()
        self._batch = self._step = self._choices = None
        self._attachment.detach()

    # -- batches ----------------------------------------------------------------------------------

    def begin_batch(self, batch: LiveBatch) -> None:
        """Learn which sequences the model is called with from now on."""
        self._batch = batch
        self._steps = []
        self._arrival_ns = self._executor.accounts.now_ns() if self._num_steps else 0

    def end_batch(self) -> None:
        """Learn that the batch has ended: its requests go to the request table."""
        assert self._batch is not None
        for work, begin_ns, end_ns in self._batch.work_steps(self._steps, self._arrival_ns):
            self._requests.end_step(work, begin_ns, end_ns)
        self._batch = None
        self._steps = []

    @property
    def num_steps(self) -> int:
        """Calls of the decoder so far."""
        return self._num_steps

    # -- what the model does ----------------------------------------------------------------------

    def _on_call(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._batch is None:
            raise RealError("the model was called outside a batch")
        rows = locate(name_arguments(decoder, args, kwargs))
        step = self._step = self._batch.step(self._num_steps, rows)
        self._executor.begin_step(step.info)
        self._choices = None
        self._since = self._executor.parts.device.stamp()

    def _on_return(self, _decoder: nn.Module, _args: Any, _output: Any) -> None:
        step, self._step, self._choices = self._step, None, None
        assert step is not None
        assert self._taps is not None
        self._executor.accounts.beside(Kind.STEP, -1, self._since)
        times_ns = self._executor.end_step(step.info)
        self._steps.append((step, *times_ns))
        self._num_steps += 1
        self._taps.forget()

    def _compute(self, layer: int, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Compute a layer's experts for the rows that are tokens; the others get zeros."""
        step, executor = self._step, self._executor
        if step is None:
            raise RealError("the model's experts were called outside its decoder")
        if len(hidden) != step.num_rows:
            raise RealError(
                f"{self._layers[layer].path}: its experts were called with {len(hidden)} rows: must be "
                f"{step.num_rows}, those of the decoder"
            )
        executor.accounts.beside(Kind.DENSE, layer, self._since)
        chosen, mass, slots = by_weight(ids, weights, step.rows, self._num_experts)
        choices = self._choices_of(step, chosen.shape)
        choices.enter(layer, chosen, mass)
        routing = routing_of(self._keys, layer, choices)
        rows, applied = (
            (hidden, weights)
            if step.rows is None
            else (hidden.index_select(0, step.rows), weights.index_select(0, step.rows))
        )
        if slots is not None:
            applied = applied.gather(1, slots.to(applied.device))
        made = executor.run_layer(routing, rows, applied)
        self._since = executor.parts.device.stamp()
        if step.rows is None:
            return made
        return torch.zeros_like(hidden).index_copy_(0, step.rows, made)

    def _choices_of(self, step: LiveStep, shape: tuple[int, ...]) -> LiveChoices:
        if self._choices is None:
            assert self._taps is not None
            sizes = step.info.num_tokens, len(self._layers), shape[1]
            self._choices = LiveChoices(
                sizes, self._num_experts, step.rows, self._taps, self._order
            )
        return self._choices


class _Reader:
    """Reads experts from a store, one at a time."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._scratch: Tensor | None = None

    def read(self, layer: int, expert: int) -> ExpertWeights:
        """Return an expert's weights in full precision; valid until the next call."""
        store = self._store
        key = store.keys.key(layer, expert)
        form = store.format_of(key)
        if isinstance(store, RAMStore):
            return form.view(store.bytes_of(key))
        assert isinstance(store, FileStore)
        if self._scratch is None:
            self._scratch = aligned_bytes(form.slot_bytes)
        store.read(key, 0, self._scratch)
        return form.view(self._scratch)


def batches(prompts: Sequence[Any], size: int) -> list[tuple[int, Sequence[Any]]]:
    """Return (first request, prompts) of each batch."""
    return [(first, prompts[first : first + size]) for first in range(0, len(prompts), size)]
