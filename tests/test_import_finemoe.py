"""FineMoE's pickles of torch tensors: read without torch, and nothing in them is run."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foreign import choices, notes_with, read_as
from numpy.typing import NDArray

from traces.importers.torch_pickle import load_pickle
from traces.schema import TraceError

NUM_EXPERTS = 16


def states(
    ids: NDArray[np.int64], num_prompt: int, pads: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """One sequence as FineMoE's tracer holds it; ``pads`` first tokens have one embedding."""
    rng = np.random.default_rng(0)
    iters = []
    for token, chosen in enumerate(ids):
        logits = rng.normal(size=(ids.shape[1], NUM_EXPERTS))
        bonus = np.linspace(4, 3, ids.shape[2])[None].repeat(ids.shape[1], axis=0)
        np.put_along_axis(logits, chosen, bonus, axis=1)
        probs = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        nodes = torch.zeros(ids.shape[1], NUM_EXPERTS)
        nodes.scatter_(1, torch.from_numpy(chosen), 1.0)
        iters.append(
            {
                "stage": "prefill" if token < num_prompt else "decode",
                "embed": torch.full((8,), float(token if token >= pads else 0)),
                "states": torch.zeros(ids.shape[1], 8),
                "nodes": nodes,
                "probs": torch.tensor(probs, dtype=dtype),
                "preds": torch.zeros(ids.shape[1], NUM_EXPERTS),
            }
        )
    return {"matrix": torch.zeros(ids.shape[1], NUM_EXPERTS), "iters": iters}


def dump(path: Path, value: Any) -> Path:
    path.write_bytes(pickle.dumps(value))
    return path


def test_sequences_become_requests(tmp_path: Path) -> None:
    ids = choices(20)
    entry = {"a" * 32: states(ids[:12], 5), "b" * 32: states(ids[12:], 3)}
    path = dump(tmp_path / "Qwen1.5-MoE-A2.7B~lmsys-chat-1m~2.pkl", entry)
    trace = read_as("finemoe", path)
    np.testing.assert_array_equal(trace.expert_ids, ids)
    assert np.bincount(trace.request_id).tolist() == [12, 8]
    assert (trace.phase == 0).tolist() == [True] * 5 + [False] * 7 + [True] * 3 + [False] * 5
    meta = trace.meta
    assert (meta.model, meta.num_experts, meta.top_k) == ("Qwen1.5-MoE-A2.7B", NUM_EXPERTS, 4)
    assert (meta.weight_semantics, meta.normalized) == ("raw_prob", False)
    assert meta.provenance.detail == "dataset lmsys-chat-1m"
    logits = trace.router_logits.astype(np.float32)
    probs = np.exp(logits) / np.exp(logits).sum(axis=2, keepdims=True)
    chosen = np.take_along_axis(probs, trace.expert_ids.astype(np.intp), axis=2)
    np.testing.assert_allclose(chosen, trace.expert_weights, rtol=5e-3)
    assert (np.argmax(logits, axis=2) == trace.expert_ids[..., 0]).all()


def test_left_padding_and_rows_that_never_ran_are_dropped(tmp_path: Path) -> None:
    ids = choices(14)
    entry = states(ids, 9, pads=4)
    for key in ("nodes", "probs"):
        entry["iters"][-1][key].zero_()
    trace = read_as("finemoe", dump(tmp_path / "m~d~1.pkl", {"s": entry}))
    np.testing.assert_array_equal(trace.expert_ids, ids[4:13])
    assert (trace.phase == 0).sum() == 5
    assert notes_with(trace, "repaired: 4 first rows of one embedding were dropped")
    assert notes_with(trace, "repaired: 1 last rows without any choice")


def test_probabilities_that_do_not_sum_to_one_are_no_logits(tmp_path: Path) -> None:
    entry = states(choices(6), 2)
    for token in entry["iters"]:
        token["probs"] = token["probs"] * token["nodes"]
    trace = read_as("finemoe", dump(tmp_path / "m~d~1.pkl", {"s": entry}))
    assert trace.router_logits is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda entry: entry["iters"][2].pop("nodes"),
            "token 2: nodes is NoneType: must be a tensor",
        ),
        (lambda entry: entry["iters"][1]["nodes"].mul_(2), "count is 2: must be 0 or 1"),
        (lambda entry: entry["iters"][3].update(stage="idle"), "token 3: must have a stage"),
        (lambda entry: entry.update(iters=[]), "has no 'iters'"),
        (
            lambda entry: entry["iters"][0].update(probs=torch.zeros(3, 5)),
            r"token 0: nodes \(3, 16\), probs \(3, 5\): must be the same",
        ),
        (
            lambda entry: [
                entry["iters"][1].update({k: torch.ones(2, 16)}) for k in ("nodes", "probs")
            ],
            r"token 1: nodes is \(2, 16\): must be \(3, 16\) as in token 0",
        ),
    ],
)
def test_states_of_another_shape_are_refused(tmp_path: Path, change, message: str) -> None:
    entry = states(choices(6), 2)
    change(entry)
    with pytest.raises(TraceError, match=message):
        read_as("finemoe", dump(tmp_path / "m~d~1.pkl", {"s": entry}))


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    class Later:
        def __reduce__(self):
            return (eval, ("1",))

    inner = pickle.dumps(torch.zeros(3)).replace(
        b"torch\nFloatStorage", b"os\nsystem\x20\x20\x20\x20\x20"
    )
    for number, content in enumerate(
        (pickle.dumps({"s": Evil()}), pickle.dumps([Later()]), b"", b"PK\3\4 a zip", inner)
    ):
        path = tmp_path / f"{number}.pkl"
        path.write_bytes(content)
        with pytest.raises(
            TraceError, match=rf"{number}\.pkl: not a pickle of tensors that is safe"
        ):
            read_as("finemoe", path)
    assert not (tmp_path / "ran").exists()
    whole = pickle.dumps({"s": states(choices(6), 2)})
    for cut in (10, len(whole) // 2, len(whole) - 1):
        (tmp_path / "cut.pkl").write_bytes(whole[:cut])
        with pytest.raises(TraceError, match=r"cut\.pkl: not a pickle"):
            read_as("finemoe", tmp_path / "cut.pkl")


def test_tensors_of_all_kinds_are_read_as_torch_has_them(tmp_path: Path) -> None:
    base = torch.arange(24, dtype=torch.float64).reshape(4, 6)
    tensors = [
        base.T,
        base[1:3, ::2],
        base[2],
        torch.tensor(3.5),
        torch.zeros(0, 5),
        *(base.to(kind) for kind in (torch.float16, torch.float32, torch.bfloat16)),
        *(
            base.to(kind)
            for kind in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
        ),
        base > 5,
    ]
    loaded = load_pickle(dump(tmp_path / "t.pkl", {"all": tensors, "twice": [base, base]}))
    for found, tensor in zip(loaded["all"], tensors, strict=True):
        expected = tensor.float().numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(loaded["twice"][1], base.numpy())
    wide = torch.zeros(1).expand(1000, 1000)  # a small file that would be large in memory
    with pytest.raises(TraceError, match="does not fit its storage of 1"):
        load_pickle(dump(tmp_path / "w.pkl", wide))
