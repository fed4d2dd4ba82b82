"""What runs chunks: a pool of processes here, SLURM or Ray elsewhere; all of them look like this."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sim.sweeps.chunk import Chunk


@dataclass(frozen=True, slots=True)
class Ended:
    """A chunk that no worker is at any longer.

    ``lost`` is None where all its points have a result on disk, else why its worker died.
    """

    chunk: Chunk
    lost: str | None = None


class Engine(Protocol):
    """Runs chunks by :func:`sim.sweeps.chunk.run_chunk`, several at one time; knows no sweep.

    It never retries: a chunk whose worker died has ended, and says so.
    """

    name: str
    workers: int
    """How many chunks run at one time."""
    chunks_per_worker: int
    """Into how many chunks a worker's share is cut: few where one is dear to start."""

    def submit(self, chunks: Sequence[Chunk]) -> None:
        """Take chunks to run, in this order; may be called again while others run."""

    def wait(self, timeout_s: float) -> list[Ended]:
        """Return the chunks that ended since the last call; wait so many seconds at most for one."""

    def close(self) -> None:
        """Stop whatever runs and free what is held; may be called twice."""
