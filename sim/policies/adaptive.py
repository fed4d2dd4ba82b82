"""Caches of several queues that sort the lasting from the passing: SLRU, ARC, S3-FIFO.

All are event-atomic here: an event's hits are noted first, then room is made for its misses one by one
among experts the event does not use. So where an algorithm looks at the one missed item (ARC), it
looks at all misses of the event.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from sim.policies.base import CachePolicy, Evictable
from sim.types import LayerRouting, View

Queue = OrderedDict[int, None]


def _first(evictable: Evictable, *queues: Queue) -> int | None:
    """Return the oldest evictable key of the first queue that has one."""
    for queue in queues:
        for key in queue:
            if evictable(key):
                return key
    return None


class SLRU(CachePolicy):
    """Two LRU segments: what is hit on probation becomes protected; victims come from probation first.

    The segments are those of tinyserve; that only a second miss admits is the rule asked for in
    llama.cpp 20757. How long a first miss is remembered is not said there: as many of the pool's last
    ones as ``memory`` times its slots. While there is room, the first miss admits. Both RECONSTRUCTION.

    Parameters
    ----------
    protected
        Share of the slots that are protected, in (0, 1); 0.8 in tinyserve.
    second_miss
        Whether a miss is bypassed unless the expert was missed before.
    memory
        First misses remembered, as a multiple of the slots, > 0.
    """

    def __init__(
        self, protected: float = 0.8, second_miss: bool = True, memory: float = 1.0
    ) -> None:
        if not 0.0 < protected < 1.0:
            raise ValueError(f"protected = {protected}: must be in (0, 1)")
        if not memory > 0.0:
            raise ValueError(f"memory = {memory}: must be > 0")
        self.protected = protected
        self.second_miss = second_miss
        self.memory = memory
        self._probation: Queue = OrderedDict()
        self._protected: Queue = OrderedDict()
        self._missed: Queue = OrderedDict()
        self._slots = 0

    def start(self, keys: Sequence[int], num_slots: int, view: View) -> None:
        """Learn the sizes of the segments."""
        self.on_resize(num_slots, view)

    def on_resize(self, num_slots: int, view: View) -> None:
        """Learn the sizes of the segments; what no longer fits among the protected is demoted."""
        self._slots = num_slots
        self._most_protected = max(1, int(num_slots * self.protected))
        self._most_missed = max(1, int(num_slots * self.memory))
        self._demote()

    def admits(self, key: int, view: View) -> bool:
        """Admit into free room, and what was missed before."""
        if not self.second_miss or key in self._missed:
            return True
        if len(self._probation) + len(self._protected) < self._slots:
            return True
        self._missed[key] = None
        if len(self._missed) > self._most_missed:
            self._missed.popitem(last=False)
        return False

    def choose_victim(self, evictable: Evictable, view: View) -> int | None:
        """Return the least recently used on probation, else of the protected."""
        return _first(evictable, self._probation, self._protected)

    def on_hit(self, keys: Sequence[int], view: View) -> None:
        """Protect what is hit."""
        probation, protected = self._probation, self._protected
        for key in keys:
            if key in protected:
                protected.move_to_end(key)
            else:
                del probation[key]
                protected[key] = None
        self._demote()

    def on_insert(self, key: int, view: View) -> None:
        """Enter on probation."""
        self._probation[key] = None
        self._missed.pop(key, None)

    def on_evict(self, key: int) -> None:
        """Leave the segment it is in."""
        (self._protected if key in self._protected else self._probation).pop(key)

    def _demote(self) -> None:
        """Put the oldest of the protected back on probation, at its young end."""
        while len(self._protected) > self._most_protected:
            key, _ = self._protected.popitem(last=False)
            self._probation[key] = None


class ARC(CachePolicy):
    """Adaptive replacement (Megiddo and Modha 2003): balance what was used once against the rest.

    Residents used once are in ``once`` (T1), those used again in ``again`` (T2), both by last use. Each
    has a ghost list of what it dropped (B1, B2). ``target`` is how many should be in ``once``: a miss
    on its ghosts raises it by max(1, |B2| / |B1|), a miss on the other's lowers it by
    max(1, |B1| / |B2|). The victim is the oldest of ``once`` if that exceeds its target (or meets it
    while the event misses a ghost of ``again``), else of ``again``. Event by event: all ghosts that an
    event misses move the target before room is made.
    """

    def __init__(self) -> None:
        self._once: Queue = OrderedDict()
        self._again: Queue = OrderedDict()
        self._once_ghosts: Queue = OrderedDict()
        self._again_ghosts: Queue = OrderedDict()
        self._target = 0.0
        self._slots = 0
        self._yields = False

    def start(self, keys: Sequence[int], num_slots: int, view: View) -> None:
        """Learn how many experts fit."""
        self._slots = num_slots

    def on_resize(self, num_slots: int, view: View) -> None:
        """Learn how many experts fit now."""
        self._slots = num_slots
        self._target = min(self._target, float(num_slots))
        self._trim()

    def observe(self, routing: LayerRouting, view: View) -> None:
        """Move the target by the ghosts that the event misses."""
        once, again = self._once_ghosts, self._again_ghosts
        self._yields = False
        if not once and not again:
            return
        for key in routing.experts:
            if key in once:
                grown = self._target + max(1.0, len(again) / len(once))
                self._target = min(float(self._slots), grown)
            elif key in again:
                self._target = max(0.0, self._target - max(1.0, len(once) / len(again)))
                self._yields = True

    def choose_victim(self, evictable: Evictable, view: View) -> int | None:
        """Return the oldest of the list that is to shrink, else of the other."""
        excess = len(self._once) - self._target
        if self._once and (excess > 0.0 or (excess == 0.0 and self._yields)):
            return _first(evictable, self._once, self._again)
        return _first(evictable, self._again, self._once)

    def on_hit(self, keys: Sequence[int], view: View) -> None:
        """Move what is used again to the young end of its list."""
        once, again = self._once, self._again
        for key in keys:
            if key in again:
                again.move_to_end(key)
            else:
                del once[key]
                again[key] = None

    def on_insert(self, key: int, view: View) -> None:
        """Enter as used once, or as used again if it is a ghost."""
        if key in self._once_ghosts:
            del self._once_ghosts[key]
            self._again[key] = None
        elif key in self._again_ghosts:
            del self._again_ghosts[key]
            self._again[key] = None
        else:
            self._once[key] = None
            self._trim()

    def on_evict(self, key: int) -> None:
        """Become a ghost of the list it leaves."""
        if key in self._once:
            del self._once[key]
            self._once_ghosts[key] = None
        else:
            del self._again[key]
            self._again_ghosts[key] = None

    def _trim(self) -> None:
        """Forget the oldest ghosts: T1 + B1 hold at most as many as fit, all four lists twice that."""
        once, again = self._once_ghosts, self._again_ghosts
        while once and len(self._once) + len(once) > self._slots:
            once.popitem(last=False)
        spare = 2 * self._slots - len(self._once) - len(self._again) - len(once)
        while again and len(again) > spare:
            again.popitem(last=False)


class S3FIFO(CachePolicy):
    """Three FIFO queues (Yang et al., SOSP 2023): a small one sifts, the main one keeps, ghosts remember.

    A newcomer enters ``small``, or ``main`` if it is a ghost. Uses are counted up to 3. The victim is
    the oldest of ``small`` once that has its share of slots, unless it was used more than once, which
    moves it to ``main``; else the oldest of ``main``, which goes round again, one use fewer, while it
    has uses. What ``small`` drops becomes a ghost.

    Parameters
    ----------
    small
        Share of the slots, in (0, 1), from which ``small`` is asked for the victim; 0.1 in the paper.
    """

    _MOST_USES = 3

    def __init__(self, small: float = 0.1) -> None:
        if not 0.0 < small < 1.0:
            raise ValueError(f"small = {small}: must be in (0, 1)")
        self.small = small
        self._small: Queue = OrderedDict()
        self._main: Queue = OrderedDict()
        self._ghosts: Queue = OrderedDict()
        self._uses: dict[int, int] = {}
        self._small_slots = self._most_ghosts = 1

    def start(self, keys: Sequence[int], num_slots: int, view: View) -> None:
        """Learn the sizes of the queues."""
        self.on_resize(num_slots, view)

    def on_resize(self, num_slots: int, view: View) -> None:
        """Learn the sizes of the queues; there may be as many ghosts as ``main`` has slots."""
        self._small_slots = max(1, int(num_slots * self.small))
        self._most_ghosts = max(1, num_slots - self._small_slots)
        self._trim()

    def choose_victim(self, evictable: Evictable, view: View) -> int | None:
        """Return the victim; may move others to where they belong."""
        small, uses = self._small, self._uses
        while len(small) >= self._small_slots:
            key = _first(evictable, small)
            if key is None or uses[key] <= 1:
                break
            del small[key]
            self._main[key] = None
        else:
            key = None
        if key is None:
            key = self._oldest_of_main(evictable)
        return _first(evictable, small) if key is None else key

    def on_hit(self, keys: Sequence[int], view: View) -> None:
        """Count the uses; nothing moves."""
        uses, most = self._uses, self._MOST_USES
        for key in keys:
            if uses[key] < most:
                uses[key] += 1

    def on_insert(self, key: int, view: View) -> None:
        """Enter the small queue, or the main one if it is a ghost, with no uses."""
        self._uses[key] = 0
        if key in self._ghosts:
            del self._ghosts[key]
            self._main[key] = None
        else:
            self._small[key] = None

    def on_evict(self, key: int) -> None:
        """Leave the queue; a ghost remains of what was in the small one."""
        del self._uses[key]
        if key in self._main:
            del self._main[key]
            return
        del self._small[key]
        self._ghosts[key] = None
        self._trim()

    def _oldest_of_main(self, evictable: Evictable) -> int | None:
        """Return the first evictable key of ``main`` without uses; others go round, one use fewer."""
        main, uses = self._main, self._uses
        while (key := _first(evictable, main)) is not None and uses[key]:
            uses[key] -= 1
            main.move_to_end(key)
        return key

    def _trim(self) -> None:
        while len(self._ghosts) > self._most_ghosts:
            self._ghosts.popitem(last=False)
