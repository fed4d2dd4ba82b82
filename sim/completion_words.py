"""What may stand at the cursor of a command line: commands, options, their values, groups, keys, files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sim.completion_conf import Conf, node, shown
from sim.completion_shapes import Option, Shape, flags_of, shape_of, variant_of
from sim.config_groups import PARTS, WITH_EXPERIMENTS

_FOLDER_FLAGS = ("--config-dir", "-cd")
_SEARCHPATH = "hydra.searchpath="
_TOP = ("--help", "--version")


@dataclass(frozen=True)
class Candidate:
    """A whole word that may stand at the cursor; ``is_whole``: a blank goes behind it."""

    text: str
    about: str = ""
    is_whole: bool = True


def candidates(words: Sequence[str], current: str) -> list[Candidate]:
    """Return what may stand for ``current`` after the words, which begin with the command's name."""
    from sim.cli import COMMANDS

    if not words:
        named = [Candidate(name, about) for name, (_, about) in COMMANDS.items()]
        found: Iterable[Candidate] = [*named, *map(Candidate, _TOP if current else ())]
    else:
        command, *rest = words
        if command not in COMMANDS:
            return []
        shape = shape_of(command, rest)
        if variant_of(command, rest) in rest[:1]:  # is no argument, but chooses the parser
            del rest[0]
        found = _Line(shape, rest, current).candidates()
    unique = {each.text: each for each in found if each.text.startswith(current)}
    return list(unique.values())


class _Line:
    """A command line up to the cursor."""

    def __init__(self, shape: Shape, words: Sequence[str], current: str) -> None:
        self._shape, self._words, self._current = shape, words, current
        self._flags = flags_of(shape.options)
        self._conf = Conf([*Conf().folders, *map(Path, _own_folders([*words, current]))])
        self._config: str = shape.config or "config"

    def candidates(self) -> Iterator[Candidate]:
        """Yield what may stand at the cursor; what does not begin as it does is left out later."""
        before = self._flags.get(self._words[-1]) if self._words else None
        flag, equals, _ = self._current.partition("=")
        if before is not None and before.values is not None:
            yield from self._values("", before.values)
        elif equals and flag in self._flags:
            yield from self._values(f"{flag}=", self._flags[flag].values or [])
        elif self._current.startswith("-"):
            yield from self._options()
        else:
            place = self._place()
            if place is not None:
                yield from self._values("", place)
            if not self._current and place in (None, []):
                yield from self._options()

    def _options(self) -> Iterator[Candidate]:
        given = {self._flags[w.partition("=")[0]].flags[0] for w in self._words
                 if w.partition("=")[0] in self._flags}  # fmt: skip
        for option in self._shape.options:
            if option.again or option.flags[0] not in given:
                for flag in _worth(option, self._current):
                    yield Candidate(flag, option.about)

    def _place(self) -> list[str] | None:
        """Return the sources of the positional argument at the cursor; None if there is none."""
        count, taken = 0, False
        for word in self._words:
            option = self._flags.get(word)
            if not taken and option is None and not word.startswith("-"):
                count += 1
            taken = not taken and option is not None and option.values is not None
        places = self._shape.positionals
        if count < len(places):
            return places[count]
        return places[-1] if places and self._shape.many else None

    # -- values --------------------------------------------------------------------------------------

    def _values(self, lead: str, sources: Sequence[str]) -> Iterator[Candidate]:
        """Yield ``lead`` and a value of the sources; of a list the values before the last comma stay."""
        typed = self._current[len(lead) :]
        before: list[str] = []
        if "," in sources or (lead and not lead.startswith("-") and "@file" not in sources):
            *before, typed = typed.split(",")
        lead += "".join(f"{value}," for value in before)
        for source in sources:
            if source == "@settings":
                yield from self._settings()
            elif source in ("@file", "@folder"):
                yield from _files(lead, typed, source == "@folder")
            elif source == "@node":
                yield from map(Candidate, _nodes(shown(self._composed.values)))
            elif source == "@parts":
                names = (f"{part}/{name}" for part in PARTS for name in self._conf.options(part))
                yield from (Candidate(name.removeprefix("machine/")) for name in names)
            elif source.startswith("@"):
                for name in self._conf.options(source[1:]):
                    if name not in before:
                        yield Candidate(f"{lead}{name}", self._conf.about(source[1:], name))
            elif source != "," and source not in before:
                yield Candidate(f"{lead}{source}")

    @property
    def _composed(self) -> Any:
        return self._conf.compose(self._config, self._words)

    def _settings(self) -> Iterator[Candidate]:
        """Yield groups, and keys down to the next dot; after ``=`` options or values."""
        sign = self._current[: len(self._current) - len(self._current.lstrip("+~"))]
        key, equals, _ = self._current[len(sign) :].partition("=")
        composed = self._composed
        experiments = _experiments(self._config)
        if equals:
            lead = f"{sign}{key}="
            yield from self._values(lead, self._sources(key, composed, experiments))
            return
        end = "" if sign == "~" else "="
        groups = composed.groups if sign != "+" else ()
        for group in groups:
            yield Candidate(f"{sign}{group}{end}", "group", is_whole=not end)
        if sign != "~":
            for group in experiments:
                yield Candidate(f"+{group}=", "group", is_whole=False)
        yield from _keys(shown(composed.values), sign, key, end)

    def _sources(self, key: str, composed: Any, experiments: Sequence[str]) -> list[str]:
        if key in composed.groups or key in experiments:
            return [f"@{key}"]
        if key in self._shape.settings:
            return self._shape.settings[key]
        value = node(composed.values, key)
        if isinstance(value, bool):
            return ["true", "false"]
        return [] if value is None or isinstance(value, Mapping | list) else [str(value)]


def _experiments(config: str) -> tuple[str, ...]:
    return ("experiment",) if config in WITH_EXPERIMENTS else ()


def _keys(values: Mapping[str, Any], sign: str, typed: str, end: str) -> Iterator[Candidate]:
    """Yield the keys at the level that is being typed; one that holds others ends in a dot."""
    parent = typed.rpartition(".")[0]
    found = node(values, parent)
    lead = f"{sign}{parent}." if parent else sign
    for key, value in shown(found).items() if isinstance(found, Mapping) else ():
        if isinstance(value, Mapping) and value:
            yield Candidate(f"{lead}{key}.", is_whole=False)
        else:
            about = "" if isinstance(value, Mapping | list) else str(value)
            yield Candidate(f"{lead}{key}{end}", about, is_whole=not end)


def _nodes(values: Mapping[str, Any], lead: str = "") -> Iterator[str]:
    for key, value in shown(values).items():
        if isinstance(value, Mapping):
            yield f"{lead}{key}"
            yield from _nodes(value, f"{lead}{key}.")


def _worth(option: Option, typed: str) -> list[str]:
    """Return the flags to offer: long ones, and a short one where it is all there is or is typed."""
    long = [flag for flag in option.flags if flag.startswith("--")]
    return long if long and not (typed in option.flags and typed not in long) else option.flags


def _own_folders(words: Sequence[str]) -> Iterator[str]:
    """Yield the user's folders of options that are named so far."""
    for before, word in zip(["", *words], words, strict=False):
        flag, equals, value = word.partition("=")
        if before in _FOLDER_FLAGS:
            yield os.path.expanduser(word)
        elif equals and flag in _FOLDER_FLAGS:
            yield os.path.expanduser(value)
        elif word.startswith(_SEARCHPATH):
            for place in word[len(_SEARCHPATH) :].strip("[]'\"").split(","):
                yield place.strip(" '\"").removeprefix("file://")


def _files(lead: str, typed: str, folders_only: bool) -> Iterator[Candidate]:
    """Yield the files and folders that begin with what is typed; folders end in a slash."""
    head, slash, base = typed.rpartition("/")
    place = Path(os.path.expanduser(f"{head}{slash}") or ".")
    try:
        entries = sorted(os.scandir(place), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if not entry.name.startswith(base) or (entry.name.startswith(".") and not base):
            continue
        if entry.is_dir():
            yield Candidate(f"{lead}{head}{slash}{entry.name}/", is_whole=False)
        elif not folders_only:
            yield Candidate(f"{lead}{head}{slash}{entry.name}")
