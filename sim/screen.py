"""Where tables go: as wide as the terminal and coloured there, of one width and plain anywhere else."""

from __future__ import annotations

import os
import sys

from rich.console import Console

_WIDE = 200
"""Columns where stdout is no terminal: tables are cut as little as can be."""


class _Screen(Console):
    """A console that leaves it to the command's end what to do when nobody reads any more."""

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


def has_colours() -> bool:
    """Tell whether stdout is a terminal that colours are welcome on (https://no-color.org)."""
    return (
        sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )
