"""Models for live runs: the bundled one, folders whose experts are never all in memory, random weights."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from real.adapters import PARAMETERS, ModelExperts, find_experts
from real.checkpoint import CheckpointExperts, ModuleExperts
from real.device import Device
from real.errors import RealError
from real.live_build import LiveShape
from real.store import ExpertSource
from sim.types import ConfigError
from traces.record_layers import fits_grouped_product
from traces.record_rows import Annotation, Request
from traces.record_subject import Subject, UsageError, load_subject, read_prompts
from traces.schema import TraceError
from traces.tiny import CHECKPOINT_DIR

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_LONGEST_REASON = 200
JUDGING_SEED = 5000
"""Of the held-out problems that perplexity is told of: others than those a run is asked by default."""
MOST_TEXTS = 8


@dataclass(frozen=True)
class LiveSubject:
    """A model to run, what it is asked, and where its experts' weights come from.

    ``is_whole`` tells whether the model holds its experts itself, so that it can run unattached.
    ``is_bundled`` marks the model that comes with the project.
    """

    subject: Subject
    experts: ModelExperts
    source: ExpertSource
    is_whole: bool
    is_bundled: bool

    @property
    def model(self) -> Any:
        """The model."""
        return self.subject.model

    def texts(self) -> list[Request]:
        """Return texts to judge the model by that it did not make: held-out problems; empty if none."""
        if not self.is_bundled:
            return []
        from traces.tiny.data import problems
        from traces.tiny.tokenizer import CharTokenizer

        tokenizer = CharTokenizer.load(CHECKPOINT_DIR)
        held_out = problems(JUDGING_SEED, held_out=True)
        chosen = islice(held_out, min(len(self.subject.prompts), MOST_TEXTS))
        found = []
        for number, problem in enumerate(chosen):
            tokens = tokenizer.encode(problem.text, bos=True)
            prompt = tokenizer.encode(problem.prompt, bos=True)
            found.append(Request(number, tokens, len(prompt)))
        return found

    @property
    def name(self) -> str:
        """What the model is called."""
        return str(self.subject.described.get("name"))

    def shape(self) -> LiveShape:
        """Return what policies are built from."""
        config = self.model.config.get_text_config(decoder=True)
        router = self.experts.layers[0]
        return LiveShape(
            name=self.name,
            num_layers=len(self.experts.layers),
            num_experts=self.experts.num_experts,
            top_k=top_k_of(config, router.router, router.block),
            num_all_layers=int(config.num_hidden_layers),
            format=self.source.format,
        )


def top_k_of(config: Any, *modules: nn.Module) -> int:
    """Return how many experts a token uses."""
    names = ("top_k", "num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token")
    for owner in (*modules, config):
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int) and value > 0:
                return value
    raise ConfigError(f"model {type(config).__name__}: does not say how many experts a token uses")


def load_live(options: argparse.Namespace, whole: bool) -> LiveSubject:
    """Load what ``--model`` and ``--prompts`` name, on the CPU; ``options`` are as for ``load_subject``.

    ``whole``: a folder's experts are loaded into the model too, so that it can run unattached.

    Raises
    ------
    ConfigError
        There is no such model or tokenizer, or its experts cannot be attached.
    """
    path = Path(options.model)
    with told_plainly():
        if options.model != "tiny" and path.is_dir() and not whole:
            return _lean(options, path)
        subject = load_subject(options)
    _one_by_one_if_odd(subject.model)
    experts = find_experts(subject.model)
    source = ModuleExperts([layer.experts for layer in experts.layers])
    return LiveSubject(subject, experts, source, True, options.model == "tiny")


def _lean(options: argparse.Namespace, path: Path) -> LiveSubject:
    """Load a folder's dense weights only; its experts are read from the files when a store is built."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    if options.prompts is None:
        raise UsageError("--prompts is missing: a model from a folder needs prompts")
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    prompts = read_prompts(options, lambda text: list(tokenizer(text)["input_ids"]))
    with CheckpointExperts(path):  # what is wrong with the files is told before the model is loaded
        pass
    model = load_without_experts(path)
    described = {
        "name": path.resolve().name,
        "tokenizer": type(tokenizer).__name__,
        "licence": options.licence,
    }
    annotation = Annotation(piece=lambda token: str(tokenizer.decode([token])))
    subject = Subject(model, prompts, annotation, described, 0.0, 256)
    _one_by_one_if_odd(model)
    experts = find_experts(model)
    source = CheckpointExperts(path, _DTYPES[model.dtype])
    _check_same(path, experts, source)
    return LiveSubject(subject, experts, source, False, False)


def _one_by_one_if_odd(model: Any) -> None:
    """Let a model compute its experts one by one if torch's grouped product refuses the shape of theirs."""
    if not all(fits_grouped_product(layer.experts) for layer in find_experts(model).layers):
        model.set_experts_implementation("eager")


def load_without_experts(path: Path) -> Any:
    """Return the model of a folder with its dense weights; its experts' parameters are meta tensors.

    Transformers loads what the model has parameters for, renamed and converted as always. So a class of
    the same model is loaded whose experts have none, which leaves their tensors unread; afterwards the
    model is one of the usual class, with the parameters on meta.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path, local_files_only=True)
    with torch.device("meta"):
        kind = type(AutoModelForCausalLM.from_config(config))
    away: list[tuple[str, str, nn.Parameter]] = []

    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, *args, **kwargs)
        away.extend(_take_away(self))

    lean: Any = type(kind.__name__, (kind,), {"__init__": build, "__module__": kind.__module__})
    lean._keys_to_ignore_on_load_unexpected = [r"experts"]
    model = lean.from_pretrained(path, local_files_only=True, dtype="auto")
    for module_name, name, parameter in away:
        stand_in = torch.empty(parameter.shape, dtype=model.dtype, device="meta")
        module = model.get_submodule(module_name)
        setattr(module, name, nn.Parameter(stand_in, requires_grad=parameter.requires_grad))
    model.__class__ = kind
    return model.eval()


def _take_away(model: Any) -> list[tuple[str, str, nn.Parameter]]:
    """Take the experts' parameters from a model under construction; return (module, name, parameter)."""
    names = {module: name for name, module in model.named_modules()}
    found = []
    for layer in find_experts(model).layers:
        own = list(layer.experts.named_parameters(recurse=False))
        for name, parameter in own:
            found.append((names[layer.experts], name, parameter))
            delattr(layer.experts, name)
        layer.experts._is_hf_initialized = True  # type: ignore[assignment]  # nothing to initialise
    return found


def _check_same(path: Path, experts: ModelExperts, source: CheckpointExperts) -> None:
    """Refuse files whose experts are not those of the model that the folder's config.json describes."""
    wanted = tuple(layer.index for layer in experts.layers), experts.num_experts
    found = source.layer_indices, source.num_experts
    if wanted != found:
        source.close()
        raise RealError(
            f"{path}: its files hold {found[1]} experts in layers {list(found[0])}: must hold "
            f"{wanted[1]} in {list(wanted[0])}, as config.json says"
        )


@contextmanager
def told_plainly() -> Iterator[None]:
    """Turn what goes wrong in loading a model into one line for the user."""
    try:
        yield
    except (ConfigError, TraceError):
        raise
    except UsageError as error:
        raise ConfigError(str(error)) from error
    except ImportError as error:
        raise ConfigError(
            f"{error}; live runs need torch: pip install 'greenroom[torch]'"
        ) from error
    except (OSError, ValueError, KeyError, RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split())[:_LONGEST_REASON]
        raise ConfigError(f"cannot load the model: {reason}") from error


def to_device(model: Any, experts: ModelExperts, device: Device, whole: bool) -> None:
    """Move a model to a device, meta tensors excepted; its experts only if it shall run ``whole`` there."""
    target = device.torch_device
    if device.kind == "cpu":
        return
    if whole:
        model.to(target)
        return
    modules = {layer.experts for layer in experts.layers}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.is_meta and not (module in modules and name in PARAMETERS):
                parameter.data = parameter.data.to(target)
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(target))
