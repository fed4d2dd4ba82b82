"""Only gates are trained, against a frozen snapshot, in steps that can be resumed; on every router family."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from real.remoe_gates import Gates, load_gates, save_gates  # noqa: E402
from real.remoe_loss import LossWeights  # noqa: E402
from real.remoe_metrics import as_trace, lru_hit_rates, measure_gates  # noqa: E402
from real.remoe_run import losses_of, train_arm  # noqa: E402
from real.remoe_subject import GateSubject  # noqa: E402
from real.remoe_tasks import TaskResult, difference  # noqa: E402
from real.remoe_texts import FileTexts, TinyTexts, pad  # noqa: E402
from real.remoe_train import GateTrainer, TrainSettings, losses, objective  # noqa: E402
from sim.types import ConfigError  # noqa: E402
from tests.moe_models import ARCHITECTURES, VOCAB, build  # noqa: E402
from traces.locality_reuse import overlap_by_lag  # noqa: E402
from traces.record_hooks import RouterRecorder  # noqa: E402
from traces.tiny import CHECKPOINT_DIR  # noqa: E402
from traces.tiny.model import load_model  # noqa: E402
from traces.tiny.tokenizer import CharTokenizer  # noqa: E402

TINY_GATES = CHECKPOINT_DIR.parent / "remoe_gates.safetensors"
LOSS = LossWeights(
    trust=0.1, reuse=2.0, smooth=0.1, lag=0.1, window=0.01, lags=(1, 2), window_tokens=4
)
SETTINGS = TrainSettings(
    steps=6,
    warm_up_steps=2,
    learning_rate=0.02,
    decay=True,
    clip=1.0,
    accumulate=2,
    save_every=2,
)


def rows(seed: int, count: int) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    return [draw.integers(3, VOCAB, size=draw.integers(6, 20)).tolist() for _ in range(count)]


def texts(seed: int = 0, batch: int = 4) -> FileTexts:
    held_out = rows(1, 6)
    return FileTexts(rows(0, 12), held_out, length_tokens=16, batch=batch, seed=seed, pad_id=0)


def subject(name: str = "qwen3_moe") -> GateSubject:
    return GateSubject(build(name), None, texts(), {"model": name}, False)


def run(folder: Path, steps: int = 6, resume: bool = False, loss: LossWeights = LOSS) -> Any:
    settings = replace(SETTINGS, steps=steps)
    return train_arm(subject(), "remoe", loss, settings, folder, resume=resume)


# -- gates -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_every_family_has_gates_whose_snapshot_agrees_before_any_step(name: str) -> None:
    model = build(name)
    batch = pad([list(range(3, 15)), list(range(20, 28))], [1, 1], 0)
    with Gates(model) as gates:
        before = gates.digest_of_the_rest()
        parts = losses(model, gates, batch, LOSS)
        objective(parts, LOSS, 1.0).backward()
        assert parts["trust"].item() == pytest.approx(0.0, abs=1e-6)
        assert math.isfinite(parts["ce"].item())
        moved = [weight.grad for weight in gates.weights.values() if weight.grad is not None]
        assert len(moved) >= len(gates.layers)
        assert gates.digest_of_the_rest() == before
    others = [w for name, w in model.named_parameters() if name not in gates.weights]
    assert others
    assert all(weight.grad is None for weight in others)
    assert all(bool(gradient.any()) for gradient in moved)


def test_the_snapshot_judges_what_the_gates_see_now() -> None:
    """After the gates moved, the reference is the old gate on the hidden states of the new model."""
    model = build("qwen3_moe")
    with Gates(model) as gates:
        old = gates.values()
        gates.set({name: weight + 0.5 * torch.randn_like(weight) for name, weight in old.items()})
        seen: list[Any] = []
        hooks = [
            layer.router.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
            for layer in gates.layers
        ]
        model(input_ids=torch.arange(3, 12)[None], use_cache=False)
        for hidden, weight, judged in zip(seen, old.values(), gates.take(), strict=True):
            flat = hidden.reshape(-1, hidden.shape[-1])
            by_hand = torch.log_softmax(flat.float() @ weight.float().T, dim=-1)
            assert torch.allclose(judged.log_reference, by_hand, atol=1e-5)
            assert not torch.allclose(judged.log_p, by_hand, atol=1e-2)
        for hook in hooks:
            hook.remove()


def test_chosen_experts_are_those_a_recorder_sees() -> None:
    model = build("deepseek_v3")
    ids = torch.arange(3, 20)[None]
    with RouterRecorder(model, gates_ahead=0) as recorder, torch.no_grad():
        model(input_ids=ids, use_cache=False)
        (record,) = recorder.take()
    with Gates(model) as gates, torch.no_grad():
        model(input_ids=ids, use_cache=False)
        chosen = torch.stack([judged.chosen for judged in gates.take()], dim=1).numpy()
    assert np.array_equal(np.sort(chosen), np.sort(record.expert_ids))


def test_gates_are_written_with_what_made_them_and_others_are_refused(tmp_path: Path) -> None:
    gates = Gates(build("qwen3_moe"))
    path = tmp_path / "gates.safetensors"
    save_gates(path, gates.values(), {"seed": 3})
    values, made = load_gates(path)
    assert made == {"seed": 3}
    assert values.keys() == gates.weights.keys()
    name = next(iter(values))
    with pytest.raises(ConfigError, match=r"layers.0.mlp.gate.weight.*missing among the 1"):
        gates.set({key: value for key, value in values.items() if key != name})
    with pytest.raises(ConfigError, match=r"the model has none; did you mean"):
        gates.set({**values, name.replace("gate", "gates"): values[name]})
    with pytest.raises(ConfigError, match=r"has shape \[8\]: must be \[8, 32\]"):
        gates.set({**values, name: values[name][:, 0]})
    path.write_bytes(b"no gates")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_gates(path)


# -- texts -----------------------------------------------------------------------------------------


def test_batches_follow_from_seed_and_number_alone() -> None:
    stream = texts().batches(0)
    first = [next(stream) for _ in range(7)]
    again = texts().batches(5)
    for batch in first[5:]:
        assert torch.equal(batch.ids, next(again).ids)
    other = next(texts(seed=1).batches(0))
    assert not torch.equal(other.ids, first[0].ids)


def test_every_text_is_seen_once_a_turn_and_long_ones_are_cut() -> None:
    source = FileTexts(
        [[5] * 40, [6] * 3, [7]], [[8, 8]], length_tokens=16, batch=2, seed=0, pad_id=0
    )
    stream = source.batches(0)
    turn = [next(stream) for _ in range(2)]
    lengths = sorted(length for batch in turn for length in batch.real.sum(dim=1).tolist())
    assert lengths == [3, 8, 16, 16]  # 40 = 16 + 16 + 8; a text of one token is left out


def test_too_few_texts_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--texts: 1 texts to train on.*must be at least 2"):
        FileTexts([[1, 2]], [[1, 2]], length_tokens=8, batch=2, seed=0, pad_id=0)


def test_the_bundled_models_answers_are_its_solutions() -> None:
    tokenizer = CharTokenizer()
    source = TinyTexts(tokenizer, batch=2, seed=0, num_held_out=3)
    batches = source.held_out()
    assert sum(len(batch.ids) for batch in batches) == 3
    for ids, answer in zip(batches[0].ids, batches[0].answer, strict=True):
        question = tokenizer.decode(ids[1:][~answer].tolist())
        assert question.endswith("?\n")
        assert question.count("\n") == 1
    trained = next(source.batches(0))
    assert torch.equal(trained.answer, trained.real[:, 1:])


# -- training --------------------------------------------------------------------------------------


def test_reuse_rises_only_gates_change_and_the_model_is_put_back(tmp_path: Path) -> None:
    own = subject("gpt_oss")  # whose gates have a bias: random texts leave nothing else to learn
    state = {name: tensor.clone() for name, tensor in own.model.state_dict().items()}
    settings = replace(SETTINGS, steps=30, learning_rate=0.05, accumulate=1)
    loss = replace(LOSS, reuse=20.0, trust=0.01)
    values = train_arm(own, "remoe", loss, settings, tmp_path / "remoe", resume=False)
    assert all(torch.equal(own.model.state_dict()[name], old) for name, old in state.items())
    with Gates(own.model) as gates:
        before = measure_gates(own.model, gates, own.texts.held_out(), (2, 4))
        gates.set(values)
        after = measure_gates(own.model, gates, own.texts.held_out(), (2, 4))
    assert after.mean_eor > 1.2 * before.mean_eor
    assert after.lru_hit_rate[4] > before.lru_hit_rate[4]
    assert max(after.trust) > 0
    assert max(before.trust) == pytest.approx(0.0, abs=1e-6)
    changed = own.model.state_dict()
    assert {name for name, old in state.items() if not torch.equal(changed[name], old)} == {*values}


def test_a_stopped_run_goes_on_to_the_same_gates(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")

    class StopError(Exception):
        pass

    def stop(arm: str, step: dict[str, float], total: int) -> None:
        if step["step"] == 5:  # saved after 4
            raise StopError

    with pytest.raises(StopError):
        train_arm(subject(), "remoe", LOSS, SETTINGS, tmp_path / "halted", resume=False, tell=stop)
    assert not (tmp_path / "halted" / "gates.safetensors").exists()
    resumed = run(tmp_path / "halted", resume=True)
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())
    logs = [
        [
            {key: value for key, value in json.loads(line).items() if key != "seconds"}
            for line in (tmp_path / name / "log.jsonl").read_text().splitlines()
        ]
        for name in ("whole", "halted")
    ]
    assert logs[0] == logs[1]
    assert [step["step"] for step in logs[0]] == [1, 2, 3, 4, 5, 6]


def test_a_run_is_not_overwritten_nor_mixed_with_another(tmp_path: Path) -> None:
    run(tmp_path / "remoe", steps=2)
    with pytest.raises(ConfigError, match="holds a run already; --resume goes on with it"):
        run(tmp_path / "remoe", steps=2)
    with pytest.raises(ConfigError, match=r"other settings; lag was 0.1, and is 0.2"):
        run(tmp_path / "remoe", steps=2, resume=True, loss=LOSS.scaled(2.0))
    (tmp_path / "remoe" / "state.pt").write_bytes(b"half a file")
    with pytest.raises(ConfigError, match=r"state.pt: cannot be read"):
        run(tmp_path / "remoe", steps=2, resume=True)


def test_the_control_has_cross_entropy_alone(tmp_path: Path) -> None:
    control = losses_of("control", LOSS)
    train_arm(
        subject(), "control", control, replace(SETTINGS, steps=1), tmp_path / "c", resume=False
    )
    (line,) = (tmp_path / "c" / "log.jsonl").read_text().splitlines()
    assert {"ce", "overlap"} == json.loads(line).keys() - {
        "step",
        "alpha",
        "norm",
        "seconds",
    }


def test_alpha_and_rate_rise_together_and_the_rate_falls_to_nothing() -> None:
    settings = replace(SETTINGS, steps=10, warm_up_steps=4, learning_rate=1.0)
    assert [settings.alpha(step) for step in (0, 2, 4, 9)] == [0.0, 0.5, 1.0, 1.0]
    assert [settings.rate(step) for step in (0, 3, 4, 7, 10)] == [0.25, 1.0, 1.0, 0.5, 0.0]
    assert replace(settings, decay=False).rate(9) == 1.0


def test_a_loss_that_is_not_finite_is_one_line(tmp_path: Path) -> None:
    own = subject()
    with torch.no_grad():
        own.model.lm_head.weight.fill_(float("inf"))
    with pytest.raises(ConfigError, match=r"step 0: the loss is nan.*learning_rate = 0.02"):
        train_arm(own, "remoe", LOSS, SETTINGS, tmp_path / "r", resume=False)


def test_low_precision_models_are_stepped_in_float32(tmp_path: Path) -> None:
    """Steps far below what bfloat16 can show of a weight add up, and what is kept is bfloat16."""
    own = GateSubject(build("qwen3_moe").bfloat16(), None, texts(), {"model": "q"}, False)
    settings = replace(SETTINGS, learning_rate=1e-4, decay=False, warm_up_steps=0, accumulate=1)
    with Gates(own.model) as gates:
        trainer = GateTrainer(own.model, gates, own.texts, settings, LOSS, tmp_path, {})
        start = {name: master.detach().clone() for name, master in trainer._masters.items()}
        trainer.run()
        for name, master in trainer._masters.items():
            moved = (master.detach() - start[name]).abs().max().item()
            assert 2e-4 < moved < 1e-3
            assert torch.equal(gates.weights[name], master.detach().bfloat16())


# -- figures ---------------------------------------------------------------------------------------


def test_figures_of_held_out_texts_by_hand() -> None:
    """Two layers' worth of figures from the ids themselves; perplexity from the model's own logits."""
    own = subject()
    held_out = own.texts.held_out()
    with Gates(own.model) as gates:
        found = measure_gates(own.model, gates, held_out, (2, 8))
    losses_, shares, counts = [], [], np.zeros(8)
    for row in rows(1, 6):
        row = row[:16]  # as cut
        with RouterRecorder(own.model, gates_ahead=0) as recorder, torch.no_grad():
            logits = own.model(input_ids=torch.tensor([row]), use_cache=False).logits[0, :-1]
            (record,) = recorder.take()
        targets = torch.tensor(row[1:])
        losses_ += torch.nn.functional.cross_entropy(logits, targets, reduction="none").tolist()
        first = [set(ids) for ids in record.expert_ids[:, 0].tolist()]
        shares += [len(a & b) / 2 for a, b in zip(first[1:], first, strict=False)]
        counts += np.bincount(record.expert_ids[:, 0].ravel(), minlength=8)
    rest = [row[16:] for row in rows(1, 6) if len(row) > 17]  # pieces of cut texts count as texts
    assert found.num_texts == 6 + len(rest)
    if not rest:
        assert found.loss == pytest.approx(np.mean(losses_), rel=1e-4)
        assert found.eor[0] == pytest.approx(np.mean(shares))
        assert found.load_cv[0] == pytest.approx(counts.std() / counts.mean())
    chance = np.mean([2 / 8 * (1 + cv**2) for cv in found.load_cv])
    assert found.eor_of_load == pytest.approx(chance)
    assert found.perplexity == pytest.approx(math.exp(found.loss))
    assert found.lru_hit_rate[2] == pytest.approx(found.mean_eor * _pairs_share(found), rel=0.05)


def _pairs_share(found: Any) -> float:
    """An LRU of k slots hits what the token before used, and nothing at a text's first token."""
    return (found.num_tokens - found.num_texts) / found.num_tokens


def test_lru_hits_by_hand_with_empty_caches_at_every_text() -> None:
    first = np.array([[[0, 1]], [[2, 0]], [[1, 3]]], dtype=np.uint16)
    # Two slots: 0 of {2, 0}, none of {1, 3}. Three slots hold {2, 0, 1} after the second: 1 hits too.
    assert lru_hit_rates([first], 4, (2, 3, 9)) == {2: 1 / 6, 3: 2 / 6, 9: 2 / 6}
    assert lru_hit_rates([first, first], 4, (2,)) == {2: 1 / 6}


def test_differences_are_pair_by_pair() -> None:
    before = TaskResult((True, True, False, False))
    after = TaskResult((True, False, False, False))
    assert before.accuracy == 0.5
    assert before.standard_error == pytest.approx(0.25)
    change, error = difference(after, before)
    assert change == -0.25
    assert error == pytest.approx(0.25)


def test_the_reuse_of_independent_tokens_is_that_of_their_load() -> None:
    """With tokens in any order, EOR is what the shares of the load give by themselves."""
    draw = np.random.default_rng(0)
    shares = draw.dirichlet(np.ones(8))
    ids = np.stack([draw.choice(8, size=2, replace=False, p=shares) for _ in range(6_000)])
    trace = as_trace([ids[:, None].astype(np.uint16)], 8)
    counts = np.bincount(ids.ravel(), minlength=8)
    cv = counts.std() / counts.mean()
    found = overlap_by_lag([trace], trace.meta, (1,)).pooled[0]
    assert found == pytest.approx(2 / 8 * (1 + cv**2), rel=0.03)


def test_the_gates_that_come_with_the_project_do_what_is_said_of_them() -> None:
    """On a few held-out texts: reuse up by far more than 26 %, perplexity within 2 %, all else untouched."""
    model, tokenizer = load_model()
    values, made = load_gates(TINY_GATES)
    held_out = TinyTexts(tokenizer, batch=3, seed=0, num_held_out=6).held_out()
    with Gates(model) as gates:
        assert made["rest_sha256"] == gates.digest_of_the_rest()
        before = measure_gates(model, gates, held_out, (4, 6))
        gates.set(values)
        after = measure_gates(model, gates, held_out, (4, 6))
    assert after.mean_eor > 1.26 * before.mean_eor
    assert after.lru_hit_rate[6] > before.lru_hit_rate[6]
    assert after.perplexity < 1.02 * before.perplexity
    assert after.answer_perplexity < 1.02 * before.answer_perplexity
