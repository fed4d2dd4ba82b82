from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trace_samples import assert_same, make_meta, make_trace, traces

from traces.arrow import to_table
from traces.schema import METADATA_KEY, Trace, TraceError, arrow_schema, concat
from traces.store import TraceWriter, iter_trace, read_meta, read_trace, write_trace


@given(trace=traces(), row_group_tokens=st.integers(1, 12))
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_what_is_written_is_read(tmp_path: Path, trace: Trace, row_group_tokens: int) -> None:
    path = tmp_path / "t.parquet"
    write_trace(path, trace, row_group_tokens)
    assert_same(read_trace(path), trace)
    chunks = list(iter_trace(path))
    assert [len(chunk) for chunk in chunks[:-1]] == [row_group_tokens] * (len(chunks) - 1)
    assert_same(concat(chunks), trace)


@given(trace=traces(), cuts=st.lists(st.integers(0, 40), max_size=4), group=st.integers(1, 9))
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_bytes_do_not_depend_on_chunks(tmp_path: Path, trace: Trace, cuts, group: int) -> None:
    write_trace(tmp_path / "whole", trace, group)
    ends = sorted({min(cut, len(trace)) for cut in cuts} | {len(trace)})
    with TraceWriter(tmp_path / "parts", trace.meta, group) as writer:
        for start, end in zip([0, *ends], ends, strict=False):
            writer.append(trace.take(slice(start, end)))
    assert (tmp_path / "parts").read_bytes() == (tmp_path / "whole").read_bytes()


def test_header_alone_and_chosen_columns(tmp_path: Path) -> None:
    trace = make_trace()
    write_trace(tmp_path / "t.parquet", trace)
    assert read_meta(str(tmp_path / "t.parquet")) == trace.meta
    few = read_trace(tmp_path / "t.parquet", columns=["stage"])
    assert few.columns == ("request_id", "position", "phase", "step", "expert_ids", "stage")
    with pytest.raises(TraceError, match=r"column 'stages' is missing; did you mean 'stage'\?$"):
        read_trace(tmp_path / "t.parquet", columns=["stages"])


def test_broken_rows_are_named_when_streamed(tmp_path: Path) -> None:
    trace = make_trace()
    trace.position[7:] += 2
    schema = arrow_schema(trace.meta, trace.columns)
    pq.write_table(to_table(trace, schema), tmp_path / "t.parquet", row_group_size=3)
    chunks = iter_trace(tmp_path / "t.parquet")
    assert [len(next(chunks)) for _ in range(2)] == [3, 3]
    with pytest.raises(TraceError, match="row 7: position is 4: must be 2"):
        next(chunks)


def test_a_long_trace_streams_by_row_group(tmp_path: Path) -> None:
    trace = make_trace(lengths=(40,) * 50, shuffle=True)
    write_trace(tmp_path / "t.parquet", trace, row_group_tokens=16)
    chunks = list(iter_trace(tmp_path / "t.parquet"))
    assert len(chunks) == 125
    assert_same(concat(chunks), trace)


def write_raw(path: Path, trace: Trace, drop=(), rename=None, header=None, **columns) -> None:
    """Write a trace file past the writer's checks, with columns and header changed."""
    table = to_table(trace, arrow_schema(trace.meta, trace.columns)).drop_columns(list(drop))
    for name, values in columns.items():
        table = table.append_column(name, values)
    table = table.rename_columns([(rename or {}).get(name, name) for name in table.column_names])
    text = json.dumps(json.loads(trace.meta.to_json()) | (header or {}))
    pq.write_table(table.replace_schema_metadata({METADATA_KEY: text}), path)


def refusal(path: Path) -> str:
    """The message with which a file is refused, the same by every way of reading it."""
    with pytest.raises(TraceError) as error:
        read_trace(path)
    message = str(error.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message.removeprefix(f"{path}: ")


def test_files_that_are_no_trace(tmp_path: Path) -> None:
    write_trace(tmp_path / "olmoe-gsm8k.parquet", make_trace())
    missing = refusal(tmp_path / "olmoe_gsm8k.parquet")
    assert missing == "no such file; did you mean 'olmoe-gsm8k.parquet'?"
    assert refusal(tmp_path / "no" / "t.parquet").startswith("no such file, nor the folder")
    assert refusal(tmp_path) == "is a folder: must be a trace file"
    (tmp_path / "empty").touch()
    assert refusal(tmp_path / "empty") == "the file is empty (0 bytes): must be Parquet"
    (tmp_path / "words").write_text("request_id,position\n0,0\n" * 9)
    assert refusal(tmp_path / "words").startswith("not Parquet, or cut short: ")
    pq.write_table(pa.table({"x": [1]}), tmp_path / "other")
    assert refusal(tmp_path / "other").startswith("not a Greenroom trace: ")
    write_raw(tmp_path / "none", make_trace().take(slice(0, 0)))
    assert refusal(tmp_path / "none") == "no rows: a trace has at least one"


def test_files_that_break_the_schema(tmp_path: Path) -> None:
    path, trace, wide = tmp_path / "t.parquet", make_trace(), make_trace(make_meta(top_k=3))
    write_raw(path, trace, rename={"expert_ids": "expert_id"})
    assert refusal(path) == "column 'expert_ids' is missing; did you mean 'expert_id'?"
    write_raw(path, trace, rename={"stage": "stages"})
    assert refusal(path) == "column 'stages' is not known; did you mean 'stage'?"
    write_raw(path, wide, header={"top_k": 2})
    assert "must be fixed_size_list<uint16>[6] by the header" in refusal(path)
    write_raw(path, trace, header={"format_version": 9})
    assert refusal(path) == "format_version is 9: this Greenroom reads 1"
    write_raw(path, trace, drop=["step"], step=pa.array(np.arange(9)))
    assert refusal(path) == "column 'step' is int64: must be int32 by the header"
    write_raw(path, trace, drop=["step"], step=pa.array([0, 0, None, *range(6)], pa.int32()))
    assert "step is null: must be set" in refusal(path)
    write_raw(path, trace, drop=["phase"], phase=pa.array(["prefil"] * 9))
    assert "must be prefill or decode; did you mean 'prefill'?" in refusal(path)


def test_null_cells_are_refused(tmp_path: Path) -> None:
    trace = make_trace()
    cells = pa.array([None, *trace.expert_ids.ravel()[1:].tolist()], pa.uint16())
    nullable = pa.FixedSizeListArray.from_arrays(cells, 6)
    write_raw(tmp_path / "t", trace, drop=["expert_ids"], expert_ids=nullable)
    assert refusal(tmp_path / "t") == "expert_ids has null cells: must be numbers"


def test_plain_phase_words_are_read(tmp_path: Path) -> None:
    trace = make_trace()
    words = pa.array(np.where(trace.phase == 0, "prefill", "decode"))
    write_raw(tmp_path / "t", trace, drop=["phase"], phase=words)
    assert_same(read_trace(tmp_path / "t"), trace)


def test_a_cut_file_is_refused_at_every_length(tmp_path: Path) -> None:
    write_trace(tmp_path / "t", make_trace(), row_group_tokens=4)
    whole = (tmp_path / "t").read_bytes()
    for length in {*range(0, len(whole), 97), 1, 4, 8, len(whole) - 1, len(whole) - 8}:
        (tmp_path / "cut").write_bytes(whole[:length])
        refusal(tmp_path / "cut")


def test_a_flipped_bit_never_changes_rows_silently(tmp_path: Path) -> None:
    trace, rng = make_trace(), np.random.default_rng(3)
    write_trace(tmp_path / "t", trace, row_group_tokens=4)
    whole = (tmp_path / "t").read_bytes()
    refusals = []
    for place in rng.integers(4, len(whole), 300):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << int(rng.integers(8))
        (tmp_path / "flipped").write_bytes(flipped)
        try:
            read = read_trace(tmp_path / "flipped")
        except TraceError as error:
            refusals.append(str(error))
            continue
        for name in trace.columns:  # the header's free text may differ: it bears no checksum
            np.testing.assert_array_equal(getattr(read, name), getattr(trace, name))
    assert len(refusals) > 100
    assert not [message for message in refusals if "\n" in message]


def write_chunks(path: Path, trace: Trace, chunks: Iterable[Trace]) -> None:
    with TraceWriter(path, trace.meta, row_group_tokens=4) as writer:
        for chunk in chunks:
            writer.append(chunk)


def test_nothing_half_written_stays(tmp_path: Path) -> None:
    trace, path = make_trace(), tmp_path / "t.parquet"
    write_trace(path, trace)
    before = path.read_bytes()

    def interrupted() -> Iterator[Trace]:
        yield trace
        assert (tmp_path / f"t.parquet.tmp-{os.getpid()}").exists()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_chunks(path, trace, interrupted())
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.parquet"]
    assert path.read_bytes() == before
    with TraceWriter(path, trace.meta, 4) as writer:
        writer.append(trace.take(slice(0, 4)))
        assert path.read_bytes() == before
    assert len(read_trace(path)) == 4


def test_the_writer_refuses_what_does_not_fit(tmp_path: Path) -> None:
    trace, path = make_trace(), tmp_path / "t.parquet"
    bad = [
        ([], "no rows were appended"),
        ([make_trace(make_meta(top_k=3))], "the chunk's header differs"),
        ([trace.take(slice(0, 4)), make_trace(optional=()).take(slice(4, 9))], "columns are"),
        ([trace, trace], "row 9: position is 0: must be 5, for its request's last row had 4"),
    ]
    for chunks, message in bad:
        with pytest.raises(TraceError, match=message):
            write_chunks(path, trace, chunks)
        assert list(tmp_path.iterdir()) == []
    with pytest.raises(TraceError, match="No such file or directory"):
        write_trace(tmp_path / "no" / "t.parquet", trace)
    trace.text = ["\ud800"] * 9
    with pytest.raises(TraceError, match="surrogates not allowed"):
        write_trace(path, trace)
    assert list(tmp_path.iterdir()) == []


def test_a_column_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    trace = make_trace()
    table = to_table(trace, arrow_schema(trace.meta, trace.columns))
    twice = table.append_column("position", table["position"])
    pq.write_table(twice, tmp_path / "t.parquet")
    with pytest.raises(TraceError, match="column 'position' is there twice"):
        read_trace(tmp_path / "t.parquet")
