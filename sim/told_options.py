"""Options by which a user tells what a foreign recording does not say: of a model file, or in numbers."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from hwmodels.hf_config import model_values, moe_layers
from hwmodels.model_shape import ModelShape
from hwmodels.weight_files import read_config
from sim.settings import did_you_mean
from sim.types import ConfigError
from traces.importers.told import Told, parse_layers

_NUMBERS = {
    "num_experts": "routed experts a layer",
    "top_k": "experts a token had in the run",
    "native_top_k": "experts a token has in the model as published, where the run forced another number",
    "num_hidden_layers": "layers of the model, dense ones too",
    "context_tokens": "length of the contexts that the text was cut into",
    "prompt_tokens": "prompt tokens of every request, where the file does not part prompt and output",
}


def add_told_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser; :func:`told_from` reads them."""
    group = parser.add_argument_group(
        "what the recording does not say", "of --model or --config, else option by option"
    )
    add = group.add_argument
    add(
        "--model",
        metavar="NAME",
        help="a model of `greenroom model`, or any name with the options below",
    )
    add("--config", type=Path, metavar="FILE", help="the model's config.json, or its folder")
    add(
        "--layers",
        metavar="INDICES",
        help="absolute indices of the MoE layers: 3-60, 1-59:2, 0,2,5",
    )
    for name, text in _NUMBERS.items():
        add(f"--{name.replace('_', '-')}", type=int, metavar="N", help=text)
    add("--tokenizer", metavar="NAME", help="for the header")
    add("--licence", metavar="NAME", help="of the recording, for the header")


def refuse_unused(options: argparse.Namespace, takes: Collection[str], what: str) -> None:
    """Raise ConfigError for a length that was told although ``what`` makes no use of it."""
    for name in ("prompt_tokens", "context_tokens"):
        if getattr(options, name) is not None and name not in takes:
            raise ConfigError(f"--{name.replace('_', '-')} goes with other formats, not {what}")


def told_from(options: argparse.Namespace) -> Told:
    """Return what the options say.

    Raises ConfigError, HardwareError or TraceError for a model that is not known, a file that is none, or
    values that cannot be.
    """
    told = _of_model(options)
    changes: dict[str, Any] = {
        name: getattr(options, name)
        for name in (*_NUMBERS, "tokenizer", "licence")
        if getattr(options, name) is not None
    }
    if options.layers is not None:
        changes["layer_indices"] = parse_layers(options.layers)
    return replace(told, **changes)


def _of_model(options: argparse.Namespace) -> Told:
    if options.config is not None:
        return _of_config(options.config, options.model)
    if options.model is None:
        return Told()
    from sim.model_cli import models

    known = models()
    if options.model in known:
        return told_of_shape(known[options.model])
    if options.num_experts is None:
        raise ConfigError(
            f"--model {options.model}: no such model{did_you_mean(options.model, known)}; any name goes with "
            "--num-experts, or with --config"
        )
    return Told(model=options.model)


def told_of_shape(shape: ModelShape, layer_indices: tuple[int, ...] | None = None) -> Told:
    """Return what a model file says; without ``layer_indices`` dense layers are the first ones."""
    if layer_indices is None:
        layer_indices = tuple(range(shape.num_dense_only_layers, shape.num_layers))
    return Told(
        model=shape.name,
        num_experts=shape.num_experts,
        native_top_k=shape.top_k,
        num_hidden_layers=shape.num_layers,
        layer_indices=layer_indices,
        num_shared_experts=shape.num_shared_experts,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.expert_intermediate_size,
    )


def _of_config(path: Path, name: str | None) -> Told:
    file = path / "config.json" if path.is_dir() else path
    config = read_config(file)
    found = name or str(config.get("_name_or_path") or config.get("model_type") or file.parent.name)
    shape = ModelShape.from_mapping(model_values(config, found, str(file)), str(file))
    return told_of_shape(shape, moe_layers(config, str(file)))
