"""An attacker who has a candidate, and asks whether it is among the samples behind class moments.

The attacker also has *other* samples of the class, a few thousand, and so knows its mean and
covariance well. Every candidate is held against what was sent by several statistics (inner products
with the sent mean and covariance after whitening, likelihood ratios, the largest deviation from the
sent mean, features that were never seen to vary); how to weigh them is learnt on nodes of the
attacker's own making ("shadow" nodes: Shokri et al. 2017), whose members are known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from gems_flwr.typing import Float

# What a node's samples become on the wire: mean and covariance; None if nothing is sent.
Release = Callable[[Float], tuple[Float, Float] | None]

# Ridges of the whitening, as shares of the mean variance of a feature.
RIDGES = (0.02, 0.2)
# Shadow nodes, and candidates of either kind that are tried on one node at most.
SHADOWS = 6
CANDIDATES = 300


@dataclass(frozen=True)
class Knowledge:
    """What the attacker knows of a class: mean, eigenvalues and eigenvectors of its covariance."""

    mean: Float
    values: Float
    vectors: Float

    @classmethod
    def of(cls, samples: Float) -> Knowledge:
        """Learn from samples that are not the node's."""
        values, vectors = np.linalg.eigh(np.cov(samples.T, bias=True))
        return cls(samples.mean(axis=0), np.maximum(values, 0), vectors)

    def whitening(self, ridge: float) -> Float:
        """Return the matrix that makes the class nearly round."""
        return np.asarray(self.vectors / np.sqrt(self.values + ridge * self.values.mean()))


def statistics(candidates: Float, sent: tuple[Float, Float], known: Knowledge) -> Float:
    """Return what the attacker looks at, a row per candidate."""
    mean, covariance = sent
    scale = float(known.values.mean())
    spread = np.sqrt(np.maximum(np.diag(covariance), 0))
    expected = (known.vectors * known.values) @ known.vectors.T
    off = candidates - mean
    columns = [
        -np.abs(off / (spread + 0.05 * np.sqrt(scale))).max(axis=1),
        -((np.abs(off) > 0.2 * np.sqrt(scale)) & (spread < 0.005 * np.sqrt(scale))).sum(axis=1),
    ]
    sent_values, sent_vectors = np.linalg.eigh(covariance)
    for ridge in RIDGES:
        whitening = known.whitening(ridge)
        white, white_mean = (candidates - known.mean) @ whitening, (mean - known.mean) @ whitening
        surplus = whitening.T @ (covariance - expected) @ whitening
        fit = -((off @ sent_vectors) ** 2 / (np.maximum(sent_values, 0) + ridge * scale)).sum(1)
        columns += [
            white @ white_mean,
            (white**2).sum(axis=1) - ((white - white_mean) ** 2).sum(axis=1),
            ((white @ surplus) * white).sum(axis=1),
            fit,
            fit + (white**2).sum(axis=1),
        ]
    return np.stack(columns, axis=1)


@dataclass(frozen=True, eq=False)
class Judge:
    """How statistics are weighed: a logistic model of them, standardised."""

    center: Float
    scale: Float
    model: LogisticRegression

    @classmethod
    def taught(cls, table: Float, truth: NDArray[np.int64]) -> Judge:
        """Learn from candidates whose membership is known.

        Parameters
        ----------
        table : array of shape (candidates, statistics)
            See `statistics`.
        truth : int array of shape (candidates,)
            1 for members, 0 for others; both occur.
        """
        center, scale = table.mean(axis=0), table.std(axis=0) + 1e-12
        model = LogisticRegression(C=0.1, max_iter=500, class_weight="balanced")
        return cls(center, scale, model.fit((table - center) / scale, truth))

    def suspicion(self, table: Float) -> Float:
        """Return how much each candidate looks like a member; larger is more."""
        return np.asarray(self.model.decision_function((table - self.center) / self.scale))


def membership_auc(
    known: Float, nodes: Sequence[Float], others: Float, release: Release, seed: int = 0
) -> float | None:
    """Return how well members are told from others: 0.5 is guessing, 1 is knowing.

    Parameters
    ----------
    known : array of shape (samples, features)
        The attacker's own samples of the class.
    nodes : sequence of arrays
        The samples of each node that is attacked, all of one number.
    others : array
        Samples that are on no node.
    release : callable
        What a node sends.
    seed : int
        Of the attacker's own choices.

    Returns
    -------
    float or None
        Mean over the nodes; None if nothing is sent.
    """
    generator, count = np.random.default_rng(seed), len(nodes[0])
    rows, labels = [], []
    for _ in range(SHADOWS):
        order = generator.permutation(len(known))
        half = len(known) // 2
        inside, outside = known[order[half : half + count]], known[order[half + count :]]
        sent = release(inside)
        if sent is None:
            return None
        table, truth = _candidates(inside, outside)
        rows.append(statistics(table, sent, Knowledge.of(known[order[:half]])))
        labels.append(truth)
    judge = Judge.taught(np.concatenate(rows), np.concatenate(labels))
    whole, results = Knowledge.of(known), []
    for samples in nodes:
        sent = release(samples)
        if sent is None:
            return None
        table, truth = _candidates(samples, others)
        suspicion = judge.suspicion(statistics(table, sent, whole))
        results.append(roc_auc_score(truth, suspicion))
    return float(np.mean(results))


def _candidates(inside: Float, outside: Float) -> tuple[Float, NDArray[np.int64]]:
    inside, outside = inside[:CANDIDATES], outside[:CANDIDATES]
    truth = np.repeat([1, 0], [len(inside), len(outside)])
    return np.concatenate([inside, outside]), truth
