"""Flower's privacy tools with ours: what works, and that nothing is bypassed in silence."""

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.server.workflow import SecAggPlusWorkflow
from helpers_blobs import both_parts

from conftest import initial_arrays, toy_app
from gems_flwr.client.dynamic_averaging_mod import dynamic_averaging_mod
from gems_flwr.client.good_enough_mod import good_enough_mod
from gems_flwr.client.limits import NodeLimits, inner_mods
from gems_flwr.client.statistics_mod import statistics_mod
from gems_flwr.errors import RoundFailedError
from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.strategies.dynamic_averaging import DynamicAveraging
from gems_flwr.strategies.fedavg import FedAvg
from gems_flwr.strategies.gems import Gems
from gems_flwr.strategies.merged_models import MergedModels
from gems_flwr.strategies.periodic_averaging import PeriodicAveraging
from gems_flwr.wire.keys import SECAGG_CONFIGS
from gems_flwr.wire.model_replies import pack_name
from gems_flwr.wire.records import to_numpy, to_record
from gems_flwr.wire.space_requests import Ball, Cone

CLIP = 0.5
SHAPE = (2, 3)
# Sensitivity 0 adds no noise: what is left is the clipping, which can be computed.
NO_NOISE = LocalDpMod(clipping_norm=CLIP, sensitivity=0.0, epsilon=1.0, delta=1e-5)
ANY_RANK = NodeLimits(largest_rank="full")
NOISE = LocalDpMod(clipping_norm=CLIP, sensitivity=1.0, epsilon=1.0, delta=1e-5)


def data(context):
    rng = np.random.default_rng(context.node_config["partition-id"])
    y = np.repeat([0, 1], 40)
    x = rng.normal(size=(80, 3)) + 3 * np.eye(3)[y]
    return torch.from_numpy(x).float(), torch.from_numpy(y)


def app_with(*mods):
    """A user's app: node k adds k + 1 to every weight."""
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        arrays = to_numpy(message.content["arrays"])
        step = np.float32(context.node_config["partition-id"] + 1)
        content = RecordDict(
            {
                "arrays": to_record({key: a + step for key, a in arrays.items()}),
                "metrics": MetricRecord({"num-examples": 1, "loss-sum": 1.0, "batches": 1}),
            }
        )
        return Message(content, reply_to=message)

    return app


def start(strategy, app, rounds=1):
    first = ArrayRecord(
        {"weight": Array(np.zeros(SHAPE, np.float32)), "bias": Array(np.zeros(2, np.float32))}
    )
    return strategy.start(InProcessGrid(app, 3), first, num_rounds=rounds)


def flat(result):
    return np.concatenate([a.ravel() for a in to_numpy(result.arrays).values()])


# --- LocalDpMod -----------------------------------------------------------------------------


def test_averages_are_of_clipped_models_under_local_dp():
    """Every node's update points along (1, …, 1) and is longer than the clipping norm."""
    result = start(FedAvg(), app_with(NO_NOISE))
    assert flat(result) == pytest.approx(np.full(8, CLIP / np.sqrt(8)), rel=1e-5)
    noisy = flat(start(FedAvg(), app_with(NOISE)))
    assert np.abs(noisy - flat(result)).max() > 0.1


def test_inside_dynamic_averaging_every_training_step_is_clipped():
    """Three steps of at most the clipping norm, all in one direction, then the mean of equals."""
    for strategy in (PeriodicAveraging(b=3), DynamicAveraging(delta=0.01)):
        result = start(strategy, app_with(dynamic_averaging_mod(), NO_NOISE), rounds=3)
        assert flat(result) == pytest.approx(np.full(8, 3 * CLIP / np.sqrt(8)), rel=1e-5)
        assert result.failures == ()


def test_what_dynamic_averaging_reports_is_made_from_noised_models_too():
    app = app_with(dynamic_averaging_mod(), NOISE)
    distances = []

    class Watching(DynamicAveraging):
        def synchronise(self, server_round, learners, replies, ask):
            distances.extend(reply.squared_distance for reply in replies.values())
            return super().synchronise(server_round, learners, replies, ask)

    start(Watching(delta=1e9, final_sync=False), app)
    # Unclipped and without noise it would be 8, 32, 72; clipped alone 0.25 for all.
    assert len(set(distances)) == 3
    assert not any(abs(d - v) < 1e-3 for d in distances for v in (0.25, 8, 32, 72))


@pytest.mark.parametrize(
    ("strategy", "mod"),
    [
        (DynamicAveraging(delta=1e9), dynamic_averaging_mod()),
        (Gems(space=Cone(min_count=2)), good_enough_mod(both_parts(data), limits=ANY_RANK)),
        (
            Gems(space=Cone(sums=True, min_count=2)),
            good_enough_mod(both_parts(data), limits=ANY_RANK),
        ),
        (MergedModels(), statistics_mod(both_parts(data), limits=ANY_RANK)),
    ],
)
def test_around_our_mods_local_dp_refuses_and_the_log_says_so(strategy, mod, caplog):
    """Flower 1.41 addresses the refusal to the reply instead of the message: nobody gets it."""
    with pytest.raises(RoundFailedError, match="no reply"):
        start(strategy, app_with(NOISE, mod))
    assert 'reason="LocalDpMod expects' in caplog.text


@pytest.mark.parametrize("inside", [NOISE, fixedclipping_mod, adaptiveclipping_mod, secaggplus_mod])
@pytest.mark.parametrize(
    "space",
    [
        Cone(min_count=2),
        Cone(sums=True, min_count=2),
        Ball(epsilon=0.1, directions=5),
    ],
)
def test_inside_the_spaces_mod_they_would_be_bypassed_and_that_is_refused(inside, space):
    name = type(inside).__name__ if inside is NOISE else inside.__name__
    with pytest.raises(RoundFailedError, match=f"{name} is inside good_enough_mod"):
        start(
            Gems(space=space), app_with(good_enough_mod(both_parts(data), limits=ANY_RANK), inside)
        )


def test_without_a_request_for_a_space_the_order_does_not_matter():
    result = start(FedAvg(), app_with(good_enough_mod(both_parts(data), limits=ANY_RANK), NO_NOISE))
    assert flat(result) == pytest.approx(np.full(8, CLIP / np.sqrt(8)), rel=1e-5)


def test_other_mods_inside_are_nobodys_business():
    def harmless(message, context, call_next):
        return call_next(message, context)

    assert (
        start(
            Gems(space=Cone(min_count=2)),
            app_with(good_enough_mod(both_parts(data), limits=ANY_RANK), harmless),
        ).failures
        == ()
    )


def test_mods_are_found_where_flower_wraps_them():
    """If a new Flower hides its mods from us, this is the test that says so."""
    found = []

    def outer(message, context, call_next):
        found.extend(inner_mods(call_next))
        return call_next(message, context)

    start(FedAvg(), app_with(outer, NO_NOISE))
    assert "LocalDpMod" in found


def test_private_moments_need_no_mod():
    result = start(
        Gems(space=Cone(dp_epsilon=10.0, dp_clip=5.0, min_count=2)),
        app_with(good_enough_mod(both_parts(data), limits=ANY_RANK)),
    )
    assert result.failures == ()


# --- secure aggregation ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "strategy", [FedAvg(), DynamicAveraging(), Gems(space=Cone(sums=True, min_count=2))]
)
def test_under_secure_aggregation_our_strategies_refuse_with_what_to_do(strategy):
    mods = [
        secaggplus_mod,
        dynamic_averaging_mod(),
        good_enough_mod(both_parts(data), limits=ANY_RANK),
    ]
    with pytest.raises(RoundFailedError, match="only Flower's legacy SecAggPlusWorkflow speaks"):
        start(strategy, app_with(*mods))


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


def test_flowers_secure_aggregation_still_wants_the_legacy_interface():
    """What Flower 1.41 lacks. If this fails, secure sums have become possible: see faults.md."""
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
    with pytest.raises(TypeError, match="LegacyContext"):
        SecAggPlusWorkflow(num_shares=3, reconstruction_threshold=2)(
            InProcessGrid(toy_app(), 3), context
        )
