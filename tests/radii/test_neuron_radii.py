"""Radii of all neurons of a layer: sound where proved, exact where solved, honest elsewhere."""

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gems_flwr.radii import neuron_radii as neurons
from gems_flwr.radii.activations import ACTIVATIONS, Activation, activation_of
from gems_flwr.radii.layer_data import unit_directions
from gems_flwr.radii.neuron_data import NeuronData, draw_rows, neuron_deviation
from gems_flwr.radii.neuron_radii import build_neuron_balls
from gems_flwr.radii.neuron_worst import start_directions, steepest
from gems_flwr.wire.requests import NeuronRequest, Neurons
from gems_flwr.wire.space_requests import Cone, SpaceRequest

SEEDS = st.integers(0, 10_000)
NAMES = st.sampled_from(sorted(ACTIVATIONS))
NUMPY = {
    "relu": lambda a: np.maximum(a, 0),
    "leaky_relu": lambda a: np.where(a > 0, a, 0.01 * a),
    "tanh": np.tanh,
    "sigmoid": lambda a: (1 + np.tanh(a / 2)) / 2,
    "elu": lambda a: np.where(a > 0, a, np.expm1(np.minimum(a, 0))),
    "softplus": lambda a: np.logaddexp(0, a),
    "hardtanh": lambda a: np.clip(a, -1, 1),
    "relu6": lambda a: np.clip(a, 0, 6),
    "identity": lambda a: a,
}


def a_layer(seed, name="relu", count=4, n=30, features=5, bias=True, outgoing=0):
    """Return a random layer in float64, whose numbers float32 holds exactly."""
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=rng).double()

    return NeuronData(
        draw(count, features),
        draw(count) if bias else None,
        draw(n, features),
        ACTIVATIONS[name],
        draw(count, outgoing) if outgoing else None,
    )


def deviation(data, neuron, points):
    """Compute Eq. 3 by itself, in numpy, sample by sample and weight by weight."""
    x, g = data.inputs.numpy(), NUMPY[data.activation.name]
    features = x.shape[1]

    def contribution(point):
        z = g(x @ point[:features] + (point[features] if data.bias is not None else 0))
        return z if data.outgoing is None else np.outer(z, point[data.width :])

    center = contribution(data.centers[neuron].numpy())
    return np.array([np.sqrt(((contribution(p) - center) ** 2).sum()) for p in points]) / len(x)


def rays(data, count, seed):
    return next(unit_directions(data.dimension, count, seed, count, data.incoming))


def one_at_a_time(data, neuron, directions, limit, largest=4000.0):
    """Search by bisection along each ray, as the papers do but with given directions."""
    center, best = data.centers[neuron].numpy(), largest
    for u in directions.numpy():
        low, high = 0.0, best
        if deviation(data, neuron, [center + high * u])[0] <= limit:
            continue
        while high - low > 1e-9 * high:
            middle = (low + high) / 2
            if deviation(data, neuron, [center + middle * u])[0] <= limit:
                low = middle
            else:
                high = middle
        best = low
    return best


@settings(max_examples=60, deadline=None)
@given(SEEDS, NAMES, st.booleans(), st.sampled_from([0, 3]), st.floats(0.005, 0.5))
def test_no_neuron_in_a_certified_ball_deviates_too_much(seed, name, bias, outgoing, epsilon):
    """Random neurons and, much harder, those that climbing the deviation at the surface finds."""
    data = a_layer(seed, name, bias=bias, outgoing=outgoing)
    balls = build_neuron_balls(data, epsilon, "certified")
    assert balls.directions == 0
    radii, everyone = torch.tensor(balls.radii).double(), torch.arange(len(data))
    tried = [rays(data, 20, seed).repeat_interleave(len(data), 0).reshape(20, len(data), -1)]
    for u in start_directions(data):
        for _ in range(5):
            tried.append(u[None])
            u = steepest(data, everyone, u, radii)
    directions = torch.cat(tried)
    for neuron in range(len(data)):
        points = data.centers[neuron] + radii[neuron] * directions[:, neuron]
        assert deviation(data, neuron, points.numpy()).max() <= epsilon


@settings(max_examples=40, deadline=None)
@given(SEEDS, NAMES, st.booleans(), st.floats(0.005, 0.3))
def test_a_sampled_radius_is_where_the_first_of_its_rays_fails(seed, name, bias, epsilon):
    data = a_layer(seed, name, bias=bias)
    balls = build_neuron_balls(data, epsilon, directions=25, seed=seed)
    directions = rays(data, 25, seed).numpy()
    for neuron, radius in enumerate(balls.radii.astype(np.float64)):
        center = data.centers[neuron].numpy()
        assert deviation(data, neuron, center + radius * directions).max() <= epsilon
        beyond = deviation(data, neuron, center + radius * (1 + 1e-3) * directions)
        assert radius == 4000 or beyond.max() > epsilon


@settings(max_examples=30, deadline=None)
@given(SEEDS, NAMES, st.sampled_from([0, 2]), st.floats(0.01, 0.2))
def test_all_neurons_together_get_what_a_search_finds_for_each(seed, name, outgoing, epsilon):
    """With outgoing weights a search may end at a later crossing, never at an earlier one."""
    data = a_layer(seed, name, count=3, n=15, outgoing=outgoing)
    balls = build_neuron_balls(data, epsilon, directions=6, seed=seed)
    directions = rays(data, 6, seed)
    for neuron, radius in enumerate(balls.radii):
        searched = one_at_a_time(data, neuron, directions, epsilon)
        assert radius <= searched * (1 + 1e-6)
        if not outgoing:
            assert radius == pytest.approx(searched, rel=1e-5)


@settings(max_examples=30, deadline=None)
@given(SEEDS, NAMES, st.floats(0.01, 0.3))
def test_rays_with_outgoing_weights_end_at_their_first_crossing(seed, name, epsilon):
    """A dense grid up to the radius finds nothing, and just beyond it one ray fails."""
    data = a_layer(seed, name, count=2, outgoing=3)
    balls = build_neuron_balls(data, epsilon, directions=5, seed=seed)
    assert (balls.outgoing, balls.dimension) == (3, 9)
    for neuron, radius in enumerate(balls.radii.astype(np.float64)):
        center, directions = data.centers[neuron], rays(data, 5, seed)
        grid = torch.linspace(0, 1, 60).double()[:, None, None] * radius * directions
        inside = neuron_deviation(data, neuron, center + grid.reshape(-1, 9))
        assert inside.max() <= epsilon * (1 + 1e-9)
        beyond = neuron_deviation(data, neuron, center + radius * (1 + 1e-3) * directions)
        assert beyond.max() > epsilon


@settings(max_examples=25, deadline=None)
@given(SEEDS, NAMES, st.booleans(), st.sampled_from([0, 3]))
def test_the_deviation_is_that_of_equation_3(seed, name, bias, outgoing):
    data = a_layer(seed, name, bias=bias, outgoing=outgoing)
    points = data.centers[2] + rays(data, 4, seed) * torch.tensor([[0.0], [0.01], [1], [50]])
    expected = deviation(data, 2, points.numpy())
    assert neuron_deviation(data, 2, points).numpy() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert expected[0] == 0


def test_a_deviation_by_hand():
    """Outputs of relu(x) on (3, -1) are (3, 0), of relu(2x) they are (6, 0): 3 / 2 apart."""
    data = NeuronData(torch.ones(1, 1), None, torch.tensor([[3.0], [-1]]), ACTIVATIONS["relu"])
    assert neuron_deviation(data, 0, torch.tensor([[2.0]])).tolist() == [1.5]
    balls = build_neuron_balls(data, 1.5, directions=10)
    # Downwards, relu(0 x) is just as far away as relu(2 x), and relu(-2 x) at sqrt(9 + 4) / 2.
    assert balls.radii[0] == pytest.approx(1.0, rel=1e-6)
    assert build_neuron_balls(data, 1.5, "worst").radii[0] == pytest.approx(1.0, rel=1e-6)
    # sqrt(9 + 1) r / 2 <= 1.5 proves 0.948; sample by sample, (3 r)^2 + max(0, r - 1)^2 proves 1.
    assert build_neuron_balls(data, 1.5, "certified").radii[0] == pytest.approx(1.0, rel=2e-5)


@pytest.mark.parametrize("name", ["relu", "leaky_relu", "tanh", "softplus"])
@pytest.mark.parametrize("outgoing", [0, 4])
def test_the_order_is_certified_worst_sampled_in_many_dimensions(name, outgoing):
    """Inputs are at least 0, like pixels and ReLU outputs: they have a direction in common."""
    data = a_layer(0, name, count=6, n=200, features=150, outgoing=outgoing)
    data = dataclasses.replace(data, weight=data.weight / 12, inputs=data.inputs.abs())
    methods = ("certified", "worst", "sampled")
    certified, worst, sampled = (
        build_neuron_balls(data, 0.02, m, directions=100, max_radius=100).radii for m in methods
    )
    assert np.all(certified <= worst)
    assert np.all(2 * worst < sampled)


@pytest.mark.parametrize("outgoing", [0, 3])
def test_a_neuron_just_beyond_the_worst_radius_really_fails(outgoing):
    data = a_layer(3, outgoing=outgoing)
    balls = build_neuron_balls(data, 0.05, "worst")
    assert balls.directions >= 4
    everyone, radii = torch.arange(4), torch.tensor(balls.radii).double()
    found = torch.zeros(4)
    for u in start_directions(data):
        for _ in range(30):
            points = data.centers + 1.01 * radii[:, None] * u
            at = torch.cat([neuron_deviation(data, i, points[i : i + 1]) for i in range(4)])
            found = torch.maximum(found, at)
            u = steepest(data, everyone, u, radii)
    assert bool((found > 0.05).all())


@pytest.mark.parametrize("method", ["sampled", "worst", "certified", "bisection"])
@pytest.mark.parametrize(("name", "outgoing"), [("relu", 0), ("tanh", 0), ("relu", 2)])
def test_the_others_have_no_say_in_a_neurons_radius(method, name, outgoing):
    """One neuron at a time, and in another order, gives the same."""
    data = a_layer(5, name, count=5, outgoing=outgoing)
    options = {"directions": 10, "seed": 1, "max_radius": 50.0}
    together = build_neuron_balls(data, 0.05, method, **options)

    def some(index):
        feeds = None if data.outgoing is None else data.outgoing[index]
        part = NeuronData(data.weight[index], data.bias[index], data.inputs, data.activation, feeds)
        return build_neuron_balls(part, 0.05, method, **options)

    order = [3, 0, 4, 2, 1]
    assert some(order).radii == pytest.approx(together.radii[order], rel=1e-5)
    assert some(order).importance == pytest.approx(together.importance[order], rel=1e-5)
    assert some([2]).radii == pytest.approx(together.radii[[2]], rel=1e-5)


@pytest.mark.parametrize("outgoing", [0, 2])
def test_radii_do_not_depend_on_how_the_work_is_cut(monkeypatch, outgoing):
    data = a_layer(6, outgoing=outgoing)
    whole = build_neuron_balls(data, 0.05, directions=40, seed=2)
    for module in ("neuron_radii", "neuron_rays", "neuron_data"):
        monkeypatch.setattr(f"gems_flwr.radii.{module}.CHUNK_BYTES", 8 * 30 * 7)
    monkeypatch.setattr(neurons, "BLOCK", 64)
    cut = build_neuron_balls(data, 0.05, directions=40, seed=2)
    assert cut.radii == pytest.approx(whole.radii, rel=1e-6)


def test_single_precision_is_enough():
    data = a_layer(7, n=200, features=40)
    single = NeuronData(
        data.weight.float(), data.bias.float(), data.inputs.float(), data.activation
    )
    for method in ("sampled", "worst", "certified"):
        wide, narrow = (build_neuron_balls(d, 0.02, method).radii for d in (data, single))
        assert narrow == pytest.approx(wide, rel=1e-4)


@pytest.mark.parametrize("method", ["bisection", "growing"])
def test_the_papers_searches_end_near_the_exact_rays(method):
    """Fresh directions at every step find what 40 given ones miss, but nothing that is not there.

    In three dimensions 4000 directions leave no gap: no search ends more than a step of 0.01
    below what they find.
    """
    data = a_layer(8, count=2, features=2)
    few, many = (
        build_neuron_balls(data, 0.1, "sampled", directions=count).radii for count in (40, 4000)
    )
    searched = build_neuron_balls(data, 0.1, method, directions=40, max_radius=400.0)
    assert (searched.method, searched.directions) == (method, 40)
    assert np.all(searched.radii >= 0.99 * many - 0.01)
    assert np.all(searched.radii <= 1.1 * few)


@pytest.mark.parametrize("outgoing", [0, 2])
def test_a_relative_limit_is_a_share_of_the_neurons_own_output(outgoing):
    """A ReLU layer whose weights double has outputs that double, and may move twice as far."""
    data = a_layer(9, outgoing=outgoing)
    limits = data.limits(0.1, "relative")
    outputs = np.array([deviation(data, i, [np.zeros(data.dimension)])[0] for i in range(4)])
    assert limits.numpy() == pytest.approx(0.1 * outputs)
    if not outgoing:
        twice = dataclasses.replace(data, weight=2 * data.weight, bias=2 * data.bias)
        for method in ("sampled", "worst", "certified"):
            once, double = (
                build_neuron_balls(d, 0.1, method, measure="relative").radii for d in (data, twice)
            )
            assert double == pytest.approx(2 * once, rel=1e-5)


def test_a_silent_neuron_takes_the_others_scale():
    data = a_layer(10)
    bias = data.bias.clone()
    bias[1] = -100.0
    data = dataclasses.replace(data, bias=bias)
    limits = data.limits(0.1, "relative")
    assert float(limits[1]) == pytest.approx(float(limits[[0, 2, 3]].mean()))
    silent = dataclasses.replace(data, bias=torch.full((4,), -100.0))
    assert silent.limits(0.1, "relative").tolist() == pytest.approx([0.1] * 4)
    balls = build_neuron_balls(data, 0.01, "certified")
    # It is silent until a sample gets through: |x| r = 100 - w x at the earliest.
    lengths = data.rows.norm(dim=1)
    assert balls.radii[1] >= 0.999 * float((-data.before[1] / lengths).min())
    assert balls.importance[1] == 0


@pytest.mark.parametrize("method", ["sampled", "worst", "certified"])
def test_a_neuron_that_nothing_moves_gets_the_largest_radius(method):
    dead = a_layer(11, bias=False)
    dead = dataclasses.replace(dead, inputs=torch.zeros(5, 5))
    assert build_neuron_balls(dead, 0.1, method, max_radius=7.0).radii.tolist() == [7.0] * 4
    far = dataclasses.replace(a_layer(11), bias=torch.full((4,), -1e5))
    assert build_neuron_balls(far, 0.1, method).radii.tolist() == [4000.0] * 4


def test_importance_is_output_times_outgoing_weights():
    data = a_layer(12, "tanh", outgoing=3)
    mean = data.outputs.abs().mean(dim=1)
    norms = data.outgoing.norm(dim=1)
    alone = dataclasses.replace(data, outgoing=None)
    for given_, options, expected in (
        (data, {}, mean * norms),
        (alone, {}, mean),
        (alone, {"outgoing_norms": norms}, mean * norms),
    ):
        balls = build_neuron_balls(given_, 0.1, "certified", **options)
        assert balls.importance == pytest.approx(expected.numpy(), rel=1e-6)
    with pytest.raises(ValueError, match="outgoing_norms: expected shape"):
        build_neuron_balls(data, 0.1, "certified", outgoing_norms=torch.ones(3))


def test_outgoing_weights_of_zero_have_a_radius_too():
    data = a_layer(13, outgoing=2)
    data = dataclasses.replace(data, outgoing=torch.zeros(4, 2))
    for method in ("sampled", "worst", "certified"):
        radii = build_neuron_balls(data, 0.1, method).radii
        assert np.all((radii > 0) & (radii < 4000))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": torch.ones(4)}, "weight, inputs: expected shapes"),
        ({"inputs": torch.ones(3, 4)}, "inputs: expected rows of 5 features"),
        ({"inputs": torch.ones(0, 5)}, "inputs: expected rows of 5 features"),
        ({"bias": torch.ones(3)}, "bias: expected shape"),
        ({"outgoing": torch.ones(3, 2)}, "outgoing: expected shape"),
        ({"weight": torch.full((4, 5), torch.nan)}, "weight: expected finite"),
        ({"inputs": torch.full((3, 5), torch.inf)}, "inputs: expected finite"),
    ],
)
def test_malformed_layers_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(a_layer(0), **changes)


@pytest.mark.parametrize(
    ("epsilon", "options"),
    [
        (0.0, {}),
        (float("nan"), {}),
        (0.1, {"max_radius": 0.0}),
        (0.1, {"directions": 0}),
        (0.1, {"method": "guess"}),
        (0.1, {"measure": "share"}),
    ],
)
def test_parameters_out_of_range_are_named(epsilon, options):
    blamed = next(iter(options), "epsilon")
    with pytest.raises(ValueError, match=f"^{blamed}: expected"):
        build_neuron_balls(a_layer(0), epsilon, **options)
    with pytest.raises(ValueError, match="points: expected 6 columns"):
        neuron_deviation(a_layer(0), 0, torch.ones(2, 5))


@pytest.mark.parametrize(
    ("module", "lipschitz"),
    [
        (nn.ReLU(), 1),
        (nn.LeakyReLU(), 1),
        (nn.LeakyReLU(0.3), 1),
        (nn.LeakyReLU(1.5), 1.5),
        (nn.Tanh(), 1),
        (nn.Sigmoid(), 0.25),
        (nn.ELU(), 1),
        (nn.ELU(2.5), 2.5),
        (nn.Softplus(), 1),
        (nn.Softplus(beta=3), 1),
        (nn.Hardtanh(), 1),
        (nn.Hardtanh(-2, 3), 1),
        (nn.ReLU6(), 1),
        (nn.Identity(), 1),
    ],
    ids=str,
)
def test_known_activations_are_those_of_torch(module, lipschitz):
    activation = activation_of(module)
    x = torch.linspace(-9, 9, 2001, dtype=torch.float64)
    torch.testing.assert_close(activation.function(x), module(x))
    steps = module(x).diff() / x.diff()
    assert steps.min() >= 0
    assert steps.max() <= lipschitz + 1e-9
    assert activation.lipschitz == pytest.approx(lipschitz)
    # Away from the kinks, which are at multiples of 0.1.
    at = (x[::10] + 0.0123).requires_grad_()
    (expected,) = torch.autograd.grad(module(at).sum(), at)
    torch.testing.assert_close(activation.slope(at.detach()), expected)
    if activation.below is not None:
        torch.testing.assert_close(module(x), x.clamp_min(0) + activation.below * x.clamp_max(0))


@pytest.mark.parametrize(
    "module",
    [nn.GELU(), nn.SiLU(), nn.Mish(), nn.Hardswish(), nn.LeakyReLU(-0.1), nn.ELU(-1.0), nn.GLU()],
    ids=str,
)
def test_an_activation_that_may_turn_back_is_refused(module):
    with pytest.raises(ValueError, match=r"monotone along a ray.*relu.*got") as error:
        activation_of(module)
    assert type(module).__name__ in str(error.value)


def test_what_is_no_activation_is_none():
    for module in (nn.Linear(2, 2), nn.Dropout(), nn.Flatten(), nn.Softmax(dim=1), nn.Sequential()):
        assert activation_of(module) is None
    with pytest.raises(ValueError, match="lipschitz"):
        Activation("flat", torch.zeros_like, 0.0)


def test_a_request_travels_as_text():
    request = Neurons(radius="worst", measure="relative", outgoing=True).in_layer(1)
    assert NeuronRequest.from_json(request.to_json()) == request
    assert "directions" not in request.to_json()
    assert SpaceRequest.from_json(Cone(clusters=3).to_json()) == Cone(clusters=3)
    for kind in (NeuronRequest, SpaceRequest):
        with pytest.raises(ValueError, match=r"\['wings'\], which this version does not know"):
            kind.from_json('{"epsilon": 0.5, "wings": 2}')


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layer", -1),
        ("layer", 0.5),
        ("epsilon", 0.0),
        ("epsilon", float("nan")),
        ("radius", "guess"),
        ("directions", 0),
        ("measure", "accuracy"),
        ("max_rows", 0),
    ],
)
def test_a_request_names_what_is_allowed(field, value):
    make = partial(NeuronRequest, neurons=Neurons()) if field == "layer" else Neurons
    with pytest.raises(ValueError, match=f"^{field} must be"):
        make(**{field: value})


def test_rows_are_drawn_by_the_seed_and_kept_in_order():
    rows = torch.arange(100)[:, None]
    assert draw_rows(rows, 100, 0) is rows
    drawn = draw_rows(rows, 10, 3)[:, 0]
    assert len(drawn.unique()) == 10
    assert bool((drawn.diff() > 0).all())
    assert drawn.tolist() == draw_rows(rows, 10, 3)[:, 0].tolist()
    assert drawn.tolist() != draw_rows(rows, 10, 4)[:, 0].tolist()
