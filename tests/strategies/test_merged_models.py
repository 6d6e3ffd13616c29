"""Merging over messages: any client with the mod, and what becomes of bad statistics."""

import numpy as np
import pytest
import torch
from flwr.app import Array, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod
from helpers_blobs import CLASSES, FEATURES, blobs, both_parts
from torch import nn

from gems_flwr import (
    FedAvg,
    InProcessGrid,
    MergedModels,
    NodeLimits,
    Report,
    Task,
    Tolerance,
    good_enough_mod,
    task_client_app,
)
from gems_flwr.core.records import to_numpy, to_record
from gems_flwr.errors import MissingModError, RoundFailedError
from gems_flwr.merging import NEEDED, measure_statistics, merge_models

METHODS = list(NEEDED)
LABELS = [[0, 1], [2, 3], [1, 2]]


def build():
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.ReLU(), nn.Linear(5, CLASSES))


def data(context):
    node = int(context.node_config["partition-id"])
    return blobs(LABELS[node], per_class=20 + 10 * node, seed=node)


def fit(model, x, y, node):
    torch.manual_seed(node)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(0.5 * torch.randn(weight.shape))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


class Blobs(Task):
    def __init__(self, context):
        self._node, self._data = int(context.node_config["partition-id"]), data(context)

    def build_model(self):
        return build()

    def train(self, model, *, seed, config):
        fit(model, *self._data, self._node)
        return Report(len(self._data[1]))

    def evaluate(self, model, *, config):
        raise NotImplementedError

    def validation_data(self):
        return self._data


def users_app(*mods):
    """An ordinary Flower app: names its records as it likes, and gives no name of its own."""
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        x, y = data(context)
        model = fit(build(), x, y, int(context.node_config["partition-id"]))
        record = to_record({k: v.numpy() for k, v in model.state_dict().items()})
        metrics = MetricRecord({"num-examples": len(y)})
        return Message(RecordDict({"my-model": record, "mine": metrics}), reply_to=message)

    return app


# The squared gradients of Fisher merging are about a model that the server steers.
CONSENT = NodeLimits(adaptive_answers=10)
OUR_MOD = good_enough_mod(both_parts(data), model=build, limits=CONSENT)


def initial(model=None):
    return to_record({k: v.numpy() for k, v in (model or build()).state_dict().items()})


def start(app, method="regmean", **options):
    return MergedModels(method=method, **options).start(InProcessGrid(app, 3), initial())


def arrays(result):
    return to_numpy(result.arrays)


@pytest.mark.parametrize("method", METHODS)
def test_an_ordinary_client_with_the_mod_and_the_ready_app_give_the_mathematics(method):
    models, statistics, counts = [], [], []
    for node, labels in enumerate(LABELS):
        x, y = blobs(labels, per_class=20 + 10 * node, seed=node)
        models.append({k: v.numpy() for k, v in fit(build(), x, y, node).state_dict().items()})
        counts.append(len(y))
        statistics.append(measure_statistics(NEEDED[method], models[-1], (x, y), model=build()))
    expected = merge_models(method, models, statistics, counts)
    for app in (users_app(OUR_MOD), task_client_app(Blobs, limits=CONSENT)):
        result = start(app, method)
        assert result.failures == ()
        assert [record.round for record in result.history] == [0, 1]
        assert result.details["method"] == method
        # Statistics were rounded to single precision on the way.
        for key, array in arrays(result).items():
            assert np.allclose(array, expected[key], atol=1e-2), key


def test_the_bytes_of_each_method_are_those_of_its_statistics():
    """Upper halves of 7 and 6 rows, the Fisher as large as the model."""
    app = task_client_app(Blobs, limits=CONSENT)
    model = FedAvg(fraction_evaluate=0.0).start(InProcessGrid(app, 3), initial(), num_rounds=1)
    for method, numbers in {"regmean": 28 + 21, "fisher": 5 * 7 + 4 * 6}.items():
        beyond = (start(app, method).traffic.bytes_up - model.traffic.bytes_up) / 3
        assert 4 * numbers < beyond < 4 * numbers + 1200, method


def test_a_client_without_the_mod_is_refused_with_what_it_lacks():
    with pytest.raises(MissingModError, match=r"write ClientApp\(mods=\[good_enough_mod\(data, mo"):
        start(users_app(), "regmean")


def test_unweighted_nodes_count_the_same_and_claims_can_be_limited():
    app = task_client_app(Blobs, limits=CONSENT)
    equal = arrays(start(app, "fisher", weighted=False))
    capped = arrays(start(app, "fisher", tolerance=Tolerance(max_examples=1)))
    counted = arrays(start(app, "fisher"))
    assert all(np.allclose(equal[key], capped[key], atol=1e-6) for key in equal)
    assert any(not np.allclose(equal[key], counted[key], atol=1e-4) for key in equal)


# --- bad statistics ---------------------------------------------------------------------------


def spoiling(node, spoil):
    """A mod around all others that changes what one node sends."""

    def mod(message, context, call_next):
        reply = call_next(message, context)
        if context.node_config["partition-id"] == node:
            spoil(reply.content["statistics"])
        return reply

    return mod


def put(key, value):
    def spoil(record):
        array = record[key].numpy().copy()
        array.flat[1 if value == 1e3 else 0] = value
        record[key] = Array(array)

    return spoil


@pytest.mark.parametrize(
    ("method", "spoil", "reason"),
    [
        ("regmean", put("2.weight/inputs", 1e3), "expected the second moment of some data"),
        ("fisher", put("2.weight/fisher", -1e-3), "'fisher' of '2.weight': mean sq"),
    ],
)
def test_a_node_with_bad_statistics_is_named_and_the_others_are_merged(method, spoil, reason):
    result = start(users_app(spoiling(1, spoil), OUR_MOD), method)
    (failure,) = result.history[1].failures
    assert failure.node == "1"
    assert reason in failure.reason
    assert result.history[1].nodes_answered == ("0", "2")
    assert all(np.isfinite(array).all() for array in arrays(result).values())


def test_limits_of_a_node_hold_for_statistics():
    noise = LocalDpMod(clipping_norm=1.0, sensitivity=1.0, epsilon=1.0, delta=1e-5)
    with pytest.raises(RoundFailedError, match="LocalDpMod is inside good_enough_mod"):
        start(users_app(OUR_MOD, noise), "fisher")
    strict = good_enough_mod(both_parts(data), model=build, limits=NodeLimits(require_dp=True))
    with pytest.raises(RoundFailedError, match="require_dp"):
        start(users_app(strict), "fisher")
    few = good_enough_mod(both_parts(data), model=build, limits=NodeLimits(largest_rank=3))
    with pytest.raises(RoundFailedError, match=r"largest_rank.* second moments of 7 inputs of 40"):
        start(users_app(few), "regmean")


# --- options ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"method": "mean"}, "method must be one of"),
        ({"shrink": 1.5}, "shrink must be in"),
    ],
)
def test_options_out_of_range_are_refused_when_the_strategy_is_built(options, match):
    with pytest.raises(ValueError, match=match):
        MergedModels(**options)
