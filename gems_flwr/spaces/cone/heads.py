"""Linear classifiers in closed form from class moments: what others make of the same message.

- ``ridge``: least squares on one-hot labels with a ridge, as AFL (He et al., CVPR 2025) and Fed3R
  (Fanì et al., ICML 2024);
- ``lda``: linear discriminant with one shrunk covariance for all classes, as FedCGS (Guan et al.
  2025) and the LDA head of GH-OFL;
- ``nearest_mean``: nearest class mean, as FedNCM (Legate et al., NeurIPS 2023).

These are the classifiers, not the authors' pipelines. Decided here: priors go between the classes'
counts and a uniform one by a power; the covariance is that of all samples whatever the prior. A
class that no node sent is never predicted.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import torch
from scipy.linalg import cho_factor, cho_solve

from gems_flwr.devices import solve_positive, solves_elsewhere
from gems_flwr.errors import OptionError
from gems_flwr.spaces.cone.cone import ClassMomentCone
from gems_flwr.spaces.cone.solve import ConeOptions, HeadMoments, solve_cones
from gems_flwr.spaces.convex import Intersection, flatten_linear, verdict_of
from gems_flwr.typing import Float

Head = Literal["cone", "ridge", "lda", "nearest_mean", "auto"]
Prior = Literal["counts", "uniform"] | float

# The usual one first: of candidates that cannot be separated the first is taken.
SHRINKAGES = (0.05, 0.01, 0.2)
# Of ridge regression, in units of the mean variance of a feature.
RIDGE = 1e-2
# Beside the prior that was asked for, where all classes are to count the same.
PRIORS: tuple[Prior, ...] = (0.5, "uniform")
# How far below the best class one that no node sent stays, in logits.
_NEVER = 20.0


@dataclasses.dataclass(frozen=True)
class HeadOptions:
    """Which head, its settings as in `gems_flwr.Head`, and where ridge and lda are solved.

    Nearest means have no prior; for cones there is `class_weight`.
    """

    name: Head = "cone"
    prior: Prior = "counts"
    shrinkage: float | None = None
    ridge: float | None = None
    device: str | torch.device = "cpu"

    def __post_init__(self) -> None:
        if self.name not in get_args(Head):
            raise OptionError(f"head must be one of {list(get_args(Head))}, got {self.name!r}")
        _ = self.power
        if self.shrinkage is not None and not 0 <= self.shrinkage <= 1:
            raise OptionError(f"shrinkage must be in [0, 1], got {self.shrinkage!r}")
        if self.ridge is not None and not self.ridge > 0 and self.name == "ridge":
            raise OptionError(f"ridge must be above 0 for head='ridge', got {self.ridge!r}")

    def describe(self) -> str:
        """Return the head and those of its settings that count, in one line."""
        if self.name in ("cone", "nearest_mean", "auto"):
            return self.name
        shrinkage = f", shrinkage {self.shrinkage_used:g}" if self.name == "lda" else ""
        return f"{self.name}{shrinkage}, prior {self.prior}"

    @property
    def shrinkage_used(self) -> float:
        """The shrinkage, or the default."""
        return SHRINKAGES[0] if self.shrinkage is None else self.shrinkage

    @property
    def power(self) -> float:
        """The power of the counts that the prior stands for."""
        power = {"counts": 1.0, "uniform": 0.0}.get(str(self.prior), self.prior)
        if isinstance(power, int | float) and not isinstance(power, bool) and 0 <= power <= 1:
            return float(power)
        allowed = "'counts', 'uniform' or a number in [0, 1]"
        raise OptionError(f"prior must be {allowed}, got {self.prior!r}")

    def shares(self, shares: Float) -> Float:
        """Return how likely each class is, by its share of the samples; 0 stays 0."""
        powers = np.where(shares > 0, np.maximum(shares, 1e-300) ** self.power, 0.0)
        return np.asarray(powers / powers.sum())


def solve_head(
    cones: Sequence[ClassMomentCone],
    head: HeadOptions,
    cone_options: ConeOptions | None = None,
    start: Float | None = None,
) -> Intersection:
    """Return a head's layer, and whether it lies in every cone; ``auto`` is the cone's here.

    If classes have only covariances that are common to a node's, the pairwise loss is smallest at
    the linear discriminant, which also allows for means that are off: that is the cone's head then.
    """
    options = cone_options or ConeOptions()
    if head.name in ("cone", "auto"):
        if options.ridge is not None or not all(cone.has_only_common for cone in cones):
            return solve_cones(cones, options, start=start)
        prior = head.prior if options.class_weight == "counts" else "uniform"
        head = HeadOptions("lda", prior, head.shrinkage, device=options.device)
    return _as_intersection(cones, HeadMoments.of(cones), head, time.perf_counter())


def candidate_heads(
    cones: Sequence[ClassMomentCone],
    cone: Intersection,
    head: HeadOptions,
    cone_options: ConeOptions,
) -> dict[str, Intersection]:
    """Return the layers among which nodes may choose, by name; the cone's comes first.

    `head` has the prior and, where one is given, the shrinkage of the others. If all classes count
    the same in `cone_options`, other priors are tried as well.
    """
    began, moments = time.perf_counter(), HeadMoments.of(cones)
    balanced, where = cone_options.class_weight == "balanced", cone_options.device
    priors = list(dict.fromkeys([head.prior, *(PRIORS if balanced else ())]))
    shrinkages = SHRINKAGES if head.shrinkage is None else (head.shrinkage,)
    heads = [HeadOptions("lda", p, s, device=where) for p in priors for s in shrinkages]
    heads += [HeadOptions("ridge", prior, device=where) for prior in priors]
    found = {"cone": cone}
    if balanced:
        plain = dataclasses.replace(cone_options, class_weight="counts")
        found["cone, by counts"] = solve_head(cones, HeadOptions(), plain, start=cone.point)
    for each in (*heads, HeadOptions("nearest_mean")):
        found[each.describe()] = _as_intersection(cones, moments, each, began)
    return found


def _as_intersection(
    cones: Sequence[ClassMomentCone], moments: HeadMoments, head: HeadOptions, began: float
) -> Intersection:
    point = flatten_linear(*linear_head(moments, head))
    return verdict_of(cones, point, f"head: {head.describe()}", began)


def linear_head(moments: HeadMoments, head: HeadOptions) -> tuple[Float, Float]:
    """Return weight (C, D) and bias (C,) of a linear head other than the cone's."""
    if head.name == "nearest_mean":
        # That is lda with a round covariance and a uniform prior.
        head = HeadOptions("lda", "uniform", 1.0)
    solve = {"ridge": _ridge, "lda": _discriminant}.get(head.name)
    if solve is None:
        raise OptionError(f"head must be ridge, lda or nearest_mean here, got {head.name!r}")
    shares, units = head.shares(moments.shares), moments.units
    within = moments.within / units / units[:, None]
    moments = dataclasses.replace(moments, means=moments.means / units, within=within)
    center = shares @ moments.means
    # Around the centre, where products do not cancel.
    off = np.where(shares[:, None] > 0, moments.means - center, 0.0)
    weight, bias = solve(moments, head, shares, off)
    bias = bias - weight @ center
    # A class that no node sent is never predicted: no score below their mean is above all others.
    missing = shares == 0
    weight[missing] = shares @ weight
    bias[missing] = shares @ bias - _NEVER
    return weight / units, bias


def _ridge(
    moments: HeadMoments, head: HeadOptions, shares: Float, off: Float
) -> tuple[Float, Float]:
    """Return least squares on one-hot labels with a ridge, for centred inputs; the bias is free."""
    total = moments.within + (off * shares[:, None]).T @ off
    strength = (RIDGE if head.ridge is None else head.ridge) * _mean_variance(total)
    total[np.diag_indices_from(total)] += strength
    return _solve(total, (shares[:, None] * off).T, head.device).T, shares


def _discriminant(
    moments: HeadMoments, head: HeadOptions, shares: Float, off: Float
) -> tuple[Float, Float]:
    """Return the linear discriminant with one shrunk covariance, for centred inputs."""
    shrinkage, variance = head.shrinkage_used, _mean_variance(moments.within)
    if shrinkage == 1:
        weight = off / variance
    else:
        shrunk = (1 - shrinkage) * moments.within
        shrunk[np.diag_indices_from(shrunk)] += shrinkage * variance
        weight = _solve(shrunk, off.T, head.device).T
    logs = np.log(np.where(shares > 0, shares, 1.0))
    return weight, logs - 0.5 * (weight * off).sum(axis=1)


def _mean_variance(covariance: Float) -> float:
    variance = float(np.trace(covariance)) / len(covariance)
    # Without any spread every unit will do.
    return variance if variance > 0 else 1.0


def _solve(matrix: Float, right: Float, device: str | torch.device) -> Float:
    # It can be inverted then, whatever features never vary.
    floored = matrix.copy()
    floored[np.diag_indices_from(floored)] += 1e-9 * _mean_variance(matrix)
    try:
        if solves_elsewhere(device):
            return solve_positive(floored, right, device)
        return np.asarray(cho_solve(cho_factor(floored, lower=True), right))
    except np.linalg.LinAlgError:  # sent in few bits, a matrix may be below zero by rounding
        return np.asarray(np.linalg.pinv(matrix, hermitian=True) @ right)
