"""A threshold that is steered by a budget: whatever synchronisations cost, and when, it is kept.

The network is a toy: squared distances grow by what a curve says at each check, all nodes alike,
and fall to zero when models are averaged. Prices are those of 20 nodes.
"""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gems_flwr.averaging.byte_budget import (
    AS_GOOD_AS_ZERO,
    ByteLedger,
    BytePlan,
    Sent,
    steered_by_budget,
)

NODES, MODEL, QUIET = 20, 1000, 2000  # bytes of a model, and of a quiet check of all nodes
FULL = NODES * 2 * MODEL


def play(curve, budget, final_sync=True, model=lambda check: MODEL):
    """Return all bytes spent, and the checks at which all models were averaged."""
    checks, ledger, distance, delta, pending, full = len(curve), ByteLedger(), 0.0, 0.0, 0, []

    def plan(check):
        left = checks - check
        return BytePlan(ledger, budget, NODES, left - 1, left, pending, final_sync, MODEL)

    for check, speed in enumerate(curve, start=1):
        down = NODES if check == 1 else pending
        size = model(check)
        sent = Sent(down, down * size)
        ledger = ledger.after(QUIET + sent.size_bytes, Sent(), sent, is_check=True)
        pending, distance, asked = 0, distance + speed, 0
        if delta and check < checks and distance > delta:
            asked = min(plan(check).models, NODES)
            asked = asked if asked > 1 else 0
            up = Sent(asked, asked * size)
            price = up.size_bytes + asked * QUIET // NODES
            ledger = ledger.after(price, up, Sent(), is_check=False)
            pending = asked
            distance = distance * (NODES - asked) / NODES
            full += [check] if asked == NODES else []
        ledger, delta = steered_by_budget(ledger, plan(check), asked / NODES, distance)
    last = pending * MODEL + NODES * MODEL + 2 * QUIET if final_sync else 0
    return ledger.spent_bytes + last + (NODES * MODEL if final_sync else 0), full


def cheapest(checks, final_sync):
    """The initial model, quiet messages, and all models up and down at the end."""
    return NODES * MODEL + checks * QUIET + final_sync * (FULL + 2 * QUIET)


def dearest(checks, final_sync):
    """A full synchronisation at every check but the first and the last."""
    return cheapest(checks, final_sync) + (checks - 2) * (FULL + QUIET)


def constant(checks):
    return np.full(checks, 0.3)


def falling(checks):
    return 1 / np.arange(1, checks + 1)


def bursting(checks):
    curve = np.full(checks, 0.1)
    for start in (checks // 3, 4 * checks // 5):
        curve[start : start + max(1, checks // 20)] = 2.0
    return curve


def settling_then_bursting(checks):
    return falling(checks) + bursting(checks)


CURVES = [constant, falling, bursting, settling_then_bursting]


@given(
    curve=st.sampled_from(CURVES),
    checks=st.integers(20, 400),
    share=st.floats(0, 1),
    power=st.sampled_from([1, 3]),  # the higher, the more budgets are tight
    scale=st.floats(1e-6, 1e6),
    final_sync=st.booleans(),
)
def test_spending_ends_within_a_tenth_of_any_budget_that_works(
    curve, checks, share, power, scale, final_sync
):
    least, most = (f(checks, final_sync) for f in (cheapest, dearest))
    budget = least + share**power * (most - least)
    spent, _ = play(scale * curve(checks), budget, final_sync)
    assert 0.9 * budget <= spent <= budget + FULL
    # Prices do not change here, so nothing is spent that is not there.
    assert spent <= budget + 1


@given(seed=st.integers(0, 1000), share=st.floats(0.02, 0.8), curve=st.sampled_from(CURVES))
def test_models_whose_size_varies_take_a_run_beyond_its_budget_by_little(seed, share, curve):
    rng = np.random.default_rng(seed)
    sizes = MODEL * rng.uniform(0.8, 1.0, 302)
    budget = cheapest(300, True) + share * (dearest(300, True) - cheapest(300, True))
    spent, _ = play(curve(300), budget, model=lambda check: int(sizes[check]))
    assert 0.9 * budget <= spent <= budget + FULL


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("pause", [3, 10, 40])
def test_what_is_spent_is_spent_all_along(curve, pause):
    """No third of the run has less than a sixth of the synchronisations, were it to fall by itself.

    Without steering the last third of `falling` would have a ninth of them at most.
    """
    checks = 600
    budget = cheapest(checks, True) + checks / pause * (FULL + QUIET)
    _, full = play(curve(checks), budget)
    thirds = np.histogram(full, bins=[0, 200, 400, 601])[0]
    assert thirds.min() > thirds.sum() / 6


def test_a_burst_is_spent_on():
    """Models move twenty times as fast in the thirty checks from 200 on."""
    budget = cheapest(600, True) + 60 * (FULL + QUIET)
    _, full = play(bursting(600), budget)
    burst = sum(200 < check <= 230 for check in full)
    before = sum(100 < check <= 200 for check in full)
    assert burst / 30 > 3 * before / 100


@pytest.mark.parametrize("pause", [2, 7, 20])
def test_the_first_threshold_is_the_distance_at_which_the_budget_pays(pause):
    """Distances grow by 0.3 a check; the first synchronisation comes one check later."""
    budget = cheapest(400, True) + 400 / pause * (FULL + QUIET)
    _, full = play(constant(400), budget)
    assert full[0] == pytest.approx(pause + 1, abs=1)


def test_a_ledger_tells_models_from_quiet_messages():
    ledger = ByteLedger().after(100, Sent(), Sent(2, 60), is_check=True)
    assert (ledger.quiet_bytes, ledger.down_bytes) == (40, 0)  # the initial model tells no price
    ledger = ledger.after(90, Sent(1, 20), Sent(1, 30), is_check=True)
    ledger = ledger.after(50, Sent(2, 44), Sent(), is_check=False)
    assert ledger == ByteLedger(240, 2, 80, up_bytes=22, down_bytes=30)


def test_a_plan_sets_aside_what_is_certain_to_come():
    """Spent 100, 3 quiet rounds of 10, 2 averages of 4, and an end of 5 (3 + 4) + 2 · 10."""
    ledger = ByteLedger(100, 2, 20, up_bytes=3, down_bytes=4)
    plan = BytePlan(ledger, 300, 5, 2, 3, owed=2, final_sync=True, model_bytes=99)
    assert plan.needed_bytes == 100 + 30 + 8 + 55
    assert plan.models == int((300 - 193) / (3 + 4 + 10 / 5))


def test_the_last_check_may_cost_what_is_left():
    ledger = ByteLedger(0, 1, 0, up_bytes=1, down_bytes=1, delta=5.0)
    plan = BytePlan(ledger, 10, 4, 1, 2, 0, False, 1)
    assert steered_by_budget(ledger, plan, 0.0, 1.0)[1] == AS_GOOD_AS_ZERO
    assert plan.models == 5
    later = dataclasses.replace(plan, checks_left=100)
    assert steered_by_budget(ledger, later, 0.0, 1.0)[1] == pytest.approx(5.0, rel=0.1)
