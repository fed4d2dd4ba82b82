"""``greenroom predict``: a model on a machine under an engine, in closed form, in less than a second."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from sim.advise import check_quants
from sim.bundled import bundled_trace
from sim.cases import GROUPS, compose_case
from sim.command_line import Parser
from sim.interval import read_errors
from sim.machine_options import PARTS
from sim.mistakes import complain, explain
from sim.own_options import add_config_dirs
from sim.predict_answer import Asked, answer
from sim.show_config import add_show, check_show, show
from sim.types import ConfigError

_EPILOG = """examples:
  greenroom predict model=gpt_oss_120b machine=rtx4090 placement.cpu_layers=24
  greenroom predict machine=rtx4090 machine/gpu=rtx3090 model.expert_bits=Q4_K_M work.context_tokens=8192
  greenroom predict --quant Q4_K_M placement.cpu_layers=20
  greenroom predict placement=offload engine=vllm_like placement.gpu_ratio=0.5 --trace my.parquet
  greenroom predict -m machine=rtx3090,rtx4090 placement.cpu_layers=0,12,24 --csv table.csv

Settings are those of conf/predict.yaml: the groups model, machine (with machine/gpu, machine/cpu,
machine/link, machine/storage), engine, placement, usage, and work.*; KEY=VALUE overrides a figure. `greenroom
advise` searches for the best placement. Nothing is simulated: for policies, queues and many requests see
`greenroom sim`. The answer goes to standard output, and to --json and --csv."""


_BITS = (
    ("expert_bits", "expert_bits_by_layer", "expert_codebook"),
    *(("dense_bits",), ("head_bits",), ("shared_bits",)),
)
"""Fields of bits that a scheme sets; those of the experts go together."""
_NAMED = (*GROUPS, *(f"machine/{part}" for part in PARTS))
"""Groups of which an option must be named."""


def main(arguments: list[str]) -> int:
    """Run the command; return the exit code."""
    try:
        options = make_parser().parse_intermixed_args(arguments)
        check_show(options)
        if options.cfg is not None:
            return show("predict", options.overrides, options)
        return _run(options)
    except Exception as error:
        return complain("greenroom predict", error, "predict")


def make_parser() -> Parser:
    """Return what reads the command's arguments."""
    parser = Parser(
        prog="greenroom predict",
        description="Predict tokens/s, TTFT and memory of a model on a machine, without a trace or a run.",
        epilog=_EPILOG,
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings")
    parser.add_argument("-m", "--multirun", action="store_true", help="one prediction for each "
                        "combination of values by commas")  # fmt: skip
    add_common(parser)
    parser.add_argument("--quant", metavar="SCHEME", help="weights as a file in this scheme has them, as "
                        "in advise; fields of bits that are overridden stay")  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="also write the answer as JSON (-: instead)")
    parser.add_argument("--csv", metavar="FILE", help="also write a line an answer as CSV")
    parser.add_argument("--errors", metavar="FILE", type=Path, help="left-out errors of published rows "
                        "(default: conf/published/errors.csv)")  # fmt: skip
    add_show(parser)
    return parser


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add the options that predicting and advising share."""
    parser.add_argument(
        "--trace",
        metavar="PATH",
        help="take the use of experts from a router trace (a file, or an option of the group trace); hit "
        "rates are then those of LRU",
    )
    add_config_dirs(parser)


def _run(options: argparse.Namespace) -> int:
    errors = read_errors(options.errors)
    if options.quant is not None:
        check_quants([options.quant])
    for flag, path in (("--json", options.json), ("--csv", options.csv)):
        if path not in (None, "-") and not Path(path).absolute().parent.is_dir():
            raise ConfigError(f"{flag} {path}: no such folder: {Path(path).parent}")
    if not options.multirun:
        found = answer(_ask(options.overrides, options), errors)
        _write(options, [found], found)
        return 0
    answers, failed = [], 0
    for combination in combinations(options.overrides):
        try:
            answers.append(answer(_ask(combination, options), errors))
        except Exception as error:  # a combination that cannot be is no reason to lose the others
            message = explain(error, "predict")
            if message is None:
                raise
            failed += 1
            print(f"greenroom predict: error: {' '.join(combination)}: {message}", file=sys.stderr)
    if answers:
        _write(options, answers, answers)
    return 2 if failed else 0


def _ask(overrides: Sequence[str], options: argparse.Namespace) -> Asked:
    asked = ask(overrides, options)
    return asked if options.quant is None else with_quant(asked, options.quant)


def ask(overrides: Sequence[str], options: argparse.Namespace) -> Asked:
    """Compose one combination, with the use of experts of a trace where one is named."""
    for override in overrides:
        group, _, option = override.partition("=")
        if group in _NAMED and option.strip().lower() in ("null", ""):
            hint = f"; to leave it out write {group.replace('/', '.')}=null" if "/" in group else ""
            raise ConfigError(f"{override}: must name an option of the group {group}{hint}")
    composed = compose_case(overrides, options.config_dirs)
    asked = Asked(tuple(overrides), composed)
    return asked if options.trace is None else with_trace(asked, options.trace)


def with_quant(asked: Asked, scheme: str) -> Asked:
    """Return the question of a model in a scheme of quantisation, but for what is overridden."""
    from hwmodels.file_types import quantised
    from hwmodels.model_shape import ModelShape

    model = asked.composed.config["model"]
    shape = ModelShape.from_mapping(model, f"model/{model.get('name')}")
    made = quantised(shape, scheme)
    given = {text.lstrip("+~").partition("=")[0].removeprefix("model.") for text in asked.overrides}
    fields = [field for group in _BITS if not given.intersection(group) for field in group]
    bits = {field: getattr(made, field) for field in fields}
    if bits.get("expert_bits_by_layer") is not None:
        bits["expert_bits_by_layer"] = list(made.expert_bits_by_layer or ())
    config = {**asked.composed.config, "model": {**model, **bits}}
    note = f"weights are as in a file of {scheme} (--quant), but for bits that are overridden"
    return replace(
        asked, composed=replace(asked.composed, config=config), notes=(*asked.notes, note)
    )


def with_trace(asked: Asked, path: str) -> Asked:
    """Return the question with the use of experts measured on a trace, and notes on what that means."""
    from sim.build import load_trace

    named = bundled_trace(path)
    trace = load_trace(named or path)
    usage = usage_of_path(named or path, path)
    config = {**asked.composed.config, "usage": usage}
    choices = {key: value for key, value in asked.composed.choices.items() if key != "usage"}
    meta, model = trace.meta, config["model"]
    own = tuple(model.get(key) for key in ("num_moe_layers", "num_experts", "top_k"))
    theirs = (meta.num_layers, meta.num_experts, meta.top_k)
    notes = [
        "hit rates are those of an LRU cache in each layer, on the trace's own routing (lossless)"
    ]
    if own != theirs:
        notes.append(
            f"the trace is of {meta.model} ({_counts(theirs)}), not of {model.get('name')} ({_counts(own)}): "
            "taken to be alike at the same visits an expert and the same share of experts"
        )
    composed = replace(asked.composed, config=config, choices=choices)
    return replace(asked, composed=composed, notes=(*asked.notes, *notes))


def _counts(counts: tuple[Any, ...]) -> str:
    return f"{counts[0]} layers, {counts[1]} experts, top-{counts[2]}"


_usages: dict[str, dict[str, Any]] = {}


def usage_of_path(path: str, name: str) -> dict[str, Any]:
    """Measure a trace's usage once, whatever the number of combinations."""
    from sim.build import load_trace
    from sim.usage_of_trace import usage_of

    if path not in _usages:
        _usages[path] = usage_of(load_trace(path), f"trace {name}")
    return _usages[path]


def combinations(overrides: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield the overrides of each combination of values; a list by commas, or a range, has several."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    choices: list[list[str]] = []
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        if not override.is_sweep_override():
            choices.append([str(override.input_line)])
            continue
        key = override.get_key_element()
        choices.append([f"{key}={value}" for value in override.sweep_string_iterator()])
    yield from product(*choices)


def _write(options: argparse.Namespace, rows: Sequence[Mapping[str, Any]], whole: Any) -> None:
    """Print the answers and write the files that are wished."""
    from sim.predict_report import print_answer, print_answers
    from sim.results import write_csv, write_text

    text = json.dumps(whole, indent=1) + "\n"
    if options.json == "-":
        print(text, end="")
    elif options.multirun:
        print_answers(rows)
    else:
        print_answer(rows[0])
    if options.json not in (None, "-"):
        write_text(Path(options.json), text)
    if options.csv is not None:
        write_csv(Path(options.csv), [_flat(row) for row in rows])
    for what, file in (("Answer", options.json), ("Table", options.csv)):
        if file is not None and options.json != "-":
            print(f"{what}: {file}")


def _flat(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer as one row: lists of parts become columns, other lists JSON."""
    from sim.results import flatten

    row: dict[str, Any] = {"overrides": " ".join(found["asked"]["overrides"])}
    for key, value in found.items():
        if key in ("decode_parts", "prefill_parts"):
            row |= {f"{key}.{part['part']}.ms": part["ms"] for part in value}
        elif key == "fill" or isinstance(value, list):
            row[key] = json.dumps(value)
        else:
            row |= flatten({key: value})
    return row
