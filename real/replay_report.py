"""What ``greenroom replay`` says beside a run's table: on what, where time went, and what was predicted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rich.table import Table

from sim.labels import Row

PARTS = ("kernels", "waiting", "decisions", "python")


class Quantity(NamedTuple):
    """What is compared: how it is called, where it is in a summary row, and how it is written."""

    name: str
    of: Callable[[Row], float | None]
    words: Callable[[float], str]


def compared(predicted: Row, measured: Row) -> list[dict[str, Any]]:
    """Return one row a quantity: predicted, measured, and their ratio, None where either is 0 or unknown."""
    found = []
    for name, of, _ in QUANTITIES:
        first, second = of(predicted), of(measured)
        ratio = first / second if first and second else None
        found.append({"quantity": name, "predicted": first, "measured": second, "ratio": ratio})
    return found


def comparison_table(rows: list[dict[str, Any]], machine: str) -> Table:
    """Return what was predicted for a machine's file beside what was measured."""
    title = f"Predicted for machine {machine}, and measured on this one"
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for column in ("predicted", "measured", "predicted / measured"):
        table.add_column(column, justify="right", no_wrap=True)
    words = {quantity.name: quantity.words for quantity in QUANTITIES}
    for row in rows:
        cells = [row["predicted"], row["measured"]]
        shown = ["-" if cell is None else words[row["quantity"]](cell) for cell in cells]
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.3f}"
        table.add_row(row["quantity"], *shown, ratio)
    return table


def measured_lines(row: Row) -> list[str]:
    """Return on what a run was measured, where the time of a layer went, and the memory it held."""
    return [_on_what(row["provenance"]["measurement"]), _layer_line(row), _memory_line(row)]


def _on_what(found: Mapping[str, Any]) -> str:
    threads = f"{found['threads']} thread{'s' * (found['threads'] != 1)}"
    name = "" if found["device_name"] == found["device"] else f" ({found['device_name']})"
    return (
        f"Measured, not simulated: {found['machine']}; device {found['device']}{name}, {threads}, torch "
        f"{found['torch']}; experts in {found['dtype']} from {_tier(found)}."
    )


def _tier(found: Mapping[str, Any]) -> str:
    if found["tier"] == "link":
        rate = found["link_bytes_per_s"] / 1e9
        return f"host memory over an emulated link of {rate:g} GB/s (emulated: no such link was measured)"
    if found["tier"] == "storage":
        if found["is_direct"]:
            return "storage (O_DIRECT)"
        return f"storage through the page cache (not O_DIRECT: {found['why_not_direct']})"
    why = found["why_not_pinned"]
    return "host memory" + (f" (not pinned: {why})" if why else "")


def _layer_line(row: Row) -> str:
    spent = row["spent"]
    whole_ns = spent["layer_ns"]
    if not whole_ns:
        return "Nothing ran."
    parts = [
        f"{_WORDS[name]} {spent[f'{name}_ns'] / 1e3:.0f} us ({100 * spent[f'{name}_ns'] / whole_ns:.1f}%)"
        for name in PARTS
    ]
    return (
        f"A layer took {whole_ns / 1e3:.0f} us, mean of {spent['layer_steps']}: {', '.join(parts)}."
    )


_WORDS = {
    "kernels": "kernels",
    "waiting": "waiting for experts",
    "decisions": "decisions",
    "python": "Python",
}


def _memory_line(row: Row) -> str:
    spent = row["spent"]
    return (
        f"Slots for experts held {_gb(spent['slots_bytes'])} of device memory, of a budget of "
        f"{_gb(spent['budget_bytes'])} (cache and staging); all other weights and KV cache "
        f"{_gb(spent['dense_bytes'])}; at most {_gb(spent['peak_bytes'])} "
        f"{_PEAKS[row['provenance']['measurement']['device']]}."
    )


_PEAKS = {"cpu": "in slots at one time", "cuda": "allocated at one time"}


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3f} GB"


def _column(name: str) -> Callable[[Row], float | None]:
    def of(row: Row) -> float | None:
        value: float | None = row[name]
        return value

    return of


def _step_ns(share: str) -> Callable[[Row], float | None]:
    """Return what turns a column that is a share of the time into ns of a step."""

    def of(row: Row) -> float | None:
        part, steps = row[share], row["steps"]
        return None if part is None or not steps else part * row["total_ns"] / steps

    return of


def _moved(row: Row) -> float | None:
    return float(row["h2d_bytes"] or row["read_bytes"])


def _count(value: float) -> str:
    return f"{value:.0f}"


def _percent(value: float) -> str:
    return f"{100 * value:.2f}%"


def _ms(value: float) -> str:
    return f"{value / 1e6:.3f} ms"


QUANTITIES = (
    Quantity("tokens/s", _column("tokens_per_s"), lambda value: f"{value:.2f}"),
    Quantity("TPOT mean", _column("tpot_ns_mean"), _ms),
    Quantity("TPOT p50", _column("tpot_ns_p50"), _ms),
    Quantity("TTFT p50", _column("ttft_ns_p50"), _ms),
    Quantity("hit rate", _column("hit_rate"), _percent),
    Quantity("late hit rate", _column("late_hit_rate"), _percent),
    Quantity("loads", _column("loads"), _count),
    Quantity("bypasses", _column("bypasses"), _count),
    Quantity("prefetches", _column("prefetches"), _count),
    Quantity("experts on the host", _column("on_cpu"), _count),
    Quantity("bytes moved", _moved, lambda value: f"{value / 1e9:.3f} GB"),
    Quantity("kernels a step", _step_ns("gpu_share"), _ms),
    Quantity("link stall a step", _step_ns("link_stall_share"), _ms),
    Quantity("storage stall a step", _step_ns("storage_stall_share"), _ms),
    Quantity("CPU stall a step", _step_ns("cpu_stall_share"), _ms),
    Quantity("host stall a step", _step_ns("host_stall_share"), _ms),
)
"""What is compared; the columns are defined at the head of sim/metrics.py."""
