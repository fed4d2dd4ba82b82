"""Sweeps on a Ray cluster of two nodes, by its real daemons; skipped where there is no Ray."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from sim.composing import compose_config
from sim.sweeps.ray_engine import RayEngine
from sim.sweeps.settings import SweepSettings, settings_of
from sim.types import ConfigError
from tests.cluster_lock import cluster_lock
from tests.ray_cluster import RayCluster, ray_cluster, why_not
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
    return settings_of(compose_config("sweep", ["sweep=ray", *overrides])["sweep"])


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with cluster_lock(), ExitStack() as stack:
        try:
            running = stack.enter_context(ray_cluster())
        except (TimeoutError, OSError, RuntimeError) as error:
            pytest.skip(f"Ray does not start here: {error}")
        yield running


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Be a user in a folder with a policy of one's own."""
    write_policy(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("marking", None)


@pytest.fixture
def engine(cluster: RayCluster, user: Path) -> Iterator[RayEngine]:
    import ray

    made = RayEngine(settings(f"sweep.address={cluster.address}"), user / "sweep")
    yield made
    made.close()
    assert not ray.is_initialized()


def test_chunks_run_on_both_nodes_and_give_the_bytes_of_a_run_here(
    engine: RayEngine, user: Path, small_trace_file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    chunks = make_chunks(user / "sweep", small_trace_file, user / "marks", [["well"]] * 4)
    assert engine.workers == 2
    engine.submit(chunks)
    ended = wait_for(engine, len(chunks))
    assert [end.lost for end in ended] == [None] * len(chunks)
    assert len(nodes(user / "marks")) == 2
    engine.close()
    assert capfd.readouterr() == ("", "")
    (user / "here").mkdir()
    assert results(user / "sweep") == results_here(chunks, user / "here")


def test_a_killed_chunk_is_lost_and_the_next_one_runs(
    engine: RayEngine, user: Path, small_trace_file: Path
) -> None:
    ways = [["well", "killed", "well"], ["well"]]
    chunks = make_chunks(user / "sweep", small_trace_file, user / "marks", ways)
    engine.submit(chunks)
    ended = {end.chunk.points[0].number: end.lost for end in wait_for(engine, 2)}
    assert ended[3] is None
    assert ended[0] is not None
    assert ended[0].startswith("its process was killed or crashed (Ray: WorkerCrashedError")
    assert set(results(user / "sweep")) == {"0", "3"}


def test_close_stops_what_runs(engine: RayEngine, user: Path, small_trace_file: Path) -> None:
    chunks = make_chunks(user / "sweep", small_trace_file, user / "marks", [["slowly"]] * 3)
    engine.submit(chunks)
    wait_for_marks(user / "marks", 2, engine)
    pids = [int(mark.name.partition("-")[2]) for mark in (user / "marks").iterdir()]
    engine.close()
    for pid in pids:
        wait_until_gone(pid)
    assert engine.wait(0.1) == []
    assert results(user / "sweep") == {}
    engine.close()


def wait_until_gone(pid: int) -> None:
    until = time.monotonic() + 20
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < until, f"process {pid} still runs"
        time.sleep(0.1)


def test_a_whole_sweep_gives_the_table_of_the_pool_though_a_worker_is_killed(
    cluster: RayCluster, user: Path, small_trace_file: Path
) -> None:
    points = swept_points(user, small_trace_file)
    here = (f"sweep.address={cluster.address}", "sweep.chunk=4")
    told = sweep(user / "ray", "sweep=ray", *here, *points)
    assert "raylet" not in told, "Ray's own words are no part of a sweep's output"
    assert not (user / "once").exists(), "no worker was killed"
    assert len(nodes(user / "marks")) == 2
    sweep(user / "pool", "sweep=pool", "sweep.workers=1", *points)
    tables = [(user / name / "results.parquet").read_bytes() for name in ("ray", "pool")]
    assert tables[0] == tables[1]


def test_a_sweep_that_is_interrupted_stops_its_tasks(
    cluster: RayCluster, user: Path, small_trace_file: Path
) -> None:
    points = [*swept_points(user, small_trace_file), "policy.cache.ends=slowly"]
    assert interrupted(user, "sweep=ray", f"sweep.address={cluster.address}", *points) == 130
    for mark in (user / "marks").iterdir():
        wait_until_gone(int(mark.name.partition("-")[2]))


def test_what_cannot_work_is_one_line(
    cluster: RayCluster, user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    address = f"sweep.address={cluster.address}"
    with pytest.raises(ConfigError, match=r"sweep.cpus_per_task = 2: no node .* largest has 1"):
        RayEngine(settings(address, "sweep.cpus_per_task=2"), user)
    assert not ray.is_initialized()
    with pytest.raises(ConfigError, match=r"sweep.address = here: .*cannot be reached") as refused:
        RayEngine(settings("sweep.address=here"), user)
    assert "\n" not in str(refused.value)


def test_without_ray_it_is_told_what_to_install(
    user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"ray is not installed; pip install 'greenroom\[ray\]'"):
        RayEngine(settings(), user)


def test_without_an_address_a_cluster_is_started_here_and_ended(
    cluster: RayCluster, user: Path, small_trace_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    engine = RayEngine(settings("sweep.workers=1"), user / "sweep")
    try:
        assert ray.nodes()[0]["NodeID"] not in cluster.node_ids()
        chunks = make_chunks(user / "sweep", small_trace_file, user / "marks", [["well"]] * 2)
        engine.submit(chunks)
        assert [end.lost for end in wait_for(engine, 2)] == [None, None]
    finally:
        engine.close()
    assert not ray.is_initialized()


def test_a_lost_node_is_told(
    cluster: RayCluster, engine: RayEngine, user: Path, small_trace_file: Path
) -> None:
    chunks = make_chunks(user / "sweep", small_trace_file, user / "marks", [["slowly"]] * 2)
    engine.submit(chunks)
    wait_for_marks(user / "marks", 2, engine)
    cluster.kill_second_node()
    (ended,) = wait_for(engine, 1)
    assert ended.lost is not None
    assert "node" in ended.lost or "killed" in ended.lost
