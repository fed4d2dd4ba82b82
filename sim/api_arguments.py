"""Arguments of the Python API: whether there are such, and whether each is of the kind that is wanted."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, KeysView, Mapping, Sequence, ValuesView
from numbers import Integral, Real
from typing import Any

from sim.settings import did_you_mean, shortened
from sim.types import ConfigError

_Kind = tuple[Callable[[Any], bool], str]


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike)


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _list_of(is_good: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: _is_list(value) and all(map(is_good, value))


def _or_none(kind: _Kind) -> _Kind:
    is_good, words = kind
    return (lambda value: value is None or is_good(value)), f"{words}, or None"


_TEXT: _Kind = (_is_text, "a text")
_TEXTS: _Kind = (_list_of(_is_text), "a list of texts")
_PATHS: _Kind = (_list_of(_is_path), "a list of paths")
KINDS: dict[str, _Kind] = {
    "bool": (lambda value: isinstance(value, bool), "True or False"),
    "str": _TEXT,
    "str | None": _or_none(_TEXT),
    "int | None": _or_none((_is_whole, "a whole number")),
    "float | None": _or_none((_is_number, "a number")),
    "Sequence[str] | None": _or_none(_TEXTS),
    "Sequence[PolicyLike]": (_is_list, "a list of policies"),
    "Dirs": _PATHS,
    "Sequence[str | os.PathLike[str]]": _PATHS,
    "Folder": _or_none((_is_path, "a path")),
}
"""What an argument must be, by the annotation of its parameter."""
OWN_WORDS = ("PolicyLike", "PolicyLike | None", "TraceLike", "TraceLike | None", "Any")
"""Annotations of what is looked at where it is used."""


def as_pythons(value: Any) -> Any:
    """Return an argument of NumPy's as Python's own value, and what can be gone through once as a list."""
    if hasattr(value, "tolist") and not isinstance(value, type):
        return value.tolist()
    return list(value) if isinstance(value, Iterator | KeysView | ValuesView) else value


def check_arguments(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Raise ConfigError for the first argument that the function does not have, or not of such a kind."""
    signature = inspect.signature(function)
    _check_names(function.__name__, signature.parameters, kwargs)
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise ConfigError(f"{function.__name__}(): {error}") from None
    for name, value in given.items():
        parameter = signature.parameters[name]
        is_good, words = KINDS.get(parameter.annotation, (None, ""))
        if is_good is None:
            continue
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            for one in value:
                if not is_good(one):
                    _refuse(name, one, f'{words} each, as "cache.ratio=0.25"')
        elif not is_good(value):
            _refuse(name, value, words)


def _refuse(name: str, value: Any, words: str) -> None:
    raise ConfigError(f"{name} = {shortened(repr(value))}: must be {words}")


def _check_names(
    called: str, known: Mapping[str, inspect.Parameter], given: Mapping[str, Any]
) -> None:
    """Refuse a keyword that the function does not have, with the nearest that it has."""
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values()):
        return
    names = [n for n, one in known.items() if one.kind is not inspect.Parameter.VAR_POSITIONAL]
    for name, value in given.items():
        if name not in names:
            near = did_you_mean(name, names)
            if not near and len(names) < len(known):
                near = f"; settings are texts, as {shortened(f'{name}={value}')!r}"
            raise ConfigError(f"{called}({name}=...): no such parameter{near}")


def in_words_of(function: Callable[..., Any], message: str) -> str:
    """Return a command's message with the function's parameter in place of the command's flag."""
    if not message.startswith("--"):
        return message
    flag, _, rest = message[2:].partition(" ")
    wanted = flag.rstrip(":").replace("-", "_")
    names = [n for n in inspect.signature(function).parameters if n.startswith(wanted)]
    if not names:
        return message
    return (
        f"{names[0]}: {rest}" if flag.endswith(":") else f"{names[0]} = {rest.removeprefix('= ')}"
    )
