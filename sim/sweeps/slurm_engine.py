"""Runs chunks as jobs of a SLURM cluster, through submitit: one array a submission, one job a chunk.

Whether a chunk has ended is read from the file that its job leaves; SLURM is asked only which jobs are
gone without one. submitit itself asks sacct, and waits for ever for a killed job where there is none.
"""

from __future__ import annotations

import io
import logging
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from sim.settings import POSITIVE, TEXT, Rule, at_least, check_group, or_null
from sim.sweeps import slurm_queue
from sim.sweeps.chunk import Chunk
from sim.sweeps.elsewhere import home, run_in_job
from sim.sweeps.engine import Ended
from sim.sweeps.settings import SweepSettings
from sim.types import ConfigError

_LOOK_S = (0.2, 2.0)
_ASK_S = (1.0, 15.0)
_GRACE_S = {"COMPLETED": 30.0, "": 10.0}
_SHORT_GRACE_S = 3.0
"""How long a job's result may be on its way through a shared file system, by the job's last state;
'' is one that SLURM has forgotten."""
_CLOSE_S = 15.0
_ATTEMPTS, _BETWEEN_S = 3, 5.0
_BUSY = ("Socket timed out", "Unable to contact", "temporarily")
_RESERVED = {"array", "job-name", "output", "error", "open-mode"}


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(line, str) for line in value)


RULES: dict[str, Rule] = {
    "partition": or_null(TEXT),
    "account": or_null(TEXT),
    "qos": or_null(TEXT),
    "time_min": at_least(1),
    "cpus_per_task": at_least(1),
    "mem_gb": or_null(POSITIVE),
    "setup": (_is_texts, "must be a list of shell commands"),
    "sbatch": (lambda value: isinstance(value, Mapping), "must be a group of sbatch options"),
}


class SlurmEngine:
    """Runs chunks on a SLURM cluster whose nodes share the sweep's folder.

    Parameters
    ----------
    settings
        Of the sweep: its own ones are those of ``conf/sweep/slurm.yaml``; ``workers`` is how many jobs of a
        submission run at one time, None for as many as the partition's nodes hold.
    folder
        The sweep's folder; scripts and logs of the jobs go to ``slurm`` in it.

    Raises ConfigError if this machine cannot submit jobs, or a setting breaks its rule.
    """

    name = "slurm"
    chunks_per_worker = 2

    def __init__(self, settings: SweepSettings, folder: Path) -> None:
        own = settings.own
        check_group("sweep", own, RULES)
        submitit = _submitit()
        self.logs = Path(folder).absolute() / "slurm"
        if "%" in str(self.logs):
            raise ConfigError(f"sweep.dir = {folder}: must have no % where SLURM runs the sweep")
        fits = slurm_queue.num_workers(own["partition"], own["cpus_per_task"])
        self.workers = settings.workers or fits
        self._largest_array = slurm_queue.largest_array()
        self._job_name = f"greenroom-{sha256(str(self.logs).encode()).hexdigest()[:8]}"
        self._submitted = False
        self._open: dict[str, Chunk] = {}
        self._gone: dict[str, float] = {}
        self._news_s = self._asked_s = self._looked_s = time.monotonic()
        self._clear()
        self._executor = submitit.SlurmExecutor(self.logs)
        self._executor.update_parameters(**self._parameters(own))

    def _clear(self) -> None:
        """Stop what a sweep of this folder that was killed may have left running; drop its results."""
        if self.logs.exists():
            slurm_queue.cancel(self._job_name, _CLOSE_S)
        for left in self.logs.glob("*_result.pkl"):  # ids come again where SLURM starts anew
            left.unlink()

    def _parameters(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings by submitit's names for them."""
        plain = ("partition", "account", "qos", "cpus_per_task")
        given = {name: own[name] for name in plain if own[name] is not None}
        memory = (
            {} if own["mem_gb"] is None else {"mem": f"{max(1, round(own['mem_gb'] * 1024))}MB"}
        )
        options = {str(name).replace("_", "-"): told for name, told in own["sbatch"].items()}
        for name in _RESERVED & set(options):
            raise ConfigError(f"sweep.sbatch.{name}: is for the sweep itself to set")
        # A chunk that kills its node would kill the next one: whether to try again is for the sweep.
        again = {} if options.get("requeue") else {"no-requeue": True}
        options = {**options, **again}
        return {
            **given,
            **memory,
            "time": own["time_min"],
            "job_name": self._job_name,
            "array_parallelism": self.workers,
            "setup": own["setup"] or None,
            "use_srun": False,
            "additional_parameters": {k: v for k, v in options.items() if v not in (None, False)},
        }

    def submit(self, chunks: Sequence[Chunk]) -> None:
        """Submit chunks, in arrays as large as this SLURM takes them.

        Raises ConfigError in sbatch's words if it refuses.
        """
        for first in range(0, len(chunks), self._largest_array):
            part = list(chunks[first : first + self._largest_array])
            for attempt in range(1, _ATTEMPTS + 1):
                refused = self._submit_array(part)
                if refused is None:
                    break
                if attempt == _ATTEMPTS or not any(words in refused for words in _BUSY):
                    raise ConfigError(f"sweep.engine = slurm: sbatch refused: {refused}")
                time.sleep(_BETWEEN_S)
        self._news_s = time.monotonic()

    def _submit_array(self, chunks: list[Chunk]) -> str | None:
        """Submit an array; return why sbatch refused it, or None."""
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        self.logs.mkdir(parents=True, exist_ok=True)
        self._submitted = True
        places = [home()] * len(chunks)
        try:
            with slurm_queue.outside_of_a_job(), redirect_stderr(io.StringIO()):
                jobs = self._executor.map_array(run_in_job, chunks, places)
        except (FailedJobError, FailedSubmissionError) as error:
            return " ".join(str(error).replace("sbatch: error: ", "").split())
        self._open.update((job.job_id, chunk) for job, chunk in zip(jobs, chunks, strict=True))
        return None

    def wait(self, timeout_s: float) -> list[Ended]:
        """Return the chunks that ended; a job that is gone without a result is lost.

        Raises ConfigError if SLURM says of a job that it will never start it.
        """
        until = time.monotonic() + timeout_s
        while True:
            ended = [*self._finished(), *self._lost()]
            left_s = until - time.monotonic()
            if ended:
                self._news_s = time.monotonic()
            if ended or not self._open or left_s <= 0:
                return ended
            time.sleep(min(_LOOK_S[0], left_s))

    def _is_due(self, last_s: float, between: tuple[float, float]) -> bool:
        """Tell whether to look again: the less often, the longer nothing has happened."""
        now_s = time.monotonic()
        pause_s = min(max(between[0], (now_s - self._news_s) / 10), between[1])
        return bool(self._open) and now_s - last_s >= pause_s

    def _finished(self) -> list[Ended]:
        """Return the chunks whose jobs have left a result since."""
        if not self._is_due(self._looked_s, _LOOK_S):
            return []
        with suppress(OSError):  # has a network file system look again at what is in the folder
            os.utime(self.logs)
        there = set(os.listdir(self.logs))
        self._looked_s = time.monotonic()
        done = [job for job in self._open if f"{job}_0_result.pkl" in there]
        return [Ended(self._close(job), self._complaint(job)) for job in done]

    def _complaint(self, job: str) -> str | None:
        """Return what a job that ended by itself says went wrong, or None; clear away its pickles."""
        from submitit.core.utils import pickle_load

        result = self.logs / f"{job}_0_result.pkl"
        outcome, told = pickle_load(result)
        result.unlink(missing_ok=True)
        (self.logs / f"{job}_submitted.pkl").unlink(missing_ok=True)
        if outcome == "success":
            return None
        words = str(told).strip().splitlines()[-1:]
        return f"{''.join(words)} (SLURM job {job}; its log is {self._log(job)})"

    def _lost(self) -> list[Ended]:
        """Return the chunks whose jobs are gone, for some seconds already, and left no result."""
        if not self._is_due(self._asked_s, _ASK_S):
            return []
        stand = slurm_queue.standings(list(self._open))
        self._asked_s = now_s = time.monotonic()
        if stand is None:  # SLURM does not answer: nothing is known of any job
            return []
        lost = []
        for job in list(self._open):
            known = stand.get(job)
            if known is not None and known.state not in slurm_queue.OVER:
                self._gone.pop(job, None)
                if known.state == "PENDING" and known.reason in slurm_queue.NEVER:
                    raise ConfigError(
                        f"sweep.engine = slurm: job {job} can never start: {known.reason}"
                    )
                continue
            state = known.state if known else ""
            since_s = self._gone.setdefault(job, now_s)
            if now_s - since_s >= _GRACE_S.get(state, _SHORT_GRACE_S):
                lost.append(Ended(self._close(job), self._why_lost(job)))
        return lost

    def _why_lost(self, job: str) -> str:
        fate = slurm_queue.fate(job)
        log = self._log(job)
        if fate is None:
            return f"SLURM no longer knows job {job}; its log is {log}"
        where = f"SLURM job {job}{f' on {fate.node}' if fate.node else ''}"
        if not log.exists() and fate.state in ("FAILED", "COMPLETED"):
            return f"{fate} ({where}; it left no log {log}: do all nodes see this folder?)"
        words = slurm_queue.last_line(log) if str(fate).startswith("FAILED") else ""
        return f"{fate}{f': {words}' if words else ''} ({where}; its log is {log})"

    def _log(self, job: str) -> Path:
        return self.logs / f"{job}_0_log.err"

    def _close(self, job: str) -> Chunk:
        self._gone.pop(job, None)
        return self._open.pop(job)

    def close(self) -> None:
        """Cancel the jobs that are left, and wait until SLURM has let go of them."""
        if self._submitted:  # by name: a submission that was interrupted has no known id
            slurm_queue.cancel(self._job_name, _CLOSE_S)
        self._submitted = False
        self._open.clear()


def _submitit() -> Any:
    """Import submitit, quietly; ConfigError if jobs cannot be submitted from here."""
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "sweep.engine = slurm: sbatch is not found on this machine; start the sweep where jobs are"
            " submitted, or take sweep=pool"
        )
    try:
        import submitit
    except ModuleNotFoundError as error:
        if error.name != "submitit":
            raise
        raise ConfigError(
            "sweep.engine = slurm: submitit is not installed; pip install 'greenroom[slurm]', in a checkout:"
            " pip install -c constraints.txt -e '.[slurm]'"
        ) from None
    logging.getLogger("submitit").setLevel(logging.CRITICAL)  # it would write to stdout
    return submitit
