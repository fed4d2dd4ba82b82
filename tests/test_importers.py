from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from foreign import read_as
from public_data import routing_file

from traces.importers.by_name import read_any
from traces.importers.experts_npz import read_experts_npz
from traces.importers.route_csv import read_route_csv, read_route_residency
from traces.schema import NO_EXPERT, TraceError
from traces.store import read_trace, write_trace

HEADING = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes"


def route_lines(turns: int = 1, prompt: int = 3, tokens: int = 5, seed: int = 0) -> list[str]:
    """A route_trace of layers 1 and 2, top-2 of 8; prompt rows layer by layer, as the engine's."""
    rng = np.random.default_rng(seed)
    lines = [
        "# route_trace v1",
        "# model=/data/toy/Toy-Q4.gguf arch=toy n_layer=3 n_expert=8 n_expert_used=2",
        "# layer=0 expert_bytes=0 dense_bytes=50",
        "# layer=1 expert_bytes=100 dense_bytes=50",
        "# layer=2 expert_bytes=120 dense_bytes=50",
        HEADING,
    ]
    for turn in range(turns):
        first = turn * tokens
        prefill = [(first + i, layer) for layer in (1, 2) for i in range(prompt)]
        order = [cell for cell in prefill if cell[1] == 1 or cell[0] == first + prompt - 1]
        order += [(first + i, layer) for i in range(prompt, tokens) for layer in (1, 2)]
        for step, layer in order:
            phase = int(step - first >= prompt)
            for slot, expert in enumerate(rng.permutation(8)[:2]):
                weight, resident = (0.75, 0.25)[slot], phase * slot
                size = 0 if resident else 80 + 20 * layer
                lines.append(
                    f"{turn},{phase},{step},{layer},{slot},{expert},{weight},{resident},{size}"
                )
    return lines


def write_lines(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def test_route_csv_becomes_a_trace(tmp_path: Path) -> None:
    trace = read_route_csv(write_lines(tmp_path / "toy.csv", route_lines(turns=2)), 4, "MIT")
    assert trace.request_id.tolist() == [0] * 5 + [1] * 5
    assert trace.position.tolist() == [0, 1, 2, 3, 4] * 2
    assert trace.phase.tolist() == [0, 0, 0, 1, 1] * 2
    assert trace.step.tolist() == [0, 0, 0, 1, 2, 3, 3, 3, 4, 5]
    meta = trace.meta
    assert (meta.model, meta.layer_indices, meta.expert_bytes) == ("Toy-Q4", (1, 2), (100, 120))
    assert (meta.num_experts, meta.top_k, meta.normalized, meta.licence) == (8, 2, True, "MIT")
    assert meta.provenance.kind == "imported"
    assert meta.provenance.source == "toy.csv: route_trace v1 CSV"
    assert "warning: top_k was forced from 4 to 2" in meta.notes
    assert meta.incomplete_layers == (1,)
    missing = (trace.expert_ids == NO_EXPERT).all(axis=-1)
    assert np.argwhere(missing).tolist() == [[0, 1], [1, 1], [5, 1], [6, 1]]
    rows = np.loadtxt(tmp_path / "toy.csv", delimiter=",", skiprows=6)
    for turn, _, step, layer, slot, expert, weight, _, _ in rows:
        row = int(step)
        assert trace.request_id[row] == turn
        assert trace.expert_ids[row, int(layer) - 1, int(slot)] == expert
        assert trace.expert_weights[row, int(layer) - 1, int(slot)] == weight
    write_trace(tmp_path / "t.parquet", trace)
    assert read_trace(tmp_path / "t.parquet").meta == meta


def test_a_trace_is_read_by_the_kind_its_name_tells(tmp_path: Path) -> None:
    path = tmp_path / "toy.route.csv"
    path.write_text("\n".join(route_lines()) + "\n", encoding="utf-8")
    found, stored = read_any(path), tmp_path / "toy.parquet"
    assert (found.expert_ids == read_route_csv(path).expert_ids).all()
    write_trace(stored, found)
    assert (read_any(stored).expert_ids == found.expert_ids).all()
    with pytest.raises(TraceError, match=r"no-such\.npz"):
        read_any(tmp_path / "no-such.npz")


def test_route_residency_keeps_file_order(tmp_path: Path) -> None:
    rows = read_route_residency(write_lines(tmp_path / "toy.csv", route_lines()))
    assert rows["step"].tolist() == [0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4]
    assert rows["layer"].tolist() == [1] * 6 + [2, 2] + [1, 1, 2, 2] * 2
    assert rows["resident"].tolist() == [False] * 8 + [False, True] * 4
    assert rows["loaded_bytes"][:10].tolist() == [100] * 6 + [120] * 2 + [100, 0]
    assert rows["phase"].tolist() == [0] * 8 + [1] * 8


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda lines: [], "line 1 is '': must be '# route_trace v1'"),
        (lambda lines: lines[1:], "line 1 is '# model="),
        (lambda lines: lines[:5], "the column line is '': must have turn,phase"),
        (
            lambda lines: [*lines[:5], HEADING.replace("layer", "laier")],
            "the column line is 'turn,",
        ),
        (lambda lines: [*lines[:5], HEADING + ",slot"], "the column line is 'turn,"),
        (
            lambda lines: [line.replace("layer=1 ", "lay=1 ") for line in lines],
            "line 4 is '# lay=1 expert_bytes=100 dense_bytes=50': must have whole numbers",
        ),
        (lambda lines: lines[:6], "no rows: a trace has at least one"),
        (lambda lines: [*lines, "0,1,5,1,0"], "line 23 is '0,1,5,1,0': must be 9 numbers"),
        (lambda lines: [*lines, "0,1,5,1,0,x,0.5,0,1"], "line 23 is '0,1,5,1,0,x,0.5,0,1': must"),
        (lambda lines: [*lines[:7], "", *lines[7:]], "16 rows in 17 lines: must be one a line"),
        (
            lambda lines: [*lines, "0,2,5,1,0,1,0.5,0,1"],
            "line 23: phase is 2: must be >= 0 and < 2",
        ),
        (lambda lines: [*lines, "0,1,5,1,0,8,0.5,0,1"], "row 16: expert is 8: must be < 8"),
        (lambda lines: [*lines, "0,1,5,1,2,1,0.5,0,1"], "row 16: slot is 2: must be < 2"),
        (lambda lines: [*lines, "0,1,5,1,0,1,nan,0,1"], "line 23: weight is nan: must be >= 0"),
        (lambda lines: [*lines, lines[-1]], "slots of step 4, layer 2 appear [1, 2] times"),
        (lambda lines: lines[:-1], "slots of step 4, layer 2 appear [1, 0] times: must be once"),
        (lambda lines: lines[:-2], "row 4: expert_ids[layer 1] is 65535: the layer is missing"),
        (lambda lines: lines[:12], "rows name 1 layers: must be the 2 that the header"),
        (lambda lines: lines[:14] + lines[18:], "turn 0: step 4 follows step 2: must be 3"),
        (lambda lines: lines[:14] + lines[16:], "row 3: expert_ids[layer 0] is 65535: the layer"),
        (
            lambda lines: [line.replace("n_expert=8 ", "n_expert=many ") for line in lines],
            "header 'n_expert' is 'many': must be a number from 1",
        ),
    ],
)
def test_broken_route_csv_is_refused(tmp_path: Path, edit, message: str) -> None:
    path = write_lines(tmp_path / "toy.csv", edit(route_lines()))
    with pytest.raises(TraceError) as error:
        read_route_csv(path)
    assert message in str(error.value)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


def test_route_csv_phases_out_of_order(tmp_path: Path) -> None:
    lines = ["0,1" + line[3:] if line[:8] == "0,0,1,1," else line for line in route_lines()]
    with pytest.raises(TraceError, match="turn 0: step 2 is prefill: must not come after decode"):
        read_route_csv(write_lines(tmp_path / "toy.csv", lines))


def test_route_csv_of_later_builds(tmp_path: Path) -> None:
    """Choices that the engine dropped are the router's all the same; columns go by name."""
    plain = route_lines()
    lines = [line.replace("/data/toy/", "/my data/toy/") for line in plain[:5]]
    lines.append(HEADING.replace("turn,", "") + ",dropped,later,turn")
    for number, line in enumerate(plain[6:]):
        turn, rest = line.split(",", 1)
        lines.append(f"{rest},{number % 2},some text,{turn}")
    lines[-1] = lines[-1].replace(",1,0,", ",2,0,")  # came ahead of its first use
    path = write_lines(tmp_path / "toy.csv", lines)
    trace, old = read_route_csv(path), read_route_csv(write_lines(tmp_path / "old.csv", plain))
    assert trace.meta.model == "Toy-Q4"
    assert (trace.expert_ids == old.expert_ids).all()
    assert (trace.expert_weights == old.expert_weights).all()
    assert "warning: 8 choices of the router were left out by the engine" in str(trace.meta.notes)
    assert read_route_residency(path)["resident"][-1]


def test_route_csv_without_weights(tmp_path: Path) -> None:
    lines = [line.replace(",0.75,", ",nan,").replace(",0.25,", ",nan,") for line in route_lines()]
    trace = read_route_csv(write_lines(tmp_path / "toy.csv", lines))
    assert trace.expert_weights is None
    assert (trace.meta.weight_semantics, trace.meta.normalized) == ("none", None)
    assert not trace.meta.sorted_by_weight
    assert any("weights are unknown" in note for note in trace.meta.notes)


def test_absent_files_are_named(tmp_path: Path) -> None:
    for read in (read_route_csv, read_route_residency, read_experts_npz):
        with pytest.raises(TraceError, match="No such file or directory"):
            read(tmp_path / "absent")


def real_ids(num_tokens: int = 40, num_experts: int = 16, top_k: int = 4) -> np.ndarray:
    """Distinct random ids, int16 [2 layers, num_tokens, top_k]."""
    noise = np.random.default_rng(0).random((2, num_tokens, num_experts))
    return noise.argsort(axis=-1)[..., :top_k].astype(np.int16)


def write_npz(path: Path, ids: np.ndarray, **meta) -> Path:
    header = {"model": "toy", "num_experts": 16, "top_k": ids.shape[-1], "source": "toy run"}
    np.savez(path, experts=ids, meta=json.dumps(header | meta))
    return path


def test_npz_contexts_become_requests(tmp_path: Path) -> None:
    ids = real_ids()
    trace = read_experts_npz(write_npz(tmp_path / "toy.npz", ids), context_tokens=16)
    np.testing.assert_array_equal(trace.expert_ids, ids.transpose(1, 0, 2))
    assert np.bincount(trace.request_id).tolist() == [16, 16, 8]
    assert trace.position.tolist() == [*range(16), *range(16), *range(8)]
    assert np.flatnonzero(trace.phase == 0).tolist() == [0, 16, 32]
    assert trace.step.tolist() == list(range(40))
    meta = trace.meta
    assert (meta.num_layers, meta.num_experts, meta.top_k) == (2, 16, 4)
    assert (meta.sorted_by_weight, meta.weight_semantics, meta.normalized) == (False, "none", None)
    assert meta.provenance.detail == "toy run"
    write_trace(tmp_path / "t.parquet", trace)


def test_whole_rankings_are_refused(tmp_path: Path) -> None:
    rankings = np.random.default_rng(0).random((2, 10, 16)).argsort(axis=-1)
    flat = rankings.reshape(2, 40, 4).astype(np.int16)
    with pytest.raises(TraceError, match="100% of the runs of 16 ids name every expert once"):
        read_experts_npz(write_npz(tmp_path / "flat.npz", flat))
    lines = route_lines()[:6]
    prompt = np.random.default_rng(0).random((2, 16, 8)).argsort(axis=-1).reshape(2, 64, 2)
    for layer in (1, 2):
        for token, pair in enumerate(prompt[layer - 1]):
            lines += [f"0,0,{token},{layer},{i},{pair[i]},0.5,0,9" for i in range(2)]
    with pytest.raises(TraceError, match="not the router's top-k"):
        read_route_csv(write_lines(tmp_path / "flat.csv", lines))


def test_broken_npz_is_refused(tmp_path: Path) -> None:
    ids, path = real_ids(), tmp_path / "toy.npz"
    negative, wide, twice = ids.copy(), ids.copy(), ids.copy()
    negative[1, 3, 2], wide[0, 5, 0], twice[0, 7, 1] = -1, 16, ids[0, 7, 0]
    for changed, meta, message in (
        (negative, {}, r"row 3: experts\[layer 1, slot 2\] is -1: must be >= 0"),
        (wide, {}, r"context 0: row 5, layer 0, slot 0 is expert 16: must lie in 0..15"),
        (twice, {}, r"row 7: expert_ids\[layer 0, slot 1\] is \d+: is there twice"),
        (ids, {"top_k": 8}, "meta key 'top_k' is 8: must be 4, as experts is"),
        (ids, {"n_moe_layers": 3}, "meta key 'n_moe_layers' is 3: must be 2"),
        (ids, {"num_experts": "16"}, "meta key 'num_experts' is '16': must be a whole"),
        (ids[0], {}, r"experts is int16\(40, 4\): must be integers \[layers, tokens, k\]"),
        (ids.astype(float), {}, r"experts is float64\(2, 40, 4\): must be integers"),
        (ids.astype(object), {}, r"experts is object\(2, 40, 4\): must be integers"),
    ):
        with pytest.raises(TraceError, match=message):
            read_experts_npz(write_npz(path, changed, **meta))
    with pytest.raises(TraceError, match="context_tokens is 0: must be >= 1"):
        read_experts_npz(path, context_tokens=0)


def test_files_that_are_no_npz(tmp_path: Path) -> None:
    whole = write_npz(tmp_path / "toy.npz", real_ids()).read_bytes()
    method, flags = whole.index(b"PK\x01\x02") + 10, whole.index(b"PK\x01\x02") + 8
    odd_method = whole[:method] + b"\x63" + whole[method + 1 :]
    encrypted = whole[:flags] + b"\x01" + whole[flags + 1 :]
    halves = whole[: len(whole) // 2], whole[:-30]
    for content in (b"", b"PK", *halves, b"words\n", odd_method, encrypted):
        (tmp_path / "cut.npz").write_bytes(content)
        with pytest.raises(TraceError, match=r"cut\.npz: not a npz archive: "):
            read_experts_npz(tmp_path / "cut.npz")
    np.savez(tmp_path / "other.npz", ids=real_ids())
    with pytest.raises(TraceError, match=r"holds ids: must be .*: experts and meta"):
        read_experts_npz(tmp_path / "other.npz")
    np.savez(tmp_path / "text.npz", experts=real_ids(), meta="not json")
    with pytest.raises(TraceError, match=r"text\.npz: meta is not JSON: Expecting"):
        read_experts_npz(tmp_path / "text.npz")
    np.save(tmp_path / "one.npy", real_ids())
    with pytest.raises(TraceError, match=r"one\.npy: "):
        read_experts_npz(tmp_path / "one.npy")


@pytest.mark.public_data
def test_public_route_csv(tmp_path: Path) -> None:
    path = routing_file("qwen3-30b-a3b_q4km_k6.route.csv")
    trace = read_route_csv(path, native_top_k=8)
    assert (len(trace), int((trace.phase == 0).sum())) == (156, 28)
    assert (trace.meta.num_layers, trace.meta.num_experts, trace.meta.top_k) == (48, 128, 6)
    assert trace.meta.incomplete_layers == (47,)
    assert set(trace.meta.expert_bytes) == {2654208, 3059712}
    rows = read_route_residency(path)
    assert len(rows) == 44766
    decode = rows[rows["phase"] == 1]
    assert decode["resident"].mean() == pytest.approx(0.803, abs=5e-4)
    sizes = dict(zip(trace.meta.layer_indices, trace.meta.expert_bytes, strict=True))
    misses = decode[~decode["resident"]]
    assert misses["loaded_bytes"].tolist() == [sizes[layer] for layer in misses["layer"].tolist()]
    assert not decode[decode["resident"]]["loaded_bytes"].any()


@pytest.mark.public_data
@pytest.mark.parametrize("domain", ["code", "math"])
def test_public_experts_npz(domain: str) -> None:
    trace = read_experts_npz(routing_file(f"qwen3-30b-a3b_{domain}.npz"))
    assert (len(trace), trace.num_requests) == (8000, 16)
    ids = trace.expert_ids[:, :, :]
    shared = (ids[1:, :, :, None] == ids[:-1, :, None, :]).any(axis=-1).sum(axis=-1)
    assert 2.9 < shared.mean() < 4.0  # of 8; 0.5 by chance


def test_what_was_told_goes_into_the_header_of_route_traces(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    write_lines(path, route_lines())
    trace = read_as("route-csv", path, native_top_k=4, model="toy", num_shared_experts=1)
    assert "warning: top_k was forced from 4 to 2" in trace.meta.notes
    assert len([note for note in trace.meta.notes if "forced" in note]) == 1
    assert (trace.meta.model, trace.meta.num_shared_experts) == ("toy", 1)
    with pytest.raises(TraceError, match="top_k is 2: must be 3, as you said"):
        read_as("route-csv", path, top_k=3)
