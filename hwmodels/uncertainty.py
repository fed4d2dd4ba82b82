"""What a fit is worth: intervals, what the data decided and what the prior did, what cannot be told apart.

All of it is linear around the solution. Residuals larger than the sigmas that were stated widen the
intervals, as the model then errs more than was thought; smaller ones do not narrow them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from hwmodels.fitting import Array, Parameter, Problem, Solution

MUCH = 0.75
"""Share of a prior's variance that the data must take away to be said to decide: half its sd."""
_UNKNOWN = 1e-8
"""Information, in spreads, below which a direction counts as free."""
_AT_BOUND = 5e-3


@dataclass(frozen=True, slots=True)
class Estimate:
    """A fitted parameter.

    ``standard_error`` is in the parameter's own unit, inf where nothing limits it; the intervals end at
    the bounds at the latest. ``data_share`` is the share of the prior's variance (of that of the bounds
    where there is no prior) that the data took away: near 0 the prior decided. ``bound`` is the one the
    value lies at, ``low``, ``high`` or None.
    """

    parameter: Parameter
    value: float
    standard_error: float
    interval_68: tuple[float, float]
    interval_95: tuple[float, float]
    data_share: float
    bound: str | None

    @property
    def decided_by(self) -> str:
        """Who decided: ``data``, ``prior`` (``bounds`` where there is none) or ``both``."""
        if self.data_share >= MUCH:
            return "data"
        if self.data_share > 1 - MUCH:
            return "both"
        return "bounds" if self.parameter.prior_mean is None else "prior"


@dataclass(frozen=True, slots=True)
class Direction:
    """A change of several parameters at once, or of one, that the data do not see.

    ``moves`` has each parameter and its new value, largest move first; ``signal`` is by how many sigmas
    all rows together change, for a move of one prior sd: below 1 the prior decides.
    """

    moves: tuple[tuple[str, float], ...]
    weights: tuple[float, ...]
    signal: float


@dataclass(frozen=True, slots=True)
class Fit:
    """A fit with all that is known of it.

    ``residuals`` are log(predicted / measured) by row; ``inflation`` is by how much the residuals exceed
    what was stated, and widen the intervals, at least 1; ``degrees`` the rows beyond what was fitted;
    ``correlation`` is float[parameters, parameters].
    """

    solution: Solution
    estimates: tuple[Estimate, ...]
    measured: Array
    predicted: Array
    residuals: Array
    correlation: Array
    directions: tuple[Direction, ...]
    inflation: float
    degrees: float

    @property
    def values(self) -> dict[str, float]:
        """The fitted values by name."""
        return dict(self.solution.values)

    def pairs(self, least: float = 0.9) -> list[tuple[str, str, float]]:
        """Return the pairs whose errors go together, with their correlation, the closest first."""
        names = [estimate.parameter.name for estimate in self.estimates]
        found = [
            (names[i], names[j], float(self.correlation[i, j]))
            for i, j in combinations(range(len(names)), 2)
            if abs(self.correlation[i, j]) >= least
        ]
        return sorted(found, key=lambda pair: -abs(pair[2]))


def judge(problem: Problem, solution: Solution) -> Fit:
    """Return the fit of a solution."""
    data = solution.jacobian * np.sqrt(problem.weights(solution))[:, None]
    inflation, degrees = _inflation(problem, solution, data)
    scaled = data / inflation * problem.spreads
    covariance, free = _covariance(scaled, _prior_information(problem))
    quantiles = _quantiles(degrees if inflation > 1 else math.inf)
    deviations = np.sqrt(np.diag(covariance)) * problem.spreads
    shares = np.clip(1 - np.diag(covariance), 0, 1) * ~free
    estimates = tuple(
        _estimate(p, float(z), math.inf if free[i] else float(deviations[i]), quantiles, shares[i])
        for i, (p, z) in enumerate(zip(problem.parameters, solution.inner, strict=True))
    )
    root = np.sqrt(np.diag(covariance))
    return Fit(
        solution=solution,
        estimates=estimates,
        measured=problem.measured,
        predicted=solution.predicted,
        residuals=solution.residuals * problem.sigmas,
        correlation=covariance / np.outer(root, root),
        directions=_directions(problem, solution, scaled),
        inflation=inflation,
        degrees=degrees,
    )


def data_shares(problem: Problem, solution: Solution) -> Array:
    """Return of each parameter the share of its prior's variance that the rows in use took away."""
    data = solution.jacobian * np.sqrt(problem.weights(solution))[:, None] * problem.spreads
    covariance, free = _covariance(data, _prior_information(problem))
    return np.clip(1 - np.diag(covariance), 0, 1) * ~free


def _prior_information(problem: Problem) -> Array:
    return np.array([0.0 if p.prior_mean is None else 1.0 for p in problem.parameters])


def _inflation(problem: Problem, solution: Solution, data: Array) -> tuple[float, float]:
    """Return sqrt(chi squared / degrees of freedom), at least 1, and the degrees."""
    scaled = data * problem.spreads
    covariance, _ = _covariance(scaled, _prior_information(problem))
    fitted = float(np.einsum("ri,ij,rj->", scaled, covariance, scaled))
    degrees = max(0.0, float(solution.used.sum()) - fitted)
    if degrees < 1:  # too few rows to say
        return 1.0, degrees
    squares = float(problem.weights(solution) @ solution.residuals**2)
    return max(1.0, math.sqrt(squares / degrees)), degrees


def _covariance(scaled: Array, prior: Array) -> tuple[Array, np.ndarray]:
    """Return the covariance in spreads, and which parameters nothing limits.

    Where nothing does, the variance is that of one spread along the free direction.
    """
    size, vectors = np.linalg.eigh(scaled.T @ scaled + np.diag(prior))
    is_free = size < _UNKNOWN
    inverse = np.where(is_free, 1.0, 1 / np.maximum(size, _UNKNOWN))
    free = (vectors[:, is_free] ** 2).sum(axis=1) > 1e-6
    return (vectors * inverse) @ vectors.T, free


def _quantiles(degrees: float) -> tuple[float, float]:
    """Return the half widths, in standard errors, of the 68 and 95 % intervals (Student's t)."""
    from scipy.special import ndtri, stdtrit

    if math.isinf(degrees):
        return float(ndtri(0.84)), float(ndtri(0.975))
    return float(stdtrit(degrees, 0.84)), float(stdtrit(degrees, 0.975))


def _estimate(
    parameter: Parameter,
    inner: float,
    deviation: float,
    quantiles: tuple[float, float],
    share: float,
) -> Estimate:
    value = parameter.outer(inner)

    def interval(width: float) -> tuple[float, float]:
        if math.isinf(deviation):
            return parameter.low, parameter.high
        at = [
            min(inner + sign * width * deviation, 700.0) for sign in (-1, 1)
        ]  # exp(710) is too large
        return parameter.outer(at[0]), parameter.outer(at[1])

    low, high = parameter.inner(parameter.low), parameter.inner(parameter.high)
    near = _AT_BOUND * (high - low)
    bound = "low" if inner - low < near else "high" if high - inner < near else None
    error = deviation * value if parameter.log else deviation
    at_68, at_95 = interval(quantiles[0]), interval(quantiles[1])
    return Estimate(parameter, value, error, at_68, at_95, float(share), bound)


# -- what cannot be told apart ---------------------------------------------------------------------


def _directions(problem: Problem, solution: Solution, scaled: Array) -> tuple[Direction, ...]:
    """Return the directions along which the data say less than the prior: singular values below 1.

    Parameters of which the data say nothing at all are directions of their own.
    """
    norms = np.linalg.norm(scaled, axis=0)
    silent = [i for i in range(len(norms)) if norms[i] < 1e-3]
    heard = [i for i in range(len(norms)) if norms[i] >= 1e-3]
    found = [_direction(problem, solution, np.eye(len(norms))[i], norms[i]) for i in silent]
    if heard:
        _, signals, rows = np.linalg.svd(scaled[:, heard], full_matrices=True)
        signals = np.concatenate([signals, np.zeros(len(heard) - len(signals))])
        weak = rows[signals < 1].T
        for column in _sparse(weak).T:
            whole = np.zeros(len(norms))
            whole[heard] = column
            found.append(
                _direction(problem, solution, whole, float(np.linalg.norm(scaled @ whole)))
            )
    return tuple(sorted(found, key=lambda direction: direction.signal))


def _direction(problem: Problem, solution: Solution, weights: Array, signal: float) -> Direction:
    order = np.argsort(-np.abs(weights), kind="stable")
    weights = weights * np.sign(weights[order[0]])
    named = [int(i) for i in order if abs(weights[i]) >= 0.2]
    moves = []
    for i in named:
        parameter = problem.parameters[i]
        moved = solution.inner[i] + weights[i] * problem.spreads[i]
        moves.append((parameter.name, math.exp(moved) if parameter.log else float(moved)))
    return Direction(tuple(moves), tuple(float(weights[i]) for i in named), float(signal))


def _sparse(columns: Array) -> Array:
    """Turn the basis of a space so that each vector has few large entries (quartimax)."""
    count = columns.shape[1]
    start = np.random.default_rng(0).standard_normal(
        (count, count)
    )  # an even mixture would stay one
    turned = columns @ np.linalg.qr(start)[0]
    for _ in range(100):
        if turned.shape[1] < 2:
            break
        left, _, right = np.linalg.svd(columns.T @ turned**3)
        step = columns @ (left @ right)
        if np.abs(step - turned).max() < 1e-9:
            break
        turned = step
    return turned
