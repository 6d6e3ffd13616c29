"""Merging over messages: any client with the mod, and what becomes of bad statistics."""

import numpy as np
import pytest
import torch
from flwr.app import Array, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod
from helpers_blobs import CLASSES, FEATURES, TEST, blobs, both_parts
from torch import nn

from gems_flwr.client.compression_mod import compression_mod
from gems_flwr.client.statistics_mod import statistics_mod
from gems_flwr.client.task import Report, Task
from gems_flwr.client.task_app import task_client_app
from gems_flwr.errors import RoundFailedError
from gems_flwr.model_merging.measure import measure_statistics
from gems_flwr.model_merging.merge_models import merge_models
from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.strategies.fedavg import FedAvg
from gems_flwr.strategies.merged_models import MergedModels
from gems_flwr.wire.records import to_numpy, to_record
from gems_flwr.wire.requests import StatisticsRequest

METHODS = ["regmean", "fisher", "kfac", "matching", "fedfisher_diagonal", "fedfisher_kfac"]
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
    """An ordinary Flower app: names its records as it likes, tells no name of its own."""
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        x, y = data(context)
        model = fit(build(), x, y, int(context.node_config["partition-id"]))
        record = to_record({k: v.numpy() for k, v in model.state_dict().items()})
        metrics = MetricRecord({"num-examples": len(y)})
        return Message(RecordDict({"my-model": record, "mine": metrics}), reply_to=message)

    return app


def test_models_that_travel_packed_are_merged_with_statistics_that_do_not():
    """Models come in half precision of their differences; the statistics, of other shapes, exactly.

    RegMean's weights are then off by about that, 2^-11 of differences below 4.
    """
    app = users_app(compression_mod(), statistics_mod(both_parts(data), model=build))
    packed, plain = start(app, "regmean", compress="float16"), start(app, "regmean")
    for name, array in arrays(plain).items():
        assert np.abs(arrays(packed)[name] - array).max() < 4 * 2.0**-11 * 4, name
    assert packed.failures == ()
    assert packed.traffic.bytes_down < plain.traffic.bytes_down


def spoiling(node, spoil):
    """A mod around all others that changes what one node sends."""

    def mod(message, context, call_next):
        reply = call_next(message, context)
        if context.node_config["partition-id"] == node:
            spoil(reply.content)
        return reply

    return mod


def start(app, method="kfac", **options):
    initial = to_record({k: v.numpy() for k, v in build().state_dict().items()})
    return MergedModels(method=method, **options).start(InProcessGrid(app, 3), initial)


def arrays(result):
    return to_numpy(result.arrays)


@pytest.mark.parametrize("method", METHODS)
def test_an_ordinary_client_with_the_mod_and_the_ready_app_give_the_mathematics(method):
    models, statistics, counts = [], [], []
    for node, labels in enumerate(LABELS):
        x, y = blobs(labels, per_class=20 + 10 * node, seed=node)
        trained = {k: v.numpy() for k, v in fit(build(), x, y, node).state_dict().items()}
        models.append(trained)
        counts.append(len(y))
        request = StatisticsRequest(method)
        statistics.append(
            measure_statistics(request.method, request.labels, trained, (x, y), model=build())
        )
    expected = merge_models(method, models, statistics, counts).arrays
    for app in (users_app(statistics_mod(both_parts(data), model=build)), task_client_app(Blobs)):
        result = start(app, method)
        assert result.failures == ()
        assert [record.round for record in result.history] == [0, 1]
        assert result.details["method"] == method
        # Statistics were rounded to single precision on the way.
        for key, array in arrays(result).items():
            assert np.allclose(array, expected[key], atol=1e-2), key


def test_the_bytes_of_each_method_are_those_of_its_statistics():
    """Upper halves of A (7 and 6 rows) and B (5 and 4), the Fisher as large as the model."""
    app = task_client_app(Blobs)
    up = {method: start(app, method).traffic.bytes_up / 3 for method in METHODS}
    grams, factors, weights = 28 + 21, 15 + 10, 5 * 7 + 4 * 6
    for method, numbers in {
        "regmean": grams,
        "kfac": grams + factors,
        "fedfisher_kfac": grams + factors,
        "fisher": weights,
        "fedfisher_diagonal": weights,
    }.items():
        beyond = up[method] - up["matching"]
        assert 4 * numbers < beyond < 4 * numbers + 1200, method


@pytest.mark.parametrize("method", ["regmean", "kfac", "fisher", "fedfisher_kfac"])
def test_a_share_of_the_models_bytes_is_what_the_statistics_take(method):
    """Of 59 weights in single precision, in three arrays; what is merged is not far from exact."""
    app = task_client_app(Blobs)
    options = {"steps": 100} if method == "fedfisher_kfac" else {}
    whole, packed = (
        start(app, method, **options),
        start(app, method, statistics_share=1.3, **options),
    )
    beyond = (packed.traffic.bytes_up - start(app, "matching").traffic.bytes_up) / 3
    assert packed.failures == ()
    assert beyond < 1.3 * 4 * 59 + 8 + 900
    merged = arrays(packed)
    if method != "kfac":  # whose solution hangs on the smallest eigenvalues
        assert all(np.abs(merged[key] - array).max() < 0.6 for key, array in arrays(whole).items())
    assert any(not np.array_equal(merged[key], array) for key, array in arrays(whole).items())


def test_public_samples_choose_how_far_fedfisher_goes():
    app, steps = task_client_app(Blobs), 300
    public = {"choose": 40, "public_data": tuple(p.numpy() for p in TEST), "build_model": build}
    chosen = start(app, "fedfisher_diagonal", steps=steps, **public)
    assert chosen.details["tried"] == 4
    assert chosen.details["steps"] in (0, 100, 200, 300)
    alone = start(app, "fedfisher_diagonal", steps=steps)
    assert alone.details["steps"] == steps
    # The score is that of the model which is returned, on the first 40.
    model = build()
    model.load_state_dict({k: torch.from_numpy(a) for k, a in arrays(chosen).items()})
    x, y = (part[:40] for part in TEST)
    assert chosen.details["public_score"] == float((model(x).argmax(1) == y).double().mean())


def test_matching_works_with_a_client_that_never_heard_of_it():
    result = start(users_app(), "matching")
    assert result.failures == ()
    # Node 2 has the most examples, and its name is not told: Flower's id stands for it.
    assert result.details["reference"]


def test_a_client_without_the_mod_is_told_what_it_lacks():
    with pytest.raises(RoundFailedError, match="regmean needs statistics_mod in the node's"):
        start(users_app(), "regmean")


def test_the_mod_is_inert_for_other_strategies():
    initial = to_record({k: v.numpy() for k, v in build().state_dict().items()})
    plain, modded = (
        FedAvg().start(InProcessGrid(app, 3), initial, num_rounds=1)
        for app in (users_app(), users_app(statistics_mod(both_parts(data), model=build)))
    )
    assert plain.traffic == modded.traffic
    assert all(np.array_equal(a, arrays(modded)[key]) for key, a in arrays(plain).items())


def test_unweighted_nodes_count_the_same_and_claims_can_be_limited():
    app = task_client_app(Blobs)
    equal = arrays(start(app, "fisher", weighted=False))
    capped = arrays(start(app, "fisher", max_examples=1))
    counted = arrays(start(app, "fisher"))
    assert all(np.allclose(equal[key], capped[key], atol=1e-6) for key in equal)
    assert any(not np.allclose(equal[key], counted[key], atol=1e-4) for key in equal)


# --- bad statistics ---------------------------------------------------------------------------


def replaced(key, change):
    def spoil(content):
        record = content["statistics"]
        record[key] = Array(change(record[key].numpy().copy()))

    return spoil


def put(value):
    def change(array):
        array.flat[0] = value
        return array

    return change


def without(key):
    def spoil(content):
        del content["statistics"][key]

    return spoil


@pytest.mark.parametrize(
    ("method", "spoil", "reason"),
    [
        ("kfac", replaced("0.weight/inputs", put(np.nan)), "'0.weight/inputs' holds NaN"),
        ("kfac", replaced("0.weight/inputs", put(-1)), "'inputs' of '0.weight': mean squares"),
        ("kfac", replaced("2.weight/gradients", np.float64), "dtype float64, expected float32"),
        (
            "kfac",
            replaced("2.weight/gradients", lambda a: (a + (np.arange(len(a)) == 1)).astype("f4")),
            "'gradients' of '2.weight': expected the second moment of some data",
        ),
        ("regmean", replaced("0.weight/inputs", lambda a: a[1:]), "shape (27,), expected (28,)"),
        ("fisher", replaced("2.weight/fisher", put(-1e-3)), "'fisher' of '2.weight': mean sq"),
        ("kfac", without("2.weight/inputs"), "'statistics' must have ['0.weight/gradients'"),
    ],
)
def test_a_node_with_bad_statistics_is_named_and_the_others_are_merged(method, spoil, reason):
    app = users_app(spoiling(1, spoil), statistics_mod(both_parts(data), model=build))
    result = start(app, method)
    (failure,) = result.history[1].failures
    assert failure.node == "1"
    assert reason in failure.reason
    assert result.history[1].nodes_answered == ("0", "2")
    assert all(np.isfinite(array).all() for array in arrays(result).values())


@pytest.mark.parametrize(
    ("method", "spoil", "reason"),
    [
        ("kfac", replaced("scales", put(np.nan)), "'scales' holds NaN"),
        ("kfac", replaced("scales", put(-1)), "'scales' holds numbers below 0"),
        ("kfac", replaced("scales", put(1e7)), "'scales' holds numbers above 1e+06"),
        ("kfac", replaced("scales", put(9e5)), "of '0.weight' holds mean squares above"),
        ("kfac", replaced("columns", lambda a: a[1:]), "'columns' has shape"),
        ("kfac", replaced("columns", lambda a: a.astype(np.int16)), "'columns' has"),
        ("fisher", replaced("roots", lambda a: a.astype(np.uint8)), "'roots' has dtype uint8"),
        ("fisher", without("roots"), "'statistics' must have ['columns', 'roots', 'scales']"),
    ],
)
def test_a_node_with_bad_codes_is_named_and_the_others_are_merged(method, spoil, reason):
    app = users_app(spoiling(1, spoil), statistics_mod(both_parts(data), model=build))
    result = start(app, method, statistics_share=1.3)
    (failure,) = result.history[1].failures
    assert failure.node == "1"
    assert reason in failure.reason
    assert all(np.isfinite(array).all() for array in arrays(result).values())


def test_a_privacy_mod_inside_would_be_bypassed_and_that_is_refused():
    noise = LocalDpMod(clipping_norm=1.0, sensitivity=1.0, epsilon=1.0, delta=1e-5)
    with pytest.raises(RoundFailedError, match="LocalDpMod is inside statistics_mod"):
        start(users_app(statistics_mod(both_parts(data), model=build), noise), "regmean")


# --- options ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"method": "mean"}, "method must be one of"),
        ({"shrink": 1.5}, "shrink must be in"),
        ({"damping": 0.0}, "damping must be above 0 or none"),
        ({"labels": "true"}, "labels must be one of"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"statistics_share": -1.0}, "statistics_share must be from 0 to 10"),
        ({"method": "matching", "statistics_share": 0.5}, "matching needs no statistics"),
        ({"choose": 5}, "choose must be from 0 to the number of public samples, 0"),
        ({"choose": 1, "public_data": TEST}, "needs build_model"),
    ],
)
def test_options_out_of_range_are_refused_when_the_strategy_is_built(options, match):
    with pytest.raises(ValueError, match=match):
        MergedModels(**options)


@pytest.mark.parametrize("method", ["regmean", "fisher", "kfac", "fedfisher_diagonal"])
def test_a_convolution_of_a_sequence_is_refused_before_anybody_trains(method):
    model = nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2))
    initial = to_record({k: v.numpy() for k, v in model.state_dict().items()})
    grid = InProcessGrid(users_app(), 3)
    with pytest.raises(ValueError, match="'0' is neither linear nor a convolution of images"):
        MergedModels(method=method).start(grid, initial)


def test_a_share_that_is_too_small_is_refused_before_anybody_trains():
    with pytest.raises(ValueError, match="a share of at least 0"):
        start(users_app(), "fisher", statistics_share=0.1)


def test_with_all_classes_on_every_node_regmean_and_kfac_tell_them_apart():
    """Logistic models that saw the same classes agree; merging must not break them."""
    x, y = TEST
    models, kfac, regmean = [], [], []
    for node in range(3):
        near, labels = blobs(range(CLASSES), per_class=40, seed=node)
        model = nn.Sequential(nn.Linear(FEATURES, CLASSES))
        trained = fit(model, near, labels, node).state_dict()
        models.append({k: v.numpy() for k, v in trained.items()})
        for method, kept in (("kfac", kfac), ("regmean", regmean)):
            request = StatisticsRequest(method)
            kept.append(
                measure_statistics(request.method, request.labels, models[-1], (near, labels))
            )
    for method, kept in (("kfac", kfac), ("regmean", regmean)):
        merged = merge_models(method, models, kept, [1, 1, 1]).arrays
        predicted = (x.numpy() @ merged["0.weight"].T + merged["0.bias"]).argmax(1)
        assert (predicted == y.numpy()).mean() > 0.95
