"""The seam to Hugging Face models: what it takes from them, and that all of it comes back."""

from __future__ import annotations

import re
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the real backend needs torch")
pytest.importorskip("transformers", reason="live runs need transformers")

from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # noqa: E402

from real.adapters import IMPLEMENTATION, Attachment, find_experts  # noqa: E402
from real.checkpoint import ModuleExperts  # noqa: E402
from real.live_model import load_without_experts  # noqa: E402
from sim.types import ConfigError  # noqa: E402
from tests import moe_models  # noqa: E402
from tests.live_models import FAMILIES  # noqa: E402

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_state_dict_hooks")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def looks(model: Any) -> dict[str, Any]:
    """Return all of a model that attaching could leave changed, but for the values of its weights."""
    classes = {type(module) for module in model.modules()}
    return {
        "parameters": [
            (name, id(p), p.dtype, p.requires_grad) for name, p in model.named_parameters()
        ],
        "buffers": [(name, id(b)) for name, b in model.named_buffers()],
        "modules": [(name, id(module), type(module)) for name, module in model.named_modules()],
        "implementation": model.get_experts_implementation(),
        "config": model.config.to_dict(),
        "hooks": [[len(getattr(m, hook)) for hook in HOOKS] for m in model.modules()],
        "own": [sorted(vars(module)) for module in model.modules()],
        "classes": {kind: dict(vars(kind)) for kind in classes},
        "known": sorted(ALL_EXPERTS_FUNCTIONS),
    }


def values(model: Any) -> dict[str, Any]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def attachment(model: Any, compute: Any = None) -> Attachment:
    """Return an attachment whose weights come back from copies."""
    experts = find_experts(model)
    source = ModuleExperts([layer.experts for layer in experts.layers])
    kept = {
        (layer, expert): type(source.expert(0, 0))(
            *[None if part is None else part.clone() for part in source.expert(layer, expert)]
        )
        for layer in range(source.num_layers)
        for expert in range(source.num_experts)
    }
    return Attachment(model, experts, compute, lambda layer, expert: kept[layer, expert])


@pytest.mark.parametrize("family", FAMILIES)
def test_attach_and_detach_leave_the_model_as_it_was(family: str) -> None:
    model = moe_models.build(family)
    model.set_experts_implementation("eager")  # not the default, which must not be what is restored
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        logits = model(ids).logits
    before, weights = looks(model), values(model)
    with attachment(model):
        assert model.get_experts_implementation()[""] == IMPLEMENTATION
        away = {name for name, parameter in model.named_parameters() if parameter.is_meta}
        assert away == {name for name in weights if re.search(r"\.experts\.\w+$", name)}
        assert all(not buffer.is_meta for buffer in model.buffers())
    assert looks(model) == before
    assert all(torch.equal(tensor, weights[name]) for name, tensor in values(model).items())
    with torch.no_grad():
        assert torch.equal(model(ids).logits, logits)


def test_the_memory_of_the_experts_is_given_back_while_they_are_away() -> None:
    model = moe_models.build("mixtral")
    parameter = model.model.layers[0].mlp.experts.gate_up_proj
    with attachment(model):
        assert parameter.untyped_storage().nbytes() == 0
        assert find_experts(model).bytes_held() == 0
    assert parameter.untyped_storage().nbytes() == parameter.numel() * 4


def test_experts_are_computed_by_whoever_attached_the_model() -> None:
    calls = []

    def compute(layer: int, hidden: Any, ids: Any, weights: Any) -> Any:
        calls.append((layer, tuple(hidden.shape), tuple(ids.shape), tuple(weights.shape)))
        return torch.zeros_like(hidden)

    model = moe_models.build("qwen3_moe")  # layer 1 of 3 has no experts
    with attachment(model, compute), torch.no_grad():
        model(torch.tensor([[5, 6, 7]]))
    assert calls == [(0, (3, 32), (3, 2), (3, 2)), (1, (3, 32), (3, 2), (3, 2))]


def test_an_exception_inside_gives_everything_back() -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("in the middle")

    model = moe_models.build("olmoe")
    before, weights = looks(model), values(model)
    with pytest.raises(RuntimeError, match="in the middle"), attachment(model, fails):
        model(torch.tensor([[5, 6]]))
    assert looks(model) == before
    assert all(torch.equal(tensor, weights[name]) for name, tensor in values(model).items())


def test_where_the_weights_cannot_be_read_again_all_else_is_restored() -> None:
    model = moe_models.build("olmoe")
    before = looks(model)
    seam = attachment(model)

    def read(layer: int, expert: int) -> Any:
        if layer == 1:
            raise OSError("gone")
        return first(layer, expert)

    first, seam._read = seam._read, read
    seam.attach()
    with pytest.raises(OSError, match="gone"):
        seam.detach()
    found = looks(model)
    assert found.pop("parameters") != before.pop("parameters")  # layer 1's are still on meta
    assert found == before
    assert not model.model.layers[0].mlp.experts.down_proj.is_meta


def test_two_models_can_be_attached_at_one_time() -> None:
    models = [moe_models.build("mixtral"), moe_models.build("olmoe")]
    told: list[int] = []
    computes = [lambda _l, h, _i, _w, n=n: (told.append(n), torch.zeros_like(h))[1] for n in (0, 1)]
    ids = torch.tensor([[5]])
    with attachment(models[0], computes[0]), torch.no_grad():
        with attachment(models[1], computes[1]):
            models[1](ids)
        models[0](ids)
    assert told == [1] * 3 + [0] * 3
    assert IMPLEMENTATION not in ALL_EXPERTS_FUNCTIONS


def test_attaching_twice_or_in_training_mode_is_refused() -> None:
    model = moe_models.build("mixtral")
    with attachment(model), pytest.raises(ConfigError, match="attached already"):
        Attachment(model, find_experts(model), None, None).attach()  # type: ignore[arg-type]
    assert not any(parameter.is_meta for parameter in model.parameters())
    with pytest.raises(ConfigError, match="training mode"):
        attachment(model.train()).attach()


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("llama4", "do not go through transformers' experts interface"),
        ("dbrx", "do not go through transformers' experts interface"),
        ("longcat", "do not go through transformers' experts interface"),
    ],
)
def test_experts_out_of_reach_are_refused(name: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        find_experts(moe_models.build(name))


def test_a_dense_model_is_refused() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        name: moe_models.BASE[name] for name in ("vocab_size", "hidden_size", "intermediate_size")
    }
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=4))
    with pytest.raises(ConfigError, match="LlamaModel has no MoE block"):
        find_experts(model)


def test_the_order_of_summation_is_that_of_the_implementation() -> None:
    model = moe_models.build("mixtral")
    assert find_experts(model).combine == "by_slot"
    model.set_experts_implementation("eager")
    assert find_experts(model).combine == "by_expert"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_is_loaded_without_its_experts(family: str, tmp_path: Any) -> None:
    whole = moe_models.build(family)
    whole.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    model = load_without_experts(tmp_path)
    assert type(model) is type(whole)
    wanted = dict(whole.named_parameters())
    found = dict(model.named_parameters())
    assert list(found) == list(wanted)
    away = {name for name, parameter in found.items() if parameter.is_meta}
    assert away == {name for name in wanted if re.search(r"\.experts\.\w+$", name)}
    for name, parameter in found.items():
        assert parameter.shape == wanted[name].shape
        assert name in away or torch.equal(parameter, wanted[name])
    buffers = dict(whole.named_buffers())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
