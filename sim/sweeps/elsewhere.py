"""Runs a chunk in a process that a cluster started, as if it were at home.

Such a process has the environment but not the ``sys.path`` of the one that asked for it, and it need not
be in the same folder: a policy in the user's folder and a trace given by a relative path would be missing.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass

from sim.sweeps.chunk import Chunk, run_chunk


@dataclass(frozen=True, slots=True)
class Home:
    """Where a sweep was asked for: its folder, and where it looks for modules."""

    folder: str
    path: tuple[str, ...]


def home() -> Home:
    """Return this process's own."""
    here = os.getcwd()
    return Home(here, tuple(os.path.abspath(place) for place in sys.path))


def run_elsewhere(chunk: Chunk, home: Home) -> None:
    """Run a chunk with a sweep's folder and modules, where this machine has them."""
    if os.path.isdir(home.folder):
        os.chdir(home.folder)
    sys.path += [place for place in home.path if place not in sys.path]
    run_chunk(chunk)


def run_in_job(chunk: Chunk, home: Home) -> None:
    """Run a chunk as a SLURM job, which stops when SLURM says so.

    submitit's own handlers let SIGTERM pass, so that a cancelled job runs on until it is killed half a
    minute later; and they end a job ahead of its time limit as if it had failed, whereas SLURM tells the
    two apart. What was finished is on disk, so nothing needs to be put in order.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    run_elsewhere(chunk, home)
