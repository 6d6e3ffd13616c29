"""From a trained linear layer to its ball or ellipsoid: the node's side in one call.

2019, Section 3.1 and Appendix A. Which radius is a choice, and the space says which:
``bisection`` and ``growing`` are the papers' searches, ``sampled`` the same random
directions solved exactly, ``worst`` the directions most likely to fail, ``certified`` a proof.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gems_flwr.errors import NotGoodEnoughError
from gems_flwr.radii.certified import certified_curve, certified_loss_radius
from gems_flwr.radii.fisher_axes import DAMPING, linear_fisher, relative_axes
from gems_flwr.radii.layer_data import LayerData, random_directions
from gems_flwr.radii.quality import Quality, two_sided
from gems_flwr.radii.rays import RadiusCurve, accuracy_curve, loss_radius
from gems_flwr.radii.search import GoodEnough, Vector, bisect_radius, grow_radius
from gems_flwr.radii.worst import worst_curve, worst_loss_radius
from gems_flwr.spaces.ball import BallSpace
from gems_flwr.spaces.ellipsoid import EllipsoidSpace
from gems_flwr.spaces.radius import Method, Radius


def good_enough(data: LayerData, quality: Quality) -> GoodEnough:
    """Return Q as a function of the flat model, for the papers' searches."""
    x, y = data.augmented(slice(None))

    def good(w: Vector) -> bool:
        matrix = data.matrix(torch.from_numpy(w).to(data.weight)[None])[0]
        return quality.good(two_sided(x @ matrix.T), y)

    return good


def radius_curve(
    data: LayerData, method: Method, epsilon: float = 0.5, directions: int = 500, seed: int = 0
) -> RadiusCurve:
    """Return the radius for every accuracy at once: sampled, worst or certified."""
    if method == "certified":
        return certified_curve(data)
    if method == "worst":
        return worst_curve(data, epsilon)[0]
    if method == "sampled":
        return accuracy_curve(data, random_directions(data, directions, seed))
    raise ValueError(f"method: expected sampled, worst or certified for a curve, got {method!r}")


def find_radius(
    data: LayerData,
    quality: Quality,
    method: Method = "worst",
    *,
    directions: int = 500,
    largest: float = 4000.0,
    seed: int = 0,
) -> Radius:
    """Return how far around a linear layer the models stay good enough.

    Parameters
    ----------
    data : LayerData
        Layer, validation data and, for an ellipsoid, the relative axes.
    quality : Quality
        What is good enough.
    method : {"sampled", "worst", "certified", "bisection", "growing"}
        How to find out; see `gems_flwr.spaces.radius.Radius`.
    directions : int
        Random directions, for all but worst and certified.
    largest : float
        R_max: no radius above it.
    seed : int
        Seed of the random directions.

    Raises
    ------
    NotGoodEnoughError
        If not even the centre is good enough.
    """
    scores, y = data.scores()
    if not quality.good(scores, y):
        raise NotGoodEnoughError(quality.epsilon, quality.score(scores, y), quality.measure)
    if method in ("bisection", "growing"):
        axes = None if data.axes is None else data.axes.cpu().numpy().astype(np.float32)
        search = bisect_radius if method == "bisection" else grow_radius
        return search(
            good_enough(data, quality),
            data.center,
            epsilon=quality.epsilon,
            largest=largest,
            samples=directions,
            seed=seed,
            axes=axes,
        )
    used = directions
    if quality.measure == "accuracy":
        if method == "worst":
            curve, used = worst_curve(data, quality.epsilon)
        else:
            curve = radius_curve(data, method, quality.epsilon, directions, seed)
        value = curve.radius(quality.epsilon)
    elif method == "worst":
        value, used = worst_loss_radius(data, quality)
    elif method == "certified":
        value = certified_loss_radius(data, quality)
    else:
        value = loss_radius(data, random_directions(data, directions, seed), quality, largest)
    used = 0 if method == "certified" else used
    return Radius(
        min(value, largest) if math.isfinite(value) else largest, method, quality.epsilon, used
    )


def build_ball(
    data: LayerData, quality: Quality, method: Method = "worst", **options: Any
) -> BallSpace:
    """Return the ball around a linear layer; options as in `find_radius`."""
    return BallSpace(data.center, find_radius(data, quality, method, **options))


def build_ellipsoid(
    data: LayerData,
    quality: Quality,
    method: Method = "worst",
    *,
    fisher: Tensor | None = None,
    floor: float = 0.1,
    damping: float = DAMPING,
    **options: Any,
) -> EllipsoidSpace:
    """Return the ellipsoid around a linear layer.

    Parameters
    ----------
    data, quality, method, options
        As in `find_radius`; the data's own axes are replaced.
    fisher : tensor of shape (d,), optional
        Fisher diagonal; the layer's own, exact over labels, if left out.
    floor : float
        c of Eq. 5.
    damping : float
        What is added to the Fisher diagonal; see `gems_flwr.radii.fisher_axes`.
    """
    diagonal = linear_fisher(data) if fisher is None else fisher
    axes = relative_axes(diagonal, floor, damping).to(data.weight)
    shaped = LayerData(data.weight, data.bias, data.inputs, data.labels, axes)
    radius = find_radius(shaped, quality, method, **options)
    if radius.value <= 0:
        raise NotGoodEnoughError(quality.epsilon, quality.epsilon, quality.measure)
    radii = axes.double().cpu().numpy() * radius.value
    return EllipsoidSpace(data.center, radii.astype(np.float32), radius)
