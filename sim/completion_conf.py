"""Which groups, options and dotted keys a configuration has, read from YAML alone.

Hydra takes a fifth of a second to be imported and a tenth to compose, too long for a press of Tab. What is
composed here has the same keys (a test compares them); values are not resolved.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sim.config_groups import GROUPS, WITH_EXPERIMENTS
from sim.yaml_aliases import explodes

_CONF = Path(__file__).parents[1] / "conf"
_SELF = "_self_"
_GLOBAL = re.compile(r"#\s*@package\s+_global_")
_HIDDEN = ("defaults", "sources")
_SHOWN_OF_HYDRA = ("run.dir", "sweep.dir", "sweep.subdir", "job.chdir", "searchpath")
_EXPERIMENT = "experiment"


@dataclass(frozen=True)
class Composed:
    """A configuration: its nested values, and its groups, those within others as ``group@package``."""

    values: dict[str, Any]
    groups: tuple[str, ...]


@dataclass
class Conf:
    """The folders of options: what comes with Greenroom, then those of the user."""

    folders: list[Path] = field(default_factory=lambda: [_CONF])

    def options(self, group: str) -> list[str]:
        """Return the names of a group's options; ``group@package`` has those of ``group``."""
        found = set()
        for folder in self.folders:
            place = folder / group.partition("@")[0]
            if place.is_dir():
                found |= {file.stem for file in place.glob("*.yaml")}
        return sorted(found)

    def about(self, group: str, option: str) -> str:
        """Return the first line of what an option's file says of itself."""
        file = self._file(f"{group.partition('@')[0]}/{option}")
        if file is None:
            return ""
        with file.open(encoding="utf-8", errors="replace") as lines:
            first = next((line for line in lines if not _GLOBAL.match(line)), "")
        return first.lstrip("# ").strip() if first.startswith("#") else ""

    def compose(self, name: str, words: Sequence[str] = ()) -> Composed:
        """Return ``conf/NAME.yaml`` with the options that the words choose; of several, all their keys."""
        chosen = dict(_choices(words))
        experiments = chosen.pop(_EXPERIMENT, []) if name in WITH_EXPERIMENTS else []
        for experiment in experiments:
            chosen = {**self._overridden(experiment), **chosen}
        making = _Making(self, chosen)
        making.load(name, "")
        for experiment in experiments:
            making.load(f"{_EXPERIMENT}/{experiment}", "")
        groups = [*GROUPS[name], *(group for group in making.groups if "@" in group)]
        return Composed(making.values, tuple(dict.fromkeys(groups)))

    def _overridden(self, experiment: str) -> dict[str, list[str]]:
        """Return what an experiment's file chooses of other groups."""
        found = {}
        for entry in self.read(f"{_EXPERIMENT}/{experiment}").get("defaults", ()):
            for key, option in entry.items() if isinstance(entry, Mapping) else ():
                if key.startswith("override ") and "hydra/" not in key:
                    found[key.removeprefix("override ").strip().lstrip("/")] = [str(option)]
        return found

    def read(self, name: str) -> dict[str, Any]:
        """Return what a file says; nothing if it is not there or cannot be read."""
        import yaml

        file = self._file(name)
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        try:
            if file is None or explodes(file):
                return {}
            found = yaml.load(file.read_text("utf-8"), loader)
        except (yaml.YAMLError, OSError, UnicodeError):
            return {}
        return dict(found) if isinstance(found, Mapping) else {}

    def _file(self, name: str) -> Path | None:
        files = (folder / f"{name}.yaml" for folder in self.folders)
        return next((file for file in files if file.is_file()), None)


class _Making:
    """A configuration while its files are merged, in the order of their ``defaults``."""

    def __init__(self, conf: Conf, chosen: Mapping[str, list[str]]) -> None:
        self._conf, self._chosen = conf, chosen
        self._under_way: list[str] = []
        self.values: dict[str, Any] = {}
        self.groups: list[str] = []

    def load(self, name: str, package: str) -> None:
        """Merge a file, and those that its ``defaults`` name, into ``package``."""
        if name in self._under_way:
            return
        self._under_way.append(name)
        own = self._conf.read(name)
        defaults = own.pop("defaults", [])
        for entry in defaults if _SELF in defaults else [*defaults, _SELF]:
            if entry == _SELF:
                _merge(_inside(self.values, package), own)
            elif isinstance(entry, str):
                self.load(_beside(name, entry), package)
            elif isinstance(entry, Mapping):
                for key, option in entry.items():
                    self._choose(name, package, str(key), option)
        self._under_way.pop()

    def _choose(self, name: str, package: str, key: str, default: Any) -> None:
        if key.startswith("override "):
            return
        group, _, where = key.removeprefix("optional ").strip().partition("@")
        path = group[1:] if group.startswith("/") else _beside(name, group)
        usual = path.replace("/", ".")
        inside = f"{package}.{where or group}".strip(".") if package else where or usual
        full = path if inside == usual else f"{path}@{inside}"
        self.groups.append(full)
        options = default if isinstance(default, list) else [default]
        for option in self._chosen.get(full, options):
            if option is not None:
                self.load(f"{path}/{option}", inside)


def _beside(name: str, other: str) -> str:
    """Return the path of a file or group that is named in the file ``name``."""
    folder = name.rpartition("/")[0]
    return f"{folder}/{other}" if folder and folder != _EXPERIMENT else other


def _choices(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each KEY=VALUE of the words that may choose options, and these, one or several by commas."""
    for word in words:
        key, equals, options = word.lstrip("+").partition("=")
        if equals and re.fullmatch(r"[\w/@.]+", key):
            yield key, [option.strip() for option in options.split(",") if option.strip()]


def _inside(values: dict[str, Any], package: str) -> dict[str, Any]:
    for part in package.split(".") if package else ():
        if not isinstance(values.get(part), dict):
            values[part] = {}
        values = values[part]
    return values


def _merge(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, Mapping):
            if not isinstance(into.get(key), dict):
                into[key] = {}
            _merge(into[key], value)
        else:
            into[key] = value


def shown(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a user may want to change: without sources, and little of Hydra's own."""
    plain = {key: value for key, value in values.items() if key not in (*_HIDDEN, "hydra")}
    if isinstance(values.get("hydra"), Mapping):
        hydra: dict[str, Any] = {"searchpath": None}
        for path in _SHOWN_OF_HYDRA:
            group, _, key = path.rpartition(".")
            if group:
                hydra.setdefault(group, {})[key] = values["hydra"].get(group, {}).get(key)
        plain["hydra"] = hydra
    return plain


def node(values: Mapping[str, Any], path: str) -> Any:
    """Return what stands at a dotted path; None if there is nothing."""
    found: Any = values
    for part in path.split(".") if path else ():
        if not isinstance(found, Mapping) or part not in found:
            return None
        found = found[part]
    return found
