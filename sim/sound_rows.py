"""Result rows that a figure or a report may rely on: read, and refused in one line where they are damaged.

Rows come from files that users edit, cut and put together, with other tools too; what is checked here need
not be doubted anywhere else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sim.labels import Row
from sim.league import GIVEN_UP
from sim.metrics import STALLS
from sim.results import read_rows
from sim.settings import is_number
from sim.types import ConfigError

_WORDS = ("policy", "trace", "model", "machine", "engine", "machine_kind")
_FLAGS = ("oracle", "lossy")
_NUMBERS = (
    *("batch_size", "cache_ratio", "total_ns", "idle_ns", "h2d_bytes", "read_bytes"),
    *("cache_bytes", "gpu_bytes", "requests", "refused", "prompt_tokens", "output_tokens"),
)
_MAYBE = (
    *(
        "tokens_per_s",
        "hit_rate",
        "prefetch_useful_rate",
        "tpot_ns_p50",
        "ttft_ns_p50",
        "gpu_share",
    ),
    *(f"{cause}_stall_share" for cause in STALLS),
    *(f"{lane}_utilisation" for lane in ("gpu", "h2d", "d2h", "cpu", "storage", "dram")),
)
"""Numbers that are null where they are unknown."""
_LISTS = ("notes", "roofline", "what_if")
_ENTRIES = {
    "roofline": ("resource", "unit", "amount_per_token", "tokens_per_s_limit", "times_from_limit"),
    "what_if": ("name", "tokens_per_s", "tokens_per_s_change", "bottleneck", "note"),
}
_OTHERS = ("belady_gap", "bottleneck", "notes", "provenance")
_ORIGIN = ("trace_kind", "priced_as", "greenroom_version")
_BELOW_ZERO = ("belady_gap", "gap_by_admission", "gap_by_victim")
_MOST = 1e24
"""No count, time or rate comes near it, and what is drawn and multiplied stays finite below it."""


def sound_rows(path: Path) -> list[Row]:
    """Return the rows of a run's folder, a sweep's or a table of results.

    Raises ConfigError where there are none, or one lacks what every row has, or holds what no run leaves.
    """
    rows = enumerate(read_rows(path))
    return [sound_row(row, f"{path}: row {number} of the results") for number, row in rows]


def sound_row(read: Row, where: object) -> dict[str, Any]:
    """Return a row as above; ``where`` begins the message of an error."""
    row = _with_lists(read)
    wrong = _wrong(row)
    if wrong is not None:
        raise ConfigError(f"{where} {wrong}")
    return row


def _with_lists(row: Row) -> dict[str, Any]:
    """Return a row whose lists are lists, where an earlier version or another tool left their texts."""
    texts = {name: row[name] for name in _LISTS if isinstance(row.get(name), str)}
    try:
        return {**row, **{name: json.loads(text) for name, text in texts.items()}}
    except (ValueError, RecursionError):
        return dict(row)  # which is told of as what it is


def _wrong(row: Row) -> str | None:
    """Say what is wrong with a row; None where it is sound."""
    needed = (*_WORDS, *_FLAGS, *_NUMBERS, *_MAYBE, *_OTHERS)
    for name in needed:
        if name not in row:
            return f"has no {name}"
    for name, value in row.items():
        rule = _rule(name, value)
        if rule is not None:
            return f"has {name} = {_shown(value)}: must be {rule}"
    return _wrong_parts(row)


def _rule(name: str, value: Any) -> str | None:
    """Return the rule that a value breaks, if any."""
    if name in _WORDS:
        return None if isinstance(value, str) and value else "a name"
    if name in _FLAGS:
        return None if isinstance(value, bool) else "true or false"
    if name in _NUMBERS or (name in _MAYBE and value is not None):
        return None if _is_number(value) else "a number >= 0"
    if name == "bottleneck":
        return None if value in (None, "gpu", *STALLS) else f"one of gpu, {', '.join(STALLS)}"
    if name in _LISTS:
        return None if value is None or isinstance(value, list) else "a list"
    if name in ("provenance", "overrides"):
        return None if isinstance(value, Mapping) else "an object"
    if name == "highlight":
        return None if value is None or isinstance(value, list) else "a list of names"
    return _rule_of_others(name, value)


def _rule_of_others(name: str, value: Any) -> str | None:
    """Return the rule that a column breaks which may be missing: a count or rate, a word, or nothing."""
    if isinstance(value, float | int) and not isinstance(value, bool):
        if name in _BELOW_ZERO:
            return None if _is_number(abs(value)) else "a number"
        return None if _is_number(value) else "a number >= 0"
    if name in _COUNTED:
        return None if value is None else "a number >= 0"
    return None


_GAPS = (*_BELOW_ZERO, "belady_hit_rate")
_LEDGER = (
    *(f"{kind}_{of}_rate" for kind in GIVEN_UP for of in ("slot", "mass")),
    *("route_agreement", "route_kl"),
)
_DECODED = tuple(f"decode_{column}" for column in _LEDGER)
_KERNELS = ("kernels", "kernels_per_layer", "padding_ratio", "gather_bytes")
_WAITS = ("longest_wait_steps_max", "waiting", "wait_steps_mean")
_TOGETHER = (_LEDGER, _DECODED, _KERNELS, _WAITS)
"""Columns of which a row has all or none."""
_COUNTED = {
    *("union_size", "decode_union_ratio", "wait_steps_mean", "sequential_miss_rate"),
    *("belady_forced_hit_rate", "miss_rate", "pool_pressure", "inserts", "stages"),
    *(*_GAPS, *_LEDGER, *_DECODED, *_KERNELS),
}
"""Columns that tables and figures reckon with where a row has them."""


def _is_number(value: Any) -> bool:
    """Tell whether this is a number that a count, a time or a rate can be."""
    return is_number(value) and 0 <= value < _MOST


def _wrong_parts(row: Row) -> str | None:
    """Say what is wrong inside a row's lists and objects, or what comes only together and is cut."""
    for group in _TOGETHER:
        if any(row.get(name) is not None for name in group):
            for name in group:
                if name not in row:
                    return f"has no {name}"
    if row.get("gap_by_victim") is not None:
        for name in _GAPS:
            if row.get(name) is None:
                return f"has no {name}"
    for name in _ORIGIN:
        if not isinstance(row["provenance"].get(name), str):
            return f"has no provenance.{name}"
    measured = row["provenance"].get("measurement", {})
    if not isinstance(measured, Mapping):
        return f"has provenance.measurement = {_shown(measured)}: must be an object"
    for name, keys in _ENTRIES.items():
        for entry in row.get(name) or ():
            wrong = _wrong_entry(entry, keys)
            if wrong is not None:
                return f"has an entry of {name} that {wrong}"
    return None


def _wrong_entry(entry: Any, keys: tuple[str, ...]) -> str | None:
    if not isinstance(entry, Mapping):
        return f"is {_shown(entry)}: must be an object"
    for key in keys:
        if key not in entry:
            return f"has no {key}"
    for key, value in entry.items():
        if key in _TEXTS:
            if not isinstance(value, str | None):
                return f"has {key} = {_shown(value)}: must be words"
        elif value is not None and not _is_number(value + 1 if key in _CHANGES else value):
            return f"has {key} = {_shown(value)}: must be a number"
    return None


_TEXTS = ("resource", "unit", "name", "settings", "bottleneck", "note")
_CHANGES = ("tokens_per_s_change", "tpot_change")
"""They are from -1, which is all, upwards."""


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:39]}…"
