"""Scores against scikit-learn, votes against hand-counted ones."""

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, balanced_accuracy_score, log_loss

from gems_flwr import scoring


def random_predictions(seed, samples=200, classes=4):
    rng = np.random.default_rng(seed)
    probabilities = rng.dirichlet(np.ones(classes), size=samples)
    labels = np.concatenate([np.arange(classes), rng.integers(0, classes, samples - classes)])
    return probabilities, labels


def test_scores_equal_scikit_learns():
    probabilities, labels = random_predictions(0)
    predicted = probabilities.argmax(axis=1)
    score = scoring.score(probabilities, labels)
    assert score["accuracy"] == pytest.approx(accuracy_score(labels, predicted))
    assert score["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(labels, predicted))
    assert score["loss"] == pytest.approx(log_loss(labels, probabilities))


def test_an_impossible_class_gives_a_large_but_finite_loss():
    assert scoring.cross_entropy(np.array([[1.0, 0.0]]), np.array([1])) == pytest.approx(
        -np.log(1e-12)
    )


def one_hot(*classes, count=3):
    return np.eye(count)[list(classes)]


def test_the_majority_wins():
    members = [one_hot(0, 2), one_hot(0, 1), one_hot(1, 1)]
    assert scoring.majority_vote(members, np.random.default_rng(0)).tolist() == [0, 1]


def test_ties_are_broken_evenly_and_by_the_seed():
    """Two members that always disagree: each wins half of 4000 samples, ± 5 sd of 31.6."""
    members = [one_hot(*[0] * 4000), one_hot(*[2] * 4000)]
    votes = scoring.majority_vote(members, np.random.default_rng(1))
    assert set(votes) == {0, 2}
    assert abs((votes == 0).sum() - 2000) < 160
    assert (votes == scoring.majority_vote(members, np.random.default_rng(1))).all()
    assert (votes != scoring.majority_vote(members, np.random.default_rng(2))).any()
