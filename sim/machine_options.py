"""The files of machines and parts, as they are listed: those that come with Greenroom and the user's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from sim.calibrate_spec import read_yaml
from sim.types import ConfigError

Plain = dict[str, Any]

PARTS = ("gpu", "cpu", "link", "storage")
_INLINE = "(own)"
"""Stands for a part whose figures are in the machine's own file."""


def machines(config_dirs: Sequence[str] = ()) -> dict[str, dict[str, str]]:
    """Return by name which option each part of every whole machine is; parts it lacks are left out."""
    files = _files("", config_dirs)
    found = {}
    for name in files:
        choices = _choices(name, files)
        found[name] = {part: option for part, option in choices.items() if option is not None}
    return found


def parts(part: str, config_dirs: Sequence[str] = ()) -> dict[str, Plain]:
    """Return by name what the file of every option of a part says, with what it begins with."""
    files = _files(part, config_dirs)
    return {name: _merged(name, files) for name in files}


def _files(part: str, config_dirs: Sequence[str]) -> dict[str, Path]:
    """Return the files of a group by option, by name those that come with it first."""
    found: dict[str, Path] = {}
    for folder in (str(resources.files("conf")), *config_dirs):
        for file in sorted((Path(folder) / "machine" / part).glob("*.yaml")):
            found.setdefault(file.stem, file)
    return found


def _load(
    name: str, files: Mapping[str, Path], above: Sequence[str] = ()
) -> tuple[Plain, list[Any]]:
    """Return what an option's own file says, and its defaults with ``_self_``."""
    if name not in files or name in above:
        rule = "begins with itself" if name in above else "no such option"
        raise ConfigError(f"{files[above[-1]]}: defaults: {name}: {rule}")
    plain = read_yaml(files[name])
    if not isinstance(plain, Mapping):
        raise ConfigError(f"{files[name]}: must be a mapping of figures")
    own = {key: value for key, value in plain.items() if key != "defaults"}
    defaults = plain.get("defaults") or []
    if not isinstance(defaults, list):
        raise ConfigError(f"{files[name]}: defaults = {defaults}: must be a list")
    return own, defaults if "_self_" in defaults else [*defaults, "_self_"]


def _choices(
    name: str, files: Mapping[str, Path], above: tuple[str, ...] = ()
) -> dict[str, str | None]:
    """Return the parts that a machine's file chooses, or the file that it builds on."""
    own, defaults = _load(name, files, above)
    found: dict[str, str | None] = {}
    for entry in defaults:
        if isinstance(entry, Mapping):
            for part, option in entry.items():
                found[str(part).removeprefix("override ").strip()] = option
        elif entry != "_self_":
            found |= _choices(entry, files, (*above, name))
    inline = {part: _INLINE for part in PARTS if own.get(part) and not found.get(part)}
    return found | inline


def _merged(name: str, files: Mapping[str, Path], above: tuple[str, ...] = ()) -> Plain:
    own, defaults = _load(name, files, above)
    found: Plain = {}
    for entry in defaults:
        if isinstance(entry, str):
            more = own if entry == "_self_" else _merged(entry, files, (*above, name))
            found = _over(found, more)
    return found


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> Plain:
    """Return one mapping over another, mappings within them too."""
    found = dict(below)
    for key, value in above.items():
        under = found.get(key)
        if isinstance(value, Mapping) and isinstance(under, Mapping):
            found[key] = _over(under, value)
        else:
            found[key] = value
    return found
