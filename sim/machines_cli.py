"""``greenroom machines``: which machines and parts there are, and what each figure of one is based on."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from hwmodels.machine import DERATES, TRUST_CLASSES, Machine
from sim.cases import search_path
from sim.mistakes import complain
from sim.settings import did_you_mean
from sim.types import ConfigError

Plain = dict[str, Any]

PARTS = ("gpu", "cpu", "link", "storage")
_UNITS = (
    ("_bytes_per_s", 1e9, "GB/s"),
    ("_flops", 1e12, "TF"),
    ("_bytes", 1e9, "GB"),
    ("_ns", 1e3, "us"),
)
_GIB = 2**30


def main(arguments: list[str]) -> int:
    """List machines and parts, or show one with its sources; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="greenroom machines",
        description="List the machines and parts that come with Greenroom; with a name, show all "
        "figures of a machine (rtx4090) or a part (gpu/rtx4090), each with its source.",
    )
    parser.add_argument("name", nargs="?", help="a machine, or a part as gpu/rtx4090")
    parser.add_argument(
        "override",
        nargs="*",
        help="what to change of the machine, as machine/gpu=rtx3090 or machine.cpu.threads_used=4",
    )
    parser.add_argument("--config-dir", metavar="DIR", help="machines and parts of your own")
    given = parser.parse_args(arguments)
    try:
        if given.name is None:
            _print_lists()
        else:
            _print_one(given.name, given.override, given.config_dir)
    except Exception as error:
        return complain("greenroom machines", error)
    return 0


# -- what there is -----------------------------------------------------------------------------


def machines() -> dict[str, dict[str, str]]:
    """Return by name which option each part of every whole machine is; parts it lacks are left out."""
    return {name: _choices(name) for name in _options(_folder())}


def parts(part: str) -> dict[str, Plain]:
    """Return by name what the file of every option of a part says."""
    folder = _folder() / part
    return {name: _load(folder / f"{name}.yaml") for name in _options(folder)}


def _folder() -> Traversable:
    return resources.files("conf") / "machine"


def _options(folder: Traversable) -> list[str]:
    names = (file.name for file in folder.iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def _load(file: Traversable) -> Plain:
    import yaml

    plain: Plain = yaml.safe_load(file.read_text(encoding="utf-8"))
    return plain


def _choices(name: str) -> dict[str, str]:
    """Return the parts that a machine's file chooses, or the file that it builds on."""
    found: dict[str, str] = {}
    for entry in _load(_folder() / f"{name}.yaml")["defaults"]:
        if isinstance(entry, Mapping):
            found |= {part: option for part, option in entry.items() if option is not None}
        elif entry != "_self_":
            found |= _choices(entry)
    return found


def _composed(name: str, overrides: list[str], config_dir: str | None) -> Plain:
    """Return a whole machine as a run would have it; ``config_dir`` has options of the user's own."""
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf

    if config_dir is not None:
        overrides = [*overrides, search_path(config_dir)]
    with initialize_config_module("conf", version_base="1.3"):
        config = compose("config", overrides=[f"machine={name}", *overrides])
    plain: Plain = OmegaConf.to_container(config, resolve=True)["machine"]  # type: ignore
    return plain


# -- lists ---------------------------------------------------------------------------------------


def _print_lists() -> None:
    whole = [
        (name, *(chosen.get(part, "-") for part in PARTS)) for name, chosen in machines().items()
    ]
    _print_table(("machine", *PARTS), whole)
    gpus = [(n, p["name"], _memory(p), *_rate(p), _tera(p)) for n, p in parts("gpu").items()]
    _print_table(("gpu", "what it is", "memory", "streams", "class", "matrices"), gpus)
    cpus = [(n, p["name"], _memory(p), *_rate(p), str(p["cores"])) for n, p in parts("cpu").items()]
    _print_table(("cpu", "what it is", "memory", "experts", "class", "cores"), cpus)
    links = [
        (n, p["name"], *_rate(p, "h2d_bytes_per_s", "rate_derate"))
        for n, p in parts("link").items()
    ]
    _print_table(("link", "what it is", "to the GPU", "class"), links)
    disks = [
        (
            n,
            p["name"],
            _shown("_bytes_per_s", max(row[-1] for row in p["curve"])),
            _class(p, "curve"),
        )
        for n, p in parts("storage").items()
    ]
    _print_table(("storage", "what it is", "reads up to", "class"), disks)
    print(
        "Classes: "
        + "; ".join(f"{letter} {what}" for letter, what in TRUST_CLASSES.items())
        + ".\n"
        "greenroom machines NAME shows all figures of a machine, gpu/NAME those of a part;\n"
        "greenroom sim machine=NAME machine/gpu=NAME machine.cpu.threads_used=8 chooses and changes."
    )


def _rate(
    plain: Plain, field: str = "memory_bytes_per_s", derate: str = "memory_derate"
) -> tuple[str, str]:
    """Return the rate that is achieved, and the class of what it hangs on: the derate, if it has one."""
    scale = plain.get(derate, 1)
    main = field if scale == 1 else derate
    return _shown(field, plain[field] * scale), _class(plain, main)


def _tera(plain: Plain) -> str:
    return _shown("_flops", plain["matmul_flops"] * plain.get("matmul_derate", 1))


def _memory(plain: Plain) -> str:
    return _shown("memory_bytes", plain["memory_bytes"])


def _class(plain: Plain, field: str) -> str:
    return str(plain["sources"][field])[0]


# -- one machine or part -------------------------------------------------------------------------


def _print_one(name: str, overrides: list[str], config_dir: str | None = None) -> None:
    part, _, option = name.rpartition("/")
    part = part.removeprefix("machine/")
    if part in PARTS and option in _options(_folder() / part) and not overrides:
        _print_part(part, _load(_folder() / part / f"{option}.yaml"))
        return
    own = config_dir is not None and Path(config_dir, "machine", f"{name}.yaml").is_file()
    if not own and name not in machines():
        known = [
            *machines(),
            *(f"{part}/{n}" for part in PARTS for n in _options(_folder() / part)),
        ]
        raise ConfigError(f"machine = {name}: no such machine or part{did_you_mean(name, known)}")
    plain = _composed(name, overrides, config_dir)
    built = Machine.from_mapping(plain, f"machine/{name}")
    print(f"{built.name}: {built.kind.replace('_', ' ')}\n")
    for part in PARTS:
        if plain.get(part):
            _print_part(part, plain[part])


def _print_part(part: str, plain: Plain) -> None:
    """Print a part's figures in the order of its file."""
    print(f"{part}: {plain['name']}")
    _print_table(("figure", "value", "achieved", "class", "source"), list(_rows(part, plain)))


def _rows(part: str, plain: Plain) -> Iterator[tuple[str, ...]]:
    scales = {rate: derate for derate, rates in DERATES[part].items() for rate in rates}
    for field, value in plain.items():
        if field in ("name", "sources"):
            continue
        letter, _, where = str(plain["sources"].get(field, "")).partition(": ")
        derate = plain.get(scales.get(field, ""), 1)
        reached = _shown(field, value * derate) if field in scales else ""
        yield field, _shown(field, value), reached, letter, where


def _shown(field: str, value: Any) -> str:
    """Return a figure with its unit, to three or four digits."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if not isinstance(value, int | float):
        return str(value)
    if field == "memory_bytes" and value % _GIB == 0:
        return f"{value // _GIB} GiB"
    for suffix, unit, name in _UNITS:
        if field.endswith(suffix):
            return f"{value / unit:.4g} {name}"
    return f"{value:.4g}"


def _print_table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 200, markup=False)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for head in heads:
        table.add_column(head, no_wrap=head not in ("what it is", "value", "source"))
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)
    console.print()
