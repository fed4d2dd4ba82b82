"""``greenroom model``: lists and shows model files, and makes them of a model's own files."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

from hwmodels.errors import HardwareError
from hwmodels.file_types import SCHEMES, quantised
from hwmodels.gguf_header import read_gguf
from hwmodels.hf_config import model_values
from hwmodels.model_shape import ModelShape
from hwmodels.model_yaml import heading_of, model_yaml, values_of
from hwmodels.quantisation import canonical, near_hint
from hwmodels.safetensors_header import read_safetensors
from hwmodels.weight_files import gguf_values, read_config, safetensors_values
from sim.command_line import Parser
from sim.mistakes import complain
from sim.results import write_text
from sim.screen import screen
from sim.settings import did_you_mean
from sim.types import ConfigError

_PROGRAM = "greenroom model"
_EPILOG = """examples:
  greenroom model                                   all models, their sizes and bytes an expert
  greenroom model qwen3_30b_a3b                     its file
  greenroom model from-config config.json --out my_conf/model/mine.yaml
  greenroom model from-gguf mine.gguf               of a GGUF file's header
  greenroom model from-safetensors my_model/        of safetensors headers and a config.json

A file goes to standard output, or to --out; greenroom sim --config-dir my_conf model=mine then runs it."""
_MAKE_EPILOG = """examples:
  greenroom model {command} {source}
  greenroom model {command} {source} --quant Q4_K_M --out my_conf/model/mine.yaml

Only headers are read. The file goes to standard output, or to --out."""
_SOURCES = {
    "from-config": "config.json",
    "from-gguf": "mine.gguf",
    "from-safetensors": "my_model/",
}


def main(arguments: list[str]) -> int:
    """List the models, show one, or make a file of one; return the exit code."""
    maker = _MAKERS.get(arguments[0]) if arguments else None
    program = _PROGRAM if maker is None else f"{_PROGRAM} {arguments[0]}"
    try:
        if maker is not None:
            return _make(arguments[0], arguments[1:], maker)
        return _show(arguments)
    except Exception as error:
        return complain(program, error)


def make_parser(command: str | None = None) -> Parser:
    """Return what reads the arguments of ``greenroom model``, or of one of its ways to make a file."""
    return _show_parser() if command is None else _make_parser(command)


def models() -> dict[str, ModelShape]:
    """Return all models that come with the project, by name."""
    import yaml

    folder = resources.files("conf") / "model"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".yaml")), key=lambda f: f.name)
    plain = {f.name.removesuffix(".yaml"): yaml.safe_load(f.read_text("utf-8")) for f in files}
    return {name: ModelShape.from_mapping(values, name) for name, values in plain.items()}


# -- list and show ---------------------------------------------------------------------------------


def _show(arguments: list[str]) -> int:
    name = make_parser().parse_args(arguments).name
    known = models()
    if name is None:
        _print_all(list(known.values()))
        return 0
    if name not in known:
        hint = did_you_mean(name, [*known, *_MAKERS])
        raise ConfigError(f"model = {name}: no such model{hint}")
    text = (resources.files("conf") / "model" / f"{name}.yaml").read_text(encoding="utf-8")
    print(text, end="")
    return 0


def _show_parser() -> Parser:
    parser = Parser(
        prog=_PROGRAM,
        description="List the models that come with Greenroom; with a name, show its file.",
        epilog=_EPILOG,
    )
    parser.add_argument("name", nargs="?", metavar="MODEL", help="a model; without one: list them")
    return parser


def _print_all(shapes: list[ModelShape]) -> None:
    from rich.table import Table

    console = screen()
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("model", no_wrap=True)
    for column in ("layers", "experts", "top-k", "B weights", "B active", "MB/expert", "GB in all"):
        table.add_column(column, justify="right")
    table.add_column("attention")
    for shape in shapes:
        table.add_row(shape.name, *_row(shape))
    console.print(table)
    console.print(f"{_PROGRAM} NAME shows a file; greenroom sim model=NAME runs it.")


def _row(shape: ModelShape) -> tuple[str, ...]:
    dense, layers = shape.num_dense_only_layers, shape.num_layers
    experts = sum(map(shape.expert_bytes, range(shape.num_moe_layers))) / shape.num_moe_layers
    return (
        f"{layers} ({dense} dense)" if dense else str(layers),
        str(shape.num_experts),
        str(shape.top_k),
        f"{shape.total_params / 1e9:.4g}",
        f"{shape.active_params / 1e9:.3g}",
        f"{experts / 1e6:.4g}",
        f"{shape.total_bytes / 1e9:.4g}",
        _attention(shape),
    )


def _attention(shape: ModelShape) -> str:
    parts = ["latent" if shape.kv_lora_rank else f"{shape.num_kv_heads} KV heads"]
    if shape.num_linear_layers:
        parts.append(f"{shape.num_linear_layers} layers linear")
    if shape.num_window_layers:
        parts.append(f"{shape.num_window_layers} layers see {shape.window_tokens} tokens")
    return ", ".join(parts)


# -- make ------------------------------------------------------------------------------------------


def _from_config(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    config = read_config(file)
    if options.quant:  # the precision that it states is not asked for
        config.pop("quantization_config", None)
    return model_values(config, options.name or _name_of(file), str(file))


def _from_gguf(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    return gguf_values(read_gguf(path), options.name or _name_of(path), str(path))


def _from_safetensors(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    folder = path if path.is_dir() else path.parent
    config = options.config or folder / "config.json"
    name = options.name or _name_of(folder / "config.json")
    return safetensors_values(read_safetensors(path), read_config(config), name, str(path))


_Maker = Callable[[Path, argparse.Namespace], dict[str, Any]]
_MAKERS: dict[str, _Maker] = {
    "from-config": _from_config,
    "from-gguf": _from_gguf,
    "from-safetensors": _from_safetensors,
}
_ABOUT = {
    "from-config": "Make a model file of a Hugging Face config.json (or a folder with one).",
    "from-gguf": "Make a model file of a GGUF file's header; of several parts, name any one.",
    "from-safetensors": "Make a model file of safetensors headers (a file, an index or a folder) "
    "and the config.json beside them.",
}


def _make(command: str, arguments: list[str], maker: _Maker) -> int:
    options = make_parser(command).parse_args(arguments)
    values = maker(options.path, options)
    shape = ModelShape.from_mapping(values, str(options.path))
    if options.quant:
        values = values_of(_quantised(shape, options.quant))
        values["source"] += f", at {options.quant}"
        shape = ModelShape.from_mapping(values, str(options.path))
    text = model_yaml(values, heading_of(shape))
    if options.out is None:
        print(text, end="")
        return 0
    write_text(options.out, text)
    print(f"{options.out}: {heading_of(shape)}")
    return 0


def _quantised(shape: ModelShape, scheme: str) -> ModelShape:
    if canonical(scheme) not in SCHEMES:
        raise HardwareError(f"--quant = {scheme}: no such scheme{near_hint(scheme, SCHEMES)}")
    return quantised(shape, scheme)


def _make_parser(command: str) -> Parser:
    parser = Parser(
        prog=f"{_PROGRAM} {command}",
        description=_ABOUT[command],
        epilog=_MAKE_EPILOG.format(command=command, source=_SOURCES[command]),
    )
    parser.add_argument("path", type=Path, metavar="PATH", help="what to read")
    parser.add_argument("--name", metavar="NAME", help="name of the model; default: from the path")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="file to write; default: standard output"
    )
    parser.add_argument(
        "--quant",
        metavar="SCHEME",
        help="precision in place of the stored one: a file type (Q4_K_M) or a format",
    )
    if command == "from-safetensors":
        parser.add_argument(
            "--config", type=Path, metavar="FILE", help="config.json; default: the one beside"
        )
    return parser


def _name_of(path: Path) -> str:
    """Return a name of letters, digits and underscores, after the file or its folder."""
    stem = path.resolve().parent.name if path.name == "config.json" else path.stem
    plain = "".join(c if c.isalnum() else "_" for c in stem.lower()).strip("_")
    return plain or "model"
