"""Predicted against measured: of a validation on this machine, or of what others published."""

from __future__ import annotations

from matplotlib.figure import Figure

from sim.figures.published import draw_published
from sim.figures.source import PUBLISHED, VALIDATION, NotDrawableError, Source, Wanted
from sim.figures.validation import draw_validation


def draw_measured(source: Source, wanted: Wanted | None = None) -> Figure:
    """Draw predicted against measured or published speed, and the errors."""
    if source.kind == VALIDATION:
        return draw_validation(source, wanted)
    if source.kind == PUBLISHED:
        return draw_published(source, wanted)
    raise NotDrawableError(
        "needs what `greenroom validate` or `greenroom published` has written: their folder, "
        "validation.json or published.csv"
    )
