"""Training many nodes at once gives each what it would have got alone, up to rounding."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from gems_flwr.networks.surgery import freeze_lowest
from gems_flwr.targets import Numbers
from simulations.data.examples import Examples
from simulations.experiment import batched_training
from simulations.experiment.batched_training import Trainee, fit_together, why_not_together
from simulations.experiment.training import CLASSES, TrainOptions, fit
from simulations.models import cnn, lenet, logistic, mlp

# What the documentation promises; the largest that was seen here is 1e-6.
RELATIVE = 1e-4
# From one example to some batches, with and without a smaller last one.
SIZES = (23, 1, 40, 8, 16, 9, 31)
ADAM = {"optimizer": "adam", "lr": 0.01, "batch_size": 8, "epochs": 3}
SGD = {"optimizer": "sgd", "lr": 0.05, "momentum": 0.9, "batch_size": 8, "epochs": 3}
RMS = {"optimizer": "rmsprop", "lr": 0.01, "momentum": 0.5, "batch_size": 8, "epochs": 3}


class Residual(nn.Module):
    """No chain of layers, and so nothing that is known by heart."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.dropout = nn.Dropout(0.3)

    def forward(self, inputs):
        flat = inputs.flatten(1)
        return self.last(flat + torch.tanh(self.dropout(self.first(flat))))


def shares(shape=(6,), classes=3, sizes=SIZES, pixels=False):
    draws = np.random.default_rng(1)
    for size in sizes:
        features = draws.normal(size=(size, *shape)).astype(np.float32)
        if pixels:
            features = draws.integers(0, 256, (size, *shape)).astype(np.uint8)
        labels = draws.integers(0, classes, size) if classes else features.reshape(size, -1)[:, 0]
        yield Examples(features, labels)


def both_ways(make, data, options, *, scale=1.0, target=CLASSES, mu=0.0):
    """Train the same models alone and together; return both, with what they report."""
    models = []
    for number in range(len(data)):
        torch.manual_seed(number)
        models.append(make())
    alone, together = copy.deepcopy(models), copy.deepcopy(models)
    shared = {"scale": scale, "options": TrainOptions(**options), "target": target}
    shared |= {"proximal_mu": mu}
    each = [fit(m, e, seed=s, **shared) for s, (m, e) in enumerate(zip(alone, data, strict=True))]
    trainees = [Trainee(m, e, s) for s, (m, e) in enumerate(zip(together, data, strict=True))]
    return models, alone, together, each, fit_together(trainees, **shared)


def same(alone, together, each, joint, relative=RELATIVE):
    for one, other in zip(alone, together, strict=True):
        for name, weight in one.state_dict().items():
            gap = (other.state_dict()[name] - weight).abs().max()
            assert gap <= relative * weight.abs().max(), name
    for one, other in zip(each, joint, strict=True):
        assert one.keys() == other.keys()
        assert other == pytest.approx(one, rel=relative)


@pytest.mark.parametrize("options", [ADAM, SGD, RMS, ADAM | {"weight_decay": 0.1}])
@pytest.mark.parametrize("batch_size", [8, 64])
def test_every_node_ends_where_it_would_have_ended_alone(options, batch_size):
    data = list(shares())
    make = lambda: mlp(input_shape=(6,), classes=3, hidden=(5,), dropout=0.0)  # noqa: E731
    _, *found = both_ways(make, data, options | {"batch_size": batch_size})
    same(*found)


@pytest.mark.parametrize(
    "make",
    [
        lambda: logistic(input_shape=(6,), classes=3),
        lambda: nn.Linear(6, 3),
        lambda: mlp(input_shape=(6,), classes=3, hidden=(7, 5), dropout=0.5),
        lambda: nn.Sequential(
            nn.Sequential(nn.Linear(6, 4), nn.ReLU(inplace=True)), nn.Linear(4, 3)
        ),
        Residual,
    ],
)
def test_networks_and_dropout_of_all_kinds(make):
    """Dropout masks are each node's own: another draw would change every weight."""
    _, *found = both_ways(make, list(shares()), ADAM)
    same(*found)


@pytest.mark.parametrize("make", [lenet, cnn])
def test_convolutions_on_pixels(make):
    data = list(shares((1, 12, 12), classes=4, sizes=(9, 5, 6), pixels=True))
    build = lambda: make(input_shape=(1, 12, 12), classes=4)  # noqa: E731
    _, *found = both_ways(build, data, ADAM | {"lr": 0.001, "epochs": 2}, scale=1 / 255)
    same(*found)


def test_numbers_instead_of_classes():
    data = list(shares(classes=0))
    make = lambda: mlp(input_shape=(6,), classes=0, hidden=(5,), dropout=0.2)  # noqa: E731
    *_, each, joint = found = both_ways(make, data, SGD | {"lr": 0.01}, target=Numbers())
    same(*found[1:])
    assert joint[0].keys() == each[0].keys() == {"train_loss", "epochs"}


def test_each_node_stops_when_its_own_patience_is_over():
    data = list(shares())
    make = lambda: mlp(input_shape=(6,), classes=3, hidden=(5,), dropout=0.0)  # noqa: E731
    _, *found = both_ways(make, data, ADAM | {"epochs": 40, "patience": 2})
    same(*found)
    epochs = {report["epochs"] for report in found[-1]}
    assert len(epochs) > 2
    assert min(epochs) < 40


def test_the_pull_of_fedprox_is_towards_each_nodes_own_start():
    data = list(shares())
    make = lambda: logistic(input_shape=(6,), classes=3)  # noqa: E731
    start, _, free, *_ = both_ways(make, data, ADAM)
    _, *found = both_ways(make, data, ADAM, mu=5.0)
    same(*found)

    def moved(models):
        pairs = zip(start, models, strict=True)
        return sum((a[1].weight - b[1].weight).detach().norm().item() for a, b in pairs)

    assert moved(found[1]) < 0.8 * moved(free)


@pytest.mark.parametrize("shared", [True, False])
def test_frozen_layers_stay_whether_they_are_everybodys_or_not(shared):
    def make():
        model = mlp(input_shape=(6,), classes=3, hidden=(5,), dropout=0.5)
        if shared:
            torch.manual_seed(0)
            nn.init.normal_(model[1].weight)
        freeze_lowest(model, 1)
        return model

    start, *found = both_ways(make, list(shares()), ADAM)
    same(*found)
    for before, after in zip(start, found[1], strict=True):
        assert torch.equal(before[1].weight, after[1].weight)
        assert not torch.equal(before[4].weight, after[4].weight)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_half_a_layer_may_be_frozen(frozen):
    def make():
        layer = nn.Linear(6, 3)
        getattr(layer, frozen).requires_grad_(False).fill_(0.1)
        return layer

    _, *found = both_ways(make, list(shares()), ADAM)
    same(*found)


def test_more_nodes_than_fit_at_once_are_trained_in_chunks(monkeypatch):
    monkeypatch.setattr(batched_training, "_FEW", 2)
    monkeypatch.setattr(batched_training, "_CHUNK_BYTES", 0)
    _, *found = both_ways(lambda: nn.Linear(6, 3), list(shares()), ADAM)
    same(*found)


def test_small_shares_are_not_filled_up_to_large_ones():
    """With whole shares as batches a cohort's largest is at most twice its smallest."""
    data = list(shares(sizes=(40, 3, 23, 20, 4, 2)))
    trainees = [Trainee(nn.Linear(6, 3), each, 0) for each in data]
    where = torch.device("cpu")
    sizes = [[len(data[i]) for i in c] for c in batched_training._chunks(trainees, where, 100)]
    assert sizes == [[40, 23, 20], [4, 3, 2]]
    # Batches of four are full, or at least half full, whoever's they are.
    sizes = [[len(data[i]) for i in c] for c in batched_training._chunks(trainees, where, 4)]
    assert sizes == [[40, 23, 20, 4, 3, 2]]
    _, *found = both_ways(lambda: nn.Linear(6, 3), data, SGD | {"batch_size": 100})
    same(*found)


def test_nothing_is_drawn_from_the_global_generators():
    before = torch.random.get_rng_state()
    make = lambda: mlp(input_shape=(6,), classes=3, dropout=0.5)  # noqa: E731
    models = [make(), make()]
    torch.random.set_rng_state(before)
    data = list(shares(sizes=(5, 6)))
    trainees = [Trainee(m, e, 3) for m, e in zip(models, data, strict=True)]
    fit_together(trainees, scale=1.0, options=TrainOptions())
    assert torch.equal(torch.random.get_rng_state(), before)


def test_what_cannot_be_trained_together_is_told():
    hooked = nn.Linear(2, 2)
    hooked.weight.register_hook(lambda gradient: gradient)
    assert "SCAFFOLD" in why_not_together(hooked)
    assert "buffers" in why_not_together(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    assert "Dropout2d" in why_not_together(nn.Sequential(nn.Conv2d(1, 1, 1), nn.Dropout2d()))
    assert why_not_together(lenet(input_shape=(1, 12, 12), classes=2)) is None
