"""Who is the fastest: policies of one class, setting by setting.

A *setting* is as in ``sim/league.py``. Policies are compared in the settings in which all of their class
ran; where there is none, those that ran in most settings are, in the settings that these share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from sim.html.words import setting_words
from sim.labels import Row
from sim.league import CLASSES, geometric, kind_of, setting_fields, settings_of
from sim.report_table import natural

TIE = 0.01
"""Speeds that differ by no more than this share are called a tie."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting in words, and the rows that ran in it by name."""

    words: str
    rows: dict[str, Row]

    def speed(self, name: str) -> float:
        """Return the tokens/s of a policy that ran here."""
        return float(self.rows[name]["tokens_per_s"])

    def of(self, kind: str) -> list[str]:
        """Return the policies of a class that ran here, the fastest first."""
        found = [name for name, row in self.rows.items() if kind_of(row) == kind]
        return sorted(found, key=lambda name: (-self.speed(name), name))

    def fastest(self, names: Sequence[str]) -> list[str]:
        """Return which of these policies tie with the fastest of them, itself first."""
        here = sorted(names, key=lambda name: (-self.speed(name), name))
        return [name for name in here if ties(self.speed(name), self.speed(here[0]))]


def ties(one: float, other: float) -> bool:
    """Tell whether two speeds are called equal."""
    return min(one, other) >= (1 - TIE) * max(one, other)


def all_settings(rows: Sequence[Row]) -> list[Setting]:
    """Return the settings of rows that have a speed, in order of their values."""
    fields, found = setting_fields(rows), settings_of(rows)
    return [Setting(setting_words(fields, key), found[key]) for key in sorted(found, key=natural)]


@dataclass(frozen=True)
class Contest:
    """The policies of a class, and the settings in which any of them ran."""

    kind: str
    settings: list[Setting]

    @cached_property
    def names(self) -> list[str]:
        """All policies of the class, as they come."""
        return list(dict.fromkeys(name for one in self.settings for name in one.of(self.kind)))

    @cached_property
    def compared(self) -> list[str]:
        """The policies that are compared."""
        if any(len(setting.of(self.kind)) == len(self.names) for setting in self.settings):
            return self.names
        most = max(len(self.where(name)) for name in self.names)
        return [name for name in self.names if len(self.where(name)) == most]

    @cached_property
    def shared(self) -> list[Setting]:
        """The settings in which they are compared."""
        return [one for one in self.settings if all(name in one.rows for name in self.compared)]

    @cached_property
    def ranking(self) -> list[str]:
        """Who is compared, by the geometric mean of the speeds, the fastest first."""
        return sorted(self.compared, key=lambda name: (-self.mean(name), name))

    @cached_property
    def leaders(self) -> list[str]:
        """Who ties with the fastest in the mean, itself first."""
        best = self.mean(self.ranking[0])
        return [name for name in self.ranking if ties(self.mean(name), best)]

    def where(self, name: str) -> list[Setting]:
        """Return the settings in which a policy ran."""
        return [setting for setting in self.settings if name in setting.rows]

    def mean(self, name: str) -> float:
        """Return the geometric mean of a policy's tokens/s where all are compared."""
        return geometric([setting.speed(name) for setting in self.shared])

    def ratios(self, name: str, other: str) -> list[float]:
        """Return a policy's speed over another one's, of whatever class, where both ran."""
        both = [setting for setting in self.shared if other in setting.rows]
        return [setting.speed(name) / setting.speed(other) for setting in both]


def contests(rows: Sequence[Row]) -> dict[str, Contest]:
    """Return a contest for each class that ran, the class that counts most first."""
    settings = all_settings(rows)
    found = {}
    for kind in CLASSES:
        own = [setting for setting in settings if setting.of(kind)]
        if own:
            found[kind] = Contest(kind, own)
    return found
