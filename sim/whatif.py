"""What would a better machine, or more memory, bring? The same run again with one figure changed.

Each variant is a true run: policies decide anew under the changed machine. A variant that the machine
has no part for, that could change nothing, or that does not fit says so instead.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hwmodels.errors import HardwareError
from sim.build import load_trace
from sim.results import WHAT_IF as WHAT_IF
from sim.results import flatten, write_csv
from sim.types import ConfigError

Config = dict[str, Any]
Row = Mapping[str, Any]
Change = Callable[[Config, Row], str | None]
"""Changes a configuration in place, or returns in a few words why there is no point."""
Simulate = Callable[[Config, Path | None, Any], tuple[Row, Any]]
Bar = Callable[[str], AbstractContextManager[Any]]

WHAT_IF_COLUMNS = (
    "name",
    "settings",
    "tokens_per_s",
    "tokens_per_s_change",
    "tpot_ns_p50",
    "tpot_change",
    "bottleneck",
    "note",
)
"""``settings``: what was changed, as overrides; ``*_change``: this / the run as it is - 1; ``note``: why
there are no numbers."""
_SILENT = {
    "events": False,
    "perfetto": None,
    "belady": False,
    "what_if": False,
    "roofline": False,
}


def what_if(
    config: Mapping[str, Any],
    simulate: Simulate,
    base: Row | None = None,
    bar: Bar = nullcontext,
) -> list[dict[str, Any]]:
    """Return a row of WHAT_IF_COLUMNS a variant, the greatest gain first, those not run last.

    Parameters
    ----------
    config
        A resolved configuration; it is not changed.
    simulate
        :func:`sim.simulate.simulate`.
    base
        The summary row of the run as it is; None: it is run first.
    bar
        Given the words for what is under way, makes a context that gives ``watch`` for ``simulate``,
        or what cannot be called where nobody watches.
    """
    if base is None:
        base = _run(_quiet(config), simulate, bar, "as it is")
    rows = []
    for name, change in _VARIANTS.items():
        row: dict[str, Any] = {**dict.fromkeys(WHAT_IF_COLUMNS), "name": name}
        changed = _quiet(config)
        row["note"] = change(changed, base)
        if row["note"] is None:
            row["settings"] = _difference(config, changed)
            asked = bool(row["settings"])
            row |= _outcome(changed, simulate, base, bar, name) if asked else {"note": _THE_SAME}
        rows.append(row)
    return sorted(rows, key=_rank)


def write_what_if(path: Path, rows: Iterable[Row]) -> None:
    """Write the rows as CSV."""
    write_csv(path, rows, WHAT_IF_COLUMNS)


def _rank(row: Row) -> tuple[bool, float, float]:
    change, slower = row["tokens_per_s_change"], row["tpot_change"] or 0.0
    return (change is None, -round(change or 0.0, 4), slower)


def _outcome(config: Config, simulate: Simulate, base: Row, bar: Bar, name: str) -> dict[str, Any]:
    """Run a variant; return the columns that say what came of it."""
    try:
        found = _run(config, simulate, bar, name)
    except (ConfigError, HardwareError) as error:
        return {"note": f"refused: {error}"}
    return {
        **{column: found[column] for column in ("tokens_per_s", "tpot_ns_p50", "bottleneck")},
        "tokens_per_s_change": _ratio(found["tokens_per_s"], base["tokens_per_s"]),
        "tpot_change": _ratio(found["tpot_ns_p50"], base["tpot_ns_p50"]),
    }


def _run(config: Config, simulate: Simulate, bar: Bar, name: str) -> Row:
    """Run a configuration; its tables go to files that vanish, so that they take no memory."""
    with bar(f"what if: {name}") as watch, TemporaryDirectory(prefix="greenroom-") as scratch:
        return simulate(config, Path(scratch), watch if callable(watch) else None)[0]


def _quiet(config: Mapping[str, Any]) -> Config:
    """Return a copy that a variant may change, and that asks for nothing but the summary."""
    copy: Config = deepcopy(dict(config))
    copy["output"] = {**copy["output"], **_SILENT}
    return copy


def _difference(config: Mapping[str, Any], changed: Mapping[str, Any]) -> str:
    """Return the settings in which a variant differs from the run as it is, but for its output."""
    before, after = flatten(config), flatten(changed)
    gone = [f"~{key}" for key in before if key not in after]
    pairs = [
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in after.items()
        if value != before.get(key) and not key.startswith("output.")
    ]
    return " ".join([*gone, *pairs])


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base - 1 if value is not None and base else None


# -- what is changed -------------------------------------------------------------------------------


def _scaled(part: str, names: Iterable[str], factor: float) -> Change:
    """Return a change that multiplies figures of a part of the machine; those not given stay so."""

    def change(config: Config, base: Row) -> str | None:
        figures = config["machine"].get(part)
        if not figures:
            return f"the machine has no {_WORDS[part]}"
        for name in names:
            if figures.get(name) is not None:
                figures[name] = _times(figures[name], factor)
        return None

    return change


def _times(figure: Any, factor: float) -> Any:
    """Return a figure, or the last column of a table of them, times a factor."""
    if isinstance(figure, list):
        return [[*row[:-1], round(row[-1] * factor)] for row in figure]
    return round(figure * factor)


def _achieved(figures: Row) -> int:
    """Return the rate at which weights stream from memory, of which tables by bits speak."""
    return round(figures["memory_bytes_per_s"] * figures.get("memory_derate", 1))


def _host_memory(config: Config, base: Row) -> str | None:
    """Double what memory gives its readers; decoding weights, the threads' own work, stays as slow."""
    cpu = config["machine"]["cpu"]
    if cpu.get("expert_table"):
        return "cpu.expert_table does not tell what memory is of its times"
    memory = _achieved(cpu)
    if cpu.get("rate_by_bits"):
        cpu["rate_by_bits"] = [
            [bits, round(rate / (1 - min(rate, memory) / (2 * memory)))]
            for bits, rate in cpu["rate_by_bits"]
        ]
    names = ("memory_bytes_per_s", "dram_bytes_per_s", "numa_bytes_per_s")
    return _scaled("cpu", names, 2)(config, base)


def _cpu(config: Config, base: Row) -> str | None:
    """Double what the cores do by themselves; host memory stays as it is and may bind then."""
    if config["machine"].get("gpu") and "placement" not in config["policy"]:
        return _NOT_ON_CPU
    _scaled("cpu", ("expert_table",), 0.5)(config, base)
    names = (
        *("memory_bytes_per_s", "thread_bytes_per_s", "rate_by_bits", "matmul_flops"),
        *("decode_weights_per_s", "codebook_weights_per_s"),
    )
    return _scaled("cpu", names, 2)(config, base)


def _gpu_compute(config: Config, base: Row) -> str | None:
    """Double matrix multiplication, and decoding weights up to the rate of memory."""
    note = _scaled("gpu", ("matmul_flops",), 2)(config, base)
    gpu = config["machine"].get("gpu")
    if gpu and gpu.get("rate_by_bits"):
        memory = _achieved(gpu)
        gpu["rate_by_bits"] = [
            [bits, max(rate, min(2 * rate, memory))] for bits, rate in gpu["rate_by_bits"]
        ]
    return note


def _storage(config: Config, base: Row) -> str | None:
    note = _scaled("storage", ("curve",), 2)(config, base)
    return note or (None if base["storage_utilisation"] else "nothing is read from storage")


def _graph(config: Config, base: Row) -> str | None:
    if not config["machine"].get("gpu"):
        return "the machine has no GPU"
    if config["engine"]["graph"]:
        return "they come from one already"
    config["engine"]["graph"] = True
    return None


def _pinned(config: Config, base: Row) -> str | None:
    link = config["machine"].get("link")
    if not link:
        return "the machine has no link"
    if config["engine"]["storage_access"] == "page_cache":
        return "what lies in the page cache cannot be pinned"
    if link["pinned"]:
        return "it is pinned already"
    link["pinned"] = True
    return None


def _handover(config: Config, base: Row) -> str | None:
    if not config["machine"].get("gpu"):
        return "the machine has no GPU"
    if "placement" not in config["policy"]:
        return _NOT_ON_CPU
    config["machine"]["cpu"]["handover_ns"] = 0
    return None


def _slots(config: Config, base: Row) -> str | None:
    """Add a tenth to the cache; where that is less than a slot in each pool, one slot."""
    if base["cache_ratio"] >= 1:
        return _ALL_RESIDENT
    cache = config["cache"]
    for key in ("joint_bytes", "bytes"):
        if cache[key] is not None:
            cache[key] = round(cache[key] * 1.1)
            return None
    ratio = cache["ratio"] * 1.1
    if config["policy"]["scope"] == "layer":
        num_experts = _experts_of_a_pool(config)
        ratio = max(ratio, (int(num_experts * cache["ratio"]) + 1.01) / num_experts)
    cache["ratio"] = min(1.0, ratio)
    return None


def _experts_of_a_pool(config: Config) -> int:
    """Return the experts of a layer, of which each GPU has its own pool where they are dealt out."""
    num_experts = load_trace(config["trace"]["path"]).meta.num_experts
    gpu = config["machine"].get("gpu") or {}
    dealt_out = config["engine"]["split"] == "expert"
    return max(1, num_experts // (gpu.get("count", 1) if dealt_out else 1))


def _batch(config: Config, base: Row) -> str | None:
    workload = config["workload"]
    if base["requests"] <= workload["batch_size"]:
        return "all requests run at one time already"
    workload["batch_size"] *= 2
    if workload.get("waiting") is not None:
        workload["waiting"] = max(workload["waiting"], workload["batch_size"])
    return None


def _all_resident(config: Config, base: Row) -> str | None:
    """Hold all experts from the start, in a memory larger by that of the tier that holds them now."""
    if base["cache_ratio"] >= 1:
        return _ALL_RESIDENT
    if config["policy"].get("low") is not None:
        return "this policy shares the cache between two copies of each expert"
    machine = config["machine"]
    below = machine.get("storage") or {}
    device = machine.get("gpu") or machine["cpu"]
    device["memory_bytes"] += max(machine["cpu"]["memory_bytes"], below.get("capacity_bytes", 0))
    if not machine.get("link"):  # one memory
        machine["cpu"]["memory_bytes"] = device["memory_bytes"]
    config["cache"] |= {"ratio": 1.0, "bytes": None, "joint_bytes": None}
    config["policy"]["cache"] = {"_target_": "sim.policies.classic.Static"}
    config["policy"].pop("sizing", None)
    return None


_WORDS = {"gpu": "GPU", "link": "link", "cpu": "CPU", "storage": "storage"}
_NOT_ON_CPU = "this policy runs no expert on the CPU"
_ALL_RESIDENT = "the cache holds all experts already"
_THE_SAME = "that is the run as it is"
_VARIANTS: dict[str, Change] = {
    "link x2": _scaled("link", ("h2d_bytes_per_s", "d2h_bytes_per_s", "switch_bytes_per_s"), 2),
    "host memory x2": _host_memory,
    "CPU x2": _cpu,
    "GPU memory x2": _scaled("gpu", ("memory_bytes_per_s",), 2),
    "GPU compute x2": _gpu_compute,
    "launches free": _scaled("gpu", ("launch_ns", "graph_launch_ns"), 0),
    "launches from a graph": _graph,
    "storage x2": _storage,
    "slots +10%": _slots,
    "batch x2": _batch,
    "no handover": _handover,
    "pinned host memory": _pinned,
    "all experts resident": _all_resident,
}
