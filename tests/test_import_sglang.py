from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sglang_engine import DECODE, Engine, Job, save

from traces.importers.sglang_recorder import read
from traces.importers.told import NOTHING, Told
from traces.schema import DECODE as DECODED
from traces.schema import Trace, TraceError
from traces.store import read_trace, write_trace

NAME = "expert_distribution_recorder_1764480000.25_{}.pt"


def three_jobs() -> list[Job]:
    return [Job(5, 4), Job(11, 3), Job(3, 6, arrival=4)]


def imported(path: Path, told: Told = NOTHING) -> Trace:
    trace = read(path, told)
    assert isinstance(trace, Trace)
    return trace


def rows_of(trace: Trace) -> dict[tuple, list]:
    """The requests of a trace by what tells them apart: first position and the tokens."""
    found = {}
    for request in np.unique(trace.request_id).tolist():
        own = trace.take(trace.request_id == request)
        prompt = int((own.phase != DECODED).sum())
        rows = zip(
            own.position.tolist(), own.token_id.tolist(), own.expert_ids.tolist(), strict=True
        )
        found[tuple(own.token_id.tolist())] = [prompt, *rows]
    return found


def truth_of(jobs: list[Job]) -> dict[tuple, list]:
    return {
        tuple(token for _, _, token, _ in job.rows): [
            job.prompt - job.cached,
            *((position, token, ids.tolist()) for position, _, token, ids in job.rows),
        ]
        for job in jobs
    }


def notes_of(trace: Trace) -> str:
    return "\n".join(trace.meta.notes)


def test_a_per_token_recording_becomes_a_trace(tmp_path: Path) -> None:
    jobs = three_jobs()
    engine = Engine(jobs)
    trace = imported(save(tmp_path / NAME.format(0), engine.run(), engine.table), Told(model="toy"))
    assert rows_of(trace) == truth_of(jobs)
    meta = trace.meta
    assert (meta.num_experts, meta.top_k, meta.layer_indices, meta.model) == (6, 2, (1, 2), "toy")
    assert (meta.provenance.kind, meta.weight_semantics) == ("imported", "none")
    assert "repaired: 1 dense layers were dropped, 0" in notes_of(trace)
    assert "requests were rebuilt" in notes_of(trace)
    passes = sorted({number for job in jobs for _, number, _, _ in job.rows})
    steps = {(p, t): passes.index(n) for job in jobs for p, n, t, _ in job.rows}
    found = zip(trace.position.tolist(), trace.token_id.tolist(), strict=True)
    assert trace.step.tolist() == [steps[key] for key in found]
    assert (np.diff(trace.step) >= 0).all()
    write_trace(tmp_path / "t.parquet", trace)
    assert read_trace(tmp_path / "t.parquet").meta == meta


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    jobs=st.lists(
        st.builds(
            Job,
            prompt=st.integers(2, 20),
            output=st.integers(1, 8),
            cached=st.sampled_from([0, 0, 1]),
            arrival=st.integers(0, 12),
        ),
        min_size=1,
        max_size=6,
    ),
    chunk=st.integers(3, 12),
    mixed=st.booleans(),
)
def test_every_row_goes_to_its_request(tmp_path_factory, jobs, chunk, mixed) -> None:
    jobs = [Job(job.prompt, job.output, job.cached, job.arrival) for job in jobs]
    engine = Engine(jobs, chunk=chunk, mixed=mixed)
    path = tmp_path_factory.mktemp("x") / "a.pt"
    trace = imported(save(path, engine.run(), engine.table))
    found, truth = rows_of(trace), truth_of(jobs)
    total = [sum(len(rows) - 1 for rows in each.values()) for each in (found, truth)]
    assert total[0] == total[1]  # each row once
    if "by order alone" not in notes_of(trace):
        assert found == truth


def test_copies_of_experts_are_turned_into_experts(tmp_path: Path) -> None:
    jobs = three_jobs()
    engine = Engine(jobs).with_copies(3)
    trace = imported(save(tmp_path / NAME.format(0), engine.run(), engine.table))
    assert rows_of(trace) == truth_of(jobs)
    assert trace.meta.num_experts == 6
    assert "ids of 9 physical experts, 3 of them copies" in notes_of(trace)
    assert "warning: by the last map" in notes_of(trace)


def test_ranks_with_requests_of_their_own_share_the_steps(tmp_path: Path) -> None:
    engines = [Engine(three_jobs(), seed=rank) for rank in range(2)]
    for rank, engine in enumerate(engines):
        save(tmp_path / NAME.format(rank), engine.run(rank), engine.table)
    trace = imported(tmp_path)
    assert rows_of(trace) == truth_of([job for engine in engines for job in engine.jobs])
    assert trace.num_requests == 6
    assert trace.step.max() == len({r["forward_pass_id"] for e in engines for r in e.records}) - 1


def test_ranks_that_run_the_same_tokens_count_once(tmp_path: Path) -> None:
    jobs = three_jobs()
    engine = Engine(jobs)
    records = engine.run()
    save(tmp_path / NAME.format(0), records, engine.table)
    twin = [record | {"rank": 1} for record in records]
    save(tmp_path / NAME.format(1), twin, engine.table)
    trace = imported(tmp_path)
    assert rows_of(trace) == truth_of(jobs)
    assert "repaired: 1 of 2 ranks ran the same tokens as another; dropped" in notes_of(trace)
    other = twin[0]["topk_ids_of_layer"].clone()
    other[1, 0, :2] = torch.tensor([5, 4]) if other[1, 0, 0] < 4 else torch.tensor([0, 1])
    save(
        tmp_path / NAME.format(1), [twin[0] | {"topk_ids_of_layer": other}, *twin[1:]], engine.table
    )
    assert "warning: ranks 0 and 1 ran the same tokens, but " in notes_of(imported(tmp_path))


def test_ranks_that_recorded_the_tokens_of_another_are_refused(tmp_path: Path) -> None:
    engine = Engine(three_jobs())
    records = engine.run()
    save(tmp_path / NAME.format(0), records, engine.table)
    wrong = [r | {"rank": 1, "input_ids": [t + 1 for t in r["input_ids"]]} for r in records]
    save(tmp_path / NAME.format(1), wrong, engine.table)
    with pytest.raises(TraceError, match="ranks 0 and 1 ran other tokens, but recorded the same"):
        read(tmp_path, NOTHING)


def test_a_recording_may_begin_while_requests_run(tmp_path: Path) -> None:
    jobs = [Job(4, 6), Job(3, 9)]
    engine = Engine(jobs)
    late = engine.run()[3:]
    assert all(record["forward_mode"] == DECODE for record in late)
    trace = imported(save(tmp_path / "a.pt", late, engine.table))
    for job in jobs:
        job.rows = [row for row in job.rows if row[1] >= 3]
        job.cached = job.prompt  # no prompt rows
    assert rows_of(trace) == truth_of(jobs)
    assert "warning: 2 requests began before the recording" in notes_of(trace)


def test_a_server_that_was_started_anew_shares_no_requests(tmp_path: Path) -> None:
    first, second = Engine([Job(4, 9)]), Engine([Job(5, 3)], seed=1)
    save(tmp_path / "a_1_0.pt", first.run()[:4], first.table)
    save(tmp_path / "a_2_0.pt", second.run(), second.table)
    first.jobs[0].rows = [row for row in first.jobs[0].rows if row[1] < 4]
    trace = imported(tmp_path)
    assert rows_of(trace) == truth_of([*first.jobs, *second.jobs])
    assert trace.step.tolist() == [0] * 4 + [1, 2, 3] + [4] * 5 + [5, 6]


def test_rows_that_pad_a_pass_are_dropped(tmp_path: Path) -> None:
    jobs = three_jobs()
    engine = Engine(jobs)
    records = engine.run()
    padded = 0
    for record in records:
        record["input_ids"] = record["input_ids"] + [0, 0]
        record["positions"] = record["positions"] + [0, 0]
        ids = record["topk_ids_of_layer"]
        record["topk_ids_of_layer"] = torch.cat([ids, ids.new_full((3, 2, 8), -1)], dim=1)
        padded += 2
    trace = imported(save(tmp_path / "a.pt", records, engine.table))
    assert rows_of(trace) == truth_of(jobs)
    assert f"repaired: {padded} rows of padding were dropped" in notes_of(trace)


def test_requests_of_one_length_are_linked_with_a_warning(tmp_path: Path) -> None:
    engine = Engine([Job(4, 2), Job(4, 5)])
    trace = imported(save(tmp_path / "a.pt", engine.run(), engine.table))
    assert "warning: 1 rows were linked by order alone" in notes_of(trace)


def test_a_cached_prefix_has_no_rows(tmp_path: Path) -> None:
    jobs = [Job(4, 3), Job(12, 3, cached=7)]
    engine = Engine(jobs)
    trace = imported(save(tmp_path / "a.pt", engine.run(), engine.table))
    assert rows_of(trace) == truth_of(jobs)
    assert "1 prompts begin after a cached prefix" in notes_of(trace)
