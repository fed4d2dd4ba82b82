"""Parts of a trace, named behind its path."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sim.build import load_trace
from sim.simulate import file_sha256, simulate
from sim.stats_cli import open_source
from tests.configs import composed
from traces.part import split_part
from traces.schema import DECODE, PREFILL, TraceError, validate
from traces.store import read_trace

TINY = "pkg://traces.tiny/trace.parquet"


def test_some_layers_are_those_of_the_whole() -> None:
    whole, part = load_trace(TINY), load_trace(f"{TINY}#layers=1:8:3")
    validate(part, "part")
    assert part.meta.layer_indices == whole.meta.layer_indices[1:8:3]
    assert (part.expert_ids == whole.expert_ids[:, 1:8:3]).all()
    assert whole.expert_weights is not None
    assert part.expert_weights is not None
    assert (part.expert_weights == whole.expert_weights[:, 1:8:3]).all()
    assert part.next_gate_ids is None  # of another layer than the next one here
    assert part.text == whole.text
    assert "layers 1:8:3 of 8" in part.meta.notes[-1]


def test_requests_of_other_lengths_hold_the_same_rows() -> None:
    whole, part = load_trace(TINY), load_trace(f"{TINY}#request_tokens=1000")
    validate(part, "part")
    assert (part.expert_ids == whole.expert_ids).all()
    assert part.num_requests == -(-len(whole) // 1000)
    assert np.flatnonzero(part.phase == PREFILL).tolist() == list(range(0, len(whole), 1000))
    assert (part.phase[1:1000] == DECODE).all()


def test_a_part_is_told_from_the_whole_and_kept() -> None:
    path = f"{TINY}#layers=:4,request_tokens=500"
    assert load_trace(path) is load_trace(path)
    assert len({file_sha256(TINY), file_sha256(path), file_sha256(f"{TINY}#layers=:4")}) == 3


def test_a_part_is_run_and_measured() -> None:
    path = f"{TINY}#layers=0:8:4,request_tokens=100"
    config = composed(f"trace.path='{path}'", "workload.requests=[4,6]", "cache.ratio=0.5")
    summary, tables = simulate(config)
    assert summary["output_tokens"] == 200
    assert sum(row[8] for row in tables.steps.rows) == 200 * 2 * 4  # accesses: layers x top-k
    assert open_source(f"{TINY}#layers=0:8:4").meta.num_layers == 2  # as greenroom stats reads it


def test_a_file_whose_name_has_the_mark_is_itself(small_trace_file: Path, tmp_path: Path) -> None:
    odd = tmp_path / "a#layers=0:1"
    odd.write_bytes(small_trace_file.read_bytes())
    assert split_part(str(odd)) == (str(odd), None)
    assert load_trace(str(odd)).meta == read_trace(small_trace_file).meta


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("layer=0:4", "named by layers or request_tokens; did you mean 'layers'?"),
        ("layers=0-4", "must be FIRST:END or FIRST:END:STEP"),
        ("layers=0:4:0", "must be FIRST:END or FIRST:END:STEP"),
        ("layers=8:9", "none of its 8 layers"),
        ("request_tokens=0", "must be a number of tokens >= 1"),
        ("", "named by layers or request_tokens"),
    ],
)
def test_a_part_that_is_none_is_refused(words: str, message: str) -> None:
    with pytest.raises(TraceError) as caught:
        load_trace(f"{TINY}#{words}")
    assert message in str(caught.value)
