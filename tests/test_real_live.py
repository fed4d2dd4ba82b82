"""Live runs: the same tokens as the unmodified model, behind every lossless policy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the real backend needs torch")
pytest.importorskip("transformers", reason="live runs need transformers")

from real.quality import Answers, agreement, answers_at_once, forced  # noqa: E402
from real.rig import Tier  # noqa: E402
from sim.build import build  # noqa: E402
from sim.lockstep import run_lockstep  # noqa: E402
from sim.types import ConfigError, Phase  # noqa: E402
from tests import moe_models  # noqa: E402
from tests.live_models import (  # noqa: E402
    FAMILIES,
    PROMPTS,
    attached,
    batch_of,
    generated,
    policies,
    scenario_of,
    settings,
)
from traces.record import Generation, RouterRecorder, record_generate  # noqa: E402
from traces.record_rows import Annotation, DroppedRows, Request, assemble, join_records  # noqa: E402
from traces.store import write_trace  # noqa: E402

ALONE = (
    *("lru", "lfu", "saem", "prefetch_next_gate", "fiddler", "hybrimoe", "llama_cpp", "on_demand"),
    *("ablation_repack", "moe_infinity", "lru_global", "stage_memory"),
)
"""Policies that also run with one request at a time."""
NEEDS_THE_FUTURE = {
    *("belady", "belady_bypass", "lru_global_next_gate", "lru_union_oracle", "prefetch_assumed"),
    *("prefetch_assumed_adapmoe", "prefetch_assumed_qwen3", "prefetch_perfect", "stage_oracle"),
    "stage_oracle_fixed",
}
NEEDS_ANNOTATION = {"saem_annotated", "stage_cache_annotated"}
LOSSY = {
    *(
        "adapmoe",
        "buddymoe",
        "cache_prior",
        "cold_drop",
        "cumulative_sum",
        "daop",
        "hobbit",
        "max_rank",
    ),
    *("ktransformers_deferral", "reuse", "smoe"),
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model() -> Any:
    return moe_models.build("qwen3_moe", num_hidden_layers=4)


@pytest.fixture(scope="module")
def expected(model: Any) -> dict[int, list[list[int]]]:
    return {size: generated(model, size) for size in (1, 3)}


@pytest.fixture(scope="module")
def past(model: Any, tmp_path_factory: Any) -> str:
    """Return the path of a trace of the model, from which policies may learn."""
    trace = record_generate(
        model,
        [[7, 8, 9], [10, 11], [12, 13, 14], [15]],
        Generation(max_new_tokens=8, batch_size=2),
        annotation=Annotation(piece=str),
        logits=True,
    )
    path = tmp_path_factory.mktemp("trace") / "past.parquet"
    write_trace(path, trace)
    return str(path)


# -- the same tokens -------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_tokens_are_those_of_the_model(family: str, implementation: str) -> None:
    own = moe_models.build(family)
    own.set_experts_implementation(implementation)
    for size in (1, 3) if implementation == "eager" else (3,):
        wanted = generated(own, size)
        with attached(own, settings("lru"), size) as (live, _):
            assert generated(own, size, live=live) == wanted
    assert own.get_experts_implementation()[""] == implementation


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_eager_model_to_the_bit(family: str) -> None:
    own = moe_models.build(family)
    own.set_experts_implementation("eager")
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])
    with torch.no_grad():
        wanted = own(ids).logits
        with attached(own, settings("lru")) as (live, _):
            live.begin_batch(batch_of(ids.tolist()))
            assert torch.equal(own(ids).logits, wanted)


def learning(policy: str, ratio: float, past: str) -> dict[str, Any]:
    """Return the settings of a policy that may learn from a trace of the model."""
    config = settings(policy, ratio)
    config["trace"] = {"name": "past", "path": past}
    if policy == "saem_drift":  # its windows are longer than the trace
        config["policy"]["stages"] |= {"short": 2, "long": 4}
    return config


@pytest.mark.parametrize(
    "policy", sorted({*policies()} - NEEDS_THE_FUTURE - NEEDS_ANNOTATION - LOSSY)
)
def test_every_lossless_policy_gives_the_same_tokens(
    policy: str, model: Any, expected: Any, past: str
) -> None:
    """In a padded batch, with less than one slot a layer, so that experts run from staging slots."""
    with attached(model, learning(policy, 0.05, past), 3) as (live, executor):
        assert not executor.offloader.policies.lossy
        assert generated(model, 3, live=live) == expected[3]
        assert executor.tables.steps.rows


@pytest.mark.parametrize("policy", ALONE)
def test_a_single_request_gets_the_same_tokens(
    policy: str, model: Any, expected: Any, past: str
) -> None:
    with attached(model, learning(policy, 0.25, past)) as (live, _):
        assert generated(model, 1, live=live, given=PROMPTS[:1]) == expected[1][:1]


@pytest.mark.parametrize("policy", sorted(LOSSY - {"hobbit"}))
def test_lossy_policies_run_and_keep_a_ledger_of_finite_loss(
    policy: str, model: Any, past: str
) -> None:
    config = learning(policy, 0.25, past)
    texts = [Request(0, [*PROMPTS[0], 20, 21, 22, 23], len(PROMPTS[0]))]
    plain = answers_at_once(model, texts)
    with attached(model, config) as (live, executor):
        assert executor.offloader.policies.lossy
        live.begin_batch(batch_of([PROMPTS[0]]))
        made = forced(model, texts)
    assert made.num_tokens == plain.num_tokens == 4
    assert np.isfinite(made.loss[0]).all()


# -- what cannot run live --------------------------------------------------------------------------


@pytest.mark.parametrize("policy", sorted(NEEDS_THE_FUTURE))
def test_policies_that_know_the_future_are_refused(policy: str, model: Any) -> None:
    with pytest.raises(ConfigError, match=f"policy/{policy}: knows the future, which a live run"):
        scenario_of(model, settings(policy), 1)


@pytest.mark.parametrize("policy", sorted(NEEDS_ANNOTATION))
def test_policies_that_need_an_annotation_are_refused(policy: str, model: Any) -> None:
    with pytest.raises(ConfigError, match="needs stage, which only a recorded trace has"):
        scenario_of(model, settings(policy), 1)


def test_policies_that_learn_beforehand_want_a_trace(model: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"policy/fiddler: learns from a trace beforehand; trace\.path"
    ):
        scenario_of(model, settings("fiddler"), 1)


def test_a_trace_of_another_model_is_refused(model: Any) -> None:
    config = settings("fiddler")
    config["trace"] = {"name": "tiny", "path": "pkg://traces.tiny/logits.parquet"}
    with pytest.raises(ConfigError, match="8 layers of 32 experts, must have 3 of 8"):
        scenario_of(model, config, 1)


@pytest.mark.parametrize(
    ("policy", "changes", "rule"),
    [
        ("lru", {"host_bytes": 10**6}, "cache.host_bytes"),
        ("lru", {"joint_bytes": 10**6}, "cache.joint_bytes"),
    ],
)
def test_memory_that_a_live_run_does_not_have_is_refused(
    policy: str, changes: dict[str, Any], rule: str, model: Any
) -> None:
    with pytest.raises(ConfigError, match=rule):
        scenario_of(model, settings(policy, **changes), 1)


def test_host_policies_and_placement_over_storage_are_refused(model: Any, past: str) -> None:
    config = settings("lru")
    config["policy"]["host"] = {"_target_": "sim.policies.classic.LRU"}
    with pytest.raises(ConfigError, match="host: a live run has no tier below host memory"):
        scenario_of(model, config, 1)
    config = settings("fiddler")
    config["trace"] = {"name": "past", "path": past}
    with pytest.raises(ConfigError, match="placement: computes experts where their weights lie"):
        scenario_of(model, config, 1, Tier("storage"))


# -- what policies are told ------------------------------------------------------------------------


def test_steps_count_tokens_and_not_padding(model: Any) -> None:
    seen = []
    with attached(model, settings("lru"), 3) as (live, executor):
        begin = executor.begin_step
        executor.begin_step = lambda info: (seen.append(info), begin(info))[1]
        generated(model, 3, live=live)
    first, second = seen[:2]
    assert (first.phase, first.num_tokens, first.num_sequences) == (Phase.PREFILL, 12, 3)
    assert first.request_ids == (0,) * 6 + (1,) * 2 + (2,) * 4
    assert first.texts == tuple(str(token) for prompt in PROMPTS for token in prompt)
    assert (first.kv_tokens, first.attention_pairs) == (12, 21 + 3 + 10)
    assert (first.num_outputs, first.num_decoding) == (3, 0)
    assert (second.phase, second.num_tokens, second.num_decoding) == (Phase.DECODE, 3, 3)
    assert (second.kv_tokens, second.held_kv_tokens) == (15, 15)
    assert [info.step for info in seen] == list(range(len(seen)))


def test_a_sequence_that_has_ended_is_no_token_any_more(model: Any) -> None:
    plain = generated(model, 3)
    end = plain[1][len(PROMPTS[1]) + 1]  # the second token that request 1 generates
    sizes = []
    with attached(model, settings("lru"), 3) as (live, executor):
        begin = executor.begin_step
        executor.begin_step = lambda info: (sizes.append(set(info.request_ids)), begin(info))[1]
        batch = batch_of(PROMPTS)
        batch._eos = [end]
        live.begin_batch(batch)
        generation = Generation(max_new_tokens=6, batch_size=3, eos=(end,))
        from traces.record import generate_batch

        made = generate_batch(model, PROMPTS, 0, generation)
        live.end_batch()
        rows = executor.tables.requests.rows
    processed = [sum(number in step for step in sizes) for number in range(3)]
    wanted = [len(request.tokens) - request.num_prompt_tokens for request in made]
    assert processed == wanted
    assert sorted(row[6] for row in rows) == sorted(wanted)  # output tokens of the request table


def test_what_routers_say_is_what_a_recorder_writes(model: Any) -> None:
    """Ids, weights, scores and early gates as policies read them, against the recorder's own hooks."""
    told: dict[str, list[Any]] = {name: [] for name in ("ids", "weights", "scores", "one", "two")}
    with attached(model, settings("lru"), 3) as (live, executor):
        run = executor.run_layer

        def spy(routing: Any, *rest: Any) -> Any:
            told["ids"].append((routing.layer, routing.topk_ids.copy()))
            told["weights"].append(routing.topk_weights.copy())
            told["scores"].append(routing.router_logits.copy())
            told["one"].append((routing.layer, routing.gate_ahead(1)))
            told["two"].append((routing.layer, routing.gate_ahead(2)))
            return run(routing, *rest)

        executor.run_layer = spy
        with RouterRecorder(model, logits=True, gates_ahead=2) as recorder:
            generated(model, 3, live=live)
            records = recorder.take()
    number = 0
    for record in records:
        for layer in range(record.expert_ids.shape[1]):
            assert told["ids"][number][0] == layer
            np.testing.assert_array_equal(told["ids"][number][1], record.expert_ids[:, layer])
            rounded = record.expert_weights[:, layer].astype(np.float16)
            np.testing.assert_array_equal(told["weights"][number], rounded)
            np.testing.assert_array_equal(told["scores"][number], record.router_logits[:, layer])
            if layer < 2:
                np.testing.assert_array_equal(
                    told["one"][number][1], record.next_gate_ids[:, layer]
                )
            else:
                assert told["one"][number][1] is None
            if layer < 1:
                early = record.next_gate_ids_2[:, layer]
                np.testing.assert_array_equal(told["two"][number][1], early)
            number += 1
    assert number == len(told["ids"]) > 0


@pytest.mark.parametrize("family", ["deepseek_v3", "afmoe", "gpt_oss"])
def test_later_gates_are_judged_with_what_their_own_blocks_hold(family: str) -> None:
    """These have correction biases by layer, or routers of another kind."""
    own = (
        moe_models.build(family, num_hidden_layers=4)
        if family != "gpt_oss"
        else moe_models.build(family)
    )
    told = []
    with attached(own, settings("lru")) as (live, executor):
        run = executor.run_layer
        executor.run_layer = lambda routing, *rest: (
            told.append(routing.gate_ahead(1)),
            run(routing, *rest),
        )[1]
        with RouterRecorder(own, gates_ahead=1) as recorder:
            generated(own, 1, live=live)
            records = recorder.take()
    early = [
        record.next_gate_ids[:, layer]
        for record in records
        for layer in range(record.expert_ids.shape[1])
    ]
    last = records[0].expert_ids.shape[1] - 1
    for number, (said, wanted) in enumerate(zip(told, early, strict=True)):
        if number % (last + 1) == last:
            assert said is None
        else:
            np.testing.assert_array_equal(said, wanted)


def test_only_what_is_asked_for_is_worked_out(model: Any, monkeypatch: Any) -> None:
    from real.live_routing import RouterTaps

    asked = []
    for name in ("scores", "judge"):
        method = getattr(RouterTaps, name)
        monkeypatch.setattr(
            RouterTaps, name, lambda self, *a, m=method, n=name: (asked.append(n), m(self, *a))[1]
        )
    with attached(model, settings("lru")) as (live, _):
        generated(model, 1, 2, live)
    assert asked == []
    with attached(model, settings("prefetch_next_gate")) as (live, _):
        generated(model, 1, 2, live)
    assert set(asked) == {"judge"}


def test_policies_cannot_change_what_routers_said(model: Any) -> None:
    with attached(model, settings("lru")) as (live, executor):
        run = executor.run_layer

        def spoil(routing: Any, *rest: Any) -> Any:
            routing.topk_ids[:] = 0
            return run(routing, *rest)

        executor.run_layer = spoil
        with pytest.raises(ValueError, match="read-only"):
            generated(model, 1, 2, live)


def test_decisions_are_those_of_a_simulation_of_the_recorded_run(model: Any) -> None:
    """A trace recorded live, replayed in lockstep: the same hits, loads and bytes, step by step."""
    config = settings("lfu", 0.25)
    generation = Generation(max_new_tokens=6, batch_size=1, eos=(2,))
    with attached(model, config, lockstep=True) as (live, executor):
        with RouterRecorder(model, logits=True) as recorder:
            tokens = generated(model, 1, live=live)
            rows = join_records(recorder.take())
        counted = [row[8:26] for row in executor.tables.steps.rows]
        meta = scenario_of(model, config, 1).workload.trace.meta
    rows["batch_row"] = np.repeat(np.arange(3), [len(text) - 1 for text in tokens]).astype(np.int32)
    requests = [Request(n, text, len(PROMPTS[n])) for n, text in enumerate(tokens)]
    trace = assemble(
        replace(meta, sorted_by_weight=True), rows, requests, Annotation(), DroppedRows()
    )
    from real.adapters import find_experts
    from real.live_build import live_config
    from tests.live_models import RAM, shape_of

    made = live_config(config, shape_of(model, find_experts(model)), 1, RAM)
    made["workload"]["requests"] = [0, 3]
    made["calibration"] = dict(made["calibration"]) | {"allow_overlap": True}
    scenario = build(made, trace=trace)
    simulated = run_lockstep(scenario.workload, scenario.offloader)
    assert [row[8:26] for row in simulated.rows] == counted
    assert generation.batch_size == 1


# -- faults ----------------------------------------------------------------------------------------


def test_a_failure_in_the_middle_gives_the_model_back(model: Any, expected: Any) -> None:
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())

    def fail(*_: Any) -> Any:
        raise RuntimeError("a copy failed")

    def run() -> None:
        with attached(model, settings("lru")) as (live, executor):
            executor.run_layer = fail
            generated(model, 1, live=live)

    with pytest.raises(RuntimeError, match="a copy failed"):
        run()
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert hooks == sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    assert generated(model, 1) == expected[1]


def test_a_call_outside_a_batch_and_beams_are_refused(model: Any) -> None:
    from real.errors import RealError

    with attached(model, settings("lru")) as (live, _), torch.no_grad():
        with pytest.raises(RealError, match="outside a batch"):
            model(torch.tensor([[5]]))
        live.begin_batch(batch_of([[5]]))
        with pytest.raises(RealError, match="2 sequences, must be 1"):
            model(torch.tensor([[5], [6]]))


# -- quality ---------------------------------------------------------------------------------------


def test_a_forced_text_is_judged_as_in_one_pass(model: Any) -> None:
    texts = [Request(0, [5, 6, 7, 20, 21, 22, 23], 3), Request(1, [9, 30, 31], 1)]
    one, steps = answers_at_once(model, texts), forced(model, texts)
    for left, right in zip(one.loss, steps.loss, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4)
    assert agreement(one, steps) == 1.0
    assert one.num_tokens == 6
    assert one.perplexity == pytest.approx(float(np.exp(np.concatenate(one.loss).mean())))


def test_agreement_is_a_share_of_positions() -> None:
    def said(*greedy: int) -> Answers:
        return Answers((np.array(greedy),), (np.zeros(len(greedy)),))

    assert agreement(said(1, 2, 3, 4), said(1, 2, 9, 4)) == 0.75
    assert agreement(said(), said()) is None
    assert said().perplexity is None
