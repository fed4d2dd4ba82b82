"""What caches share that change their set at one moment, and keep it until the next."""

from __future__ import annotations

from collections.abc import Sequence

from sim.policies.base import CachePolicy, Evictable
from sim.types import View


class MigratingCache(CachePolicy):
    """Bring in ``_incoming`` at low priority, best first, in the places of ``_outgoing``, worst first.

    A subclass decides when to set both lists; this keeps them up to date while the loads arrive.
    ``_slots`` is how many experts surely fit, ``_members`` those that are in.
    """

    def __init__(self) -> None:
        self._members: set[int] = set()
        self._incoming: list[int] = []
        self._outgoing: list[int] = []
        self._slots = 0

    def start(self, keys: Sequence[int], num_slots: int, view: View) -> None:
        """Learn how many experts fit."""
        self._slots = num_slots

    def on_resize(self, num_slots: int, view: View) -> None:
        """Learn how many experts fit now."""
        self._slots = num_slots

    def wants(self, view: View) -> Sequence[int]:
        """Return what is to come in and has not come yet."""
        return self._incoming

    def stale(self, queued: Sequence[int], view: View) -> Sequence[int]:
        """Return queued newcomers that a later decision has given up again."""
        return [key for key in queued if key in self._outgoing]

    def choose_victim(self, evictable: Evictable, view: View) -> int | None:
        """Return the worst resident that is to go; None if none is free."""
        return next(filter(evictable, self._outgoing), None)

    def on_insert(self, key: int, view: View) -> None:
        """Join the members."""
        self._members.add(key)
        if key in self._incoming:
            self._incoming.remove(key)

    def on_evict(self, key: int) -> None:
        """Leave the members."""
        self._members.discard(key)
        if key in self._outgoing:
            self._outgoing.remove(key)
