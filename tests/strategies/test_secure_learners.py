"""Local learners whose reports and models the server knows the mean of, and no more."""

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from gems_flwr import (
    DynamicAveraging,
    InProcessGrid,
    OptionError,
    PeriodicAveraging,
    SecureSum,
    dynamic_averaging_mod,
    secure_sum_mod,
)
from gems_flwr.wire.secure_messages import stage_word


def app(*outer, secure=True):
    masks = [secure_sum_mod(only_sums=True)] if secure else []
    client = ClientApp(mods=[*outer, *masks, dynamic_averaging_mod()])

    @client.train()
    def train(message, context):
        node = context.node_config["partition-id"]
        [w, count] = message.content["arrays"].to_numpy_ndarrays()
        metrics = {"num-examples": 1, "loss-sum": 2.0 + node, "batches": 1}
        metrics["correct-share-sum"] = 0.5
        arrays = ArrayRecord([w + np.float32(0.25 * node), count + 1])
        content = RecordDict({"arrays": arrays, "metrics": MetricRecord(metrics)})
        return Message(content, reply_to=message)

    return client


def run(strategy, client, rounds, nodes=4):
    initial = ArrayRecord([np.zeros(3, np.float32), np.array([0])])
    return strategy.start(InProcessGrid(client, nodes), initial, num_rounds=rounds)


PROTOCOLS = [
    (PeriodicAveraging, {"b": 2}),
    (DynamicAveraging, {"delta": 1.0, "condition": "total", "augmentation": "all"}),
    (
        DynamicAveraging,
        {"delta": 1.0, "condition": "total", "augmentation": "all", "follow_loss": 1.0},
    ),
]


@pytest.mark.parametrize(("kind", "options"), PROTOCOLS)
def test_the_protocol_does_what_it_does_without_masks(kind, options):
    """Quarters are exact on the grid of fixed point up to its step: 4 · 8 / 2^39."""
    secure = run(kind(secure=SecureSum(), **options), app(), 6)
    plain = run(kind(**options), app(secure=False), 6)
    for a, b in zip(
        secure.arrays.to_numpy_ndarrays(), plain.arrays.to_numpy_ndarrays(), strict=True
    ):
        assert np.abs(a - b).max() < 1e-6
    same = ("synchronisations", "full_synchronisations", "models_up", "queries", "violations")
    assert {k: secure.details[k] for k in same} == {k: plain.details[k] for k in same}
    assert secure.details["cumulative_loss"] == pytest.approx(plain.details["cumulative_loss"])
    assert secure.details["batches"] == pytest.approx(plain.details["batches"])


def test_a_quiet_round_moves_no_model():
    """Squared distances of 0 to 3 · 0.75²: their mean stays below 10, so nobody is asked."""
    strategy = DynamicAveraging(
        delta=10.0,
        condition="total",
        augmentation="all",
        final_sync=False,
        secure=SecureSum(),
    )
    result = run(strategy, app(), 1)
    assert result.details["models_up"] == 0


def test_nothing_leaves_a_node_in_the_clear():
    """The mod refuses whatever is not masked, and the last delivery has no answer to refuse."""
    strategy = PeriodicAveraging(b=1, secure=SecureSum())
    result = run(strategy, app(), 3)
    assert all(not record.failures for record in result.history)


def test_a_node_that_is_lost_in_one_round_is_back_in_the_next():
    def losing(message, context, call_next):
        at, config = stage_word(message.content), message.content.config_records
        here = context.node_config["partition-id"]
        if at == "mask" and here == 3 and config["config"]["server-round"] == 2:
            raise ConnectionError("gone")
        return call_next(message, context)

    result = run(PeriodicAveraging(b=1, secure=SecureSum()), app(losing), 4)
    assert [f.node for f in result.history[2].failures][:1] == ["3"]
    assert result.history[2].train_metrics["synchronised"] == 3
    assert result.history[3].train_metrics["synchronised"] == 4


def test_a_node_that_lost_its_model_begins_anew():
    def forgetful(message, context, call_next):
        config = message.content.config_records["config"]
        first = stage_word(message.content) == "mask" and config["server-round"] == 2
        if first and context.node_config["partition-id"] == 1:
            for key in [k for k in context.state if k.startswith("averaging")]:
                del context.state[key]
        return call_next(message, context)

    quiet = DynamicAveraging(delta=100.0, condition="total", augmentation="all", secure=SecureSum())
    result = run(quiet, app(forgetful), 4)
    assert result.details["lost_states"] == ((2, "1"),)
    assert result.history[4].train_metrics["synchronised"] == 4


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (DynamicAveraging, {}, "condition='total' and augmentation='all'"),
        (PeriodicAveraging, {"fraction": 0.5}, "fraction must be 1"),
        (PeriodicAveraging, {"weighted": True}, "weighted must be false"),
    ],
)
def test_what_would_tell_of_single_nodes_is_refused(kind, options, said):
    with pytest.raises(OptionError, match=said):
        kind(secure=SecureSum(), **options)
