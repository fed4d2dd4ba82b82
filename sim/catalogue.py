"""``greenroom policies``: which policies there are, what each is, and what it says of itself."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module, resources
from typing import Any

from sim.settings import did_you_mean

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
    parser = argparse.ArgumentParser(
        prog="greenroom policies",
        description="List the policies that come with Greenroom; with a name, show its file.",
    )
    parser.add_argument("name", nargs="?", help="a policy")
    name = parser.parse_args(arguments).name
    entries = {entry.name: entry for entry in catalogue()}
    if name is None:
        _print_all(list(entries.values()))
        return 0
    if name not in entries:
        hint = did_you_mean(name, entries)
        print(f"greenroom policies: error: policy = {name}: no such policy{hint}", file=sys.stderr)
        return 2
    print(entries[name].text, end="")
    return 0


def _print_all(entries: list[Entry]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 200, markup=False)
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("policy", no_wrap=True)
    table.add_column("what it is")
    table.add_column("says of itself")
    for entry in entries:
        table.add_row(entry.name, entry.summary, ", ".join(entry.labels))
    console.print(table)
    console.print("greenroom policies NAME shows a file; greenroom sim policy=NAME runs it.")
