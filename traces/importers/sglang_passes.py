"""Forward passes of an SGLang server, as its recorder dumps them, and which ranks' passes are to be kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from traces.trace import TraceError

_Passes = dict[tuple[int, int], "Pass"]
"""The passes of one rank by session and number."""
_SAME_PASSES = 0.5
"""Share of passes with equal ids above which two ranks with other tokens recorded the same rows."""


@dataclass(slots=True, kw_only=True)
class Pass:
    """One forward pass of one rank; ``expert_ids`` are [tokens, layers, slots], -1 where there is none.

    ``session`` counts the server's runs, within which ``number`` rises; ``lengths`` are those of the prompts.
    """

    where: str
    rank: int
    session: int
    number: int
    mode: int
    lengths: list[int] | None
    token_id: NDArray[np.integer]
    position: NDArray[np.integer]
    expert_ids: NDArray[np.integer]

    def without_padding(self) -> Pass:
        """Return the pass without rows of padding: no expert in any layer, and not part of a prompt.

        Raises
        ------
        TraceError
            If no row has an expert: CUDA graphs that were captured without the recorder.
        """
        kept = np.asarray((self.expert_ids >= 0).any(axis=(1, 2)))
        if not kept.any():
            raise TraceError(f"{self.where}: no token has an expert: the pass was not recorded")
        if self.lengths is not None:
            kept[: sum(self.lengths)] = True
        rows = {name: getattr(self, name)[kept] for name in ("token_id", "position", "expert_ids")}
        return self if kept.all() else replace(self, **rows)


def without_replicas(passes: Sequence[Pass], name: str) -> tuple[list[Pass], list[str]]:
    """Drop ranks that processed the same tokens as another, as in tensor parallelism; return notes, too.

    ``name`` is the file that errors speak of.

    Raises
    ------
    TraceError
        If a rank has a pass twice, or recorded the experts of another's tokens.
    """
    by_rank: dict[int, _Passes] = {}
    for step in passes:
        own = by_rank.setdefault(step.rank, {})
        if own.setdefault((step.session, step.number), step) is not step:
            raise TraceError(f"{step.where}: forward pass {step.number} is there twice for a rank")
    kept, notes = list[int](), list[str]()
    for rank in sorted(by_rank):
        twin = next((k for k in kept if _same_tokens(by_rank[k], by_rank[rank])), None)
        if twin is None:
            _refuse_gathered(by_rank, kept, rank, name)
            kept.append(rank)
        elif share := _differing(by_rank[twin], by_rank[rank]):
            notes.append(
                f"warning: ranks {twin} and {rank} ran the same tokens, but {share:.2%} of ids differ"
            )
    if dropped := len(by_rank) - len(kept):
        notes.append(
            f"repaired: {dropped} of {len(by_rank)} ranks ran the same tokens as another; dropped"
        )
    return [step for step in passes if step.rank in kept], notes


def _same_tokens(one: _Passes, other: _Passes) -> bool:
    return one.keys() == other.keys() and all(
        np.array_equal(one[key].token_id, other[key].token_id)
        and np.array_equal(one[key].position, other[key].position)
        for key in one
    )


def _differing(one: _Passes, other: _Passes) -> float:
    """Return the share of cells, (token, layer), whose experts differ between two replicas."""
    wrong = total = 0
    for key, step in one.items():
        left, right = np.sort(step.expert_ids, axis=-1), np.sort(other[key].expert_ids, axis=-1)
        wrong += int((left != right).any(axis=-1).sum())
        total += left.shape[0] * left.shape[1]
    return wrong / total


def _refuse_gathered(by_rank: dict[int, _Passes], kept: list[int], rank: int, name: str) -> None:
    """Refuse a rank that recorded the experts of another's tokens."""
    for other in kept:
        both = by_rank[other].keys() & by_rank[rank].keys()
        pairs = [(by_rank[other][key], by_rank[rank][key]) for key in both]
        unlike = [(a, b) for a, b in pairs if not np.array_equal(a.token_id, b.token_id)]
        same = sum(_begin_alike(a.expert_ids, b.expert_ids) for a, b in unlike)
        if unlike and same > _SAME_PASSES * len(unlike):
            raise TraceError(
                f"{name}: ranks {other} and {rank} ran other tokens, but recorded the same experts: the "
                "recorder saw the tokens of all ranks gathered and kept the first ones, which are right for "
                "rank 0 alone"
            )


def _begin_alike(one: NDArray[np.integer], other: NDArray[np.integer]) -> bool:
    rows = min(len(one), len(other))
    return np.array_equal(one[:rows], other[:rows])
