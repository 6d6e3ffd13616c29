"""Sums in whole numbers: right to rounding, and no sample changes them by more than is said."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gems_flwr.errors import SpaceError
from gems_flwr.moments import whole_sums
from gems_flwr.moments.whole_sums import (
    constant,
    gradient_sums,
    gradient_unit,
    mean_sums,
    mean_units,
    rounded,
    spread_sums,
    spread_unit,
)

CLASSES = 4


def made(seed: int, count: int, features: int, scale: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return scale * rng.normal(size=(count, features)), rng.integers(0, CLASSES, count)


@given(seed=st.integers(0, 10**6), features=st.integers(1, 300), scale=st.floats(1e-6, 1e6))
def test_one_sample_changes_every_sum_by_no_more_than_its_sensitivity(
    seed: int, features: int, scale: float
) -> None:
    inputs, labels = made(seed, 1, features, scale)
    rng = np.random.default_rng(seed + 1)
    weight, bias = rng.normal(size=(CLASSES, features)) * 10, rng.normal(size=CLASSES)
    center = rng.normal(size=features)
    means = mean_sums(inputs, labels, CLASSES, clip=2.0)
    spread = spread_sums(inputs, center, clip=2.0)
    gradient = gradient_sums(inputs, labels, weight, bias, center, 2.0, 0.25)
    assert sum((a.astype(float) ** 2).sum() for a in means.values()) <= whole_sums.MEANS**2
    length = (spread["diagonal"].astype(float) ** 2).sum()
    length += 2 * (spread["corner"].astype(float) ** 2).sum()
    assert length <= whole_sums.SPREAD**4
    assert (gradient["gradient"].astype(float) ** 2).sum() <= whole_sums.GRADIENT**2


def test_samples_add_up_exactly_over_nodes() -> None:
    inputs, labels = made(0, 9000, 20)
    center, weight = np.full(20, 0.1), np.full((CLASSES, 20), 0.3)
    for sums in (
        lambda rows: mean_sums(inputs[rows], labels[rows], CLASSES, 3.0),
        lambda rows: spread_sums(inputs[rows], center, 3.0),
        lambda rows: gradient_sums(
            inputs[rows], labels[rows], weight, np.zeros(CLASSES), center, 3.0, 0.25
        ),
    ):
        whole, first, second = sums(slice(None)), sums(slice(5000)), sums(slice(5000, None))
        for name in whole:
            assert (whole[name] == first[name] + second[name]).all()


def test_means_are_those_of_shortened_inputs() -> None:
    inputs, labels = made(1, 3000, 30)
    lengths = np.linalg.norm(inputs, axis=1, keepdims=True)
    short = inputs * np.minimum(1, 5.0 / lengths)
    sums, units = mean_sums(inputs, labels, CLASSES, 5.0), mean_units(30, 5.0)
    counts = np.bincount(labels, minlength=CLASSES)
    assert np.allclose(sums["counts"] * units["counts"], counts, rtol=1e-12)
    expected = np.stack([short[labels == c].sum(axis=0) for c in range(CLASSES)])
    # A step is 5 / 4096 or so, and rounding even over it.
    assert np.abs(sums["sums"] * units["sums"] - expected).max() < 5 * 5 / 4096 * np.sqrt(3000)
    squares = float(sums["squares"][0]) * units["squares"]
    assert squares == pytest.approx((short**2).sum(), rel=1e-3)


def test_spread_is_the_second_moment_of_centred_inputs() -> None:
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
def test_gradient_is_that_of_torch_shortened_per_sample(longest: float) -> None:
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


def test_as_many_features_as_steps_are_refused() -> None:
    with pytest.raises(SpaceError, match="features"):
        rounded(np.ones((1, 70_000)), 256)
