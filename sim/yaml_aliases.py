"""Refuses YAML whose aliases stand for far more than is written there, before anybody copies it out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_MOST_VALUES = 10_000
"""So many values behind aliases OmegaConf copies out in some seconds, more than any of ours holds."""


def check_aliases(file: Path) -> None:
    """Raise ConfigError if aliases in a file stand for too many values."""
    from sim.types import ConfigError

    if explodes(file):
        raise ConfigError(
            f"{file}: its aliases (*name) stand for more than {_MOST_VALUES} values: must be fewer"
        )


def explodes(file: Path) -> bool:
    """Tell whether aliases in a file stand for too many values; costs next to nothing without any.

    A file that is not there, or cannot be parsed, is left to whoever reads it.
    """
    import yaml

    try:
        data = file.read_bytes()
        return b"*" in data and b"&" in data and _num_aliased(data) > _MOST_VALUES
    except (OSError, UnicodeError, yaml.YAMLError):
        return False


def _num_aliased(data: bytes) -> int:
    """Return how many values stand behind all aliases of a document, those within them written out."""
    import yaml

    sizes: dict[str, int] = {}  # of what an anchor names
    under_way: list[tuple[str | None, int]] = []  # lists and mappings: anchor, values so far
    total = 0

    def add(size: int, anchor: str | None) -> None:
        if anchor is not None:
            sizes[anchor] = size
        if under_way:
            name, so_far = under_way.pop()
            under_way.append((name, so_far + size))

    events: Any = yaml.parse(data, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    for event in events:
        if isinstance(event, yaml.AliasEvent):
            size = sizes.get(event.anchor, 1)  # of itself: OmegaConf refuses that
            total += size
            add(size, None)
        elif isinstance(event, yaml.ScalarEvent):
            add(1, event.anchor)
        elif isinstance(event, yaml.CollectionStartEvent):
            under_way.append((event.anchor, 1))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, size = under_way.pop()
            add(size, anchor)
    return total
