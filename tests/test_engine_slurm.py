"""Sweeps on a SLURM cluster of two nodes, by its real daemons; skipped where there is no SLURM."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from sim.composing import compose_config
from sim.sweeps import slurm_engine, slurm_queue
from sim.sweeps.settings import SweepSettings, settings_of
from sim.sweeps.slurm_engine import SlurmEngine
from sim.types import ConfigError
from tests.cluster_lock import cluster_lock
from tests.slurm_cluster import MAX_ARRAY, SlurmCluster, slurm_cluster, why_not
from tests.sweep_chunks import (
    interrupted,
    make_chunks,
    nodes,
    results,
    results_here,
    sweep,
    swept_points,
    wait_for,
    wait_for_marks,
    write_policy,
)

pytestmark = pytest.mark.xdist_group("cluster")


def settings(*overrides: str) -> SweepSettings:
    return settings_of(compose_config("sweep", ["sweep=slurm", *overrides])["sweep"])


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with cluster_lock(), ExitStack() as stack:
        try:
            running = stack.enter_context(slurm_cluster())
        except (TimeoutError, OSError) as error:
            pytest.skip(f"SLURM does not start here: {error}")
        yield running


@pytest.fixture
def user(cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Be a user of the cluster, in a folder with a policy of one's own."""
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, cluster.env[name])
    write_policy(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("marking", None)
    assert cluster.ask("squeue", "-h") == ""


def test_chunks_run_on_both_nodes_and_give_the_bytes_of_a_run_here(
    user: Path, small_trace_file: Path
) -> None:
    ways = [["well"]] * (MAX_ARRAY + 1)
    chunks = make_chunks(user / "sweep", small_trace_file, user / "marks", ways)
    engine = SlurmEngine(settings("sweep.partition=debug"), user / "sweep")
    try:
        engine.submit(chunks)
        ended = wait_for(engine, len(chunks))
    finally:
        engine.close()
    assert [end.lost for end in ended] == [None] * len(chunks)
    assert nodes(user / "marks") == {"n1", "n2"}
    assert engine.workers == 2
    arrays = {log.name.split("_")[0] for log in (user / "sweep/slurm").glob("*_log.err")}
    assert len(arrays) == 2, "one submission more than the longest array that this SLURM takes"
    (user / "here").mkdir()
    assert results(user / "sweep") == results_here(chunks, user / "here")


def test_a_killed_a_cancelled_and_a_faulty_chunk_are_lost_and_say_why(
    user: Path, cluster: SlurmCluster, small_trace_file: Path
) -> None:
    folder = user / "sweep"
    ways = [["well", "killed", "well"], ["slowly"]]
    chunks = make_chunks(folder, small_trace_file, user / "marks", ways)
    engine = SlurmEngine(settings(), folder)
    try:
        engine.submit(chunks)
        (killed,) = wait_for(engine, 1)
        assert killed.chunk == chunks[0]
        assert killed.lost is not None
        assert killed.lost.startswith("killed by signal 9 (SLURM job ")
        assert str(folder / "slurm") in killed.lost
        assert list(results(folder)) == ["0"]
        (job,) = cluster.ask("squeue", "-h", "-r", "-o", "%i").split()
        cluster.ask("scancel", job)
        (cancelled,) = wait_for(engine, 1)
        assert cancelled.chunk == chunks[1]
        assert cancelled.lost is not None
        assert cancelled.lost.startswith(f"CANCELLED (SLURM job {job} on n")
    finally:
        engine.close()


def test_a_lost_node_is_told_and_the_other_goes_on(
    user: Path, cluster: SlurmCluster, small_trace_file: Path
) -> None:
    folder = user / "sweep"
    chunks = make_chunks(folder, small_trace_file, user / "marks", [["slowly"]])
    engine = SlurmEngine(settings(), folder)
    try:
        engine.submit(chunks)
        node = ""
        (node,) = wait_for_marks(user / "marks", 1, engine)
        cluster.ask("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
        (ended,) = wait_for(engine, 1)
        assert ended.lost is not None
        assert ended.lost.startswith("NODE_FAIL (SLURM job ")
        engine.submit(make_chunks(folder, small_trace_file, user / "marks", [["well"]], first=1))
        assert wait_for(engine, 1)[0].lost is None
        assert list(results(folder)) == ["1"]
    finally:
        engine.close()
        cluster.ask("scontrol", "update", f"nodename={node}", "state=resume")


def test_close_leaves_no_job_nor_does_a_sweep_that_was_killed(
    user: Path, cluster: SlurmCluster, small_trace_file: Path
) -> None:
    chunks = make_chunks(user / "sweep", small_trace_file, user / "marks", [["slowly"]] * 4)
    killed = SlurmEngine(settings(), user / "sweep")
    killed.submit(chunks)
    wait_for_marks(user / "marks", 1, killed)
    assert len(cluster.ask("squeue", "-h", "-r").splitlines()) == 4
    engine = SlurmEngine(settings(), user / "sweep")
    assert cluster.ask("squeue", "-h") == ""
    engine.submit(chunks[:1])
    engine.close()
    assert cluster.ask("squeue", "-h") == ""
    assert engine.wait(0.1) == []
    engine.close()


def test_jobs_that_slurm_forgot_are_lost_but_not_while_it_does_not_answer(
    user: Path, cluster: SlurmCluster, small_trace_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(slurm_engine._GRACE_S, "", 1.0)
    chunks = make_chunks(user / "sweep", small_trace_file, user / "marks", [["slowly"]])
    engine = SlurmEngine(settings(), user / "sweep")
    try:
        engine.submit(chunks)
        wait_for_marks(user / "marks", 1, engine)
        cluster.stop_daemon("slurmctld")
        assert engine.wait(3.0) == []
        cluster.start_controller(forget=True)
        (ended,) = wait_for(engine, 1)
        assert ended.lost is not None
        assert ended.lost.startswith("SLURM no longer knows job ")
    finally:
        engine.close()
        cluster.wait_until_idle()


def test_what_slurm_refuses_is_one_line(
    user: Path,
    small_trace_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ConfigError, match=r"sweep.partition = debugg: .*did you mean 'debug'\?"):
        SlurmEngine(settings("sweep.partition=debugg"), user)
    with pytest.raises(ConfigError, match=r"sweep.time_min = 0: must be a whole number >= 1"):
        SlurmEngine(settings("sweep.time_min=0"), user)
    with pytest.raises(ConfigError, match=r"sweep.sbatch.job-name: is for the sweep itself"):
        SlurmEngine(settings("+sweep.sbatch.job_name=mine"), user)
    with pytest.raises(ConfigError, match="must have no %"):
        SlurmEngine(settings(), user / "a%b")
    chunks = make_chunks(user / "sweep", small_trace_file, user / "marks", [["well"]])
    engine = SlurmEngine(settings("+sweep.sbatch.nodelist=n7"), user / "sweep")
    with pytest.raises(ConfigError, match=r"sbatch refused: .*node") as refused:
        engine.submit(chunks)
    assert "\n" not in str(refused.value)
    engine.close()
    engine = SlurmEngine(settings("sweep.partition=brief", "sweep.time_min=9"), user / "sweep")
    engine.submit(chunks)
    with pytest.raises(ConfigError, match="can never start: PartitionTimeLimit"):
        wait_for(engine, 1, 20)
    engine.close()
    assert capfd.readouterr() == ("", "")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"sweep.engine = slurm: sbatch is not found"):
        SlurmEngine(settings(), user)


def test_a_whole_sweep_gives_the_table_of_the_pool_though_a_worker_is_killed(
    user: Path, small_trace_file: Path
) -> None:
    points = swept_points(user, small_trace_file)
    sweep(user / "slurm", "sweep=slurm", "sweep.chunk=4", *points)
    assert not (user / "once").exists(), "no worker was killed"
    assert nodes(user / "marks") == {"n1", "n2"}
    sweep(user / "pool", "sweep=pool", "sweep.workers=1", *points)
    tables = [(user / name / "results.parquet").read_bytes() for name in ("slurm", "pool")]
    assert tables[0] == tables[1]


def test_a_sweep_that_is_interrupted_cancels_its_jobs(
    user: Path, cluster: SlurmCluster, small_trace_file: Path
) -> None:
    points = [*swept_points(user, small_trace_file), "policy.cache.ends=slowly"]
    assert interrupted(user, "sweep=slurm", *points) == 130
    assert cluster.ask("squeue", "-h") == ""


def test_a_sweep_within_a_job_hides_that_from_sbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "100")
    with slurm_queue.outside_of_a_job():
        assert os.environ["SLURM_MEM_PER_CPU"] == "100", "set by a user, not by a job"
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with slurm_queue.outside_of_a_job():
        left = {name for name in os.environ if name.startswith("SLURM_")}
    assert left == {"SLURM_CONF"}
    assert os.environ["SLURM_JOB_ID"] == "7"


def test_accounts_tell_the_end_of_a_job_that_the_controller_forgot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, script in (("scontrol", "exit 1"), ("sacct", "echo 'CANCELLED by 0|0:15|n2'")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert slurm_queue.fate("3_1") == slurm_queue.Fate("CANCELLED", 0, 15, "n2")
    (tmp_path / "sacct").write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    assert slurm_queue.fate("3_1") is None
