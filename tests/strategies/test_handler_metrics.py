"""What the user's own train handler reports is told, whatever else a strategy asks for.

Node k counts k + 1 examples and reports a loss of k: the mean is Σ k (k + 1) / Σ (k + 1), for three
nodes 8 / 6, for two 2 / 3.
"""

import pytest
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from helpers_blobs import both_parts
from helpers_gems import Spoiled, fit, node_data
from helpers_gems import initial as initial_layer
from helpers_layerwise import Blobs
from helpers_layerwise import initial as initial_network
from helpers_learners import initial as initial_walk
from helpers_multi_model import initial as initial_models

from conftest import record_equal
from gems_flwr.client.dynamic_averaging_mod import dynamic_averaging_mod
from gems_flwr.client.good_enough_mod import good_enough_mod
from gems_flwr.client.multi_model_mod import multi_model_mod
from gems_flwr.client.task import Report
from gems_flwr.client.task_app import task_client_app
from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.strategies.dynamic_averaging import DynamicAveraging
from gems_flwr.strategies.gems import Gems
from gems_flwr.strategies.layerwise_gems import LayerwiseGems
from gems_flwr.strategies.multi_model.multi_model import MultiModel
from gems_flwr.strategies.nosync import NoSync
from gems_flwr.strategies.periodic_averaging import PeriodicAveraging
from gems_flwr.wire.records import to_numpy, to_record
from gems_flwr.wire.space_requests import Ball, Cone, Ellipsoid


def app_of(mod, step=lambda arrays, context: arrays, **more):
    """Return an ordinary app whose handler reports what this module's docstring says."""
    app = ClientApp(mods=[mod])

    @app.train()
    def train(message, context):
        node = context.node_config["partition-id"]
        arrays = to_record(step(to_numpy(message.content["arrays"]), context))
        told = {"num-examples": node + 1, "train_loss": float(node), **more}
        content = RecordDict({"arrays": arrays, "metrics": MetricRecord(told)})
        return Message(content, reply_to=message)

    return app


def walking_app(**more):
    def step(arrays, context):
        return {**arrays, "w": arrays["w"] + context.node_config["partition-id"]}

    return app_of(dynamic_averaging_mod(), step, **more)


def space_app(**more):
    def step(arrays, context):
        weight, bias = fit(arrays["weight"], arrays["bias"], *node_data(context))
        return {"weight": weight, "bias": bias}

    return app_of(good_enough_mod(both_parts(lambda context: node_data(context, 1))), step, **more)


# --- models that live on the nodes ------------------------------------------------------------


@pytest.mark.parametrize(
    "strategy", [DynamicAveraging(delta=0.01), PeriodicAveraging(b=1), NoSync()], ids=type
)
def test_local_learners_tell_the_handlers_metrics_beside_their_own(strategy):
    sums = {"loss-sum": 2.0, "batches": 1, "correct-share-sum": 0.5}
    grid = InProcessGrid(walking_app(**sums), 3)
    result = strategy.start(grid, initial_walk(), num_rounds=3)
    for metrics in result.train_metrics_clientapp.values():
        assert metrics["train_loss"] == pytest.approx(8 / 6)
        assert {"models_up", "in_place_loss", "cumulative_loss"} <= metrics.keys()
        # What is summed up is not averaged as well.
        assert not {"loss-sum", "batches", "correct-share-sum"} & metrics.keys()


def test_neither_overwrites_the_other_where_both_have_one_name():
    """Also if the strategy has nothing to tell under that name, as here no delta."""
    app = walking_app(models_up=41, delta=0.25)
    result = PeriodicAveraging(b=1).start(InProcessGrid(app, 3), initial_walk(), num_rounds=1)
    metrics = result.train_metrics_clientapp[1]
    assert (metrics["client/models_up"], metrics["models_up"]) == (pytest.approx(41), 3)
    assert metrics["client/delta"] == pytest.approx(0.25)
    assert "delta" not in metrics


def test_several_models_do_not_overwrite_a_handlers_metric():
    app = app_of(multi_model_mod(holdings=lambda context: {"a": 10}), pairs=41)
    strategy = MultiModel(sampling="full")
    result = strategy.start(InProcessGrid(app, 3), initial_models(("a",)), num_rounds=1)
    metrics = result.train_metrics_clientapp[1]
    assert (metrics["client/pairs"], metrics["pairs"]) == (pytest.approx(41), 3)


# --- spaces and neurons -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "space", [Ball(directions=20), Ellipsoid(directions=20)], ids=["ball", "ellipsoid"]
)
def test_spaces_that_need_training_tell_the_handlers_metrics(space):
    result = Gems(space=space).start(InProcessGrid(space_app(), 2), initial_layer())
    assert result.train_metrics_clientapp == {1: {"train_loss": pytest.approx(2 / 3)}}
    silent = space_app(**{"num-examples": [1, 2]})  # a list is no number of examples
    plain = Gems(space=space).start(InProcessGrid(silent, 2), initial_layer())
    assert plain.train_metrics_clientapp == {}
    assert plain.failures == ()
    assert record_equal(plain.arrays, result.arrays)
    # Two words and two numbers from each node.
    words = len("num-examples") + len("train_loss")
    assert result.traffic.bytes_up - plain.traffic.bytes_up == 2 * (words + 2 * 8)


def test_a_cone_needs_no_training_and_has_none_to_tell_of():
    app = space_app()
    result = Gems(space=Cone(min_count=2)).start(InProcessGrid(app, 2), initial_layer())
    assert result.train_metrics_clientapp == {}


class Reporting(Blobs):
    def train(self, model, *, seed, config):
        super().train(model, seed=seed, config=config)
        return Report(self.node + 1, {"train_loss": float(self.node)})


@pytest.mark.parametrize("head", ["ball", "cone"])
def test_layer_by_layer_each_round_that_trains_tells_the_handlers_metrics(head):
    app = task_client_app(lambda c: Reporting(c.node_config["partition-id"], (4,)))
    strategy = LayerwiseGems(head=Ball(epsilon=0.1, directions=20) if head == "ball" else "cone")
    result = strategy.start(InProcessGrid(app, 2), initial_network((4,)))
    rounds = {1, 2} if head == "ball" else {1}
    assert result.train_metrics_clientapp.keys() == rounds
    for metrics in result.train_metrics_clientapp.values():
        assert metrics == {"train_loss": pytest.approx(2 / 3)}


@pytest.mark.parametrize(
    "told", [{"train_loss": float("nan")}, {"train_loss": [1.0, float("inf")]}]
)
def test_a_loss_that_cannot_be_averaged_does_not_cost_the_node_its_space(told):
    app = space_app(**told)
    result = Gems(space=Ball(directions=20)).start(InProcessGrid(app, 2), initial_layer())
    assert result.failures == ()
    assert result.train_metrics_clientapp == {}


def test_lists_are_averaged_number_by_number():
    app = space_app(curve=[4.0, 2.0])
    result = Gems(space=Ball(directions=20)).start(InProcessGrid(app, 2), initial_layer())
    assert result.train_metrics_clientapp[1]["curve"] == pytest.approx([4.0, 2.0])


def test_handlers_and_nodes_that_report_nothing_are_as_good_as_others():
    """Of earlier versions, say: the mean is that of the others. It is node 1 that is spoiled."""
    app = Spoiled(space_app(), lambda content: content.pop("metrics"))
    result = Gems(space=Ball(directions=20)).start(InProcessGrid(app, 3), initial_layer())
    assert result.failures == ()
    # Losses of 0 and 2 with 1 and 3 examples.
    assert result.train_metrics_clientapp == {1: {"train_loss": pytest.approx(6 / 4)}}


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        ({"num-examples": 0}, "'num-examples' is 0"),
        ({"num-examples": 1, "train_loss": float("inf")}, "'train_loss' is inf"),
        ({"train_loss": 1.0}, "'num-examples' is missing"),
    ],
)
def test_metrics_beside_a_space_are_checked_like_any_others(lie, words):
    def lying(content):
        content["metrics"] = MetricRecord(lie)

    grid = InProcessGrid(Spoiled(space_app(), lying), 3)
    result = Gems(space=Ball(directions=20)).start(grid, initial_layer())
    ((_, failure),) = result.failures
    assert failure.node == "1"
    assert words in failure.reason


def test_a_reply_as_it_is_on_the_wire():
    """The space, its meta data, the metrics and the name: nothing else crosses the network."""
    seen = []

    class Watching(InProcessGrid):
        def _deliver(self, message, timeout):
            reply = super()._deliver(message, timeout)
            seen.append(reply)
            return reply

    grid = Watching(space_app(), 2)
    Gems(space=Ball(directions=20)).start(grid, initial_layer())
    assert {tuple(sorted(reply.content)) for reply in seen} == {
        ("metrics", "node", "space", "space-meta")
    }
