"""Drawing synthetic traces: laws of the scores, of stages, of how requests become steps and files."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tests.synth_models import chain, model
from traces.schema import PREFILL, Trace, TraceError, concat
from traces.store import TraceWriter, read_trace
from traces.synth import Wanted, draw_trace, header
from traces.synth_draw import Router, generator
from traces.synth_model import SynthModel, load_model
from traces.synth_scores import (
    SPAN_TOKENS,
    States,
    choose,
    chosen_sets,
    directions,
    filters,
    possible,
)
from traces.synth_stages import StageChain, cluster_windows, fit_chain


def drawn(of: SynthModel, **wanted: int | bool | None) -> Trace:
    asked = Wanted(**wanted)  # type: ignore[arg-type]
    return concat(list(draw_trace(of, asked, header(of, asked))))


# -- scores ----------------------------------------------------------------------------------------


@settings(deadline=None)
@given(arrays(np.float32, (7, 12), elements=st.floats(-8, 8, width=32)), st.integers(1, 11))
def test_the_highest_scores_are_chosen_best_first(scores: np.ndarray, top_k: int) -> None:
    found = choose(scores, top_k).astype(int)
    assert all(len(set(row)) == top_k for row in found.tolist())
    taken = np.take_along_axis(scores, found, axis=1)
    assert (taken == -np.sort(-scores, axis=1)[:, :top_k]).all()


def test_sets_are_those_that_are_chosen() -> None:
    scores = np.random.default_rng(3).standard_normal((50, 20), dtype=np.float32)
    sets, ids = chosen_sets(scores, 4), choose(scores, 4).astype(int)
    assert (sets.sum(axis=1) == 4).all()
    assert np.take_along_axis(sets, ids, axis=1).all()


def test_states_have_the_correlations_that_were_asked_for() -> None:
    lags = np.arange(SPAN_TOKENS)
    wanted = np.stack([0.9**lags, 0.6 * 0.9**lags * np.cos(lags), 0.5**lags])
    wanted[1, 0] = 1.0  # white noise over a wave that dies out
    blocks = filters(wanted[None])
    rng = np.random.default_rng(5)
    states = States(blocks, np.zeros((1, 3)), 400, 0.3, rng)  # three classes
    path = np.concatenate([states.next()[0] for _ in range(4)], axis=1)  # 4 blocks, 400 dimensions
    for lag in (0, 1, 2, 5, 20, 63, 64, 100):
        found = (path[:, lag:] * path[:, : path.shape[1] - lag]).mean(axis=(1, 2))
        np.testing.assert_allclose(found, wanted[:, lag], atol=0.04)


def test_what_stays_and_what_layers_share_are_shares_of_the_variance() -> None:
    still = np.zeros((2, 1, SPAN_TOKENS))
    still[..., 0] = 1
    stays = np.array([[0.0], [0.6]])
    states = States(
        filters(still * (1 - stays)[..., None]), stays, 4000, 0.7, np.random.default_rng(2)
    )
    first, second = states.next()[:, 0], states.next()[:, 0]
    assert (first**2).mean(axis=(1, 2)) == pytest.approx([1, 1], abs=0.05)
    assert (first * second).mean(axis=(1, 2)) == pytest.approx([0, 0.6], abs=0.05)
    expected = 0.7 * np.sqrt(1 - 0.6)  # layers share 0.7 of the noise of the moving part
    assert (first[0] * first[1]).mean() == pytest.approx(expected, abs=0.05)


@settings(max_examples=25, deadline=None)
@given(arrays(np.float64, (2, SPAN_TOKENS), elements=st.floats(-1, 1)))
def test_impossible_correlations_are_mended(values: np.ndarray) -> None:
    values[:, 0] = 1.0
    mended = possible(values)
    np.testing.assert_allclose(mended[:, 0], 1)
    lags = np.abs(np.subtract.outer(np.arange(SPAN_TOKENS), np.arange(SPAN_TOKENS)))
    assert np.linalg.eigvalsh(mended[:, lags]).min() > 0
    blocks = filters(values)  # would fail where a covariance has no root
    assert np.isfinite(blocks.first).all()
    assert np.isfinite(blocks.fresh).all()


def test_correlations_that_are_possible_stay() -> None:
    values = 0.7 ** np.arange(SPAN_TOKENS)[None]
    np.testing.assert_allclose(possible(values), values, atol=1e-9)


def test_directions_are_of_unit_length_and_a_layers_own() -> None:
    all_layers = directions((4, 20), 6, seed=9)
    np.testing.assert_allclose((all_layers**2).sum(axis=1), 1, rtol=1e-5)
    assert (directions((1, 20), 6, seed=9, layers=[2])[0] == all_layers[2]).all()
    assert not np.allclose(all_layers[0], all_layers[1])


# -- stages ----------------------------------------------------------------------------------------


def test_a_chain_is_counted_from_sequences_and_drawn() -> None:
    sequences = [np.repeat([0, 1, 0, 2], [4, 6, 4, 8]), np.repeat([0, 2], [4, 8])]
    found = fit_chain([part.astype(np.int16) for part in sequences], 4)
    assert found.begins.tolist() == [1, 0, 0, 0]
    np.testing.assert_allclose(found.follows[0], [0, 1 / 3, 2 / 3, 0, 0])
    assert found.follows[2].tolist() == found.follows[3].tolist() == [0, 0, 0, 0, 1]
    assert found.lasts[1].tolist() == [6] * 9
    rng = np.random.default_rng(0)
    for _ in range(20):
        stages = found.draw(None, rng)
        edges = np.flatnonzero(np.diff(stages)) + 1
        runs = {int(part[0]): len(part) for part in np.split(stages, edges)}
        assert stages[0] == 0
        assert stages[-1] == 2
        assert runs[2] == 8
        assert set(runs) <= {0, 1, 2}


@settings(deadline=None)
@given(st.integers(1, 400), st.integers(0, 5))
def test_a_chain_gives_as_many_tokens_as_asked(num_tokens: int, seed: int) -> None:
    stages = chain(3, 17.0).draw(num_tokens, np.random.default_rng(seed))
    assert len(stages) == num_tokens
    assert stages[0] == 0
    if num_tokens > 3 * 17:  # a chain that ended begins anew
        assert stages[51] == 0


def test_windows_of_two_kinds_are_told_apart() -> None:
    rng = np.random.default_rng(4)
    kinds = rng.integers(0, 2, 40)
    means = rng.dirichlet(np.ones(8), (2, 3))  # [kind, layer, expert]
    windows = means[kinds] + 0.01 * rng.random((40, 3, 8))
    labels = cluster_windows(windows, 2, seed=0)
    assert len({*zip(kinds.tolist(), labels.tolist(), strict=True)}) == 2
    assert np.bincount(labels)[0] >= np.bincount(labels)[1]


def test_windows_that_are_all_alike_are_one_cluster() -> None:
    assert cluster_windows(np.full((5, 2, 4), 0.5), 3, seed=0).tolist() == [0] * 5


# -- requests, steps, files ------------------------------------------------------------------------


def test_the_batch_decides_about_steps_and_nothing_else() -> None:
    alone, together = (drawn(model(), num_requests=7, batch_size=size) for size in (1, 3))
    for request in range(7):
        one, other = (t.take(t.request_id == request) for t in (alone, together))
        assert (one.expert_ids == other.expert_ids).all()
        assert (one.expert_weights == other.expert_weights).all()  # type: ignore[union-attr]
        assert (one.stage == other.stage).all()
        assert (one.position == other.position).all()
    assert alone.step[-1] > together.step[-1]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_requests_run_side_by_side_and_prompts_take_one_step(batch_size: int) -> None:
    trace = drawn(model(), num_requests=9, batch_size=batch_size)
    per_step = [np.unique(trace.request_id[trace.step == step]) for step in np.unique(trace.step)]
    assert max(map(len, per_step)) == batch_size
    assert (np.diff(trace.step) >= 0).all()
    for request in range(9):
        own = trace.take(trace.request_id == request)
        prompt = own.phase == PREFILL
        assert len(np.unique(own.step[prompt])) == 1
        assert (np.diff(own.step[~prompt]) == 1).all()  # one token a step, without a gap
        assert own.step[~prompt][0] == own.step[prompt][0] + 1


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.integers(1, 5), st.integers(1, 90), st.integers(0, 90))
def test_as_many_rows_as_wanted(tokens: int, batch: int, prompt: int, output: int) -> None:
    trace = drawn(
        model(),
        num_tokens=tokens,
        batch_size=batch,
        prompt_tokens=prompt,
        output_tokens=output,
        weights=False,
    )
    assert len(trace) == tokens
    lengths = np.bincount(trace.request_id)
    assert (lengths[:-1] == prompt + output).all()
    first = trace.take(trace.request_id == 0)
    assert (first.phase == PREFILL).sum() == min(prompt, tokens)


def test_lengths_come_from_the_source_where_stages_do_not_end() -> None:
    trace = drawn(model(stages_told=False), num_requests=30)
    lengths = {
        (int((own.phase == PREFILL).sum()), int((own.phase != PREFILL).sum()))
        for own in (trace.take(trace.request_id == request) for request in range(30))
    }
    assert lengths == {(10, 50), (20, 100)}


def test_a_file_is_valid_synthetic_and_the_same_for_the_same_seed(tmp_path: Path) -> None:
    files = []
    for number, seed in enumerate((5, 5, 6)):
        asked = Wanted(num_requests=4, seed=seed, batch_size=2)
        meta = header(model(), asked)
        files.append(tmp_path / f"{number}.parquet")
        with TraceWriter(files[-1], meta) as writer:
            for chunk in draw_trace(model(), asked, meta):
                writer.append(chunk)
    same, again, other = (file.read_bytes() for file in files)
    assert same == again != other
    found = read_trace(files[0])
    assert found.meta.provenance.kind == "synthetic"
    assert "synthetic" in found.meta.model
    assert any("synthetic" in note for note in found.meta.notes)
    np.testing.assert_allclose(
        found.expert_weights.astype(float).sum(axis=2),
        1,
        atol=2e-3,  # type: ignore[union-attr]
    )


def test_memory_does_not_grow_with_the_trace() -> None:
    large = model(num_layers=4, num_experts=64, top_k=8)

    def peak_bytes(tokens: int) -> int:
        asked = Wanted(num_tokens=tokens, prompt_tokens=16, output_tokens=6000, batch_size=2)
        tracemalloc.start()
        rows = sum(map(len, draw_trace(large, asked, header(large, asked))))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert rows == tokens
        return peak

    peak_bytes(100)  # what is imported on first use
    assert peak_bytes(24_000) < 1.2 * peak_bytes(6_000)


def test_a_request_depends_on_its_number_and_the_seed_only() -> None:
    router, stages = Router(model()), np.zeros(64, dtype=np.int16)
    one, same, other = (router.request(*of).next(stages) for of in ((4, 1), (4, 1), (5, 1)))
    assert (one.expert_ids == same.expert_ids).all()
    assert (one.expert_ids != other.expert_ids).any()
    assert generator(1, 2, 1).random() != generator(1, 2, 2).random()


# -- the fit as a file -----------------------------------------------------------------------------


def test_a_fit_comes_back_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "fit.json"
    model().save(path)
    found = load_model(path)
    assert found.to_dict() == model().to_dict()
    assert (drawn(found, num_requests=2).stage == drawn(model(), num_requests=2).stage).all()
    assert [entry.name for entry in tmp_path.iterdir()] == ["fit.json"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"rank"', '"renk"', "key 'renk' is not known; did you mean 'rank'?"),
        ('"fit_version": 2', '"fit_version": 7', "a fit of version 7: must be one of version 2"),
        ('"fit_version": 2, ', "", "not a fit: must be one of version 2; fit again with"),
        ('"seed": 3', '"seed": -1', "seed is -1: must be a number >= 0"),
        ('"seed": 3', '"seed": null', "seed is None: must be a number >= 0"),
        ('"rank": 5', '"rank": "2"', "rank is '2': must be a number >= 0"),
        ('"coupling": 0.5', '"coupling": null', "coupling is None: must be a number"),
        ('"stages_told": true', '"stages_told": "no"', "stages_told is no: must be bool"),
        ('"notes": []', '"notes": "text"', "notes is 'text': must be a list of strings"),
        ('"source": {', '"source": null, "was": {', "key 'was' is not known"),
        ('"kind": ', '"kindly": ', "source.kind is missing: must be given"),
        ('"shape": [3, ', '"shape": [', "must be 3 numbers"),
        ('"top_k": 2', '"top_k": 16', "top_k is 16: must be < num_experts"),
        ('"coupling": 0.5', '"coupling": 1.5', "coupling is 1.5: must lie in"),
        ('"num_layers": 3', '"num_layers": 4', "offsets is (2, 3, 16): must have the shape"),
        ('"classes": [[0,', '"classes": [[5,', "classes is out of range: must lie in 0..1"),
        (
            '"stage_names": ["think", "speak"]',
            '"stage_names": 5',
            "stage_names is 5: must be a list of strings",
        ),
        ('{"fit_version"', '{"fit_version', "not JSON"),
    ],
)
def test_a_broken_fit_is_told_in_one_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "fit.json"
    model().save(path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(TraceError) as error:
        load_model(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_wanted_amounts_are_checked() -> None:
    for name in ("num_requests", "num_tokens", "prompt_tokens", "batch_size"):
        with pytest.raises(TraceError, match=f"{name} is 0: must be >= 1"):
            replace(Wanted(), **{name: 0})
    with pytest.raises(TraceError, match=f"prompt_tokens is {10**9}: must be <= 4194304"):
        Wanted(prompt_tokens=10**9)


def test_a_chain_of_the_file_sums_to_one() -> None:
    thirds = StageChain(np.full(3, 1 / 3), np.full((3, 4), 0.25), np.ones((3, 9)))
    found = StageChain.from_dict(thirds.to_dict())
    assert found.begins.sum() == pytest.approx(1, abs=1e-12)
    assert len(found.draw(50, np.random.default_rng(0))) == 50
