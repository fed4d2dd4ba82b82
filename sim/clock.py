"""What resources need of a clock, and the order of what happens at one time.

Nothing here imports a clock library: the timeline hands in SimPy's environment.

    LOAD_ENDED     0   memory must be known before anybody computes or plans on it
    COMPUTE_ENDED  1   a step that ends now is over before anything new is planned
    PLAN           2   a plan sees everything that has happened by its time
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

LOAD_ENDED, COMPUTE_ENDED, PLAN = range(3)


class Event:
    """The least that SimPy's loop needs: callbacks to call, a success flag and a value."""

    __slots__ = ("_ok", "_value", "callbacks")

    def __init__(self, callback: Callable[[Any], None] | None = None) -> None:
        self.callbacks: list[Callable[[Any], None]] = [] if callback is None else [callback]
        self._ok = True
        self._value = None


class Clock(Protocol):
    """The time in nanoseconds, and a way to be called back."""

    @property
    def now(self) -> int:
        """The time now, an int."""
        ...

    def schedule(self, event: Any, priority: Any, delay_ns: int) -> None:
        """Call the event's callbacks after ``delay_ns``, by ``priority`` at one time."""
        ...
