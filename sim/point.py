"""One point from its resolved configuration to its folder; the same for a run and for every sweep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

Bar = Callable[[str], AbstractContextManager[Any]]
"""Given a title, shows the progress of what goes on in its context."""


def run_point(
    config: Mapping[str, Any],
    folder: Path,
    overrides: Sequence[str],
    *,
    tables: bool = True,
    bar: Bar = nullcontext,
) -> dict[str, Any]:
    """Run a configuration and leave what came of it in ``folder``; return the summary.

    Parameters
    ----------
    config
        A resolved configuration, plain dicts and lists; it is not changed.
    overrides
        What was set on the command line or by a sweep.
    tables
        Whether step and request tables and the configuration are kept too; False: the summary alone,
        unless the run's ``output`` asks for events or a timeline.
    bar
        Shows progress.

    Raises what :func:`sim.simulate.simulate` raises; the folder has then no summary.
    """
    from sim.results import forget_run
    from sim.settings import check_settings
    from sim.simulate import simulate

    check_settings(config)
    output = config["output"]
    tables = tables or output["events"] or output["perfetto"] is not None
    with bar("steps") as watch:
        seen = watch if callable(watch) else None
        summary, _ = simulate(config, folder if tables else None, seen, keep_rows=False)
    summary["overrides"] = overridden(overrides)
    if not tables:  # else new ones have taken their place
        forget_run(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _add_extras(config, folder, summary, bar)
    _finish(config, folder, summary, tables)
    return summary


def overridden(overrides: Sequence[str]) -> dict[str, str]:
    """Return what overrides set, by key; deletions have the value ''."""
    pairs = (text.lstrip("+").partition("=") for text in overrides)
    return {key: setting for key, _, setting in pairs}


def _add_extras(config: Mapping[str, Any], folder: Path, summary: dict[str, Any], bar: Bar) -> None:
    """Write what ``output`` asks for beside the tables."""
    from sim.perfetto import write_run_timeline
    from sim.report_roofline import ROOFLINE, write_roofline
    from sim.simulate import simulate
    from sim.whatif import WHAT_IF, what_if, write_what_if

    if config["output"]["perfetto"] is not None:
        write_run_timeline(folder, config, summary)
    if config["output"]["what_if"]:
        summary["what_if"] = what_if(config, simulate, summary, bar)
        write_what_if(folder / WHAT_IF, summary["what_if"])
    if summary.get("roofline"):
        write_roofline(folder / ROOFLINE, summary["roofline"])


def _finish(config: Mapping[str, Any], folder: Path, summary: dict[str, Any], tables: bool) -> None:
    from sim.results import finish_run

    finish_run(folder, summary, resolved_yaml(config) if tables else None)


def resolved_yaml(config: Mapping[str, Any]) -> str:
    """Return a resolved configuration as a text that can be read and given again."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(dict(config)))
