"""``greenroom policies``: which policies there are, what each is, and what it says of itself."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module, resources
from typing import Any

from sim.command_line import Parser
from sim.mistakes import complain
from sim.screen import screen
from sim.settings import did_you_mean
from sim.types import ConfigError

_EPILOG = """examples:
  greenroom policies                                all of them, and what each says of itself
  greenroom policies saem                           its file: parts, parameters, sources
  greenroom policies lru > my_conf/policy/mine.yaml   a start for your own

Everything goes to standard output. Your own policy: greenroom sim --config-dir my_conf policy=mine."""
_SENTENCE = re.compile(r"(?<=[a-z0-9)])\.(?=\s|$)")
_MARKS = {"oracle": "knows the future", "assumed": "assumed accuracy", "lossy": "lossy"}


@dataclass(frozen=True, slots=True)
class Entry:
    """A policy of the catalogue: its name, what its file says of it, the file, and its labels."""

    name: str
    about: str
    text: str
    labels: tuple[str, ...]

    @property
    def summary(self) -> str:
        """The first sentence."""
        return _SENTENCE.split(self.about, maxsplit=1)[0]


def catalogue() -> list[Entry]:
    """Return all policies that come with the project, by name."""
    folder = resources.files("conf") / "policy"
    files = [file for file in folder.iterdir() if file.name.endswith(".yaml")]
    return [
        _entry(file.name.removesuffix(".yaml"), file.read_text(encoding="utf-8"))
        for file in sorted(files, key=lambda file: file.name)
    ]


def _entry(name: str, text: str) -> Entry:
    import yaml

    lines = text.splitlines()
    about = " ".join(line.lstrip("# ") for line in _head(lines))
    targets = list(_targets(yaml.safe_load(text)))
    classes = [getattr(import_module(t.rpartition(".")[0]), t.rpartition(".")[2]) for t in targets]
    labels = [mark for flag, mark in _MARKS.items() if any(getattr(c, flag) for c in classes)]
    needs = dict.fromkeys(column for c in classes for column in c.needs)
    return Entry(name, about, text, (*labels, *(f"needs {column}" for column in needs)))


def _head(lines: list[str]) -> Iterator[str]:
    for line in lines:
        if not line.startswith("#"):
            return
        yield line


def _targets(settings: Any) -> Iterator[str]:
    """Yield the classes that a policy's file names, wherever they stand."""
    if isinstance(settings, Mapping):
        if "_target_" in settings:
            yield settings["_target_"]
        for value in settings.values():
            yield from _targets(value)


def main(arguments: list[str]) -> int:
    """List the catalogue, or show one policy's file; return the exit code."""
    try:
        name = make_parser().parse_args(arguments).name
        entries = {entry.name: entry for entry in catalogue()}
        if name is None:
            _print_all(list(entries.values()))
            return 0
        if name not in entries:
            raise ConfigError(f"policy = {name}: no such policy{did_you_mean(name, entries)}")
    except Exception as error:
        return complain("greenroom policies", error)
    print(entries[name].text, end="")
    return 0


def make_parser() -> Parser:
    """Return what reads the command's arguments."""
    parser = Parser(
        prog="greenroom policies",
        description="List the policies that come with Greenroom; with a name, show its file.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "name", nargs="?", metavar="POLICY", help="a policy; without one: list them"
    )
    return parser


def _print_all(entries: list[Entry]) -> None:
    from rich.table import Table

    console = screen()
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("policy", no_wrap=True)
    table.add_column("what it is", min_width=30)
    table.add_column("says of itself", min_width=16)
    for entry in entries:
        table.add_row(entry.name, entry.summary, ", ".join(entry.labels))
    console.print(table)
    console.print("greenroom policies NAME shows a file; greenroom sim policy=NAME runs it.")
