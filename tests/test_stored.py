"""Traces that stay in their file: the same rows, the same runs, and memory that does not grow."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim import build
from sim.policies.oracle import MOST_CHOICES
from sim.simulate import simulate
from sim.types import ConfigError
from tests.configs import composed
from tests.trace_samples import make_meta, make_trace
from traces.schema import Provenance, Trace, TraceError, TraceMeta
from traces.store import TraceWriter, read_trace, write_trace
from traces.stored import KEPT_BYTES, StoredColumn, decoded_bytes, open_trace

LENGTHS = (9, 4, 14)
NUM_ROWS = sum(LENGTHS)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stored") / "t.parquet"
    write_trace(path, make_trace(lengths=LENGTHS), row_group_tokens=5)
    return path


def rows() -> st.SearchStrategy[object]:
    place = st.integers(-NUM_ROWS, NUM_ROWS - 1)
    return st.one_of(
        place,
        st.lists(place, max_size=9).map(lambda places: np.array(places, dtype=np.intp)),
        st.lists(place, min_size=1, max_size=9),
        st.builds(slice, place, place, st.sampled_from([None, 1, 2, -1])),
        st.lists(st.booleans(), min_size=NUM_ROWS, max_size=NUM_ROWS).map(np.array),
    )


@given(chosen=st.lists(rows(), max_size=6), kept=st.sampled_from([0, 300, KEPT_BYTES]))
def test_a_stored_column_is_indexed_as_an_array(file: Path, chosen: list, kept: int) -> None:
    whole, stored = read_trace(file), open_trace(file, kept_bytes=kept)
    for some in chosen:
        for name in ("expert_ids", "router_logits"):
            found, expected = getattr(stored, name)[some], getattr(whole, name)[some]
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected)


def test_an_open_trace_is_the_trace(file: Path) -> None:
    whole, stored = read_trace(file), open_trace(file)
    assert isinstance(stored.expert_ids, StoredColumn)
    assert not isinstance(whole.expert_ids, StoredColumn)
    assert stored.meta == whole.meta
    assert stored.columns == whole.columns
    for name in whole.columns:
        np.testing.assert_array_equal(np.asarray(getattr(stored, name)), getattr(whole, name))
    taken = stored.take(slice(3, 20))
    np.testing.assert_array_equal(taken.expert_weights, whole.expert_weights[3:20])
    assert decoded_bytes(file) == sum(
        getattr(whole, name).nbytes for name in whole.columns if name != "text"
    )


def test_rows_outside_are_an_error_and_bad_files_one_line(file: Path, tmp_path: Path) -> None:
    stored = open_trace(file)
    for wrong in (NUM_ROWS, -NUM_ROWS - 1, [0, NUM_ROWS]):
        with pytest.raises(IndexError, match=f"must be < {NUM_ROWS}"):
            stored.expert_ids[wrong]
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(TraceError, match=r"cut.parquet: not Parquet, or cut short"):
        open_trace(cut)
    with pytest.raises(TraceError, match=r"column 'stages' is missing; did you mean 'stage'\?"):
        open_trace(file, columns=["stages"])


@pytest.mark.parametrize("policy", ["lru", "saem", "cache_prior"])
def test_a_run_on_a_stored_trace_is_the_run_on_the_trace(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.parquet"
    trace = make_trace(make_meta(num_experts=8), lengths=(9, 6, 14, 11))
    write_trace(path, trace, row_group_tokens=5)
    config = composed(
        f"trace.path={path}",
        f"policy={policy}",
        "cache.ratio=0.5",
        "workload.batch_size=2",
        "calibration.requests=[0,1]",
    )
    plain, _ = simulate(config, None)
    monkeypatch.setattr(build, "_MOST_BYTES_IN_MEMORY", 0)
    build._read_trace.cache_clear()
    assert isinstance(build.load_trace(str(path)).expert_ids, StoredColumn)
    stored, _ = simulate(config, None)
    build._read_trace.cache_clear()
    assert stored == plain


def test_the_future_of_too_much_work_is_refused(
    small_trace_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MOST_CHOICES > 10**7
    for module in ("sim.bound", "sim.parts"):
        monkeypatch.setattr(f"{module}.MOST_CHOICES", 10)
    with pytest.raises(ConfigError, match=r"choices of experts in memory: must be at most 1e\+01"):
        simulate(composed(f"trace.path={small_trace_file}", "policy=belady"), None)
    summary, _ = simulate(composed(f"trace.path={small_trace_file}", "policy=lru"), None)
    assert summary["belady_hit_rate"] is None
    assert "choices of experts in memory" in str(summary["notes"])


# -- larger than memory ----------------------------------------------------------------------------

SHAPE = {"num_layers": 58, "num_experts": 512, "top_k": 8}
TOKENS, REQUESTS = 2048, 12
CAPPED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
from traces.store import iter_trace
path = sys.argv[1]
print(sum(len(chunk) for chunk in iter_trace(path)))
from sim.cli import main
if main(["stats", path, "--curve-tokens=256"]):
    sys.exit("stats failed")
sys.exit(main([
    "sim", f"trace.path={path}", "model=deepseek_r1_ud_q2_k_xl", "machine=gh200", "policy=lru",
    "cache.ratio=0.0625", "workload.requests=[1,2]", "workload.length=[64,64]",
    "output.belady=false", f"hydra.run.dir={sys.argv[2]}",
]))
"""


@pytest.fixture(scope="module")
def large_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write routing and logits of 1.4 GiB; all alike, so that it takes little time and disk."""
    path = tmp_path_factory.mktemp("large") / "large.parquet"
    meta = TraceMeta(
        model="large",
        layer_indices=tuple(range(3, 61)),
        provenance=Provenance("synthetic", "tests"),
        weight_semantics="none",
        sorted_by_weight=False,
        **SHAPE,
    )
    position = np.arange(TOKENS, dtype=np.int32)
    slots = np.arange(8, dtype=np.uint16)
    ids = (position[:, None, None].astype(np.uint16) // 16 * 8 + slots) % 512
    request = Trace(
        meta,
        request_id=np.zeros(TOKENS, dtype=np.int32),
        position=position,
        phase=(position >= 64).astype(np.uint8),
        step=np.maximum(position - 63, 0),
        expert_ids=np.ascontiguousarray(np.broadcast_to(ids, (TOKENS, 58, 8)).astype(np.uint16)),
        router_logits=np.zeros((TOKENS, 58, 512), dtype=np.float16),
    )
    with TraceWriter(path, meta, row_group_tokens=256) as writer:
        for number in range(REQUESTS):
            writer.append(replace(request, request_id=np.full(TOKENS, number, dtype=np.int32)))
    return path


def test_a_trace_larger_than_memory_is_read_measured_and_simulated(
    large_file: Path, tmp_path: Path
) -> None:
    assert decoded_bytes(large_file) > 1.2 * 2**30
    told = subprocess.run(
        [sys.executable, "-c", CAPPED, str(large_file), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=300,
        env={"PATH": "/usr/bin:/bin", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"},
    )
    assert told.returncode == 0, told.stderr
    assert told.stdout.startswith(f"{TOKENS * REQUESTS}\n")
    assert "Does it suit expert offloading?" in told.stdout
    assert (tmp_path / "out" / "summary.json").exists()


def test_the_same_trace_in_memory_would_not_fit(large_file: Path) -> None:
    reads = ["from traces.store import read_trace", "read_trace(sys.argv[1])"]
    code = [*CAPPED.splitlines()[1:3], *reads]
    told = subprocess.run(
        [sys.executable, "-c", "\n".join(code), str(large_file)],
        capture_output=True,
        text=True,
        timeout=300,
        env={"PATH": "/usr/bin:/bin", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"},
    )
    assert told.returncode != 0, "the cap is real"
    assert "memory" in told.stderr.lower() or "alloc" in told.stderr.lower(), told.stderr
