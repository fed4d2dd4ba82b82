"""The gates of a Hugging Face MoE model: the only weights that ReMoE trains, beside their frozen snapshot."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from real.remoe_loss import SCORINGS, log_probabilities
from sim.results import whole_file
from sim.settings import did_you_mean
from sim.types import ConfigError
from traces.record_calls import read_router
from traces.record_hooks import RouterRecorder, find_moe_layers
from traces.record_meta import measure_scoring

_PROBE_TOKENS = 64
_KEY = "greenroom"


@dataclass(frozen=True, slots=True)
class Judged:
    """What one layer's gate said of the tokens of a call, and what its snapshot says of the same inputs.

    Parameters
    ----------
    log_p, log_reference
        Float32 [tokens, experts]; the reference has no gradient, and is None if it was not asked for.
    chosen
        Ids the gate picked, int64 [tokens, k].
    """

    log_p: Tensor
    log_reference: Tensor | None
    chosen: Tensor


class Gates:
    """The routers of a model, trainable and watched; as a context manager, for its hooks.

    All other parameters are frozen. The model must be in evaluation mode, so that nothing is drawn. The
    snapshot holds each router as it is now, in float32; it judges the *current* hidden states.

    ``scoring`` is how the routers turn logits into weights, as measured; where that is none of those that the
    loss knows (Phi's sparse mixer), the distribution is the softmax of the logits, which has their order.
    """

    def __init__(self, model: Any, *, reference: bool = True) -> None:
        model.eval()
        decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
        self.layers = find_moe_layers(decoder)
        self.scoring = _scoring(model)
        self.num_experts = self.layers[0].num_experts
        model.requires_grad_(False)
        wanted = {id(weight) for layer in self.layers for weight in layer.router.parameters()}
        self.weights: dict[str, nn.Parameter] = {
            name: weight for name, weight in model.named_parameters() if id(weight) in wanted
        }
        for weight in self.weights.values():
            weight.requires_grad_(True)
        self._model = model
        self._frozen = [_snapshot(layer.router) for layer in self.layers] if reference else None
        self._judged: dict[int, Judged] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> Gates:
        for slot, layer in enumerate(self.layers):
            hook = partial(self._on_router, slot)
            self._handles.append(layer.router.register_forward_hook(hook, with_kwargs=True))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._judged = [], {}

    def take(self) -> list[Judged]:
        """Return what the gates said in the last call of the model, by layer, and forget it."""
        judged, self._judged = self._judged, {}
        return [judged[slot] for slot in range(len(self.layers))]

    def _on_router(
        self, slot: int, _module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any
    ) -> None:
        layer = self.layers[slot]
        logits, chosen, _ = read_router(output, layer)
        log_reference = None
        if self._frozen is not None:
            with torch.no_grad():
                floats = [_float(value) for value in args]
                said = self._frozen[slot].forward(*floats, **kwargs)
                log_reference = log_probabilities(read_router(said, layer)[0], self.scoring)
        self._judged[slot] = Judged(
            log_probabilities(logits, self.scoring), log_reference, chosen.detach().long()
        )

    def values(self) -> dict[str, Tensor]:
        """Return copies of the gates' weights by name, on the host."""
        return {name: weight.detach().cpu().clone() for name, weight in self.weights.items()}

    def set(self, values: Mapping[str, Tensor]) -> None:
        """Put weights into the model, rounded to its dtype.

        Raises
        ------
        ConfigError
            A name or a shape is not that of the model's gates.
        """
        _check(self.weights, values)
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(values[name])

    def digest_of_the_rest(self) -> str:
        """Return the SHA-256 of all that the model saves and that is no gate: what must stay bit-identical.

        Buffers that are computed, not saved, are left out, for they differ between processors.
        """
        return weights_digest(self._model, self.weights)


def weights_digest(model: Any, without: Container[str] = ()) -> str:
    """Return the SHA-256 of the names and bytes of what a model saves, but those ``without``."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if name not in without:
            found.update(name.encode())
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            found.update(flat.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def save_gates(path: Path, values: Mapping[str, Tensor], made: Mapping[str, Any]) -> None:
    """Write gates as safetensors, with ``made`` (how they came about) as JSON in the header."""
    tensors = {name: tensor.contiguous() for name, tensor in values.items()}
    written = save(tensors, metadata={_KEY: json.dumps(dict(made), sort_keys=True)})
    with whole_file(path) as unfinished:
        unfinished.write_bytes(written)


def load_gates(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what ``save_gates`` wrote.

    Raises
    ------
    ConfigError
        There is no such file, or it is of another kind.
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            header = (file.metadata() or {}).get(_KEY)
            values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error
    if header is None:
        raise ConfigError(f"{path}: must be gates that `greenroom remoe` wrote")
    try:
        made = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: what its header says of its gates is no JSON") from error
    return values, made


def _check(weights: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name in values:
        if name not in weights:
            raise ConfigError(f"gate {name}: the model has none{did_you_mean(name, list(weights))}")
    for name, weight in weights.items():
        if name not in values:
            raise ConfigError(f"gate {name}: missing among the {len(values)} given")
        if values[name].shape != weight.shape:
            shapes = f"{list(values[name].shape)}: must be {list(weight.shape)}"
            raise ConfigError(f"gate {name} has shape {shapes}")


def _scoring(model: Any) -> str:
    """Measure how the routers turn logits into weights; needs no table of architectures."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.arange(min(_PROBE_TOKENS, vocabulary), device=model.device)[None]
    with RouterRecorder(model, logits=True, gates_ahead=0) as probe, torch.no_grad():
        model(input_ids=ids, use_cache=False)
        (record,) = probe.take()
    found = measure_scoring(record).name
    return found if found in SCORINGS else SCORINGS[0]


def _snapshot(router: nn.Module) -> nn.Module:
    return copy.deepcopy(router).float().requires_grad_(False).eval()


def _float(value: Any) -> Any:
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return value.detach().float() if is_float else value
