from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from traces.importers.megatron_counts import read
from traces.importers.told import NOTHING, Told
from traces.schema import TraceError

EIGHT = Told(num_experts=8, model="toy")


def routed(tokens: int, seed: int) -> np.ndarray:
    """Uses of 8 experts by tokens of top-2, odd enough to be no multiples of 16."""
    rng = np.random.default_rng(seed)
    chosen = rng.random((tokens, 8)).argsort(axis=1)[:, :2]
    return np.bincount(chosen.ravel(), minlength=8)


def whole(groups: int = 1) -> np.ndarray:
    """Uses [groups, iterations 2, layers 2, micro-batches 3, experts 8]."""
    cells = [routed(21, seed) for seed in range(groups * 12)]
    return np.array(cells).reshape(groups, 2, 2, 3, 8)


def lines_of(counts: np.ndarray) -> list[dict]:
    """Records of one rank of its part of the counts, [iterations, layers, micro-batches, local]."""
    return [
        {"iter": 100 * i, "block": "decoder", "layer": layer + 1, "tpe": counts[i, layer].tolist()}
        for i in range(len(counts))
        for layer in range(2)
    ]


def write(folder: Path, counts: np.ndarray, ranks: int) -> Path:
    """Write the files of all groups, each of so many ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = [part for group in counts for part in np.split(group, ranks, axis=-1)]
    for rank, part in enumerate(parts):
        save(folder / f"rank{rank}.jsonl", lines_of(part))
    return folder


def save(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize(("groups", "ranks"), [(1, 1), (1, 4), (2, 2), (3, 1)])
def test_ranks_are_joined_to_all_experts(tmp_path: Path, groups: int, ranks: int) -> None:
    counts = whole(groups)
    write(tmp_path / "save" / "tokens_per_expert", counts, ranks)
    found = read(tmp_path / "save", EIGHT)
    expected = counts.sum(axis=0).transpose(0, 2, 1, 3).reshape(6, 2, 8)
    np.testing.assert_array_equal(found.counts, expected)
    assert (found.layer_indices, found.unit) == ((1, 2), "micro-batch")
    replicas = f"warning: {groups} groups of ranks were summed as replicas"
    assert any(note.startswith(replicas) for note in found.notes) == (groups > 1)
    assert not any("different numbers of tokens" in note for note in found.notes)


def test_what_is_suspicious_is_told(tmp_path: Path) -> None:
    dropped = whole()
    dropped[0, 0, 1, 2, 3] -= 1
    notes = "\n".join(read(write(tmp_path / "a", dropped, 2), EIGHT).notes)
    assert "count different numbers of tokens" in notes
    padded = -(-whole() // 16) * 16
    notes = "\n".join(read(write(tmp_path / "b", padded, 2), EIGHT).notes)
    assert "all counts are multiples of 16" in notes
    found = read(write(tmp_path / "c", whole(), 1), Told(num_experts=8, layer_indices=(1, 2, 3)))
    assert "warning: only 2 of the 3 MoE layers are in the file" in found.notes


def test_drafts_and_restarts_are_repaired(tmp_path: Path) -> None:
    records = lines_of(whole()[0])
    draft = records[0] | {"block": "mtp", "mtp_idx": 0}
    twice = records[1] | {"tpe": [[9] * 8] * 3}
    found = read(save(tmp_path / "rank0.jsonl", [twice, draft, *records]), EIGHT)
    plain = read(save(tmp_path / "rank1.jsonl", records), EIGHT)
    np.testing.assert_array_equal(found.counts, plain.counts)
    assert "repaired: 1 records of multi-token prediction were left out" in found.notes
    assert any(note.startswith("repaired: 1 records of iterations") for note in found.notes)


@pytest.mark.parametrize(
    ("edit", "told", "message"),
    [
        (
            lambda records: records,
            NOTHING,
            "does not tell the number of experts: give --num-experts",
        ),
        (lambda records: records, Told(num_experts=12), "ranks have 8 experts: must divide 12"),
        (
            lambda records: records,
            Told(num_experts=16),
            "rank1.jsonl is missing: groups of 2 ranks",
        ),
        (lambda records: records[:3], EIGHT, "iteration 100 has no layer 2, but others have"),
        (lambda records: [], EIGHT, "no counts of decoder layers in it"),
        (
            lambda records: [records[0] | {"block": "mtp"}],
            EIGHT,
            "no counts of decoder layers in it",
        ),
        (
            lambda records: [records[0] | {"iter": "1"}],
            EIGHT,
            "line 1: iter is '1': must be a whole",
        ),
        (lambda records: [records[0] | {"tpe": [1, 2]}], EIGHT, "line 1: tpe must be a list"),
        (
            lambda records: [records[0] | {"tpe": [[1], [2, 3]]}],
            EIGHT,
            "line 1: tpe must be a list",
        ),
        (lambda records: [records[0] | {"tpe": None}], EIGHT, "line 1: tpe must be a list"),
        (lambda records: [[1]], EIGHT, "line 1 is [1]: must be a JSON object"),
        (
            lambda records: [records[0] | {"tpe": [[-1] * 8]}],
            EIGHT,
            "layer 0, expert 0 is -1: must be finite and >= 0",
        ),
        (
            lambda records: [*records[:3], records[3] | {"tpe": records[3]["tpe"][:2]}],
            EIGHT,
            "iteration 100: layers differ in their micro-batches",
        ),
    ],
)
def test_broken_counts_are_refused(tmp_path: Path, edit, told: Told, message: str) -> None:
    path = save(tmp_path / "rank0.jsonl", edit(lines_of(whole()[0])))
    with pytest.raises(TraceError) as error:
        read(path, told)
    assert message in str(error.value)
    assert str(error.value).startswith(f"{path}: ")


def test_ranks_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", whole(), 2)
    records = lines_of(np.split(whole()[0], 2, axis=-1)[1])
    save(folder / "rank1.jsonl", [record | {"layer": record["layer"] + 2} for record in records])
    with pytest.raises(TraceError, match="rank 1: must count the iterations, layers and micro"):
        read(folder, EIGHT)  # another pipeline stage
    (folder / "rank1.jsonl").rename(folder / "part1.jsonl")
    with pytest.raises(TraceError, match=r"part1\.jsonl: must be called rank<number>\.jsonl"):
        read(folder, EIGHT)
