"""Runs chunks in this process, one after another."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from sim.sweeps.chunk import Chunk, run_chunk
from sim.sweeps.engine import Ended


class SerialEngine:
    """The engine for debugging, and for policies that only this process knows."""

    name = "serial"
    chunks_per_worker = 8
    workers = 1

    def __init__(self) -> None:
        self._waiting: deque[Chunk] = deque()

    def submit(self, chunks: Sequence[Chunk]) -> None:
        """Take chunks to run."""
        self._waiting.extend(chunks)

    def wait(self, timeout_s: float) -> list[Ended]:
        """Run the next chunk, however long that takes."""
        if not self._waiting:
            return []
        chunk = self._waiting.popleft()
        run_chunk(chunk)
        return [Ended(chunk)]

    def close(self) -> None:
        """Forget what waits."""
        self._waiting.clear()
