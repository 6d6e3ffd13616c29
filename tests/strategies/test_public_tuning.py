"""The fine-tuned baselines: the average, the nodes' own models, and the public sample alone."""

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from helpers_blobs import CLASSES, FEATURES, TEST, blobs
from torch import nn

from conftest import record_equal
from gems_flwr.client.task import Report, Task
from gems_flwr.client.task_app import task_client_app
from gems_flwr.networks.surgery import resize_model
from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.runtime.metered_grid import MeteredGrid
from gems_flwr.server.members import split_members
from gems_flwr.strategies.ensemble import Ensemble
from gems_flwr.strategies.gems import Gems
from gems_flwr.strategies.local_models import LocalModels
from gems_flwr.strategies.one_shot_average import OneShotAverage
from gems_flwr.strategies.public_only import PublicOnly
from gems_flwr.wire.records import to_numpy
from gems_flwr.wire.space_requests import Ball


def network(hidden=8, bias=True):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if not hidden:
            return nn.Sequential(nn.Linear(FEATURES, CLASSES, bias=bias))
        below = nn.Linear(FEATURES, hidden)
        return nn.Sequential(below, nn.ReLU(), nn.Linear(hidden, CLASSES, bias=bias))


class Node(Task):
    """Knows two of four labels; without steps it learns nothing."""

    def __init__(self, number, model, steps):
        self.number, self.model, self.steps = number, model, steps

    def build_model(self):
        return self.model()

    def train(self, model, *, seed, config):
        x, y = self.training_data()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        for _ in range(self.steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        return Report(100 * (self.number + 1))

    def evaluate(self, model, *, config):
        return Report(1)

    def validation_data(self):
        return blobs([2 * self.number, 2 * self.number + 1], seed=10 * self.number)

    training_data = validation_data


def start(strategy, model=network, steps=30, grid=None):
    app = task_client_app(lambda c: Node(int(c.node_config["partition-id"]), model, steps))
    grid = grid or InProcessGrid(app, 2)
    return strategy.start(grid, ArrayRecord(model().state_dict()))


def public(per_class=25):
    x, y = blobs(range(CLASSES), per_class, seed=5)
    order = np.random.default_rng(0).permutation(len(y))
    return x.numpy()[order], y.numpy()[order]


def loss(arrays, data, model=network):
    built = resize_model(model(), arrays).eval()
    with torch.no_grad():
        return float(nn.functional.cross_entropy(built(data[0]), data[1]))


def tuning(model=network, **changed):
    options = {"tune": 80, "tune_rate": 0.01, "public_data": public(), "build_model": model}
    return options | changed


@pytest.mark.parametrize("layers", ["last", "all"])
@pytest.mark.parametrize("strategy", [OneShotAverage, LocalModels, Ensemble])
def test_tuning_lowers_the_loss_of_every_model_and_changes_no_other_layer(strategy, layers):
    plain, tuned = start(strategy()), start(strategy(**tuning(tune_layers=layers)))
    assert tuned.details["tuned_on"] == 80
    assert "tuned_on" not in plain.details
    assert tuned.traffic == plain.traffic
    before, after = (split_members(to_numpy(r.arrays)) for r in (plain, tuned))
    assert before.keys() == after.keys()
    for node, arrays in after.items():
        assert loss(arrays, TEST) < loss(before[node], TEST)
        changed = not np.array_equal(arrays["0.weight"], before[node]["0.weight"])
        assert changed == (layers == "all")


@pytest.mark.parametrize("layers", ["last", "all"])
def test_every_node_is_tuned_from_its_own_model(layers):
    """Node 0 alone gives the model that stands under its name among several.

    One module is lent to all, so that a model that leaked into the next would show.
    """
    lent = network()
    options = tuning(tune_layers=layers, build_model=lambda: lent)
    members = split_members(to_numpy(start(LocalModels(**options)).arrays))
    app = task_client_app(lambda c: Node(int(c.node_config["partition-id"]), network, 30))
    alone = start(OneShotAverage(min_nodes=1, **options), grid=InProcessGrid(app, 1))
    for name, array in to_numpy(alone.arrays).items():
        assert np.array_equal(members["0"][name], array)
        assert not np.array_equal(members["1"][name], array)


def test_where_balls_meet_in_the_average_the_tuned_ones_are_the_same():
    """Convex GEMS is the average (see `is_average`), and the server tunes both alike."""

    def linear():
        return network(hidden=0)

    options = tuning(linear)
    sample = options["public_data"]
    ball = {"space": Ball(epsilon=0.3, directions=20)}
    assert start(Gems(**ball), linear).details["is_average"]
    gems = start(Gems(**ball, tune=80, tune_rate=0.01, public=sample), linear)
    average = start(OneShotAverage(weighted=False, **options), linear)
    for name, array in to_numpy(gems.arrays).items():
        assert array == pytest.approx(to_numpy(average.arrays)[name], abs=1e-5)


def test_the_public_sample_alone_is_what_tuning_makes_of_nodes_that_learned_nothing():
    """With equal weights the mean of two equal models is that model to the last bit."""
    options = tuning()
    nothing = start(OneShotAverage(weighted=False, tune_layers="all", **options), steps=0)
    assert record_equal(start(PublicOnly(**options)).arrays, nothing.arrays)


def test_the_public_sample_alone_asks_no_node_for_anything():
    app = task_client_app(lambda c: Node(0, network, 0))
    grid = MeteredGrid.around(InProcessGrid(app, 2))
    result = start(PublicOnly(**tuning()), grid=grid)
    assert (grid.total.messages_down, grid.total.bytes_down, grid.total.bytes_up) == (0, 0, 0)
    assert [record.round for record in result.history] == [0, 1]
    assert loss(to_numpy(result.arrays), TEST) < loss(
        to_numpy(ArrayRecord(network().state_dict())), TEST
    )


def test_without_a_number_all_public_samples_count_and_with_none_the_initial_model_stays():
    everything, named, none = (start(PublicOnly(**tuning(tune=n))) for n in (None, 100, 0))
    assert record_equal(everything.arrays, named.arrays)
    assert everything.details["tuned_on"] == 100
    assert record_equal(none.arrays, ArrayRecord(network().state_dict()))


def test_one_seed_repeats_tuning_and_only_the_first_samples_are_seen():
    sample = public()
    longer = tuple(np.concatenate([part, part[:7]]) for part in sample)
    options = tuning(tune=100)
    one, two = (
        start(OneShotAverage(**options | {"public_data": data})) for data in (sample, longer)
    )
    assert record_equal(one.arrays, two.arrays)
    assert not record_equal(one.arrays, start(OneShotAverage(seed=1, **options)).arrays)


@pytest.mark.parametrize("strategy", [OneShotAverage, LocalModels, PublicOnly])
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"tune": -1}, "tune must be at least 0, got -1"),
        ({"tune_rate": 0.0}, "tune_rate must be above 0, got 0.0"),
        ({"tune": 101}, "tune=101 needs as many public samples, there are 100: lower tune"),
        ({"public_data": None}, "tune=80 needs as many public samples, there are 0"),
    ],
)
def test_impossible_tuning_is_refused_with_what_to_do(strategy, changed, words):
    with pytest.raises(ValueError, match=words):
        strategy(**tuning(**changed))


def test_what_only_some_strategies_need_is_asked_for_by_name():
    with pytest.raises(ValueError, match="tune_layers must be 'last' or 'all', got 'first'"):
        OneShotAverage(tune_layers="first")
    with pytest.raises(ValueError, match="tune=80 needs build_model"):
        LocalModels(**tuning(build_model=None))
    with pytest.raises(ValueError, match="no public samples to train on: give public_data"):
        PublicOnly(build_model=network)


def test_an_output_layer_without_bias_is_tuned_with_the_rest_or_not_at_all():
    def unbiased():
        return network(bias=False)

    with pytest.raises(ValueError, match="tune_layers='all' takes any"):
        start(OneShotAverage(**tuning(unbiased)), unbiased)
    tuned = start(OneShotAverage(**tuning(unbiased, tune_layers="all")), unbiased)
    assert tuned.details["tuned_on"] == 80
