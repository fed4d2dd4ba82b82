"""One progress bar over the runs of a sweep, on stderr; a Hydra callback."""

from __future__ import annotations

import sys
from math import prod
from typing import Any

from hydra.experimental.callback import Callback


class SweepProgress(Callback):
    """Counts done and failed runs of a multirun. Silent where stderr is no terminal, but for the end."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None
        self._failed = 0

    def on_multirun_start(self, config: Any, **kwargs: Any) -> None:
        """Open the bar with the number of points of the sweep."""
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=Console(file=sys.stderr))
        self._task = self._bar.add_task("runs", total=count_points(config), note="")
        self._bar.start()

    def on_job_end(self, config: Any, job_return: Any, **kwargs: Any) -> None:
        """Advance the bar by one run."""
        if self._bar is None:
            return
        self._failed += job_return.status.name == "FAILED" or job_return.return_value is None
        note = f"{self._failed} failed" if self._failed else ""
        self._bar.update(self._task, advance=1, note=note)

    def on_multirun_end(self, config: Any, **kwargs: Any) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.stop()


def count_points(config: Any) -> int:
    """Return the number of runs a grid sweep makes of its overrides."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    params = config.hydra.sweeper.get("params") or {}
    texts = [f"{key}={value}" for key, value in params.items()] + list(config.hydra.overrides.task)
    overrides = OverridesParser.create().parse_overrides(texts)
    last = {override.key_or_group: override for override in overrides}
    swept = [override for override in last.values() if override.is_sweep_override()]
    return prod(sum(1 for _ in override.sweep_string_iterator()) for override in swept)
