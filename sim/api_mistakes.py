"""A user's mistake in the Python API: one ConfigError of one line, and in a notebook no more than that."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from sim.api_arguments import as_pythons, check_arguments, in_words_of
from sim.types import ConfigError

P = ParamSpec("P")
R = TypeVar("R")

_ROOT = Path(__file__).parents[1]
_OURS = (*(_ROOT / name for name in ("sim", "traces", "hwmodels", "real")), _ROOT / "greenroom.py")


def plain_mistakes(config: str = "config") -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function of the API: what is the caller's mistake becomes a ConfigError.

    ``config`` is the file in ``conf/`` whose keys may be meant. What is no mistake (a defect, a full
    disk, Ctrl-C) passes as it is. IPython shows the message and the caller's line, without the frames in
    between.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                given: Any = [as_pythons(value) for value in args]
                named: Any = {name: as_pythons(value) for name, value in kwargs.items()}
                check_arguments(function, given, named)
                return function(*given, **named)
            except Exception as error:
                told = _told(error, function, config)
                if told is None:
                    raise
            raise told

        return called

    return decorate


def _told(error: Exception, function: Callable[..., Any], config: str) -> ConfigError | None:
    from sim.mistakes import explain

    is_hydra = "hydra" in type(error).__module__  # some of its errors are OSErrors too
    if isinstance(error, MemoryError | OSError) and not is_hydra:
        return None
    message = explain(error, config)
    if message is None:
        return None
    told: Any = ConfigError(in_words_of(function, message))
    told._render_traceback_ = lambda *_: _shown(told)  # what IPython asks an error for
    return told


def _shown(error: ConfigError) -> list[str]:
    """Return the lines that a notebook shows: the message, and the caller's line."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not _is_ours(Path(frame.filename))]
    where = [f"in line {theirs[-1].lineno}: {theirs[-1].line}"] if theirs else []
    return [*where, f"ConfigError: {error}"]


def _is_ours(file: Path) -> bool:
    """Tell whether a frame is of this project or an installed one, and not the caller's."""
    return "site-packages" in file.parts or any(file.is_relative_to(place) for place in _OURS)
