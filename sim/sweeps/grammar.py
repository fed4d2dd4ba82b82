"""Overrides as Hydra reads them: text in, parsed settings out, each text parsed once."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sim.types import ConfigError

if TYPE_CHECKING:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Override

OptionsOf = Callable[[str], Sequence[str]]
"""Returns the names of a group's options, which ``glob()`` chooses among."""

_NAME = r"[A-Za-z_][A-Za-z0-9_-]*"
_INT = r"[+-]?(?:0|[1-9][0-9]*)"
_FLOAT = (
    r"[+-]?(?:(?:0|[1-9][0-9]*)\.[0-9]*|\.[0-9]+|(?:0|[1-9][0-9]*)(?=[eE]))(?:[eE][+-]?[0-9]+)?"
)
_SIMPLE = re.compile(rf"({_NAME}(?:\.{_NAME})*)=(?:({_INT})|({_FLOAT})|({_NAME}))")
_WORDS = {"true": True, "false": False, "null": None, "inf": float("inf"), "nan": float("nan")}


class Setting(NamedTuple):
    """One override of one point.

    Attributes
    ----------
    text
        As on the command line: ``cache.ratio=0.25``, ``+estimate.link.x=5``.
    key
        What it sets, without signs and package.
    value
        The parsed value.
    """

    text: str
    key: str
    value: Any


PointSettings = tuple[Setting, ...]


class Grammar:
    """Parses overrides; keeps what it has parsed.

    Parameters
    ----------
    seed
        Of ``shuffle()``, which draws from Python's global generator: here the same seed gives the same
        order, and the generator is left as it was.
    options_of
        Names of a group's options.
    """

    def __init__(self, seed: int = 0, options_of: OptionsOf | None = None) -> None:
        self._seed = seed
        self._options_of = options_of
        self._parser: OverridesParser | None = None
        self._settings: dict[str, Setting] = {}

    @contextmanager
    def seeded(self) -> Iterator[None]:
        """Give Hydra's ``shuffle()`` the seed."""
        state = random.getstate()
        random.seed(self._seed)
        try:
            yield
        finally:
            random.setstate(state)

    def parse(self, texts: Sequence[str]) -> list[Override]:
        """Return overrides as Hydra's parser does; raises HydraException for what it cannot read."""
        if self._parser is None:
            from hydra.core.override_parser.overrides_parser import OverridesParser

            self._parser = OverridesParser.create()
        overrides = self._parser.parse_overrides(list(texts))
        for override in overrides:
            override.config_loader = _Options(self._options_of)  # type: ignore[assignment]
        return overrides

    def setting(self, text: str) -> Setting:
        """Return the setting of an override of one value, its text as it is given.

        Raises ConfigError for one of several values, HydraException for what is no override.
        """
        found = self._settings.get(text)
        if found is None:
            found = _simple(text) or _setting(text, self.parse([text])[0])
            self._settings[text] = found
        return found

    def values(self, override: Override) -> list[Setting]:
        """Return what an override stands for, one setting a value, written as Hydra's sweeper does."""
        from hydra.core.override_parser.types import Override

        if not override.is_sweep_override():
            text = f"{override.get_key_element()}={override.get_value_element_as_str()}"
            return [self.setting(text)]
        key = override.get_key_element()
        settings = []
        for element in override.sweep_iterator():
            text = f"{key}={Override._get_value_element_as_str(element)}"
            if isinstance(element, int | float):  # written and read again it is the same
                settings.append(Setting(text, override.key_or_group, element))
            else:
                settings.append(self.setting(text))
        return settings


def quoted(text: str) -> str:
    """Return text as an override's value has it, whatever is in it."""
    from hydra.core.override_parser.types import Quote, QuotedString

    return str(QuotedString(text, Quote.double).with_quotes())


def _simple(text: str) -> Setting | None:
    """Read ``dotted.key=word`` or a number, a hundred times faster than Hydra's parser; else None."""
    found = _SIMPLE.fullmatch(text)
    if found is None:
        return None
    key, whole, number, word = found.groups()
    value: Any
    if whole is not None:
        value = int(whole)
    elif number is not None:
        value = float(number)
    else:
        value = _WORDS.get(word.lower(), word)
    return Setting(text, key, value)


def _setting(text: str, override: Override) -> Setting:
    if override.is_sweep_override():
        raise ConfigError(f"{text}: must be one value (a list is written [A,B], a comma 'A,B')")
    return Setting(text, override.key_or_group, override.value())


class _Options:
    """What of Hydra's loader of configurations ``glob()`` needs."""

    def __init__(self, options_of: OptionsOf | None) -> None:
        self._options_of = options_of

    def get_group_options(self, group_name: str, **_: Any) -> list[str]:
        if self._options_of is not None:
            return list(self._options_of(group_name))
        return options_of_hydra(group_name)


def options_of_hydra(group: str, folders: Sequence[Path] = ()) -> list[str]:
    """Return a group's options: of the Hydra that is initialised, else of what comes with Greenroom.

    ``folders`` are those of the user's own, which Hydra looks into only when it composes.
    """
    from hydra import initialize_config_module
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.object_type import ObjectType

    own = [file.stem for folder in folders for file in (folder / group).glob("*.yaml")]
    ready = nullcontext() if GlobalHydra.instance().is_initialized() else None
    with ready or initialize_config_module("conf", version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        return sorted({*own, *loader.get_group_options(group, results_filter=ObjectType.CONFIG)})
