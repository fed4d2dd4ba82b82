"""Composes the configurations of a sweep's points: by Hydra once a choice of groups, then by copying.

Hydra takes a tenth of a second and more to compose one; a sweep of ten thousand points would spend half an
hour on it. Points that differ in values alone share what Hydra composed (their *base*), and each says what
it changes there (its *edits*). What comes of it is what Hydra would have composed of the same overrides;
where that is not certain (an interpolation that reads other values, a value that is a group) Hydra does it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from sim.own_options import SEARCHPATH
from sim.sweeps.chunk import Edit
from sim.sweeps.grammar import Grammar, PointSettings, Setting

SWEEP = "sweep"
"""The configuration in ``conf/`` that sweeps compose, and its group of settings of a sweep."""
_FILE = "file://"
_OF_THE_ENVIRONMENT = re.compile(r"\$\{oc\.env:[^${}]*\}")


def sweep_config(overrides: Sequence[str]) -> Any:
    """Return what Hydra composes of ``conf/sweep.yaml``, its own node ``hydra`` included."""
    from hydra import compose

    return compose(SWEEP, overrides=list(overrides), return_hydra_config=True)


class Composer:
    """Gives each point its base and its edits; only within :func:`sim.composing.composing`.

    Parameters
    ----------
    fixed
        Overrides that all points share, in order; those of ``hydra.*`` too.
    """

    def __init__(self, fixed: Sequence[str]) -> None:
        self.bases: dict[int, dict[str, Any]] = {}
        self._fixed = list(fixed)
        self._numbers: dict[tuple[str, ...], int] = {}
        self._composed: dict[int, Any] = {}
        self._checked: set[tuple[int, str]] = set()
        self._groups: dict[str, bool] = {}
        self._folders = folders_of(fixed)

    def place(self, settings: PointSettings) -> tuple[int, tuple[Edit, ...]]:
        """Return the number of a point's base, and what the point changes there.

        Raises the error of Hydra for a key or an option that does not exist.
        """
        easy = [setting for setting in settings if self._is_easy(setting)]
        hard = [setting for setting in settings if not self._is_easy(setting)]
        if _meet(easy, [setting for setting in hard if not self._is_group(setting.key)]):
            easy, hard = [], list(settings)
        number = self._base_of(tuple(setting.text for setting in hard))
        if easy and not self._may_edit(number, easy):
            return self._base_of(tuple(setting.text for setting in settings)), ()
        return number, tuple((tuple(s.key.split(".")), s.value) for s in easy)

    def _is_easy(self, setting: Setting) -> bool:
        """Tell whether a setting only puts a value somewhere."""
        return (
            not setting.text.startswith("~")
            and not isinstance(setting.value, Mapping)
            and "${" not in str(setting.value)  # the text may have escapes
            and not any(name.isdigit() for name in setting.key.split("."))  # a place in a list
            and not self._is_group(setting.key)
        )

    def _is_group(self, key: str) -> bool:
        if key not in self._groups:
            from hydra.core.global_hydra import GlobalHydra

            known: Any = GlobalHydra.instance().config_loader()
            self._groups[key] = (
                "@" in key
                or "/" in key
                or known.repository.group_exists(key)
                or any((folder / key).is_dir() for folder in self._folders)
            )
        return self._groups[key]

    def _base_of(self, texts: tuple[str, ...]) -> int:
        from hydra import compose
        from omegaconf import OmegaConf

        if texts not in self._numbers:
            config = compose(SWEEP, overrides=[*self._fixed, *texts])
            raw = OmegaConf.to_container(config, resolve=False)
            plain: Any = OmegaConf.to_container(config, resolve=True)
            plain.pop(SWEEP)
            number = len(self.bases)
            self.bases[number] = plain
            self._composed[number] = None if _has_references(raw) else config
            self._numbers[texts] = number
        return self._numbers[texts]

    def _may_edit(self, number: int, easy: Sequence[Setting]) -> bool:
        """Tell whether values can be put into a base; if not, Hydra is asked, and says why."""
        from hydra.errors import HydraException
        from omegaconf.errors import OmegaConfBaseException

        if self._composed[number] is None:  # it has interpolations, which may read any value
            return False
        try:
            for setting in easy:
                self._check(number, setting)
        except (HydraException, OmegaConfBaseException):
            return False
        return True

    def _check(self, number: int, setting: Setting) -> None:
        """Let Hydra put one value of each key there, which tells whether it may be put."""
        from hydra._internal.config_loader_impl import ConfigLoaderImpl
        from hydra.core.override_parser.overrides_parser import OverridesParser

        sort = setting.text.partition("=")[0]  # of a key, with its + or ++
        if (number, sort) in self._checked:
            return
        override = OverridesParser.create().parse_override(setting.text)
        ConfigLoaderImpl._apply_overrides_to_config([override], deepcopy(self._composed[number]))
        self._checked.add((number, sort))


def folders_of(overrides: Sequence[str]) -> list[Path]:
    """Return the folders of the user's own options."""
    texts = [text for text in overrides if text.partition("=")[0] == SEARCHPATH]
    places = [str(place) for text in texts for place in Grammar().setting(text).value]
    return [Path(place.removeprefix(_FILE)) for place in places if place.startswith(_FILE)]


def _has_references(raw: Any) -> bool:
    """Tell whether a configuration has interpolations of other values than the environment's."""
    if isinstance(raw, Mapping):
        return any(map(_has_references, raw.values()))
    if isinstance(raw, list):
        return any(map(_has_references, raw))
    return isinstance(raw, str) and "${" in _OF_THE_ENVIRONMENT.sub("", raw)


def _meet(easy: Sequence[Setting], hard: Sequence[Setting]) -> bool:
    """Tell whether any of ``easy`` lies within what one of ``hard`` sets, or around it: order matters."""
    paths = [f"{setting.key}." for setting in hard]
    own = [f"{setting.key}." for setting in easy]
    return any(mine.startswith(path) or path.startswith(mine) for mine in own for path in paths)
