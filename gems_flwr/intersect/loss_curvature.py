"""The curvature of the pooled softmax loss, from class moments and a few numbers of the nodes.

The loss of a linear layer V on samples x has the Hessian ``E[(diag p - p p^T) (x) x x^T]``. The
nodes' moments have the second factor, class by class, and ``G_c``, an estimate of the mean of the
first over the samples of class c (see `gems_flwr.moments.loss_sums`), is C x C numbers that nodes
tell along with the gradient. Their product::

    H V = sum_c share_c G_c V A_c + 2 ridge V,    A_c = second moment of the class's inputs

is positive definite by construction and needs no matrix of the layer's size: low-rank moments are
multiplied in the form in which they came, a few components at a time.

Decided here: the two factors of a class are multiplied as if they were independent. They are
not (samples near a border have more curvature), which is why steps are safeguarded, and corrected
by what the rounds have shown; see `gems_flwr.intersect.refinement`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from gems_flwr.intersect.pooled_moments import PooledMoments
from gems_flwr.typing import Float

Product = Callable[[Float], Float]


@dataclasses.dataclass(frozen=True, eq=False)
class LossCurvature:
    """Products with the curvature of the loss at one layer.

    Parameters
    ----------
    moments : PooledMoments
        Of all nodes.
    scale : array of shape (D,)
        What inputs are divided by.
    shares : array of shape (components,)
        How much each component counts: within its class, or, with one matrix for all, in all.
    softmax : array of shape (C, C, C), or (1, C, C)
        The sum of what stands for ``diag p - p p^T`` over the samples of each class, or of all
        classes, per sample of all classes.
    ridge : float
        Of the loss.
    """

    moments: PooledMoments
    scale: Float
    shares: Float
    softmax: Float
    ridge: float

    @classmethod
    def of(
        cls, moments: PooledMoments, scale: Float, softmax: Float, ridge: float, weights: Float
    ) -> LossCurvature:
        """Return the curvature where a sample of each class counts by its weight.

        A class that nodes have samples of but sent no moments of is taken to lie where all the
        others do: without any, its samples would bend the loss in ways that no step knows of.
        """
        if len(softmax) == 1:
            shares = moments.shares * weights[moments.labels]
            return cls(moments, scale, shares / shares.sum(), softmax, ridge)
        present = np.bincount(moments.labels, moments.shares, minlength=moments.num_classes)
        unknown = softmax[present == 0].sum(axis=0)
        mixed = softmax + present[:, None, None] * unknown
        return cls(moments, scale, shares_within(moments), mixed, ridge)

    def __call__(self, layer: Float) -> Float:
        """Return the product with a direction of shape (C, D + 1)."""
        return self._along_moments(layer) + 2 * self.ridge * layer

    def _along_moments(self, layer: Float) -> Float:
        moments, weight = self.moments, layer[:, :-1] / self.scale
        shares = self.shares
        result = np.zeros_like(layer)
        for entry, matrix in enumerate(moments.matrices):
            mixed = self._of_class(moments.labels[entry]) * shares[entry]
            result[:, :-1] += mixed @ (weight @ matrix)
            self._add_mean(result, mixed, weight, layer[:, -1], moments.means[entry])
        first = len(moments.matrices)
        for block in moments.low.blocks():
            labels = moments.labels[first:][block.components]
            parts = shares[first:][block.components]
            owner = np.repeat(np.arange(len(labels)), block.present.sum(axis=1))
            for label in np.unique(labels):
                mine = labels == label
                mixed = self._of_class(label)
                rows = np.concatenate([block.means[mine], block.factors[mine[owner]]])
                weights = np.concatenate([parts[mine], parts[owner[mine[owner]]]])
                seen = weight @ rows.T
                seen[:, : mine.sum()] += layer[:, -1:]
                seen *= weights
                spread = weight * (parts[mine] @ block.variances[mine])
                result[:, :-1] += mixed @ (seen @ rows + spread)
                result[:, -1] += mixed @ seen[:, : mine.sum()].sum(axis=1)
        result[:, :-1] /= self.scale
        return result

    def _of_class(self, label: int) -> Float:
        return np.asarray(self.softmax[label if len(self.softmax) > 1 else 0])

    @staticmethod
    def _add_mean(result: Float, mixed: Float, weight: Float, bias: Float, mean: Float) -> None:
        score = mixed @ (weight @ mean + bias)
        result[:, :-1] += np.outer(score, mean)
        result[:, -1] += score


def shares_within(moments: PooledMoments) -> Float:
    """Return each component's share of its class."""
    totals = np.bincount(moments.labels, weights=moments.shares, minlength=moments.num_classes)
    return np.asarray(moments.shares / totals[moments.labels])


def mean_directions(moments: PooledMoments, scale: Float, most: int = 10) -> Float:
    """Return orthonormal directions in which the class means of scaled inputs lie.

    Nodes that hold few classes have gradients that are large along the means of these and cancel
    only in the sum. What lies along these directions is told more exactly than the rest.

    Returns
    -------
    array of shape (at most `most`, D + 1)
        The one for the bias is the last entry.
    """
    means = np.zeros((moments.num_classes, len(scale) + 1))
    first, shares = len(moments.matrices), shares_within(moments)
    for entry in range(first):
        means[moments.labels[entry], :-1] += shares[entry] * moments.means[entry]
    for block in moments.low.blocks():
        rows = slice(first + block.components.start, first + block.components.stop)
        np.add.at(means, moments.labels[rows], _with_zero(shares[rows, None] * block.means))
    means[:, :-1] /= scale
    means[np.unique(moments.labels), -1] = 1
    _, sizes, directions = np.linalg.svd(means, full_matrices=False)
    return np.asarray(directions[:most][sizes[:most] > 1e-9 * sizes[0]])


def _with_zero(rows: Float) -> Float:
    return np.column_stack([rows, np.zeros(len(rows))])


def solve(product: Product, target: Float, damping: float, steps: int = 60) -> Float:
    """Return x with ``(H + damping) x = target``, by conjugate gradients.

    Parameters
    ----------
    product : callable
        The product with H, positive semi-definite.
    target : array
        The right side.
    damping : float
        At least 0.
    steps : int
        At most; stopped early, the result is shorter, and still a direction of descent.
    """
    found, rest = np.zeros_like(target), target.copy()
    square = first = float((rest * rest).sum())
    direction = rest
    for _ in range(steps):
        if square <= 1e-8 * first:
            break
        image = product(direction) + damping * direction
        bend = float((direction * image).sum())
        if bend <= 0:
            break
        length = square / bend
        found = found + length * direction
        rest = rest - length * image
        before, square = square, float((rest * rest).sum())
        direction = rest + square / before * direction
    return found
