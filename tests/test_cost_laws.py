"""Laws that every cost keeps, over random machines and engines."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from hwmodels.cost import CostModel
from hwmodels.engine import Engine
from hwmodels.machine import Machine
from hwmodels.units import GB, transfer_ns
from tests.round_hardware import engine, machine, shape

RATES = st.integers(10**6, 10**13)
COUNTS = st.integers(0, 5000)
EXPERTS = st.lists(st.integers(0, 300), max_size=8)


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    rates = ("memory_bytes_per_s", "matmul_flops")
    changes = {f"{part}_{rate}": draw(RATES) for part in ("gpu", "cpu") for rate in rates}
    decoding = ((4.0, draw(RATES)), (7.0, draw(RATES)), (16.0, draw(RATES)))
    has_gpu = {} if draw(st.booleans()) else {"gpu": None, "link": None}
    return machine(
        **changes,
        link_h2d_bytes_per_s=draw(RATES),
        cpu_thread_bytes_per_s=draw(RATES),
        cpu_dram_bytes_per_s=draw(RATES),
        cpu_rate_by_bits=draw(st.sampled_from([None, decoding])),
        **has_gpu,
    )


@st.composite
def engines(draw: st.DrawFn) -> Engine:
    return engine(
        kernels=draw(st.sampled_from(["per_expert", "grouped"])),
        graph=draw(st.booleans()),
        cpu_experts_at_once=draw(st.integers(1, 6)),
    )


def every_cost(model: CostModel, num_tokens: int, kv_tokens: int) -> dict[str, int]:
    kv, pairs = kv_tokens + num_tokens, (kv_tokens + num_tokens) * num_tokens
    return {
        "load": model.load_ns(0),
        "gpu": model.expert_gpu_ns(0, num_tokens, False),
        "gpu packed": model.expert_gpu_ns(0, num_tokens, True),
        "gpu set": model.experts_gpu_ns(0, [num_tokens, 1, num_tokens], False),
        "cpu": model.expert_cpu_ns(0, num_tokens),
        "dense": model.dense_ns(num_tokens, kv, num_tokens),
        "prefill": model.dense_ns(num_tokens, kv, pairs),
        "step": model.step_ns(num_tokens, num_tokens, kv, pairs),
        "pack": model.pack_ns(num_tokens),
        "handover": model.handover_ns(num_tokens),
        "activations": model.activation_bytes(num_tokens),
    }


@given(machines(), engines(), COUNTS, COUNTS, COUNTS)
def test_more_tokens_are_never_cheaper(
    m: Machine, e: Engine, tokens: int, more: int, kv: int
) -> None:
    model = CostModel(shape(num_layers=3, dense_intermediate_size=50), m, e)
    few, many = every_cost(model, tokens, kv), every_cost(model, tokens + more, kv)
    assert all(few[what] <= many[what] for what in few)


@given(machines(), engines(), COUNTS, st.integers(1, 64))
def test_more_bytes_are_never_cheaper(m: Machine, e: Engine, tokens: int, times: int) -> None:
    """A larger expert of the same bits; fewer bits may well take longer, where decoding is slow."""
    small = shape(expert_intermediate_size=20)
    large = shape(expert_intermediate_size=20 * times)
    few = every_cost(CostModel(small, m, e), tokens, 0)
    many = every_cost(CostModel(large, m, e), tokens, 0)
    assert all(few[what] <= many[what] for what in few)


@given(machines(), engines(), COUNTS, COUNTS, st.integers(1, 100))
def test_a_faster_part_is_never_slower(
    m: Machine, e: Engine, tokens: int, kv: int, factor: int
) -> None:
    base = every_cost(CostModel(shape(), m, e), tokens, kv)
    for part, field in [
        ("gpu", "memory_bytes_per_s"),
        ("gpu", "matmul_flops"),
        ("link", "h2d_bytes_per_s"),
        ("cpu", "memory_bytes_per_s"),
        ("cpu", "thread_bytes_per_s"),
        ("cpu", "dram_bytes_per_s"),
        ("cpu", "matmul_flops"),
    ]:
        old = getattr(m, part)
        if old is None:
            continue
        faster = replace(m, **{part: replace(old, **{field: getattr(old, field) * factor})})
        new = every_cost(CostModel(shape(), faster, e), tokens, kv)
        assert all(new[what] <= base[what] for what in base), (part, field)


@given(machines(), engines(), st.integers(1, 5000))
def test_nothing_beats_its_bytes_or_operations(m: Machine, e: Engine, tokens: int) -> None:
    model, experts = CostModel(shape(), m, e), shape()
    size, flops = experts.expert_bytes(0), tokens * experts.expert_flops_per_token
    if m.link:
        assert model.load_ns(0) * m.link.h2d_bytes_per_s >= size * GB
    assert model.expert_gpu_ns(0, tokens, True) * m.device.memory_bytes_per_s >= size * GB
    assert model.expert_gpu_ns(0, tokens, True) * m.device.matmul_flops >= flops * GB
    assert model.expert_cpu_ns(0, tokens) * m.cpu.memory_bytes_per_s >= size * GB
    assert model.expert_cpu_ns(0, tokens) * m.cpu.dram_bytes_per_s >= size * GB
    assert model.expert_cpu_ns(0, tokens) * m.cpu.matmul_flops >= flops * GB


@given(machines(), engines(), st.integers(1, 5000))
def test_packing_never_slows_an_expert(m: Machine, e: Engine, tokens: int) -> None:
    model = CostModel(shape(), m, e)
    assert model.expert_gpu_ns(1, tokens, True) <= model.expert_gpu_ns(1, tokens, False)


@given(machines(), st.booleans(), EXPERTS, st.booleans())
def test_a_group_never_takes_longer_than_its_experts_alone(
    m: Machine, graph: bool, counts: list[int], packed: bool
) -> None:
    each, group = (
        CostModel(shape(), m, engine(kernels=kernels, graph=graph))
        for kernels in ("per_expert", "grouped")
    )
    alone_ns = [group.expert_gpu_ns(0, count, packed) for count in counts]
    assert max(alone_ns, default=0) <= group.experts_gpu_ns(0, counts, packed) <= sum(alone_ns)
    if packed:  # else grouped kernels pay for their tokens through an index
        grouped_ns = group.experts_gpu_ns(0, counts, packed)
        assert grouped_ns <= each.experts_gpu_ns(0, counts, packed)


@given(machines(), engines(), COUNTS, st.sampled_from([None, 1, 7]))
def test_cpu_work_alone_is_the_experts_time(
    m: Machine, e: Engine, tokens: int, table_ns: int | None
) -> None:
    if table_ns:
        table = ((500, 1, 1000 * table_ns), (500, 9, 1001 * table_ns), (900, 2, 1500 * table_ns))
        m = replace(m, cpu=replace(m.cpu, expert_table=table))
    model = CostModel(shape(), m, e)
    setup_ns, num_bytes, bytes_per_s, least_ns = model.cpu_work(0, tokens)
    alone_ns = max(setup_ns + transfer_ns(num_bytes, bytes_per_s), least_ns)
    assert alone_ns == model.expert_cpu_ns(0, tokens)


@given(machines(), engines(), COUNTS)
def test_answers_do_not_change(m: Machine, e: Engine, tokens: int) -> None:
    model = CostModel(shape(), m, e)
    assert every_cost(model, tokens, 9) == every_cost(model, tokens, 9)
