"""Balls of all neurons of a layer: exact along their rays, rounded down, checked on arrival."""

import dataclasses

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gems_flwr import Neurons
from gems_flwr.errors import BadReplyError
from gems_flwr.networks import activation_of
from gems_flwr.neurons import NeuronBalls, NeuronData, neuron_balls
from gems_flwr.neurons import balls as internals
from gems_flwr.spaces.ball.layer_data import unit_directions

# What they compute is tested with networks.
KINDS = (nn.ReLU, nn.LeakyReLU, nn.Identity, nn.Tanh, nn.ELU, nn.Softplus, nn.Hardtanh)


def a_layer(seed, kind=nn.ReLU, count=4, n=30, features=5, bias=True):
    """Return a random layer in float64, whose numbers float32 holds exactly."""
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=rng).double()

    weight, bias = draw(count, features), draw(count) if bias else None
    return NeuronData(weight, bias, draw(n, features), activation_of(kind()))


def deviation(data, neuron, points):
    """Compute Eq. 3 by itself, sample by sample."""
    x = data.inputs.numpy()
    features = x.shape[1]

    def output(point):
        before = x @ point[:features] + (point[features] if data.bias is not None else 0)
        return data.activation.function(torch.from_numpy(before)).numpy()

    center = output(data.centers[neuron].numpy())
    return np.array([np.sqrt(((output(p) - center) ** 2).sum()) for p in points]) / len(x)


def rays(data, count, seed):
    return next(unit_directions(data.centers.shape[1], count, seed, count, data.centers))


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.sampled_from(KINDS), st.booleans(), st.floats(0.005, 0.3))
def test_a_radius_is_where_the_first_of_its_rays_fails(seed, kind, bias, epsilon):
    data = a_layer(seed, kind, bias=bias)
    balls = neuron_balls(data, epsilon, directions=25, seed=seed)
    directions = rays(data, 25, seed).numpy()
    for neuron, radius in enumerate(balls.radii.astype(np.float64)):
        center = data.centers[neuron].numpy()
        assert deviation(data, neuron, center + radius * directions).max() <= epsilon
        beyond = deviation(data, neuron, center + radius * (1 + 1e-3) * directions)
        assert radius == 4000 or beyond.max() > epsilon


@pytest.mark.parametrize("kind", [nn.ReLU, nn.Tanh])
def test_the_others_have_no_say_in_a_neurons_ball(kind, monkeypatch):
    """Neurons in another order, or alone, in single precision, or in small pieces: the same."""
    data = a_layer(5, kind, count=5)
    options = {"directions": 40, "seed": 1, "max_radius": 50.0}
    together = neuron_balls(data, 0.05, **options)
    for index in ([3, 0, 4, 2, 1], [2]):
        part = dataclasses.replace(data, weight=data.weight[index], bias=data.bias[index])
        some = neuron_balls(part, 0.05, **options)
        assert some.radii == pytest.approx(together.radii[index], rel=1e-5)
        assert some.importance == pytest.approx(together.importance[index], rel=1e-5)
    single = NeuronData(
        *(x.float() for x in (data.weight, data.bias, data.inputs)), data.activation
    )
    assert neuron_balls(single, 0.05, **options).radii == pytest.approx(together.radii, rel=1e-4)
    monkeypatch.setattr(internals, "CHUNK_BYTES", 8 * 30 * 7)
    monkeypatch.setattr(internals, "BLOCK", 64)
    assert neuron_balls(data, 0.05, **options).radii == pytest.approx(together.radii, rel=1e-6)


def test_a_silent_neuron_moves_until_a_sample_gets_through_and_has_no_importance():
    data = a_layer(10)
    bias = data.bias.clone()
    bias[1] = -100.0
    data = dataclasses.replace(data, bias=bias)
    balls = neuron_balls(data, 0.01)
    # |x| r = 100 - w x at the earliest.
    assert balls.radii[1] >= 0.999 * float((-data.before[1] / data.rows.norm(dim=1)).min())
    assert balls.importance[1] == 0


def test_a_neuron_that_nothing_moves_gets_the_largest_radius():
    dead = dataclasses.replace(a_layer(11, bias=False), inputs=torch.zeros(5, 5))
    assert neuron_balls(dead, 0.1, max_radius=7.0).radii.tolist() == [7.0] * 4
    far = dataclasses.replace(a_layer(11), bias=torch.full((4,), -1e5))
    assert neuron_balls(far, 0.1).radii.tolist() == [4000.0] * 4


def test_importance_is_output_times_outgoing_weights():
    data, norms = a_layer(12, nn.Tanh), torch.arange(4.0)
    mean = data.outputs.abs().mean(dim=1)
    assert neuron_balls(data, 0.1).importance == pytest.approx(mean.numpy(), rel=1e-6)
    balls = neuron_balls(data, 0.1, outgoing_norms=norms)
    assert balls.importance == pytest.approx((mean * norms).numpy(), rel=1e-6)


def test_weights_and_inputs_that_are_not_finite_are_named():
    for name in ("weight", "bias", "inputs"):
        values = torch.full_like(getattr(a_layer(0), name), torch.nan)
        with pytest.raises(ValueError, match=f"{name}: expected finite"):
            dataclasses.replace(a_layer(0), **{name: values})


# --- what arrives -------------------------------------------------------------------------------


def some_balls(**changes):
    values = {
        "centers": np.arange(12.0).reshape(3, 4),
        "radii": np.array([0.1, 0.0, 2.5]),
        "importance": np.array([1.0, 0.0, 3.0]),
    }
    return NeuronBalls(**(values | changes))


def test_one_array_holds_everything():
    balls = some_balls()
    array = balls.to_array()
    assert (array.shape, array.dtype) == ((3, 6), np.float32)
    back = NeuronBalls.from_array(array)
    for name in ("centers", "radii", "importance"):
        np.testing.assert_array_equal(getattr(back, name), getattr(balls, name))
    assert (len(back), back.dimension) == (3, 4)
    assert some_balls(importance=None).importance.tolist() == [1.0, 1.0, 1.0]


# --- the question -------------------------------------------------------------------------------


def spoiled(column, value):
    array = some_balls().to_array()
    array[1, column] = value
    return array


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (spoiled(0, np.nan), "NaN"),
        (spoiled(0, 1e9), "absolute values"),
        (spoiled(-2, -1.0), "radii.*at least 0"),
        (spoiled(-1, -1.0), "importance.*at least 0"),
        (some_balls().to_array()[:2], "shape"),
    ],
)
def test_a_bad_reply_is_named(array, reason):
    question = Neurons().of_layer(0, (3, 4))
    with pytest.raises(BadReplyError, match=reason):
        question.read(RecordDict({"neurons": ArrayRecord({"neurons": Array(array)})}))
    with pytest.raises(BadReplyError, match="expected an ArrayRecord 'neurons'"):
        question.read(RecordDict({"balls": ArrayRecord({"neurons": Array(array)})}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epsilon", float("nan")),
        ("epsilon", [0.1, 0.0]),
        ("max_rows", 0),
    ],
)
def test_options_name_what_is_allowed(field, value):
    with pytest.raises(ValueError, match=f"^{field} must be"):
        Neurons(**{field: value})
