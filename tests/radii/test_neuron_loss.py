"""Balls by the loss of the whole network (Guha 2018), against networks that are really changed."""

import copy
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gems_flwr.client.neuron_building import build_neurons
from gems_flwr.errors import ModelError, OptionError
from gems_flwr.radii.activations import ACTIVATIONS
from gems_flwr.radii.layer_data import unit_directions
from gems_flwr.radii.neuron_data import NeuronData
from gems_flwr.radii.neuron_loss import LayersAbove, NeuronLosses, sampled_loss_radii
from gems_flwr.radii.neuron_radii import build_neuron_balls
from gems_flwr.radii.search import bisect_radius, grow_radius
from gems_flwr.wire.requests import NeuronRequest, Neurons


def a_network(hidden=(6,), seed=0, activation=nn.ReLU):
    torch.manual_seed(seed)
    widths = [5, *hidden]
    layers = [
        part
        for below, above in pairwise(widths)
        for part in (nn.Linear(below, above), activation())
    ]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 3)).double()


def samples(n=40, seed=1):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(n, 5, generator=rng).double(), torch.randint(0, 3, (n,), generator=rng)


def losses_of(model, layer, x, y):
    """Return `NeuronLosses` of one hidden layer of a chain, and its data, from the module."""
    linear = [m for m in model if isinstance(m, nn.Linear)]
    position = list(model).index(linear[layer])
    with torch.no_grad():
        inputs = model[:position](x)
    above = linear[layer + 1]
    rest = model[list(model).index(above) + 1 :] if layer + 2 < len(linear) else None
    data = NeuronData(
        linear[layer].weight, linear[layer].bias, inputs, ACTIVATIONS["relu"], above.weight.T
    )
    return NeuronLosses(data, LayersAbove(above.weight.T, above.bias, rest, y))


def moved_loss(model, layer, neuron, point, x, y):
    """Put a point into the place of a neuron, run the whole network, and measure its loss."""
    other = copy.deepcopy(model)
    linear = [m for m in other if isinstance(m, nn.Linear)]
    inputs = linear[layer].in_features
    with torch.no_grad():
        linear[layer].weight[neuron] = point[:inputs]
        linear[layer].bias[neuron] = point[inputs]
        linear[layer + 1].weight[:, neuron] = point[inputs + 1 :]
        return float(F.cross_entropy(other(x), y))


@pytest.mark.parametrize(("hidden", "layer"), [((6,), 0), ((6, 4), 0), ((6, 4), 1), ((6, 4, 7), 1)])
def test_losses_are_those_of_the_changed_network(hidden, layer):
    model, (x, y) = a_network(hidden), samples()
    losses = losses_of(model, layer, x, y)
    with torch.no_grad():
        assert losses.own == pytest.approx(float(F.cross_entropy(model(x), y)), rel=1e-9)
        points = losses.data.centers[2] + torch.randn(5, losses.data.dimension).double()
        wanted = [moved_loss(model, layer, 2, point, x, y) for point in points]
        np.testing.assert_allclose(losses.at(2, points).numpy(), wanted, rtol=1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_at_the_radius_all_rays_are_good_and_just_beyond_one_is_not(seed):
    model, (x, y) = a_network(seed=seed), samples(seed=seed + 1)
    losses = losses_of(model, 0, x, y)
    limit = 1.05 * losses.own
    rays = next(iter(unit_directions(losses.data.dimension, 30, 3, 30, losses.data.incoming)))
    with torch.no_grad():
        radii = sampled_loss_radii(losses, [rays], limit, 4000.0)
        assert bool((radii > 0).all())
        for neuron, radius in enumerate(radii.tolist()):

            def worst(at, neuron=neuron):
                points = losses.data.centers[neuron] + at * rays
                return max(moved_loss(model, 0, neuron, point, x, y) for point in points)

            assert worst(radius) <= limit * (1 + 1e-9)
            assert worst(radius * 1.001 + 1e-4) > limit


@pytest.mark.parametrize(("method", "search"), [("growing", grow_radius), ("bisection", None)])
def test_the_papers_searches_see_the_changed_network(method, search):
    """The same search, with networks that are really changed and run."""
    model, (x, y) = a_network((3,)), samples()
    losses = losses_of(model, 0, x, y)
    options = {"directions": 8, "seed": 1, "max_radius": 3.0}
    balls = build_neuron_balls(
        losses.data, 0.2, method, measure="relative_loss", above=losses.above, **options
    )
    centers = losses.data.centers.detach().float().numpy()
    for neuron, radius in enumerate(balls.radii.tolist()):

        def good(w, neuron=neuron):
            point = torch.from_numpy(np.asarray(w)).double()
            return moved_loss(model, 0, neuron, point, x, y) <= 1.2 * losses.own * (1 + 1e-6)

        more = {"epsilon": 0.2, "largest": 3.0, "samples": 8, "seed": 1}
        wanted = (search or partial(bisect_radius, tolerance=0.01))(good, centers[neuron], **more)
        assert radius == pytest.approx(wanted.value, abs=1e-6)
    assert balls.radii.max() > 0


def test_a_network_that_is_not_good_enough_has_no_room():
    model, (x, y) = a_network(), samples()
    losses = losses_of(model, 0, x, y)
    for method in ("sampled", "growing"):
        balls = build_neuron_balls(
            losses.data, 0.9 * losses.own, method, measure="loss", above=losses.above, directions=5
        )
        assert not balls.radii.any()


@pytest.mark.parametrize("epsilon", [1e-15, 1e-9])
def test_a_limit_that_only_rounding_exceeds_ends_with_next_to_no_room(epsilon):
    model, (x, y) = a_network().float(), samples()
    losses = losses_of(model, 0, x.float(), y)
    balls = build_neuron_balls(
        losses.data, epsilon, measure="relative_loss", above=losses.above, directions=20
    )
    assert balls.radii.max() < 1e-2


def request(**options):
    return NeuronRequest(0, Neurons(directions=10, **options), bias_above=True)


def arrays_of(model):
    return {key: value.float().numpy() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("as_batches", [False, True])
@pytest.mark.parametrize("max_rows", [20000, 25])
def test_a_node_measures_on_the_rows_it_draws(as_batches, max_rows):
    """A larger epsilon never gives a smaller ball, and labels stay with their rows."""
    model, (x, y) = a_network().float(), samples(40)
    x = x.float()
    data = iter([(x[:15], y[:15]), (x[15:], y[15:])]) if as_batches else (x, y)
    if as_batches:
        data = list(data)
    small, large = (
        build_neurons(
            request(measure="relative_loss", epsilon=epsilon, max_rows=max_rows),
            arrays_of(model),
            copy.deepcopy(model),
            data,
            seed=4,
        )
        for epsilon in (0.01, 0.2)
    )
    assert (small.radii > 0).all()
    assert (small.radii <= large.radii).all()
    np.testing.assert_array_equal(small.bias_above, model[-1].bias.detach().numpy())


def test_labels_that_do_not_belong_to_the_rows_make_other_balls():
    model, (x, y) = a_network().float(), samples(40)
    asked = request(measure="relative_loss", epsilon=0.05)
    mine, shuffled = (
        build_neurons(asked, arrays_of(model), copy.deepcopy(model), (x.float(), labels), seed=4)
        for labels in (y, y.flip(0))
    )
    assert (mine.radii != shuffled.radii).any()


def test_a_convolution_is_refused_with_what_to_ask_for():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
    x, y = torch.randn(5, 1, 4, 4), torch.zeros(5, dtype=torch.long)
    with pytest.raises(ModelError, match=r"convolution.*measure='absolute'"):
        build_neurons(request(measure="loss", epsilon=1.0), arrays_of(model), model, (x, y), seed=0)


@pytest.mark.parametrize("radius", ["worst", "certified"])
def test_losses_have_no_worst_or_certified_radii(radius):
    with pytest.raises(OptionError, match="radius must be"):
        Neurons(measure="loss", radius=radius)
