"""``greenroom sim``: one run, or with ``-m`` a sweep, from the Hydra configuration in ``conf/``.

Results go to stdout and to the run's folder; everything else goes to stderr. A user's mistake is one
line and exit code 2 (set HYDRA_FULL_ERROR=1 for the traceback).
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from sim.mistakes import explain

_LEFT_BY_HYDRA = {".hydra", "multirun.yaml", "greenroom.log"}


class _Sweep:
    """Where this process's sweep writes, for the summary at its end."""

    folder: Path | None = None
    failed: bool = False


@hydra.main(version_base="1.3", config_path="../conf", config_name="config")
def run(config: DictConfig) -> float | None:
    """Run one point; return tokens/s, the objective for any sweeper."""
    from sim.results import write_run
    from sim.simulate import simulate

    settings = HydraConfig.get()
    folder = Path(settings.runtime.output_dir)
    single = settings.mode != RunMode.MULTIRUN
    if not single:
        _Sweep.folder = Path(settings.sweep.dir).absolute()
    plain: Any = OmegaConf.to_container(config, resolve=True)
    try:
        summary, tables = simulate(plain)
        write_run(folder, summary, OmegaConf.to_yaml(config, resolve=True), tables)
    except BaseException:
        _remove_if_empty(folder)
        raise
    if single:
        from sim.report import print_run

        print_run(summary, folder)
    return summary["tokens_per_s"]  # type: ignore[no-any-return]


def main(arguments: list[str]) -> int:
    """Run ``greenroom sim`` with these arguments; return the exit code."""
    wants_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # so that Hydra hands its errors to us
    sys.argv = ["greenroom sim", *arguments]
    code = 0
    try:
        run()
    except Exception as error:
        message = explain(error)
        if wants_traceback or message is None:
            raise
        print(f"greenroom sim: error: {message}", file=sys.stderr)
        code = 2
    if _Sweep.folder is not None:
        code = max(code, _finish_sweep(_Sweep.folder))
    return code


def _finish_sweep(folder: Path) -> int:
    """Collect whatever runs of a sweep are complete: table, files, figures."""
    from sim.report import print_sweep
    from sim.results import read_summaries, write_sweep

    rows = read_summaries(folder)
    if not rows:
        return 2
    write_sweep(folder, rows)
    print_sweep(rows, folder)
    return 0


def _remove_if_empty(folder: Path) -> None:
    """Take away a run's folder in which there is nothing but Hydra's own notes."""
    if folder.is_dir() and {entry.name for entry in folder.iterdir()} <= _LEFT_BY_HYDRA:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
