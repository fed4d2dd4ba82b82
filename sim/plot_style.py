"""How all figures look: size, style file, caption, legend, and the files they go to.

Figures are drawn at the size they are printed in: one column of a paper, or two.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib import resources
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sim.labels import Row, origin
from sim.policy_looks import look as look
from sim.results import whole_file

COLUMN, PAGE = 3.4, 7.0
"""Inches: a column of a paper, and both."""
CAPTION_SIZE = 5.5
_CAPTION_CHARS_PER_INCH = 21
FORMATS = ("pdf", "png", "svg")
USUAL_FORMATS = ("pdf", "png")
_NO_DATES: dict[str, dict[str, Any]] = {
    "pdf": {"CreationDate": None},
    "png": {},
    "svg": {"Date": None},
}


def styled() -> AbstractContextManager[None]:
    """Return the context in which figures are made and written."""
    found: AbstractContextManager[None] = matplotlib.style.context(
        [str(resources.files("sim") / "paper.mplstyle")]
    )
    return found


def new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    """Return a figure of that many inches, and its axes."""
    figure = Figure(figsize=(width, height))
    return figure, figure.subplots()


def new_panels(
    num_rows: int, num_columns: int, width: float, height: float, margin: float
) -> tuple[Figure, list[Axes]]:
    """Return a figure of so many panels, each of that many inches, and their axes row by row.

    ``margin`` is what legend and caption take of the height, in inches.
    """
    figure = Figure(figsize=(width * num_columns, height * num_rows + margin))
    return figure, list(figure.subplots(num_rows, num_columns, squeeze=False).flat)


def caption(figure: Figure, rows: Sequence[Row], more: str = "") -> None:
    """Say under the figure where its numbers come from, and ``more`` before that."""
    version = rows[0]["provenance"]["greenroom_version"]
    text = f"{origin(rows)}; greenroom {version}"
    write_below(figure, f"{more}; {text}" if more else text)


def write_below(figure: Figure, text: str) -> None:
    """Write small print under a figure, in as many lines as it takes."""
    narrow = fill(text, width=int(figure.get_figwidth() * _CAPTION_CHARS_PER_INCH))
    figure.supxlabel(narrow, fontsize=CAPTION_SIZE, color="0.35")


def rendered(figure: Figure, kind: str) -> bytes:
    """Return a figure as the bytes of a ``pdf``, ``png`` or ``svg``: the same each time.

    What matplotlib warns of (a sign that the font lacks, no room for a name) is drawn as well as may be.
    """
    with styled(), io.BytesIO() as file, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        figure.savefig(file, format=kind, metadata=_NO_DATES[kind])
        return file.getvalue()


def save(figure: Figure, stem: Path, formats: Sequence[str] = USUAL_FORMATS) -> Path:
    """Write a figure in each format; return the path of its PNG, or of the first where there is none."""
    paths = {kind: stem.with_name(f"{stem.name}.{kind}") for kind in formats}
    for kind, path in paths.items():
        with whole_file(path) as partial:
            partial.write_bytes(rendered(figure, kind))
        figure.set_layout_engine(
            "none"
        )  # it is laid out now; to do that again takes most of the time
    return paths.get("png", next(iter(paths.values())))
