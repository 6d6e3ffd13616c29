"""A linear layer from noisy sums: class means, one spread for all, and noisy gradients.

All that is known are totals with noise (`gems_flwr.moments.whole_sums`), so nothing may cost
another look at the data: no line search, no loss. The first layer is least squares on one-hot
labels by the noisy moments. Then come steps along noisy gradients, preconditioned by the noisy
spread ``U diag(w) U^T``, with Nesterov's momentum::

    m' = beta m - rate g(V + beta m) U diag(1 / (w + damping)) U^T,   V' = V + m'

Noise is the same in all directions and the spread is not: in directions where the data hardly vary
Newton's step would be made of noise, hence the damping, which grows with the noise. (The w are
shares: they sum up to about 1.) Clipped gradients are those of a loss that grows linearly for
samples far on the wrong side, so the momentum has no need to be small.

Decided here, on validation data of MNIST (pixels and random filters, epsilon 1, 3 and 10):
centring by the noisy mean, a clip at `REACH` of the typical distance from it, and the constants.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import numpy as np

from gems_flwr.device_algebra import eigenpairs, solves_elsewhere
from gems_flwr.moments.whole_sums import (
    constant,
    gradient_unit,
    mean_units,
    spread_unit,
)
from gems_flwr.typing import Float

# Of the typical distance from the mean: where centred inputs are clipped.
REACH = 0.8
# Of a sample's gradient, in units of clipped inputs.
LONGEST = 0.25
# Logits of the first layer over least squares on one-hot labels.
_STEEPER = 6.0
RATE, MOMENTUM = 40.0, 0.85
# Without noise, and for each unit of it.
DAMPING, NOISE_DAMPING = 0.008, 70.0


@dataclasses.dataclass(frozen=True, eq=False)
class NoisyMeans:
    """What a private total of means says.

    Parameters
    ----------
    counts : array of shape (C,)
        Samples of each class, none below 1.
    means : array of shape (C, D)
        Of each class.
    distance : float
        Root of the mean squared distance from the common mean.
    """

    counts: Float
    means: Float
    distance: float

    @classmethod
    def of(cls, sums: Float, counts: Float, squares: float, clip: float) -> NoisyMeans:
        """Read the totals of `whole_sums.mean_sums`."""
        units = mean_units(sums.shape[1], clip)
        there = np.maximum(counts * units["counts"], 1.0)
        center = sums.sum(axis=0) * units["sums"] / there.sum()
        spread = float(squares) * units["squares"] / there.sum() - float(center @ center)
        # Of noise alone there may be nothing left; inputs are no longer than the clip in any case.
        distance = math.sqrt(max(spread, (1e-3 * clip) ** 2))
        return cls(there, sums * units["sums"] / there[:, None], distance)

    @property
    def total(self) -> float:
        """How many samples there are."""
        return float(self.counts.sum())

    @property
    def center(self) -> Float:
        """The common mean."""
        return np.asarray(self.counts @ self.means / self.total)

    @property
    def clip(self) -> float:
        """Where centred inputs are clipped."""
        return REACH * self.distance


@dataclasses.dataclass(frozen=True, eq=False)
class Spread:
    """The second moments of centred inputs over their clip, and of the constant beside them.

    Parameters
    ----------
    values : array of shape (D + 1,)
        In order of `vectors`, none below 0.
    vectors : array of shape (D + 1, D + 1)
        As columns.
    """

    values: Float
    vectors: Float

    @classmethod
    def of(cls, diagonal: Float, corner: Float, samples: float, device: str = "cpu") -> Spread:
        """Read the totals of `whole_sums.spread_sums` over so many samples."""
        features = len(diagonal)
        matrix = np.zeros((features, features))
        matrix[np.triu_indices(features, 1)] = corner
        matrix += matrix.T
        matrix[np.diag_indices(features)] = diagonal
        matrix = matrix * (spread_unit(features) / samples)
        solve = partial(eigenpairs, device=device) if solves_elsewhere(device) else np.linalg.eigh
        values, vectors = solve(matrix)
        all_vectors = np.eye(features + 1)
        all_vectors[:features, :features] = vectors
        all_values = np.append(np.maximum(values, 0.0), constant(features) ** 2)
        return cls(all_values, all_vectors)

    def solve(self, rows: Float, damping: float) -> Float:
        """Return rows times the inverse of the damped matrix."""
        return np.asarray((rows @ self.vectors / (self.values + damping)) @ self.vectors.T)


@dataclasses.dataclass(frozen=True, eq=False)
class Stepping:
    """Where the steps have come to.

    Parameters
    ----------
    layer : array of shape (C, D + 1)
        Weights of centred inputs over their clip, and of the constant.
    momentum : array of shape (C, D + 1)
        The last step.
    damping : float
        Of all steps, above 0.
    """

    layer: Float
    momentum: Float
    damping: float

    @classmethod
    def first(cls, means: NoisyMeans, spread: Spread, noise: float) -> Stepping:
        """Return least squares on one-hot labels.

        Parameters
        ----------
        means, spread
            What is known of the data.
        noise : float
            Deviation of the numbers of the mean gradients that will follow, in units of their clip
            `LONGEST`; at least 0.
        """
        features = means.means.shape[1]
        shares = means.counts / means.total
        off = (means.means - means.center) / means.clip
        joint = np.column_stack([shares[:, None] * off, shares * constant(features)])
        damping = DAMPING + NOISE_DAMPING * noise
        return cls(_STEEPER * spread.solve(joint, damping), np.zeros_like(joint), damping)

    @property
    def ahead(self) -> Float:
        """Where the next gradient is wanted."""
        return self.layer + MOMENTUM * self.momentum

    def stepped(self, gradient: Float, spread: Spread, samples: float) -> Stepping:
        """Step along a total of `whole_sums.gradient_sums`, taken at `ahead`."""
        mean = gradient * (gradient_unit(LONGEST) / samples)
        step = MOMENTUM * self.momentum - RATE * spread.solve(mean, self.damping)
        return Stepping(self.layer + step, step, self.damping)


def plain_layer(layer: Float, center: Float, clip: float) -> tuple[Float, Float]:
    """Return weight (C, D) and bias (C,) for inputs as they are."""
    features = layer.shape[1] - 1
    weight = layer[:, :-1] / clip
    return weight, layer[:, -1] * constant(features) - weight @ center
