"""Where tables go: as wide as the terminal and coloured there, of one width and plain anywhere else.

No cell is cut: a table that cannot be as narrow as that is wider, and the terminal breaks its lines.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

_WIDE = 200
"""Columns where stdout is no terminal."""
_ANY = 100_000


class _Screen(Console):
    """A console that cuts no table, and leaves it to the command's end what to do when nobody reads on."""

    def print(self, *objects: Any, **how: Any) -> None:
        """Print; a table at the width that it needs, if that is more than there is."""
        least = max(
            (_least_width(self, one) for one in objects if isinstance(one, Table)), default=0
        )
        before = self._width
        if least > self.width:
            self.width = least
        try:
            super().print(*objects, **how)
        finally:
            self._width = before

    def on_broken_pipe(self) -> None:
        """Let the error through; rich would end the process with exit code 1."""
        raise BrokenPipeError


def screen(width: int = _WIDE, *, highlight: bool = True) -> Console:
    """Return the console that prints to stdout.

    Where stdout is no terminal, where TERM is ``dumb``, and where NO_COLOR is set, no escape sequence of any
    kind is written. ``width`` counts where stdout is no terminal. ``highlight``: numbers are coloured on
    their own.
    """
    at_terminal = sys.stdout.isatty()
    return _Screen(
        width=None if at_terminal else width,
        markup=False,
        highlight=highlight,
        color_system="auto" if has_colours() else None,
        force_terminal=None if at_terminal else False,
        force_jupyter=False,  # else nothing goes to stdout in a notebook, where greenroom.py reads it
    )


def _least_width(console: Console, table: Table) -> int:
    """Return the width at which no cell is cut: text that may be broken counts with its longest word."""
    options = console.options.update(max_width=_ANY)
    spare = 0
    for column in table.columns:
        if not column.no_wrap:
            cells = [Measurement.get(console, options, c) for c in (column.header, *column.cells)]
            least = max(column.min_width or 0, *(cell.minimum for cell in cells))
            spare += max(0, max(cell.maximum for cell in cells) - least)
    return Measurement.get(console, options, table).maximum - spare


def has_colours() -> bool:
    """Tell whether stdout is a terminal that colours are welcome on (https://no-color.org)."""
    return (
        sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )
