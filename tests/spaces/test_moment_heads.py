"""Heads from class moments against scikit-learn, on the samples that the moments are of."""

import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import Ridge
from sklearn.neighbors import NearestCentroid

from gems_flwr.errors import OptionError
from gems_flwr.spaces.cone import (
    HeadMoments,
    HeadOptions,
    MeanRule,
    build_cone,
    build_means,
    covariance_from_means,
    linear_head,
    missing_classes,
)

CLASSES, FEATURES = 4, 6
COUNTS = (240, 160, 90, 60)


def samples(seed=0, counts=COUNTS):
    """Classes of other means and other spreads."""
    rng = np.random.default_rng(seed)
    rows, labels = [], []
    for label, count in enumerate(counts):
        mix = np.eye(FEATURES) + 0.3 * rng.normal(size=(FEATURES, FEATURES))
        rows.append(rng.normal(size=(count, FEATURES)) @ mix + 1.2 * rng.normal(size=FEATURES))
        labels.append(np.full(count, label))
    x, y = np.concatenate(rows), np.concatenate(labels)
    order = rng.permutation(len(y))
    return x[order], y[order]


def cones_of(x, y, nodes=3, classes=CLASSES, **options):
    """Full moments, exact in double precision but for the float32 of the wire."""
    options = {"rank": "full", "min_count": 2} | options
    parts = np.array_split(np.arange(len(y)), nodes)
    tensors = [(torch.from_numpy(x[part]), torch.from_numpy(y[part])) for part in parts]
    return [build_cone(inputs, labels, classes, **options) for inputs, labels in tensors]


@pytest.fixture(scope="module")
def data():
    return samples()


@pytest.fixture(scope="module")
def moments(data):
    return HeadMoments.of(cones_of(*data))


def head(moments, *options):
    return linear_head(moments, HeadOptions(*options))


def scores(layer, x):
    weight, bias = layer
    return x @ weight.T + bias


def centered(values):
    return values - values.mean(axis=1, keepdims=True)


def test_the_moments_of_three_nodes_are_those_of_all_samples(data, moments):
    x, y = data
    within = sum((y == c).mean() * np.cov(x[y == c].T, bias=True) for c in range(CLASSES))
    means = np.array([x[y == c].mean(axis=0) for c in range(CLASSES)])
    np.testing.assert_allclose(moments.shares, np.bincount(y) / len(y))
    np.testing.assert_allclose(moments.means, means, atol=1e-5)
    np.testing.assert_allclose(moments.within, within, atol=1e-5)
    for label in range(CLASSES):
        own = np.cov(x[y == label].T, bias=True)
        np.testing.assert_allclose(moments.class_covariance(label), own, atol=1e-5)


@pytest.mark.parametrize("shrinkage", [0.0, 0.05, 0.7, 1.0])
def test_lda_is_scikit_learns_with_the_same_shrinkage(data, moments, shrinkage):
    x, y = data
    theirs = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=shrinkage).fit(x, y)
    ours = scores(head(moments, "lda", "counts", shrinkage), x)
    np.testing.assert_allclose(centered(ours), centered(theirs.decision_function(x)), atol=1e-3)


def test_a_prior_moves_lda_as_it_moves_scikit_learns(data, moments):
    """Without shrinkage; scikit-learn divides by n - C, so that scores but for the prior differ."""
    x, y = data
    prior = HeadOptions("lda", 0.5).shares(moments.shares)
    theirs = LinearDiscriminantAnalysis(solver="svd", priors=prior).fit(x, y)
    plain = LinearDiscriminantAnalysis(solver="svd").fit(x, y)
    ours = head(moments, "lda", 0.5, 0.0)[1] - head(moments, "lda", "counts", 0.0)[1]
    wanted = theirs.intercept_ - plain.intercept_
    np.testing.assert_allclose(ours - ours.mean(), wanted - wanted.mean(), atol=1e-5)
    # Priors are those of the counts' power: between counts and uniform.
    np.testing.assert_allclose(prior, np.sqrt(COUNTS) / np.sqrt(COUNTS).sum(), rtol=1e-6)


@pytest.mark.parametrize("ridge", [1e-3, 0.5])
def test_ridge_is_scikit_learns_on_one_hot_labels(data, moments, ridge):
    x, y = data
    strength = ridge * np.trace(np.cov(x.T, bias=True)) / FEATURES
    theirs = Ridge(alpha=strength * len(y)).fit(x, np.eye(CLASSES)[y])
    weight, bias = head(moments, "ridge", "counts", None, ridge)
    np.testing.assert_allclose(weight, theirs.coef_, atol=1e-5)
    np.testing.assert_allclose(bias, theirs.intercept_, atol=1e-5)


def test_nearest_means_are_scikit_learns_centroids(data, moments):
    x, y = data
    theirs = NearestCentroid().fit(x, y)
    assert (scores(head(moments, "nearest_mean"), x).argmax(axis=1) == theirs.predict(x)).all()


@pytest.mark.parametrize("name", ["ridge", "lda", "nearest_mean"])
def test_a_class_that_nobody_sent_is_never_predicted(name):
    x, y = samples(counts=(200, 200, 100))
    cones = cones_of(x, y, classes=5)
    assert missing_classes(cones) == (3, 4)
    layer = head(HeadMoments.of(cones), name)
    far = 100 * np.random.default_rng(1).normal(size=(2000, FEATURES))
    assert np.isfinite(layer[0]).all()
    assert scores(layer, far).argmax(axis=1).max() <= 2


def test_a_constant_feature_does_no_harm(data):
    x, y = data
    x = np.concatenate([x, np.zeros((len(x), 1))], axis=1)
    for shrinkage in (0.0, 0.05):
        layer = head(HeadMoments.of(cones_of(x, y)), "lda", "counts", shrinkage)
        assert np.isfinite(layer[0]).all()
        assert (scores(layer, x).argmax(axis=1) == y).mean() > 0.6


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"name": "svm"}, "head must be one of"),
        ({"prior": "even"}, "prior must be 'counts', 'uniform' or a number"),
        ({"prior": 1.5}, "prior must be"),
        ({"prior": True}, "prior must be"),
        ({"shrinkage": -0.1}, r"shrinkage must be in \[0, 1\]"),
        ({"name": "ridge", "ridge": 0.0}, "ridge must be above 0"),
    ],
)
def test_options_out_of_range_are_refused(options, reason):
    with pytest.raises(OptionError, match=reason):
        HeadOptions(**options)


def test_the_covariance_from_means_is_right_on_average():
    """FedCOF's estimator: E sum n (mu_k - mu)(mu_k - mu)^T / sum (K - 1) is the covariance.

    400 draws of 3 nodes with 4 groups of two classes each, 22 degrees of freedom a draw: entries of
    the mean are off by about sqrt(2 / (400 * 22)) = 0.015 of the variances.
    """
    rng = np.random.default_rng(0)
    mix = np.array([[1.0, 0.4, 0.0], [0.0, 0.8, 0.3], [0.0, 0.0, 0.5]])
    rule, total = MeanRule(2, exact=True), np.zeros((3, 3))

    def cone(node, seed):
        labels = np.repeat([0, 1], [40 + 10 * node, 60])
        inputs = rng.normal(size=(len(labels), 3)) @ mix + 5 * labels[:, None]
        samples = torch.from_numpy(inputs), torch.from_numpy(labels)
        return build_means(*samples, 2, groups=4, rule=rule, seed=seed)

    for draw in range(400):
        total += covariance_from_means([cone(node, draw) for node in range(3)])
    np.testing.assert_allclose(total / 400, mix.T @ mix, atol=0.06)


def test_without_a_second_mean_of_any_class_the_covariance_is_round():
    cone = build_means(torch.randn(40, 3), torch.arange(40) % 2, 2, rule=MeanRule(2, exact=True))
    assert np.array_equal(covariance_from_means([cone]), np.eye(3))
