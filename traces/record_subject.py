"""What ``greenroom record`` records: a model, the prompts it gets, and how the header names it.

torch and transformers are imported inside the functions, so that the command's help is quick.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traces.record_prompts import UsageError, prompt_lines
from traces.trace import TraceError

if TYPE_CHECKING:
    from traces.record import Annotation

RANDOM_PROMPT_TOKENS = 32
DEFAULT_REQUESTS = 8
LONGEST_REASON = 200


@dataclass(frozen=True)
class Subject:
    """A model to record, the prompts it gets (token ids), and how the header names it."""

    model: Any
    prompts: list[list[int]]
    annotation: Annotation
    described: Mapping[str, Any]
    temperature: float
    max_new_tokens: int
    eos: tuple[int, ...] | None = None


@contextmanager
def plain_errors() -> Iterator[None]:
    """Turn the errors of imports and of loading a model into one line for the user."""
    try:
        yield
    except (UsageError, TraceError):
        raise
    except ImportError as error:
        raise UsageError(
            f"{error}; recording needs torch: pip install 'greenroom[torch]', "
            "in a checkout: pip install -c constraints.txt -e '.[torch]'"
        ) from error
    except (OSError, ValueError, KeyError, RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split())[:LONGEST_REASON]  # transformers lists every model
        raise UsageError(f"cannot load the model: {reason}") from error
    except (
        Exception
    ) as error:  # of a checkpoint that is cut short; safetensors is not imported here
        if type(error).__name__ != "SafetensorError":
            raise
        raise UsageError(f"cannot load the model: {error}") from error


def load_subject(options: argparse.Namespace) -> Subject:
    """Load what ``--model`` and ``--prompts`` name; raises UsageError."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # the command shows its own
    logging.set_verbosity_error()
    if options.model == "tiny":
        return _tiny(options)
    path = Path(options.model)
    if path.suffix == ".json" and path.is_file():
        return _random(options, path)
    if path.is_dir():
        return _folder(options, path)
    raise UsageError(f"--model is {path}: must be 'tiny', a folder or a .json file")


def _tiny(options: argparse.Namespace) -> Subject:
    """The tiny model, on held-out problems unless prompts are given; texts carry their stages."""
    from traces.record import Annotation
    from traces.tiny.data import problems
    from traces.tiny.model import SAMPLING_TEMPERATURE, load_model
    from traces.tiny.stages import QUESTION, SOLUTION_STAGES, stage_of_positions

    model, tokenizer = load_model()
    held_out = problems(options.seed, held_out=True)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, bos=True)

    if options.prompts is None:
        texts = [
            problem.prompt for problem in islice(held_out, options.requests or DEFAULT_REQUESTS)
        ]
        prompts = [encode(text) for text in texts]
    else:
        prompts = read_prompts(options, lambda text: encode(text + "\n"))
    annotation = Annotation(
        piece=lambda token: tokenizer.decode([token]),
        stages=stage_of_positions,
        stage_names=(QUESTION, *SOLUTION_STAGES),
    )
    described = {
        "name": "greenroom-tiny",
        "tokenizer": "characters",
        "licence": options.licence or "Apache-2.0",
    }
    return Subject(
        model.to(options.device),
        prompts,
        annotation,
        described,
        SAMPLING_TEMPERATURE,
        640,
        eos=(tokenizer.eos_id,),
    )


def _folder(options: argparse.Namespace, path: Path) -> Subject:
    """A Hugging Face model and its tokenizer from a local folder; nothing is downloaded."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from traces.record import Annotation

    if options.prompts is None:
        raise UsageError("--prompts is missing: a model from a folder needs prompts")
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    prompts = read_prompts(options, lambda text: list(tokenizer(text)["input_ids"]))
    model = AutoModelForCausalLM.from_pretrained(path, local_files_only=True, dtype="auto")
    annotation = Annotation(piece=lambda token: str(tokenizer.decode([token])))
    described = {
        "name": path.resolve().name,
        "tokenizer": type(tokenizer).__name__,
        "licence": options.licence,
    }
    _eager_if_odd(model)
    return Subject(model.to(options.device).eval(), prompts, annotation, described, 0.0, 256)


def _random(options: argparse.Namespace, path: Path) -> Subject:
    """A model with random weights from a config; random token ids unless prompts are given."""
    import numpy as np
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from traces.record import Annotation

    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--model is {path}: is not JSON: {error}") from error
    if not isinstance(settings, dict) or "model_type" not in settings:
        raise UsageError(f"--model is {path}: must be a JSON object with a 'model_type'")
    config = AutoConfig.for_model(**settings)
    torch.manual_seed(options.seed)
    model = AutoModelForCausalLM.from_config(config)
    if options.prompts is None:
        draw = np.random.default_rng(options.seed)
        vocabulary = config.get_text_config(decoder=True).vocab_size
        shape = (options.requests or DEFAULT_REQUESTS, RANDOM_PROMPT_TOKENS)
        prompts = draw.integers(vocabulary, size=shape).tolist()
    else:
        prompts = read_prompts(options, None)
    described = {
        "name": f"{settings['model_type']}-random",
        "notes": ("weights are random: routing means nothing",),
        "licence": options.licence,
    }
    _eager_if_odd(model)
    return Subject(model.to(options.device).eval(), prompts, Annotation(), described, 0.0, 256)


def _eager_if_odd(model: Any) -> None:
    """Let a model compute its experts one by one where torch's grouped product refuses their shape."""
    from traces.record_layers import find_moe_layers, fits_grouped_product

    layers = find_moe_layers(model.get_decoder())
    if not all(fits_grouped_product(layer.experts) for layer in layers):
        model.set_experts_implementation("eager")


def read_prompts(
    options: argparse.Namespace, encode: Callable[[str], list[int]] | None
) -> list[list[int]]:
    """Read the prompts file as token ids; ``encode`` is None where only ids can be used."""
    lines = prompt_lines(options.prompts, options.requests)
    return [_tokens(prompt, where, encode) for where, prompt in lines]


def _tokens(prompt: Any, where: str, encode: Callable[[str], list[int]] | None) -> list[int]:
    if isinstance(prompt, str):
        if encode is None:
            raise UsageError(f"{where} is text: a model with random weights takes token ids")
        try:
            return encode(prompt)
        except ValueError as error:
            raise UsageError(f"{where}: {error}") from error
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        return prompt
    raise UsageError(f"{where} must be text, or a list of token ids")
