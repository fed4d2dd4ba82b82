"""How all figures look: colours and marks of policies, size, caption, files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sim.labels import Row, origin
from sim.results import whole_file

# Okabe-Ito, safe for colour-blind readers; a marker each, so that grey print tells them apart too.
_LOOKS = {
    "on_demand": ("#999999", "x"),
    "fifo": ("#8C6D31", "P"),
    "lru": ("#0072B2", "o"),
    "lru_global": ("#56B4E9", "s"),
    "lfu": ("#009E73", "^"),
    "static": ("#E69F00", "v"),
    "fiddler": ("#D55E00", "D"),
    "saem": ("#CC79A7", "*"),
    "ablation_base": ("#666666", "s"),
    "stage_cache": ("#009E73", "s"),
    "ablation_cpu": ("#E69F00", "D"),
    "ablation_repack": ("#56B4E9", "v"),
    "stage_oracle": ("#000000", "p"),
    "saem_annotated": ("#882255", "*"),
    "hybrimoe": ("#332288", "h"),
    "belady": ("#000000", "<"),
    "belady_bypass": ("#000000", ">"),
}
_SPARE = (("#7F3C8D", "h"), ("#11A579", "8"), ("#3969AC", "p"), ("#80BA5A", "d"))
_CAPTION_CHARS_PER_INCH = 23


def new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    """Return a figure of that many inches, and its axes."""
    figure, axes = plt.subplots(figsize=(width, height))
    return figure, axes


def new_panels(
    num_rows: int, num_columns: int, width: float, height: float, margin: float
) -> tuple[Figure, list[Axes]]:
    """Return a figure of so many panels, each of that many inches, and their axes row by row.

    ``margin`` is what legend and caption take of the height, in inches.
    """
    size = (width * num_columns, height * num_rows + margin)
    figure, axes = plt.subplots(num_rows, num_columns, figsize=size, squeeze=False)
    return figure, list(axes.flat)


def look(policy: str) -> tuple[str, str]:
    """Return the colour and marker of a policy, the same in every figure."""
    return _LOOKS.get(policy, _SPARE[sum(map(ord, policy)) % len(_SPARE)])


def caption(figure: Figure, rows: Sequence[Row]) -> None:
    """Say under the figure where its numbers come from."""
    text = f"{origin(rows)}; greenroom {rows[0]['provenance']['greenroom_version']}"
    narrow = fill(text, width=int(figure.get_figwidth() * _CAPTION_CHARS_PER_INCH))
    figure.supxlabel(narrow, fontsize=5, color="0.45")


def save(figure: Figure, stem: Path) -> Path:
    """Write PNG and PDF; return the PNG's path."""
    for suffix, metadata in ((".pdf", {"CreationDate": None}), (".png", {})):
        with whole_file(stem.with_suffix(suffix)) as partial:
            figure.savefig(partial, format=suffix[1:], metadata=metadata)
    plt.close(figure)
    return stem.with_suffix(".png")
