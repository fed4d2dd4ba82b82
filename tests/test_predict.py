"""Predictions in closed form: worked out by hand on the round machine, and what must hold of all of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from hwmodels.cost import CostModel
from hwmodels.errors import HardwareError
from hwmodels.layer_time import (
    CPU_EXPERTS,
    DENSE,
    GPU_BYTES,
    GPU_EXPERTS,
    HANDOVER,
    HOST_BYTES,
    LAUNCH,
    LINK,
    LINK_BYTES,
    STEP,
    STORAGE,
)
from hwmodels.placement import Placement
from hwmodels.predict import Case, Prediction, predict
from hwmodels.usage import Usage
from sim.cases import case_of, compose_case
from sim.gains import filled, gains
from sim.limits import limit_words
from sim.predict_answer import memory
from tests.round_hardware import costs, engine, read, shape

UNIFORM = Usage("uniform", "stated", None, None)
COUNTS = {
    "dense_launches": 10,
    "expert_launches": 5,
    "head_launches": 4,
    "kernels": "per_expert",
    "chunks": 1,
    "chunk_compute": False,
    "order": "routing",
    "graph": False,
    "cpu_experts_at_once": 1,
    "attention_vector_ratio": None,
}
"""What the hand-computed figures need of the engine, whatever its file says."""
DENSE_NS = 360 + 20 + 80
"""A layer's dense weights, the attention floor, and 8 KV entries of 10 bytes."""
STEP_NS = 1000 + 1020
"""The step's own cost; the head's 1000 bytes and one token's 20."""


def placed(**changes: Any) -> Placement:
    return Placement.from_mapping({**read("placement", "gpu_only"), **changes})


def asked(
    placement: Placement, parts: dict[str, Any] | None = None, usage: Usage = UNIFORM, **how: Any
) -> Case:
    """One token on the round machine, 8 entries of context; ``parts`` change the machine."""
    made = costs(shape(), engine(**{**COUNTS, **how}), **(parts or {}))
    return Case(made, placement, usage, prompt_tokens=8, context_tokens=8)


def parts_of(prediction: Prediction) -> dict[str, float]:
    """Return the parts that take any time."""
    return {part: ns for part, ns in prediction.decode.ns.items() if ns}


def test_all_on_the_gpu_by_hand() -> None:
    found = predict(asked(placed()))
    expert_ns = 600 + 80  # its bytes; 4 gathers of 20 bytes
    assert parts_of(found) == {
        DENSE: 2 * DENSE_NS,
        GPU_EXPERTS: 2 * 2 * expert_ns,
        LAUNCH: 7 * (2 * 10 + 2 * 2 * 5 + 4),
        STEP: STEP_NS,
    }
    assert found.tpot_ns == 2 * DENSE_NS + 4 * expert_ns + 7 * 44 + STEP_NS == 5968
    assert found.tokens_per_s == pytest.approx(1e9 / 5968)
    assert found.decode.num_bytes[GPU_BYTES] == 2 * (360 + 80 + 2 * 600) + 1000


@pytest.mark.parametrize(("overlaps", "link_ns"), [(False, 1238), (True, 1238 + 715 - 1430)])
def test_all_copied_by_hand(overlaps: bool, link_ns: int) -> None:
    """30 ns of setup, then two copies of 600 + 4; beside the kernels all but the last one's 715 is hidden."""
    found = predict(
        asked(placed(gpu_ratio=0, misses="load", held="recent"), copies_overlap=overlaps)
    )
    assert parts_of(found)[LINK] == 2 * link_ns
    assert found.decode.num_bytes[LINK_BYTES] == 2 * 2 * 600


def test_all_on_the_cpu_by_hand() -> None:
    found = predict(asked(placed(cpu_layers=2)))
    assert parts_of(found) == {
        DENSE: 2 * DENSE_NS,
        CPU_EXPERTS: 2 * 2 * (100 + 600),
        HANDOVER: 2 * 40,
        LAUNCH: 7 * (2 * 10 + 4),
        STEP: STEP_NS,
    }
    assert found.decode.num_bytes[HOST_BYTES] == 2 * 2 * 600
    assert found.bottleneck == CPU_EXPERTS


def test_each_number_of_misses_counts_by_its_chance() -> None:
    """No, one or two of two experts are missing: GPU 1430, 715 or 0 ns beside CPU 0, 740 or 1440."""
    found = predict(asked(placed(hit_rate=0.5, gpu_ratio=0.5), cpu_overlaps=True))
    layer_ns = 0.25 * 1430 + 0.5 * 740 + 0.25 * 1440
    kernels_ns = 0.25 * 1430 + 0.5 * 715
    spent = parts_of(found)
    assert found.tpot_ns == pytest.approx(2 * (DENSE_NS + 70 + layer_ns) + STEP_NS + 28)
    assert spent[GPU_EXPERTS] + spent[LAUNCH] - 7 * 24 == pytest.approx(2 * kernels_ns)
    assert spent[CPU_EXPERTS] + spent[HANDOVER] == pytest.approx(2 * (layer_ns - kernels_ns))
    assert found.decode.num_bytes[HOST_BYTES] == pytest.approx(2 * 600)


def test_a_split_loads_whole_experts() -> None:
    """Of two missing experts one is copied (604 ns) while the CPU computes the other (740)."""
    slow = {"cpu_dram_bytes_per_s": 10**12}  # so that they do not hinder each other
    split = placed(gpu_ratio=0, misses="split", held="recent")
    found = predict(asked(split, slow, cpu_overlaps=True, copies_overlap=False))
    assert found.decode.num_bytes[LINK_BYTES] == 2 * 600
    assert found.decode.num_bytes[HOST_BYTES] == 2 * 600
    gpu_ns = 30 + 604 + 715
    assert found.tpot_ns == 2 * (DENSE_NS + 70 + gpu_ns) + STEP_NS + 28


def test_storage_below_host_memory_by_hand() -> None:
    """Half of the experts copied come from storage at a tenth of a byte a ns: slower than the link."""
    half = placed(gpu_ratio=0, misses="load", held="recent", host_ratio=0.5)
    found = predict(asked(half, copies_overlap=False))
    read_ns, copy_ns = 0.5 * 2 * 6000, 30 + 2 * 604
    assert parts_of(found)[STORAGE] == 2 * (read_ns - copy_ns)
    assert parts_of(found)[LINK] == 2 * copy_ns


def test_a_prompt_is_its_chunks_by_hand() -> None:
    """Two chunks of 4 tokens; all 4 experts are used by 4 tokens (a curve says so), of 2 tokens each."""
    curve = Usage("all", "made up", ((1, 1000),), None)
    case = replace(asked(placed(), usage=curve), prefill_chunk=4)
    spent = predict(case).prefill.ns
    flops_ns = 2 * 4 * 360 // 10  # below the 360 ns of bytes
    pairs = (10, 26)  # 1 + ... + 4, then 5 + ... + 8
    attention_ns = [20 + max(kv * 10, n * 40 // 10) for kv, n in zip((4, 8), pairs, strict=True)]
    assert flops_ns < 360
    assert spent[DENSE] == 2 * (2 * 360 + sum(attention_ns))
    assert spent[GPU_EXPERTS] == 2 * 2 * 4 * (600 + 2 * 80)
    head_ns = (1000 + 80) + 80  # one output at the end; a chunk before it reads no head
    assert spent[STEP] == 2 * 1000 + head_ns


def test_memory_by_hand() -> None:
    found = predict(asked(placed(cpu_layers=1)))
    rest = 2 * 360 + 2 * 1000  # layers, embedding and head
    kv = 2 * 8 * 10
    assert found.gpu_bytes == rest + kv + 4 * 600
    assert found.host_bytes == 4 * 600
    uses = memory(found)["gpu"]["uses"]
    assert uses == {"weights": rest, "kv": kv, "workspace": 0, "experts": 2400}


def test_a_cache_needs_all_experts_in_host_memory_too() -> None:
    cache = predict(asked(placed(gpu_ratio=0.5, misses="split", held="recent")))
    fixed = predict(asked(placed(gpu_ratio=0.5, misses="cpu", held="fixed")))
    assert (cache.host_bytes, fixed.host_bytes) == (8 * 600, 4 * 600)


def test_what_does_not_fit_is_told() -> None:
    found = predict(asked(placed(), {"gpu_memory_bytes": 5000}))
    assert len(found.problems) == 1
    assert found.problems[0].startswith("GPU memory")
    assert not predict(asked(placed())).problems


@pytest.mark.parametrize(
    "field", ["prompt_tokens", "context_tokens", "batch_size", "prefill_chunk"]
)
def test_counts_of_nothing_are_refused(field: str) -> None:
    nothing: dict[str, Any] = {field: 0}
    with pytest.raises(HardwareError, match=field):
        predict(replace(asked(placed()), **nothing))


# -- laws, on real figures -----------------------------------------------------------------------------

PLACEMENTS = ("gpu_only", "cpu_layers", "gpu_share", "offload", "hybrid")


def real(*overrides: str) -> Case:
    return case_of(compose_case(overrides).config)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("batch", [1, 16])
def test_parts_add_up_and_none_is_negative(placement: str, batch: int) -> None:
    found = predict(real(f"placement={placement}", f"work.batch_size={batch}"))
    for spent in (found.decode, found.prefill):
        assert min(spent.ns.values()) >= 0
        assert sum(spent.ns.values()) == spent.total_ns > 0
    assert found.tokens_per_s == pytest.approx(batch * 1e9 / found.tpot_ns)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_more_of_a_resource_is_never_slower(placement: str) -> None:
    found = predict(real(f"placement={placement}"))
    rows = gains(found)
    assert len(rows) >= 8
    for row in rows:
        assert row.change >= -1e-9, row
    assert max(row.change for row in rows) > 0.05


def test_more_layers_on_the_cpu_are_never_faster_and_take_less_gpu_memory() -> None:
    case = real("placement.cpu_layers=0")
    runs = [
        predict(replace(case, placement=replace(case.placement, cpu_layers=n)))
        for n in range(0, 49, 4)
    ]
    assert [r.tpot_ns for r in runs] == sorted(r.tpot_ns for r in runs)
    assert [r.gpu_bytes for r in runs] == sorted((r.gpu_bytes for r in runs), reverse=True)
    expert = case.costs.shape.expert_bytes(0)
    assert all(r.gpu_bytes + r.host_bytes == runs[0].gpu_bytes for r in runs)
    assert runs[1].host_bytes == 4 * 128 * expert


@pytest.mark.parametrize("placement", ["gpu_share", "offload", "hybrid"])
def test_a_larger_cache_is_never_slower(placement: str) -> None:
    case = real(f"placement={placement}")
    speeds = [
        predict(replace(case, placement=replace(case.placement, gpu_ratio=n / 16))).tokens_per_s
        for n in range(16)
    ]
    for smaller, larger in pairwise(speeds):
        assert larger >= smaller * (1 - 1e-9)


def test_a_long_context_costs_its_bytes() -> None:
    """KV of 48 layers, 4 heads of 2 x 128 values of 16 bits, where matrix units serve all query heads."""
    how = ("placement=gpu_only", "engine=vllm_like", "engine.attention_vector_ratio=null")
    case = real(*how)
    times = [predict(replace(case, context_tokens=n)).tpot_ns for n in (20_000, 40_000, 60_000)]
    assert times[2] - times[1] == pytest.approx(times[1] - times[0], rel=1e-3)
    entry_bytes = 48 * 4 * 2 * 128 * 2
    rate = case.costs.machine.device.memory_bytes_per_s
    assert times[1] - times[0] == pytest.approx(20_000 * entry_bytes * 1e9 / rate, rel=1e-3)


def test_uniform_use_is_the_worst_for_a_cache() -> None:
    text, alike = real("placement=offload"), real("placement=offload", "usage=uniform")
    assert predict(alike).tpot_ns > 1.2 * predict(text).tpot_ns


def test_filled_is_the_last_that_fits() -> None:
    case = real("model.expert_bits=Q4_K_M", "placement.cpu_layers=48", "model=gpt_oss_120b")
    full = filled(case)
    assert full is not None
    assert not predict(full).problems
    fewer = replace(full.placement, cpu_layers=(full.placement.cpu_layers or 0) - 1)
    assert predict(replace(full, placement=fewer)).problems


def test_limits_are_told_as_rates() -> None:
    found = predict(asked(placed(cpu_layers=2)))
    assert (
        limit_words(found, CPU_EXPERTS) == "the CPU reads experts at 0.857 of 1 GB/s"
    )  # 600 / 700 ns
    copied = predict(asked(placed(gpu_ratio=0, misses="load", held="recent")))
    assert limit_words(copied, LINK).startswith(
        "experts come over the host link at 0.993 of 1 GB/s"
    )
    for part in (DENSE, GPU_EXPERTS, LAUNCH, HANDOVER, STEP, STORAGE):
        assert limit_words(found, part)


def test_doubling_host_memory_halves_only_its_part_of_decoding() -> None:
    """At 1 ns a byte decoded where memory alone gives 2 bytes a ns, half of the time is memory's."""
    parts = {
        "cpu_memory_bytes_per_s": 2 * 10**9,
        "cpu_thread_bytes_per_s": 10**10,
        "cpu_dram_bytes_per_s": 10**10,
        "cpu_rate_by_bits": ((8.5, 10**9),),
        "cpu_expert_setup_ns": 0,
    }
    case = asked(placed(cpu_layers=2), parts, cpu_decode_ratio=1)
    before = predict(case)
    row = next(g for g in gains(before) if g.name == "host memory bandwidth x2")
    assert before.decode.ns[CPU_EXPERTS] == 4 * 600
    saved_ns = before.tpot_ns - 1e9 / row.tokens_per_s
    assert saved_ns == pytest.approx(4 * 600 * 0.25, rel=0.01)
    assert isinstance(case.costs, CostModel)


def test_a_prompt_of_very_many_chunks_is_nearly_the_sum_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = case_of(compose_case(["placement=offload"]).config)
    case = replace(case, prompt_tokens=3001, prefill_chunk=7)
    exact = predict(case)
    monkeypatch.setattr("hwmodels.predict._MOST_CHUNKS", 50)
    rough = predict(case)
    assert rough.ttft_ns == pytest.approx(exact.ttft_ns, rel=1e-3)
    assert rough.prefill.num_bytes == pytest.approx(dict(exact.prefill.num_bytes), rel=1e-3)
