"""What the neurons of a hidden layer see."""

import pytest
import torch
from flwr.app import ArrayRecord
from torch import nn
from torch.nn import functional as F

from gems_flwr.core.records import to_numpy
from gems_flwr.networks import activation_of, read_neuron_inputs


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


X, Y = torch.randn(10, 2, 8, 8), torch.zeros(10, dtype=torch.long)


def read(index, model=None, data=(X, Y), **options):
    model = model or network()
    arrays = to_numpy(ArrayRecord(model.state_dict()))
    return read_neuron_inputs(
        model, arrays, index, data, **{"max_rows": 10_000, "seed": 0, **options}
    )


def test_a_filter_on_its_patches_gives_what_the_convolution_gives():
    model = network()
    seen = read(0)
    mine = seen.rows @ model[0].weight.reshape(3, -1).T + model[0].bias
    theirs = model[0](X).permute(0, 2, 3, 1).reshape(-1, 3)
    torch.testing.assert_close(mine, theirs)
    assert isinstance(seen.activation.function, nn.Tanh)


def test_a_linear_layers_rows_are_what_the_layers_below_give():
    seen = read(1)
    torch.testing.assert_close(seen.rows, network()[:4](X))
    # Dropout in between is no activation.
    assert isinstance(seen.activation.function, nn.ReLU)


class Functional(nn.Module):
    """Calls the activation of its first layer as a function."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.g, self.c = nn.Linear(128, 4), nn.Linear(4, 4), nn.Tanh(), nn.Flatten()
        self.d = nn.Linear(4, 2)

    def forward(self, x):
        return self.d(self.g(self.b(F.relu(self.a(x.flatten(1))))))


def test_an_activation_that_cannot_be_seen_is_the_one_that_is_named():
    """The tanh belongs to the second layer, not to the first."""
    functions = [type(read(i, Functional()).activation.function) for i in (0, 1)]
    assert functions == [nn.ReLU, nn.Tanh]
    named = read(0, Functional(), activation=nn.Sigmoid()).activation
    assert isinstance(named.function, nn.Sigmoid)
    with pytest.raises(ValueError, match="no activation"):
        read(0, Functional(), activation=nn.Flatten())


def test_rows_beyond_the_limit_are_chosen_by_the_seed_and_kept_in_order():
    every = [tuple(row.tolist()) for row in read(0).rows]
    some, same, other = read(0, max_rows=30), read(0, max_rows=30), read(0, max_rows=30, seed=1)
    places = [every.index(tuple(row.tolist())) for row in some.rows]
    assert len(places) == 30
    assert places == sorted(places)
    assert torch.equal(some.rows, same.rows)
    assert not torch.equal(some.rows, other.rows)
    assert len(read(1, max_rows=4).rows) == 4


@pytest.mark.parametrize("order", ["ba", "aab"])
def test_layers_that_do_not_run_once_each_in_the_order_of_the_arrays_are_refused(order):
    class Wrong(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            for name in order:
                x = getattr(self, name)(x)
            return x

    with pytest.raises(ValueError, match="runs its layers as"):
        read(0, Wrong(), (torch.randn(3, 6), Y[:3]))


def test_no_data_is_an_error():
    with pytest.raises(ValueError, match="no data"):
        read(0, data=[])


KNOWN = {
    nn.ReLU(): 1,
    nn.ReLU(inplace=True): 1,
    nn.LeakyReLU(0.3): 1,
    nn.LeakyReLU(1.5): 1.5,
    nn.Tanh(): 1,
    nn.Sigmoid(): 0.25,
    nn.ELU(2.5): 2.5,
    nn.Softplus(beta=3): 1,
    nn.Hardtanh(-2, 3): 1,
    nn.ReLU6(): 1,
    nn.Identity(): 1,
}


def test_known_activations_are_those_of_torch():
    x = torch.linspace(-9, 9, 2001, dtype=torch.float64)
    for module, lipschitz in KNOWN.items():
        activation = activation_of(module)
        torch.testing.assert_close(activation.function(x), module(x.clone()))
        steps = module(x.clone()).diff() / x.diff()
        assert 0 <= steps.min() <= steps.max() <= lipschitz + 1e-9
        assert activation.lipschitz == pytest.approx(lipschitz)
        # Away from the kinks, which are at multiples of 0.1.
        at = (x[::10] + 0.0123).requires_grad_()
        (expected,) = torch.autograd.grad(module(at.clone()).sum(), at)
        torch.testing.assert_close(activation.slope(at.detach()), expected)


def test_an_activation_that_may_turn_back_is_refused():
    for module in (nn.GELU(), nn.SiLU(), nn.LeakyReLU(-0.1), nn.ELU(-1.0), nn.GLU()):
        with pytest.raises(ValueError, match=r"monotone along a ray.*ReLU.*got") as error:
            activation_of(module)
        assert type(module).__name__ in str(error.value)
    for module in (nn.Linear(2, 2), nn.Dropout(), nn.Softmax(dim=1), nn.Sequential()):
        assert activation_of(module) is None
