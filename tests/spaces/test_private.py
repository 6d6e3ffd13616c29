"""Private releases against an accountant that others wrote; private sums in whole numbers."""

import math
import sys

import absl.logging
import numpy as np
import pytest
import torch
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kstest

from gems_flwr.errors import SpaceError
from gems_flwr.spaces.cone import (
    PrivateChoice,
    PrivateRelease,
    build_cone,
    constant,
    gaussian_noise,
    gradient_sums,
    gradient_unit,
    mean_units,
    private_steps,
    private_sums,
    secret_normal,
    spent_epsilon,
    spread_sums,
    spread_unit,
    whole_mean_sums,
    whole_vectors,
)

DELTA = 1e-5

# The accountant's logging keeps what was sys.stderr when it was imported, pytest's own file, and
# closes it as soon as somebody configures logging anew, as Hydra does.
absl.logging.get_absl_handler().python_handler.setStream(sys.__stderr__)


def accounted(*multipliers):
    """Return epsilon by privacy loss distributions; a multiplier is noise over sensitivity."""
    accountant = PLDAccountant()
    for multiplier in multipliers:
        accountant.compose(dp_event.GaussianDpEvent(multiplier))
    return accountant.get_epsilon(DELTA)


@pytest.mark.parametrize("epsilon", [0.3, 10.0])
def test_noise_spends_what_was_asked_for(epsilon):
    for sensitivity in (math.sqrt(2), math.sqrt(3)):
        noise = gaussian_noise(epsilon, DELTA, sensitivity)
        assert accounted(noise / sensitivity) == pytest.approx(epsilon, rel=0.01)


@pytest.mark.parametrize("count", [1, 10])
def test_releases_compose_as_the_accountant_says(count):
    release, score = PrivateRelease(1.0, DELTA, 2.0), PrivateChoice(0.5, DELTA)
    assert spent_epsilon(0.0, DELTA) == spent_epsilon(1e-12, DELTA) == 0
    ours = spent_epsilon(count * release.squared_mu + score.squared_mu, DELTA)
    moments, accuracy = release.noise / math.sqrt(3), score.noise / math.sqrt(2)
    assert ours == pytest.approx(accounted(*[moments] * count, accuracy), rel=0.01)


def test_secret_noise_is_normal_and_never_the_same():
    assert kstest(secret_normal((200, 100)).ravel(), "norm").pvalue > 1e-6
    x, y = torch.ones(40, 3), torch.zeros(40)
    release = PrivateRelease(1.0, DELTA, 1.0)
    assert private_sums(x, y, 2, release).counts[0] != private_sums(x, y, 2, release).counts[0]
    seeded = [private_sums(x, y, 2, release, seed=5).counts[0] for _ in range(2)]
    assert seeded[0] == seeded[1]


def test_noise_is_in_proportion_to_what_one_sample_can_change():
    """Sums by the clipping length, second moments by its square, off the diagonal over √2.

    A deviation of n numbers is known within 4 / √(2n): 7 % of 1,770, 37 % of 60.
    """
    release, x = PrivateRelease(5.0, DELTA, 5.0), np.random.default_rng(0).normal(size=(9000, 60))
    short = 5 * x / np.linalg.norm(x, axis=1, keepdims=True)
    found = private_sums(torch.from_numpy(x), torch.zeros(9000), 1, release, seed=1)
    noise = found.outers[0] - short.T @ short
    corner, diagonal = noise[np.triu_indices(60, 1)], np.diag(noise)
    assert corner.std() == pytest.approx(25 * release.noise / math.sqrt(2), rel=0.07)
    assert diagonal.std() == pytest.approx(25 * release.noise, rel=0.37)
    assert (found.sums[0] - short.sum(axis=0)).std() == pytest.approx(5 * release.noise, rel=0.37)


def shown_classes(labels, draws, **options):
    """Return how often class 2 is sent, and how often it is named as withheld."""
    x = torch.zeros(len(labels), 2)
    release = PrivateRelease(1.0, DELTA, 1.0)
    cones = [
        build_cone(x, torch.tensor(labels), 3, private=release, noise_seed=seed, **options)
        for seed in range(draws)
    ]
    sent = np.mean([2 in cone.labels for cone in cones])
    return sent, np.mean([2 in cone.withheld for cone in cones])


@pytest.mark.parametrize("options", [{}, {"min_count": 1}])
def test_one_sample_of_a_new_class_does_not_show(options):
    """Adding one sample may change the chance to be sent, or withheld, by at most a factor e."""
    draws = 200
    without = shown_classes([0] * 100 + [1] * 100, draws, **options)
    with_one = shown_classes([0] * 100 + [1] * 100 + [2], draws, **options)
    for before, after in zip(without, with_one, strict=True):
        # Three deviations of a share of so many draws.
        slack = 3 * math.sqrt(0.25 / draws)
        assert after <= math.e * before + slack
        assert before <= math.e * after + slack
    if options == {"min_count": 1}:
        assert without[0] > 0.3


def test_a_node_without_samples_answers_like_one_with_a_sample():
    release = PrivateRelease(1.0, DELTA, 1.0)
    empty, single = (
        private_sums(torch.zeros(n, 2), torch.zeros(n, dtype=torch.long), 3, release, seed=1)
        for n in (0, 1)
    )
    assert empty.labels.tolist() == single.labels.tolist() == [0, 1]
    assert single.counts - empty.counts == pytest.approx([1, 0])


def test_classes_in_a_release_can_be_named():
    x, y = torch.ones(600, 2), torch.arange(600) % 3
    release = PrivateRelease(5.0, DELTA, 2.0, classes=(0, 2))
    assert build_cone(x, y, 3, private=release).labels.tolist() == [0, 2]


# --- sums in whole numbers --------------------------------------------------------------------

CLASSES = 4


def made(seed, count, features, scale=1.0):
    rng = np.random.default_rng(seed)
    return scale * rng.normal(size=(count, features)), rng.integers(0, CLASSES, count)


@given(seed=st.integers(0, 10**6), features=st.integers(1, 300), scale=st.floats(1e-6, 1e6))
def test_one_sample_changes_every_sum_by_no_more_than_its_sensitivity(seed, features, scale):
    inputs, labels = made(seed, 1, features, scale)
    rng = np.random.default_rng(seed + 1)
    weight, bias = rng.normal(size=(CLASSES, features)) * 10, rng.normal(size=CLASSES)
    center = rng.normal(size=features)
    means = whole_mean_sums(inputs, labels, CLASSES, clip=2.0)
    spread = spread_sums(inputs, center, clip=2.0)
    gradient = gradient_sums(inputs, labels, weight, bias, center, 2.0, 0.25)
    assert sum((a.astype(float) ** 2).sum() for a in means.values()) <= private_steps.MEANS**2
    length = (spread["diagonal"].astype(float) ** 2).sum()
    length += 2 * (spread["corner"].astype(float) ** 2).sum()
    assert length <= private_steps.SPREAD**4
    assert (gradient["gradient"].astype(float) ** 2).sum() <= private_steps.GRADIENT**2


def test_samples_add_up_exactly_over_nodes():
    inputs, labels = made(0, 9000, 20)
    center, weight = np.full(20, 0.1), np.full((CLASSES, 20), 0.3)
    for sums in (
        lambda rows: whole_mean_sums(inputs[rows], labels[rows], CLASSES, 3.0),
        lambda rows: spread_sums(inputs[rows], center, 3.0),
        lambda rows: gradient_sums(
            inputs[rows], labels[rows], weight, np.zeros(CLASSES), center, 3.0, 0.25
        ),
    ):
        whole, first, second = sums(slice(None)), sums(slice(5000)), sums(slice(5000, None))
        for name in whole:
            assert (whole[name] == first[name] + second[name]).all()


def test_means_are_those_of_shortened_inputs():
    inputs, labels = made(1, 3000, 30)
    lengths = np.linalg.norm(inputs, axis=1, keepdims=True)
    short = inputs * np.minimum(1, 5.0 / lengths)
    sums, units = whole_mean_sums(inputs, labels, CLASSES, 5.0), mean_units(30, 5.0)
    counts = np.bincount(labels, minlength=CLASSES)
    assert np.allclose(sums["counts"] * units["counts"], counts, rtol=1e-12)
    expected = np.stack([short[labels == c].sum(axis=0) for c in range(CLASSES)])
    # A step is 5 / 4096 or so, and rounding even over it.
    assert np.abs(sums["sums"] * units["sums"] - expected).max() < 5 * 5 / 4096 * np.sqrt(3000)
    squares = float(sums["squares"][0]) * units["squares"]
    assert squares == pytest.approx((short**2).sum(), rel=1e-3)


def test_spread_is_the_second_moment_of_centred_inputs():
    inputs, _ = made(2, 4000, 12)
    center = np.linspace(-1, 1, 12)
    off = inputs - center
    off = off * np.minimum(1, 4.0 / np.linalg.norm(off, axis=1, keepdims=True))
    found, unit = spread_sums(inputs, center, 4.0), spread_unit(12) * 4.0**2
    expected = off.T @ off
    assert np.allclose(found["diagonal"] * unit, np.diag(expected), rtol=1e-2)
    corner = expected[np.triu_indices(12, 1)]
    assert np.abs(found["corner"] * unit - corner).max() < 1e-2 * np.diag(expected).min()


@pytest.mark.parametrize("longest", [5.0, 0.25])
def test_gradient_is_that_of_torch_shortened_per_sample(longest):
    """Torch's own gradient of each sample, shortened, is the independent implementation."""
    inputs, labels = made(3, 200, 6)
    rng = np.random.default_rng(9)
    weight, bias = rng.normal(size=(CLASSES, 6)), rng.normal(size=CLASSES)
    center, clip = rng.normal(size=6) / 3, 2.0
    off = (inputs - center) / clip
    off = off / np.maximum(1, np.linalg.norm(off, axis=1, keepdims=True))
    expected = np.zeros((CLASSES, 7))
    for z, label in zip(off, labels, strict=True):
        layer = torch.from_numpy(np.column_stack([weight * clip, (weight @ center + bias)]))
        layer[:, -1] /= constant(6)
        layer.requires_grad_()
        sample = torch.from_numpy(np.append(z, constant(6)))
        loss = torch.nn.functional.cross_entropy((layer @ sample)[None], torch.tensor([label]))
        loss.backward()
        assert layer.grad is not None
        own = layer.grad.numpy()
        expected += own * min(1.0, longest / np.linalg.norm(own))
    found = gradient_sums(inputs, labels, weight, bias, center, clip, longest)["gradient"]
    assert np.abs(found * gradient_unit(longest) - expected).max() < 2e-3 * np.abs(expected).max()


def test_as_many_features_as_steps_are_refused():
    with pytest.raises(SpaceError, match="features"):
        whole_vectors(np.ones((1, 70_000)), 256)
