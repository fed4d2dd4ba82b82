"""What was measured, as a table for the screen."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from hwmodels.bench_kinds import KINDS
from hwmodels.units import NS_PER_S
from real.measure import Facts, Measured, Samples

_RATED = ("copy", "gemv", "gemm", "expert_cpu", "expert_gpu", "storage", "storage_read")


def table_of(every: Sequence[Samples]) -> Any:
    """Return a table with a line for each piece of work."""
    from rich.table import Table

    table = Table(title="Measured")
    table.add_column("kind")
    table.add_column("of what", overflow="fold")
    for title in ("median", "rate", "spread", "repeats"):
        table.add_column(title, justify="right", no_wrap=True)
    for samples in every:
        table.add_row(
            *(str(samples.facts["kind"]), told(samples.facts), time_text(samples.median_ns)),
            *(rate_text(samples), f"{samples.spread:.0%}", str(len(samples.times_ns))),
        )
    return table


def told(facts: Facts) -> str:
    """Return the arguments of a piece of work in words."""
    words = []
    for key, value in facts.items():
        if key == "kind" or value is False:
            continue
        if value is True:
            words.append(key)
        elif key.endswith("_bytes"):
            words.append(f"{value / 1024:g} KiB" if value < 1 << 20 else f"{value / 2**20:.4g} MiB")
        else:
            words.append(f"{key.removeprefix('num_')} {value}")
    return ", ".join(words)


def time_text(time_ns: float) -> str:
    """Return a time in the unit that suits it."""
    if time_ns < 1e6:
        return f"{time_ns / 1e3:.3g} us"
    return f"{time_ns / 1e6:.4g} ms"


def rate_text(samples: Samples) -> str:
    """Return bytes or operations a second where the kind has them."""
    facts = samples.facts
    work = KINDS[facts["kind"]].work
    if facts["kind"] not in _RATED or work is None:
        return ""
    given = {**KINDS[facts["kind"]].arguments, **facts}
    rate = work(given) * NS_PER_S / samples.median_ns
    unit = "GF/s" if facts["kind"] == "gemm" else "GB/s"
    return f"{rate / 1e9:.3g} {unit}"


def slowdown_lines(measured: Measured) -> list[str]:
    """Return by how much work is slower beside other work."""
    lines = []
    for name, ratios in measured.ratios.items():
        what = name.replace("_", " ")
        lines.append(f"{what}: {median(ratios):.2f} times as long ({len(ratios)} repeats)")
    return lines
