"""Dynamic averaging under a budget of bytes, over the in-process grid."""

import json
from functools import cache

import numpy as np
import pytest
from helpers_learners import fail, initial, walk, walking_app

from gems_flwr.errors import OptionError
from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.secure.secure_sum import SecureSum
from gems_flwr.server.learner_state import LearnerState
from gems_flwr.server.settings import Callback
from gems_flwr.strategies.dynamic_averaging import DynamicAveraging
from gems_flwr.strategies.periodic_averaging import PeriodicAveraging

NODES, ROUNDS = 6, 60
# Quiet messages, which periodic averaging has not: up to 220 bytes for each node and round.
QUIET = ROUNDS * NODES * 220


class Strangers(InProcessGrid):
    """Nodes have to be asked for their names, which takes bytes before the first round."""

    def get_nodes(self):
        return []


def play(strategy, size=500, app=None, grid=None, rounds=ROUNDS):
    grid = grid or Strangers(app or walking_app(size=size), NODES)
    return strategy.start(grid, initial(size), num_rounds=rounds)


def spent(result):
    return result.traffic.bytes_up + result.traffic.bytes_down


@cache
def price(b, size=500, compress="float32", **options):
    """Return what periodic averaging costs."""
    return spent(play(PeriodicAveraging(b=b, compress=compress, **options), size=size))


CONDITIONS = [("local", "doubling"), ("local", "all"), ("total", "all"), ("total", "doubling")]


# --- the budget is kept -------------------------------------------------------------------------


@pytest.mark.parametrize("b", [2, 8, 20])
@pytest.mark.parametrize(("condition", "augmentation"), CONDITIONS)
def test_a_run_costs_what_it_may(condition, augmentation, b):
    budget = price(b) + QUIET
    strategy = DynamicAveraging(budget_bytes=budget, condition=condition, augmentation=augmentation)
    result = play(strategy)
    assert 0.9 * budget <= spent(result) <= 1.02 * budget
    assert result.details["budget_bytes"] == budget
    assert result.details["spent_bytes"] == spent(result)
    assert result.details["delta"] > 0
    json.dumps(result.details)


@pytest.mark.parametrize("condition", ["local", "total"])
@pytest.mark.parametrize("final_sync", [True, False])
def test_packed_models_are_counted_as_they_travel(condition, final_sync):
    """An initial model of zeros takes next to nothing; differences take a byte a weight."""
    budget = price(8, size=5000, compress="int8") + QUIET
    strategy = DynamicAveraging(
        budget_bytes=budget, condition=condition, compress="int8", final_sync=final_sync
    )
    result = play(strategy, size=5000)
    assert 0.9 * budget <= spent(result) <= 1.02 * budget
    assert len(result.details["synchronisations"]) > 5


def test_rounds_between_checks_cost_nothing_and_the_budget_is_kept():
    budget = price(8)
    result = play(DynamicAveraging(budget_bytes=budget, check_every=4))
    assert 0.9 * budget <= spent(result) <= 1.02 * budget
    assert all(r % 4 == 0 for r, _ in result.details["synchronisations"])


def test_the_last_synchronisation_is_set_aside():
    """The mean of all models walks by the mean of the steps, and the end averages all of them."""
    result = play(DynamicAveraging(budget_bytes=price(20) + QUIET), size=500)
    steps = [sum(walk(node, r, 500) for r in range(1, ROUNDS + 1)) for node in range(NODES)]
    assert result.arrays["w"].numpy() == pytest.approx(np.mean(steps, axis=0))
    assert result.details["full_synchronisations"][-1] == ROUNDS


def test_a_rest_that_does_not_pay_for_all_models_goes_to_the_farthest():
    """Two and a half synchronisations can be paid: the last one averages some models only."""
    quiet = spent(play(DynamicAveraging(delta=1e9)))
    full = (price(10) - price(30)) / 4 + NODES * 220  # and a question each
    budget = quiet + 2.5 * full
    result = play(DynamicAveraging(budget_bytes=budget, condition="total", augmentation="all"))
    sizes = [count for r, count in result.details["synchronisations"] if r < ROUNDS]
    assert sizes[:2] == [NODES, NODES]
    assert len(sizes) == 3
    assert 2 <= sizes[2] < NODES
    assert 0.95 * budget <= spent(result) <= 1.01 * budget


def test_more_is_spent_when_the_concept_drifts():
    """All nodes take steps of ten times the length, in directions of their own, from 31 to 36."""

    def leap(node, server_round):
        own = 9 * walk(node, server_round, 500)
        return lambda model: {**model, "w": model["w"] + own}

    behaviours = {(n, r): leap(n, r) for n in range(NODES) for r in range(31, 37)}
    budget = price(4) + QUIET
    strategy = DynamicAveraging(budget_bytes=budget, condition="total", augmentation="all")
    result = play(strategy, app=walking_app(behaviours, size=500))
    rounds = [r for r, _ in result.details["synchronisations"]]
    assert sum(31 <= r <= 36 for r in rounds) >= 4  # one in four rounds has one, evenly spread
    assert 0.9 * budget <= spent(result) <= 1.02 * budget


def test_nodes_that_fail_now_and_then_do_not_break_the_budget():
    behaviours = {(r % NODES, r): fail for r in range(3, ROUNDS, 4)}
    budget = price(8) + QUIET
    result = play(DynamicAveraging(budget_bytes=budget), app=walking_app(behaviours, size=500))
    assert 0.9 * budget <= spent(result) <= 1.05 * budget


# --- what it takes ------------------------------------------------------------------------------


def test_too_small_a_budget_is_refused_with_the_smallest_that_works():
    with pytest.raises(OptionError, match="too small for 60 rounds with 6 nodes") as refusal:
        play(DynamicAveraging(budget_bytes=50_000))
    needed = int(str(refusal.value).split("take about ")[1].split(";")[0])
    result = play(DynamicAveraging(budget_bytes=1.01 * needed))
    assert spent(result) == pytest.approx(needed, rel=0.02)
    with pytest.raises(OptionError, match="too small"):
        play(DynamicAveraging(budget_bytes=0.99 * needed))


def test_a_budget_that_nothing_can_exhaust_averages_at_every_check():
    result = play(DynamicAveraging(budget_bytes=1e12, condition="total"), rounds=10)
    assert [r for r, _ in result.details["synchronisations"]] == list(range(2, 11))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budget_bytes": 0}, "budget_bytes must be"),
        ({"budget_bytes": float("inf")}, "budget_bytes must be"),
        ({"target_rate": 0.5}, "neither follow_loss nor target_rate"),
        ({"follow_loss": 0.5}, "neither follow_loss nor target_rate"),
        ({"robust": "median"}, "does not go with robust"),
        ({"fraction_evaluate": 1.0}, "fraction_evaluate=0"),
        (
            {"secure": SecureSum(), "condition": "total", "augmentation": "all"},
            "does not go with secure",
        ),
    ],
)
def test_what_does_not_go_with_a_budget_is_refused(options, words):
    with pytest.raises(OptionError, match=words):
        DynamicAveraging(**{"budget_bytes": 1e6, **options})


# --- going on -----------------------------------------------------------------------------------


class StopAfter(Callback):
    def __init__(self, number):
        self.number = number

    def on_round_end(self, record):
        if record.round == self.number:
            raise KeyboardInterrupt


@pytest.mark.parametrize("stop", [1, 12, 28])
@pytest.mark.parametrize("condition", ["local", "total"])
def test_a_resumed_run_equals_the_unbroken_one(condition, stop, tmp_path):
    """Nodes tell their names again, and that is not held against the budget."""
    options = {"budget_bytes": price(8), "condition": condition}
    unbroken = play(DynamicAveraging(**options), rounds=30)
    grid = Strangers(walking_app(size=500), NODES)
    options |= {"checkpoint_dir": tmp_path}
    with pytest.raises(KeyboardInterrupt):
        play(DynamicAveraging(callbacks=[StopAfter(stop)], **options), grid=grid, rounds=30)
    resumed = play(DynamicAveraging(resume=True, **options), grid=grid, rounds=30)
    assert np.array_equal(resumed.arrays["w"].numpy(), unbroken.arrays["w"].numpy())
    assert resumed.details == unbroken.details


def test_a_run_without_a_budget_can_go_on_with_one(tmp_path):
    """What it has cost so far counts."""
    grid = Strangers(walking_app(size=500), NODES)
    callbacks = [StopAfter(15)]
    first = DynamicAveraging(target_rate=0.5, checkpoint_dir=tmp_path, callbacks=callbacks)
    with pytest.raises(KeyboardInterrupt):
        play(first, grid=grid)
    budget = price(2) + QUIET
    result = play(
        DynamicAveraging(budget_bytes=budget, checkpoint_dir=tmp_path, resume=True), grid=grid
    )
    assert 0.9 * budget <= spent(result) <= 1.02 * budget


def test_a_state_without_a_ledger_is_saved_as_it_always_was():
    from gems_flwr.averaging.synchronisation import Coordinator

    memory = LearnerState("run", Coordinator({"w": np.zeros(2)})).to_memory()
    assert "ledger" not in json.loads(memory["ledger"].tobytes())
    state = LearnerState.from_memory(memory)
    assert state is not None
    assert state.ledger is None
