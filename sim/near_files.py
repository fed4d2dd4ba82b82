"""Which file may have been meant where there is none of that name."""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path

_MISSING = re.compile(
    r"(?P<before>.+?): (?:[Nn]o such file|No such file or directory|no such folder)"
    r"(?:: (?P<after>[^;]+))?(?P<rest>.*)",
    re.DOTALL,
)
_LEAD = re.compile(r".*(?: = | is |: )|--[\w-]+ ")
_MOST_ENTRIES = 10_000
"""Of a folder; in a larger one nothing is looked for."""


def with_near_file(message: str) -> str:
    """Add to a complaint about a missing file or folder the name of one that is there and like it."""
    found = _MISSING.fullmatch(message)
    if not found or "did you mean" in message:
        return message
    text = found["after"] or found["before"]
    lead = _LEAD.match(text)
    near = near_file(text[lead.end() :] if lead else text)
    return message if near is None else f"{message}; did you mean {near!r}?"


def near_file(name: str) -> str | None:
    """Return a path that is there, and differs from ``name`` in the first part that is not."""
    path = Path(name)
    try:
        for place in (*reversed(path.parents), path):
            if place.name and not place.exists():
                nearest = _nearest(place)
                if nearest is None:
                    return None
                meant = nearest / path.relative_to(place)
                return str(meant if meant.exists() else nearest)
    except (OSError, ValueError):  # no name of a file at all
        return None
    return None


def _nearest(missing: Path) -> Path | None:
    """Return the entry of the folder whose name is most like that of the missing one."""
    names = []
    for number, entry in enumerate(missing.parent.iterdir()):
        if number == _MOST_ENTRIES:
            return None
        names.append(entry.name)
    near = get_close_matches(missing.name, names, n=1)
    return missing.parent / near[0] if near else None
