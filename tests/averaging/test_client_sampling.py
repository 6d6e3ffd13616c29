"""Sampling probabilities, draws and coefficients against theorems and an independent solver."""

import cvxpy
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gems_flwr.averaging import (
    aggregation_coefficients,
    data_shares,
    draw_assignment,
    loss_importance,
    optimal_probabilities,
    reachable_budget,
)


def instance(seed, clients=12, models=3, zeros=0.15, ties=False):
    """Random importances over two orders of magnitude, some zero, some equal."""
    rng = np.random.default_rng(seed)
    importance = np.exp(rng.normal(scale=1.0, size=(clients, models)))
    if ties:
        importance = rng.integers(1, 4, size=importance.shape).astype(float)
    importance[rng.random(importance.shape) < zeros] = 0.0
    capacity = rng.integers(1, models + 1, size=clients)
    budget = float(rng.uniform(0.05, 0.95) * reachable_budget(importance, capacity))
    return importance, budget, capacity


def variance_by_hand(importance, p):
    """Σ_i (1/p − 1) ‖d U‖² of each model, over pairs that have any importance; see the module."""
    known = importance > 0
    odds = 1 / np.where(known, p, 1.0) - 1
    return (importance**2 * odds).sum(axis=0)


def solve(importance, budget, capacity):
    """Minimise Σ a²/p by an interior-point solver; zero importance is left out."""
    pairs = np.argwhere(importance > 0)
    a = importance[importance > 0] / importance.max()
    p = cvxpy.Variable(len(pairs))
    limits = [
        cvxpy.sum(p[np.flatnonzero(pairs[:, 0] == i)]) <= capacity[i] for i in set(pairs[:, 0])
    ]
    problem = cvxpy.Problem(
        cvxpy.Minimize(cvxpy.sum(cvxpy.multiply(a**2, cvxpy.inv_pos(p)))),
        [p <= 1, cvxpy.sum(p) <= budget, *limits],
    )
    problem.solve(solver=cvxpy.CLARABEL)
    full = np.zeros_like(importance)
    full[importance > 0] = p.value
    return full


importances = st.lists(
    st.lists(st.sampled_from([0.0, 1e-9, 0.5, 1.0, 1.0, 3.0, 1e6]), min_size=3, max_size=3),
    min_size=1,
    max_size=9,
)


@given(importances, st.floats(0.01, 30), st.lists(st.integers(0, 3), min_size=9, max_size=9))
@settings(max_examples=300, deadline=None)
def test_the_constraints_hold(rows, budget, limits):
    importance, capacity = np.array(rows), np.array(limits[: len(rows)])
    p = optimal_probabilities(importance, budget, capacity)
    assert (p >= 0).all()
    assert (p <= 1).all()
    assert (p.sum(axis=1) <= capacity + 1e-9).all()
    # All of the budget is spent, or all that there is room for.
    room = reachable_budget(importance, capacity)
    assert p.sum() == pytest.approx(min(budget, room))
    assert (p[importance == 0] == 0).all()
    assert (p[(importance > 0) & (capacity > 0)[:, None]] > 0).all()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ties", [False, True])
def test_a_numerical_optimiser_finds_nothing_better(seed, ties):
    importance, budget, capacity = instance(seed, ties=ties)
    ours = optimal_probabilities(importance, budget, capacity)
    theirs = solve(importance, budget, capacity)
    assert ours == pytest.approx(theirs, abs=1e-3)
    positive = importance > 0
    cost = [np.sum(importance[positive] ** 2 / p[positive]) for p in (ours, theirs)]
    # The solver may overstep its limits a little, so it may look better by as much.
    assert cost[0] <= cost[1] * (1 + 1e-6)


def test_with_one_model_per_client_it_is_the_closed_form_of_the_slides():
    """M = (1, 2, 9), m = 2: k = 3 fails as 2 > 12/9; k = 2 has 1 ≤ 3/2, so p = a/3 for i ≤ 2."""
    importance = np.array([[1.0, 0], [1, 1], [3, 6]])
    expected = [[1 / 3, 0], [1 / 3, 1 / 3], [1 / 3, 2 / 3]]
    assert optimal_probabilities(importance, 2) == pytest.approx(np.array(expected))


@pytest.mark.parametrize("seed", range(2))
def test_draws_respect_capacities_and_hit_every_pair_with_its_probability(seed):
    importance, budget, capacity = instance(seed, clients=8)
    p = optimal_probabilities(importance, budget, capacity)
    rng = np.random.default_rng(seed)
    draws = np.array([draw_assignment(p, rng) for _ in range(20_000)])
    assert (draws.sum(axis=2) <= capacity).all()
    # Five standard deviations of a mean of 20,000 coin tosses.
    slack = 5 * np.sqrt(p * (1 - p) / 20_000) + 1e-12
    assert (np.abs(draws.mean(axis=0) - p) <= slack).all()
    assert draws.sum(axis=(1, 2)).mean() == pytest.approx(budget, rel=0.02)


def test_the_estimate_is_unbiased_and_has_the_variance_that_is_claimed():
    """Monte Carlo over active sets with fixed updates, clients with up to three models."""
    rng = np.random.default_rng(5)
    updates = rng.normal(size=(10, 3, 4)) * np.exp(rng.normal(size=(10, 3, 1)))
    shares = data_shares(rng.integers(0, 9, size=(10, 3)))
    norms = shares * np.linalg.norm(updates, axis=2)
    p = optimal_probabilities(norms, 6, rng.integers(1, 4, size=10))
    full = np.einsum("is,isd->sd", shares, updates)
    estimates = []
    for _ in range(20_000):
        active = draw_assignment(p, rng)
        c = aggregation_coefficients(shares, p, active)
        estimates.append(np.einsum("is,isd->sd", c, updates))
    deviations = np.array(estimates) - full
    error = deviations.std(axis=0) / np.sqrt(len(estimates))
    assert (np.abs(deviations.mean(axis=0)) <= 5 * error + 1e-12).all()
    variance = variance_by_hand(norms, p)
    assert (deviations**2).sum(axis=2).mean(axis=0) == pytest.approx(variance, rel=0.05)


def test_importances_far_apart_neither_overflow_nor_break_the_limits():
    for scale in (1e-200, 1.0, 1e200):
        importance = scale * np.array([[1e-12, 1.0], [1.0, 1e12], [1e12, 1e12]])
        p = optimal_probabilities(importance, 2, [1, 2, 1])
        assert p.sum() == pytest.approx(2)
        assert (p.sum(axis=1) <= np.array([1, 2, 1]) + 1e-9).all()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: optimal_probabilities([[1.0, -1.0]], 1), "got -1.0 for client 0, model 1"),
        (lambda: optimal_probabilities([[np.nan]], 1), "got nan for client 0, model 0"),
        (lambda: optimal_probabilities([1.0], 1), "clients as rows"),
        (lambda: optimal_probabilities([[1.0]], 0), "budget must be a number above 0"),
        (
            lambda: loss_importance([[1.0, -2.0]], [[1.0, 1.0]], [[True, True]]),
            "losses must be finite and at least 0, got -2.0 for client 0, model 1",
        ),
    ],
)
def test_bad_numbers_are_refused_by_name(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_a_loss_counts_by_its_share_and_never_for_less_than_a_hundredth_of_the_mean():
    """By hand. Model 0: the mean of 4 and 0 by shares 3/4 and 1/4 is 3, so the second counts .03.

    Model 1: the first client's loss is unknown, whatever stands in its place. It is neither in the
    mean, which is 2, nor drawn. Model 2: without any loss there is no importance.
    """
    losses = [[4.0, np.nan, 0.0], [0.0, 2.0, 0.0]]
    shares = [[0.75, 0.9, 0.5], [0.25, 0.1, 0.5]]
    importance = loss_importance(losses, shares, [[True, False, True], [True, True, True]])
    expected = [[0.75 * 4, 0, 0], [0.25 * 0.03, 0.1 * 2, 0]]
    assert importance == pytest.approx(np.array(expected))
