"""What a covariance common to the classes of a node, and the means beside it, say of a sample."""

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from gems_flwr.spaces.cone import build_cone, mean_values

MANY, FEATURES = 200, 100


def node(counts, seed=0, features=FEATURES):
    """Return samples by class, each class around a mean of its own."""
    rng = np.random.default_rng(seed)
    centers = np.random.default_rng(99).normal(size=(len(counts), features)) / 2
    pairs = zip(centers, counts, strict=True)
    return [(each + rng.normal(size=(n, features))).astype(np.float32) for each, n in pairs]


def send(classes, **options):
    labels = np.repeat(np.arange(len(classes)), [len(each) for each in classes])
    x, y = torch.from_numpy(np.concatenate(classes)), torch.from_numpy(labels)
    return build_cone(x, y, max(2, len(classes)), min_count=2, **options)


def less_others(cone):
    """Return the first class's mean as the center, weighted by counts or not, less the others'."""
    means, counts, center = mean_values(cone).astype(float), cone.counts, cone.covariance.center
    by_count = (counts.sum() * center - counts[1:] @ means[1:]) / counts[0]
    return by_count, len(means) * center - means[1:].sum(axis=0)


@pytest.mark.parametrize("count", [8, 16, 32])
def test_the_center_less_the_others_means_does_not_tell_who_is_in_a_small_class(count):
    """As accurate as the sum of all means it tells members from others with an AUC of 0.95."""
    others, aucs = node([0, *[MANY] * 4])[1:], []
    for trial in range(30):
        members, strangers = (node([count], seed)[0] for seed in (2 * trial + 1, 2 * trial + 2))
        truth = np.repeat([1, 0], count)
        candidates, expected = np.concatenate([members, strangers]), node([50_000], 999)[0].mean(0)
        found = less_others(send([members, *others]))
        aucs.append([roc_auc_score(truth, candidates @ (each - expected)) for each in found])
    assert max(np.mean(aucs, axis=0)) < 0.75


def test_a_class_that_shows_a_part_of_its_mean_does_not_move_the_center():
    large = node([0, *[MANY] * 4])[1:]
    one, other = (send([node([8], seed)[0], *large]).covariance.center for seed in (1, 2))
    assert np.array_equal(one, other)


def test_units_of_few_samples_do_not_tell_how_large_they_are_in_each_feature():
    wide = np.where(np.arange(512) % 2, 1000.0, 1.0).astype(np.float32)
    few, many = (send([node([count], 1, 512)[0] * wide]).covariance for count in (24, 4000))
    assert len(np.unique(few.octaves)) <= 3
    # Of many they are as wide as samples: sqrt(m4 / m2) of a normal feature is sqrt(3) of it.
    assert np.allclose(np.log2(2 ** (many.octaves / 4) / wide), np.log2(3) / 2, atol=0.2)
