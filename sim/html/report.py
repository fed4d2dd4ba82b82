"""A folder of results -> the HTML of its report, whatever kind of results they are."""

from __future__ import annotations

from pathlib import Path

from sim.html.page import Asked, report_page
from sim.html.source import open_source
from sim.html.validation import VALIDATION, validation_page


def report_of(path: Path, asked: Asked) -> str:
    """Return the report of a run, a sweep, a table of results, or a validation.

    Raises ConfigError where there is nothing to report, or it is damaged.
    """
    if path.is_dir() and (path / VALIDATION).exists():
        return validation_page(path, asked)
    return report_page(open_source(path), asked)
