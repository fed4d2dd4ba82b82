"""The (token, expert) pairs of one layer, in the order in which the experts' rows lie.

Knows nothing of weights of the router or of how pairs are summed; :mod:`real.tokens` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from real.experts import ExpertWeights
    from real.kernels import Kernels

Groups = Sequence[NDArray[np.intp]]
"""Micro-batches: a partition of the tokens."""
NOTHING = -1
"""In the place of a key: a slot that is dropped."""


class OneToken:
    """The pairs of a single token: nothing is sorted, gathered or scattered.

    Parameters
    ----------
    hidden
        The layer's input, [1, hidden_size].
    chosen
        Keys by slot, NOTHING for none.
    by_key
        Results lie by ascending key; else by slot.
    """

    __slots__ = ("_columns", "_hidden", "_made", "num_pairs", "top_k")

    def __init__(self, hidden: Tensor, chosen: list[int], by_key: bool) -> None:
        self._hidden = hidden
        self.top_k = len(chosen)
        self._columns = [(key, slot) for slot, key in enumerate(chosen) if key != NOTHING]
        if by_key:
            self._columns.sort()
        self._made: dict[int, Tensor] = {}
        self.num_pairs = dict.fromkeys([key for key, _ in self._columns], 1)

    def run(self, kernels: Kernels, key: int, weights: ExpertWeights) -> None:
        """Compute one expert."""
        self._made[key] = kernels.expert(weights, self._hidden)

    def run_many(
        self, kernels: Kernels, ranked: Sequence[tuple[int, int]], stacked: ExpertWeights
    ) -> None:
        """Compute several experts, given as (slot in ``stacked``, key), ascending."""
        rows = self._hidden.expand(len(ranked), -1).contiguous()
        made = kernels.experts(stacked, [slot for slot, _ in ranked], rows, [1] * len(ranked))
        for (_, key), row in zip(ranked, made.split(1), strict=True):
            self._made[key] = row

    def rows(self, key: int) -> list[Tensor]:
        """Return an expert's rows by micro-batch."""
        return [self._hidden]

    def put(self, key: int, results: Sequence[Tensor]) -> None:
        """Take what was made of :meth:`rows`."""
        self._made[key] = results[0]

    def made(self) -> Tensor:
        """Return all results, [1, columns, hidden_size]."""
        return torch.cat([self._made[key] for key, _ in self._columns]).unsqueeze(0)

    def in_columns(self, weights: Tensor) -> Tensor:
        """Return weights by slot, [1, top_k], in the order of the columns of :meth:`made`."""
        slots = [slot for _, slot in self._columns]
        return weights if slots == list(range(self.top_k)) else weights[:, slots]


class Segment(NamedTuple):
    """Where the pairs of one expert in one micro-batch lie among all pairs in order."""

    group: int
    begin: int
    end: int


class ManyTokens:
    """The pairs of several tokens, ordered by micro-batch, expert, slot and token.

    An expert's rows lie as in the models' eager code, so that its matrix products are the same ones.

    Parameters
    ----------
    hidden
        The layer's input, [num_tokens, hidden_size].
    chosen
        Keys by token and slot, NOTHING for none, int64[num_tokens, top_k].
    groups
        Micro-batches; None is one.
    by_key
        A token's results lie by ascending key; else by slot.
    """

    def __init__(
        self, hidden: Tensor, chosen: NDArray[np.int64], groups: Groups | None, by_key: bool
    ) -> None:
        self._hidden = hidden
        self._shape = chosen.shape
        self.top_k = chosen.shape[1]
        self._slot_of_column = np.argsort(chosen, axis=1, kind="stable") if by_key else None
        self._again = _repeats(chosen)
        self.segments: dict[int, list[Segment]] = {}
        order = self._sort(chosen, groups)
        slots, tokens = np.divmod(order, len(chosen))
        self._lay_out(tokens, self._places(tokens, slots))
        self.num_pairs = {
            key: sum(part.end - part.begin for part in parts)
            for key, parts in self.segments.items()
        }

    def _sort(self, chosen: NDArray[np.int64], groups: Groups | None) -> NDArray[np.intp]:
        """Fill ``segments``; return the pairs in order, as indices slot * num_tokens + token."""
        keys = chosen.T.ravel()
        pairs = np.flatnonzero(keys != NOTHING)
        if self._again is not None:
            tokens, slots, _ = self._again
            pairs = np.setdiff1d(pairs, slots * len(chosen) + tokens)
        keys = keys[pairs]
        group_of = np.zeros(len(chosen), dtype=np.int64)
        for index, group in enumerate(groups or ()):
            group_of[group] = index
        of_pair = group_of[pairs % len(chosen)]
        order = np.lexsort((keys, of_pair))
        keys, of_pair = keys[order], of_pair[order]
        cuts = np.flatnonzero(np.diff(keys) | np.diff(of_pair)) + 1
        ends = [*cuts.tolist(), len(keys)] if len(keys) else []
        begin = 0
        for end in ends:
            segment = Segment(int(of_pair[begin]), begin, end)
            self.segments.setdefault(int(keys[begin]), []).append(segment)
            begin = end
        return pairs[order]

    def _places(self, tokens: NDArray[np.intp], slots: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return where pairs lie in a table [num_tokens * top_k] of results."""
        columns = slots
        if self._slot_of_column is not None:
            columns = np.argsort(self._slot_of_column, axis=1)[tokens, slots]
        return tokens * self._shape[1] + columns

    def _on_device(self, *indices: NDArray[np.intp]) -> list[Tensor]:
        """Return index arrays as tensors on the device, moved there together."""
        whole = torch.from_numpy(np.concatenate(indices)).to(self._hidden.device, non_blocking=True)
        return list(whole.split([len(part) for part in indices]))

    def in_columns(self, weights: Tensor) -> Tensor:
        """Return weights by slot, [num_tokens, top_k], in the order of the columns of :meth:`made`."""
        if self._slot_of_column is None:
            return weights
        return weights.gather(
            1, torch.from_numpy(self._slot_of_column).to(weights.device, non_blocking=True)
        )

    # -- compute -----------------------------------------------------------------------------------

    def run(self, kernels: Kernels, key: int, weights: ExpertWeights) -> None:
        """Compute one expert, micro-batch by micro-batch."""
        for part in self.segments[key]:
            self._write(part, kernels.expert(weights, self._read(part)))

    def run_many(
        self, kernels: Kernels, ranked: Sequence[tuple[int, int]], stacked: ExpertWeights
    ) -> None:
        """Compute several experts, given as (slot in ``stacked``, key), ascending."""
        by_group: dict[int, list[tuple[int, Segment]]] = {}
        for slot, key in ranked:
            for part in self.segments[key]:
                by_group.setdefault(part.group, []).append((slot, part))
        for _, works in sorted(by_group.items()):
            slots, parts = [slot for slot, _ in works], [part for _, part in works]
            counts = [part.end - part.begin for part in parts]
            made = kernels.experts(stacked, slots, self._read_all(parts), counts)
            self._write_all(parts, made)

    def rows(self, key: int) -> list[Tensor]:
        """Return an expert's rows by micro-batch."""
        return [self._read(part) for part in self.segments[key]]

    def put(self, key: int, results: Sequence[Tensor]) -> None:
        """Take what was made of :meth:`rows`."""
        for part, made in zip(self.segments[key], results, strict=True):
            self._write(part, made)

    # -- where rows come from and go to ------------------------------------------------------------

    def _lay_out(self, tokens: NDArray[np.intp], places: NDArray[np.intp]) -> None:
        raise NotImplementedError

    def _read(self, part: Segment) -> Tensor:
        raise NotImplementedError

    def _write(self, part: Segment, made: Tensor) -> None:
        raise NotImplementedError

    def _read_all(self, parts: Sequence[Segment]) -> Tensor:
        raise NotImplementedError

    def _write_all(self, parts: Sequence[Segment], made: Tensor) -> None:
        raise NotImplementedError

    def made(self) -> Tensor:
        """Return all results, [num_tokens, top_k, hidden_size]; a dropped slot's are zero."""
        raise NotImplementedError


class Packed(ManyTokens):
    """Tokens are laid out pair by pair once, and back once: an expert's rows are a slice."""

    def _lay_out(self, tokens: NDArray[np.intp], places: NDArray[np.intp]) -> None:
        num_pairs = len(tokens)
        # Where each column's result lies; dropped slots share a row of zeros behind all pairs.
        sources = np.full(self._shape[0] * self._shape[1], num_pairs)
        sources[places] = np.arange(num_pairs)
        if self._again is not None:
            again, slots, firsts = self._again
            sources[self._places(again, slots)] = sources[self._places(again, firsts)]
        index, self._sources = self._on_device(tokens, sources)
        self._rows = self._hidden.index_select(0, index)
        self._made = self._hidden.new_empty(num_pairs + 1, self._hidden.shape[1])
        self._made[num_pairs] = 0

    def _read(self, part: Segment) -> Tensor:
        return self._rows[part.begin : part.end]

    def _write(self, part: Segment, made: Tensor) -> None:
        self._made[part.begin : part.end] = made

    def _read_all(self, parts: Sequence[Segment]) -> Tensor:
        return torch.cat([self._read(part) for part in parts])

    def _write_all(self, parts: Sequence[Segment], made: Tensor) -> None:
        results = made.split([part.end - part.begin for part in parts])
        for part, result in zip(parts, results, strict=True):
            self._write(part, result)

    def made(self) -> Tensor:
        """Return all results, [num_tokens, top_k, hidden_size]; a dropped slot's are zero."""
        return self._made.index_select(0, self._sources).view(*self._shape, -1)


class Scattered(ManyTokens):
    """Every expert gathers its rows and scatters its results."""

    def _lay_out(self, tokens: NDArray[np.intp], places: NDArray[np.intp]) -> None:
        self._index, self._place = self._on_device(tokens, places)
        num_places = self._shape[0] * self._shape[1]
        allocate = self._hidden.new_empty if len(tokens) == num_places else self._hidden.new_zeros
        self._made = allocate(num_places, self._hidden.shape[1])

    def _read(self, part: Segment) -> Tensor:
        return self._hidden.index_select(0, self._index[part.begin : part.end])

    def _write(self, part: Segment, made: Tensor) -> None:
        self._made.index_copy_(0, self._place[part.begin : part.end], made)

    def _read_all(self, parts: Sequence[Segment]) -> Tensor:
        index = torch.cat([self._index[part.begin : part.end] for part in parts])
        return self._hidden.index_select(0, index)

    def _write_all(self, parts: Sequence[Segment], made: Tensor) -> None:
        place = torch.cat([self._place[part.begin : part.end] for part in parts])
        self._made.index_copy_(0, place, made)

    def made(self) -> Tensor:
        """Return all results, [num_tokens, top_k, hidden_size]; a dropped slot's are zero."""
        if self._again is not None:
            tokens, slots, firsts = self._again
            places = self._places(tokens, slots), self._places(tokens, firsts)
            target, source = self._on_device(*places)
            self._made[target] = self._made[source]
        return self._made.view(*self._shape, -1)


def _repeats(
    chosen: NDArray[np.int64],
) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]] | None:
    """Return tokens, slots and first slots where a token has an expert a second time; None if none has."""
    ranked = np.sort(chosen, axis=1)
    if not ((ranked[:, 1:] == ranked[:, :-1]) & (ranked[:, 1:] != NOTHING)).any():
        return None
    is_same = chosen[:, :, None] == chosen[:, None, :]
    firsts = is_same.argmax(axis=2)  # the first slot with the same key
    tokens, slots = np.nonzero((firsts < np.arange(chosen.shape[1])) & (chosen != NOTHING))
    return tokens, slots, firsts[tokens, slots]
