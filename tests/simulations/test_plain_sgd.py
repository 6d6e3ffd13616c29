"""Gradient descent that is written out ends where PyTorch's ends, up to rounding."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from gems_flwr.targets import Numbers
from simulations.data.examples import Examples
from simulations.experiment.joint_training import TrainingOrder, fit_orders
from simulations.experiment.plain_sgd import fit_plainly, is_dense, suits
from simulations.experiment.training import TrainOptions, fit
from simulations.models import lenet, logistic, mlp

# What `batched_training` promises.
RELATIVE = 1e-4
PLAIN = {"optimizer": "sgd", "lr": 0.3, "batch_size": 10, "epochs": 3}


def data(size=43):
    draws = np.random.default_rng(2)
    pixels = draws.integers(0, 256, (size, 1, 28, 28)).astype(np.uint8)
    return Examples(pixels, draws.integers(0, 10, size))


def large(**more):
    torch.manual_seed(0)
    options = {"input_shape": (1, 28, 28), "classes": 10, "hidden": (130, 20), "dropout": 0.0}
    return mlp(**options | more)


def same(one, other):
    for name, weight in one.state_dict().items():
        gap = (other.state_dict()[name] - weight).abs().max()
        assert gap <= RELATIVE * weight.abs().max(), name


@pytest.mark.parametrize(
    "make",
    [
        large,
        lambda: logistic(input_shape=(1, 28, 28), classes=10),
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 9), nn.Linear(9, 10)),
    ],
    ids=["network", "linear", "nothing between"],
)
@pytest.mark.parametrize("batch_size", [10, 1000])
def test_weights_and_what_is_reported_are_those_of_fit(make, batch_size):
    """43 examples: the last batch is a smaller one."""
    options = TrainOptions(**PLAIN | {"batch_size": batch_size})
    alone, plain = make(), make()
    plain.load_state_dict(copy.deepcopy(alone.state_dict()))
    before = copy.deepcopy(alone)
    told = [
        train(model, data(), scale=1 / 255, options=options, seed=5)
        for train, model in ((fit, alone), (fit_plainly, plain))
    ]
    same(alone, plain)
    assert told[1] == pytest.approx(told[0], rel=RELATIVE)
    with pytest.raises(AssertionError):
        same(alone, before)  # it has moved at all


@pytest.mark.parametrize(
    ("model", "changed"),
    [
        (large(), {"options": TrainOptions(**PLAIN | {"momentum": 0.9})}),
        (large(), {"options": TrainOptions(**PLAIN | {"weight_decay": 0.1})}),
        (large(), {"options": TrainOptions(**PLAIN | {"patience": 2})}),
        (large(), {"options": TrainOptions(optimizer="adam")}),
        (large(), {"proximal_mu": 0.1}),
        (large(), {"target": Numbers()}),
        (large(dropout=0.5), {}),
        (large(hidden=(5,)), {}),  # so small that nodes are better trained together
        (lenet(input_shape=(1, 28, 28), classes=10), {}),
    ],
)
def test_everything_else_is_left_to_others(model, changed):
    schedule = {"scale": 1.0, "options": TrainOptions(**PLAIN), "seed": 0}
    assert suits(large(), schedule)
    assert not suits(model, schedule | changed)


def test_frozen_layers_are_left_to_others():
    model = large()
    assert is_dense(model)
    model[1].weight.requires_grad_(False)
    assert not is_dense(model)


def test_orders_of_large_networks_are_carried_out_even_if_there_is_one():
    schedule = {"scale": 1 / 255, "options": TrainOptions(**PLAIN), "seed": 5}
    alone, ordered = large(), large()
    told = fit(alone, data(), **schedule)
    (found,) = fit_orders([TrainingOrder(ordered, data(), "", schedule)])
    same(alone, ordered)
    assert found == pytest.approx(told, rel=RELATIVE)
