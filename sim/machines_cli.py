"""``greenroom machines``: which machines and parts there are, and what each figure of one is based on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hwmodels.machine import DERATES, TRUST_CLASSES, Machine
from sim.command_line import Parser
from sim.composing import compose_config
from sim.machine_options import PARTS, Plain, machines, parts
from sim.mistakes import complain
from sim.own_options import add_config_dirs, check_folders, with_folders
from sim.screen import screen
from sim.settings import did_you_mean
from sim.types import ConfigError

_EPILOG = """examples:
  greenroom machines                                all machines and parts, and how sure their figures are
  greenroom machines rtx4090                        its figures, each with its source
  greenroom machines gpu/h100_sxm                   of a part
  greenroom machines rtx4090 machine/gpu=rtx3090 machine.cpu.threads_used=4

Everything goes to standard output. Your own: greenroom measure --out my_conf, then --config-dir my_conf."""
_UNITS = (
    ("_bytes_per_s", 1e9, "GB/s"),
    ("_flops", 1e12, "TF"),
    ("_bytes", 1e9, "GB"),
    ("_ns", 1e3, "us"),
)
_GIB = 2**30


def main(arguments: list[str]) -> int:
    """List machines and parts, or show one with its sources; return the exit code."""
    try:
        given = make_parser().parse_intermixed_args(arguments)
        check_folders(given.config_dirs)
        if given.name is None:
            _print_lists(given.config_dirs)
        else:
            _print_one(given.name, given.override, given.config_dirs)
    except Exception as error:
        return complain("greenroom machines", error)
    return 0


def make_parser() -> Parser:
    """Return what reads the command's arguments."""
    parser = Parser(
        prog="greenroom machines",
        description="List the machines and parts that come with Greenroom, and your own; with a "
        "name, show all figures of a machine (rtx4090) or a part (gpu/rtx4090), each with its source.",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add("name", nargs="?", metavar="NAME", help="a machine, or a part as gpu/rtx4090")
    add(
        "override",
        nargs="*",
        metavar="KEY=VALUE",
        help="what to change of the machine, as machine/gpu=rtx3090 or machine.cpu.threads_used=4",
    )
    add_config_dirs(parser)
    return parser


# -- lists ---------------------------------------------------------------------------------------


def _print_lists(config_dirs: Sequence[str]) -> None:
    whole = [
        (name, *(chosen.get(part, "-") for part in PARTS))
        for name, chosen in machines(config_dirs).items()
    ]
    _print_table(("machine", *PARTS), whole)
    for part, (heads, cells) in _COLUMNS.items():
        rows = []
        for name, plain in parts(part, config_dirs).items():
            try:
                rows.append((name, str(plain["name"]), *cells(plain)))
            except KeyError as error:
                raise ConfigError(f"machine/{part}/{name}: {error.args[0]}: missing") from error
            except TypeError as error:
                raise ConfigError(f"machine/{part}/{name}: {error}") from error
        _print_table((part, "what it is", *heads), rows)
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
    scale = _number(plain, derate, 1)
    main = field if scale == 1 else derate
    return _shown(field, _number(plain, field) * scale), _class(plain, main)


def _number(plain: Plain, field: str, default: float | None = None) -> float:
    """Return a figure; KeyError if it is missing, TypeError if it is no number."""
    value = plain[field] if default is None else plain.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{field} = {value}: must be a number")
    return value


def _tera(plain: Plain) -> str:
    return _shown("_flops", _number(plain, "matmul_flops") * _number(plain, "matmul_derate", 1))


def _memory(plain: Plain) -> str:
    return _shown("memory_bytes", _number(plain, "memory_bytes"))


def _most_read(plain: Plain) -> tuple[str, str]:
    curve = plain["curve"]
    if not isinstance(curve, list) or not all(isinstance(row, list) and row for row in curve):
        raise TypeError(f"curve = {curve}: must be a list of rows")
    most = max((row[-1] for row in curve), default=None)
    return _shown("_bytes_per_s", most), _class(plain, "curve")


def _class(plain: Plain, field: str) -> str:
    return (_source(plain, field) or "-")[0]


def _source(plain: Plain, field: str) -> str:
    sources = plain.get("sources")
    return str(sources.get(field, "")) if isinstance(sources, Mapping) else ""


_COLUMNS: dict[str, tuple[tuple[str, ...], Callable[[Plain], tuple[str, ...]]]] = {
    "gpu": (
        ("memory", "streams", "class", "matrices"),
        lambda plain: (_memory(plain), *_rate(plain), _tera(plain)),
    ),
    "cpu": (
        ("memory", "experts", "class", "cores"),
        lambda plain: (_memory(plain), *_rate(plain), str(plain["cores"])),
    ),
    "link": (
        ("to the GPU", "class"),
        lambda plain: _rate(plain, "h2d_bytes_per_s", "rate_derate"),
    ),
    "storage": (("reads up to", "class"), _most_read),
}
"""Of each part's list, the heads of columns after its name, and what stands in them."""


# -- one machine or part -------------------------------------------------------------------------


def _print_one(name: str, overrides: list[str], config_dirs: Sequence[str]) -> None:
    part, _, option = name.rpartition("/")
    part = part.removeprefix("machine/")
    if part in PARTS and not overrides:
        found = parts(part, config_dirs)
        if option in found:
            try:
                _print_part(part, found[option])
            except TypeError as error:
                raise ConfigError(f"machine/{name.removeprefix('machine/')}: {error}") from error
            return
    whole = machines(config_dirs)
    if name not in whole:
        known = [*whole, *(f"{part}/{n}" for part in PARTS for n in parts(part, config_dirs))]
        raise ConfigError(f"machine = {name}: no such machine or part{did_you_mean(name, known)}")
    plain = _composed(name, overrides, config_dirs)
    built = Machine.from_mapping(plain, f"machine/{name}")
    print(f"{built.name}: {built.kind.replace('_', ' ')}\n")
    for part in PARTS:
        if plain.get(part):
            _print_part(part, plain[part])


def _composed(name: str, overrides: list[str], config_dirs: Sequence[str]) -> Plain:
    """Return a whole machine as a run would have it."""
    given = with_folders([f"machine={name}", *overrides], config_dirs)
    plain: Plain = compose_config("config", given)["machine"]
    return plain


def _print_part(part: str, plain: Plain) -> None:
    """Print a part's figures in the order of its file."""
    print(f"{part}: {plain.get('name')}")
    _print_table(("figure", "value", "achieved", "class", "source"), list(_rows(part, plain)))


def _rows(part: str, plain: Plain) -> Iterator[tuple[str, ...]]:
    scales = {rate: derate for derate, rates in DERATES[part].items() for rate in rates}
    for field, value in plain.items():
        if field in ("name", "sources"):
            continue
        letter, _, where = _source(plain, field).partition(": ")
        derate = scales.get(field)
        reached = _number(plain, field) * _number(plain, derate, 1) if derate else None
        yield field, _shown(field, value), _shown(field, reached) if derate else "", letter, where


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
    from rich.table import Table
    from rich.text import Text

    console = screen()
    table = Table(box=None, padding=(0, 2, 0, 0))
    for head in heads:
        table.add_column(head, no_wrap=head not in ("what it is", "value", "source"))
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)
    console.print()
