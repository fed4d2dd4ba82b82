"""Points chosen after what earlier ones came to: Optuna's tree-structured Parzen estimator (TPE).

Nothing is kept on disk: the same seed and the same results, told in the same batches, make the same points,
so that a sweep that was stopped goes on by being told again what is known.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import isfinite
from typing import TYPE_CHECKING, Any

from sim.sweeps.grammar import PointSettings, Setting
from sim.sweeps.space import Asked, Axis, split, varying
from sim.types import ConfigError

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.distributions import BaseDistribution

_MOST_DRAWN = 10
INSTALL = (
    "pip install 'greenroom[search]', in a checkout: pip install -c constraints.txt -e '.[search]'"
)


class OptunaSearch:
    """A sweep whose batches are each chosen by the results of those before.

    Parameters
    ----------
    axes
        What the command line says.
    settings
        Of these: points, batch, seed, direction.
    """

    def __init__(self, axes: Sequence[Axis], settings: Asked) -> None:
        self.fixed, self._axes = split(axes)
        self.num_points = int(settings.points or 0)
        self._batch = int(settings.batch or self.num_points)
        self._choices = {axis.key: _Choice(axis) for axis in varying(self._axes, "optuna")}
        self._waiting: list[Trial] = []
        self._study = _study(settings.seed, settings.direction, self.num_points)

    def batches(self) -> Iterator[list[PointSettings]]:
        """Yield a batch of points at a time; each must be told of before the next."""
        space = {key: choice.distribution() for key, choice in self._choices.items()}
        for first in range(0, self.num_points, self._batch):
            if self._waiting:
                raise RuntimeError("the results of the batch before have not been told")
            number = min(self._batch, self.num_points - first)
            with _quiet():
                self._waiting = [self._study.ask(space) for _ in range(number)]
            yield [self._settings(trial) for trial in self._waiting]

    def tell(self, values: Sequence[float | None]) -> None:
        """Take the objective of each point of the batch just yielded; None or no number: it failed."""
        from optuna.trial import TrialState

        if len(values) != len(self._waiting):
            raise ValueError(f"{len(values)} results of {len(self._waiting)} points")
        with _quiet():
            for trial, value in zip(self._waiting, values, strict=True):
                if value is None or not isfinite(value):
                    self._study.tell(trial, state=TrialState.FAIL)
                else:
                    self._study.tell(trial, value)
        self._waiting = []

    def _settings(self, trial: Trial) -> PointSettings:
        return tuple(
            axis.settings[0]
            if axis.is_fixed
            else self._choices[axis.key].setting(trial.params[axis.key])
            for axis in self._axes
        )


class _Choice:
    """What a key may be, as Optuna takes it: a number, a place in a range(), or one of some texts."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._by_text = {setting.text: setting for setting in axis.settings}

    def distribution(self) -> BaseDistribution:
        """Return what Optuna draws."""
        from optuna import distributions as kinds

        interval = self._axis.interval
        if interval is None and self._axis.is_ordered:
            return kinds.IntDistribution(0, len(self._axis.settings) - 1)
        if interval is None:
            return kinds.CategoricalDistribution(list(self._by_text))
        if interval.whole:
            return kinds.IntDistribution(int(interval.low), int(interval.high), log=interval.log)
        return kinds.FloatDistribution(interval.low, interval.high, log=interval.log)

    def setting(self, drawn: Any) -> Setting:
        """Return the setting of what Optuna has drawn."""
        interval = self._axis.interval
        if interval is None:
            return self._axis.settings[drawn] if self._axis.is_ordered else self._by_text[drawn]
        if interval.whole:
            return interval.setting(self._axis.key, int(drawn))
        value = interval.rounded(float(drawn), interval.low, interval.high)
        return interval.setting(self._axis.key, value)


def _study(seed: int, direction: str, points: int) -> Study:
    """Return what learns, after a quarter of the points and ten at most that it draws at random."""
    try:
        import optuna
    except ModuleNotFoundError as error:
        if error.name != "optuna":
            raise
        raise ConfigError(f"sweep.search = optuna: Optuna is not installed; {INSTALL}") from None
    from optuna.study import StudyDirection

    with _quiet():
        sampler = optuna.samplers.TPESampler(
            seed=seed,
            n_startup_trials=min(_MOST_DRAWN, max(1, points // 4)),
            multivariate=False,  # with a few dozen points it found better ones than True
            constant_liar=True,  # keeps the points of a batch apart
        )
        return optuna.create_study(sampler=sampler, direction=StudyDirection[direction.upper()])


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Optuna from telling of every trial, and of what it calls experimental."""
    from optuna import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)
