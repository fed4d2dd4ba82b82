"""What the columns mean: looked up in the definitions at the head of ``sim/metrics.py``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache

import sim.metrics
from sim.html.elements import Html, element
from sim.html.grid import grid

_ENTRY = re.compile(r"^(?P<names>[a-z_0-9]+(?:, [a-z_0-9]+)*)  +(?P<text>\S.*)$")
_FIELDS: dict[str, tuple[str, ...]] = {
    "tokens/s": ("tokens_per_s",),
    "TPOT p50 ms": ("tpot_ns",),
    "hit rate": ("hit_rate",),
    "to Belady": ("belady_gap", "belady_hit_rate"),
    "slots changed": ("substituted_slot_rate", "dropped_slot_rate"),
    "mass changed": ("substituted_mass_rate",),
    "low bits": ("low_slot_rate",),
    "late": ("deferred_slot_rate",),
    "union": ("union_size",),
    "GB moved": ("h2d_bytes", "read_bytes"),
    "GPU": ("gpu_share",),
    "link stall": ("link_stall_share",),
    "CPU stall": ("cpu_stall_share",),
    "storage stall": ("storage_stall_share",),
    "DRAM stall": ("dram_stall_share",),
    "host stall": ("host_stall_share",),
    "refused": ("refused",),
    "bottleneck": ("bottleneck",),
    "agreement": ("route_agreement",),
    "divergence": ("route_kl",),
    "pool pressure": ("pool_pressure",),
    "share of pairs": ("union_ratio",),
    "kernels a layer": ("kernels_per_layer",),
    "padding": ("padding_tokens",),
    "waits": ("wait_steps",),
}
"""By the heading of a column: the metrics it shows."""
_LIKEWISE = re.compile(r"^(cpu|storage|dram|host)_stall_share$")
"""Metrics that the definition of the link's covers."""
_CHOICES = {"cache": "share of the routed experts that the device's memory holds"}
"""Columns that are no metric."""


@cache
def entries() -> tuple[tuple[tuple[str, ...], str], ...]:
    """Return names and text of each definition, as they come."""
    found: list[tuple[tuple[str, ...], list[str]]] = []
    is_open = False
    for line in (sim.metrics.__doc__ or "").splitlines():
        entry = _ENTRY.match(line)
        if entry:
            found.append((tuple(entry["names"].split(", ")), [entry["text"]]))
        elif is_open and line.startswith(" ") and line.strip():
            found[-1][1].append(line.strip())
        is_open = bool(entry) or (is_open and line.startswith(" "))
    return tuple((names, " ".join(lines)) for names, lines in found)


def definition(metric: str) -> tuple[str, str] | None:
    """Return the names and the text of the definition of a metric; None where there is none.

    It is one that has this name or else the first that speaks of it.
    """
    name = _LIKEWISE.sub("link_stall_share", metric)
    for names, text in entries():
        if name in names:
            return ", ".join(names), text
    word = re.compile(rf"\b{re.escape(name)}\b")
    return next(((", ".join(n), text) for n, text in entries() if word.search(text)), None)


def definitions_table(columns: Iterable[str]) -> Html:
    """Return a table of what these columns mean, and what else there is folded below it."""
    used = list(dict.fromkeys(columns))
    rows: list[Sequence[object]] = []
    for column in used:
        if column in _CHOICES:
            rows.append((column, "cache_ratio", _CHOICES[column]))
        for metric in _FIELDS.get(column, ()):
            found = definition(metric)
            if found is not None:
                rows.append((column, element("code", metric), found[1]))
    heads = ("column", "metric", "definition")
    return grid(heads, rows, "What the columns mean, as the program defines them", words=3)
