"""The Python API: what the commands do, as functions that give tables, for notebooks and scripts.

Overrides are those of the command line (``"cache.ratio=0.25"``), results those of the command line too, to
the last digit. A mistake of the caller's raises ConfigError with one line that says what is wrong.
"""

from __future__ import annotations

import json
import operator
import os
import tempfile
from collections.abc import Sequence
from dataclasses import fields
from hashlib import sha256
from pathlib import Path
from typing import Any

from sim.api_inputs import Inputs, PolicyLike, TraceLike, quoted, source_of
from sim.api_mistakes import plain_mistakes
from sim.api_results import Comparison, Run, Sweep
from sim.settings import did_you_mean
from sim.types import ConfigError
from traces.out_file import check_out_folder
from traces.schema import Trace

Folder = str | os.PathLike[str] | None
Dirs = Sequence[str | os.PathLike[str]]
_PARAMETERS = ("policies", "baseline", "trace", "config_dirs", "folder", "workers", "progress")
"""Those of :func:`sweep` and :func:`compare` that are no settings of the sweep."""


@plain_mistakes()
def load_trace(source: TraceLike = "tiny") -> Trace:
    """Read a trace.

    Parameters
    ----------
    source
        A bundled one's name (``tiny``, ``tiny_logits``), or a file: Parquet as Greenroom writes it, or any
        format that ``greenroom import`` knows by its content.

    Returns
    -------
    Trace
        Header and columns, its arrays read-only; that of a very large file stays in the file.

    Examples
    --------
    >>> trace = greenroom.load_trace("tiny")
    >>> trace.meta.num_layers, trace.meta.num_experts, trace.meta.top_k
    (8, 32, 4)
    """
    from sim import build

    if isinstance(source, Trace):
        return source
    return build.load_trace(Inputs().trace_path(source))


@plain_mistakes()
def simulate(
    *overrides: str,
    policy: PolicyLike | None = None,
    trace: TraceLike | None = None,
    config_dirs: Dirs = (),
    folder: Folder = None,
    events: bool = False,
) -> Run:
    """Run one simulation, as ``greenroom sim`` does.

    Parameters
    ----------
    *overrides
        Settings as on the command line; ``greenroom sim --help`` lists them.
    policy
        A name of the catalogue; a class of yours, derived from one of ``sim.policies.base``; or a mapping
        of what a policy's YAML file holds, in which classes may stand for their dotted paths. Parts that
        are left out: no such part, and as the cache LRU.
    trace
        A bundled one's name, a file, or a trace in memory.
    config_dirs
        Folders of your own options, as ``--config-dir``.
    folder
        Where the run's files go; None: to a temporary folder that lasts as long as the result.
    events
        Whether every copy and kernel is kept too.

    Examples
    --------
    >>> run = greenroom.simulate("cache.ratio=0.25", "workload.requests=[24,25]", policy="lru")
    >>> 0 < run.summary["hit_rate"] < 1
    True
    >>> len(run.steps) == run.summary["steps"]
    True
    """
    from sim.composing import compose_config
    from sim.own_options import with_folders
    from sim.point import run_point
    from sim.progress import step_bar

    own, temporary = _folder_of(folder)
    inputs = Inputs(own)
    if policy is not None:
        inputs.add_policies([policy])
    if trace is not None:
        inputs.add_trace(trace)
    inputs.add_folders(config_dirs)
    inputs.check_once(overrides)
    settings = [*inputs.overrides, *overrides, *(["output.events=true"] if events else [])]
    _check_overrides(settings)
    config = compose_config("config", with_folders(settings, inputs.config_dirs))
    shown = [text for text in settings if not text.startswith("hydra.")]
    summary = run_point(config, own, shown, bar=step_bar)
    return Run(own, summary, config, temporary)


@plain_mistakes("sweep")
def sweep(
    *overrides: str,
    policies: Sequence[PolicyLike] = (),
    trace: TraceLike | None = None,
    config_dirs: Dirs = (),
    folder: Folder = None,
    workers: int | None = None,
    progress: bool = True,
    **settings: Any,
) -> Sweep:
    """Run many simulations on all cores, as ``greenroom sweep`` does.

    Parameters
    ----------
    *overrides
        Settings as on the command line, those to vary with several values: ``"cache.ratio=0.125,0.25"``.
    policies
        As ``policy`` of :func:`simulate`, several. Classes that are defined in a notebook or a script exist
        in its process only: such sweeps run one after another (``engine="serial"``), and in a folder
        that is given they go on where they were only while the code of the classes is as it was.
    folder
        Where the sweep's files go. In a folder that holds a part of the same sweep only what is missing is
        run. None: a temporary folder that lasts as long as the result.
    workers
        Processes at one time; None: one a core.
    progress
        Whether a bar is shown (on a terminal only).
    **settings
        Of the sweep itself, the group ``sweep`` of its configuration: ``search="random"``, ``points=100``,
        ``seed=1``, ``engine="serial"``, ``tables=True``, ``overwrite=True``, ...

    A point that fails is among ``failed`` and does not stop the others.

    Raises ConfigError where nothing can be run, or every point has failed.

    Examples
    --------
    >>> one = ["workload.requests=[24,25]", "output.belady=false"]
    >>> sweep = greenroom.sweep(*one, "cache.ratio=0.25,0.5", policies=["lru"], engine="serial")
    >>> sweep.by_setting("hit_rate")["lru"].is_monotonic_increasing
    True
    """
    from sim.progress import sweep_bar
    from sim.sweeps.coordinator import run_sweep

    own, temporary = _folder_of(folder)
    inputs = Inputs(own / "inputs")
    inputs.add_policies(policies)
    if trace is not None:
        inputs.add_trace(trace)
    if inputs.main_classes:
        _check_classes(inputs, own, settings)
    if workers is not None:
        settings["workers"] = workers
    inputs.check_once(overrides)
    words = [*inputs.overrides, *overrides, *_settings(settings), f"sweep.dir={quoted(str(own))}"]
    inputs.add_folders(config_dirs)
    outcome = run_sweep(words, inputs.config_dirs, bar=sweep_bar if progress else None)
    if outcome.failed and not outcome.rows:
        first = outcome.failed[0]["error"]
        raise ConfigError(f"all {len(outcome.failed)} points failed, the first one so: {first}")
    return Sweep(outcome.folder, outcome.rows, outcome.failed, temporary)


@plain_mistakes("sweep")
def compare(
    *overrides: str,
    policies: Sequence[PolicyLike] = (),
    baseline: str | None = None,
    trace: TraceLike | None = None,
    config_dirs: Dirs = (),
    folder: Folder = None,
    workers: int | None = None,
    progress: bool = True,
    **settings: Any,
) -> Comparison:
    """Run policies in the same settings and compare each with one of them.

    Parameters
    ----------
    *overrides
        The settings in which they are compared, as those of :func:`sweep`.
    policies
        At least two; the others of :func:`sweep`'s parameters are as there.
    baseline
        The name of the one whose speed the others' is divided by; None: ``ablation_base``, ``lru`` or
        ``on_demand``, the first that is there, else the first of ``policies``.

    Examples
    --------
    >>> one = ["workload.requests=[24,25]", "output.belady=false", "cache.ratio=0.5"]
    >>> contest = greenroom.compare(*one, policies=["lru", "fiddler"], engine="serial")
    >>> contest.baseline, list(contest.league.index)
    ('lru', ['fiddler', 'lru'])
    """
    from sim.league import usual_baseline

    _settings(settings)  # a misspelled name may be why the next rule is broken
    if isinstance(policies, str) or len(policies) < 2:
        raise ConfigError(f"policies = {policies}: must be a list of at least two")
    names = Inputs().add_policies(policies)
    if baseline is not None and baseline not in names:
        raise ConfigError(
            f"baseline = {baseline}: must be of policies{did_you_mean(baseline, names)}"
        )
    chosen = baseline or usual_baseline(names) or names[0]
    found = sweep(
        *overrides,
        policies=policies,
        trace=trace,
        config_dirs=config_dirs,
        folder=folder,
        workers=workers,
        progress=progress,
        **settings,
    )
    return Comparison(found, chosen, found.league(chosen))


def _folder_of(folder: Folder) -> tuple[Path, tempfile.TemporaryDirectory[str] | None]:
    """Return the folder for results, absolute, and what takes it away again if it is a temporary one."""
    if folder is not None:
        own = Path(folder).expanduser().absolute()
        check_out_folder(own, "folder =")
        return own, None
    temporary = tempfile.TemporaryDirectory(prefix="greenroom-")
    return Path(temporary.name), temporary


def _check_overrides(overrides: Sequence[str]) -> None:
    """Refuse what is no override, and several values where one run is asked for."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    for override in OverridesParser.create().parse_overrides(list(overrides)):
        if override.is_sweep_override():
            raise ConfigError(
                f"{override.input_line}: several values: greenroom.sweep(...) runs those"
            )


def _settings(settings: dict[str, Any]) -> list[str]:
    """Return the settings of a sweep as overrides."""
    from sim.sweeps.settings import ENGINES, SweepSettings

    known = [field.name for field in fields(SweepSettings) if field.name not in ("own", "dir")]
    engine = settings.get("engine", "pool")
    if engine not in ENGINES:
        near = did_you_mean(str(engine), ENGINES)
        raise ConfigError(f"engine = {engine}: must be one of {', '.join(ENGINES)}{near}")
    words = [f"sweep={engine}"]
    for name, value in settings.items():
        if name not in known and engine in ("pool", "serial"):
            near = did_you_mean(name, [*known, *_PARAMETERS])
            raise ConfigError(f"{name} = {value}: no such setting of a sweep{near}")
        words.append(f"sweep.{name}={_text(name, value)}")
    return words


def _text(name: str, value: Any) -> str:
    if isinstance(value, str | os.PathLike):
        return quoted(os.fspath(value))
    try:
        return json.dumps(value, default=operator.index)  # of NumPy's whole numbers
    except TypeError:
        kind = type(value).__name__
        raise ConfigError(f"{name} = {kind}: must be a text, a number, a list or None") from None


def _check_classes(inputs: Inputs, folder: Path, settings: dict[str, Any]) -> None:
    """Run classes of a notebook in its own process, and not into results of other code of theirs."""
    engine = settings.setdefault("engine", "serial")
    names = ", ".join(kind.__name__ for kind in inputs.main_classes)
    if engine != "serial":
        rule = "exists in this process only: must be engine='serial', or in a module of yours"
        raise ConfigError(f"engine = {engine}: {names} {rule}")
    code = {kind.__name__: source_of(kind) for kind in inputs.main_classes}
    digest = sha256(json.dumps(code, sort_keys=True).encode()).hexdigest()
    note = inputs.folder() / "classes.sha256"
    if note.exists() and note.read_text() != digest and not settings.get("overwrite"):
        rule = "has changed since the sweep there: another folder, or overwrite=True"
        raise ConfigError(f"folder = {folder}: {names} {rule}")
    note.write_text(digest)
