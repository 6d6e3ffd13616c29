"""How good predictions are, for one model or for several that vote.

Predictions are arrays of class probabilities with one row per sample, or one number for each where
numbers are predicted. The majority vote is the ensemble baseline of the GEMS paper (Guha & Smith
2019, Section 4.1: "random selection for ties"); the softmax mean is a stronger one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray


def accuracy(predicted: NDArray, labels: NDArray) -> float:
    """Return the share of samples whose predicted class is the true one."""
    return float(np.mean(predicted == labels))


def balanced_accuracy(predicted: NDArray, labels: NDArray) -> float:
    """Return the mean over the classes that occur of the share predicted right."""
    return float(np.mean([np.mean(predicted[labels == c] == c) for c in np.unique(labels)]))


def cross_entropy(probabilities: NDArray, labels: NDArray) -> float:
    """Return the mean negative log-probability of the true class."""
    true = probabilities[np.arange(len(labels)), labels]
    # With a floor, so that one hopeless sample does not make the mean infinite.
    return float(-np.mean(np.log(np.maximum(true, 1e-12))))


def score(probabilities: NDArray, labels: NDArray) -> dict[str, float]:
    """Return accuracy, balanced accuracy and loss of class probabilities (samples, classes)."""
    predicted = probabilities.argmax(axis=1)
    return {
        "accuracy": accuracy(predicted, labels),
        "balanced_accuracy": balanced_accuracy(predicted, labels),
        "loss": cross_entropy(probabilities, labels),
    }


def number_score(predictions: NDArray, labels: NDArray) -> dict[str, float]:
    """Return the mean squared error of predicted numbers, and its root."""
    errors = np.asarray(predictions, np.float64) - np.asarray(labels, np.float64)
    loss = float(np.mean(errors**2))
    return {"rmse": loss**0.5, "loss": loss}


Score = Callable[[NDArray, NDArray], dict[str, float]]


def mean_score(members: Sequence[NDArray], labels: NDArray, one: Score = score) -> dict[str, float]:
    """Return the mean over several models of each one's own score."""
    scores = [one(predictions, labels) for predictions in members]
    return {name: float(np.mean([s[name] for s in scores])) for name in scores[0]}


def majority_vote(members: Sequence[NDArray], rng: np.random.Generator) -> NDArray:
    """Return the class that most models predict for each sample.

    Ties are broken by `rng`, each tied class with the same probability.
    """
    samples, classes = members[0].shape
    votes = np.zeros((samples, classes))
    for probabilities in members:
        votes[np.arange(samples), probabilities.argmax(axis=1)] += 1
    # Noise below one vote decides among equals and cannot overturn a majority.
    return np.asarray((votes + rng.random(votes.shape) * 0.5).argmax(axis=1))


def softmax_mean(members: Sequence[NDArray]) -> NDArray:
    """Return the mean of the models' class probabilities."""
    return np.asarray(np.mean(members, axis=0))
