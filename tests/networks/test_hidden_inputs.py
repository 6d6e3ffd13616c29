"""What the neurons of a hidden layer see."""

import pytest
import torch
from flwr.app import ArrayRecord
from torch import nn
from torch.nn import functional as F

from gems_flwr.networks.hidden import read_neuron_inputs
from gems_flwr.networks.layers import weight_layers
from gems_flwr.wire.records import to_numpy


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(3 * 2 * 2, 4),
        nn.Dropout(0.5),
        nn.ReLU(),
        nn.Linear(4, 2),
    )


def arrays_of(model):
    return to_numpy(ArrayRecord(model.state_dict()))


X, Y = torch.randn(10, 2, 8, 8), torch.zeros(10, dtype=torch.long)


def read(index, model=None, **options):
    options = {"max_rows": 10_000, "seed": 0, **options}
    return read_neuron_inputs(
        model or network(), arrays_of(model or network()), index, (X, Y), **options
    )


def test_a_filter_on_its_patches_gives_what_the_convolution_gives():
    model = network()
    seen = read(0)
    kernel = model[0].weight.reshape(3, -1)
    mine = seen.rows @ kernel.T + model[0].bias
    theirs = model[0](X).permute(0, 2, 3, 1).reshape(-1, 3)
    torch.testing.assert_close(mine, theirs)
    assert seen.activation.name == "tanh"


def test_a_linear_layers_rows_are_what_the_layers_below_give():
    model = network()
    seen = read(1)
    torch.testing.assert_close(seen.rows, model[:4](X))
    # Dropout in between is no activation.
    assert seen.activation.name == "relu"


def test_the_activation_of_a_layer_above_is_not_its_own():
    """The first layer calls its activation as a function; the tanh belongs to the second."""

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.g, self.c = (
                nn.Linear(128, 4),
                nn.Linear(4, 4),
                nn.Tanh(),
                nn.Linear(4, 2),
            )

        def forward(self, x):
            return self.c(self.g(self.b(F.relu(self.a(x.flatten(1))))))

    assert [read(index, Mixed()).activation.name for index in (0, 1)] == ["relu", "tanh"]


def test_rows_beyond_the_limit_are_chosen_by_the_seed():
    every = {tuple(row.tolist()) for row in read(0).rows}
    some, same, other = read(0, max_rows=30), read(0, max_rows=30), read(0, max_rows=30, seed=1)
    assert len(some.rows) == 30
    assert {tuple(row.tolist()) for row in some.rows} <= every
    assert torch.equal(some.rows, same.rows)
    assert not torch.equal(some.rows, other.rows)
    assert 1 <= len(read(0, max_rows=2).rows) <= 2
    assert len(read(1, max_rows=4).rows) == 4


class Functional(nn.Module):
    """Calls its activation as a function, and keeps its layers in another order if told so."""

    def __init__(self, swapped=False):
        super().__init__()
        torch.manual_seed(0)
        pair = [nn.Linear(128, 5), nn.Linear(5, 5)]
        self.first, self.second = pair[::-1] if swapped else pair
        self.swapped = swapped

    def forward(self, x):
        layers = (self.second, self.first) if self.swapped else (self.first, self.second)
        return layers[1](F.elu(layers[0](x.flatten(1))))


def test_an_activation_that_cannot_be_seen_is_the_one_that_is_named():
    assert read(0, Functional()).activation.name == "relu"
    assert read(0, Functional(), activation=nn.ELU()).activation.name == "elu"
    with pytest.raises(ValueError, match="no activation"):
        read(0, Functional(), activation=nn.Flatten())


def test_layers_that_run_in_another_order_than_they_are_stored_are_refused():
    class Wrong(Functional):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            return self.first(self.second(x))

    model = Wrong()
    with pytest.raises(ValueError, match=r"runs its layers as \['second', 'first'\]"):
        read_neuron_inputs(
            model, arrays_of(model), 0, (torch.randn(3, 6), Y[:3]), max_rows=9, seed=0
        )


def test_a_model_that_uses_a_layer_twice_is_refused():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.b(self.a(self.a(x)))

    model = Twice()
    assert len(weight_layers(arrays_of(model))) == 2
    with pytest.raises(ValueError, match="runs its layers as"):
        read_neuron_inputs(
            model, arrays_of(model), 0, (torch.randn(3, 4), Y[:3]), max_rows=9, seed=0
        )


def test_no_data_is_said():
    with pytest.raises(ValueError, match="no data"):
        read_neuron_inputs(network(), arrays_of(network()), 0, [], max_rows=9, seed=0)
