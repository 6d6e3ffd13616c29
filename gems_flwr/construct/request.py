"""What the server asks a node for, and the one call that answers it.

A `SpaceRequest` travels with the train message; `build_space` turns it, a trained layer and the
node's data into a space. Everything in between is in the other modules of this folder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from gems_flwr.construct.build import build_ball, build_ellipsoid, radius_curve
from gems_flwr.construct.cone import MIN_COUNT, Rank, build_cone
from gems_flwr.construct.json_request import JsonRequest
from gems_flwr.construct.layer import LayerData
from gems_flwr.construct.moments import ClassSums, in_chunks, sum_classes
from gems_flwr.construct.privacy import PrivateRelease, PrivateScore
from gems_flwr.construct.quality import Quality
from gems_flwr.spaces.ball import Ball
from gems_flwr.spaces.curve import CurvedSpace, thin_curve
from gems_flwr.spaces.ellipsoid import Ellipsoid
from gems_flwr.spaces.files import Space
from gems_flwr.spaces.radius import METHODS, Method

Kind = Literal["ball", "ellipsoid", "cone"]
Measure = Literal["accuracy", "loss"]
CURVED: tuple[Method, ...] = ("sampled", "worst", "certified")


@dataclasses.dataclass(frozen=True)
class SpaceRequest(JsonRequest):
    """Which space a node is to build.

    Parameters
    ----------
    kind : {"ball", "ellipsoid", "cone"}
        Shape of the space.
    epsilon : float
        What is good enough: an accuracy in (0, 1], or a loss above 0; for cones the share of
        each class to be told from each rival, in [0.5, 1).
    measure : {"accuracy", "loss"}
        What `epsilon` is, for balls and ellipsoids.
    radius : {"sampled", "worst", "certified", "bisection", "growing"}
        How the radius is found; see `gems_flwr.spaces.Radius`.
    directions : int
        Random directions, for all radii but worst and certified; at least 1.
    floor : float
        c of Eq. 5: shortest axis of an ellipsoid relative to the longest, in (0, 1].
    curve : bool
        Whether the radius for every epsilon is sent along (sampled, worst and certified only).
    rank : "auto", "full" or int
        Columns of the covariance factors of a cone: as many as the samples of each class allow,
        full moments, or a fixed number, at least 1; see `gems_flwr.construct.build_cone`.
    clusters : int
        Entries per class of a cone at most, at least 1.
    int8 : bool
        Whether low-rank moments are sent in eight bits.
    min_count : int, optional
        Classes with fewer samples are withheld, at least 2; see `gems_flwr.construct.least_count`.
    sums : bool
        Whether full moments are sent as plain sums over all classes, of one shape for every
        node: all that the server, or a secure summation before it, ever needs is their total.
    dp_epsilon, dp_delta, dp_clip : float
        Differentially private cone: privacy loss, chance of more, and the length to which
        inputs are clipped. Off while `dp_epsilon` is None.
    dp_classes : sequence of int, optional
        Classes in a private release; all of the task if left out.
    dp_seeded : bool
        Whether the noise is to come from the run's seed, which protects nobody. Simulations ask
        for it; a node with data of its own refuses.
    """

    kind: Kind = "cone"
    epsilon: float = 0.5
    measure: Measure = "accuracy"
    radius: Method = "sampled"
    directions: int = 500
    floor: float = 0.1
    curve: bool = False
    rank: Rank = "auto"
    clusters: int = 1
    int8: bool = True
    min_count: int | None = None
    sums: bool = False
    dp_epsilon: float | None = None
    dp_delta: float = 1e-5
    dp_clip: float = 1.0
    dp_classes: Sequence[int] | None = None
    dp_seeded: bool = False

    def __post_init__(self) -> None:
        top = 1.0 if self.measure == "accuracy" else float("inf")
        rules: dict[str, tuple[bool, str]] = {
            "kind": (self.kind in get_args(Kind), f"one of {list(get_args(Kind))}"),
            "measure": (self.measure in get_args(Measure), f"one of {list(get_args(Measure))}"),
            "radius": (self.radius in METHODS, f"one of {list(METHODS)}"),
            "directions": (self.directions >= 1, "at least 1"),
            "floor": (0 < self.floor <= 1, "in (0, 1]"),
            "rank": (is_rank(self.rank), "'auto', 'full' or a whole number from 1"),
            "clusters": (self.clusters >= 1, "at least 1"),
            "min_count": (self.min_count is None or self.min_count >= 2, "at least 2, or none"),
        }
        if self.kind == "cone":
            rules["epsilon"] = (0.5 <= self.epsilon < 1, "in [0.5, 1) for a cone")
            whole = not isinstance(self.rank, int) and self.clusters == 1
            whole = whole and self.dp_epsilon is None
            rules["sums"] = (
                not self.sums or whole,
                "false with a fixed rank, clusters or dp_epsilon",
            )
        else:
            rules["epsilon"] = (0 < self.epsilon <= top, f"in (0, {top:g}]")
            curved = not self.curve or (self.radius in CURVED and self.measure == "accuracy")
            rules["curve"] = (curved, f"false unless radius is in {list(CURVED)} for accuracy")
        self.check(rules)
        _ = self.private

    @property
    def private(self) -> PrivateRelease | None:
        """The private release that is asked for, if any."""
        if self.dp_epsilon is None:
            return None
        classes = None if self.dp_classes is None else tuple(self.dp_classes)
        return PrivateRelease(self.dp_epsilon, self.dp_delta, self.dp_clip, classes)


def is_rank(value: object) -> bool:
    """Return whether something can be the rank of a cone."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return value >= 1 if whole else value in ("auto", "full")  # type: ignore[operator]


@dataclasses.dataclass(frozen=True)
class ScoreRequest(JsonRequest):
    """How a node is to tell how accurate a model is on its held-out data.

    Parameters
    ----------
    dp_epsilon, dp_delta : float
        Differentially private score; exact while `dp_epsilon` is None.
    dp_seeded : bool
        As in `SpaceRequest`.
    """

    dp_epsilon: float | None = None
    dp_delta: float = 1e-5
    dp_seeded: bool = False

    def __post_init__(self) -> None:
        _ = self.private

    @property
    def private(self) -> PrivateScore | None:
        """The private release that is asked for, if any."""
        return None if self.dp_epsilon is None else PrivateScore(self.dp_epsilon, self.dp_delta)


@dataclasses.dataclass(frozen=True, eq=False)
class LayerInputs:
    """Inputs of a linear layer, of shape (n, D), and the true classes, of shape (n,)."""

    inputs: Tensor
    labels: Tensor


def build_space(
    request: SpaceRequest,
    *,
    weight: Tensor,
    bias: Tensor | None,
    validation: LayerInputs,
    train: LayerInputs,
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
    validation : LayerInputs
        Where balls and ellipsoids are judged.
    train : LayerInputs
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
    space: Ball | Ellipsoid
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
