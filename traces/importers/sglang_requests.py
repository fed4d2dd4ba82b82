"""Rebuilds requests from the forward passes of an SGLang server, which do not name them.

A token continues the request whose next position is its own. Prompts arrive in EXTEND passes, cut by
``extend_seq_lens``; one that begins at a position > 0 goes on with the last prompt of the pass before if it
fits (a prompt in chunks), else its first tokens came out of the prefix cache. Each running request has one
row in a DECODE pass, in an order that stays: requests leave, new ones come at the end. A MIXED pass is
prompts, then one row of each running request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from traces.importers.routed import Routed
from traces.importers.sglang_passes import Pass, without_replicas
from traces.trace import TraceError

_EXTEND, _DECODE, _MIXED = 1, 2, 3
_MODES = {_EXTEND: "EXTEND", _DECODE: "DECODE", _MIXED: "MIXED"}


@dataclass(slots=True, eq=False)
class _Request:
    """A request that is being rebuilt."""

    number: int
    first_position: int
    next_position: int
    num_prompt: int = 0
    is_decoding: bool = False

    def awaits(self, position: int) -> bool:
        """Tell whether its prompt may go on at this position."""
        return not self.is_decoding and self.next_position == position

    def take(self, tokens: int, *, prompt: bool) -> None:
        """Add tokens, of the prompt or decoded."""
        self.next_position += tokens
        self.num_prompt += tokens if prompt else 0
        self.is_decoding |= not prompt


@dataclass(slots=True)
class _Rank:
    """The requests of one rank in one run of the server, pass after pass."""

    made: list[_Request]  # of all ranks
    active: list[_Request] = field(default_factory=list)  # in the order of their rows
    partial: _Request | None = None  # the last prompt, which may go on
    ambiguous: int = 0
    begun_before: int = 0
    cached: int = 0

    def add(self, step: Pass) -> NDArray[np.intp]:
        """Return the number of the request of each row."""
        if step.mode == _DECODE:
            lengths, prompts = [1] * len(step.position), 0
        else:
            lengths = _lengths(step)
            prompts = len(lengths)
        firsts = step.position[np.cumsum([0, *lengths[:-1]])].tolist()
        if step.mode == _MIXED:
            prompts -= self._running(firsts, lengths)
        begun = [
            self._prompt(first, length, is_first=place == 0)
            for place, (first, length) in enumerate(zip(firsts, lengths, strict=True))
            if place < prompts
        ]
        going = self._decode(firsts[prompts:])
        if step.mode != _EXTEND:  # those without a row have ended, or their prompt is not whole
            held = [r for r in self.active if r is self.partial and not r.is_decoding]
            self.active = [*begun, *going, *(r for r in held if r not in begun)]
        return np.repeat(np.array([r.number for r in (*begun, *going)], dtype=np.intp), lengths)

    def _new(self, position: int) -> _Request:
        request = _Request(len(self.made), position, position)
        self.made.append(request)
        self.active.append(request)
        return request

    def _prompt(self, position: int, length: int, *, is_first: bool) -> _Request:
        """Return the request that ``length`` prompt tokens from ``position`` on belong to."""
        held = self.partial
        if position and is_first and held is not None and held.awaits(position):
            request = held
        else:
            request = self._new(position)
            self.cached += position > 0
        request.take(length, prompt=True)
        self.partial = request
        return request

    def _decode(self, positions: list[int]) -> list[_Request]:
        """Return the running request of each row."""
        found = self._in_order(positions)
        if found is None:
            found = self._in_any_order(positions)
        self.ambiguous += self._ties(found)
        for request in found:
            request.take(1, prompt=False)
        return found

    def _in_order(self, positions: list[int]) -> list[_Request] | None:
        """Return the first running requests that have these next positions one after another, if any."""
        found, at = [], 0
        for position in positions:
            while at < len(self.active) and self.active[at].next_position != position:
                at += 1
            if at == len(self.active):
                return None
            found.append(self.active[at])
            at += 1
        return found

    def _in_any_order(self, positions: list[int]) -> list[_Request]:
        """Return running requests of these next positions; others began before the recording."""
        waiting: dict[int, list[_Request]] = {}
        for request in self.active:
            waiting.setdefault(request.next_position, []).append(request)
        found = []
        for position in positions:
            if own := waiting.get(position):
                found.append(own.pop(0))
            else:
                self.begun_before += 1
                found.append(self._new(position))
        return found

    def _ties(self, found: list[_Request]) -> int:
        """Return how many of the rows might as well be those of a request that has ended."""
        chosen = {request.number for request in found}
        ended = {r.next_position for r in self.active if r.number not in chosen}
        return sum(request.next_position in ended for request in found)

    def _running(self, firsts: list[int], lengths: list[int]) -> int:
        """Return how many rows at the end of a mixed pass, which begins with a prompt, are decoded."""
        tail = len(lengths)
        while tail > 1 and lengths[tail - 1] == 1 and firsts[tail - 1] > 0:
            tail -= 1
        while tail < len(firsts) and self._in_order(firsts[tail:]) is None:
            tail += 1
        return len(firsts) - tail


def _lengths(step: Pass) -> list[int]:
    """Return the lengths of the prompts of a pass, each of which has positions that rise by one."""
    position = step.position
    breaks = np.flatnonzero(np.diff(position) != 1) + 1
    if step.lengths is None:
        return np.diff([0, *breaks, len(position)]).tolist()
    lengths = [length for length in step.lengths if length]
    if min(step.lengths, default=0) < 0 or sum(lengths) != len(position):
        rule = f"must sum to its {len(position)} tokens"
        raise TraceError(f"{step.where}: extend_seq_lens are {step.lengths}: {rule}")
    stray = np.setdiff1d(breaks, np.cumsum(lengths))
    if len(stray):
        row = int(stray[0])
        raise TraceError(
            f"{step.where}: token {row} has position {position[row]} after {position[row - 1]}: the "
            "positions of a prompt must rise by one"
        )
    return lengths


def requests_of(passes: Sequence[Pass], name: str) -> tuple[list[Routed], list[str]]:
    """Return the requests of all ranks, and notes; ``name`` is the file that errors speak of.

    Raises
    ------
    TraceError
        For passes of speculative decoding, and ranks that recorded each other's tokens.
    """
    for step in passes:
        if step.mode not in _MODES:
            known = ", ".join(f"{number} {mode}" for number, mode in _MODES.items())
            raise TraceError(
                f"{step.where}: forward_mode is {step.mode}: must be one of {known}; drafts of speculative "
                "decoding have no request to belong to: record without"
            )
    padded = sum(len(step.position) for step in passes)
    passes = [step.without_padding() for step in passes]
    padded -= sum(len(step.position) for step in passes)
    passes, notes = without_replicas(passes, name)
    made: list[_Request] = []
    ranks: dict[tuple[int, int], _Rank] = {}
    numbers = [
        ranks.setdefault((step.session, step.rank), _Rank(made)).add(step) for step in passes
    ]
    return _routed(passes, numbers, made), [*notes, *_told(list(ranks.values()), padded)]


def _told(ranks: list[_Rank], padded: int) -> list[str]:
    """Say what rebuilding the requests had to suppose."""
    notes = []
    if padded:
        notes.append(f"repaired: {padded} rows of padding were dropped")
    if cached := sum(rank.cached for rank in ranks):
        notes.append(
            f"{cached} prompts begin after a cached prefix: it was not computed, so it has no rows"
        )
    if before := sum(rank.begun_before for rank in ranks):
        notes.append(
            f"warning: {before} requests began before the recording: they have no prompt rows"
        )
    if ties := sum(rank.ambiguous for rank in ranks):
        notes.append(
            f"warning: {ties} rows were linked by order alone: a request of the same length had just ended"
        )
    return notes


def _routed(
    passes: Sequence[Pass], numbers: Sequence[NDArray[np.intp]], made: list[_Request]
) -> list[Routed]:
    """Return each request with its rows in the order of the passes; steps count the passes of all ranks."""
    order = sorted({(step.session, step.number) for step in passes})
    place = {key: at for at, key in enumerate(order)}
    request = np.concatenate(numbers)
    rows = np.argsort(request, kind="stable")
    cuts = np.cumsum(np.bincount(request, minlength=len(made)))[:-1]
    ids = np.concatenate([step.expert_ids for step in passes])[rows]
    token = np.concatenate([step.token_id for step in passes])[rows]
    steps = np.repeat(
        [place[step.session, step.number] for step in passes],
        [len(step.position) for step in passes],
    )[rows]
    parts = zip(
        made, np.split(ids, cuts), np.split(token, cuts), np.split(steps, cuts), strict=True
    )
    return [
        Routed(
            f"request {one.number} (from position {one.first_position})",
            own_ids,
            one.num_prompt,
            token_id=own_token,
            step=own_steps,
            first_position=one.first_position,
        )
        for one, own_ids, own_token, own_steps in parts
    ]
