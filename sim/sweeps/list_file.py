"""Points one by one from a file: CSV, YAML or text, by how its name ends."""

from __future__ import annotations

import csv
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.calibrate_spec import values_written_out
from sim.sweeps.grammar import Grammar, PointSettings, quoted
from sim.types import ConfigError

if TYPE_CHECKING:
    from sim.sweeps.space import Axis

Line = tuple[int, list[str]]
"""Where in the file a point is, from 1, and its overrides."""

_MOST_VALUES = 10_000
_YAML = (".yaml", ".yml", ".json")
_NEEDS_SHELL = re.compile(r"[\"'\\#]")
_FLOAT = re.compile(r"[-+]?(?:[0-9][0-9_]*)?\.?[0-9_]*[eE][-+]?[0-9]+")
_NOT_OF_A_POINT = ("sweep.", "hydra.", "hydra/")


class PointList:
    """The points of a file, in its order, on top of what the command line fixes.

    Parameters
    ----------
    axes
        What the command line says; each of one value.
    file
        Path, from where the command runs.
    grammar
        Parses the overrides.
    """

    def __init__(self, axes: Sequence[Axis], file: str, grammar: Grammar) -> None:
        for axis in axes:
            if not axis.is_fixed:
                rule = "must be one value with sweep.search=list: what differs belongs in the list"
                raise ConfigError(f"{axis.key} = {_told(axis)}: {rule}")
        self.fixed = tuple(axis.settings[0].text for axis in axes)
        self._points = [_point(file, line, grammar) for line in _lines(file)]
        self.num_points = len(self._points)
        if not self._points:
            raise ConfigError(f"sweep.list = {file}: has no points")

    def batches(self) -> Iterator[list[PointSettings]]:
        """Yield all points in one list."""
        yield list(self._points)

    def tell(self, values: Sequence[float | None]) -> None:
        """Learn nothing."""


def _told(axis: Axis) -> str:
    if axis.interval is not None:
        return f"interval({axis.interval.low:g},{axis.interval.high:g})"
    return ",".join(setting.text.partition("=")[2] for setting in axis.settings)


def _point(file: str, line: Line, grammar: Grammar) -> PointSettings:
    """Parse the overrides of a point."""
    number, texts = line
    settings, seen = [], set()
    for text in texts:
        try:
            setting = grammar.setting(text)
        except Exception as error:
            raise _mistake(file, number, text, _rule(error)) from error
        element = text.partition("=")[0].strip()
        if element in seen:
            raise _mistake(file, number, text, "a point may set a key once")
        if setting.key.startswith(_NOT_OF_A_POINT):
            raise _mistake(file, number, text, "is the same for all points: on the command line")
        seen.add(element)
        settings.append(setting)
    return tuple(settings)


def _rule(error: Exception) -> str:
    """Return what is wrong with an override; raise ``error`` where it is a defect."""
    from hydra.errors import HydraException

    if isinstance(error, ConfigError):
        return str(error).rpartition(": ")[2]
    if not isinstance(error, HydraException):
        raise error
    return "must be KEY=VALUE as on the command line (text with any of ,=:(){}[] in quotes)"


def _mistake(file: str, number: int, what: str, rule: str) -> ConfigError:
    return ConfigError(f"{file}: line {number}: {what.replace('=', ' = ', 1)}: {rule}")


def _lines(file: str) -> Iterator[Line]:
    """Yield the overrides of each point of a file."""
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"sweep.list = {file}: no such file")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"sweep.list = {file}: must be text in UTF-8 ({error.reason})") from error
    if path.suffix.lower() == ".csv":
        return _csv_lines(file, text)
    if path.suffix.lower() in _YAML:
        return _yaml_lines(file, text)
    return _text_lines(file, text)


def _text_lines(file: str, text: str) -> Iterator[Line]:
    """Read a point a line, its overrides separated as in a shell."""
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            simple = not _NEEDS_SHELL.search(line)
            words = line.split() if simple else shlex.split(line, comments=True)
        except ValueError as error:
            raise _mistake(
                file, number, line.strip(), f"is no line of a shell ({error})"
            ) from error
        if words:
            yield number, words


def _csv_lines(file: str, text: str) -> Iterator[Line]:
    """Read a point a row; the header has the keys, and an empty cell sets nothing."""
    reader = csv.reader(text.splitlines(keepends=True), strict=True, skipinitialspace=True)
    keys: list[str] = []
    try:
        for row in reader:
            cells = [cell.strip() for cell in row]
            if not any(cells) or cells[0].startswith("#"):
                continue
            if not keys:
                keys = _header(file, reader.line_num, cells)
                continue
            if len(cells) > len(keys):
                rule = f"the header has {len(keys)} keys (a value with a comma goes into quotes)"
                raise ConfigError(f"{file}: line {reader.line_num}: {len(cells)} values: {rule}")
            pairs = zip(keys, cells, strict=False)
            yield reader.line_num, [f"{key}={cell}" for key, cell in pairs if cell]
    except csv.Error as error:
        raise ConfigError(f"{file}: line {reader.line_num}: {error}") from error


def _header(file: str, number: int, keys: list[str]) -> list[str]:
    for place, key in enumerate(keys):
        if not key or "=" in key:
            rule = "the first row must hold keys, such as policy or cache.ratio"
            raise ConfigError(f"{file}: line {number}: {key or 'an empty cell'}: {rule}")
        if key in keys[:place]:
            raise ConfigError(f"{file}: line {number}: {key}: a key may have one column")
    return keys


def _yaml_lines(file: str, text: str) -> Iterator[Line]:
    """Read a list of mappings of keys to values, or of lists of overrides."""
    import yaml

    loader = _loader()(text)
    try:
        root = loader.get_single_node()
        if not isinstance(root, yaml.SequenceNode):
            rule = (
                "must be a list of points: of mappings of keys to values or of lists of overrides"
            )
            raise ConfigError(f"sweep.list = {file}: {rule}")
        for node in root.value:
            number = node.start_mark.line + 1
            yield number, _overrides(file, number, node, loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{file}: line {line}: {error.problem}") from error
    except RecursionError:
        raise ConfigError(f"sweep.list = {file}: nested too deep") from None
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"sweep.list = {file}: {error}".replace("\n", " ")) from error
    finally:
        loader.dispose()


def _overrides(file: str, number: int, node: Any, loader: Any) -> list[str]:
    """Return the overrides of an item of a YAML list."""
    item = loader.construct_object(node, deep=True)
    if values_written_out(item, {}) > _MOST_VALUES:
        rule = f"must have at most {_MOST_VALUES} values where aliases are written out"
        raise ConfigError(f"{file}: line {number}: {rule}")
    if isinstance(item, dict):
        if len(item) != len(node.value):
            raise ConfigError(f"{file}: line {number}: a point may set a key once")
        return [f"{key}={_written(file, number, key, value)}" for key, value in item.items()]
    if isinstance(item, list) and all(isinstance(text, str) for text in item):
        return item
    rule = "a point must be a mapping of keys to values, or a list of overrides"
    raise ConfigError(f"{file}: line {number}: {item}: {rule}")


def _written(file: str, number: int, key: Any, value: Any) -> str:
    """Return a YAML value as an override has it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return (
            value if re.fullmatch(r"[a-z_][a-z0-9_]*", value) and _is_text(value) else quoted(value)
        )
    if isinstance(value, list):
        return f"[{','.join(_written(file, number, key, one) for one in value)}]"
    if isinstance(value, dict):
        pairs = (f"{name}:{_written(file, number, key, one)}" for name, one in value.items())
        return "{" + ",".join(pairs) + "}"
    rule = "must be a number, text, true, false, null, a list or a mapping"
    raise ConfigError(f"{file}: line {number}: {key} = {value}: {rule}")


def _is_text(word: str) -> bool:
    return word not in ("true", "false", "null", "inf", "nan")


def _loader() -> Any:
    """Return a YAML loader that reads 1e9 as a number, as those of the configurations do."""
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        """The fast one, where it is built."""

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
    return Loader
