from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from trace_samples import make_trace

from traces.counts import ExpertCounts, is_counts, read_counts, write_counts
from traces.importers.counted import counted
from traces.importers.formats import FORMATS, format_named
from traces.importers.routed import Origin
from traces.importers.told import NOTHING, Told, parse_layers
from traces.schema import COUNTS_KEY, Provenance, TraceError
from traces.store import write_trace


def test_layers_are_parsed() -> None:
    assert parse_layers("3-6") == (3, 4, 5, 6)
    assert parse_layers("1-7:2") == (1, 3, 5, 7)
    assert parse_layers("0,2,5-6") == (0, 2, 5, 6)
    for text in ("", "a", "3-", "5-3", "2,2", "3,1", "1-5:0", "-1", "²", "0-99999999", "1-3-5"):
        with pytest.raises(TraceError, match=f"layers are '{text}': must be "):
            parse_layers(text)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"num_experts": 0}, "num_experts is 0: must be >= 1"),
        ({"prompt_tokens": -1}, "prompt_tokens is -1: must be >= 0"),
        ({"context_tokens": 0}, "context_tokens is 0: must be >= 1"),
        ({"layer_indices": ()}, "layer_indices are (): must be ascending"),
        ({"layer_indices": (2, 1)}, "layer_indices are (2, 1): must be ascending"),
        ({"layer_indices": (-1, 1)}, "layer_indices are (-1, 1): must be >= 0"),
    ],
)
def test_facts_that_cannot_be_are_refused(told: dict, message: str) -> None:
    with pytest.raises(TraceError) as error:
        Told(**told)
    assert message in str(error.value)


def test_each_format_has_a_reader() -> None:
    names = [known.name for known in FORMATS]
    assert len({*names}) == len(names)
    for known in FORMATS:
        assert callable(format_named(known.name).reader()), known.name
    with pytest.raises(TraceError, match="format 'eplp': no such format; did you mean 'eplb'"):
        format_named("eplp")
    with pytest.raises(TraceError, match=r"no such format \(known: experts-npz, "):
        format_named("word")


# -- counts ----------------------------------------------------------------------------------------


def some_counts(**changes) -> ExpertCounts:
    values = np.random.default_rng(0).integers(0, 5, (4, 2, 6)).astype(float)
    facts = {
        "model": "toy",
        "counts": values,
        "layer_indices": (1, 3),
        "unit": "sequence",
        "provenance": Provenance("imported", "a.npy", "how"),
        "top_k": 2,
        "notes": ("one", "two"),
        "licence": "MIT",
    }
    return ExpertCounts(**(facts | changes))


def test_counts_are_stored_and_read_back(tmp_path: Path) -> None:
    path, counts = tmp_path / "a.parquet", some_counts()
    write_counts(path, counts)
    found = read_counts(path)
    np.testing.assert_array_equal(found.counts, counts.counts)
    for name in ("model", "layer_indices", "unit", "provenance", "top_k", "notes", "licence"):
        assert getattr(found, name) == getattr(counts, name), name
    assert (found.num_samples, found.num_layers, found.num_experts) == (4, 2, 6)
    assert [file.name for file in tmp_path.iterdir()] == ["a.parquet"]


def test_counts_are_told_from_traces(tmp_path: Path) -> None:
    write_counts(tmp_path / "counts.parquet", some_counts())
    write_trace(tmp_path / "trace.parquet", make_trace())
    (tmp_path / "text.parquet").write_text("words")
    names = ("counts", "trace", "text", "absent")
    assert [is_counts(tmp_path / f"{name}.parquet") for name in names] == [True] + [False] * 3
    for name, message in (
        ("trace", "not expert counts: the metadata has no 'greenroom_counts'"),
        ("text", "text.parquet: "),
        ("absent", "absent.parquet: "),
    ):
        with pytest.raises(TraceError, match=message) as error:
            read_counts(tmp_path / f"{name}.parquet")
        assert "\n" not in str(error.value)
    with pytest.raises(TraceError, match=r"absent.*counts\.parquet: "):
        write_counts(tmp_path / "absent" / "counts.parquet", some_counts())


@pytest.mark.parametrize(
    "header", [b"{", b"[]", b"3", b'{"shape": [1, 1, 1]}', b'{"shape": [4, 2, 6]}']
)
def test_broken_counts_are_refused(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "a.parquet"
    write_counts(path, some_counts())
    table = pq.read_table(path).replace_schema_metadata({COUNTS_KEY: header})
    pq.write_table(table, path)
    with pytest.raises(TraceError, match=r"a\.parquet: broken expert counts: "):
        read_counts(path)
    pq.write_table(pa.table({"sample": [0]}).replace_schema_metadata({COUNTS_KEY: header}), path)
    with pytest.raises(TraceError, match=r"a\.parquet: broken expert counts: "):
        read_counts(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"counts": np.ones((2, 6))}, "counts are (2, 6): must be [samples, layers, experts]"),
        ({"counts": np.ones((0, 2, 6))}, "counts are (0, 2, 6): must be"),
        ({"counts": np.zeros((1, 2, 6))}, "all counts are 0: no expert was ever used"),
        ({"counts": -np.ones((1, 2, 6))}, "count of sample 0, layer 0, expert 0 is -1.0: must be"),
        ({"counts": np.full((1, 2, 6), np.nan)}, "expert 0 is nan: must be finite and >= 0"),
        ({"layer_indices": (1,)}, "layer_indices are 1: must be 2, one a layer"),
        ({"layer_indices": (3, 1)}, "layer_indices are (3, 1): must be ascending"),
    ],
)
def test_counts_that_cannot_be_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(TraceError) as error:
        some_counts(**changes)
    assert message in str(error.value)


def test_counted_drops_what_was_not_used() -> None:
    origin = Origin(file="a.bin", what="toy", recorder="toy")
    values = np.random.default_rng(0).integers(1, 9, (4, 3, 6))
    values[:, 0] = values[2] = 0
    found = counted(values, Told(native_top_k=4, model="m"), origin, "step", top_k=2)
    np.testing.assert_array_equal(found.counts, values[[0, 1, 3], 1:])
    assert (found.layer_indices, found.unit, found.top_k, found.model) == ((1, 2), "step", 2, "m")
    assert found.notes == (
        "repaired: 1 dense layers were dropped, 0",
        "repaired: 1 of 4 samples without any use were dropped",
        "warning: top_k was forced from 4 to 2",
    )
    assert counted(values, Told(top_k=3), origin, "step").top_k == 3
    named = replace(origin, layer_indices=(4, 5))
    assert counted(values[:, 1:], NOTHING, named, "step").layer_indices == (4, 5)
    for bad, told, message in (
        (values[0], NOTHING, r"counts are int64\(3, 6\): must be numbers"),
        (values.astype(str), NOTHING, "counts are <U21"),
        (values, Told(num_experts=8), "num_experts is 6: must be 8, as you said"),
        (values - 1, NOTHING, "sample 0, layer 0, expert 0 is -1: must be finite and >= 0"),
        (np.full((1, 1, 2), np.inf), NOTHING, "sample 0, layer 0, expert 0 is inf"),
        (values, Told(layer_indices=(0, 2)), "layer 1 has experts: must be one of"),
    ):
        with pytest.raises(TraceError, match=f"a.bin: {message}"):
            counted(bad, told, origin, "step")
