"""Averages that bear liars, over the wire, and beside Flower's strategies on the same replies."""

import json

import numpy as np
import pytest
from flwr.app import ConfigRecord
from flwr.serverapp import strategy as flower
from helpers_learners import initial, walk, walking_app

from conftest import initial_arrays, record_equal, small_model, toy_app, train_reply
from gems_flwr import DynamicAveraging, FedAvg, InProcessGrid, PeriodicAveraging, RobustRule
from gems_flwr.core.records import to_record

RULES = ["median", "trimmed_mean", "geometric_median", "multi_krum"]

# Rule, options of ours, Flower's class, its options; of eleven models.
PAIRS = [
    ("median", {}, flower.FedMedian, {}),
    ("trimmed_mean", {"trim": 0.2}, flower.FedTrimmedAvg, {"beta": 0.2}),
    (
        *("multi_krum", {"liars": 2}, flower.MultiKrum),
        {"num_malicious_nodes": 2, "num_nodes_to_select": 9},
    ),
]


@pytest.mark.parametrize(("rule", "ours", "theirs", "options"), PAIRS)
def test_a_rule_gives_what_flowers_strategy_of_that_name_gives(rule, ours, theirs, options):
    for seed in range(2):
        received = replies(11, seed, lie=1e4)
        found, _ = FedAvg(robust=RobustRule(rule, **ours)).aggregate_train(1, received)
        expected, _ = theirs(**options).aggregate_train(1, replies(11, seed, lie=1e4))
        assert record_equal(found, expected)


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


def far_off(message, context):
    """Send a model 1,000 away, a counter of a billion, and a million examples."""
    arrays = {k: a + 1000 for k, a in small_model().items() if k != "steps"}
    arrays["steps"] = np.array(10**9, np.int64)
    return train_reply(message, context, arrays=arrays, metrics={"num-examples": 10**6})


def start(strategy, liars=(), nodes=7, rounds=3, **options):
    grid = InProcessGrid(toy_app(dict.fromkeys(liars, far_off)), nodes)
    return strategy.start(grid, initial_arrays(), num_rounds=rounds, **options)


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
    json.dumps(result.details)


def test_a_rule_that_chooses_says_whom_it_left_out():
    result = start(FedAvg(robust=RobustRule("multi_krum", 1)), [2])
    assert result.details["left_out"]["2"] == "multi_krum chose other models in 3 of 3 averagings"
    assert result.details["robust"]["times_left_out"]["2"] == 3


def test_too_few_models_for_the_rule_are_told(caplog):
    result = start(FedAvg(robust=RobustRule("multi_krum", 1)), nodes=4)
    assert result.details["robust"]["too_few"] == 3
    assert caplog.text.count("too few models for multi_krum, the median stands in") == 1
    result = start(FedAvg(robust="median"), nodes=2)
    assert result.details["robust"]["too_few"] == 3
    assert caplog.text.count("too few models for median, none can be outvoted") == 1


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
    (PeriodicAveraging, {"b": 3}, RobustRule("median")),
    (DynamicAveraging, {"condition": "total", "augmentation": "all"}, RobustRule("median")),
    (DynamicAveraging, {"augmentation": "random"}, RobustRule("multi_krum", 2)),
]


@pytest.mark.parametrize(("strategy", "options", "rule"), LEARNERS)
def test_liars_own_local_learners_unless_the_mean_is_robust(strategy, options, rule):
    options = options if "b" in options else options | {"delta": 0.05}
    assert np.abs(play(strategy(**options)).arrays["w"].numpy()).max() > 10
    result = play(strategy(robust=rule, **options))
    assert np.abs(result.arrays["w"].numpy()).max() <= most_walked()
    assert result.arrays["steps"].numpy() == 0
    if rule.kind == "multi_krum":
        assert {"1", "4"} <= set(result.details["left_out"])
    json.dumps(result.details)
