"""How well a fit predicts rows it has not seen: each row, or group of rows, left out in turn."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hwmodels.fitting import Array, Problem, Solution
from hwmodels.uncertainty import data_shares

_FELT = 0.02
"""Change of a row's time, over one spread of a parameter, from which on the row depends on it."""
_STRAIGHT = 0.1
"""Sigmas by which straight lines may miss a row before they are drawn anew, ``_ROUNDS`` times at most."""
_ROUNDS = 5
_TOLD = 1e-6
_LITTLE = 0.25
"""Share of a prior's variance below which the other rows say little of a parameter."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A row as the fit of the others predicts it.

    ``residual`` is log(predicted / measured). ``rests_on`` are the parameters on which the row depends
    and that the other rows leave to the prior.
    """

    predicted: float
    residual: float
    rests_on: tuple[str, ...]


def leave_out(
    problem: Problem, solution: Solution, groups: Sequence[Hashable] | None = None
) -> list[LeftOut]:
    """Return each row as predicted by a fit without it, and without all of its group (None: alone).

    Each fit starts where that of all rows ended, and goes on in straight lines until those hold on to a
    tenth of sigma. Where no row is left, the prior alone predicts.
    """
    keys = list(range(len(problem.measured))) if groups is None else list(groups)
    if len(keys) != len(problem.measured):
        raise ValueError(f"groups = {len(keys)}: must be one a row, {len(problem.measured)}")
    found: dict[int, LeftOut] = {}
    for key in dict.fromkeys(keys):
        used = np.array([other != key for other in keys])
        refit = _refit(problem, solution, used)
        shares = data_shares(problem, refit)
        felt = np.abs(refit.jacobian) * problem.spreads * problem.sigmas[:, None] >= _FELT
        for row in np.flatnonzero(~used):
            rests = [
                n
                for n, f, s in zip(problem.names, felt[row], shares, strict=True)
                if f and s < _LITTLE
            ]
            residual = float(refit.residuals[row] * problem.sigmas[row])
            found[int(row)] = LeftOut(float(refit.predicted[row]), residual, tuple(rests))
    return [found[row] for row in range(len(keys))]


def _refit(problem: Problem, solution: Solution, used: NDArray[np.bool_]) -> Solution:
    if not used.any():
        return problem.solve(used, _prior(problem))
    around, start = solution, _start(problem, solution, used)
    for _ in range(_ROUNDS):
        straight = _Straight(problem, around).solve(used, start)
        residuals = problem.residuals(straight.inner)
        if np.abs(residuals - straight.residuals).max() <= _STRAIGHT:
            predicted = problem.measured * np.exp(residuals * problem.sigmas)
            return replace(straight, residuals=residuals, predicted=predicted)
        around, start = problem.at(straight.inner, used), straight.inner
    return problem.solve(used, start)


def _start(problem: Problem, solution: Solution, used: NDArray[np.bool_]) -> Array:
    """Return where all rows left the fit; a parameter that the rows left out alone tell of starts anew."""
    start = solution.inner.copy()
    told = np.abs(solution.jacobian[used] * problem.spreads).max(axis=0) > _TOLD
    for i, parameter in enumerate(problem.parameters):
        if not told[i]:
            start[i] = parameter.inner(parameter.start)
    return start


class _Straight(Problem):
    """A problem as it looks from a solution: residuals on straight lines, which cost no predictions."""

    def __init__(self, problem: Problem, solution: Solution) -> None:
        self.__dict__ = dict(problem.__dict__)
        self._solution = solution

    def residuals(self, inner: Array) -> Array:
        moved = self._solution.jacobian @ (inner - self._solution.inner)
        return np.asarray(self._solution.residuals + moved)

    def jacobian(self, inner: Array) -> Array:
        return self._solution.jacobian


def _prior(problem: Problem) -> np.ndarray:
    return np.array(
        [p.inner(p.start if p.prior_mean is None else p.prior_mean) for p in problem.parameters]
    ).clip(
        [p.inner(p.low) for p in problem.parameters], [p.inner(p.high) for p in problem.parameters]
    )
