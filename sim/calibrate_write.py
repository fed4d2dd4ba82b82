"""Writes what was fitted as option files: copies of those it was fitted in, with their sources.

A copy is called OPTION_fitted, for an option that comes with Greenroom would hide one of the same name. What
the rows are made of and that begins with a changed option, or has it as a part, gets a copy that names the
copy. A file of the user's is never changed; only what comes with Greenroom is changed in place, where the
folder is the one that it lies in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sim.calibrate_edit import Word, set_source, set_value
from sim.calibrate_names import Field, Keys, Options, value_at
from sim.results import write_text
from sim.types import ConfigError

_Key = tuple[str, str]
"""A group and an option of it."""
_HEAD = "# Written by greenroom calibrate "


def option_files(
    folder: Path,
    suffix: str,
    name: str,
    changes: Mapping[Field, tuple[Any, str]],
    machines: Sequence[Mapping[str, str]],
    options: Options,
) -> dict[Path, str]:
    """Return the files to write with their texts.

    ``changes`` has the new value and the source of each field; ``name`` is the calibration's;
    ``machines`` are the choices of the rows, which may begin with what changes. Raises ConfigError for a
    file that would be lost or hidden.
    """
    texts: dict[_Key, str] = {}
    for field, (value, source) in changes.items():
        key = field.group, field.option
        text = texts.get(key) or options.file(*key).read_text(encoding="utf-8")
        has_sources = field.group.startswith("machine")
        text = set_source(set_value(text, field.at, value), field.at, source, has_sources)
        texts[key] = text
    in_place = {key for key in texts if _in_place(folder, key, options)}
    _name_copies(texts, [key for key in texts if key not in in_place], suffix, machines, options)
    files = {}
    for (group, option), text in texts.items():
        path = folder / group / f"{option}.yaml"
        if (group, option) not in in_place:
            path = path.with_stem(f"{option}_{suffix}")
            text = _as_copy(text, group, option, suffix, name)
            _check_free(path, group, options)
        files[path] = text
    return files


def write_files(files: Mapping[Path, str]) -> None:
    """Write files, each whole or not at all; those that others name come first."""
    for path in sorted(files, key=lambda path: -len(path.parts)):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, files[path])


def _in_place(folder: Path, key: _Key, options: Options) -> bool:
    path = folder / key[0] / f"{key[1]}.yaml"
    return options.is_bundled(*key) and path.is_file() and path.samefile(options.file(*key))


def _name_copies(
    texts: dict[_Key, str],
    copied: Sequence[_Key],
    suffix: str,
    machines: Sequence[Mapping[str, str]],
    options: Options,
) -> None:
    """Let what names a copied option name the copy, which makes it a copy too, and so on upwards."""
    above = _named_by(machines, options)
    waiting, seen = list(copied), set(copied)
    while waiting:
        key = waiting.pop(0)
        for owner, at in above.get(key, []):
            text = texts.get(owner) or options.file(*owner).read_text(encoding="utf-8")
            texts[owner] = set_value(text, at, Word(f"{key[1]}_{suffix}"))
            if owner not in seen:
                seen.add(owner)
                waiting.append(owner)


def _named_by(
    machines: Sequence[Mapping[str, str]], options: Options
) -> dict[_Key, list[tuple[_Key, Keys]]]:
    """Return by option which others name it in their defaults, and where; all that rows are made of."""
    found: dict[_Key, list[tuple[_Key, Keys]]] = {}
    waiting = list(dict.fromkeys(pair for choices in machines for pair in choices.items()))
    seen = set(waiting)
    while waiting:
        owner = waiting.pop(0)
        for named, at in options.named(*owner):
            found.setdefault(named, []).append((owner, at))
            if named not in seen:
                seen.add(named)
                waiting.append(named)
    return found


def _as_copy(text: str, group: str, option: str, suffix: str, name: str) -> str:
    import yaml

    if value_at(yaml.safe_load(text), ("name",)) == option:
        text = set_value(text, ("name",), Word(f"{option}_{suffix}"))
    return f"{_HEAD}{name} from {group}/{option}; figures marked F: fitted by it.\n{text}"


def _check_free(path: Path, group: str, options: Options) -> None:
    bundled = options.is_bundled(group, path.stem) and options.file(group, path.stem)
    if bundled and not (path.is_file() and path.samefile(bundled)):
        rule = "is the name of an option that comes with Greenroom; choose another --name"
        raise ConfigError(f"{path}: {rule}")
    if path.is_file() and not path.read_text(encoding="utf-8").startswith(_HEAD):
        rule = (
            "is there already and was not written by greenroom calibrate; move it or choose --name"
        )
        raise ConfigError(f"{path}: {rule}")
