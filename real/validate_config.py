"""What a validation is asked: the settings of conf/validate.yaml, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from real.rig import TIERS
from sim.composing import compose_config
from sim.own_options import SEARCHPATH, with_folders
from sim.settings import (
    TEXT,
    Rule,
    at_least,
    check_group,
    did_you_mean,
    is_number,
    is_whole,
    or_null,
)
from sim.types import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16")
_LARGEST_RATE = 10**15
_GROUPS = ("trace", "model", "engine")
"""Groups of a run's configuration that are not the matrix's own matter."""


def _is_list_of(is_good: Any, value: Any) -> bool:
    return isinstance(value, list) and all(map(is_good, value)) and len(set(value)) == len(value)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value != ""


_NAMES: Rule = (
    lambda value: bool(value) and _is_list_of(_is_name, value),
    "must be a list of different names, at least one",
)
_RATIOS: Rule = (
    lambda v: bool(v) and _is_list_of(lambda one: is_number(one) and 0 <= one <= 1, v),
    "must be a list of different numbers in [0, 1], at least one",
)
_COUNTS: Rule = (
    lambda value: bool(value) and _is_list_of(lambda one: is_whole(one) and one >= 1, value),
    "must be a list of different whole numbers >= 1, at least one",
)
RULES: dict[str, Rule] = {
    "tiers": _NAMES,
    "batch_sizes": _COUNTS,
    "ratios": _RATIOS,
    "policies": _NAMES,
    "references": _NAMES,
    "overrides": (lambda v: _is_list_of(_is_name, v), "must be a list of overrides"),
    "dtype": TEXT,
    "first_request": at_least(0),
    "prompt_tokens": at_least(1),
    "steps": at_least(2),
    "device": TEXT,
    "threads": or_null(at_least(1)),
    "link_bytes_per_s": (
        lambda value: is_number(value) and 1 <= value <= _LARGEST_RATE,
        f"must be a number >= 1, at most {_LARGEST_RATE:g}",
    ),
    "link_setup_ns": at_least(0),
    "scratch": or_null(TEXT),
    "minutes": (lambda v: is_number(v) and 0 < v <= 1440, "must be a number in (0, 1440]"),
    "turn_tokens": at_least(1),
    "least_rounds": at_least(2),
    "seed": at_least(0),
    "parity_steps": at_least(2),
    "limit_steps": at_least(0),
    "peer_tokens": at_least(0),
}


@dataclass(frozen=True, slots=True)
class Matrix:
    """The settings of a validation; what each means stands in conf/validate.yaml.

    ``config_dirs`` are folders of the user's own options.
    """

    tiers: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    ratios: tuple[float, ...]
    policies: tuple[str, ...]
    references: tuple[str, ...]
    overrides: tuple[str, ...]
    dtype: str
    first_request: int
    prompt_tokens: int
    steps: int
    device: str
    threads: int | None
    link_bytes_per_s: int
    link_setup_ns: int
    scratch: str | None
    minutes: float
    turn_tokens: int
    least_rounds: int
    seed: int
    parity_steps: int
    limit_steps: int
    peer_tokens: int
    config_dirs: tuple[str, ...] = ()


def compose_matrix(
    overrides: Sequence[str] = (),
    given: Mapping[str, Any] | None = None,
    *,
    quick: bool = False,
    config_dirs: Sequence[str] = (),
) -> Matrix:
    """Compose conf/validate.yaml.

    Parameters
    ----------
    overrides
        As on the command line: of the settings, or of every run (``model=...``, ``trace.path=...``).
    given
        Settings by name that come before all others.
    quick
        Take the shorter settings of the file's ``quick``, but for what is overridden or given.

    Raises
    ------
    ConfigError
        For the first setting that is wrong.
    """
    given = given or {}
    of_runs = [text for text in overrides if _is_of_runs(text)]
    own = [text for text in overrides if text not in of_runs]
    config = compose_config("validate", with_folders(own, config_dirs))
    short = config.pop("quick")
    if quick:
        named = {text.lstrip("+~").partition("=")[0] for text in own}
        config |= {key: value for key, value in short.items() if key not in named}
    config |= given
    _check(config)
    config["overrides"] += of_runs
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in config.items()
    }
    values["link_bytes_per_s"] = int(config["link_bytes_per_s"])
    return Matrix(**values, config_dirs=tuple(config_dirs))


def _is_of_runs(override: str) -> bool:
    """Tell whether an override is one of the runs: of a group, or of a setting in one."""
    key = override.lstrip("+~").partition("=")[0]
    return key != SEARCHPATH and (key in _GROUPS or "." in key or "/" in key or "@" in key)


def _check(config: Mapping[str, Any]) -> None:
    for key in config:
        if key not in RULES:
            near = did_you_mean(key, [*RULES, "quick", "config_dirs"])
            raise ConfigError(f"{key}: unknown key{near}")
    for key in RULES:
        if key not in config:
            raise ConfigError(f"{key}: missing, must be given")
    for key, rule in RULES.items():
        try:
            check_group("", {key: config[key]}, {key: rule})
        except ConfigError as error:  # the settings are of no group
            raise ConfigError(str(error).removeprefix(".")) from None
    _check_names("tiers", config["tiers"], TIERS)
    _check_names("dtype", [config["dtype"]], DTYPES)
    both = [name for name in config["policies"] if name in config["references"]]
    if both:
        raise ConfigError(
            f"policies = {both[0]}: must not be of the references, whose runs the prediction rests on"
        )


def _check_names(key: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ConfigError(f"{key} = {name}: must be of {', '.join(known)}{hint}")


assert {field.name for field in fields(Matrix)} == {*RULES, "config_dirs"}
