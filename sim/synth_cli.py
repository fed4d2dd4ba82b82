"""``greenroom synth``: fits a model of routing to a trace and writes synthetic traces of any shape."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.command_line import Parser
from sim.mistakes import complain
from sim.types import ConfigError

if TYPE_CHECKING:
    from hwmodels.model_shape import ModelShape
    from traces.synth import Wanted
    from traces.synth_model import SynthModel
    from traces.synth_source import Source

_PROGRAM = "greenroom synth"
_LEAST = {
    "rank": 1,
    "seed": 0,
    "requests": 1,
    "tokens": 1,
    "prompt_tokens": 1,
    "output_tokens": 0,
    "batch_size": 1,
}
MOST_CELLS = 10**6
"""Experts of all layers that a model of routing may have; Kimi-K2 has 23,040."""
_ID_BYTES = 0.5
"""Of an expert's index in the file, at least: measured are 0.8 to 1.0, and 1.4 more with weights."""
_EPILOG = """examples:
  greenroom synth                                        fit the bundled trace, say how close the fit comes
  greenroom synth --out more.parquet --requests 500      and write 500 requests like its own
  greenroom synth --like my.parquet --save-fit my_fit.json
  greenroom synth --fit my_fit.json --model deepseek_v3 --out big.parquet --tokens 1000000 \\
      --prompt-tokens 256 --output-tokens 1024 --batch-size 16

The held-out check fits each half of the requests and draws the other half: it takes three times as long as a
fit (--no-check leaves it out). Everything that is written is called synthetic, wherever it is shown."""


def main(arguments: list[str]) -> int:
    """Run the command; return the exit code."""
    try:
        options = make_parser().parse_args(arguments)
        _check(options)
        _run(options)
    except Exception as error:
        return complain(_PROGRAM, error)
    return 0


def make_parser() -> Parser:
    """Return what reads the command's arguments."""
    parser = Parser(
        prog=_PROGRAM,
        description="Write a synthetic trace after a recorded one, of its own shape or any other.",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add(
        "--like",
        metavar="TRACE",
        help="the recorded trace: a path, or a bundled one (default: tiny)",
    )
    add("--fit", metavar="FILE", type=Path, help="a fit that was saved, instead of --like")
    add("--save-fit", metavar="FILE", type=Path, help="write the fit as JSON")
    add("--out", metavar="FILE", type=Path, help="the trace to write, Parquet")
    add("--no-check", action="store_true", help="do not hold the fit against held-out requests")
    add("--report", metavar="FILE", type=Path, help="write the check's figures as JSON")
    add("--rank", type=int, metavar="N", help="dimensions of hidden states (default: chosen)")
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of the fit and of what is drawn (default: 0)",
    )
    _add_shape(parser)
    _add_amounts(parser)
    return parser


def _add_shape(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("shape", "default: the source's").add_argument
    add("--model", metavar="NAME", help="a model of `greenroom model`")
    add("--layers", type=int, metavar="N", help="MoE layers")
    add("--experts", type=int, metavar="N", help="routed experts a layer")
    add("--top-k", type=int, metavar="N", help="experts a token")


def _add_amounts(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group(
        "amount", "default: as many requests as the source"
    ).add_argument
    add("--requests", type=int, metavar="N")
    add("--tokens", type=int, metavar="N", help="rows in all; the last request is cut to meet it")
    add("--prompt-tokens", type=int, metavar="N", help="of each request (default: as the source)")
    add("--output-tokens", type=int, metavar="N", help="of each request (default: as the source)")
    add("--batch-size", type=int, default=1, metavar="N", help="requests at a time (default: 1)")
    add("--no-weights", action="store_true", help="leave out expert weights")


def _check(options: argparse.Namespace) -> None:
    if options.like is not None and options.fit is not None:
        raise ConfigError("--like and --fit: only one of them")
    if options.fit is not None and options.out is None:
        raise ConfigError("--fit without --out: there is nothing to do")
    if options.fit is not None and options.report is not None:
        raise ConfigError("--report: the check needs the source; give --like, not --fit")
    for name in ("save_fit", "rank"):
        if options.fit is not None and getattr(options, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} and --fit: the fit is made already; give --like")
    if options.no_check and options.report is None and not (options.out or options.save_fit):
        raise ConfigError("--no-check without --out or --save-fit: there is nothing to do")
    if options.report is not None and options.no_check:
        raise ConfigError("--report and --no-check: there would be nothing to report")
    for name, least in _LEAST.items():
        value = getattr(options, name)
        if value is not None and value < least:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: must be >= {least}")
    for name in ("out", "save_fit", "report"):
        path = getattr(options, name)
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"--{name.replace('_', '-')} {path}: no such folder: {path.parent}")
    if options.out is not None:
        _check_trace_file(options)


def _check_trace_file(options: argparse.Namespace) -> None:
    """Refuse a name that is none of a trace's, or that of the recording or the fit itself."""
    from traces.out_file import check_out

    check_out(options.out)
    for flag, read in (("--like", options.like), ("--fit", options.fit)):
        there = read is not None and options.out.exists() and Path(read).exists()
        if there and options.out.samefile(read):
            raise ConfigError(f"--out {options.out}: must not be the file of {flag}")


def _run(options: argparse.Namespace) -> None:
    from sim.results import whole_file
    from sim.synth_report import match_page, shape_page
    from traces.synth_match import match
    from traces.synth_model import load_model
    from traces.synth_scale import check_shape, rescaled

    shape, wanted = _shape(options.model), _wanted(options)
    if options.fit is not None:
        model = load_model(options.fit)
    else:
        source, name = _source(options)
        model = _fit(source, options)
        if not options.no_check:
            checked = match(source, options.seed, options.rank, report=_say)
            sys.stdout.write(match_page(checked, name))
            if options.report is not None:
                with whole_file(options.report) as temporary:
                    temporary.write_text(json.dumps(checked.to_dict(), indent=1) + "\n")
    sizes = _sizes(options, model, shape)
    if options.out is not None:
        _check_room(options, model, sizes)
    check_shape(*sizes)
    if sizes[0] * sizes[1] > MOST_CELLS:
        raise ConfigError(
            f"{sizes[0]} layers of {sizes[1]} experts: must be at most {MOST_CELLS} in all"
        )
    if sizes != (model.num_layers, model.num_experts, model.top_k):
        _say(f"scaling to {sizes[0]} layers of {sizes[1]} experts")
    scaled = rescaled(model, *sizes)
    if scaled is not model:
        named = shape.name if shape is not None else "as asked for"
        sys.stdout.write("\n" + shape_page(model, scaled, named))
    if options.out is not None:
        _write(scaled, wanted, shape, options)
    for what, file in (("Fit", options.save_fit), ("Check", options.report)):
        if file is not None:
            print(f"{what}: {file}")


def _source(options: argparse.Namespace) -> tuple[Source, str]:
    """Return the source and its name; a trace file is read as far as a fit needs."""
    from sim.build import load_trace, resolve_path
    from sim.stats_cli import trace_of
    from traces.part import split_part
    from traces.store import is_trace_file
    from traces.synth_source import make_source, read_source

    name, path = trace_of("tiny" if options.like is None else options.like)
    file = resolve_path(path)
    if split_part(path)[1] is None and is_trace_file(file):
        return read_source(file, options.seed), name
    return make_source(load_trace(path), options.seed), name


def _fit(source: Source, options: argparse.Namespace) -> SynthModel:
    from traces.synth_fit import fit

    model = fit(source, options.seed, options.rank, _say)
    if options.save_fit is not None:
        model.save(options.save_fit)
    return model


def _shape(name: str | None) -> ModelShape | None:
    from sim.model_cli import models
    from sim.settings import did_you_mean

    if name is None:
        return None
    known = models()
    if name not in known:
        raise ConfigError(f"--model {name}: no such model{did_you_mean(name, list(known))}")
    return known[name]


def _sizes(
    options: argparse.Namespace, model: SynthModel, shape: ModelShape | None
) -> tuple[int, int, int]:
    """Return layers, experts and top-k: as told, else of the named model, else as fitted."""
    own: tuple[int, int, int] = (model.num_layers, model.num_experts, model.top_k)
    if shape is not None:
        own = (shape.num_moe_layers, shape.num_experts, shape.top_k)
    told = (options.layers, options.experts, options.top_k)
    layers, experts, top_k = (
        value if value is not None else given for value, given in zip(told, own, strict=True)
    )
    return layers, experts, top_k


def _check_room(
    options: argparse.Namespace, model: SynthModel, sizes: tuple[int, int, int]
) -> None:
    """Refuse what cannot be on the disk."""
    from shutil import disk_usage

    own = model.lengths_tokens.mean(axis=0).tolist()
    told = (options.prompt_tokens, options.output_tokens)
    lengths = [own[at] if told[at] is None else told[at] for at in range(2)]
    rows = float("inf") if options.tokens is None else options.tokens
    if options.tokens is None or options.requests is not None:
        rows = min(rows, (options.requests or len(model.lengths_tokens)) * sum(lengths))
    need, free = rows * sizes[0] * sizes[2] * _ID_BYTES, disk_usage(options.out.parent).free
    if need > free:
        raise ConfigError(
            f"--out {options.out}: {rows:.3g} rows of {sizes[0]} layers, top-{sizes[2]}, take "
            f"{need / 1e9:.3g} GB at least, and the disk has {free / 1e9:.3g} GB left"
        )


def _wanted(options: argparse.Namespace) -> Wanted:
    from traces.synth import Wanted

    return Wanted(
        num_requests=options.requests,
        num_tokens=options.tokens,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        batch_size=options.batch_size,
        seed=options.seed,
        weights=not options.no_weights,
    )


def _write(
    model: SynthModel, wanted: Wanted, shape: ModelShape | None, options: argparse.Namespace
) -> None:
    from sim.progress import step_bar
    from sim.synth_report import written_page
    from traces.store import TraceWriter
    from traces.synth import draw_trace, header

    if not model.source["has_weights"] and wanted.weights:
        _say("no weights: the source has none that could be fitted")
        wanted = _without_weights(wanted)
    meta = header(model, wanted, _about(shape, model))
    rows = requests = 0
    with TraceWriter(options.out, meta) as writer, step_bar("chunks") as watch:
        advance = (lambda: None) if watch is None else watch(None)
        for chunk in draw_trace(model, wanted, meta):
            writer.append(chunk)
            rows += len(chunk)
            requests = max(requests, int(chunk.request_id.max()) + 1)
            advance()
    size_bytes = options.out.stat().st_size
    sys.stdout.write("\n" + written_page(str(options.out), meta, rows, requests, size_bytes))


def _without_weights(wanted: Wanted) -> Wanted:
    from dataclasses import replace

    return replace(wanted, weights=False)


def _about(shape: ModelShape | None, model: SynthModel) -> dict[str, Any]:
    """Return what the header tells of a named model: sizes only where the shape is its own."""
    if shape is None:
        return {}
    own = (shape.num_moe_layers, shape.num_experts, shape.top_k)
    if own != (model.num_layers, model.num_experts, model.top_k):
        return {"model": f"after {shape.name}"}
    dense = shape.num_layers - shape.num_moe_layers
    return {
        "model": shape.name,
        "layer_indices": tuple(range(dense, shape.num_layers)),
        "num_shared_experts": shape.num_shared_experts,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.expert_intermediate_size,
        "expert_bytes": tuple(map(shape.expert_bytes, range(shape.num_moe_layers))),
    }


def _say(text: str) -> None:
    print(f"{_PROGRAM}: {text}", file=sys.stderr)
