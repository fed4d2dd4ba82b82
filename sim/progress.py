"""One progress bar on stderr: over the runs of a sweep (a Hydra callback) or the steps of a run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hydra.experimental.callback import Callback


class SweepProgress(Callback):
    """Counts done and failed runs of a multirun."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None
        self._failed = 0

    def on_multirun_start(self, config: Any, **kwargs: Any) -> None:
        """Open the bar with the number of points of the sweep; none where stderr is no terminal."""
        if not sys.stderr.isatty():
            return
        self._bar = _bar()
        try:
            total = points_of_grid(config)
        except Exception:  # a mistake in the overrides, which Hydra itself is about to report
            total = None
        self._task = self._bar.add_task("runs", total=total, note="")
        self._bar.start()

    def on_job_end(self, config: Any, job_return: Any, **kwargs: Any) -> None:
        """Advance the bar by one run."""
        if self._bar is None:
            return
        failed = job_return.status.name == "FAILED" or job_return.return_value is None
        self._failed += failed
        note = f"{self._failed} failed" if self._failed else ""
        self._bar.update(self._task, advance=1, note=note)

    def on_multirun_end(self, config: Any, **kwargs: Any) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.stop()


@contextmanager
def step_bar(title: str) -> Iterator[Callable[..., Callable[[], None]] | None]:
    """Show the steps of a single run under ``title``; yields None where stderr is no terminal.

    What it yields otherwise is told the number of steps, None if that is not known beforehand, and
    another title where several things are counted one after another.
    """
    if not sys.stderr.isatty():
        yield None
        return
    with _bar() as bar:

        def watch(num_steps: int | None, name: str = title) -> Callable[[], None]:
            task = bar.add_task(name, total=num_steps, note="")
            return lambda: bar.advance(task)

        yield watch


@contextmanager
def sweep_bar(total: int) -> Iterator[Callable[[int, int], None] | None]:
    """Show how many points of a sweep are done and failed; yields None where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    with _bar() as bar:
        task: Any = None

        def watch(done: int, failed: int) -> None:
            nonlocal task
            if task is None:  # what an earlier process did says nothing of the speed
                task = bar.add_task("points", total=total, completed=done, note="")
            bar.update(task, completed=done, note=f"{failed} failed" if failed else "")

        yield watch


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
        console=Console(file=sys.stderr),
    )


def points_of_grid(config: Any) -> int:
    """Return the number of runs a grid sweep makes of its overrides."""
    from sim.sweeps.grammar import Grammar
    from sim.sweeps.space import Grid, axes_of

    params = config.hydra.sweeper.get("params") or {}
    texts = [f"{key}={value}" for key, value in params.items()] + list(config.hydra.overrides.task)
    return Grid(axes_of(texts, Grammar())).num_points
