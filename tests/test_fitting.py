"""Fits find the truth they are given, and say of what the data do not tell."""

from __future__ import annotations

import builtins
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from hwmodels.errors import HardwareError
from hwmodels.fitting import Parameter, Problem, best
from hwmodels.leave_out import leave_out
from hwmodels.uncertainty import Fit, judge

SIZES = [2.0**i for i in range(4, 16)]


def affine(values: Mapping[str, float]) -> list[float]:
    """Times of copies of SIZES: a setup, and a rate."""
    return [values["setup"] + size / values["rate"] for size in SIZES]


AFFINE = affine({"setup": 100.0, "rate": 20.0})


def setup(**changes: Any) -> Parameter:
    return Parameter(**{"name": "setup", "start": 10, "low": 1, "high": 1e4, **changes})


def rate(**changes: Any) -> Parameter:
    return Parameter(**{"name": "rate", "start": 1, "low": 0.1, "high": 1e3, **changes})


def fitted(problem: Problem) -> Fit:
    return judge(problem, best(problem))


def test_exact_times_give_back_the_truth() -> None:
    truth = {"setup": 100.0, "rate": 20.0}
    fit = fitted(Problem([setup(), rate()], affine, affine(truth), 0.01))
    assert fit.values == pytest.approx(truth, rel=1e-5)
    assert fit.inflation == 1
    assert [e.decided_by for e in fit.estimates] == ["data", "data"]
    assert fit.directions == ()


def test_the_standard_error_of_a_mean_is_sigma_over_root_n() -> None:
    """All rows are the one parameter itself: its log is the mean of theirs, known to sigma / sqrt(n)."""
    measured = [90.0, 100.0, 110.0, 100.0]
    problem = Problem([setup()], lambda v: [v["setup"]] * 4, measured, 0.1)
    (estimate,) = fitted(problem).estimates
    assert estimate.value == pytest.approx(math.prod(measured) ** 0.25, rel=1e-6)
    assert estimate.standard_error / estimate.value == pytest.approx(0.1 / 2, rel=1e-3)
    assert estimate.interval_95[1] == pytest.approx(
        estimate.value * math.exp(1.959964 * 0.05), rel=1e-3
    )


def test_rows_that_scatter_more_than_was_stated_widen_the_intervals() -> None:
    measured = [50.0, 100.0, 200.0]
    fit = fitted(Problem([setup()], lambda v: [v["setup"]] * 3, measured, 0.01))
    scatter = math.sqrt(2 * math.log(2) ** 2 / 2)  # of the logarithms, two degrees of freedom
    assert fit.degrees == pytest.approx(2, abs=1e-3)
    assert fit.inflation == pytest.approx(scatter / 0.01, rel=1e-3)
    assert fit.estimates[0].standard_error == pytest.approx(100 * scatter / math.sqrt(3), rel=1e-3)


def test_the_intervals_hold_the_truth_as_often_as_they_say() -> None:
    rng, truth, held = np.random.default_rng(0), {"setup": 300.0, "rate": 20.0}, 0
    for _ in range(100):
        noisy = np.array(affine(truth)) * np.exp(0.05 * rng.standard_normal(len(SIZES)))
        fit = fitted(Problem([setup(), rate()], affine, noisy.tolist(), 0.05))
        held += sum(
            e.interval_68[0] <= truth[e.parameter.name] <= e.interval_68[1] for e in fit.estimates
        )
    assert 120 <= held <= 156  # of 200; 68 % are 136, three standard deviations 20


def test_a_prior_and_one_row_of_equal_weight_meet_in_the_middle() -> None:
    prior = setup(prior_mean=100, prior_sd=10)
    fit = fitted(Problem([prior], lambda v: [v["setup"]], [121.0], 0.1))
    (estimate,) = fit.estimates
    assert estimate.value == pytest.approx(110, rel=1e-4)  # the geometric mean
    assert estimate.data_share == pytest.approx(0.5, abs=1e-3)
    assert estimate.decided_by == "both"
    assert estimate.standard_error / 110 == pytest.approx(0.1 / math.sqrt(2), rel=1e-3)


def test_a_parameter_no_row_depends_on_stays_at_its_prior_and_is_said_to() -> None:
    other = Parameter("other", 7, 1, 100, prior_mean=5, prior_sd=1)
    fit = fitted(Problem([setup(), other], lambda v: [v["setup"]] * 3, [100.0] * 3, 0.05))
    estimate = fit.estimates[1]
    assert estimate.value == pytest.approx(5, rel=1e-4)
    assert (estimate.data_share, estimate.decided_by) == (0, "prior")
    assert [[name for name, _ in d.moves] for d in fit.directions] == [["other"]]


def test_without_a_prior_it_stays_where_it_starts_and_its_interval_is_the_bounds() -> None:
    other = Parameter("other", 7, 1, 100)
    fit = fitted(Problem([setup(), other], lambda v: [v["setup"]] * 3, [100.0] * 3, 0.05))
    estimate = fit.estimates[1]
    assert (estimate.value, estimate.decided_by) == (pytest.approx(7), "bounds")
    assert estimate.interval_95 == (1, 100)
    assert math.isinf(estimate.standard_error)


def test_two_parameters_of_which_only_the_product_counts_are_named_together() -> None:
    """Only a * b = 12 is measured; the priors 3 and 3 share the rest evenly: both become sqrt(12)."""
    pair = [Parameter(n, 2, 0.1, 100, prior_mean=3, prior_sd=1) for n in ("a", "b")]
    lone = Parameter("lone", 2, 0.1, 100)
    problem = Problem([*pair, lone], lambda v: [v["a"] * v["b"], v["lone"]], [12.0, 9.0], 0.01)
    fit = fitted(problem)
    assert fit.values == pytest.approx({"a": 12**0.5, "b": 12**0.5, "lone": 9}, rel=1e-3)
    (direction,) = fit.directions
    assert [name for name, _ in direction.moves] in (["a", "b"], ["b", "a"])
    assert direction.signal < 0.01
    assert math.prod(value for _, value in direction.moves) == pytest.approx(12, rel=1e-2)
    assert fit.pairs() == [("a", "b", pytest.approx(-1, abs=1e-3))]


def test_two_pairs_are_not_mixed_up() -> None:
    four = [Parameter(n, 2, 0.1, 100, prior_mean=3, prior_sd=1) for n in "abcd"]
    problem = Problem(four, lambda v: [v["a"] * v["b"], v["c"] * v["d"]], [9.0, 9.0], 0.01)
    found = {frozenset(n for n, _ in d.moves) for d in fitted(problem).directions}
    assert found == {frozenset("ab"), frozenset("cd")}


def test_a_value_that_wants_to_leave_its_bounds_is_marked() -> None:
    derate = Parameter("derate", 0.5, 0.1, 1, log=False)
    fit = fitted(Problem([derate], lambda v: [1 / v["derate"]], [0.5], 0.05))
    assert fit.estimates[0].bound == "high"
    assert fit.values["derate"] == pytest.approx(1, rel=5e-3)
    assert fit.estimates[0].interval_95[1] <= 1


def test_whole_numbers_are_found_between_steps_and_end_whole() -> None:
    """Launches enter a prediction as whole numbers only: the rate then makes up for the rounding."""
    launches = Parameter("launches", 3, 1, 50, whole=True)

    def predict(values: Mapping[str, float]) -> list[float]:
        assert values["launches"] == int(values["launches"])
        return [values["launches"] * 4 + size / values["rate"] for size in SIZES]

    measured = predict({"launches": 23, "rate": 20.0})
    fit = fitted(Problem([launches, rate()], predict, measured, 0.01))
    assert fit.values["launches"] == 23
    assert fit.values["rate"] == pytest.approx(20, rel=1e-4)


def test_one_wild_row_pulls_a_robust_fit_less() -> None:
    measured = [100.0] * 9 + [1000.0]
    values = {
        loss: fitted(Problem([setup()], lambda v: [v["setup"]] * 10, measured, 0.05, loss)).values
        for loss in ("linear", "soft_l1")
    }
    assert values["linear"]["setup"] == pytest.approx(100 * 10**0.1, rel=1e-4)
    assert values["soft_l1"]["setup"] < 103


def test_a_row_left_out_is_predicted_by_the_others_alone() -> None:
    measured = [100.0, 100.0, 800.0]
    problem = Problem([setup()], lambda v: [v["setup"]] * 3, measured, 0.05)
    left = leave_out(problem, best(problem))
    assert [row.predicted for row in left] == pytest.approx(
        [800**0.5 * 10, 800**0.5 * 10, 100], rel=1e-4
    )
    assert left[2].residual == pytest.approx(math.log(100 / 800), rel=1e-4)
    assert [row.rests_on for row in left] == [()] * 3


def test_leaving_out_is_the_same_as_never_having_had_the_row() -> None:
    """Also where the row matters much, so that straight lines around the fit of all do not hold."""
    noisy = [time * (3 if i == 0 else 1 + 0.03 * (-1) ** i) for i, time in enumerate(AFFINE)]
    problem = Problem([setup(), rate()], affine, noisy, 0.05)
    left = leave_out(problem, best(problem))
    for row in (0, 5, 11):
        used = [i for i in range(len(SIZES)) if i != row]

        def some(values: Mapping[str, float], used: list[int] = used) -> list[float]:
            return [affine(values)[i] for i in used]

        rest = best(Problem([setup(), rate()], some, [noisy[i] for i in used], 0.05))
        assert left[row].predicted == pytest.approx(affine(rest.values)[row], rel=2e-3)


def test_a_row_that_alone_tells_of_a_parameter_rests_on_its_prior_when_left_out() -> None:
    pair = [Parameter(n, 2, 0.1, 100, prior_mean=5, prior_sd=1) for n in ("a", "b")]
    problem = Problem(pair, lambda v: [v["a"], v["a"], v["b"]], [9.0, 9.0, 9.0], 0.01)
    left = leave_out(problem, best(problem))
    assert [row.rests_on for row in left] == [(), (), ("b",)]
    assert left[2].predicted == pytest.approx(5, rel=1e-3)


def test_groups_are_left_out_together() -> None:
    pair = [Parameter(n, 2, 0.1, 100, prior_mean=5, prior_sd=1) for n in ("a", "b")]
    problem = Problem(pair, lambda v: [v["a"], v["a"], v["b"]], [9.0, 9.0, 9.0], 0.01)
    left = leave_out(problem, best(problem), ["one", "one", "two"])
    assert [row.rests_on for row in left] == [("a",), ("a",), ("b",)]
    everything = leave_out(problem, best(problem), ["all"] * 3)
    assert [row.predicted for row in everything] == pytest.approx([5, 5, 5])


def test_the_same_input_gives_the_same_answer() -> None:
    rng = np.random.default_rng(1)
    noisy = (np.array(affine({"setup": 300, "rate": 20})) * rng.uniform(0.9, 1.1, 12)).tolist()
    one, two = (fitted(Problem([setup(), rate()], affine, noisy, 0.05)) for _ in range(2))
    assert (one.values, one.estimates) == (two.values, two.estimates)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"low": 0}, "setup: low = 0: must be finite and > 0 on a log scale"),
        ({"high": 1}, "setup: high = 1: must be finite and > low = 1"),
        ({"start": 0.5}, r"setup: start = 0.5: must be finite and in \[1, 10000\]"),
        ({"prior_mean": 5}, "setup: prior = 5: must have a mean and an sd"),
        ({"prior_mean": 5, "prior_sd": 0}, "setup: prior sd = 0: must be finite and > 0"),
        ({"start": math.nan}, "setup: start = nan: must be finite"),
    ],
)
def test_a_parameter_that_cannot_be_is_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(HardwareError, match=message):
        setup(**changes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], affine, [1.0]), "parameters = "),
        (([setup(), setup()], affine, [1.0]), "parameters = setup: must be named once"),
        (([setup()], affine, []), "must have at least one row"),
        (([setup()], affine, [1.0, math.nan]), r"measured\[1\] = nan: must be finite and > 0"),
        (([setup()], affine, [1.0], 0.0), r"sigmas\[0\] = 0.0"),
        (([setup()], affine, [1.0], 0.1, "huber"), "loss = huber: must be linear or soft_l1"),
    ],
)
def test_a_problem_that_cannot_be_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(HardwareError, match=message):
        Problem(*arguments)


def test_a_prediction_that_is_no_time_is_refused_with_the_values_that_gave_it() -> None:
    with pytest.raises(
        HardwareError, match=r"predict\[0\] = -1.0: must be finite and > 0 \(setup = 10\)"
    ):
        best(Problem([setup()], lambda v: [-1.0], [1.0]))


def test_without_scipy_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = builtins.__import__

    def lacking(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("scipy"):
            raise ImportError(name)
        return whole(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", lacking)
    with pytest.raises(HardwareError, match=r"pip install 'greenroom\[fit\]'"):
        best(Problem([setup()], lambda v: [v["setup"]], [1.0]))
