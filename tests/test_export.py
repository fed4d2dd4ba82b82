"""Traces in other tools' formats: what comes back is the same, and what is lost is said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from foreign import choices, export, notes_with, read_as, small_trace, with_logits
from hypothesis import given
from hypothesis import strategies as st
from public_data import routing_file
from strategies import LAW, trace_of_ids

from sim.export_cli import main
from traces.exporters.formats import EXPORTS, export_named
from traces.importers.by_name import read_any
from traces.importers.experts_npz import read_experts_npz
from traces.schema import NO_EXPERT, PREFILL, Provenance, TraceError
from traces.store import write_trace

# -- moe-policylang --------------------------------------------------------------------------------


@LAW
@given(
    lengths=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=4),
    num_layers=st.integers(1, 4),
    top_k=st.integers(1, 5),
    chunk_tokens=st.integers(1, 20),
    seed=st.integers(0, 99),
)
def test_policylang_gives_back_what_was_exported(
    tmp_path_factory, lengths, num_layers, top_k, chunk_tokens, seed
) -> None:
    ids = choices(sum(map(sum, lengths)), num_layers, 16, top_k, seed).astype(np.uint16)
    trace = trace_of_ids(ids, lengths, 16)
    path = tmp_path_factory.mktemp("pl") / "t.parquet"
    export("moe-policylang", trace, path, chunk_tokens)
    if (ids == ids[0]).all():
        return  # taken for a warm-up
    found = read_as("moe-policylang", path)
    kept = len(found)  # first requests of equal rows are taken for a warm-up, too
    for name in ("expert_ids", "phase", "position"):
        np.testing.assert_array_equal(getattr(found, name), getattr(trace, name)[-kept:])
    assert kept == len(trace) or notes_with(found, "warm-up")
    assert found.meta.num_experts == 16


def test_policylang_keeps_the_header_tokens_and_logits(tmp_path: Path) -> None:
    trace, path = with_logits(small_trace()), tmp_path / "t.parquet"
    lost = export("moe-policylang", trace, path)
    assert lost == ("steps: their traces are of one prompt after another",)
    names = pq.read_schema(path).names
    assert names[:5] == ["prompt_id", "token_idx", "layer_idx", "selected_experts", "router_scores"]
    found = read_as("moe-policylang", path)
    for name in ("expert_ids", "phase", "position", "token_id", "router_logits"):
        np.testing.assert_array_equal(getattr(found, name), getattr(trace, name))
    meta = found.meta
    assert (meta.model, meta.licence, meta.layer_indices) == (trace.meta.model, "MIT", (1, 3, 4))
    assert meta.provenance.kind == "imported"
    table = pq.read_table(path)
    probs = np.array(table.column("router_softmax").to_pylist())
    np.testing.assert_allclose(probs.sum(axis=1), 1, rtol=1e-5)
    chosen = np.array(table.column("selected_experts").to_pylist())
    scores = np.array(table.column("router_scores").to_pylist())
    np.testing.assert_allclose(np.take_along_axis(probs, chosen, axis=1), scores, rtol=1e-6)


def test_policylang_scores_are_raw_probabilities_or_none(tmp_path: Path) -> None:
    trace, path = small_trace(), tmp_path / "t.parquet"
    weights = np.tile(np.array([0.4, 0.2, 0.1, 0.05], dtype=np.float16), (len(trace), 3, 1))
    raw = replace(
        trace, meta=replace(trace.meta, weight_semantics="raw_prob"), expert_weights=weights
    )
    as_applied = replace(raw, meta=replace(raw.meta, weight_semantics="applied", normalized=False))
    rescaled = replace(raw, meta=replace(raw.meta, weight_semantics="applied", normalized=True))
    for given_trace, there in ((raw, True), (as_applied, True), (rescaled, False)):
        lost = export("moe-policylang", given_trace, path)
        assert ("router_scores" in pq.read_schema(path).names) == there
        assert any("theirs are raw probabilities" in what for what in lost) != there
    export("moe-policylang", raw, path)
    np.testing.assert_array_equal(read_as("moe-policylang", path).expert_weights, weights)


def test_policylang_has_no_rows_for_cells_without_experts(tmp_path: Path) -> None:
    trace, path = small_trace(), tmp_path / "t.parquet"
    ids = trace.expert_ids.copy()
    prompt = np.flatnonzero(trace.phase == PREFILL)
    ids[prompt[:3], 2] = NO_EXPERT  # as llama.cpp: the last layer for the last prompt token only
    ids[5, 1, 3] = NO_EXPERT
    trace = replace(trace, meta=replace(trace.meta, incomplete_layers=(2,)), expert_ids=ids)
    export("moe-policylang", trace, path)
    table = pq.read_table(path)
    assert table.num_rows == 20 * 3 - 3
    assert min(map(len, table.column("selected_experts").to_pylist())) == 3
    found = read_as("moe-policylang", path)
    np.testing.assert_array_equal(found.expert_ids, ids)
    assert found.meta.incomplete_layers == (2,)


def test_a_batch_comes_back_by_request_and_synthetic_stays_synthetic(tmp_path: Path) -> None:
    trace = small_trace(provenance=Provenance("synthetic", "a generator"))
    mixed = trace.take(np.argsort(trace.position, kind="stable"))
    for name, suffix in (("moe-policylang", "parquet"), ("experts-npz", "npz")):
        path = tmp_path / f"t.{suffix}"
        export(name, mixed, path)
        found = read_any(path)
        np.testing.assert_array_equal(found.expert_ids, trace.expert_ids)
        assert found.meta.provenance.kind == "synthetic"
        assert "synthetic" in found.meta.provenance.detail


def test_their_own_reader_reads_it(tmp_path: Path) -> None:
    """Runs where moe-policylang is installed, which the project does not need."""
    theirs = pytest.importorskip("moe_policylang.integrations.trace_recorder")
    trace = with_logits(small_trace())
    trace.token_id[3] = -1  # unknown: they cannot read null
    export("moe-policylang", trace, tmp_path / "t.parquet")
    found = theirs.TraceRecording.load(tmp_path / "t.parquet")
    assert (found.num_experts, found.top_k, len(found.entries)) == (16, 4, 60)
    ids = np.array([entry.selected_experts for entry in found.entries])
    np.testing.assert_array_equal(ids.reshape(trace.expert_ids.shape), trace.expert_ids)
    for name in ("again.parquet", "again.jsonl"):
        found.save(tmp_path / name)
        again = read_as("moe-policylang", tmp_path / name)
        np.testing.assert_array_equal(again.expert_ids, trace.expert_ids)
        np.testing.assert_array_equal(again.token_id, trace.token_id)


@pytest.mark.public_data
def test_a_public_trace_survives_all_formats_that_keep_its_ids(tmp_path: Path) -> None:
    trace = read_experts_npz(routing_file("qwen3-30b-a3b_math.npz")).take(slice(0, 1024))
    for name, suffix in (("moe-policylang", "parquet"), ("experts-npz", "npz")):
        path = tmp_path / f"t.{suffix}"
        export(name, trace, path, 300)
        found = read_any(path)
        for column in ("expert_ids", "request_id", "position", "phase"):
            np.testing.assert_array_equal(getattr(found, column), getattr(trace, column))
        assert found.meta.num_experts == 128


# -- experts npz -----------------------------------------------------------------------------------


@LAW
@given(
    num_tokens=st.integers(1, 6),
    num_requests=st.integers(1, 4),
    last=st.integers(1, 6),
    chunk_tokens=st.integers(1, 9),
)
def test_npz_gives_back_requests_of_one_length(
    tmp_path_factory, num_tokens, num_requests, last, chunk_tokens
) -> None:
    lengths = [(1, num_tokens - 1)] * num_requests + [(1, min(last, num_tokens) - 1)]
    trace = trace_of_ids(choices(sum(map(sum, lengths))).astype(np.uint16), lengths, 16)
    path = tmp_path_factory.mktemp("npz") / "t.npz"
    lost = export("experts-npz", trace, path, chunk_tokens)
    found = read_as("experts-npz", path)
    for name in ("expert_ids", "request_id", "position", "phase"):
        np.testing.assert_array_equal(getattr(found, name), getattr(trace, name))
    assert lost == ("phases and steps",)


def test_npz_says_what_it_loses_and_keeps_the_layers(tmp_path: Path) -> None:
    trace, path = small_trace(((4, 6), (3, 2))), tmp_path / "t.npz"
    lost = export("experts-npz", small_trace(((3, 2), (4, 6))), path)
    assert lost == (
        "phases and steps",
        "columns token_id",
        "where the 2 requests begin and end: they differ in length",
    )
    assert len(export("experts-npz", trace, path)) == 2  # only the last may be shorter
    with np.load(path) as archive:
        assert archive["experts"].dtype == np.int16
        assert archive["experts"].shape == (3, 15, 4)
        header = json.loads(str(archive["meta"]))
    assert {"model", "num_experts", "n_moe_layers", "top_k", "k", "source"} <= {*header}
    found = read_as("experts-npz", path, hidden_size=64, native_top_k=8)
    assert (found.meta.layer_indices, found.meta.hidden_size) == ((1, 3, 4), 64)
    assert notes_with(found, "top_k was forced from 8 to 4")
    with pytest.raises(
        TraceError, match="layer 4 has experts: must be one of the MoE layers that were told"
    ):
        read_as("experts-npz", path, layer_indices=(1, 3))
    with pytest.raises(TraceError, match="num_experts is 16: must be 32, as you said"):
        read_as("experts-npz", path, num_experts=32)


def test_npz_refuses_cells_without_experts(tmp_path: Path) -> None:
    trace, path = small_trace(), tmp_path / "t.npz"
    ids = trace.expert_ids.copy()
    ids[8, 1, 3] = NO_EXPERT
    with pytest.raises(
        TraceError, match=r"t\.npz: row 8, layer 3 lacks an expert: the format has no"
    ):
        export("experts-npz", replace(trace, expert_ids=ids), path)
    assert not list(tmp_path.iterdir())


# -- both, and the command -------------------------------------------------------------------------


@pytest.mark.parametrize("form", [known.name for known in EXPORTS])
def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, form: str) -> None:
    write = export_named(form).writer()

    def broken():
        yield small_trace()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(broken(), tmp_path / "t")
    with pytest.raises(TraceError, match=r"no-such-folder"):
        write([small_trace()], tmp_path / "no-such-folder" / "t")
    with pytest.raises(TraceError, match="no rows"):
        write([], tmp_path / "t")
    assert not list(tmp_path.iterdir())


def test_the_command_exports_a_trace_and_says_what_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_trace(tmp_path / "mine.parquet", small_trace(), row_group_tokens=8)
    assert main(["moe-policylang", "mine.parquet"]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("mine.moe-policylang.parquet: 20 tokens of mine.parquet")
    assert "not kept: steps" in told.err
    np.testing.assert_array_equal(
        read_any("mine.moe-policylang.parquet").expert_ids, small_trace().expert_ids
    )
    assert main(["experts-npz", "mine.moe-policylang.parquet", "--out", "again.npz"]) == 0
    np.testing.assert_array_equal(read_any("again.npz").expert_ids, small_trace().expert_ids)
    assert main(["experts-npz", "mine.parquet", "--out", "again.npz"]) == 0  # as import does
    assert main(["sglang-logical-count", "tiny_logits", "--out", "load.json"]) == 0
    assert "load.json: 5178 tokens of tiny_logits" in capsys.readouterr().out
    assert main(["experts-npz", "mine.parquet#layers=1:2", "--out", "part.npz"]) == 0
    np.testing.assert_array_equal(read_any("part.npz").expert_ids, small_trace().expert_ids[:, 1:2])
    assert main([]) == 0
    assert "sglang-logical-count" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["moe-policylan", "t.parquet"], "no such format to write; did you mean 'moe-policylang'?"),
        (["moe-policylang"], "TRACE is missing"),
        (["moe-policylang", "none.parquet"], "none.parquet: no such file"),
        (
            ["moe-policylang", "t.parquet", "--out", "t.parquet"],
            "t.parquet: is there already: must not be the trace to export",
        ),
        (["experts-npz", "x.csv"], "x.csv: line 1 is 'layer,expert'"),
    ],
)
def test_mistakes_at_the_command_are_one_line(
    tmp_path: Path, capsys, monkeypatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_trace(tmp_path / "t.parquet", small_trace())
    (tmp_path / "x.csv").write_text("layer,expert\n")
    assert main(arguments) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert message in told.err
    assert told.err.count("\n") == 1
