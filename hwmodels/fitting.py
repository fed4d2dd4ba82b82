"""Fits named parameters to measured times: least squares on log(predicted / measured) / sigma, with priors.

The error of a prediction is a ratio, so that a row of 10 us counts as much as one of a second, and one
twice too long as much as one of half the time. A parameter with a prior adds one term, as if its prior
mean had been measured with the prior's standard deviation; bounds are hard. What the answer is worth is in
:mod:`hwmodels.uncertainty` and :mod:`hwmodels.leave_out`. The same input gives the same answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hwmodels.errors import HardwareError, figure_error

Predict = Callable[[Mapping[str, float]], Sequence[float]]
"""The times of all rows at some values of the parameters, in the unit of what was measured."""
Array = NDArray[np.float64]

LOSSES = ("linear", "soft_l1")
_STEP = 1e-2
"""Of a derivative, relative: whole nanoseconds make a smaller one rough."""
_SMALL = 1000
"""Whole parameters below it are interpolated: from one value to the next a time may jump."""
_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Parameter:
    """A figure to be fitted, between ``low`` and ``high``.

    ``prior_sd`` is in the parameter's own unit; of a ``log`` parameter, which is fitted in its logarithm,
    it counts as the share prior_sd / prior_mean. A ``whole`` one ends as a whole number.
    """

    name: str
    start: float
    low: float
    high: float
    prior_mean: float | None = None
    prior_sd: float | None = None
    log: bool = True
    whole: bool = False

    def __post_init__(self) -> None:
        """Raise HardwareError for the first figure that cannot be."""
        self._check("low", self.low, self.low > 0 or not self.log, "> 0 on a log scale")
        self._check("high", self.high, self.high > self.low, f"> low = {self.low:g}")
        is_between = self.low <= self.start <= self.high
        self._check("start", self.start, is_between, f"in [{self.low:g}, {self.high:g}]")
        if (self.prior_mean is None) != (self.prior_sd is None):
            raise figure_error(self.name, "prior", self.prior_mean, "must have a mean and an sd")
        if self.prior_mean is not None and self.prior_sd is not None:
            is_good = self.prior_mean > 0 or not self.log
            self._check("prior mean", self.prior_mean, is_good, "> 0 on a log scale")
            self._check("prior sd", self.prior_sd, self.prior_sd > 0, "> 0")

    def _check(self, field: str, value: float, is_good: bool, rule: str) -> None:
        if not (math.isfinite(value) and is_good):
            raise figure_error(self.name, field, value, f"must be finite and {rule}")

    def inner(self, value: float) -> float:
        """Return a value on the scale on which it is fitted."""
        return math.log(value) if self.log else value

    def outer(self, inner: float) -> float:
        """Return what :meth:`inner` had been given, kept within the bounds."""
        value = math.exp(inner) if self.log else inner
        if self.whole and abs(value - round(value)) < 1e-9 * abs(value):  # exp(log(30)) is not 30
            value = round(value)
        return min(self.high, max(self.low, value))

    @property
    def spread(self) -> float:
        """What the parameter may plausibly move by, inner: the prior's sd, else a quarter of the bounds."""
        if self.prior_sd is not None and self.prior_mean is not None:
            return self.prior_sd / self.prior_mean if self.log else self.prior_sd
        return (self.inner(self.high) - self.inner(self.low)) / 4


@dataclass(frozen=True, slots=True)
class Solution:
    """Where a fit ended: what all that judges it starts from.

    ``inner`` are the values on the fitted scale; ``jacobian``, float[rows, parameters], is that of
    ``residuals`` = log(predicted / measured) / sigma by them, without priors; ``used`` says which rows the
    fit saw.
    """

    inner: Array
    values: dict[str, float]
    predicted: Array
    residuals: Array
    jacobian: Array
    used: NDArray[np.bool_]
    converged: bool


class Problem:
    """What is measured, what may change, and how a prediction follows from it.

    Parameters
    ----------
    parameters
        What is fitted; no two of one name.
    predict
        Times of all rows for the values of all parameters; must not depend on what it was asked before.
    measured
        One time a row, > 0.
    sigmas
        The relative error that each row may have, its own and the model's; one number for all.
    loss
        ``linear``: least squares; ``soft_l1``: rows that miss by more than sigma count less.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        predict: Predict,
        measured: Sequence[float],
        sigmas: Sequence[float] | float = 0.05,
        loss: str = "linear",
    ) -> None:
        self.parameters = tuple(parameters)
        self.names = [parameter.name for parameter in self.parameters]
        self.measured = np.array(measured, dtype=np.float64)
        self.sigmas = np.broadcast_to(np.array(sigmas, dtype=np.float64), self.measured.shape)
        self.spreads = np.array([p.spread for p in self.parameters])
        self._predict = predict
        self._loss = loss
        self._check()

    def _check(self) -> None:
        if not len(self.parameters):
            raise HardwareError("fit: parameters = []: must have at least one")
        if twice := [n for i, n in enumerate(self.names) if n in self.names[:i]]:
            raise HardwareError(f"fit: parameters = {twice[0]}: must be named once")
        if not len(self.measured):
            raise HardwareError("fit: measured = []: must have at least one row")
        if self._loss not in LOSSES:
            raise HardwareError(f"fit: loss = {self._loss}: must be {' or '.join(LOSSES)}")
        for what, column in (("measured", self.measured), ("sigmas", self.sigmas)):
            for row in np.flatnonzero(~(np.isfinite(column) & (column > 0))):
                raise figure_error("fit", f"{what}[{row}]", column[row], "must be finite and > 0")

    # -- predictions -------------------------------------------------------------------------------

    def values(self, inner: Array) -> dict[str, float]:
        """Return the parameters' values by name."""
        return {p.name: p.outer(float(z)) for p, z in zip(self.parameters, inner, strict=True)}

    def log_times(self, values: Mapping[str, float]) -> Array:
        """Return the logarithms of all rows' times; between whole numbers on straight lines."""
        whole = {
            p.name: math.floor(values[p.name]) for p in self.parameters if self._steps(p, values)
        }
        large = {p.name: round(values[p.name]) for p in self.parameters if p.whole}
        base = {**values, **large, **whole}
        at_base = logs = self._asked(base)
        for name, floor in whole.items():
            share = values[name] - floor
            if share > 0:
                logs = logs + share * (self._asked({**base, name: floor + 1}) - at_base)
        return logs

    @staticmethod
    def _steps(parameter: Parameter, values: Mapping[str, float]) -> bool:
        return parameter.whole and values[parameter.name] < _SMALL

    def _asked(self, values: Mapping[str, float]) -> Array:
        times = np.array(self._predict(values), dtype=np.float64)
        if times.shape != self.measured.shape:
            rule = f"must have the {len(self.measured)} of measured"
            raise HardwareError(f"fit: predict = {times.size} rows: {rule}")
        for row in np.flatnonzero(~(np.isfinite(times) & (times > 0))):
            at = ", ".join(f"{name} = {value:g}" for name, value in values.items())
            rule = f"must be finite and > 0 ({at})"
            raise figure_error("fit", f"predict[{row}]", times[row], rule)
        return np.log(times)

    def residuals(self, inner: Array) -> Array:
        """Return log(predicted / measured) / sigma of all rows."""
        logs = self.log_times(self.values(inner))
        return np.asarray((logs - np.log(self.measured)) / self.sigmas)

    def jacobian(self, inner: Array) -> Array:
        """Return the derivatives of :meth:`residuals`: differences to both sides, within the bounds."""
        columns = []
        for i, parameter in enumerate(self.parameters):
            step = _STEP if parameter.log else _STEP * max(abs(inner[i]), parameter.spread)
            low, high = parameter.inner(parameter.low), parameter.inner(parameter.high)
            before, after = inner.copy(), inner.copy()
            before[i], after[i] = max(low, inner[i] - step), min(high, inner[i] + step)
            change = self.residuals(after) - self.residuals(before)
            columns.append(change / (after[i] - before[i]))
        return np.stack(columns, axis=1)

    # -- the fit -----------------------------------------------------------------------------------

    def solve(
        self,
        used: Sequence[bool] | NDArray[np.bool_] | None = None,
        start: Array | None = None,
        fixed: Sequence[int] = (),
    ) -> Solution:
        """Return the best values for the rows in use (all).

        ``start`` stands for the parameters' own; those of index ``fixed`` stay where they start.
        """
        rows = np.ones(len(self.measured), dtype=bool) if used is None else np.array(used, bool)
        if start is None:
            start = np.array([p.inner(p.start) for p in self.parameters])
        inner, converged = start.copy(), True
        free = [i for i in range(len(self.parameters)) if i not in fixed]
        if free and rows.any():
            inner[free], converged = self._least_squares(rows, start, free)
        return self.at(inner, rows, converged)

    def at(self, inner: Array, used: NDArray[np.bool_], converged: bool = True) -> Solution:
        """Return these values as a solution."""
        residuals = self.residuals(inner)
        return Solution(
            inner=inner,
            values=self.values(inner),
            predicted=self.measured * np.exp(residuals * self.sigmas),
            residuals=residuals,
            jacobian=self.jacobian(inner),
            used=used,
            converged=converged,
        )

    def _least_squares(
        self, rows: NDArray[np.bool_], start: Array, free: Sequence[int]
    ) -> tuple[Array, bool]:
        least_squares = _solver()
        priors = [i for i in free if self.parameters[i].prior_mean is not None]
        means = np.array(
            [self.parameters[i].inner(self.parameters[i].prior_mean or 0) for i in priors]
        )
        count, at = int(rows.sum()), start.copy()

        def residuals(inner: Array) -> Array:
            at[free] = inner
            return np.concatenate(
                [self.residuals(at)[rows], (at[priors] - means) / self.spreads[priors]]
            )

        def jacobian(inner: Array) -> Array:
            at[free] = inner
            towards = np.zeros((len(priors), len(self.parameters)))
            towards[range(len(priors)), priors] = 1 / self.spreads[priors]
            return np.concatenate([self.jacobian(at)[rows], towards])[:, list(free)]

        chosen = [self.parameters[i] for i in free]
        bounds = [p.inner(p.low) for p in chosen], [p.inner(p.high) for p in chosen]
        found = least_squares(
            residuals, np.clip(start[free], *bounds), jac=jacobian, bounds=bounds,
            x_scale=self.spreads[free], loss=lambda squares: self._rho(squares, count),
            ftol=_TOLERANCE, xtol=_TOLERANCE, gtol=_TOLERANCE, max_nfev=100,
        )  # fmt: skip
        return found.x, bool(found.status > 0)

    def _rho(self, squares: Array, num_rows: int) -> Array:
        """Return the loss and its two derivatives; priors always count by their squares."""
        rho = np.stack([squares, np.ones_like(squares), np.zeros_like(squares)])
        if self._loss == "soft_l1":
            z = 1 + squares[:num_rows]
            rho[:, :num_rows] = 2 * (z**0.5 - 1), z**-0.5, -0.5 * z**-1.5
        return rho

    def weights(self, solution: Solution) -> Array:
        """Return by how much each row counts in the end: 1, less under a robust loss, 0 if not used."""
        slope = self._rho(solution.residuals**2, len(self.measured))[1]
        return np.where(solution.used, slope, 0.0)


def best(problem: Problem) -> Solution:
    """Return the best values: whole ones are rounded, and the others then fitted once more."""
    found = problem.solve()
    inner, fixed = found.inner.copy(), []
    for i, parameter in enumerate(problem.parameters):
        value = math.floor(found.values[parameter.name] + 0.5)
        if parameter.whole and value < _SMALL:
            inner[i] = parameter.inner(min(max(value, parameter.low), parameter.high))
            fixed.append(i)
    return problem.solve(start=inner, fixed=fixed) if fixed else found


def _solver() -> Any:
    try:
        from scipy.optimize import least_squares
    except ImportError as error:
        raise HardwareError(
            "fit: scipy is not installed; pip install 'greenroom[fit]', in a checkout: "
            "pip install -c constraints.txt -e '.[fit]'"
        ) from error
    return least_squares
