"""From a command line to a sweep: its settings, its search, its folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from sim.own_options import with_folders
from sim.sweeps.beforehand import refuse_hopeless
from sim.sweeps.chunk import Point
from sim.sweeps.composer import SWEEP, Composer, folders_of, sweep_config
from sim.sweeps.grammar import options_of_hydra
from sim.sweeps.settings import OF_THE_POINTS, SweepSettings, settings_of
from sim.sweeps.space import PointSettings, Search, search_of
from sim.types import ConfigError


@dataclass(slots=True)
class Question:
    """A sweep as it was asked for, before anything has run; only within ``sim.composing.composing()``.

    Attributes
    ----------
    arguments
        The overrides of the command line that are of the points, not of the sweep or Hydra.
    folder
        Where the results go, absolute.
    """

    arguments: list[str]
    settings: SweepSettings
    search: Search
    composer: Composer
    folder: Path

    def batches(self) -> Iterator[list[Point]]:
        """Yield the points, composed, batch by batch; their numbers run on."""
        numbers = count()
        fixed = self.search.fixed
        for batch in self.search.batches():
            yield [self._point(next(numbers), fixed, settings) for settings in batch]

    def _point(self, number: int, fixed: Sequence[str], settings: PointSettings) -> Point:
        base, edits = self.composer.place(settings)
        texts = tuple(setting.text for setting in settings)
        return Point(number, (*fixed, *texts), base, edits)

    def check(self, batch: Sequence[Point]) -> None:
        """Raise the error of all points, if a batch is all of them and they have one in common."""
        if len(batch) == self.search.num_points:
            refuse_hopeless(batch, self.composer.bases)

    def how_found(self) -> dict[str, Any]:
        """Return the settings that decide which points there are."""
        return {name: getattr(self.settings, name) for name in OF_THE_POINTS}


def question_of(arguments: Sequence[str], config_dirs: Sequence[str] = ()) -> Question:
    """Read a command line.

    Raises ConfigError, or an error of Hydra, for what is no sweep.
    """
    words = with_folders(arguments, config_dirs)
    own = [word for word in words if _is_about_the_sweep(word)]
    hydra = [word for word in own if not _key(word).startswith(SWEEP)]
    rest = [word for word in words if word not in own]
    config = sweep_config([*own, *not_swept(rest)])
    settings = settings_of(_plain(config[SWEEP]))
    params = _plain(config.hydra.sweeper.get("params") or {})
    options_of = partial(options_of_hydra, folders=folders_of(words))
    texts = {key: str(value) for key, value in params.items()}
    search = search_of(rest, texts, settings, options_of)
    named = Path(settings.dir or str(config.hydra.sweep.dir)).expanduser()
    folder = Path(os.path.abspath(named))
    return Question(rest, settings, search, Composer([*hydra, *search.fixed]), folder)


def _is_about_the_sweep(word: str) -> bool:
    key = _key(word)
    return key.split(".")[0] in (SWEEP, "hydra") or key.startswith("hydra/")


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0].strip()


def not_swept(words: Sequence[str]) -> list[str]:
    """Return the overrides of one value: those that may name an experiment."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parsed = OverridesParser.create().parse_overrides(list(words))
    return [
        word
        for word, override in zip(words, parsed, strict=True)
        if not override.is_sweep_override()
    ]


def _plain(node: Any) -> Mapping[str, Any]:
    from omegaconf import OmegaConf

    plain: Any = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
    if not isinstance(plain, Mapping):
        raise ConfigError(f"{plain}: must be a group of settings")
    return plain
