"""The settings of a run by group: which there are, and what each must be."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from sim.types import ConfigError

Rule = tuple[Callable[[Any], bool], str]


_LARGEST_COUNT = 10**9
_LARGEST_BYTES = 10**18
_LONGEST_SHOWN = 80
_LONGEST_LINE = 1200


def is_whole(value: Any) -> bool:
    """Tell whether a value is a whole number (a bool is none)."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Tell whether a value is a number (a bool is none)."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """Tell whether a value is a number that a float can hold (a bool is none)."""
    return is_number(value) and abs(value) <= sys.float_info.max


def _is_span(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 2:
        return False
    return is_whole(value[0]) and (value[1] is None or is_whole(value[1]))


def _is_window(value: Any) -> bool:
    if not _is_span(value) or value[0] < 0:
        return False
    return value[1] is None or value[1] > value[0]


def _is_length(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(is_whole(n) and 0 < n <= _LARGEST_COUNT for n in value)
    )


def _is_positive(value: Any) -> bool:
    return is_number(value) and 0 < value < float("inf")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(_is_text(name) for name in value)


def at_least(least: int) -> Rule:
    """Return the rule of a whole number."""

    def is_good(value: Any) -> bool:
        return is_whole(value) and least <= value <= _LARGEST_COUNT

    return is_good, f"must be a whole number >= {least}, at most {_LARGEST_COUNT}"


def _bytes(least: int) -> Rule:
    """Return the rule of a size, for which 4e9 is as good as 4000000000."""

    def is_good(value: Any) -> bool:
        return is_number(value) and least <= value <= _LARGEST_BYTES and value == int(value)

    return is_good, f"must be a whole number of bytes >= {least}, at most 1e18"


def or_null(rule: Rule) -> Rule:
    """Return a rule that null keeps too."""
    is_good, words = rule
    return (lambda value: value is None or is_good(value), f"{words}, or null")


def one_of(*names: str) -> Rule:
    """Return the rule of a choice."""
    listed = ", ".join(map(repr, names[:-1]))
    return (lambda value: value in names), f"must be {listed} or {names[-1]!r}"


def _is_ratio(value: Any) -> bool:
    return is_number(value) and 0 <= value <= 1


TEXT: Rule = (_is_text, "must be a text that is not empty")
POSITIVE: Rule = (_is_positive, "must be a number > 0")
SWITCH: Rule = (lambda value: isinstance(value, bool), "must be true or false")
_SPAN: Rule = (_is_span, "must be [first, last + 1], where last + 1 may be null")
_WINDOW: Rule = (
    _is_window,
    "must be [first, last + 1], at least one step, where last + 1 may be null",
)
_GROUP: Rule = (lambda value: isinstance(value, Mapping), "must be a group of settings")

OPTIONAL_ROLES = (
    *("placement", "prefetch", "routing", "repack", "stages", "host"),
    *("predictor", "sizing", "former"),
)
"""The parts a policy may do without."""
OPTIONAL_SETTINGS: dict[str, Rule] = {
    "group_layers": or_null(at_least(1)),
    "insert_cap": or_null(at_least(0)),
    "low": or_null(_GROUP),
    "plan_ns": or_null(at_least(0)),
    "prefetch_limit": or_null(at_least(0)),
}
"""The settings a policy may do without."""
LOW_SETTINGS: dict[str, Rule] = {
    "bits": (lambda value: _is_positive(value) and value <= 32, "must be a number in (0, 32]"),
    "share": (_is_ratio, "must be a number in [0, 1]"),
}
"""What policy.low must have: bits a weight of low-precision copies, and their share of cache bytes."""
SETTINGS: dict[str, dict[str, Rule]] = {
    "trace": {"name": TEXT, "path": TEXT},
    "policy": {
        "name": TEXT,
        "scope": one_of("layer", "group", "global"),
        **dict.fromkeys(("cache", *OPTIONAL_ROLES), _GROUP),
        **OPTIONAL_SETTINGS,
    },
    "cache": {
        "ratio": (_is_ratio, "must be a number in [0, 1]"),
        "bytes": or_null(_bytes(0)),
        "kv_bytes": or_null(_bytes(1)),
        "joint_bytes": or_null(_bytes(1)),
        "host_bytes": or_null(_bytes(1)),
        "staging_slots": or_null(at_least(1)),
        "prefetch_limit": at_least(0),
    },
    "workload": {
        "batch_size": at_least(1),
        "waiting": or_null(at_least(1)),
        "max_wait_steps": or_null(at_least(0)),
        "requests": or_null(_SPAN),
        "prefill_chunk": or_null(at_least(1)),
        "mixed": SWITCH,
        "arrivals": (_is_text, "must be 'closed', 'poisson' or a file of arrival times"),
        "rate_per_s": or_null(POSITIVE),
        "seed": at_least(0),
        "length": or_null((_is_length, "must be [prompt, output] tokens, whole numbers >= 1")),
        "cut": SWITCH,
        "repeat": at_least(1),
        "kv_limit_tokens": or_null(at_least(1)),
        "expert_order": one_of("router", "index", "tokens"),
        "warm_up": or_null(_SPAN),
    },
    "calibration": {
        "trace": or_null(TEXT),
        "requests": or_null(_SPAN),
        "allow_overlap": SWITCH,
    },
    "output": {
        "events": SWITCH,
        "belady": SWITCH,
        "perfetto": or_null(_WINDOW),
        "what_if": SWITCH,
        "roofline": SWITCH,
        "sequential": SWITCH,
        "baseline": or_null(TEXT),
        "highlight": or_null((_is_names, "must be a list of names of policies")),
    },
}
SINGLE: dict[str, Rule] = {"model": _GROUP, "machine": _GROUP, "engine": _GROUP, "estimate": _GROUP}


def check_settings(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for the first setting that is unknown, missing or of the wrong kind."""
    _check_keys(config, {**SETTINGS, **SINGLE}, "")
    for name, rule in SINGLE.items():
        _check(name, config[name], rule)
    for group, rules in SETTINGS.items():
        check_group(group, config[group], rules)
    low = config["policy"].get("low")
    if low is not None:
        check_group("policy.low", low, LOW_SETTINGS)


def check_group(name: str, found: Any, rules: Mapping[str, Rule]) -> None:
    """Raise ConfigError for the first setting of a group that is unknown, missing or of the wrong kind."""
    _check(name, found, _GROUP)
    _check_keys(found, rules, f"{name}.")
    for key, value in found.items():
        _check(f"{name}.{key}", value, rules[key])


def _check_keys(found: Mapping[str, Any], known: Mapping[str, Any], prefix: str) -> None:
    for key in found:
        if key not in known:
            raise ConfigError(f"{prefix}{key}: unknown key{did_you_mean(str(key), known)}")
    for key in known:
        if key not in found and key not in OPTIONAL_ROLES and key not in OPTIONAL_SETTINGS:
            raise ConfigError(f"{prefix}{key}: missing, must be given")


def _check(field: str, value: Any, rule: Rule) -> None:
    is_good, words = rule
    if not is_good(value):
        raise ConfigError(f"{field} = {shortened(str(value))}: {words}")


def shortened(text: str, longest: int = _LONGEST_SHOWN) -> str:
    """Return a text that fits a message: a long one loses its end."""
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def without_middle(line: str) -> str:
    """Return a line of bounded length: of a long message the middle is a value, the rule comes last."""
    if len(line) <= _LONGEST_LINE:
        return line
    return f"{line[: _LONGEST_LINE // 2]} ... {line[-_LONGEST_LINE // 4 :]}"


def did_you_mean(name: str, known: Any) -> str:
    """Return a hint with the nearest known name, or the empty string."""
    near = get_close_matches(name, [str(k) for k in known], n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def prefetch_limit(config: Mapping[str, Any]) -> int:
    """Return how many prefetches may be under way: what the policy asks for, else the cache's setting."""
    own = config["policy"].get("prefetch_limit")
    return int(config["cache"]["prefetch_limit"] if own is None else own)
