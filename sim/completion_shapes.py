"""What each command takes, derived from its own parser, so that completion cannot fall behind it.

Parsers are made by modules that import a lot; what they say is kept in a file until any source changes.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]
_SOURCES = ("sim", "real", "traces", "hwmodels")
_MOST_ABOUT = 70


@dataclass(frozen=True)
class Option:
    """An option: its flags, what it is, and what its value is taken from; None if it takes none.

    Sources of values are words, and kinds: ``@file``, ``@folder``, ``@trace``, ``@GROUP`` for the options of
    a group. A source ``,`` says that several go, by commas. An empty list: any text.
    """

    flags: list[str]
    about: str
    values: list[str] | None
    again: bool = False


@dataclass(frozen=True)
class Shape:
    """What a command takes: options, the sources of each positional argument, and its file in ``conf/``.

    The last positional argument may come again if ``many``. A source ``@settings`` is KEY=VALUE.
    """

    options: list[Option]
    positionals: list[list[str]]
    many: bool
    config: str | None
    settings: dict[str, list[str]]
    """Values of settings that take few."""


def shape_of(command: str, words: Sequence[str]) -> Shape:
    """Return what a command takes, given the words after it."""
    key = f"{command} {variant_of(command, words)}".strip()
    stamp = _stamp()
    kept = _read(stamp)
    if key not in kept:
        made = _make(key)
        _keep(stamp, kept | {key: asdict(made)})
        return made
    found = dict(kept[key])
    found["options"] = [Option(**option) for option in found["options"]]
    return Shape(**found)


def variant_of(command: str, words: Sequence[str]) -> str:
    """Return which of a command's several parsers the words are for."""
    if command == "model" and words and words[0].startswith("from-"):
        return words[0]
    if command == "record" and any(word.partition("=")[0] == "--url" for word in words):
        return "--url"
    return ""


# -- made of a parser --------------------------------------------------------------------------------


def _make(key: str) -> Shape:
    from sim.completion_values import CONFIGS, places_of, settings_values, values_of

    command = key.partition(" ")[0]
    actions = [action for parser in parsers(key) for action in parser._actions]
    options = {}
    for action in actions:
        if action.option_strings and action.help != argparse.SUPPRESS:
            takes = None if action.nargs == 0 else values_of(command, action)
            again = isinstance(action, argparse._AppendAction)
            flags = list(action.option_strings)
            options[flags[-1]] = Option(flags, _about(action), takes, again)
    places = [action for action in actions if not action.option_strings]
    config = CONFIGS.get(command)
    return Shape(
        list(options.values()),
        places_of(command, places),
        bool(places) and places[-1].nargs in ("*", "+"),
        config,
        settings_values() if config else {},
    )


def parsers(key: str) -> list[argparse.ArgumentParser]:
    """Return the parsers of a command, or of a variant of one.

    Raises AttributeError for a module that makes none, ImportError for one that is not there.
    """
    from sim.cli import COMMANDS

    command, _, variant = key.partition(" ")
    if command == "sim":
        return [_of_hydra()]
    if command == "sweep":
        return [import_module("sim.sweeps.options").make_parser()]
    module: Any = import_module(COMMANDS[command][0])
    if command == "model" and variant:
        return [module.make_parser(variant)]
    if command == "record" and not variant:
        from sim.command_line import Parser

        own = import_module("traces.record_cli").make_parser(Parser)
        url = argparse.ArgumentParser(add_help=False)
        url.add_argument(
            "--url", metavar="http://HOST:PORT", help="record a running engine instead"
        )
        return [own, url]
    return [module.make_parser()]


def _of_hydra() -> argparse.ArgumentParser:
    """Return Hydra's parser with the flags that ``greenroom sim`` has of it."""
    from hydra._internal.utils import get_args_parser

    from sim.run_flags import FLAGS, FLAGS_WITH_VALUE

    parser: argparse.ArgumentParser = get_args_parser()
    for action in parser._actions:
        if action.option_strings and not set(action.option_strings) & {*FLAGS, *FLAGS_WITH_VALUE}:
            action.help = argparse.SUPPRESS
    return parser


def _about(action: argparse.Action) -> str:
    """Return an option's help in one line that fits a list."""
    text = " ".join(str(action.help or "").replace("%%", "%").split())
    return text if len(text) <= _MOST_ABOUT else f"{text[: _MOST_ABOUT - 3]}..."


# -- kept --------------------------------------------------------------------------------------------


def _stamp() -> str:
    """Return what changes when any source file does."""
    newest, count = 0, 0
    for folder in _SOURCES:
        for place, _, names in os.walk(_ROOT / folder):
            for name in names:
                if name.endswith(".py"):
                    newest = max(newest, os.stat(os.path.join(place, name)).st_mtime_ns)
                    count += 1
    return f"{_ROOT} {count} {newest}"


def _kept_file() -> Path:
    place = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(place) / "greenroom" / "completion.json"


def _read(stamp: str) -> dict[str, Any]:
    try:
        found = json.loads(_kept_file().read_text("utf-8"))
        return dict(found["shapes"]) if found["stamp"] == stamp else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _keep(stamp: str, shapes: dict[str, Any]) -> None:
    """Keep the shapes for the next press of Tab, if there is a place for that."""
    file = _kept_file()
    partial = file.with_name(f"{file.name}.tmp-{os.getpid()}")
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps({"stamp": stamp, "shapes": shapes}), encoding="utf-8")
        partial.replace(file)


def flags_of(options: Iterable[Option]) -> dict[str, Option]:
    """Return options by each of their flags."""
    return {flag: option for option in options for flag in option.flags}
