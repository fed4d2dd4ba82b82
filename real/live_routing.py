"""What a model's routers say while it runs, in the words that policies read.

A policy asks for what it needs, and only that is worked out: scores are copied to the host, and a later
layer's router judges this layer's input, when somebody asks. Values are rounded and ordered as a recorded
trace holds them, so that a policy decides as it would on that trace.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sim.choices import Choices, Rows, used_keys
from sim.routing import LayerRouting
from sim.types import ConfigError, KeySpace
from traces.record_calls import read_router
from traces.record_hooks import MoeLayer
from traces.schema import GATE_COLUMNS, NO_EXPERT

Order = Callable[[LayerRouting], LayerRouting]


class RouterTaps:
    """Keeps what each router was last asked and said; hooks are on the model until :meth:`remove`.

    Parameters
    ----------
    layers
        The MoE layers, in order.
    """

    def __init__(self, layers: Sequence[MoeLayer]) -> None:
        self._layers = layers
        self._calls: list[tuple[tuple[Any, ...], Mapping[str, Any], Any] | None]
        self._calls = [None] * len(layers)
        self._handles = [
            layer.router.register_forward_hook(partial(self._on_router, slot), with_kwargs=True)
            for slot, layer in enumerate(layers)
        ]

    def _on_router(
        self, slot: int, _router: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any
    ) -> None:
        self._calls[slot] = args, kwargs, output

    def remove(self) -> None:
        """Take the hooks off; harmless twice."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.forget()

    def forget(self) -> None:
        """Let go of the last calls' tensors."""
        self._calls = [None] * len(self._layers)

    def scores(self, slot: int) -> Tensor:
        """Return what a router scored in its last call, [rows, at least num_experts]."""
        _, _, output = self._call(slot)
        return read_router(output, self._layers[slot])[0].detach()

    def judge(self, slot: int, distance: int) -> tuple[Tensor, Tensor]:
        """Return (ids, weights), [rows, k], that a router ``distance`` layers on picks on this input."""
        args, kwargs, _ = self._call(slot)
        here, later = self._layers[slot], self._layers[slot + distance]
        given = _arguments(here, later, args, kwargs)
        with torch.no_grad():
            _, ids, weights = read_router(later.router.forward(**given), later)
        return ids, weights

    def _call(self, slot: int) -> tuple[tuple[Any, ...], Mapping[str, Any], Any]:
        call = self._calls[slot]
        if call is None:
            raise RuntimeError(
                f"{self._layers[slot].path}: its experts were called before its router"
            )
        return call


def _arguments(
    here: MoeLayer, later: MoeLayer, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a later router for this one's input.

    What its own block owns (a correction bias) takes the place of what this block owns.
    """
    names = list(inspect.signature(here.router.forward).parameters)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    owned = {id(own): name for name, own in _tensors(here.block)}
    others = dict(_tensors(later.block))
    asked = inspect.signature(later.router.forward).parameters
    found = {}
    for place, (name, parameter) in enumerate(asked.items()):
        value = given.get(names[0]) if place == 0 else given.get(name)
        own = owned.get(id(value))
        value = value if own is None else others.get(own)
        if value is None and parameter.default is inspect.Parameter.empty and place:
            raise ConfigError(
                f"{later.path}: its router needs {name}, which {here.path} does not know: policies that "
                "look at later gates cannot run with this model"
            )
        if value is not None:
            found[name] = value
    return found


def _tensors(block: nn.Module) -> list[tuple[str, Tensor]]:
    return [*block.named_parameters(), *block.named_buffers()]


class LiveChoices(Choices):
    """What the routers have said of one step's tokens so far; a column is worked out when it is asked for.

    Parameters
    ----------
    shape
        Tokens of the step, MoE layers and top-k; padding does not count among the tokens.
    num_experts
        Experts of a layer.
    rows
        Which rows of the model's tensors the tokens are, int64[num_tokens]; None: all, in order.
    taps
        Where the routers' calls are.
    order
        What puts an event's experts in order; None leaves them.
    """

    __slots__ = ("_arrays", "_done", "_kept", "_layer", "_num_experts", "_shape", "_taps")

    def __init__(
        self,
        shape: tuple[int, int, int],
        num_experts: int,
        rows: Tensor | None,
        taps: RouterTaps,
        order: Order | None = None,
    ) -> None:
        super().__init__(None, slice(None), order)  # type: ignore[arg-type]  # no trace to read
        self._kept = rows
        self._shape = shape
        self._num_experts = num_experts
        self._taps = taps
        self._arrays: dict[
            str, NDArray[Any]
        ] = {}  # behind the columns, which policies cannot change
        self._layer = -1
        self._done: set[str] = set()  # columns that are filled for this layer

    def enter(self, layer: int, ids: NDArray[np.uint16], weights: NDArray[np.float16]) -> None:
        """Learn what a layer's router chose, [num_tokens, top_k] each, the heaviest first."""
        self._layer = layer
        self._done = {"expert_ids", "expert_weights"}
        self._lists.clear()
        for name, part in (("expert_ids", ids), ("expert_weights", weights)):
            self._whole(name, ids.shape[1])[:, layer] = part

    def column(self, name: str) -> NDArray[Any] | None:
        """Return a column as of now, [num_tokens, num_layers, ...]; layers still to come are empty."""
        if name not in self._done:
            if name == "router_logits":
                self._fill_scores()
            elif name in GATE_COLUMNS:
                self._fill_gates(name, GATE_COLUMNS.index(name) + 1)
            elif name not in self._columns:
                return None
            self._done.add(name)
        return self._columns[name]

    def rows(self, name: str, layer: int) -> Rows | None:
        """Return a layer's part of a column as lists, one a token; None if there is none."""
        known = self._lists.get(name)
        if known is not None and (rows := known[layer]) is not None:
            return rows
        whole = self.column(name)
        if whole is None:
            return None
        rows = whole[:, layer].tolist()
        self._lists.setdefault(name, [None] * whole.shape[1])[layer] = rows
        return rows

    def _whole(self, name: str, width: int) -> NDArray[Any]:
        """Return the array behind a column, made when it is first filled."""
        if name not in self._arrays:
            num_tokens, num_layers = self._shape[:2]
            shape = num_tokens, num_layers, width
            if name in ("expert_weights", "router_logits"):
                self._arrays[name] = np.zeros(shape, dtype=np.float16)
            else:
                self._arrays[name] = np.full(shape, NO_EXPERT, dtype=np.uint16)
            shown = self._columns[name] = self._arrays[name].view()
            shown.flags.writeable = False
        return self._arrays[name]

    def _fill_scores(self) -> None:
        scores = self._taps.scores(self._layer).to(torch.float16)
        if self._kept is not None:
            scores = scores.index_select(0, self._kept)
        part = scores.cpu().numpy()[:, : self._num_experts]
        self._whole("router_logits", self._num_experts)[:, self._layer] = part

    def _fill_gates(self, name: str, distance: int) -> None:
        whole = self._whole(name, self._shape[2])
        if self._layer + distance < self._shape[1]:
            ids, weights = self._taps.judge(self._layer, distance)
            whole[:, self._layer] = by_weight(ids, weights, self._kept, self._num_experts)[0]


def by_weight(
    ids: Tensor, weights: Tensor, rows: Tensor | None, num_experts: int
) -> tuple[NDArray[np.uint16], NDArray[np.float16], Tensor | None]:
    """Return (ids, weights, slots) of some rows on the host, slots ordered by falling weight.

    An expert without weights (its id is not below ``num_experts``) becomes NO_EXPERT, last. ``slots`` is
    the order, int64[n, k] on the host, or None where it was so already.
    """
    weights = weights.detach().float()
    if rows is not None:
        ids, weights = ids.index_select(0, rows), weights.index_select(0, rows)
    joined = (
        torch.cat([ids.double(), weights.double()], dim=1).cpu().numpy()
    )  # one copy to the host
    chosen, mass = np.split(joined, 2, axis=1)
    absent = chosen >= num_experts
    rank = np.where(absent, np.inf, -mass)
    slots = None
    if (rank[:, 1:] < rank[:, :-1]).any():
        order = np.argsort(rank, axis=1, kind="stable")
        chosen, mass, absent = (
            np.take_along_axis(part, order, axis=1) for part in (chosen, mass, absent)
        )
        slots = torch.from_numpy(order)
    picked = np.where(absent, NO_EXPERT, chosen).astype(np.uint16)
    return picked, np.where(absent, 0, mass).astype(np.float16), slots


def routing_of(keys: KeySpace, layer: int, choices: LiveChoices) -> LayerRouting:
    """Return the routing of the layer that ``choices`` were last told of."""
    ids = choices.column("expert_ids")
    assert ids is not None
    here = ids[:, layer]
    routing = LayerRouting(layer, *used_keys(keys, layer, here, None), choices)
    return routing if choices.order is None else choices.order(routing)
