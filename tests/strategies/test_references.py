"""References and baselines: every node's model, their vote and average, public and pooled data."""

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from helpers_blobs import CLASSES, FEATURES, TEST, blobs
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from conftest import initial_arrays, record_equal, small_model, toy_app
from gems_flwr import (
    Ensemble,
    InProcessGrid,
    LocalModels,
    NodeLimits,
    OneShotAverage,
    Pooled,
    PublicOnly,
    Report,
    Task,
    Tune,
    resize_model,
    task_client_app,
)
from gems_flwr.core.records import to_numpy
from gems_flwr.errors import RoundFailedError
from gems_flwr.scoring import mean_score
from gems_flwr.strategies.members import join_models, split_models


@given(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=4, unique=True))
def test_models_that_were_joined_come_apart_again(names):
    models = {name: {"a/b": np.full(2, i), "c": np.ones(1)} for i, name in enumerate(names)}
    apart = split_models(join_models(models))
    assert list(apart) == names
    for name in names:
        assert np.array_equal(apart[name]["a/b"], models[name]["a/b"])


def test_every_nodes_model_is_kept_after_one_round(grid):
    result = LocalModels().start(grid, initial_arrays(), num_rounds=9)
    models = split_models(to_numpy(result.arrays))
    assert list(models) == ["0", "1", "2", "3", "4"]
    for node, arrays in models.items():
        assert np.array_equal(arrays["weight"], small_model()["weight"] + int(node) + 1)
    assert result.history[-1].round == 1


def test_scores_follow_the_way_of_voting():
    """Two of three say 0; the mean probability of 1 is 0.6; one of three alone is right."""
    members = [np.array([[0.6, 0.4]]), np.array([[0.6, 0.4]]), np.array([[0.0, 1.0]])]
    labels = np.array([1])
    assert Ensemble().score(members, labels) == {"accuracy": 0.0, "balanced_accuracy": 0.0}
    assert Ensemble(vote="softmax_mean").score(members, labels)["accuracy"] == 1.0
    assert mean_score(members, labels)["accuracy"] == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match=r"\['majority', 'softmax_mean'\]"):
        Ensemble(vote="loudest")


# --- public samples -----------------------------------------------------------------------------


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

    def shared_examples(self):
        return tuple(part.numpy() for part in self.training_data())


def start(strategy, model=network, steps=30, nodes=2, **options):
    app = task_client_app(
        lambda c: Node(int(c.node_config["partition-id"]), model, steps), **options
    )
    return strategy.start(InProcessGrid(app, nodes), ArrayRecord(model().state_dict()))


def public():
    x, y = blobs(range(CLASSES), 25, seed=5)
    order = np.random.default_rng(0).permutation(len(y))
    return x.numpy()[order], y.numpy()[order]


def tune(model=network, data=None, **options):
    return Tune(*(data or public()), **{"count": 80, "rate": 0.01, "model": model, **options})


def loss(arrays, model=network):
    built = resize_model(model(), arrays).eval()
    with torch.no_grad():
        return float(nn.functional.cross_entropy(built(TEST[0]), TEST[1]))


@pytest.mark.parametrize("layers", ["last", "all"])
@pytest.mark.parametrize("strategy", [OneShotAverage, LocalModels])
def test_tuning_lowers_the_loss_of_every_model_and_changes_no_other_layer(strategy, layers):
    plain, tuned = start(strategy()), start(strategy(tune=tune(), tune_layers=layers))
    assert tuned.details["tuned_on"] == 80
    assert "tuned_on" not in plain.details
    assert tuned.traffic == plain.traffic
    before, after = (split_models(to_numpy(r.arrays)) for r in (plain, tuned))
    assert before.keys() == after.keys()
    for node, arrays in after.items():
        assert loss(arrays) < loss(before[node])
        changed = not np.array_equal(arrays["0.weight"], before[node]["0.weight"])
        assert changed == (layers == "all")


@pytest.mark.parametrize("layers", ["last", "all"])
def test_every_node_is_tuned_from_its_own_model(layers):
    """Node 0 alone gives the model that stands under its name among several.

    One module is lent to all, so that a model that leaked into the next would show.
    """
    lent = network()
    options = {"tune": tune(lambda: lent), "tune_layers": layers}
    members = split_models(to_numpy(start(LocalModels(**options)).arrays))
    alone = start(OneShotAverage(min_nodes=1, **options), nodes=1)
    for name, array in to_numpy(alone.arrays).items():
        assert np.array_equal(members["0"][name], array)
        assert not np.array_equal(members["1"][name], array)


def test_the_public_sample_alone_is_what_tuning_makes_of_nodes_that_learned_nothing():
    """With equal weights the mean of two equal models is that model to the last bit."""
    average = OneShotAverage(weighted=False, tune=tune(), tune_layers="all")
    alone = start(PublicOnly(tune=tune()))
    assert record_equal(alone.arrays, start(average, steps=0).arrays)
    assert alone.traffic.messages_down == 0
    assert [record.round for record in alone.history] == [0, 1]
    everything, named = (start(PublicOnly(tune=tune(count=n))) for n in (None, 100))
    assert record_equal(everything.arrays, named.arrays)
    assert everything.details["tuned_on"] == 100


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: OneShotAverage(tune_layers="first"), "tune_layers must be 'last' or 'all'"),
        (lambda: LocalModels(tune=tune(None)), r"write Tune\(inputs, labels, model=Net\)"),
        (PublicOnly, "no public samples to train on: give tune"),
        (lambda: tune(count=101), "count must be from 1 to the 100 public samples, got 101"),
    ],
)
def test_impossible_tuning_is_refused_with_what_to_do(build, words):
    with pytest.raises(ValueError, match=words):
        build()


# --- pooled data --------------------------------------------------------------------------------


def kept(arrays, features, labels, seed):
    return arrays


def test_a_pooled_run_trains_once_on_the_data_of_all_nodes_in_order():
    seen = []

    def fit(arrays, features, labels, seed):
        seen.append((features, labels))
        return arrays

    result = start(Pooled(fit=fit, input_shape=(FEATURES,)), limits=NodeLimits(share_examples=True))
    [(features, labels)] = seen
    expected = [blobs([2 * node, 2 * node + 1], seed=10 * node) for node in (0, 1)]
    assert np.array_equal(features, np.concatenate([x.numpy() for x, _ in expected]))
    assert np.array_equal(labels, np.concatenate([y.numpy() for _, y in expected]))
    assert result.details["pooled_examples"] == len(labels) == 240
    best = Pooled(
        fit=fit, input_shape=(FEATURES,), optimum=lambda a, x, y, seed: (a, {"best": len(y)})
    )
    assert start(best, limits=NodeLimits(share_examples=True)).details["best"] == 240
    assert len(seen) == 1


def test_nodes_that_do_not_share_fail_it():
    with pytest.raises(RoundFailedError, match="share_examples: raw data stays here"):
        start(Pooled(fit=kept, input_shape=(FEATURES,)))
    with pytest.raises(RoundFailedError, match="raw data stays here"):
        Pooled(fit=kept, input_shape=(3,)).start(InProcessGrid(toy_app(), 3), initial_arrays())
