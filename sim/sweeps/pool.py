"""Runs chunks in processes of this machine.

Each worker is a process with a pipe of its own, so that one that dies (out of memory, a signal) takes nobody
along, and what it was at is known. Workers are forked from a clean server process that has loaded the
simulator once, not from this one, whose threads and open files they must not inherit.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from typing import Any

from sim.sweeps.chunk import Chunk
from sim.sweeps.elsewhere import Home, home, run_elsewhere
from sim.sweeps.engine import Ended
from sim.types import ConfigError

_LOADED_BEFOREHAND = ["sim.sweeps.chunk", "sim.point", "sim.simulate", "sim.mistakes"]
_STOP_S = 2.0
_ATTEMPTS, _PAUSE_S = 20, 0.1


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _Worker:
    """One process, and the chunk it is at."""

    def __init__(self, context: Any) -> None:
        self.chunk: Chunk | None = None
        self.pipe, theirs = context.Pipe()
        self.process = _started(context, theirs)
        theirs.close()

    def run(self, chunk: Chunk) -> None:
        """Hand it a chunk; one that has died is noticed when its end is waited for."""
        self.chunk = chunk
        with suppress(OSError):
            self.pipe.send(chunk)

    def ended(self) -> Ended | None:
        """Return the chunk that it has done, or has died of; None if it is still at it."""
        if self.chunk is None:
            return None
        why = self._why_lost()
        if why is None and not self.pipe.poll():
            return None
        if why is None:
            try:
                why = self.pipe.recv()
            except (EOFError, OSError):
                why = self._death()
        found, self.chunk = Ended(self.chunk, why), None
        return found

    def _why_lost(self) -> str | None:
        if self.process.is_alive() or self.pipe.poll():
            return None
        return self._death()

    def _death(self) -> str:
        self.process.join(_STOP_S)
        code = self.process.exitcode
        if code is not None and code < 0:
            with suppress(ValueError):
                return f"killed by {signal.Signals(-code).name}"
        return f"its process ended with code {code}"

    def stop(self) -> None:
        """End the process, whatever it is at."""
        self.pipe.close()
        self.process.terminate()
        self.process.join(_STOP_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _started(context: Any, pipe: Connection) -> Any:
    """Return a process that serves a pipe; a server process that has died is replaced.

    It may have been killed and not be known to be dead yet, so there are several attempts.
    """
    for _ in range(_ATTEMPTS):
        process = context.Process(target=_serve, args=(pipe, home()), daemon=True)
        try:
            with _without_main(), _without_ctrl_c():
                process.start()
        except (OSError, EOFError) as error:
            why = error
            time.sleep(_PAUSE_S)
        else:
            return process
    raise ConfigError(f"sweep.engine = pool: no worker can be started: {why}") from why


class PoolEngine:
    """Runs so many chunks at one time, each in a process of this machine.

    Parameters
    ----------
    workers
        How many; None: as many as there are cores.
    """

    name = "pool"
    chunks_per_worker = 16

    def __init__(self, workers: int | None = None) -> None:
        self.workers = workers or cores()
        method = "forkserver" if sys.platform != "win32" else "spawn"
        self._context = multiprocessing.get_context(method)
        if method == "forkserver":
            self._context.set_forkserver_preload(_LOADED_BEFOREHAND)
        self._waiting: deque[Chunk] = deque()
        self._staff: list[_Worker] = []

    def submit(self, chunks: Sequence[Chunk]) -> None:
        """Take chunks to run."""
        self._waiting.extend(chunks)
        self._hand_out()

    def wait(self, timeout_s: float) -> list[Ended]:
        """Return the chunks that ended since the last call."""
        busy = [worker for worker in self._staff if worker.chunk is not None]
        if not busy:
            return []
        things = [thing for w in busy for thing in (w.pipe, w.process.sentinel)]
        wait_for_any(things, timeout_s)
        ended = [end for end in (worker.ended() for worker in busy) if end is not None]
        self._hand_out()
        return ended

    def _hand_out(self) -> None:
        """Give waiting chunks to idle workers, hiring as many as there may be."""
        for worker in [worker for worker in self._staff if worker.chunk is None]:
            if not worker.process.is_alive():
                worker.stop()
                self._staff.remove(worker)
            elif self._waiting:
                worker.run(self._waiting.popleft())
        while self._waiting and len(self._staff) < self.workers:
            worker = _Worker(self._context)
            self._staff.append(worker)
            worker.run(self._waiting.popleft())

    def close(self) -> None:
        """End all workers."""
        self._waiting.clear()
        while self._staff:
            self._staff.pop().stop()


def _serve(pipe: Connection, home: Home) -> None:
    """Run chunks as they come, until there are no more or the sweep's process is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the sweep's process decides
    if None not in (sys.stdout, sys.stderr):  # closed ones have given their numbers to other files
        os.dup2(2, 1)  # what a policy prints is no result
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            chunk = pipe.recv()
        except (EOFError, OSError):
            return
        why = None
        try:
            run_elsewhere(chunk, home)
        except KeyboardInterrupt:  # no Ctrl-C, which is not heeded here: the point raises it
            why = "KeyboardInterrupt"
        try:
            pipe.send(why)
        except OSError:  # taken for dead, and replaced
            return


def _end_with_parent() -> None:
    """End this process when the one that began it is gone, be it killed: nobody waits for the rest."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        time.sleep(0.05)
        os._exit(1)


@contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C wait while a worker starts; the server process is born with it blocked, and stays so.

    It would break off what the server loads beforehand, with a traceback.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # whose own start would let it through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _without_main() -> Iterator[None]:
    """Hide the main script while a worker starts, which else would run it again up to its end."""
    main = sys.modules["__main__"]
    kept = {name: getattr(main, name) for name in ("__file__", "__spec__") if hasattr(main, name)}
    try:
        for name in kept:
            if name == "__file__":
                del main.__file__
            else:
                main.__spec__ = None
        yield
    finally:
        for name, value in kept.items():
            setattr(main, name, value)
