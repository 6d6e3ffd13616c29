"""Classifiers in closed form from class moments: what others make of the same message.

Every function here is pure: shares, means and covariances in, a linear layer or scores out.

================  ===================================================================
head              method
================  ===================================================================
``ridge``         least squares on one-hot labels with a ridge: AFL (He et al., CVPR
                  2025), Fed3R (Fanì et al., ICML 2024)
``lda``           linear discriminant with one shrunk covariance for all classes:
                  FedCGS (Guan et al. 2025), the LDA head of GH-OFL
``qda``           quadratic discriminant, a covariance for each class: GH-OFL
``nearest_mean``  nearest class mean: FedNCM (Legate et al., NeurIPS 2023)
================  ===================================================================

Decided here: these are the classifiers, not the authors' pipelines (random projections, feature
normalisation, fine-tuning afterwards). Priors go between the classes' counts and a uniform one by a
power. The covariance is that of all samples whatever the prior: a rare class's own says little.
A class that nobody sent is never predicted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, get_args

import numpy as np
import torch
from scipy.linalg import cho_factor, cho_solve, solve_triangular

from gems_flwr.device_algebra import solve_positive, solves_elsewhere
from gems_flwr.errors import OptionError
from gems_flwr.intersect.head_moments import HeadMoments
from gems_flwr.typing import Float

Head = Literal["cone", "ridge", "lda", "qda", "nearest_mean", "auto"]
Prior = Literal["counts", "uniform"] | float

SHRINKAGE = 0.05
# Of ridge regression, in units of the mean variance of a feature.
RIDGE = 1e-2
# How far below the best class one that nobody sent stays, in logits.
_NEVER = 20.0


@dataclasses.dataclass(frozen=True)
class HeadOptions:
    """Which head, and its settings.

    Parameters
    ----------
    name : {"cone", "ridge", "lda", "qda", "nearest_mean", "auto"}
        The head.
    prior : "counts", "uniform" or float in [0, 1]
        How likely a class is: by its samples, all the same, or samples to that power between (1
        and 0 are the words). Nearest means know no prior; for cones there is `class_weight`.
    shrinkage : float in [0, 1], optional
        How far covariances are drawn towards a round one of the same trace; 0.05 by default.
    ridge : float, optional
        Of ``ridge``, in units of the mean variance of a feature, above 0; 0.01 by default.
    device : str or torch.device
        Where ridge and lda are solved.

    Raises
    ------
    OptionError
        Names the option and its range.
    """

    name: Head = "cone"
    prior: Prior = "counts"
    shrinkage: float | None = None
    ridge: float | None = None
    device: str | torch.device = "cpu"

    def __post_init__(self) -> None:
        if self.name not in get_args(Head):
            raise OptionError(f"head must be one of {list(get_args(Head))}, got {self.name!r}")
        power_of(self.prior)
        if self.shrinkage is not None and not 0 <= self.shrinkage <= 1:
            raise OptionError(f"shrinkage must be in [0, 1], got {self.shrinkage!r}")
        if self.ridge is not None and not self.ridge > 0 and self.name == "ridge":
            raise OptionError(f"ridge must be above 0 for head='ridge', got {self.ridge!r}")

    def describe(self) -> str:
        """Return the head and those of its settings that count, in one line."""
        if self.name in ("cone", "nearest_mean", "auto"):
            return self.name
        rest = {"shrinkage": self.shrinkage_used} if self.name != "ridge" else {}
        return ", ".join(
            [self.name, *(f"{k} {v:g}" for k, v in rest.items()), f"prior {self.prior}"]
        )

    @property
    def shrinkage_used(self) -> float:
        """The shrinkage, or the default."""
        return SHRINKAGE if self.shrinkage is None else self.shrinkage


def power_of(prior: object) -> float:
    """Return the power of the counts that a prior stands for.

    Raises
    ------
    OptionError
        If it is neither a known word nor a number from 0 to 1.
    """
    words = {"counts": 1.0, "uniform": 0.0}
    if isinstance(prior, str) and prior in words:
        return words[prior]
    if isinstance(prior, int | float) and not isinstance(prior, bool) and 0 <= prior <= 1:
        return float(prior)
    raise OptionError(f"prior must be 'counts', 'uniform' or a number in [0, 1], got {prior!r}")


def prior_shares(shares: Float, prior: Prior) -> Float:
    """Return how likely each class is; 0 stays 0."""
    powers = np.where(shares > 0, np.maximum(shares, 1e-300) ** power_of(prior), 0.0)
    return np.asarray(powers / powers.sum())


def linear_head(moments: HeadMoments, options: HeadOptions) -> tuple[Float, Float]:
    """Return weight (C, D) and bias (C,) of a linear head other than the cone's.

    Raises
    ------
    OptionError
        If the head is none of those.
    """
    heads: dict[str, Callable[[], tuple[Float, Float]]] = {
        "ridge": lambda: ridge_layer(moments, options.prior, options.ridge, options.device),
        "lda": lambda: discriminant_layer(
            moments, options.prior, options.shrinkage_used, options.device
        ),
        "nearest_mean": lambda: nearest_mean_layer(moments),
    }
    if options.name not in heads:
        raise OptionError(f"a linear head from moments is one of {list(heads)}: {options.name!r}")
    return heads[options.name]()


def ridge_layer(
    moments: HeadMoments,
    prior: Prior = "counts",
    ridge: float | None = None,
    device: str | torch.device = "cpu",
) -> tuple[Float, Float]:
    """Return least squares on one-hot labels with a ridge; the bias is free.

    Parameters
    ----------
    moments : HeadMoments
        Of all nodes.
    prior : "counts", "uniform" or float
        How much each class weighs.
    ridge : float, optional
        In units of the mean variance of a feature, above 0; 0.01 by default.
    device : str or torch.device
        Where to solve.
    """
    weights = prior_shares(moments.shares, prior)
    center = weights @ moments.means
    off = np.where(weights[:, None] > 0, moments.means - center, 0.0)
    total = moments.within + (off * weights[:, None]).T @ off
    strength = (RIDGE if ridge is None else ridge) * _mean_variance(total)
    total[np.diag_indices_from(total)] += strength
    weight = _solve(total, (weights[:, None] * off).T, device).T
    return _without_missing(weight, weights - weight @ center, weights)


def discriminant_layer(
    moments: HeadMoments,
    prior: Prior = "counts",
    shrinkage: float = SHRINKAGE,
    device: str | torch.device = "cpu",
) -> tuple[Float, Float]:
    """Return the linear discriminant with one covariance for all classes.

    Parameters
    ----------
    moments : HeadMoments
        Of all nodes.
    prior : "counts", "uniform" or float
        How likely each class is.
    shrinkage : float
        In [0, 1]: how far the covariance is drawn towards a round one of the same trace.
    device : str or torch.device
        Where to solve.
    """
    weights = prior_shares(moments.shares, prior)
    center = weights @ moments.means
    # Around the centre, where products do not cancel.
    off = np.where(weights[:, None] > 0, moments.means - center, 0.0)
    if shrinkage == 1:
        weight = off / _mean_variance(moments.within)
    else:
        weight = _solve(shrunk(moments.within, shrinkage), off.T, device).T
    logs = np.log(np.where(weights > 0, weights, 1.0))
    bias = logs - 0.5 * (weight * off).sum(axis=1) - weight @ center
    return _without_missing(weight, bias, weights)


def nearest_mean_layer(moments: HeadMoments) -> tuple[Float, Float]:
    """Return the layer that chooses the nearest class mean.

    It is the linear discriminant of a round covariance and a uniform prior.
    """
    return discriminant_layer(moments, "uniform", 1.0)


def quadratic_scores(
    moments: HeadMoments,
    inputs: Float,
    prior: Prior = "counts",
    shrinkage: float = SHRINKAGE,
) -> Float:
    """Return the quadratic discriminant's scores, (n, C); minus infinity for missing classes.

    Parameters
    ----------
    moments : HeadMoments
        Of all nodes, with the covariances of single classes.
    inputs : array of shape (n, D)
        What to classify.
    prior, shrinkage
        As for `discriminant_layer`; each class's covariance is drawn towards a round one.
    """
    weights = prior_shares(moments.shares, prior)
    scores = np.full((len(inputs), len(weights)), -np.inf)
    for label in np.flatnonzero(weights > 0):
        matrix = shrunk(moments.class_covariance(int(label)), shrinkage)
        lower = np.linalg.cholesky(_with_floor(matrix))
        white = solve_triangular(lower, (inputs - moments.means[label]).T, lower=True)
        spread = 2 * np.log(np.diag(lower)).sum()
        scores[:, label] = np.log(weights[label]) - 0.5 * ((white**2).sum(axis=0) + spread)
    return scores


def shrunk(covariance: Float, shrinkage: float) -> Float:
    """Return a covariance drawn towards a round one of the same trace."""
    matrix = (1 - shrinkage) * covariance
    matrix[np.diag_indices_from(matrix)] += shrinkage * _mean_variance(covariance)
    return matrix


def _mean_variance(covariance: Float) -> float:
    variance = float(np.trace(covariance)) / len(covariance)
    # Of no spread at all nothing can be said; any unit will do.
    return variance if variance > 0 else 1.0


def _with_floor(matrix: Float) -> Float:
    """Return a matrix that can be inverted, whatever features never vary."""
    floored = matrix.copy()
    floored[np.diag_indices_from(floored)] += 1e-9 * _mean_variance(matrix)
    return floored


def _solve(matrix: Float, right: Float, device: str | torch.device) -> Float:
    try:
        if solves_elsewhere(device):
            return solve_positive(_with_floor(matrix), right, device)
        factors = cho_factor(_with_floor(matrix), lower=True)
        return np.asarray(cho_solve(factors, right))
    except np.linalg.LinAlgError:  # sent in few bits, a matrix may be below zero by rounding
        return np.asarray(np.linalg.pinv(matrix, hermitian=True) @ right)


def _without_missing(weight: Float, bias: Float, weights: Float) -> tuple[Float, Float]:
    """Keep classes that nobody sent from ever being predicted.

    No score is above all others that is below their mean.
    """
    missing = weights == 0
    weight[missing] = weights @ weight
    bias[missing] = weights @ bias - _NEVER
    return weight, bias
