"""The figures that a sweep leaves beside its results; ``greenroom plot`` draws the others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sim.figures.source import SWEEP, NotDrawableError, Source
from sim.figures.table import FIGURES
from sim.labels import Row
from sim.plot_style import USUAL_FORMATS, save, styled

OF_A_SWEEP = (
    "throughput_by_cache",
    "hit_rate_by_cache",
    "stall_breakdown",
    "league",
    "relative_by_cache",
    "roofline",
)


def plot_sweep(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw what the rows allow to PNG and PDF in a folder; return the paths of the PNGs.

    Those of an earlier sweep there vanish.
    """
    source, drawn = Source(SWEEP, rows), []
    with styled():
        for name in OF_A_SWEEP:
            try:
                figure = FIGURES[name].draw(source)
            except NotDrawableError:  # `greenroom plot` tells why
                for kind in USUAL_FORMATS:
                    (folder / f"{name}.{kind}").unlink(missing_ok=True)
                continue
            drawn.append(save(figure, folder / name))
    return drawn
