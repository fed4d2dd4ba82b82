"""Changes values in the text of a YAML file and leaves all else, comments included, as it is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sim.calibrate_names import Keys

MARK = "# F: fitted by greenroom calibrate"
"""How a comment begins that stands for a source, where a file has no sources."""


class Word(str):
    """A text that stands without quotes, as the name of an option."""


def as_yaml(value: Any, indent: int = 0) -> str:
    """Return a value as the files write it: 61_000, 0.86, a text in quotes, rows one a line."""
    if isinstance(value, Word):
        return str(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, int):
        return f"{value:_}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        text = f"{value:.5g}"
        if abs(value) >= 10_000:
            return as_yaml(round(value))
        return text if set(text) & set(".en") else f"{text}.0"
    rows = [f"{' ' * indent}- [{', '.join(as_yaml(cell) for cell in row)}]" for row in value]
    return "\n" + "\n".join(rows)


def set_value(text: str, at: Keys, value: Any) -> str:
    """Return the text with another value at a place; mappings that are not there are put in."""
    if not has_value(text, at):
        return _insert(text, at, value)
    key, node = _entry(text, at)
    start, end = _span(node, key)
    new = as_yaml(value, indent=(key.start_mark.column if key else 0) + 2)
    gap = " " if text[start - 1 : start] == ":" and not new.startswith("\n") else ""
    before = text[:start].rstrip(" ") if new.startswith("\n") else text[:start]
    return f"{before}{gap}{new}{text[end:]}"


def set_source(text: str, at: Keys, source: str, has_sources: bool = True) -> str:
    """Return the text with a source for a value: in the ``sources`` beside it, or as a comment above it.

    ``has_sources``: the file is of a kind that has them.
    """
    last = max(i for i, key in enumerate(at) if isinstance(key, str))
    if not has_sources:
        return _comment(text, at[: last + 1], source)
    return set_value(text, (*at[:last], "sources", at[last]), source)


def _insert(text: str, at: Keys, value: Any) -> str:
    """Put a value in after the last of what its mapping has."""
    depth = max(n for n in range(len(at)) if not n or has_value(text, at[:n]))
    _, node = _entry(text, at[:depth])
    if not hasattr(node, "value") or not isinstance(node.value, list) or not node.value:
        raise ValueError(f"{list(at)}: has no place in the file")
    first, last = node.value[0], node.value[-1]
    new = [str(key) for key in at[depth:]]
    if node.flow_style:
        where = first[0].start_mark.index
        inner = ": {".join(new)
        return f"{text[:where]}{inner}: {as_yaml(value)}{'}' * (len(new) - 1)}, {text[where:]}"
    column = first[0].start_mark.column
    lines = [f"{' ' * (column + 2 * i)}{key}:" for i, key in enumerate(new)]
    shown = as_yaml(value, column + 2 * len(new))
    lines[-1] += shown if shown.startswith("\n") else f" {shown}"
    end = text.find("\n", _span(last[1], last[0])[1])
    before, after = (text, "") if end < 0 else (text[:end], text[end:])
    return before + "\n" + "\n".join(lines) + after


def _comment(text: str, at: Keys, source: str) -> str:
    key, _ = _entry(text, at)
    start = text.rfind("\n", 0, key.start_mark.index) + 1
    pad = text[start : key.start_mark.index]
    line = f"{pad}{MARK}{source.removeprefix(MARK.removeprefix('# '))}\n"
    before = text[:start]
    above = before.rstrip("\n").rpartition("\n")[2]
    if above.strip().startswith(MARK):  # of an earlier calibration
        before = before[: len(before) - len(above) - 1]
    return before + line + text[start:]


# -- places ----------------------------------------------------------------------------------------


def has_value(text: str, at: Keys) -> bool:
    """Tell whether the text has something at a place."""
    try:
        _entry(text, at)
    except ValueError:
        return False
    return True


def _entry(text: str, at: Keys) -> tuple[Any, Any]:
    """Return the nodes of a place: its key (None in a list), and its value."""
    import yaml

    key, node = None, yaml.compose(text)
    for part in at:
        key, node = _child(node, part, at)
    return key, node


def _child(node: Any, part: str | int, at: Sequence[str | int]) -> tuple[Any, Any]:
    import yaml

    if isinstance(part, int) and isinstance(node, yaml.SequenceNode) and part < len(node.value):
        return None, node.value[part]
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == part:
                return key, value
    raise ValueError(f"{list(at)}: is not in the file")


def _span(node: Any, key: Any) -> tuple[int, int]:
    """Return where a value begins and ends; a list in block style from its key's colon to its last word."""
    import yaml

    if isinstance(node, yaml.CollectionNode) and not node.flow_style:
        last = node
        while isinstance(last, yaml.CollectionNode) and not last.flow_style:
            last = last.value[-1] if not isinstance(last, yaml.MappingNode) else last.value[-1][1]
        return key.end_mark.index + 1, last.end_mark.index
    return node.start_mark.index, node.end_mark.index
