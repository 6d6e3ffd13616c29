"""Thresholds that follow what nodes say: whatever that is, they stay numbers above zero."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gems_flwr.averaging.balancing import BalancingRule
from gems_flwr.averaging.threshold import following_loss, steered

LOSSES = st.floats(-1e100, 1e100)


@given(losses=st.lists(LOSSES, min_size=1, max_size=5), exponent=st.floats(0, 4))
def test_no_losses_make_a_threshold_that_a_rule_refuses(losses, exponent):
    before = ()
    for loss in losses:
        delta, before = following_loss(0.7, exponent, before, loss)
        BalancingRule(delta=delta)


def test_honest_losses_are_followed_as_before():
    """Running mean of the loss, 5 % of it new, over the first loss: 0.7 * (1.95 / 2) ** 0.5."""
    delta, losses = following_loss(0.7, 0.5, (2.0, 2.0), 1.0)
    assert losses == (2.0, 1.95)
    assert delta == pytest.approx(0.7 * math.sqrt(0.975), rel=1e-15)


@pytest.mark.parametrize(("rate", "target"), [(2.0, 1e-9), (0.0, 2.0)])
def test_a_threshold_that_is_steered_for_ever_stays_a_number(rate, target):
    delta = 0.7
    for _ in range(10_000):
        delta = steered(delta, rate, target)
    BalancingRule(delta=delta)
