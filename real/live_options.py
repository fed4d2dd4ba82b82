"""How a model is run live, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from real.rig import Tier
from traces.record import Generation
from traces.record_rows import Request


@dataclass(frozen=True)
class LiveOptions:
    """How a model is run.

    Parameters
    ----------
    generation
        How it generates.
    tier
        Where experts wait.
    store_path
        The file of experts with the storage tier: used if it is there, else written. None: a temporary one.
    memory_bytes
        Budget of the compute device; None: that of ``cache.ratio`` and its like.
    record, logits, gates_ahead
        The trace to write, if any, and what is in it.
    check
        Compare with the unmodified model, which must be whole.
    """

    generation: Generation
    tier: Tier = field(default_factory=lambda: Tier("ram"))
    store_path: Path | None = None
    memory_bytes: int | None = None
    record: Path | None = None
    logits: bool = False
    gates_ahead: int = 1
    check: bool = False


@dataclass
class LiveResult:
    """What came of a run: its summary row, the requests with their tokens, and what must be told."""

    summary: dict[str, Any]
    requests: list[Request]
    notes: list[str]
