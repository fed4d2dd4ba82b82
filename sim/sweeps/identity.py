"""What a sweep is: its points, the content of its traces and the code that runs them.

A sweep goes on in a folder only if all of that is as it was; else its table would mix results of different
questions, or of different programs.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from sim.sweeps.chunk import Point
from sim.targets import may_hold_policies
from sim.types import ConfigError

_OURS = ("sim", "traces", "hwmodels")
_IMPORT = re.compile(
    r"(?:^|[;:])[ \t]*(?:from[ \t]+(\.*)([\w.]*)[ \t]+import[ \t]+(\([^)]*|[\w, \t]*)"
    r"|import[ \t]+([\w., \t]+))",
    re.MULTILINE,
)
"""What a statement imports: dots, a module and names from there, perhaps over lines; or modules."""


def digest_of_points(points: Iterable[Point], bases: Mapping[int, Mapping[str, Any]]) -> str:
    """Return a digest of the configurations of all points, in their order."""
    own = {number: _digest(base) for number, base in bases.items()}
    total = hashlib.sha256()
    for point in points:
        edits = json.dumps([point.overrides, own[point.base], point.edits], default=str)
        total.update(edits.encode())
    return total.hexdigest()


def digests_of_inputs(
    bases: Iterable[Mapping[str, Any]], points: Iterable[Point]
) -> dict[str, str | None]:
    """Return a digest of the content of each trace and arrival file that the points name, by its path.

    None of a file that is not there: the points that name it fail, and may go well once it is there.
    """
    named = {path for base in bases for path in _paths(base)}
    named |= {str(value) for p in points for path, value in p.edits if _names_a_file(path)}
    return {path: _content(path) for path in sorted(named)}


def digest_of_code(bases: Iterable[Mapping[str, Any]], points: Iterable[Point] = ()) -> str:
    """Return a digest of our own code, and of a user's modules that the bases and the points name.

    What those modules import from beside them counts too, wherever in them.
    """
    set_alone = ({path[-1]: value} for point in points for path, value in point.edits)
    foreign = {module for one in (*bases, *set_alone) for module in _modules(one)}
    files = {file for module in sorted(foreign) for file in _files_of(module)}
    return _digest([_own_code(), *(_content(str(file)) for file in sorted(files))])


@cache
def _own_code() -> str:
    root = Path(__file__).parents[2]
    files = sorted(own_files())
    return _digest([[str(file.relative_to(root)), _content(str(file))] for file in files])


def own_files() -> set[Path]:
    """Return those of our source files that running a point can reach: what they import, wherever."""
    root = Path(__file__).parents[2]
    first = [root / "sim" / "point.py", *(root / "sim" / "policies").glob("*.py")]
    return _reached(first, root, lambda name: name in _OURS)


def _reached(first: Iterable[Path], root: Path, counts: Callable[[str], bool]) -> set[Path]:
    """Return some source files and those below ``root`` that they import, directly or not.

    ``counts`` is asked of the top-level name of a module. What happens to be loaded plays no part: a
    second look in the same process finds the same.
    """
    left, found = list(first), set[Path]()
    while left:
        file = left.pop()
        if file not in found:
            found.add(file)
            left += _imported(file, root, counts)
    return found


def _imported(file: Path, root: Path, counts: Callable[[str], bool]) -> Iterator[Path]:
    """Yield the files that a source imports, wherever in it."""
    source = file.read_text(encoding="utf-8", errors="replace")
    for dots, module, names, listed in _IMPORT.findall(source):
        modules = [one.split()[0] for one in listed.split(",") if one.strip()]
        if not listed:
            modules = [module, *(f"{module}.{name}" for name in re.findall(r"\w+", names))]
        base = file.parents[len(dots) - 1] if dots else root
        for one in modules:
            if dots or counts(one.partition(".")[0]):
                yield from _sources(base, one)


def _sources(base: Path, module: str) -> Iterator[Path]:
    """Yield the files below a folder that are loaded for a module: of its packages, and its own."""
    for name in filter(None, module.split(".")):
        base = base / name
        yield from (f for f in (base.with_suffix(".py"), base / "__init__.py") if f.is_file())
        if not base.is_dir():  # nothing can be within it
            return


def _files_of(module: str) -> Iterator[Path]:
    """Yield the source files of a user's module, and of what it imports from beside it."""
    if not may_hold_policies(module):
        return
    try:
        named = getattr(import_module(module), "__file__", None)
    except Exception:  # of whatever kind: the points that need it will say so
        return
    if named is None:
        return
    file, own = Path(named), module.partition(".")[0]
    if not file.is_file():  # within an archive
        yield from [place for place in file.parents if place.is_file()]
        return
    root = file.parents[module.count(".") + (file.name == "__init__.py")]
    is_installed = root.name in ("site-packages", "dist-packages")  # beside all of its neighbours
    first = [file, *_sources(root, module)]  # its packages' too
    yield from _reached(
        first, root, lambda name: name == own if is_installed else name not in _OURS
    )


def _modules(config: Any) -> Iterator[str]:
    """Yield the modules outside of our own that a configuration takes classes from."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            if key == "_target_" and isinstance(value, str) and "." in value:
                module = value.rpartition(".")[0]
                if module.partition(".")[0] not in _OURS:
                    yield module
            else:
                yield from _modules(value)
    elif isinstance(config, list):
        for value in config:
            yield from _modules(value)


def _paths(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the files that a configuration names."""
    for group, name in _FILES:
        value = (config.get(group) or {}).get(name)
        if isinstance(value, str):
            yield value


_FILES = (("trace", "path"), ("calibration", "trace"), ("workload", "arrivals"))


def _names_a_file(path: Sequence[str]) -> bool:
    return tuple(path) in _FILES


def _content(path: str) -> str | None:
    """Return a digest of a file, or of a folder's names, sizes and times; None if it is not there."""
    from sim.build import resolve_path

    try:
        found = resolve_path(path)
        if found.is_dir():
            stats = ((file, file.stat()) for file in sorted(found.rglob("*")))
            return _digest([[str(file), stat.st_size, stat.st_mtime_ns] for file, stat in stats])
        with open(found, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError, ConfigError):
        return None


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
