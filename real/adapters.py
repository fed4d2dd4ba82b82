"""The one seam to Hugging Face models: their experts' computation goes elsewhere while a model is attached.

Transformers lets an *experts implementation* stand in for the forward pass of every fused experts module
(``ALL_EXPERTS_FUNCTIONS``). One is registered while any model is attached; it hands (layer, hidden states,
ids, weights) to whoever attached that model. Attached experts hold no weights: their parameters are meta
tensors, and detaching brings the values back into the very same Parameter objects. Knows nothing of
policies, stores or steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from real.experts import ExpertWeights
from real.kernels import Activation
from sim.types import ConfigError
from traces.record_hooks import MoeLayer, find_moe_layers
from traces.schema import TraceError

IMPLEMENTATION = "greenroom"
"""Name under which transformers knows the implementation while a model is attached."""

Compute = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, hidden [n, H], ids [n, k], weights [n, k]) -> [n, H]; layers are counted among MoE layers."""
Read = Callable[[int, int], ExpertWeights]
"""(layer, expert) -> its weights in full precision, valid until the next call."""

PARAMETERS = {
    "gate_up_proj": "gate_up",
    "up_proj": "gate_up",
    "down_proj": "down",
    "gate_up_proj_bias": "gate_up_bias",
    "up_proj_bias": "gate_up_bias",
    "down_proj_bias": "down_bias",
}
"""The parameters of a fused experts module, [num_experts, ...] each, and what an expert's part is called."""

_computes: WeakKeyDictionary[nn.Module, Callable[[Tensor, Tensor, Tensor], Tensor]] = (
    WeakKeyDictionary()
)


def _run(experts: nn.Module, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Compute an attached experts module: the function that transformers is given."""
    return _computes[experts](hidden, ids, weights)


@dataclass(frozen=True)
class ModelExperts:
    """The MoE layers of a model whose experts can be attached, in order.

    ``activation`` is the model's own, between an expert's two matrices. ``combine`` is the order in which
    the model's current implementation adds up a token's experts (see LayerTokens).
    """

    layers: tuple[MoeLayer, ...]
    activation: Activation
    combine: Literal["by_slot", "by_expert"]

    @property
    def num_experts(self) -> int:
        """Experts of a layer."""
        return self.layers[0].num_experts

    def bytes_held(self) -> int:
        """Return the bytes of the experts' parameters that are in memory now."""
        return sum(
            weights.nbytes
            for layer in self.layers
            for weights in _stacked(layer.experts).values()
            if not weights.is_meta
        )


def find_experts(model: Any) -> ModelExperts:
    """Return the experts of a model.

    Raises
    ------
    ConfigError
        It has none, or their class cannot be attached.
    """
    name = type(model).__name__
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    try:
        layers = tuple(find_moe_layers(decoder))
    except TraceError as error:
        raise ConfigError(f"model {name}: {error}") from error
    for layer in layers:
        _check(layer, name)
    first = layers[0].experts
    activation = first._apply_gate if first.has_gate else first.act_fn
    eager = first.config._experts_implementation == "eager"  # type: ignore[union-attr]
    return ModelExperts(layers, activation, "by_expert" if eager else "by_slot")  # type: ignore[arg-type]


def _check(layer: MoeLayer, name: str) -> None:
    """Refuse experts that the seam does not reach, or that the kernels cannot compute."""
    kind = type(layer.experts).__name__
    where = f"model {name}: {layer.path}: its experts ({kind})"
    if not hasattr(layer.experts, "is_concatenated") or "down_proj" not in _stacked(layer.experts):
        raise ConfigError(
            f"{where} do not go through transformers' experts interface; must be a class that "
            "use_experts_implementation decorates, as Qwen3-MoE, OLMoE, Mixtral, DeepSeek or gpt-oss have"
        )
    if getattr(layer.experts, "has_post_expert_norm", False):
        raise ConfigError(f"{where} have a norm behind each expert, which is not supported")
    if getattr(layer.experts, "_is_expert_parallel", False):
        raise ConfigError(f"{where} are spread over several processes, which is not supported")
    if hasattr(layer.experts, "_hf_hook"):
        raise ConfigError(f"{where} are offloaded by accelerate; must be loaded without device_map")
    odd = [
        n for n, w in _stacked(layer.experts).items() if not w.is_floating_point() or w.itemsize < 2
    ]
    if odd:
        raise ConfigError(f"{where} are quantised ({odd[0]}); must be float32, bfloat16 or float16")


def _stacked(experts: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a fused experts module that hold one part an expert."""
    own = dict(experts.named_parameters(recurse=False))
    return {name: own[name] for name in PARAMETERS if name in own}


@dataclass
class _Taken:
    """One parameter that is away: where it belongs, and the object itself, emptied."""

    module: nn.Module
    layer: int
    name: str
    parameter: nn.Parameter
    device: torch.device
    shape: torch.Size = field(init=False)

    def __post_init__(self) -> None:
        self.shape = self.parameter.shape

    def empty(self) -> None:
        """Put a meta tensor in its place, and let go of its memory."""
        stand_in = torch.empty_like(self.parameter, device="meta")
        wants = self.parameter.requires_grad
        setattr(self.module, self.name, nn.Parameter(stand_in, requires_grad=wants))
        if not self.parameter.is_meta:
            self.parameter.data = self.parameter.new_empty(0)

    def refill(self, read: Read) -> None:
        """Bring its values back, and put it where it was; one that was on meta stays so."""
        if self.device.type != "meta":
            values = torch.empty(self.shape, dtype=self.parameter.dtype, device=self.device)
            part = PARAMETERS[self.name]
            for expert, row in enumerate(values):
                row.copy_(getattr(read(self.layer, expert), part))
            self.parameter.data = values
        setattr(self.module, self.name, self.parameter)


class Attachment:
    """Sends the experts of a model elsewhere, as a context manager; afterwards the model is as it was.

    Parameters
    ----------
    model
        A transformers model in evaluation mode.
    experts
        Its experts, from :func:`find_experts`.
    compute
        What computes a layer's experts instead.
    read
        Where their weights are, to bring them back from; it must give what the parameters hold now.
    """

    def __init__(self, model: Any, experts: ModelExperts, compute: Compute, read: Read) -> None:
        self._model = model
        self._experts = experts
        self._compute = compute
        self._read = read
        self._taken: list[_Taken] = []
        self._configs: list[tuple[Any, str | None]] = []
        self._implementations: dict[str, str | None] | None = None

    def __enter__(self) -> Attachment:
        self.attach()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.detach()

    def attach(self) -> None:
        """Attach the model; what fails half-way is undone.

        Raises
        ------
        ConfigError
            The model is attached already, is in training mode, or does not let its experts be replaced.
        """
        name = type(self._model).__name__
        modules = [layer.experts for layer in self._experts.layers]
        if any(module in _computes for module in modules):
            raise ConfigError(f"model {name}: is attached already; must be detached first")
        if self._model.training:
            raise ConfigError(f"model {name}: is in training mode; call model.eval() first")
        try:
            self._redirect(modules)
            for number, layer in enumerate(self._experts.layers):
                for parameter_name, parameter in _stacked(layer.experts).items():
                    place = (layer.experts, number, parameter_name, parameter, parameter.device)
                    self._taken.append(_Taken(*place))
                    self._taken[-1].empty()
        except BaseException:
            self.detach()
            raise

    def detach(self) -> None:
        """Give the model its experts back; harmless when it is not attached.

        Whatever fails on the way, the model's implementation and its other parameters are restored.
        """
        taken, self._taken = self._taken, []
        failed: list[BaseException] = []
        for one in taken:
            try:
                one.refill(self._read)
            except Exception as error:  # the others must come back all the same
                failed.append(error)
        self._restore()
        if failed:
            raise failed[0]

    def _redirect(self, modules: list[Any]) -> None:
        model, configs = self._model, dict[int, Any]()
        configs |= {id(module.config): module.config for module in modules}
        configs |= {
            id(m.config): m.config
            for m in model.modules()
            if hasattr(m, "set_experts_implementation")
        }
        self._configs = [(config, config._experts_implementation) for config in configs.values()]
        self._implementations = model.get_experts_implementation()
        for number, module in enumerate(modules):
            _computes[module] = _bound(self._compute, number)
        ALL_EXPERTS_FUNCTIONS[IMPLEMENTATION] = _run
        model.set_experts_implementation(IMPLEMENTATION)
        wrong = next(
            (m for m in modules if m.config._experts_implementation != IMPLEMENTATION), None
        )
        if wrong is not None:
            raise ConfigError(
                f"model {type(model).__name__}: does not let its experts ({type(wrong).__name__}) be "
                "replaced through set_experts_implementation"
            )

    def _restore(self) -> None:
        """Undo :meth:`_redirect`, and forget the implementation when nobody uses it any more."""
        implementations, self._implementations = self._implementations, None
        if implementations is None:
            return
        self._model.set_experts_implementation(implementations)
        for config, value in self._configs:
            if config._experts_implementation != value:  # where transformers filled in a default
                config._experts_implementation = value
        self._configs = []
        for layer in self._experts.layers:
            _computes.pop(layer.experts, None)
        if not _computes:
            del ALL_EXPERTS_FUNCTIONS[IMPLEMENTATION]


def _bound(compute: Compute, layer: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def run(hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return compute(layer, hidden, ids, weights)

    return run
