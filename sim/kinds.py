"""What a policy's parameter may be, by its annotation, where that is a plain one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from sim.types import ConfigError


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))


def _are(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list | tuple) and all(map(_is(*kinds), value))


_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "bool": (_is(bool), "a bool"),
    "int": (_is(int), "an int"),
    "float": (_is(int, float), "a float"),
    "str": (_is(str), "a str"),
    "None": (lambda value: value is None, "null"),
    "Sequence[int]": (_are(int), "a list of ints"),
    "Sequence[float]": (_are(int, float), "a list of floats"),
}


def check_type(where: str, value: Any, parameter: inspect.Parameter) -> None:
    """Refuse a value of another kind than the parameter's annotation, where that is a plain one."""
    annotation = parameter.annotation
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    rules = [_KINDS.get(kind) for kind in (text or str(annotation)).split(" | ")]
    known = [rule for rule in rules if rule is not None]
    if len(known) < len(rules) or any(is_good(value) for is_good, _ in known):
        return
    raise ConfigError(f"{where} = {value}: must be {' or '.join(words for _, words in known)}")
