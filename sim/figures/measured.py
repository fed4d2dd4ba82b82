"""Predicted against measured: of a validation on this machine, or of what others published."""

from __future__ import annotations

from matplotlib.figure import Figure

from sim.figures.published import draw_published
from sim.figures.source import PUBLISHED, VALIDATION, NotDrawableError, Source, Wanted
from sim.figures.validation import draw_validation
from sim.types import ConfigError


def draw_measured(source: Source, wanted: Wanted | None = None) -> Figure:
    """Draw predicted against measured or published speed, and the errors."""
    draws = {VALIDATION: draw_validation, PUBLISHED: draw_published}
    if source.kind in draws:
        try:
            return draws[source.kind](source, wanted)
        except ConfigError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"{source.folder}: is no {source.kind} table, or one that is damaged: {error!r}"
            ) from error
    raise NotDrawableError(
        "needs what `greenroom validate` or `greenroom published` has written: their folder, "
        "validation.json or published.csv"
    )
