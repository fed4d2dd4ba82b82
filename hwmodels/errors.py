"""The one error of this package: a figure in a model or machine description that cannot be used."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from difflib import get_close_matches

_LONGEST = 300
"""Characters of a value that are shown."""


class HardwareError(ValueError):
    """A user's mistake in a model or machine description; one line: ``file: field = value: rule``."""


def figure_error(where: str, field: str, value: object, rule: str) -> HardwareError:
    """Return the error for a field whose value breaks a rule."""
    try:
        shown = " ".join(repr(value).split()) if isinstance(value, str) else str(value)
    except ValueError:  # Python writes no whole number that is longer
        shown = f"of more than {sys.get_int_max_str_digits()} digits"
    shown = shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}..."
    return HardwareError(f"{where}: {field} = {shown}: {rule}")


def missing_error(where: str, field: str) -> HardwareError:
    """Return the error for a field that is not there."""
    return HardwareError(f"{where}: {field}: missing, must be given")


def unknown_error(where: str, field: str, value: object, known: Iterable[str]) -> HardwareError:
    """Return the error for a field nobody knows, with the nearest known name."""
    names = sorted(known)
    near = get_close_matches(field, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"
    return figure_error(where, field, value, f"unknown field; {hint}")
