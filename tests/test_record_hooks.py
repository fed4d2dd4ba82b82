"""The recorder's hooks: they come off, copy what is reused, and see what is really used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="recording needs torch")
pytest.importorskip("transformers", reason="recording needs transformers")

from moe_models import build  # noqa: E402

from traces.record import Generation, RouterRecorder, record_generate  # noqa: E402
from traces.schema import TraceError  # noqa: E402

PROMPTS = [[5, 6, 7, 8, 9, 30, 31], [3, 4], [10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20]]


def hook_counts(model: Any) -> list[tuple[int, ...]]:
    names = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs")
    names += ("_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called")
    return [tuple(len(getattr(module, name)) for name in names) for module in model.modules()]


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "llama4", "deepseek_v4"])
def test_detach_restores_the_model(name: str) -> None:
    model = build(name)
    inputs = torch.tensor([PROMPTS[2]])
    attributes = [sorted(vars(module)) for module in model.modules()]
    with torch.no_grad():
        before, counts = model(inputs).logits, hook_counts(model)
        with RouterRecorder(model, logits=True) as recorder:
            during = model(inputs).logits
            assert hook_counts(model) != counts
            assert len(recorder.take()) == 1
        after = model(inputs).logits
    assert torch.equal(before, during)
    assert torch.equal(before, after)
    assert hook_counts(model) == counts
    assert [sorted(vars(module)) for module in model.modules()] == attributes
    assert recorder.take() == []


def test_an_error_inside_detaches_and_forgets() -> None:
    model = build("mixtral")
    counts = hook_counts(model)
    recorder = RouterRecorder(model)
    with pytest.raises(RuntimeError, match="stop"), recorder:
        raise RuntimeError("stop")
    assert hook_counts(model) == counts
    with recorder, torch.no_grad():  # it can be used again
        with pytest.raises(TraceError, match="already attached"):
            recorder.attach()
        model(torch.tensor([PROMPTS[0]]))
        assert len(recorder.take()) == 1


def test_buffers_that_the_model_reuses_are_copied() -> None:
    """Ids, weights, logits, hidden states and tokens are overwritten before the decoder returns."""
    model, tokens = build("qwen2_moe"), torch.tensor([PROMPTS[2]])
    with RouterRecorder(model, logits=True) as recorder, torch.no_grad():
        model(tokens)
        (expected,) = recorder.take()

        def spoil(_module: Any, args: Any, output: Any) -> None:
            for tensor in (*args, *(output if isinstance(output, tuple) else ())):
                tensor.zero_()

        def spoil_tokens(_module: Any, args: Any, _output: Any) -> None:
            args[0].zero_()

        layers = model.model.layers
        hooks = [layers[1].mlp.experts.register_forward_hook(spoil)]
        hooks.append(model.model.embed_tokens.register_forward_hook(spoil_tokens))
        model(tokens)
        (record,) = recorder.take()
    assert record.token_id.tolist() == PROMPTS[2]
    for name in ("expert_ids", "expert_weights", "router_logits", "next_gate_ids"):
        theirs, ours = getattr(expected, name)[:, :2], getattr(record, name)[:, :2]
        np.testing.assert_array_equal(ours, theirs, err_msg=name)


def test_what_the_experts_get_counts_not_what_the_router_said() -> None:
    model, tokens = build("mixtral"), torch.tensor([PROMPTS[0]])
    block = model.model.layers[1].mlp

    def rewritten(hidden: Any) -> Any:
        flat = hidden.view(-1, hidden.shape[-1])
        _, weights, ids = block.gate(flat)
        return block.experts(flat, 7 - ids, weights / 2).view(hidden.shape)

    with RouterRecorder(model) as recorder, torch.no_grad():
        model(tokens)
        block.forward = rewritten
        model(tokens)
        plain, changed = recorder.take()
    np.testing.assert_array_equal(changed.expert_ids[:, 1], 7 - plain.expert_ids[:, 1])
    np.testing.assert_array_equal(changed.expert_weights[:, 1], plain.expert_weights[:, 1] / 2)


def test_fused_gpt_oss_experts_are_asked_to_be_called() -> None:
    model = build("gpt_oss")
    experts = [layer.mlp.experts for layer in model.model.layers]
    for module in experts:
        module.forward_routed = None  # what marks transformers' mxfp4 experts
    with RouterRecorder(model):
        assert all(module._is_hooked for module in experts)
    assert not any(hasattr(module, "_is_hooked") for module in experts)


def test_an_error_while_recording_takes_the_hooks_off() -> None:
    model = build("mixtral")
    counts = hook_counts(model)

    def stop(_done: int, _total: int) -> None:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop") as caught:
        record_generate(model, PROMPTS, Generation(max_new_tokens=2), on_batch=stop)
    assert hook_counts(model) == counts
    assert caught.value.__traceback__ is not None  # frames are still alive here


def test_bypassed_experts_and_packed_batches_are_refused() -> None:
    model = build("mixtral")
    block, tokens = model.model.layers[1].mlp, torch.tensor([PROMPTS[0]])
    with RouterRecorder(model), torch.no_grad():
        with pytest.raises(TraceError, match="packed sequences"):
            model(tokens, cu_seq_lens_q=torch.tensor([0, 7]))
        block.forward = lambda hidden: hidden  # as a fused kernel would
        with pytest.raises(TraceError, match=r"layers\.1\.mlp: its experts were not called"):
            model(tokens)
