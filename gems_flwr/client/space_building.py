"""From a request for a space, a trained layer and the node's data to the space."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gems_flwr.moments.class_sums import ClassSums, in_chunks, sum_classes
from gems_flwr.moments.cone_building import MIN_COUNT, build_cone
from gems_flwr.radii.layer_data import LayerData
from gems_flwr.radii.layer_radius import build_ball, build_ellipsoid, radius_curve
from gems_flwr.radii.quality import Quality
from gems_flwr.samples import Samples
from gems_flwr.spaces.ball import BallSpace
from gems_flwr.spaces.curved_space import CurvedSpace, thin_curve
from gems_flwr.spaces.ellipsoid import EllipsoidSpace
from gems_flwr.spaces.space_files import Space
from gems_flwr.wire.requests import SpaceRequest


def build_space(
    request: SpaceRequest,
    *,
    weight: Tensor,
    bias: Tensor | None,
    validation: Samples,
    train: Samples,
    seed: int,
    largest_rank: int | None = None,
) -> Space | CurvedSpace | ClassSums:
    """Build the space that was asked for.

    Parameters
    ----------
    request : SpaceRequest
        What to build.
    weight, bias : tensor of shape (C, D), tensor of shape (C,)
        The node's trained layer: the centre of a ball or ellipsoid. A cone needs its shape only.
    validation : Samples
        Where balls and ellipsoids are judged.
    train : Samples
        Where the moments of a cone come from.
    seed : int
        Source of random directions and clusters, and of the noise of a private release only where
        the request has `dp_seeded`.
    largest_rank : int, optional
        Most directions of a class that ``rank="auto"`` comes to.

    Raises
    ------
    NotGoodEnoughError
        If not even the node's own model is good enough.
    SpaceError
        If no class has enough samples for a cone.
    """
    if request.kind == "cone" and request.sums:
        sums = sum_classes(in_chunks(train.inputs, train.labels), max(2, weight.shape[0]))
        return sums.over_all_classes(request.min_count or MIN_COUNT)
    if request.kind == "cone":
        return build_cone(
            train.inputs,
            train.labels,
            max(2, weight.shape[0]),
            rank=request.rank,
            int8=request.int8,
            clusters=request.clusters,
            min_count=request.min_count,
            epsilon=request.epsilon,
            private=request.private,
            seed=seed,
            noise_seed=seed if request.dp_seeded else None,
            largest_rank=largest_rank,
        )
    data = LayerData(weight, bias, validation.inputs, validation.labels)
    quality = Quality(request.epsilon, request.measure)
    # Seeds of torch are signed.
    options: dict[str, Any] = {"directions": request.directions, "seed": seed % 2**63}
    space: BallSpace | EllipsoidSpace
    if request.kind == "ball":
        space = build_ball(data, quality, request.radius, **options)
    else:
        space = build_ellipsoid(data, quality, request.radius, floor=request.floor, **options)
        axes = space.radii.astype(np.float64) / space.radius.value
        data = dataclasses.replace(data, axes=torch.from_numpy(axes).to(weight))
    if not request.curve:
        return space
    curve = radius_curve(data, request.radius, request.epsilon, **options)
    return CurvedSpace(space, thin_curve(curve.radii))
