"""``greenroom sim``: one run, or with ``-m`` a sweep, from the Hydra configuration in ``conf/``.

Results go to stdout and to the run's folder; everything else goes to stderr. A user's mistake is one
line and exit code 2 (set HYDRA_FULL_ERROR=1 for the traceback). In a sweep it spoils its own point
only: that point's folder then holds ``error.json``, and the exit code tells.
"""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from sim.hydra_guard import guard_hydra
from sim.mistakes import explain
from sim.run_flags import flags_first

_LEFT_BY_HYDRA = ".hydra"
_NOT_OURS = ("calibration", "placement", "published", "sweep", "usage")
"""Folders of ``conf/`` whose options are no groups of a run: other commands read them."""
_started_s = int(time.time())  # whole seconds, as some file systems keep them
_FULL_ERROR = "HYDRA_FULL_ERROR"
_wants_traceback = os.environ.get(_FULL_ERROR) == "1"
guard_hydra()  # here, so that it holds in the processes of a launcher too, which load this module


class _Outcome:
    """What this process must still tell when Hydra has returned."""

    run: tuple[dict[str, Any], Path] | None = None
    """The summary and the folder of a run outside sweeps."""
    sweep_folder: Path | None = None
    failed = False


class _RefusedError(BaseException):
    """A sweep that must not begin; Hydra lets it pass, where it would take an Exception for a point's."""


@hydra.main(version_base="1.3", config_path="../conf", config_name="config")
def run(config: DictConfig) -> float | None:
    """Run one point; return tokens/s, the objective for any sweeper, or None if it could not run."""
    settings = HydraConfig.get()
    folder = Path(settings.runtime.output_dir)
    is_sweep = settings.mode == RunMode.MULTIRUN
    if is_sweep:
        _refuse_foreign(Path(settings.sweep.dir).absolute(), folder)
        _Outcome.sweep_folder = Path(settings.sweep.dir).absolute()
    try:
        summary = _run_point(config, folder, is_sweep)
    except KeyboardInterrupt:
        if not is_sweep:
            _clean_up(folder)
        raise
    except Exception as error:
        if _wants_traceback:
            raise
        _fail(_told(error), folder, list(settings.overrides.task) if is_sweep else None)
        return None
    if not is_sweep:
        _Outcome.run = summary, folder
    return float(summary["tokens_per_s"] or 0.0)


def main(arguments: list[str]) -> int:
    """Run ``greenroom sim`` with these arguments; return the exit code."""
    # of an earlier command of this process
    _Outcome.run, _Outcome.sweep_folder, _Outcome.failed = None, None, False
    logging.raiseExceptions = False  # where the reader of --info has gone
    code = 0
    try:
        sys.argv = ["greenroom sim", *flags_first(arguments)]
        with _errors_handed_to_us():
            if {"--help", "-h"} & set(sys.argv):
                _print_help()
            else:
                run()
        if _Outcome.run is not None:  # not in the job: Hydra would tell that its reader has gone
            from sim.report import print_run

            print_run(*_Outcome.run)
    except KeyboardInterrupt:
        code = 130
        _complain("interrupted")
    except BrokenPipeError:  # the reader of our output has gone: no mistake
        raise
    except _RefusedError as error:
        _complain(str(error))
        code = 2
    except Exception as error:
        if _wants_traceback:
            raise
        _complain(_told(error))
        code = 2
    if _Outcome.sweep_folder is not None:
        code = max(code, _finish_sweep(_Outcome.sweep_folder))
    return max(code, 2 if _Outcome.failed else 0)


def _refuse_foreign(sweep: Path, point: Path) -> None:
    """Leave a folder of ``greenroom sweep`` alone, which would take these points for its own."""
    if (sweep / "sweep.json").exists():
        shutil.rmtree(point / _LEFT_BY_HYDRA, ignore_errors=True)
        (sweep / "multirun.yaml").unlink(missing_ok=True)
        raise _RefusedError(
            f"hydra.sweep.dir = {sweep}: holds a sweep of `greenroom sweep`; give another folder"
        )


@contextmanager
def _errors_handed_to_us() -> Iterator[None]:
    """Have Hydra raise its errors instead of ending the process; later commands find all as it was."""
    before = os.environ.get(_FULL_ERROR)
    os.environ[_FULL_ERROR] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_FULL_ERROR]
        else:
            os.environ[_FULL_ERROR] = before


def _print_help() -> None:
    """Print Hydra's help, which lists every folder of options, without those of other commands."""
    shown = io.StringIO()
    try:
        with redirect_stdout(shown):
            run()
    finally:  # Hydra ends the process
        lines = shown.getvalue().splitlines(keepends=True)
        print("".join(line for line in lines if line.partition(": ")[0] not in _NOT_OURS), end="")


def _told(error: Exception) -> str:
    """Return a user's mistake in one line, and of anything else the traceback down from the run."""
    message = explain(error)
    if message is not None:
        return message
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if not {"hydra", "simpy"} & set(Path(frame.filename).parts)]
    lines = [*traceback.format_list(ours), *traceback.format_exception_only(error)]
    return "a defect, here or in a policy of yours\n" + "".join(lines).rstrip()


def _run_point(config: DictConfig, folder: Path, is_sweep: bool) -> dict[str, Any]:
    from sim.point import run_point
    from sim.progress import step_bar

    plain: Any = OmegaConf.to_container(config, resolve=True)
    overrides = list(HydraConfig.get().overrides.task)
    return run_point(plain, folder, overrides, bar=nullcontext if is_sweep else step_bar)


def _fail(message: str, folder: Path, point: list[str] | None) -> None:
    """Tell of a point that cannot run; ``point`` are its overrides within a sweep, None outside."""
    _Outcome.failed = True
    if point is None:
        _complain(message)
        _clean_up(folder)
        return
    from sim.results import ERROR, SUMMARY, write_text

    (folder / SUMMARY).unlink(missing_ok=True)  # of an earlier sweep into the same folder
    _complain(f"{' '.join(point)}: {message}")
    write_text(folder / ERROR, json.dumps({"overrides": point, "error": message}, indent=1) + "\n")


def _clean_up(folder: Path) -> None:
    """Take away what Hydra wrote for a run that came to nothing, and the folders this leaves empty."""
    if not folder.is_dir() or {entry.name for entry in folder.iterdir()} != {_LEFT_BY_HYDRA}:
        return
    shutil.rmtree(folder / _LEFT_BY_HYDRA)
    here = Path.cwd()
    for path in (folder, *folder.parents):
        if path == here or any(path.iterdir()):
            return
        path.rmdir()


def _complain(message: str) -> None:
    print(f"greenroom sim: error: {message}", file=sys.stderr)


def _finish_sweep(folder: Path) -> int:
    """Collect whatever points of a sweep are complete: table, files, figures; return the exit code."""
    from sim.report import print_sweep
    from sim.results import read_sweep, write_sweep

    rows, failed = read_sweep(folder, _started_s)
    if rows:
        write_sweep(folder, rows)
        print_sweep(rows, folder)
    if failed:
        print(f"greenroom sim: {failed} of {failed + len(rows)} points failed", file=sys.stderr)
    return 2 if failed or not rows else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
