"""Lifts are functions of a seed: nothing travels, and all nodes have the same."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from gems_flwr import RandomFilters, RandomFourier
from gems_flwr.errors import OptionError


def filters(**options):
    return RandomFilters((1, 12, 12), filters=6, grid=3, **options)


LIFTS = {
    "filters": (filters, (1, 12, 12)),
    "fourier": (lambda **options: RandomFourier(9, outputs=8, **options), (9,)),
}


def batch(shape, count=7, seed=0):
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=LIFTS)
def lift_and_data(request):
    make, shape = LIFTS[request.param]
    return make, batch(shape)


def test_nothing_of_a_lift_is_in_the_state_of_a_model(lift_and_data):
    make, _ = lift_and_data
    model = nn.Sequential(make(), nn.Linear(make().features, 3))
    assert list(model.state_dict()) == ["1.weight", "1.bias"]
    assert [name for name, _ in model.named_parameters()] == ["1.weight", "1.bias"]
    model.load_state_dict(model.state_dict())


def test_the_seed_alone_decides(lift_and_data):
    make, x = lift_and_data
    torch.manual_seed(1)
    one = make()(x)
    torch.manual_seed(2)
    assert torch.equal(make()(x), one)
    assert not torch.equal(make(seed=1)(x), one)
    before = torch.get_rng_state()
    make()
    assert torch.equal(torch.get_rng_state(), before)


def test_copies_casts_and_functional_calls_give_the_same(lift_and_data):
    make, x = lift_and_data
    model = nn.Sequential(make(), nn.Linear(make().features, 2))
    expected = model(x)
    assert torch.equal(copy.deepcopy(model)(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), expected)
    called = torch.func.functional_call(model, dict(model.named_parameters()), (x,))
    assert torch.equal(called, expected)
    doubled = copy.deepcopy(model).to("cpu", torch.float64)(x.double())
    assert doubled.dtype == torch.float64
    torch.testing.assert_close(doubled.float(), expected)
    meta = make().to("meta")
    assert meta(x.to("meta")).shape == (7, make().features)


def test_inputs_have_finite_gradients_blank_ones_too(lift_and_data):
    make, x = lift_and_data
    for inputs in (x, torch.zeros_like(x), torch.full_like(x, 3)):
        inputs = inputs.clone().requires_grad_()
        out = make()(inputs)
        assert bool(torch.isfinite(out).all())
        out.sum().backward()
        assert bool(torch.isfinite(inputs.grad).all())


def plain_filters(lift, image):
    """The formula of the class's docstring, in loops over pixels."""
    _, height, width = lift.input_shape
    image = image.double().numpy()
    image = (image - image.min()) / (image.max() - image.min())
    reach, k = lift.kernel // 2, lift.kernel
    framed = np.pad(image, ((0, 0), (reach, reach), (reach, reach)), mode="edge")
    weight, bias = lift.weight.double().numpy(), lift.bias.double().numpy()
    answers = np.zeros((lift.filters, height, width))
    for row in range(height):
        for column in range(width):
            patch = framed[:, row : row + k, column : column + k]
            flat = patch - patch.mean(axis=(1, 2), keepdims=True)
            length = math.sqrt((flat**2).sum() + lift.contrast**2)
            for index in range(lift.filters):
                score = (weight[index] * patch).sum() / length + bias[index]
                answers[index, row, column] = max(0, score)
    pooled = np.zeros((lift.filters, lift.grid, lift.grid))
    centers = [
        np.linspace(lift.margin * side, (1 - lift.margin) * side, lift.grid)
        for side in (height, width)
    ]
    for a, high in enumerate(centers[0]):
        for b, wide in enumerate(centers[1]):
            down = (np.arange(height) + 0.5 - high) / (lift.sigma * height)
            along = (np.arange(width) + 0.5 - wide) / (lift.sigma * width)
            window = np.exp(-(down[:, None] ** 2 + along**2) / 2)
            pooled[:, a, b] = (answers * window).sum(axis=(1, 2)) / window.sum()
    pooled /= np.sqrt((pooled**2).sum(axis=0) + 1e-3)
    return np.sqrt(pooled).reshape(-1)


@pytest.mark.parametrize("shape", [(1, 12, 12), (3, 17, 20), (2, 6, 4)])
def test_filters_are_their_formula(shape):
    lift = RandomFilters(shape, filters=5, grid=3)
    for image in batch(shape, 2):
        found = lift(image[None])[0].numpy()
        np.testing.assert_allclose(found, plain_filters(lift, image), atol=2e-5)


@pytest.mark.parametrize(("factor", "offset"), [(255, 0), (1 / 0.3, -0.4), (1, 7)])
def test_the_scale_of_pixels_does_not_matter(factor, offset):
    x = batch((1, 12, 12))
    torch.testing.assert_close(filters()(factor * x + offset), filters()(x), atol=1e-3, rtol=0)


def test_an_image_does_not_depend_on_its_neighbours_in_a_batch():
    lift = RandomFilters((1, 28, 28))
    x = batch((1, 28, 28), 100)  # more than are lifted at a time
    alone = torch.cat([lift(image[None]) for image in x])
    torch.testing.assert_close(lift(x), alone)


def test_kernels_and_blocks_follow_the_size_of_images():
    sizes = {8: (3, 1), 15: (3, 1), 16: (5, 1), 28: (5, 1), 55: (5, 1), 56: (5, 2), 224: (5, 8)}
    for side, (kernel, block) in sizes.items():
        lift = RandomFilters((3, side, side), filters=2)
        assert (lift.kernel, lift.block) == (kernel, block)
        assert lift(batch((3, side, side), 1)).shape == (1, 32)


def test_a_large_image_is_lifted_like_its_means_over_blocks():
    x = batch((1, 56, 60), 2)
    small = nn.functional.avg_pool2d(x, 2)
    one, other = RandomFilters((1, 56, 60))(x), RandomFilters((1, 28, 30))(small)
    torch.testing.assert_close(one, other)


def test_products_of_fourier_features_are_a_gaussian_kernel():
    """E cos(w.(x - y)) is exp(-|x - y|^2 / 2 s^2) for w ~ N(0, 1 / s^2) (Rahimi and Recht 2007)."""
    x = torch.randn(20, 30, generator=torch.Generator().manual_seed(0))
    lifted = RandomFourier(30, outputs=40_000, bandwidth=0.8)(x)
    rows = nn.functional.layer_norm(x, (30,), eps=1e-12)
    expected = torch.exp(-(torch.cdist(rows, rows) ** 2) / (2 * 0.8**2 * 30))
    # 20,000 cosines whose mean has a deviation of less than 1 / sqrt(20,000) = 0.007.
    torch.testing.assert_close(lifted @ lifted.T / 20_000, expected, atol=0.03, rtol=0)


def test_fourier_features_take_mean_and_length_away():
    x, lift = batch((9,)), RandomFourier(9, 8)
    torch.testing.assert_close(lift(5 * x + 3), lift(x), atol=1e-4, rtol=0)


def test_fourier_features_may_keep_what_they_are_made_of():
    x = batch((9,))
    kept, plain = RandomFourier(9, 8, keep_inputs=True), RandomFourier(9, 8)
    assert kept.features == 17
    rows = nn.functional.layer_norm(x, (9,), eps=1e-12)
    torch.testing.assert_close(kept(x), torch.cat([rows, plain(x)], dim=1), atol=1e-5, rtol=0)


def test_the_numbers_of_seed_zero_stay_what_they_are():
    """Nodes of other versions draw the same, or their moments are of other features.

    Written down from the first version; six digits, since a machine may round the last one.
    """
    first = RandomFilters((1, 28, 28)).weight[0, 0, 0, :3].tolist()
    assert [f"{value:.6f}" for value in first] == ["-0.415418", "-0.030999", "-0.167443"]
    second = RandomFourier(100).frequencies[0, :3].tolist()
    assert [f"{value:.6f}" for value in second] == ["-0.330059", "-0.053322", "-0.151545"]


REFUSED = [
    (lambda: RandomFilters((28, 28)), "RandomFourier"),
    (lambda: RandomFilters((1, 3, 28)), "at least 4"),
    (lambda: RandomFilters((1, 8, 8), filters=0), "filters must be at least 1"),
    (lambda: RandomFilters((1, 8, 8), kernel=9), "kernel must be odd, from 3 to 8"),
    (lambda: RandomFilters((1, 8, 8))(torch.rand(2, 8, 8)), "images: expected shape"),
    (lambda: RandomFourier(4, outputs=7), "outputs must be an even number"),
    (lambda: RandomFourier(4)(torch.rand(2, 5)), "vectors: expected 4"),
]


def test_what_is_out_of_range_is_refused_by_name():
    for make, message in REFUSED:
        with pytest.raises(OptionError, match=message):
            make()
