"""``greenroom sweep``: many points of one question, on all cores, SLURM or Ray; goes on where it stopped."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sim.mistakes import complain
from sim.results import read_json
from sim.settings import shortened
from sim.sweeps.settings import SHARED
from sim.types import ConfigError

PROGRAM = "greenroom sweep"
_MOST_ERRORS = 5
_LONGEST_WORDS = 500


def main(arguments: list[str]) -> int:
    """Run ``greenroom sweep`` with these arguments; return the exit code."""
    from sim.sweeps.options import parse

    folder: list[Path] = []
    try:
        options = parse(arguments)
        if options.resume is not None:
            _take_up(options)
        if options.cfg:
            return _show_config(options)
        return _sweep(options, folder)
    except KeyboardInterrupt:
        if folder:
            _say(f"stopped; go on with: greenroom sweep --resume {shlex.quote(str(folder[0]))}")
        else:
            _say("interrupted")
        return 130
    except BrokenPipeError:
        raise
    except Exception as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        return complain(PROGRAM, error, "sweep")


def _take_up(options: Any) -> None:
    """Take the words of a sweep from its folder, and go to where it was begun."""
    from sim.sweeps.grammar import quoted
    from sim.sweeps.store import ABOUT

    folder = Path(options.resume).absolute()
    file = folder / ABOUT
    if not file.is_file():
        raise ConfigError(f"--resume {options.resume}: holds no sweep: {ABOUT} is not there")
    about = read_json(file)
    where = about.get("working_folder")
    if not isinstance(where, str) or "\0" in where:
        raise ConfigError(f"{file}: working_folder: missing, or no folder; is the file damaged?")
    words, dirs = _words_in(about, "arguments", file), _words_in(about, "config_dirs", file)
    try:
        os.chdir(where)
    except OSError as error:
        told = f"the folder where the sweep was begun: {error.strerror}"
        raise ConfigError(f"--resume {options.resume}: {where}: {told}") from error
    options.overrides = [
        *_still_meant(words, options.overrides),
        *options.overrides,
        f"sweep.dir={quoted(str(folder))}",
    ]
    options.config_dirs = [*dirs, *options.config_dirs]


def _words_in(about: dict[str, Any], name: str, file: Path) -> list[str]:
    words = about.get(name)
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ConfigError(f"{file}: {name}: missing, or no list of words; is the file damaged?")
    return words


def _still_meant(words: Sequence[str], now: Sequence[str]) -> list[str]:
    """Return the words of a sweep but those given anew; another engine drops the settings of the old one."""
    given = {word.lstrip("+~").partition("=")[0] for word in now}
    kept = [w for w in words if w.lstrip("+~").partition("=")[0] not in {*given, "sweep.dir"}]
    if "sweep" not in given:
        return kept
    shared = {f"sweep.{name}" for name in SHARED}
    return [w for w in kept if not w.startswith("sweep.") or w.partition("=")[0] in shared]


def _show_config(options: Any) -> int:
    """Print what the words compose."""
    from omegaconf import OmegaConf

    from sim.composing import composing
    from sim.own_options import with_folders
    from sim.show_config import plain_at
    from sim.sweeps.composer import sweep_config
    from sim.sweeps.question import not_swept

    with composing():
        words = with_folders(options.overrides, options.config_dirs)
        config = sweep_config(not_swept(words))
        if options.cfg == "job" and options.package is not None:
            plain: Any = OmegaConf.to_container(config, resolve=options.resolve)
            shown = OmegaConf.create(plain_at(plain, options.package))
            print(f"# @package {options.package}\n{OmegaConf.to_yaml(shown)}", end="")
        elif options.cfg == "job":
            del_hydra = OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])
            print(OmegaConf.to_yaml(del_hydra, resolve=options.resolve), end="")
        else:
            shown = config.hydra if options.cfg == "hydra" else config
            print(OmegaConf.to_yaml(shown), end="")
    return 0


def _sweep(options: Any, folder: list[Path]) -> int:
    from sim.composing import composing
    from sim.progress import sweep_bar
    from sim.sweeps.coordinator import run_question
    from sim.sweeps.grammar import quoted
    from sim.sweeps.question import question_of

    with composing():
        question = question_of(options.overrides, options.config_dirs)
        if question.settings.dry_run:
            return _dry_run(question)
        # The folder may name the time: whoever takes the sweep up must mean this one.
        words = [word for word in options.overrides if not word.startswith("sweep.dir=")]
        words.append(f"sweep.dir={quoted(str(question.folder))}")

        def on_start() -> None:
            folder.append(question.folder)
            points, engine = _points(question.search.num_points), question.settings.engine
            _say(f"{points}, engine {engine}, into {question.folder}")

        outcome = run_question(
            question, words, options.config_dirs, bar=sweep_bar, on_start=on_start
        )
    return _tell(outcome, question.settings)


def _dry_run(question: Any) -> int:
    """Say what a sweep would be, and how long it would take."""
    from sim.sweeps.estimate import estimate
    from sim.sweeps.pool import cores
    from sim.sweeps.words import duration

    points = next(iter(question.batches()))
    question.check(points)
    total, settings = question.search.num_points, question.settings
    print(f"Points: {total}")
    print(f"First:  {' '.join(points[0].overrides)}")
    last = " ".join(points[-1].overrides)
    known = len(points) == total
    print(f"Last:   {last}" if known else f"Last:   depends on results; of the first batch: {last}")
    workers = settings.workers or (1 if settings.engine == "serial" else cores())
    found = estimate(points, question.composer.bases, workers)
    seconds = found.seconds * total / len(points)
    error = "" if found.error_s is None else f" +- {duration(found.error_s * total / len(points))}"
    least = "at least " if found.num_cut else "about "
    here = "" if settings.engine in ("pool", "serial") else " as fast as this machine's"
    took = f"{least}{duration(seconds)}{error} on {workers} workers{here}"
    if len(found.failed) == found.num_sampled:
        took = "unknown"
    print(f"Time:   {took} (from {_points(found.num_sampled)}, run for this)")
    print(f"Would be written to: {question.folder}")
    for row in found.failed[:1]:
        _say_failed(row)
        _say(f"{len(found.failed)} of {_points(found.num_sampled)} run for this failed")
    return 2 if found.failed else 0


def _tell(outcome: Any, settings: Any) -> int:
    """Print the table, the failures, and where all is; return the exit code."""
    from sim.report import print_sweep

    rows, failed = outcome.rows, outcome.failed
    if outcome.num_resumed:
        _say(f"{outcome.num_resumed} of {_points(outcome.num_points)} had a result already")
    for row in failed[:_MOST_ERRORS]:
        _say_failed(row)
    if failed:
        more = f", all in {outcome.folder / 'errors.csv'}" if len(failed) > _MOST_ERRORS else ""
        _say(f"{len(failed)} of {_points(outcome.num_points)} failed{more}")
    if rows and settings.search == "optuna":
        print(_best(rows, settings))
    if rows:
        print_sweep(rows, outcome.folder)
    return 2 if failed or not rows else 0


def _say_failed(row: dict[str, Any]) -> None:
    words = shortened(" ".join(row["overrides"]), _LONGEST_WORDS)
    _say(f"point {row['point']} failed: {words}: {row['error']}")


def _points(number: int) -> str:
    return "1 point" if number == 1 else f"{number} points"


def _best(rows: Sequence[dict[str, Any]], settings: Any) -> str:
    """Say which point has the best objective."""
    from sim.results import flatten

    name, sign = settings.objective, 1 if settings.direction == "maximize" else -1
    having = [(flatten(row).get(name), row) for row in rows]
    scored = [(value, row) for value, row in having if value is not None]
    if not scored:
        return f"Best: none, for no point has {name}"
    value, row = max(scored, key=lambda pair: sign * pair[0])
    chosen = " ".join(f"{key}={text}" for key, text in row["overrides"].items())
    return f"Best {name}: {value:.4g}, point {row['point']}: {chosen}"


def _say(message: str) -> None:
    print(f"{PROGRAM}: {message}", file=sys.stderr)
