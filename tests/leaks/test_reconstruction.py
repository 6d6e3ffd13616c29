"""Samples that are known are rebuilt from their moments, or not where nothing determines them."""

import numpy as np
import pytest
import torch
from helpers_leaks import node
from scipy.spatial.distance import cdist

from gems_flwr.leaks.rebuilt_samples import MOST_SAMPLES, rebuilt_samples
from gems_flwr.leaks.recipes import Recipe
from gems_flwr.leaks.reconstruction import (
    nearest_distances,
    rebuild,
    rebuild_table,
    sent_directions,
)
from gems_flwr.moments.cone_building import build_cone
from gems_flwr.spaces.cone import mean_values


def directions_of(samples):
    centered = samples - samples.mean(axis=0)
    _, values, right = np.linalg.svd(centered / np.sqrt(len(samples)), full_matrices=False)
    return values[: len(samples) - 1, None] * right[: len(samples) - 1]


def test_two_samples_are_the_mean_plus_and_minus_the_one_direction():
    """No search is needed: with 0 iterations they are found to rounding."""
    samples = np.random.default_rng(0).random((2, 7))
    guesses = rebuild_table(samples.mean(0), directions_of(samples), 2, 0, 1, iterations=0)
    assert nearest_distances(guesses, samples) == pytest.approx(0, abs=1e-7)


def test_a_table_that_is_not_searched_for_has_the_moments():
    samples = np.random.default_rng(0).normal(size=(6, 9))
    table = rebuild_table(samples.mean(0), directions_of(samples), 6, -99, 99, iterations=0)
    assert table.mean(axis=0) == pytest.approx(samples.mean(axis=0))
    assert np.cov(table.T, bias=True) == pytest.approx(np.cov(samples.T, bias=True))
    assert nearest_distances(table, samples).min() > 0.1


def test_distances_are_scipys_per_feature():
    rng = np.random.default_rng(0)
    guesses, samples = rng.normal(size=(5, 8)), rng.normal(size=(7, 8))
    expected = cdist(samples, guesses).min(axis=1) / np.sqrt(8)
    assert nearest_distances(guesses, samples) == pytest.approx(expected)


@pytest.mark.parametrize(("recipe", "expected"), [(Recipe(rank="full"), 33), (Recipe(), 0)])
def test_pictures_are_rebuilt_from_full_moments_and_not_from_the_default(recipe, expected):
    """33 pictures of 120 pixels that are 0 or 1: every one of them, or none."""
    data = node()
    cone, own = recipe.build(data.inputs, data.labels, 3), data.of(1)
    found = rebuilt_samples(mean_values(cone)[1], sent_directions(cone, 1), own, data.inputs)
    assert (found.rebuilt, found.by_chance) == (expected, 0)
    assert found.is_attack == (expected > 0)
    guesses = rebuild(cone, 1, 0, 1, iterations=300)
    assert (nearest_distances(guesses, own) < 0.01).sum() == expected


def test_in_few_dimensions_guesses_are_near_by_chance_and_that_is_no_alarm():
    """Of 200 samples in two dimensions some are hit by a table that was not searched for."""
    samples = np.random.default_rng(0).normal(size=(200, 2))
    found = rebuilt_samples(samples.mean(0), directions_of(samples)[:2], samples, samples)
    assert found.rebuilt > 0
    assert found.by_chance > 0
    assert not found.is_attack


def test_a_narrow_class_is_known_anyway():
    """All samples within .01 of each other: a guess at the mean is near, and tells nothing."""
    rng = np.random.default_rng(0)
    samples = 0.5 + 0.01 * rng.normal(size=(20, 30))
    wide = np.concatenate([samples, np.zeros((1, 30)), np.ones((1, 30))])
    found = rebuilt_samples(samples.mean(0), np.zeros((0, 30)), samples, wide)
    assert found.nearest < 0.1
    assert found.rebuilt == 0


def test_features_of_different_orders_are_measured_each_in_its_own():
    """Pixels in [0, 1] of which some are counted in thousandths are rebuilt as well."""
    data = node()
    units = np.where(np.arange(data.inputs.shape[1]) % 2, 1e-3, 1.0)
    own, everything = data.of(1) * units, data.inputs * units
    found = rebuilt_samples(own.mean(0), directions_of(own), own, everything)
    assert found.rebuilt == 33


def test_entries_without_a_covariance_have_no_directions():
    data = node(small=10)
    table, labels = torch.from_numpy(data.inputs).float(), torch.from_numpy(data.labels)
    cone = build_cone(table, labels, 3)
    assert cone.lacking.tolist() == [False, True, False]
    assert sent_directions(cone, 1).shape == (0, 120)
    # 90 samples allow 90 // 25 directions.
    assert sent_directions(cone, 0).shape == (3, 120)


def test_many_samples_are_not_searched_for():
    samples = np.zeros((MOST_SAMPLES + 1, 2))
    assert rebuilt_samples(samples[0], np.zeros((0, 2)), samples, samples) is None
