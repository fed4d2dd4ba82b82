"""Runs chunks as tasks of Ray, on a cluster that runs already or on one started for the sweep."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sim.settings import TEXT, Rule, at_least, check_group, or_null
from sim.sweeps.chunk import Chunk
from sim.sweeps.elsewhere import home, run_elsewhere
from sim.sweeps.engine import Ended
from sim.sweeps.settings import SweepSettings
from sim.types import ConfigError

_CLOSE_S = 5.0
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # no warning that this will change
    "RAY_DEDUP_LOGS_SKIP_REGEX": "(?s).*",  # stdout is for results: no word there on workers that died
}

RULES: dict[str, Rule] = {
    "address": or_null(TEXT),
    "cpus_per_task": at_least(1),
    "runtime_env": (lambda value: isinstance(value, Mapping), "must be a group of settings"),
}


class RayEngine:
    """Runs chunks on a Ray cluster whose nodes share the sweep's folder.

    Parameters
    ----------
    settings
        Of the sweep: its own ones are those of ``conf/sweep/ray.yaml``; ``workers`` is how many tasks run
        at one time, None for as many as the cluster has CPUs for.
    folder
        The sweep's folder; chunks name it themselves.

    Raises ConfigError if Ray is not installed or cannot be reached, or a setting breaks its rule.
    """

    name = "ray"
    chunks_per_worker = 8

    def __init__(self, settings: SweepSettings, folder: Path) -> None:
        own = settings.own
        check_group("sweep", own, RULES)
        with _quietly():
            self._ray = _ray()
            self._started = not self._ray.is_initialized()
            if self._started:
                _connect(self._ray, own, settings.workers)
        try:
            fits = _num_workers(self._ray, own["cpus_per_task"])
        except ConfigError:
            self.close()
            raise
        self.workers = settings.workers or fits
        options: dict[str, Any] = {"max_retries": 0, "num_cpus": own["cpus_per_task"]}
        if own["runtime_env"]:
            options["runtime_env"] = dict(own["runtime_env"])
        self._task = self._ray.remote(**options)(run_elsewhere)
        self._waiting: deque[Chunk] = deque()
        self._running: dict[Any, Chunk] = {}

    def submit(self, chunks: Sequence[Chunk]) -> None:
        """Take chunks to run."""
        self._waiting.extend(chunks)
        self._hand_out()

    def _hand_out(self) -> None:
        """Make tasks of as many waiting chunks as may run at one time."""
        place = home()
        while self._waiting and len(self._running) < self.workers:
            chunk = self._waiting.popleft()
            self._running[self._task.remote(chunk, place)] = chunk

    def wait(self, timeout_s: float) -> list[Ended]:
        """Return the chunks that ended since the last call; those whose process died are lost."""
        if not self._running:
            return []
        self._ray.wait(list(self._running), num_returns=1, timeout=timeout_s)
        tasks = list(self._running)
        done, _ = self._ray.wait(tasks, num_returns=len(tasks), timeout=0)
        ended = [Ended(self._running.pop(task), self._why_lost(task)) for task in done]
        self._hand_out()
        return ended

    def _why_lost(self, task: Any) -> str | None:
        """Return what became of a task that did not end well, or None."""
        from ray.exceptions import RayError

        try:
            self._ray.get(task)
        except RayError as error:
            return _in_words(error)
        return None

    def close(self) -> None:
        """Stop the tasks that run; end what was started or connected for this sweep."""
        self._waiting = deque()
        running, self._running = list(getattr(self, "_running", ())), {}
        if not self._ray.is_initialized():
            return
        with suppress(Exception):  # a cluster that is gone has no tasks left to stop
            for task in running:
                self._ray.cancel(task, force=True)
            if running:
                self._ray.wait(running, num_returns=len(running), timeout=_CLOSE_S)
        if self._started:
            self._ray.shutdown()


@contextmanager
def _quietly() -> Iterator[None]:
    """Have Ray keep still, where the user has not said otherwise; it reads that as it starts."""
    ours = {name: value for name, value in _QUIET.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]


def _ray() -> Any:
    """Import Ray; ConfigError if it is not installed."""
    try:
        import ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError(
            "sweep.engine = ray: ray is not installed; pip install 'greenroom[ray]', in a checkout:"
            " pip install -c constraints.txt -e '.[ray]'"
        ) from None
    return ray


def _connect(ray: Any, own: Mapping[str, Any], workers: int | None) -> None:
    """Connect to the cluster that is meant, or start one here."""
    address = own["address"] or os.environ.get("RAY_ADDRESS")
    common = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    on_main_thread = threading.current_thread() is threading.main_thread()
    at_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        if address:
            ray.init(address=address, **common)
        else:
            cpus = None if workers is None else workers * own["cpus_per_task"]
            ray.init(address="local", num_cpus=cpus, include_dashboard=False, **common)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        told = f"sweep.address = {address}" if address else "sweep.engine = ray"
        raise ConfigError(f"{told}: Ray cannot be reached: {_first_line(error)}") from error
    finally:
        if on_main_thread:  # Ray puts a handler of its own
            signal.signal(signal.SIGTERM, at_sigterm)


def _num_workers(ray: Any, cpus_per_task: int) -> int:
    """Return how many tasks the cluster's nodes hold at one time."""
    cpus = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    fits = sum(count // cpus_per_task for count in cpus)
    if fits == 0:
        raise ConfigError(
            f"sweep.cpus_per_task = {cpus_per_task}: no node of the Ray cluster has so many CPUs"
            f" (the largest has {max(cpus, default=0)})"
        )
    return fits


def _in_words(error: Exception) -> str:
    """Return in one line what an error of Ray says of a task's end."""
    from ray import exceptions as ray_exceptions

    cause = getattr(error, "cause", None)
    if isinstance(error, ray_exceptions.RayTaskError) and cause is not None:
        return f"{type(cause).__name__}: {_first_line(cause)}"
    kinds = {
        "WorkerCrashedError": "its process was killed or crashed",
        "NodeDiedError": "its node died",
        "OutOfMemoryError": "its node ran out of memory",
        "TaskCancelledError": "it was cancelled",
    }
    kind = type(error).__name__
    return f"{kinds.get(kind, _first_line(error))} (Ray: {kind})"


def _first_line(error: BaseException) -> str:
    return next(
        (line.strip() for line in str(error).splitlines() if line.strip()), "no reason given"
    )
