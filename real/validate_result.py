"""What a validation finds, and whom it tells how far it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from real.limits import LimitResult
from real.observed import Observed
from real.validate_blocks import Block
from real.validate_config import Matrix
from real.validate_parity import Parity
from real.validate_predict import Compared


class Watch(Protocol):
    """Is told how far a validation is."""

    def say(self, text: str) -> None:
        """Tell what a reader must know now."""

    def stage(self, title: str) -> None:
        """Learn that a part of the work begins."""

    def progress(self, share: float) -> None:
        """Learn which share of that part is done, in [0, 1]."""


class Silent:
    """A watch that tells nobody."""

    def say(self, text: str) -> None:
        """Tell nobody."""

    def stage(self, title: str) -> None:
        """Tell nobody."""

    def progress(self, share: float) -> None:
        """Tell nobody."""


@dataclass(frozen=True, slots=True)
class Played:
    """A block that has run: how long, in seconds, how many turns each run had, and what references showed."""

    block: Block
    seconds: float
    num_rounds: int
    observed: Observed


@dataclass(slots=True)
class Validation:
    """What came of a validation.

    ``rows`` are scored; ``references`` are predicted too, but from their own figures, and are not.
    ``asked`` has what was chosen where the matrix says auto or null, ``notes`` what a reader must know.
    """

    matrix: Matrix
    asked: dict[str, Any]
    facts: dict[str, Any]
    parity: list[Parity] = field(default_factory=list)
    rows: list[Compared] = field(default_factory=list)
    references: list[Compared] = field(default_factory=list)
    played: list[Played] = field(default_factory=list)
    limits: list[LimitResult] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
