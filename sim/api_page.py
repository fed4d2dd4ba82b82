"""Pages of text in a notebook: as a command prints them, with lines that fit."""

from __future__ import annotations

from html import escape
from textwrap import wrap

_WIDTH = 104
_STYLE = "white-space: pre; overflow-x: auto; font: 13px/1.25 monospace"
"""Said in full, for notebooks give text in HTML a font of their own."""
_BORDERS = "┏┃┡│└"


class Page:
    """Shows an object's ``repr``, a page of text, as a notebook should: prose wrapped, tables whole."""

    def _repr_html_(self) -> str:
        lines = [line for text in repr(self).splitlines() for line in _fitting(text)]
        body = escape("\n".join(lines))
        return f'<pre style="{_STYLE}">{body}</pre>'


def _fitting(line: str) -> list[str]:
    """Return a line as it is if it is of a table, else cut between words."""
    words = line.strip()
    if not words or words[0] in _BORDERS or "  " in words:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    return wrap(
        words,
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
