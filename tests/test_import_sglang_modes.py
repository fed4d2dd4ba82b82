from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sglang_engine import Engine, Job, per_pass, save

from traces.counts import ExpertCounts
from traces.importers.sglang_recorder import read
from traces.importers.told import NOTHING, Told
from traces.schema import Trace, TraceError

NAME = "expert_distribution_recorder_1764480000.25_{}.pt"


def three_jobs() -> list[Job]:
    return [Job(5, 4), Job(11, 3), Job(3, 6, arrival=4)]


def edited(tmp_path: Path, edit) -> Path:
    """A dump of two jobs, of which ``edit`` changes the records (index 2 decodes two tokens)."""
    engine = Engine([Job(4, 6), Job(3, 9)])
    records = engine.run()
    table = edit(records, engine.table)
    return save(tmp_path / "a.pt", records, engine.table if table is None else table)


def with_ids(number: int, value: int):
    def edit(records, table) -> None:
        records[number]["topk_ids_of_layer"][1, 1, 0] = value

    return edit


def with_value(number: int, key: str, value):
    def edit(records, table) -> None:
        records[number][key] = value

    return edit


def without(number: int, key: str):
    def edit(records, table) -> None:
        del records[number][key]

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            with_ids(2, 6),
            "record 2: layer 1, token 1, slot 0 is expert 6: must be < 6, the physical",
        ),
        (with_value(2, "forward_mode", 5), "record 2: forward_mode is 5: must be one of 1 EXTEND"),
        (with_value(2, "forward_mode", None), "record 2: forward_mode is None: must be a whole"),
        (with_value(2, "positions", [4]), "record 2: 1 positions, ids (3, 2, 8): must be 2 tokens"),
        (with_value(2, "positions", ["a", "b"]), "record 2: positions is <U1(2,): must be whole"),
        (
            with_value(0, "extend_seq_lens", [4, 2]),
            "record 0: extend_seq_lens are [4, 2]: must sum",
        ),
        (
            with_value(0, "positions", [0, 1, 3, 4, 0, 1, 2]),
            "record 0: token 2 has position 3 after 1: the positions of a prompt must rise by one",
        ),
        (
            with_value(2, "topk_ids_of_layer", torch.full((3, 2, 8), -1)),
            "record 2: no token has an expert: the pass was not recorded",
        ),
        (
            with_value(3, "topk_ids_of_layer", torch.zeros(3, 2, 1, dtype=torch.int32)),
            "record 3: tokens have 1 slots: must have 8, as before",
        ),
        (with_value(3, "forward_pass_id", 2), "record 3: forward pass 2 is there twice for a rank"),
        (with_value(3, "rank", "0"), "record 3: rank is '0': must be a whole number"),
        (lambda records, table: table[:2], "ids (3, 7, 8): must be 7 tokens in 2 layers"),
        (
            lambda records, table: table - 1,
            "last_physical_to_logical_map (3, 6): must name experts, 0..5",
        ),
        (lambda records, table: records.clear(), "no records: nothing was recorded"),
        (
            without(1, "topk_ids_of_layer"),
            "records with and without tokens: must be of one mode",
        ),
        (
            lambda records, table: np.zeros_like(table),
            "token 0 has an expert twice by the last map: experts were moved during the recording",
        ),
    ],
)
def test_broken_recordings_are_refused(tmp_path: Path, edit, message: str) -> None:
    path = edited(tmp_path, edit)
    with pytest.raises(TraceError) as error:
        read(path, NOTHING)
    assert message in str(error.value)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


def test_what_the_user_told_must_agree(tmp_path: Path) -> None:
    path = edited(tmp_path, lambda records, table: None)
    for told, message in (
        (Told(num_experts=8), "num_experts is 6: must be 8, as you said"),
        (Told(top_k=4), "top_k is 2: must be 4, as you said"),
        (Told(layer_indices=(0, 1, 2)), "layer 0 has no expert in any token"),
        (Told(layer_indices=(1, 2, 3)), "layer 0 has no expert in any token"),
        (Told(layer_indices=(2,)), "layer 1 has experts: must be one of the MoE layers"),
    ):
        with pytest.raises(TraceError, match=message):
            read(path, told)
    found = read(path, Told(layer_indices=(1, 2), native_top_k=4))
    assert isinstance(found, Trace)
    assert found.meta.layer_indices == (1, 2)
    assert "warning: top_k was forced from 4 to 2" in found.meta.notes


def test_files_that_are_no_recording(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    with pytest.raises(TraceError, match=r"no file in it ends in \.pt"):
        read(tmp_path, NOTHING)
    for content, message in (
        ({"model": 1}, "no 'logical_count', no 'records'"),
        ([1, 2], "no 'logical_count', no 'records'"),
        (
            {"records": {}, "last_physical_to_logical_map": torch.zeros(1, 1).int()},
            "must be a list",
        ),
        (
            {"records": [3], "last_physical_to_logical_map": torch.zeros(1, 1).int()},
            "record 0 is 3",
        ),
        ({"records": []}, "last_physical_to_logical_map is None"),
        ({"records": [Path("x")]}, "holds a Python object"),
    ):
        torch.save(content, path)
        with pytest.raises(TraceError, match=message):
            read(path, NOTHING)


def test_dumps_between_which_experts_moved_are_refused(tmp_path: Path) -> None:
    for at, engine in enumerate((Engine(three_jobs()), Engine(three_jobs()).with_copies(0))):
        save(tmp_path / f"a_{at}_0.pt", engine.run(first_pass=100 * at), engine.table)
    with pytest.raises(TraceError, match="experts were moved between the dumps"):
        read(tmp_path, NOTHING)


def test_mode_stat_gives_counts(tmp_path: Path) -> None:
    counts = np.random.default_rng(0).integers(0, 9, (5, 3, 6)).astype(np.int32)
    counts[:, 0] = counts[2] = 0
    dump = {"rank": 0, "logical_count": torch.from_numpy(counts)}
    torch.save(dump | {"average_utilization_rate_over_window": 0.5}, tmp_path / "a.pt")
    found = read(tmp_path / "a.pt", Told(model="toy", top_k=2))
    assert isinstance(found, ExpertCounts)
    np.testing.assert_array_equal(found.counts, counts[[0, 1, 3, 4], 1:])
    assert (found.layer_indices, found.unit, found.top_k) == ((1, 2), "forward pass", 2)
    assert "repaired: 1 of 5 samples without any use were dropped" in found.notes
    save(tmp_path / "b.pt", [], np.zeros((3, 6), dtype=int))
    with pytest.raises(TraceError, match="files of mode stat beside others"):
        read(tmp_path, NOTHING)
    torch.save(dump | {"logical_count": torch.zeros(3, 6)}, tmp_path / "b.pt")
    with pytest.raises(TraceError, match=r"logical_count is \(3, 6\): must be \[steps"):
        read(tmp_path, NOTHING)


@pytest.mark.parametrize("copies", [0, 3])
def test_mode_per_pass_gives_counts_of_experts(tmp_path: Path, copies: int) -> None:
    engines = [Engine(three_jobs(), seed=0) for _ in range(2)]
    table = engines[0].with_copies(copies).table
    engines[1].table = table
    engines[1].rng = np.random.default_rng(9)
    for rank, engine in enumerate(engines):
        save(tmp_path / NAME.format(rank), per_pass(engine.run(rank)), table)
    found = read(tmp_path, NOTHING)
    assert isinstance(found, ExpertCounts)
    expected = np.zeros((found.num_samples, 2, 6))
    numbers = sorted({r["forward_pass_id"] for e in engines for r in e.records if r["input_ids"]})
    for engine in engines:
        for job in engine.jobs:
            for _, number, _, ids in job.rows:
                for layer in range(2):
                    expected[numbers.index(number), layer, ids[layer]] += 1
    np.testing.assert_array_equal(found.counts, expected)


def test_ranks_that_counted_the_same_are_kept_once(tmp_path: Path) -> None:
    engine = Engine(three_jobs())
    records = per_pass(engine.run())
    for rank in range(2):
        save(tmp_path / NAME.format(rank), [r | {"rank": rank} for r in records], engine.table)
    one, both = read(tmp_path / NAME.format(0), NOTHING), read(tmp_path, NOTHING)
    assert isinstance(one, ExpertCounts)
    assert isinstance(both, ExpertCounts)
    np.testing.assert_array_equal(one.counts, both.counts)
    assert "repaired: 2 ranks counted the same; one was kept" in both.notes
    save(tmp_path / NAME.format(1), [records[0], records[0]], engine.table)
    with pytest.raises(TraceError, match="forward pass 0 is there twice"):
        read(tmp_path / NAME.format(1), NOTHING)
