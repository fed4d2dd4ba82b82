"""The terms of ReMoE's loss: by hand, and the laws that they keep."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from real.remoe_loss import (  # noqa: E402
    LossWeights,
    lagged,
    locality,
    log_probabilities,
    reuse,
    smooth,
    trust,
    weighted,
    window,
)

WEIGHTS = LossWeights(
    trust=1.0, reuse=0.5, smooth=0.05, lag=0.05, window=0.01, lags=(1, 3), window_tokens=4
)


def log_of(*rows: list[float]) -> Any:
    """Return log-probabilities [1, time, experts]."""
    return torch.tensor([rows], dtype=torch.float64).log()


def all_real(log_p: Any) -> Any:
    return torch.ones(log_p.shape[:2], dtype=torch.bool)


def test_trust_is_the_divergence_from_the_reference_to_which_no_gradient_flows() -> None:
    log_p = log_of([0.5, 0.5], [0.9, 0.1]).requires_grad_(True)
    reference = log_of([0.25, 0.75], [0.9, 0.1]).requires_grad_(True)
    found = trust(log_p, reference, all_real(log_p))
    by_hand = 0.5 * (0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75))
    assert found.item() == pytest.approx(by_hand)
    found.backward()
    assert log_p.grad is not None
    assert reference.grad is None


def test_reuse_is_the_mass_on_the_experts_of_the_token_before_over_k() -> None:
    log_p = log_of([0.7, 0.2, 0.1], [0.2, 0.3, 0.5], [0.1, 0.8, 0.1])
    chosen = torch.tensor([[[0, 1], [2, 1], [1, 0]]])
    masses = (0.2 + 0.3) / 2, (0.1 + 0.8) / 2  # of token 1 on {0, 1}, of token 2 on {2, 1}
    found = reuse(log_p, chosen, all_real(log_p))
    assert float(found) == pytest.approx(-math.log(sum(masses) / 2), abs=1e-6)


def test_a_sequence_of_one_token_has_no_reuse_and_does_not_count() -> None:
    log_p = log_of([0.7, 0.3], [0.5, 0.5]).expand(2, 2, 2)
    chosen = torch.tensor([[[0], [0]], [[0], [0]]])
    real = torch.tensor([[True, True], [True, False]])
    assert float(reuse(log_p, chosen, real)) == pytest.approx(-math.log(0.5), abs=1e-6)


def test_smooth_is_the_mean_of_both_divergences_with_gradients_through_both() -> None:
    log_p = log_of([0.5, 0.5], [0.9, 0.1]).requires_grad_(True)
    there = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    back = 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)
    found = smooth(log_p, all_real(log_p))
    assert found.item() == pytest.approx((there + back) / 2)
    found.backward()
    assert log_p.grad is not None
    assert bool((log_p.grad[0].abs().sum(dim=1) > 0).all())


def test_the_lag_term_is_the_mean_over_lags_and_a_lag_beyond_the_text_is_nothing() -> None:
    log_p = log_of([0.5, 0.5], [0.9, 0.1], [0.5, 0.5])
    real = all_real(log_p)
    one, two = float(smooth(log_p, real, 1)), float(smooth(log_p, real, 2))
    assert two == pytest.approx(0.0)
    assert one > 0
    assert float(lagged(log_p, real, (1, 2, 9))) == pytest.approx((one + two) / 3)


def test_the_window_term_is_the_entropy_of_full_windows_only() -> None:
    log_p = log_of([1.0, 1e-12], [1e-12, 1.0], [1.0, 1e-12], [1.0, 1e-12], [0.5, 0.5])
    found = window(log_p, all_real(log_p), 2)  # even, then one expert; the fifth token is left over
    assert float(found) == pytest.approx(math.log(2) / 2, abs=1e-6)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_probabilities_add_up_and_have_the_order_of_the_logits(scoring: str) -> None:
    logits = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    found = log_probabilities(logits.half(), scoring)
    assert found.dtype == torch.float32
    assert torch.allclose(found.exp().sum(dim=-1), torch.ones(5))
    assert torch.equal(found.argsort(dim=-1), logits.half().argsort(dim=-1))


def test_sigmoid_scores_are_divided_by_their_sum() -> None:
    scores = torch.sigmoid(torch.tensor([0.0, 1.0, -2.0]))
    found = log_probabilities(torch.tensor([0.0, 1.0, -2.0]), "sigmoid").exp()
    assert torch.allclose(found, scores / scores.sum())


def test_an_unknown_scoring_is_refused() -> None:
    with pytest.raises(ValueError, match="'softmx': must be one of softmax, sigmoid"):
        log_probabilities(torch.zeros(2), "softmx")


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 9), min_size=1, max_size=3),
    padding=st.integers(0, 6),
    seed=st.integers(0, 99),
)
def test_padding_changes_no_term(lengths: list[int], padding: int, seed: int) -> None:
    """Terms of a padded batch are those of the same batch with other padding, whatever that holds."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    real = torch.arange(longest + padding) < torch.tensor(lengths)[:, None]
    log_p = torch.randn(len(lengths), longest + padding, 5, generator=generator).double()
    log_p = log_p.log_softmax(dim=-1)
    chosen = log_p.topk(2).indices
    other = torch.where(real[:, :, None], log_p, torch.full_like(log_p, math.log(0.2)))
    terms = locality(log_p, chosen, real, WEIGHTS)
    again = locality(other[:, :longest], chosen[:, :longest], real[:, :longest], WEIGHTS)
    for name, term in terms.items():
        assert float(term) == pytest.approx(float(again[name]), abs=1e-9), name


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 999), length=st.integers(4, 12))
def test_terms_are_not_negative_and_a_constant_gate_is_smooth(seed: int, length: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    log_p = torch.randn(1, length, 6, generator=generator).double().log_softmax(dim=-1)
    chosen, real = log_p.topk(2).indices, all_real(log_p)
    assert all(float(term) >= -1e-12 for term in locality(log_p, chosen, real, WEIGHTS).values())
    constant = log_p[:, :1].expand_as(log_p)
    assert float(lagged(constant, real, (1, 2, 3))) == pytest.approx(0.0, abs=1e-12)
    # No distribution is over the mean mass: rho is at most 1 / k.
    assert float(reuse(constant, chosen, real)) >= math.log(2) - 1e-6


def test_terms_without_weight_are_not_computed_and_the_sum_is_weighted() -> None:
    log_p = log_of([0.5, 0.5], [0.9, 0.1])
    chosen, real = log_p.topk(1).indices, all_real(log_p)
    only = replace(WEIGHTS, reuse=2.0, smooth=0.0, lag=0.0, window=0.0)
    terms = locality(log_p, chosen, real, only)
    assert list(terms) == ["reuse"]
    assert float(weighted(terms, only)) == pytest.approx(2 * float(terms["reuse"]))
    assert WEIGHTS.scaled(2.0).reuse == 1.0
    assert WEIGHTS.scaled(2.0).trust == WEIGHTS.trust
