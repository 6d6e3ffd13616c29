"""What the user's own train handler reports comes back, whatever else a strategy asks for.

Node k counts k + 1 examples and reports a loss of k: the mean is Σ k (k + 1) / Σ (k + 1), for three
nodes 8 / 6, for two 2 / 3.
"""

import pytest
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from helpers_blobs import both_parts
from helpers_gems import Spoiled, fit, node_data
from helpers_gems import initial as initial_layer
from helpers_learners import initial as initial_walk

from conftest import record_equal
from gems_flwr import (
    Ball,
    DynamicAveraging,
    Gems,
    InProcessGrid,
    NoSync,
    PeriodicAveraging,
    good_enough_mod,
)
from gems_flwr.core.records import to_numpy, to_record

BALL = Ball(directions=20)


def app_of(mod, step=lambda arrays, context: arrays, **more):
    """Return an ordinary app whose handler reports what this module's docstring says."""
    app = ClientApp(mods=[mod])

    @app.train()
    def train(message, context):
        node = context.node_config["partition-id"]
        arrays = to_record(step(to_numpy(message.content["arrays"]), context))
        reported = {"num-examples": node + 1, "train_loss": float(node), **more}
        content = RecordDict({"arrays": arrays, "metrics": MetricRecord(reported)})
        return Message(content, reply_to=message)

    return app


def walking_app(**more):
    def step(arrays, context):
        return {**arrays, "w": arrays["w"] + context.node_config["partition-id"]}

    return app_of(good_enough_mod(), step, **more)


def space_app(**more):
    def step(arrays, context):
        weight, bias = fit(arrays["weight"], arrays["bias"], *node_data(context))
        return {"weight": weight, "bias": bias}

    return app_of(good_enough_mod(both_parts(lambda context: node_data(context, 1))), step, **more)


def run_space(app, nodes=2):
    return Gems(space=BALL).start(InProcessGrid(app, nodes), initial_layer())


# --- models that live on the nodes, and several models ----------------------------------------


@pytest.mark.parametrize("strategy", [DynamicAveraging(delta=0.01), NoSync()], ids=type)
def test_local_learners_report_the_handlers_metrics_beside_their_own(strategy):
    sums = {"loss-sum": 2.0, "batches": 1, "correct-share-sum": 0.5}
    result = strategy.start(InProcessGrid(walking_app(**sums), 3), initial_walk(), num_rounds=3)
    for metrics in result.train_metrics_clientapp.values():
        assert metrics["train_loss"] == pytest.approx(8 / 6)
        assert {"models_up", "in_place_loss", "cumulative_loss"} <= metrics.keys()
        # What is summed up is not averaged as well.
        assert not {"loss-sum", "batches", "correct-share-sum"} & metrics.keys()


def test_neither_overwrites_the_other_where_both_have_one_name():
    """Also if the strategy has nothing to report under that name, as here no loss."""
    app = walking_app(models_up=41, in_place_loss=0.25)
    result = PeriodicAveraging(b=1).start(InProcessGrid(app, 3), initial_walk(), num_rounds=1)
    metrics = result.train_metrics_clientapp[1]
    assert (metrics["client/models_up"], metrics["models_up"]) == (pytest.approx(41), 3)
    assert metrics["client/in_place_loss"] == pytest.approx(0.25)
    assert "in_place_loss" not in metrics


# --- spaces and neurons -----------------------------------------------------------------------


def test_spaces_that_need_training_report_the_handlers_metrics():
    result = run_space(space_app())
    assert result.train_metrics_clientapp == {1: {"train_loss": pytest.approx(2 / 3)}}
    # A list is no number of examples, so nothing is reported.
    plain = run_space(space_app(**{"num-examples": [1, 2]}))
    assert plain.train_metrics_clientapp == {}
    assert plain.failures == ()
    assert record_equal(plain.arrays, result.arrays)
    # Two words and two numbers from each node.
    words = len("num-examples") + len("train_loss")
    assert result.traffic.bytes_up - plain.traffic.bytes_up == 2 * (words + 2 * 8)


def test_lists_are_averaged_and_what_cannot_be_averaged_does_not_cost_the_node_its_space():
    result = run_space(space_app(curve=[4.0, 2.0]))
    assert result.train_metrics_clientapp[1]["curve"] == pytest.approx([4.0, 2.0])
    for wild in (float("nan"), [1.0, float("inf")]):
        result = run_space(space_app(train_loss=wild))
        assert (result.failures, result.train_metrics_clientapp) == ((), {})


def test_a_node_that_reports_nothing_leaves_the_mean_to_the_others():
    """It is node 1 that is spoiled: losses of 0 and 2 with 1 and 3 examples are left."""
    result = run_space(Spoiled(space_app(), lambda content: content.pop("metrics")), 3)
    assert result.failures == ()
    assert result.train_metrics_clientapp == {1: {"train_loss": pytest.approx(6 / 4)}}


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        ({"num-examples": 0}, "'num-examples' is 0"),
        ({"train_loss": 1.0}, "'num-examples' is missing"),
    ],
)
def test_metrics_beside_a_space_are_checked_like_any_others(lie, words):
    def lying(content):
        content["metrics"] = MetricRecord(lie)

    ((_, failure),) = run_space(Spoiled(space_app(), lying), 3).failures
    assert failure.node == "1"
    assert words in failure.reason
