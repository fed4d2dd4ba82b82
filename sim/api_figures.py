"""Figures for the Python API: those of ``greenroom plot``, shown by notebooks in their own style."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.settings import did_you_mean
from sim.types import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DOTS_PER_INCH = 150


def draw_figure(name: str, source: Path, options: Mapping[str, Any]) -> Figure:
    """Draw a figure of a run's or a sweep's folder by its name; ConfigError where that cannot be.

    ``options`` are those of :class:`sim.figures.source.Wanted`: window, request, layer, baseline.
    """
    from dataclasses import fields

    from sim.figures.source import Wanted, open_source
    from sim.figures.table import draw

    known = [field.name for field in fields(Wanted)]
    for option in options:
        if option not in known:
            near = did_you_mean(option, known) or f" (known: {', '.join(known)})"
            raise ConfigError(f"plot({option}=...): no such parameter{near}")
    return shown(lambda: draw(name, open_source(source), Wanted(**options)))


def shown(make: Callable[[], Figure]) -> Figure:
    """Make a figure in the style of all figures, which notebooks show when it ends a cell.

    It is none of pyplot's, so that it is drawn once and leaves the notebook's own figures alone.
    """
    from sim.plot_style import styled

    with styled():
        figure: Any = make()
    figure._repr_png_ = partial(_png, figure)  # what IPython asks an object for
    found: Figure = figure
    return found


def _png(figure: Figure) -> bytes:
    from sim.plot_style import styled

    page = io.BytesIO()
    with styled():
        figure.savefig(page, format="png", dpi=_DOTS_PER_INCH)
    return page.getvalue()
