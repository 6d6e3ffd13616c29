"""Flower's privacy tools with ours: what works, and that nothing is bypassed in silence."""

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from helpers_blobs import both_parts

from conftest import initial_arrays, toy_app
from gems_flwr import (
    Ball,
    Cone,
    DynamicAveraging,
    FedAvg,
    Gems,
    InProcessGrid,
    NodeLimits,
    PeriodicAveraging,
    good_enough_mod,
)
from gems_flwr.core.records import SECAGG_CONFIGS, pack_name, to_numpy, to_record
from gems_flwr.errors import RoundFailedError
from gems_flwr.node.mod import inner_mods

CLIP = 0.5
SHAPE = (2, 3)
# Sensitivity 0 adds no noise: what is left is the clipping, which can be computed.
NO_NOISE = LocalDpMod(clipping_norm=CLIP, sensitivity=0.0, epsilon=1.0, delta=1e-5)
NOISE = LocalDpMod(clipping_norm=CLIP, sensitivity=1.0, epsilon=1.0, delta=1e-5)
CONE = Cone(min_count=2)


def data(context):
    rng = np.random.default_rng(context.node_config["partition-id"])
    y = np.repeat([0, 1], 40)
    x = rng.normal(size=(80, 3)) + 3 * np.eye(3)[y]
    return torch.from_numpy(x).float(), torch.from_numpy(y)


OURS = good_enough_mod(both_parts(data), limits=NodeLimits(largest_rank="full"))


def app_with(*mods):
    """A user's app: node k adds k + 1 to every weight."""
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        arrays = to_numpy(message.content["arrays"])
        step = np.float32(context.node_config["partition-id"] + 1)
        metrics = MetricRecord({"num-examples": 1, "loss-sum": 1.0, "batches": 1})
        trained = to_record({key: a + step for key, a in arrays.items()})
        return Message(RecordDict({"arrays": trained, "metrics": metrics}), reply_to=message)

    return app


def start(strategy, *mods, rounds=1):
    first = {"weight": Array(np.zeros(SHAPE, np.float32)), "bias": Array(np.zeros(2, np.float32))}
    grid = InProcessGrid(app_with(*mods), 3)
    return strategy.start(grid, ArrayRecord(first), num_rounds=rounds)


def flat(result):
    return np.concatenate([a.ravel() for a in to_numpy(result.arrays).values()])


# --- LocalDpMod -----------------------------------------------------------------------------


def test_averages_are_of_clipped_models_under_local_dp():
    """Every node's update points along (1, …, 1) and is longer than the clipping norm."""
    clipped = pytest.approx(np.full(8, CLIP / np.sqrt(8)), rel=1e-5)
    result = start(FedAvg(), NO_NOISE)
    assert flat(result) == clipped
    assert np.abs(flat(start(FedAvg(), NOISE)) - flat(result)).max() > 0.1
    # Around the handler alone or around our mod as well: models that are averaged pass it.
    assert flat(start(FedAvg(), OURS, NO_NOISE)) == clipped


def test_inside_dynamic_averaging_every_training_step_is_clipped():
    """Three steps of at most the clipping norm, all in one direction, then the mean of equals."""
    result = start(PeriodicAveraging(b=3), good_enough_mod(), NO_NOISE, rounds=3)
    assert flat(result) == pytest.approx(np.full(8, 3 * CLIP / np.sqrt(8)), rel=1e-5)
    assert result.failures == ()


@pytest.mark.parametrize("strategy", [DynamicAveraging(delta=1e9), Gems(space=CONE)], ids=type)
def test_around_our_mod_local_dp_refuses_and_the_log_says_so(strategy, caplog):
    """Flower 1.41 addresses the refusal to the reply instead of the message: it gets lost."""
    with pytest.raises(RoundFailedError, match="no reply"):
        start(strategy, NOISE, OURS)
    assert 'reason="LocalDpMod expects' in caplog.text


@pytest.mark.parametrize(
    ("inside", "space"),
    [
        (NOISE, CONE),
        (fixedclipping_mod, Cone(sums=True, min_count=2)),
        (adaptiveclipping_mod, CONE),
        (secaggplus_mod, Ball(epsilon=0.1, directions=5)),
    ],
)
def test_inside_our_mod_they_would_be_bypassed_and_that_is_refused(inside, space):
    name = type(inside).__name__ if inside is NOISE else inside.__name__
    with pytest.raises(RoundFailedError, match=f"{name} is inside good_enough_mod"):
        start(Gems(space=space), OURS, inside)


def test_mods_are_found_where_flower_wraps_them():
    """If a new Flower hides its mods from us, this is the test that says so."""
    found = []

    def outer(message, context, call_next):
        found.extend(inner_mods(call_next))
        return call_next(message, context)

    start(FedAvg(), outer, NO_NOISE)
    assert "LocalDpMod" in found


# --- secure aggregation ---------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [FedAvg(), Gems(space=CONE)], ids=type)
def test_under_flowers_secure_aggregation_our_strategies_refuse_with_what_to_do(strategy):
    with pytest.raises(RoundFailedError, match="only Flower's legacy SecAggPlusWorkflow speaks"):
        start(strategy, secaggplus_mod, OURS)


def test_a_masked_reply_is_never_taken_for_a_model():
    def masked(message, context):
        content = RecordDict({SECAGG_CONFIGS: pack_name("x")["node"]})
        content["arrays"] = message.content["arrays"]
        content["metrics"] = MetricRecord({"num-examples": 1})
        return Message(content, reply_to=message)

    grid = InProcessGrid(toy_app({1: masked}), 3)
    (failure,) = FedAvg().start(grid, initial_arrays(), num_rounds=1).history[1].failures
    assert failure.node == "1"
    assert "secaggplus_mod" in failure.reason
