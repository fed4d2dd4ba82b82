"""Writes what was fitted as option files: copies of those it was fitted in, with their sources.

Into a folder of the user's own, a copy is called OPTION_fitted (an option that comes with Greenroom would
hide one of the same name), and a whole machine whose parts were fitted gets a copy that names them. Into the
folder where the options lie, they are changed in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sim.calibrate_edit import Word, set_source, set_value
from sim.calibrate_names import Field, Keys, Options, value_at
from sim.results import write_text
from sim.types import ConfigError

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
    ``machines`` are the choices of the rows, for the whole machines among them. Raises ConfigError for a
    file that would be lost.
    """
    texts: dict[tuple[str, str], str] = {}
    for field, (value, source) in changes.items():
        key = field.group, field.option
        text = texts.get(key) or options.file(*key).read_text(encoding="utf-8")
        has_sources = field.group.startswith("machine")
        text = set_source(set_value(text, field.at, value), field.at, source, has_sources)
        texts[key] = text
    renamed = {key: not _in_place(folder, key, options) for key in texts}
    _name_parts(folder, texts, renamed, suffix, machines, options)
    files = {}
    for (group, option), text in texts.items():
        path = folder / group / f"{option}.yaml"
        if renamed[group, option]:
            path = path.with_stem(f"{option}_{suffix}")
            text = _as_copy(text, group, option, suffix, name)
            _check_free(path)
        files[path] = text
    return files


def write_files(files: Mapping[Path, str]) -> None:
    """Write files, each whole or not at all; those that others name come first."""
    for path in sorted(files, key=lambda path: -len(path.parts)):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, files[path])


def _in_place(folder: Path, key: tuple[str, str], options: Options) -> bool:
    path = folder / key[0] / f"{key[1]}.yaml"
    return path.is_file() and path.samefile(options.file(*key))


def _name_parts(
    folder: Path,
    texts: dict[tuple[str, str], str],
    renamed: dict[tuple[str, str], bool],
    suffix: str,
    machines: Sequence[Mapping[str, str]],
    options: Options,
) -> None:
    """Let the options of the rows that begin with copies, or have them as parts, name the copies."""
    waiting = [key for key in texts if renamed[key]]
    while waiting:
        group, option = waiting.pop(0)
        for choices in machines:
            for key in ((group, choices.get(group)), _whole(group, choices)):
                if key is None or key[1] is None or key == (group, option):
                    continue
                owner = str(key[0]), str(key[1])
                text = texts.get(owner) or options.file(*owner).read_text(encoding="utf-8")
                at = _default_of(text, group.rpartition("/")[2], option)
                if at is None:  # another option, or chosen by an override of the row
                    continue
                if owner not in texts:
                    waiting.append(owner)
                texts[owner] = set_value(text, at, Word(f"{option}_{suffix}"))
                renamed[owner] = not _in_place(folder, owner, options)


def _whole(group: str, choices: Mapping[str, str]) -> tuple[str, str] | None:
    whole = group.rpartition("/")[0]
    return (whole, choices[whole]) if whole in choices else None


def _default_of(text: str, part: str, option: str) -> Keys | None:
    """Return where the defaults of an option's file name another of its group, or a part."""
    import yaml

    defaults = value_at(yaml.safe_load(text), ("defaults",))
    for i, entry in enumerate(defaults if isinstance(defaults, list) else []):
        if entry == option:
            return ("defaults", i)
        if isinstance(entry, Mapping) and entry.get(part) == option:
            return ("defaults", i, part)
    return None


def _as_copy(text: str, group: str, option: str, suffix: str, name: str) -> str:
    import yaml

    if value_at(yaml.safe_load(text), ("name",)) == option:
        text = set_value(text, ("name",), Word(f"{option}_{suffix}"))
    return f"{_HEAD}{name} from {group}/{option}; figures marked F: fitted by it.\n{text}"


def _check_free(path: Path) -> None:
    if path.is_file() and not path.read_text(encoding="utf-8").startswith(_HEAD):
        rule = (
            "is there already and was not written by greenroom calibrate; move it or choose --name"
        )
        raise ConfigError(f"{path}: {rule}")
