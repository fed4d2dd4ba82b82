"""Names of parameters, and which value of a configuration each is.

``machine/cpu/ryzen_9950x3d.memory_derate`` is a field of an option's file, and counts in each row that is
composed of that option unless a file or override above it sets the field. ``machine.cpu.memory_derate``,
without an option, is the field of whatever file sets it in the rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from hwmodels.machine import numeric_fields
from sim.calibrate_rows import Row
from sim.calibrate_spec import Specification, read_yaml
from sim.settings import did_you_mean
from sim.types import ConfigError

Keys = tuple[str | int, ...]
"""Keys from the root of a configuration down to a value; numbers are places in a list."""
_INDEX = re.compile(r"\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class Field:
    """A field of an option's file: ``at`` leads to it in that file, ``path`` in a configuration."""

    group: str
    option: str
    at: Keys

    @property
    def name(self) -> str:
        """The name, as in ``machine/gpu/rtx4090.memory_derate``."""
        return f"{self.group}/{self.option}.{_dotted(self.at)}"

    @property
    def path(self) -> Keys:
        """Where the value stands in a composed configuration."""
        return (*self.group.split("/"), *self.at)


class Options:
    """The files of options: those that come with it, then the user's own folders in their order."""

    def __init__(self, config_dirs: Sequence[str] = ()) -> None:
        self._bundled = Path(str(resources.files("conf")))
        self._folders = [self._bundled, *(Path(folder) for folder in config_dirs)]
        self._raw: dict[tuple[str, str], Any] = {}

    def file(self, group: str, option: str) -> Path:
        """Return an option's file."""
        for folder in self._folders:
            path = folder / group / f"{option}.yaml"
            if path.is_file():
                return path
        raise ConfigError(f"{group} = {option}: no such option")

    def is_bundled(self, group: str, option: str) -> bool:
        """Tell whether an option comes with Greenroom."""
        return (self._bundled / group / f"{option}.yaml").is_file()

    def sets(self, group: str, option: str, at: Keys) -> bool:
        """Tell whether an option's file gives a value, itself or from a file that it begins with."""
        return self.setter(group, option, at) is not None

    def setter(self, group: str, option: str, at: Keys) -> str | None:
        """Return the option whose own file gives a value: this one or one that it begins with."""
        if self.value(group, option, at) is not MISSING:
            return option
        for base in self._bases(group, option):
            found = self.setter(group, base, at)
            if found is not None:
                return found
        return None

    def value(self, group: str, option: str, at: Keys) -> Any:
        """Return what an option's own file has at a place; MISSING if nothing."""
        if (group, option) not in self._raw:
            self._raw[group, option] = read_yaml(self.file(group, option))
        return value_at(self._raw[group, option], at)

    def named(self, group: str, option: str) -> list[tuple[tuple[str, str], Keys]]:
        """Return the options that an option's defaults name, and where: of its own group, or its parts."""
        defaults = self.value(group, option, ("defaults",))
        found: list[tuple[tuple[str, str], Keys]] = []
        for i, entry in enumerate(defaults if isinstance(defaults, list) else []):
            if isinstance(entry, str) and entry != "_self_":
                found.append(((group, entry), ("defaults", i)))
            for key, part in entry.items() if isinstance(entry, Mapping) else ():
                name = str(key).removeprefix("override ").partition("@")[0].strip()
                where = name[1:] if name.startswith("/") else f"{group}/{name}"
                if isinstance(part, str):
                    found.append(((where, part), ("defaults", i, str(key))))
        return [(named, at) for named, at in found if self._has(*named)]

    def _has(self, group: str, option: str) -> bool:
        return any((folder / group / f"{option}.yaml").is_file() for folder in self._folders)

    def _bases(self, group: str, option: str) -> list[str]:
        """Return the options of its own group that an option begins with, the last first."""
        named = [key for key, _ in reversed(self.named(group, option))]
        return [base for where, base in named if where == group]


MISSING = object()
"""No value."""


def value_at(tree: Any, path: Keys) -> Any:
    """Return what stands at a place of nested mappings and lists; MISSING if nothing does."""
    for key in path:
        if isinstance(key, int):
            if not isinstance(tree, list) or key >= len(tree):
                return MISSING
        elif not isinstance(tree, Mapping) or key not in tree:
            return MISSING
        tree = tree[key]
    return tree


def _dotted(path: Keys) -> str:
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
    return text.removeprefix(".")


def _path(text: str) -> Keys:
    keys: list[str | int] = []
    for part in text.split("."):
        keys.append(_INDEX.sub("", part))
        keys += [int(number) for number in _INDEX.findall(part)]
    return tuple(keys)


# -- names -----------------------------------------------------------------------------------------


def resolve(
    spec: Specification, rows: Sequence[Row], options: Options
) -> tuple[dict[str, Field], dict[str, str]]:
    """Return the field that each parameter of a specification names, and why others name none.

    A name without an option names none where the rows' machines lack that part. ConfigError for an
    unknown name.
    """
    found: dict[str, Field] = {}
    lacking: dict[str, str] = {}
    for wish in spec.wishes:
        if wish.name in _known_paths() and not _is_set(_path(wish.name), rows):
            lacking[wish.name] = "since the rows' machines do not have them"
            continue
        try:
            named = _named(wish.name, rows, options)
        except ConfigError as error:
            raise ConfigError(f"{spec.path}: parameters.{wish.name}: {error}") from error
        if named.name in {field.name for field in found.values()}:
            raise ConfigError(f"{spec.path}: parameters.{wish.name}: {named.name} is given twice")
        found[wish.name] = named
    return found, lacking


def _known_paths() -> set[str]:
    return {f"machine.{name}" for name in numeric_fields()}


def _is_set(path: Keys, rows: Sequence[Row]) -> bool:
    found = [value_at(row.composed.config, path) for row in rows]
    return any(value is not MISSING and value is not None for value in found)


def _named(name: str, rows: Sequence[Row], options: Options) -> Field:
    head, _, rest = name.partition(".")
    group, _, option = head.rpartition("/")
    if not rest:
        raise ConfigError("must be GROUP/OPTION.FIELD, as machine/gpu/rtx4090.launch_ns")
    if not group:
        return owner_of(_path(name), rows, options)
    known_groups = {g for row in rows for g in row.composed.choices}
    if group not in known_groups:
        raise ConfigError(f"{group}: no such group{did_you_mean(group, known_groups)}")
    chosen = {row.composed.choices.get(group, "") for row in rows}
    if option not in chosen:
        try:
            options.file(group, option)
        except ConfigError:
            hint = did_you_mean(option, chosen)
            raise ConfigError(f"{group} = {option}: no such option{hint}") from None
    field = Field(group, option, _path(rest))
    _check_there(field, rows, options)
    _check_own(field, options)
    return field


def _check_own(field: Field, options: Options) -> None:
    """Raise ConfigError for a field that its option has from another, which it begins with."""
    setter = options.setter(field.group, field.option, field.at)
    if setter not in (None, field.option):
        place = f"{field.group.replace('/', '.')}.{_dotted(field.at)}"
        where = f"{field.group}/{field.option} does not set {_dotted(field.at)}"
        other = f"{field.group}/{setter} does"
        raise ConfigError(f"{where}, {other}: name that, or {place}")


def _check_there(field: Field, rows: Sequence[Row], options: Options) -> None:
    """Raise ConfigError for a field that neither its file nor a row that is made of it has."""
    own = [r.composed.config for r in rows if r.composed.choices.get(field.group) == field.option]
    if options.sets(field.group, field.option, field.at):
        return
    if own and all(value_at(config, field.path) is not MISSING for config in own):
        return
    around = options.value(field.group, field.option, field.at[:-1])
    above = _dotted(field.at[:-1])
    known = (
        list(numbers_in(around, f"{above}." if above else ""))
        if isinstance(around, Mapping)
        else []
    )
    hint = did_you_mean(_dotted(field.at), known)
    raise ConfigError(f"{field.group}/{field.option} has no {_dotted(field.at)}{hint}")


def owner_of(path: Keys, rows: Sequence[Row], options: Options) -> Field:
    """Return the field of the one file that sets a value in the rows."""
    owners: dict[str, Field] = {}
    for row in rows:
        choices = row.composed.choices
        for group in sorted(choices, key=lambda group: group.count("/")):
            at = tuple(path[group.count("/") + 1 :])
            is_above = tuple(group.split("/")) == path[: group.count("/") + 1]
            has_part = isinstance(value_at(row.composed.config, path[:-1]), Mapping)
            if not is_above or not at or not has_part:
                continue
            setter = options.setter(group, choices[group], at)
            if setter is not None:
                field = Field(group, setter, at)
                owners[field.name] = field
                break
    if not owners:
        shown = _dotted(path)
        known = {k for row in rows for k in numbers_in(row.composed.config)}
        raise ConfigError(f"no file sets {shown}{did_you_mean(shown, known)}")
    if len(owners) > 1:
        raise ConfigError(f"means several, name one: {', '.join(owners)}")
    return next(iter(owners.values()))


def numbers_in(tree: Any, above: str = "") -> Iterable[str]:
    """Yield the dotted keys of all numbers in nested mappings."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from numbers_in(value, f"{above}{key}.")
        elif isinstance(value, int | float):
            yield f"{above}{key}"


def is_felt(field: Field, row: Row, options: Options) -> bool:
    """Tell whether a field's value reaches a row: its option is chosen, and nothing above sets it."""
    choices = row.composed.choices
    chosen = choices.get(field.group)
    if chosen is None or (options.setter(field.group, chosen, field.at) or chosen) != field.option:
        return False
    parts = field.group.split("/")
    for depth in range(1, len(parts)):
        above = "/".join(parts[:depth])
        at = (*parts[depth:], *field.at)
        if above in choices and options.sets(above, choices[above], at):
            return False
    own = _dotted(field.path)
    keys = {text.lstrip("+~").partition("=")[0] for text in row.overrides} - set(choices)
    return not any(own == key or own.startswith((f"{key}.", f"{key}[")) for key in keys)
