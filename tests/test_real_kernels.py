"""Expert kernels: the bits of the models' own code, grouped or not, and int8 within its error."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the real backend needs torch")
pytest.importorskip("transformers", reason="compares with its models")

from moe_experts import DTYPES, EXPERTS, HIDDEN, experts_module, format_of, packed_slots  # noqa: E402  # noqa: E402

from real import int8  # noqa: E402
from real.experts import ExpertFormat, dequantise  # noqa: E402
from real.grouped import can_group  # noqa: E402
from real.kernels import Kernels, swiglu  # noqa: E402

KINDS = ["qwen3_moe", "gpt_oss"]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_rows(num_rows: int, width: int, dtype: Any) -> Any:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(3)).to(dtype)


# -- grouped ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_experts_together_are_those_one_by_one(kind: str, dtype: str) -> None:
    module, format = experts_module(kind, dtype), format_of(kind, dtype)
    slots, chosen, counts = packed_slots(module, format), [1, 2, 5, 11], [1, 7, 2, 30]
    rows = random_rows(sum(counts), HIDDEN, DTYPES[dtype])
    assert can_group(format, rows, chosen, on_cpu=True)
    assert not can_group(format, rows, chosen)
    single = Kernels(format, module._apply_gate)
    grouped = Kernels(format, module._apply_gate, grouped_on_cpu=True)
    exact = torch.cat(
        [
            single.expert(format.view(slots[slot]), part)
            for slot, part in zip(chosen, rows.split(counts), strict=True)
        ]
    )
    assert torch.equal(single.experts(format.view(slots), chosen, rows, counts), exact)
    together = grouped.experts(format.view(slots), chosen, rows, counts)
    if kind == "qwen3_moe":
        assert torch.equal(together, exact)
    else:  # its gate is computed over all rows as one vector, whose last few are rounded otherwise
        assert (together.float() - exact.float()).norm() <= 1e-3 * exact.float().norm()


def test_what_cannot_be_grouped_is_computed_one_by_one() -> None:
    format = ExpertFormat(10, 6, "float32")  # rows of 40 bytes: not aligned
    slots = torch.zeros(3, format.slot_bytes, dtype=torch.uint8)
    stacked = format.view(slots)
    for part in (stacked.gate_up, stacked.down):
        part.copy_(torch.randn(part.shape))
    rows = random_rows(4, 10, torch.float32)
    assert not can_group(format, rows, [0, 2], on_cpu=True)
    made = Kernels(format, grouped_on_cpu=True).experts(stacked, [0, 2], rows, [3, 1])
    for slot, part in ((0, slice(0, 3)), (2, slice(3, 4))):
        exact = swiglu(rows[part] @ stacked.gate_up[slot].T) @ stacked.down[slot].T
        torch.testing.assert_close(made[part], exact)


def test_slots_far_apart_int8_and_single_experts_are_not_grouped() -> None:
    rows = random_rows(2, HIDDEN, torch.float32)
    format = format_of("qwen3_moe", "float32")
    assert can_group(format, rows, [0, 7], on_cpu=True)
    assert not can_group(format, rows, [0, 8], on_cpu=True)
    assert not can_group(format, rows, [4], on_cpu=True)
    assert not can_group(format_of("qwen3_moe", "int8"), rows, [0, 1], on_cpu=True)


# -- formats ---------------------------------------------------------------------------------------


def test_experts_without_a_gate() -> None:
    format = ExpertFormat(16, 24, "float32", has_gate=False)
    weights = format.view(torch.zeros(format.slot_bytes, dtype=torch.uint8))
    weights.gate_up.copy_(torch.randn(24, 16))
    weights.down.copy_(torch.randn(16, 24))
    rows = random_rows(5, 16, torch.float32)
    inner = rows @ weights.gate_up.T
    by_default = Kernels(format).expert(weights, rows)
    torch.testing.assert_close(by_default, (inner * inner.sigmoid()) @ weights.down.T)
    squared = Kernels(format, lambda up: up.relu().square()).expert(weights, rows)
    torch.testing.assert_close(squared, inner.relu().square() @ weights.down.T)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_int8_experts_are_those_of_the_dequantised_weights(kind: str, dtype: str) -> None:
    module, format = experts_module(kind, "float32"), format_of(kind, "int8")
    slots = packed_slots(module, format)
    kernels = Kernels(format, module._apply_gate)
    exact_format = format_of(kind, "float32")
    exact_slot = torch.zeros(exact_format.slot_bytes, dtype=torch.uint8)
    limit = 1e-4 if dtype == "float32" else 2e-2  # bfloat16 rounds in between
    for num_rows in (1, 2, 3, 130):
        rows = random_rows(num_rows, HIDDEN, DTYPES[dtype])
        weights = format.view(slots[EXPERTS - 1])
        exact_format.pack(weights, exact_slot)
        exact = Kernels(exact_format, module._apply_gate).expert(
            exact_format.view(exact_slot), rows.float()
        )
        made = kernels.expert(weights, rows)
        assert made.dtype == rows.dtype
        assert (made.float() - exact).norm() <= limit * exact.norm()


# -- int8 products of many weights -----------------------------------------------------------------


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("num_rows", [1, 3, 128])
def test_int8_products_of_large_matrices(num_rows: int, dtype: str, is_transposed: bool) -> None:
    outputs, inputs = 1031, 523  # not multiples of anything
    generator = torch.Generator().manual_seed(5)
    shape = (inputs, outputs) if is_transposed else (outputs, inputs)
    matrix = torch.randint(-127, 128, shape, dtype=torch.int8, generator=generator)
    scale = torch.rand(outputs, generator=generator) * 1e-2
    rows = random_rows(num_rows, inputs, DTYPES[dtype])
    floats = dequantise(matrix, scale, is_transposed)
    exact = rows.float() @ (floats if is_transposed else floats.T)
    made = int8.int8_product(rows, matrix, scale, is_transposed)
    assert matrix.numel() >= int8.SMALL_MATRIX
    assert made.dtype == rows.dtype
    limit = {"float32": 1e-4, "float16": 1e-3, "bfloat16": 6e-3}[dtype]
    assert (made.float() - exact).norm() <= limit * exact.norm()


@pytest.mark.skipif(not int8.HAS_INTEGER_DOT, reason="this CPU's int8 products may saturate")
def test_two_digits_bear_extremes() -> None:
    matrix = torch.full((64, 8), 127, dtype=torch.int8)
    rows = torch.stack([torch.zeros(64), torch.full((64,), 1e30), torch.full((64,), -1e-30)])
    made = int8.two_digits(rows, matrix, torch.ones(8))
    assert torch.equal(made[0], torch.zeros(8))
    torch.testing.assert_close(made[1:], rows[1:] @ matrix.float(), rtol=1e-5, atol=0.0)
    one_is_small = torch.tensor([[1.0] + [1e-3] * 63])  # lost if activations had 8 bits
    torch.testing.assert_close(
        int8.two_digits(one_is_small, matrix, torch.ones(8)),
        one_is_small @ matrix.float(),
        rtol=2e-3,
        atol=0.0,
    )


@pytest.mark.cuda
@pytest.mark.parametrize("kind", KINDS)
def test_grouped_experts_on_cuda(kind: str) -> None:
    module, format = experts_module(kind, "bfloat16"), format_of(kind, "bfloat16")
    slots = packed_slots(module, format).cuda()
    kernels = Kernels(format, module._apply_gate)
    chosen, counts = [1, 2, 5, 11], [1, 7, 2, 30]
    rows = random_rows(sum(counts), HIDDEN, torch.bfloat16).cuda()
    together = kernels.experts(format.view(slots), chosen, rows, counts)
    single = [
        kernels.expert(format.view(slots[slot]), part)
        for slot, part in zip(chosen, rows.split(counts), strict=True)
    ]
    torch.testing.assert_close(together, torch.cat(single), rtol=2e-2, atol=2e-2)
