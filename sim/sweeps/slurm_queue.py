"""What SLURM tells of jobs, asked by its own commands: works with and without accounting."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sim.settings import did_you_mean
from sim.types import ConfigError

OVER = frozenset(
    [
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    ]
)
"""The states of a job that has ended; all others are of jobs that run, or will."""
NEVER = frozenset(
    ["BadConstraints", "InvalidAccount", "InvalidQOS", "PartitionNodeLimit", "PartitionTimeLimit"]
)
"""Why a pending job would wait for ever."""
_OF_THE_CLUSTER = ("SLURM_CONF", "SLURM_CLUSTERS")
_LARGEST_ARRAY = 1001
_MOST_WORKERS = 256
_ANSWER_S = 60.0


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a job stands: its state in SLURM's words, and why it is in it."""

    state: str
    reason: str


@dataclass(frozen=True, slots=True)
class Fate:
    """How a job ended: SLURM's state, the exit code and signal of its script, the node it was on."""

    state: str
    code: int = 0
    signal: int = 0
    node: str = ""

    def __str__(self) -> str:
        number = self.signal or (self.code - 128 if 128 < self.code < 128 + signal.NSIG else 0)
        if self.state != "FAILED":
            return self.state
        return f"killed by signal {number}" if number else f"FAILED with exit code {self.code}"


def ask(*command: str) -> str | None:
    """Return what a command of SLURM's says; None if it fails or gives no answer in a minute."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return "" if "Invalid job id" in done.stderr else None
    return done.stdout


def standings(jobs: Sequence[str]) -> dict[str, Standing] | None:
    """Return where jobs stand, those that SLURM still knows, by id; None if it does not answer.

    Jobs that ended stay known for MinJobAge, five minutes as SLURM is delivered.
    """
    arrays = ",".join(sorted({job.partition("_")[0] for job in jobs}))
    told = ask("squeue", "-h", "-r", "-t", "all", "-o", "%i|%T|%r", "-j", arrays)
    if told is None:
        return None
    found = (line.split("|", 2) for line in told.splitlines() if line.count("|") >= 2)
    return {job.strip(): Standing(state, reason.strip()) for job, state, reason in found}


def fate(job: str) -> Fate | None:
    """Return how a job ended; None if SLURM has forgotten it and keeps no accounts."""
    told = ask("scontrol", "-o", "show", "job", job)
    if told:
        facts = dict(re.findall(r"(\w+)=(\S*)", told))
        return _fate(
            facts.get("JobState", ""), facts.get("ExitCode", ""), facts.get("NodeList", "")
        )
    told = ask("sacct", "-n", "-P", "-X", "-j", job, "-o", "State,ExitCode,NodeList")
    lines = (told or "").splitlines()
    if not lines or lines[0].count("|") < 2:
        return None
    state, code, node = lines[0].split("|")[:3]
    return _fate(state.split(" ")[0], code, node)  # CANCELLED is told as "CANCELLED by 1000"


def _fate(state: str, exit_code: str, node: str) -> Fate:
    code, _, number = exit_code.partition(":")
    known = code.isdigit() and number.isdigit()
    seen = node if node and not node.startswith(("(", "None")) else ""
    return Fate(state, int(code) if known else 0, int(number) if known else 0, seen)


def largest_array() -> int:
    """Return how many tasks an array may have."""
    told = re.search(r"^MaxArraySize\s*=\s*(\d+)", ask("scontrol", "show", "config") or "", re.M)
    return max(1, int(told.group(1))) if told else _LARGEST_ARRAY


def num_workers(partition: str | None, cpus_per_task: int) -> int:
    """Return how many tasks the nodes of a partition run at one time, 256 at most.

    Raises ConfigError if there is no such partition or no SLURM that answers.
    """
    told = ask("sinfo", "-h", "-o", "%R|%C")  # CPUs as allocated/idle/other/total
    if told is None:
        raise ConfigError("sweep.engine = slurm: SLURM does not answer (sinfo fails)")
    cpus = {
        name.strip(): sum(int(count) for count in counts.split("/")[:2])
        for name, _, counts in (line.partition("|") for line in told.splitlines())
    }
    wanted = partition.split(",") if partition else list(cpus)
    for name in wanted:
        if name not in cpus:
            raise ConfigError(
                f"sweep.partition = {name}: no such partition{did_you_mean(name, list(cpus))}"
            )
    most = max((cpus[name] for name in wanted), default=0)
    return min(_MOST_WORKERS, max(1, most // cpus_per_task))


def cancel(name: str, wait_s: float) -> None:
    """Cancel all jobs of a name that this user has; wait a while until none is left."""
    own = ("--name", name, "--user", str(os.getuid()))
    ask("scancel", *own)
    until = time.monotonic() + wait_s
    while ask("squeue", "-h", *own) and time.monotonic() < until:
        time.sleep(0.1)


@contextmanager
def outside_of_a_job() -> Iterator[None]:
    """Hide from sbatch that this process is itself in a SLURM job, whose sizes it would inherit."""
    inside = "SLURM_JOB_ID" in os.environ
    own = [name for name in os.environ if name.startswith("SLURM_") and name not in _OF_THE_CLUSTER]
    hidden = {name: os.environ.pop(name) for name in own if inside}
    try:
        yield
    finally:
        os.environ.update(hidden)


def last_line(log: Path) -> str:
    """Return the last line of a job's log that is not empty; '' if there is none."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
