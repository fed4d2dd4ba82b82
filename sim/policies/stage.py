"""Caches that change only where a reasoning stage ends.

The rules of SAEM (arXiv 2608.21614) are public in outline only: at a boundary the finished stage's
activation counts choose, layer by layer, the new resident set; experts migrate only then; the first
set comes from offline calibration. What is added here to make that a program (the moving average,
hysteresis, the budget of a boundary) is a RECONSTRUCTION and is a parameter. What ends a stage is the
``stages`` role's matter: see sim/policies/detectors.py and drift.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from sim.policies.base import Evictable
from sim.policies.classic import by_key, rank
from sim.policies.migration import MigratingCache
from sim.types import LayerRouting, View


class StageCache(MigratingCache):
    """Hold the experts of the finished stage; move experts only at a stage boundary.

    Inside a stage nothing enters the cache. At a boundary an expert's score becomes its count in the
    finished stage plus ``memory`` times its old score; the best-scored experts that are absent replace
    the worst-scored residents, pair by pair, while the newcomer's score exceeds ``hysteresis`` times
    the resident's. The replacements load at low priority.

    Parameters
    ----------
    popularity
        Uses of each expert in a calibration trace, float[num_layers, num_experts]; the first set.
    memory
        Weight of the past in the score, in [0, 1); RECONSTRUCTION.
    hysteresis
        Factor >= 1 by which a newcomer must beat a resident; 1.05 is the swap rule of DAOP's code.
    migrate_bytes
        What one boundary may bring in, all pools together; each has a share by its number of experts.
        Newcomers come best first until the next would exceed it. None: no bound. RECONSTRUCTION.
    """

    def __init__(
        self,
        popularity: NDArray[np.floating],
        memory: float = 0.5,
        hysteresis: float = 1.05,
        migrate_bytes: int | None = None,
    ) -> None:
        if not 0.0 <= memory < 1.0:
            raise ValueError(f"memory = {memory}: must be in [0, 1)")
        if not hysteresis >= 1.0:
            raise ValueError(f"hysteresis = {hysteresis}: must be >= 1")
        if migrate_bytes is not None and not _is_size(migrate_bytes):
            raise ValueError(
                f"migrate_bytes = {migrate_bytes}: must be a whole number of bytes >= 0, or null"
            )
        super().__init__()
        self.memory = memory
        self.hysteresis = hysteresis
        self.migrate_bytes = migrate_bytes
        self._popularity = by_key(popularity)
        self._count: dict[int, int] = {}  # uses in the stage under way
        self._score: dict[int, float] = {}
        self._pool: frozenset[int] = frozenset()
        self._keys: Sequence[int] = ()
        self._stage = 0

    def start(self, keys: Sequence[int], num_slots: int, view: View) -> None:
        """Learn the pool; scores start at zero, so that the first finished stage decides alone."""
        super().start(keys, num_slots, view)
        self._keys, self._pool = keys, frozenset(keys)
        self._stage = view.stage

    def preload(self, view: View) -> Sequence[int]:
        """Return the pool's keys by popularity in the calibration trace."""
        return rank(self._keys, self._popularity)

    def observe(self, routing: LayerRouting, view: View) -> None:
        """Close the stage at a boundary, then count the event's uses."""
        if view.stage != self._stage:
            self._stage = view.stage
            self.close_stage(view)
        count = self._count
        for key, tokens in zip(routing.experts, routing.token_counts, strict=True):
            count[key] = count.get(key, 0) + tokens

    def close_stage(self, view: View) -> None:
        """Score the experts by the finished stage and plan the migration."""
        self._remember()
        self.migrate(self._score, view)

    def migrate(self, score: Mapping[int, float], view: View) -> None:
        """Pair the best-scored newcomers with the residents they replace, as far as bytes go."""
        members, pool = self._members, self._pool  # a layer may be spread over several pools
        worst = sorted(members, key=lambda key: (score.get(key, 0.0), -key))
        absent = [key for key in score if key in pool and key not in members and score[key] > 0.0]
        absent.sort(key=lambda key: (-score[key], key))
        free = max(0, self._slots - len(members))
        incoming, outgoing = absent[:free], []
        for newcomer, resident in zip(absent[free:], worst, strict=False):
            if score[newcomer] <= self.hysteresis * score.get(resident, 0.0):
                break
            incoming.append(newcomer)
            outgoing.append(resident)
        allowed = self._num_allowed(incoming, view)
        self._incoming = incoming[:allowed]
        self._outgoing = outgoing[: max(0, allowed - free)]

    def admits(self, key: int, view: View) -> bool:
        """Refuse misses: experts migrate only at boundaries."""
        return False

    def give_up(self, evictable: Evictable, view: View) -> int | None:
        """Return the worst-scored member; before the first boundary, the least popular."""
        score, popularity = self._score, self._popularity
        return min(
            filter(evictable, self._members),
            key=lambda key: (score.get(key, 0.0), popularity[key], -key),
            default=None,
        )

    def _remember(self) -> None:
        """Add the finished stage's counts to the scores, which fade; a new stage begins."""
        faded = {key: self.memory * old for key, old in self._score.items()} if self.memory else {}
        for key, uses in self._count.items():
            faded[key] = uses + faded.get(key, 0.0)
        self._score, self._count = faded, {}

    def _num_allowed(self, incoming: Sequence[int], view: View) -> int:
        """Return how many of the newcomers the bytes of a boundary allow."""
        if self.migrate_bytes is None:
            return len(incoming)
        left = self.migrate_bytes * len(self._keys) // len(view.keys)
        for place, key in enumerate(incoming):
            left -= view.expert_bytes(key)
            if left < 0:
                return place
        return len(incoming)


class StageOracle(StageCache):
    """StageCache that knows how often the coming stage uses each expert: SAEM's bound on itself.

    Same first set, pool, moments of migration, hysteresis and budget; only the scores at a boundary are
    the coming stage's counts instead of the finished one's. Knows the future.

    Parameters
    ----------
    popularity, hysteresis, migrate_bytes
        As in :class:`StageCache`.
    stage_uses
        For each stage of this very run, as the run's own detector delimits it, the tokens that use each
        expert (key -> tokens), beginning with the stage before the first boundary.
    """

    oracle: ClassVar[bool] = True

    def __init__(
        self,
        popularity: NDArray[np.floating],
        stage_uses: Sequence[Mapping[int, int]],
        hysteresis: float = 1.05,
        migrate_bytes: int | None = None,
    ) -> None:
        super().__init__(popularity, 0.0, hysteresis, migrate_bytes)
        self._future = stage_uses

    def observe(self, routing: LayerRouting, view: View) -> None:
        """Enter the next stage at a boundary; the counts are known beforehand."""
        if view.stage != self._stage:
            self._stage = view.stage
            self.close_stage(view)

    def close_stage(self, view: View) -> None:
        """Score the experts by the stage that begins."""
        coming = self._future[self._stage] if self._stage < len(self._future) else {}
        self._score = {key: float(coming[key]) for key in self._keys if key in coming}
        self.migrate(self._score, view)


def _is_size(value: object) -> bool:
    """Tell whether a value is a whole number >= 0, for which 4e9 is as good as 4000000000."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and value >= 0 and value == int(value)  # type: ignore[operator,call-overload]
