"""What the tokens of a batch share, as a column of the table and as lines about one run."""

from __future__ import annotations

from collections.abc import Callable

from sim.labels import Row


def _is_batch(row: Row) -> bool:
    """Tell whether steps of a run decode several tokens that may share experts."""
    return (row.get("decode_union_ratio") or 1.0) < 1.0


def _union(row: Row) -> str:
    size = row.get("union_size")
    return "-" if size is None else f"{size:.1f}"


UNION: dict[str, Callable[[Row], str]] = {"union": _union}
"""Columns for sweeps of batches; may be left out for want of width."""
WHEN: dict[str, Callable[[Row], bool]] = {"union": _is_batch}
"""Which of the rows make such a column worth showing."""


def batch_lines(row: Row) -> list[str]:
    """Say what a batch's tokens share, what their kernels come to, and what waiting has cost."""
    lines = []
    if _is_batch(row):
        pressure = row["pool_pressure"]
        pool = "" if pressure is None else f", {pressure:.2f} of what its pool holds"
        lines.append(
            f"Batch: a decode step uses {row['union_size']:.1f} experts of a layer{pool}; they are "
            f"{100 * row['decode_union_ratio']:.1f}% of its (token, expert) pairs."
        )
    if row.get("kernels"):
        padding = row["padding_ratio"]
        padded = f"; {100 * padding:.1f}% of the tokens they compute are padding" if padding else ""
        lines.append(
            f"Kernels: {row['kernels_per_layer']:.1f} launches of a layer's experts, which move "
            f"{row['gather_bytes'] / 1e9:.3f} GB to lay tokens out{padded}."
        )
    if row.get("longest_wait_steps_max"):
        lines.append(
            f"Waiting: {row['waiting']} requests in memory share batches of {row['batch_size']}; on average "
            f"one sits out {row['wait_steps_mean']:.1f} steps in all, at most "
            f"{row['longest_wait_steps_max']} in a row."
        )
    return lines
