"""A fixed lift is computed once, and training and scoring are what they were."""

import numpy as np
import pytest
import torch
from torch import nn

from simulations import data
from simulations.experiment.fixed_lift import LiftMemory, layer_on_lift
from simulations.experiment.training import TrainOptions, fit, predictions

SCALE = 1 / 16


class Lift(nn.Module):
    """Rectified random features of an image; counts how often it runs."""

    def __init__(self):
        super().__init__()
        weight = torch.randn((64, 30), generator=torch.Generator().manual_seed(0))
        self.register_buffer("weight", weight, persistent=False)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return torch.relu(x.flatten(1) @ self.weight)


def network():
    torch.manual_seed(0)
    return nn.Sequential(Lift(), nn.Linear(30, 10))


@pytest.fixture(scope="module")
def digits():
    return data.digits(seed=0).train


def test_training_on_what_the_lift_gives_is_training_through_it(digits):
    options = TrainOptions(optimizer="sgd", lr=0.05, epochs=2)
    plain, quick = network(), network()
    fit(plain, digits, scale=SCALE, options=options, seed=1)
    layer, seen = LiftMemory().lifted(quick, digits, architecture="a", scale=SCALE, threads=1)
    fit(layer, seen, scale=1.0, options=options, seed=1)
    for ours, theirs in zip(quick.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        predictions(layer, seen, scale=1.0), predictions(plain, digits, scale=SCALE), atol=1e-4
    )


def test_the_lift_runs_once_for_the_same_examples(digits):
    memory, model = LiftMemory(), network()
    keywords = {"architecture": "a", "scale": SCALE, "threads": 1}
    memory.lifted(model, digits, **keywords)
    before = model[0].calls
    assert before > 0
    _, again = memory.lifted(network(), digits, **keywords)
    assert model[0].calls == before
    # Other examples, and another lift, are others.
    few = digits.take(np.arange(20))
    assert len(memory.lifted(model, few, **keywords)[1]) == 20
    other = memory.lifted(model, digits, **keywords | {"architecture": "b"})[1]
    assert other is not again


def test_what_is_used_least_is_forgotten_where_there_is_no_room(digits):
    few = [digits.take(np.arange(start, start + 10)) for start in (0, 10, 20)]
    memory, model = LiftMemory(limit_bytes=2 * 10 * 30 * 4), network()
    for examples in few:
        memory.lifted(model, examples, architecture="a", scale=SCALE, threads=1)
    calls = model[0].calls
    memory.lifted(model, few[2], architecture="a", scale=SCALE, threads=1)
    assert model[0].calls == calls
    memory.lifted(model, few[0], architecture="a", scale=SCALE, threads=1)
    assert model[0].calls > calls


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Flatten(), nn.Linear(4, 2)),
        nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)),
        nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)),
        nn.Sequential(nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 2)),
        nn.Linear(4, 2),
    ],
)
def test_what_is_not_one_layer_on_a_fixed_lift_is_left_alone(model):
    assert layer_on_lift(model) is None
