"""Averages that bear liars, over the wire, and beside Flower's strategies on the same replies."""

import json

import numpy as np
import pytest
from flwr.app import ConfigRecord
from flwr.serverapp import strategy as flower
from helpers_learners import initial, walk, walking_app

from conftest import initial_arrays, record_equal, small_model, toy_app, train_reply
from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.strategies.dynamic_averaging import DynamicAveraging
from gems_flwr.strategies.fedavg import FedAvg
from gems_flwr.strategies.one_shot_average import OneShotAverage
from gems_flwr.strategies.periodic_averaging import PeriodicAveraging
from gems_flwr.wire.records import to_record

RULES = ["median", "trimmed_mean", "geometric_median", "krum", "multi_krum", "bulyan"]

# Rule, options of ours, Flower's class, its options.
PAIRS = [
    ("median", {}, flower.FedMedian, {}),
    ("trimmed_mean", {"trim": 0.2}, flower.FedTrimmedAvg, {"beta": 0.2}),
    ("trimmed_mean", {"trim": 0.3}, flower.FedTrimmedAvg, {"beta": 0.3}),
    ("krum", {"liars": 1}, flower.Krum, {"num_malicious_nodes": 1}),
    ("krum", {"liars": 3}, flower.Krum, {"num_malicious_nodes": 3}),
    (
        "multi_krum",
        {"liars": 2},
        flower.MultiKrum,
        {"num_malicious_nodes": 2, "num_nodes_to_select": "n - 2"},
    ),
    ("bulyan", {"liars": 0}, flower.Bulyan, {"num_malicious_nodes": 0}),
    ("bulyan", {"liars": 2}, flower.Bulyan, {"num_malicious_nodes": 2}),
]


def random_app(seed, lie=0.0):
    """Return an app whose nodes send random models; the first two add `lie` to a layer."""

    def send(message, context):
        node = int(context.node_config["partition-id"])
        rng = np.random.default_rng([seed, node])
        arrays = {
            "weight": rng.normal(size=(4, 7)).astype(np.float32),
            "bias": (rng.normal(size=4) + (lie if node < 2 else 0)).astype(np.float32),
            "scale": np.asarray(rng.normal(), np.float32),
        }
        metrics = {"num-examples": int(rng.integers(50, 100))}
        reply = train_reply(message, context, metrics=metrics)
        reply.content["arrays"] = to_record(arrays)
        return reply

    return toy_app(dict.fromkeys(range(12), send))


def replies(count, seed, lie):
    grid = InProcessGrid(random_app(seed, lie), count)
    questions = FedAvg().configure_train(1, initial_arrays(), ConfigRecord(), grid)
    # Flower goes by the order of arrival, which decides its sums; give it ours.
    return sorted(
        grid.send_and_receive(list(questions)), key=lambda r: int(r.content["node"]["name"])
    )


@pytest.mark.parametrize("lie", [0.0, 1e4], ids=["honest", "two lie"])
@pytest.mark.parametrize("count", [11, 12])
@pytest.mark.parametrize(("rule", "ours", "theirs", "options"), PAIRS)
def test_a_rule_gives_what_flowers_strategy_of_that_name_gives(
    rule, ours, theirs, options, count, lie
):
    options = {k: count - 2 if v == "n - 2" else v for k, v in options.items()}
    # Flower's Bulyan takes seconds.
    for seed in range(1 if rule == "bulyan" else 2):
        found, _ = FedAvg(robust=rule, **ours).aggregate_train(1, replies(count, seed, lie))
        expected, _ = theirs(**options).aggregate_train(1, replies(count, seed, lie))
        assert record_equal(found, expected)


def test_weights_whose_squares_overflow_are_left_out_like_any_other_lie():
    """1e25 squared is infinite in single precision, in which Flower measures distances."""
    near, far = (
        FedAvg(robust="multi_krum", liars=2).aggregate_train(1, replies(9, 0, lie))[0]
        for lie in (1e4, 1e25)
    )
    assert record_equal(near, far)


# --- FedAvg ---------------------------------------------------------------------------------


def far_off(message, context):
    """Send a model 1,000 away, a counter of a billion, and a million examples."""
    arrays = {k: a + 1000 for k, a in small_model().items() if k != "steps"}
    arrays["steps"] = np.array(10**9, np.int64)
    return train_reply(message, context, arrays=arrays, metrics={"num-examples": 10**6})


def start(strategy, liars=(), nodes=7, rounds=3):
    grid = InProcessGrid(toy_app(dict.fromkeys(liars, far_off)), nodes)
    return strategy.start(grid, initial_arrays(), num_rounds=rounds)


@pytest.mark.parametrize("rule", RULES)
def test_a_liar_owns_the_mean_and_no_rule(rule):
    """Honest node k adds k + 1 ≤ 7 to the weights in each of three rounds; node 2 lies."""
    assert start(FedAvg(), [2]).arrays["bias"].numpy().min() > 900
    result = start(FedAvg(robust=rule), [2])
    bias = result.arrays["bias"].numpy()
    assert 3 <= bias.min() <= bias.max() <= 21
    steps = result.arrays["steps"].numpy()
    assert steps == 7
    assert steps.dtype == np.int64
    assert result.details["robust"]["averagings"] == 3
    assert "which classes are behind them" in result.details["unchecked"]
    json.dumps(result.details)


@pytest.mark.parametrize("rule", ["krum", "multi_krum", "bulyan"])
def test_a_rule_that_chooses_says_whom_it_left_out(rule):
    result = start(FedAvg(robust=rule, liars=1), [2])
    left_out = result.details["left_out"]
    assert left_out["2"] == f"{rule} chose other models in 3 of 3 averagings"
    assert result.details["robust"]["times_left_out"]["2"] == 3
    assert len(left_out) >= {"krum": 6, "multi_krum": 1, "bulyan": 2}[rule]


def test_plain_averaging_says_nothing_of_liars():
    assert start(FedAvg()).details == {}


def test_one_round_of_averaging_bears_liars_as_well():
    result = start(OneShotAverage(robust="median"), [2], rounds=1)
    assert result.arrays["bias"].numpy().max() <= 7
    assert result.details["robust"]["averagings"] == 1


def test_a_resumed_run_keeps_account_of_whom_it_left_out(tmp_path):
    def run(rounds):
        strategy = FedAvg(robust="multi_krum", liars=1, checkpoint_dir=tmp_path, resume=True)
        return start(strategy, [2], rounds=rounds)

    run(2)
    assert run(3).details == start(FedAvg(robust="multi_krum", liars=1), [2]).details


def test_too_few_models_for_the_rule_are_told(caplog):
    result = start(FedAvg(robust="bulyan", liars=1), nodes=6)
    assert result.details["robust"]["by_median"] == 3
    assert caplog.text.count("too few models for bulyan, the median stands in") == 1
    result = start(FedAvg(robust="median"), nodes=2)
    assert result.details["robust"]["too_few"] == 3
    assert caplog.text.count("nobody can be outvoted") == 1


# --- models that live on the nodes ----------------------------------------------------------


def lying(nodes, rounds, size=3):
    """Return an app whose lying nodes put 50s into every weight of their model."""
    lie = lambda model: {**model, "w": np.full(size, 50.0)}  # noqa: E731
    return walking_app({(n, r): lie for n in nodes for r in rounds}, size=size)


def play(strategy, liars=(1, 4), nodes=7, rounds=12):
    app = lying(liars, range(1, rounds + 1))
    return strategy.start(InProcessGrid(app, nodes), initial(), num_rounds=rounds)


def most_walked(nodes=7, rounds=12):
    """Return how far any node can have walked, by coordinate."""
    steps = [[np.abs(walk(n, r, 3)) for r in range(1, rounds + 1)] for n in range(nodes)]
    return np.sum(steps, axis=1).max()


LEARNERS = [
    (PeriodicAveraging, {"b": 3}),
    (DynamicAveraging, {"delta": 0.05}),
    (DynamicAveraging, {"delta": 0.05, "condition": "total", "augmentation": "all"}),
    (DynamicAveraging, {"delta": 0.05, "augmentation": "random", "liars": 2}),
]


@pytest.mark.parametrize("rule", ["median", "geometric_median", "krum", "multi_krum"])
@pytest.mark.parametrize(("strategy", "options"), LEARNERS)
def test_liars_own_local_learners_unless_the_mean_is_robust(strategy, options, rule):
    plain = {key: value for key, value in options.items() if key != "liars"}
    assert np.abs(play(strategy(**plain)).arrays["w"].numpy()).max() > 10
    result = play(strategy(robust=rule, **options))
    assert np.abs(result.arrays["w"].numpy()).max() <= most_walked()
    assert result.arrays["steps"].numpy() == 0
    if "krum" in rule:
        assert {"1", "4"} <= set(result.details["left_out"])
    json.dumps(result.details)


def test_honest_learners_synchronise_fewer_models_if_it_is_known_how_many_may_lie():
    """A violation needs 2f + 1 = 3 models if one may lie, and all nine if nobody knows."""
    app = walking_app({(0, 2): lambda model: {**model, "w": np.full(3, 3.0)}})

    def moved(**options):
        strategy = DynamicAveraging(delta=9, robust="median", final_sync=False, **options)
        result = strategy.start(InProcessGrid(app, 9), initial(), num_rounds=2)
        return result.details["synchronisations"]

    assert moved(liars=1) == ((2, 4),)  # doubling: one, then two more
    assert moved() == ((2, 9),)


def test_a_threshold_that_follows_what_nodes_say_is_refused():
    for option in ({"follow_loss": 0.5}, {"target_rate": 1.0}):
        with pytest.raises(ValueError, match="robust goes with neither"):
            DynamicAveraging(robust="median", **option)
        DynamicAveraging(**option)
