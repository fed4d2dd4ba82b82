"""Which requests decode together: token repacking across requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from sim.policies.base import BatchFormer, Waiting


class UnionFormer(BatchFormer):
    """Batch the requests whose last tokens used the same experts.

    Greedy: the one that has waited longest runs (or those that are due); then comes, again and again,
    the request whose last token's experts add fewest to the union over all layers, of equals the one
    that has waited longer. A token uses about half of its predecessor's experts again, so that last
    tokens foretell the union without the future.

    A RECONSTRUCTION of what ExpertFlow's token scheduler (arXiv 2410.17954: regroups tokens with like
    routes across batches) and CoServe's arranging by expert (arXiv 2503.02354) have in common; neither
    one's code is public. ExpertFlow groups by predicted routes; here the prediction is the last token.
    A request of which no token is processed adds nothing, as far as is known.
    """

    def choose(
        self, waiting: Sequence[Waiting], size: int, due: Sequence[Waiting] = ()
    ) -> Sequence[int]:
        """Return the longest waiting and those that add fewest experts."""
        first = [one.last_keys for one in due]
        return _fewest_new([one.last_keys for one in waiting], size, first)


class TokenKeys(Protocol):
    """The experts of all tokens of a run's requests."""

    def of_token(self, request_id: int, place: int) -> int:
        """Return the keys of a request's token number ``place``, prompt first; a bit for each."""
        ...


class OracleUnion(BatchFormer):
    """Batch the requests whose next tokens use the same experts: greedy as :class:`UnionFormer`.

    What that rule would reach if its prediction were never wrong; not the least possible union, for it
    is greedy and looks one step ahead.

    Parameters
    ----------
    token_keys
        The future of this very run.
    """

    oracle = True

    def __init__(self, token_keys: TokenKeys) -> None:
        self._of_token: Callable[[int, int], int] = token_keys.of_token
        self._known: dict[
            int, tuple[int, int]
        ] = {}  # request -> token, keys: asked step after step

    def choose(
        self, waiting: Sequence[Waiting], size: int, due: Sequence[Waiting] = ()
    ) -> Sequence[int]:
        """Return the longest waiting and those whose next tokens add fewest experts."""
        told = {one.request_id: self._next(one) for one in (*due, *waiting)}
        self._known = told
        first = [told[one.request_id][1] for one in due]
        return _fewest_new([told[one.request_id][1] for one in waiting], size, first)

    def _next(self, one: Waiting) -> tuple[int, int]:
        found = self._known.get(one.request_id)
        if found is None or found[0] != one.num_tokens:
            found = one.num_tokens, self._of_token(one.request_id, one.num_tokens)
        return found


def _fewest_new(keys: Sequence[int], size: int, first: Sequence[int]) -> list[int]:
    """Return up to ``size`` places of ``keys`` that keep the union with ``first`` small, greedily."""
    union, chosen, left = 0, list[int](), list(range(len(keys)))
    for one in first:
        union |= one
    if not first:
        union, chosen = keys[0], [left.pop(0)]
    while left and len(chosen) < size:
        best = min(left, key=lambda place: (union | keys[place]).bit_count())
        union |= keys[best]
        chosen.append(best)
        left.remove(best)
    return chosen
