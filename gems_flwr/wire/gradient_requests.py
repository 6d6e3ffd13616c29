"""What nodes are asked for in the rounds of refinement: a gradient, then losses at some points.

Both are about the model in the message. What inputs are divided by, the step and the points to be
tried come in an ArrayRecord beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
from flwr.app import ArrayRecord, RecordDict
from numpy.typing import NDArray

from gems_flwr.bounds import MAX_WEIGHT
from gems_flwr.errors import ModelError
from gems_flwr.typing import Float
from gems_flwr.wire.asking import put, requested
from gems_flwr.wire.keys import GRADIENT_REQUEST, LOSSES_REQUEST, REFINEMENT
from gems_flwr.wire.records import to_numpy, to_record
from gems_flwr.wire.requests import JsonRequest

GradientType = Literal["int8", "float16", "float32"]

_SCALE, _BASIS, _DIRECTION, _POINTS = "scale", "basis", "direction", "points"
_CENTER = "center"


@dataclass(frozen=True)
class LossesRequest(JsonRequest):
    """The losses of several layers, as sums over the node's training data.

    Parameters
    ----------
    class_weights : sequence of float
        How much a sample of each class counts, at least 0; empty where all count 1.
    min_count : int, optional
        Where losses are added up over nodes: classes with fewer samples on the node do not count,
        as in the sums of moments (see `gems_flwr.wire.moment_requests`).
    """

    class_weights: Sequence[float] = ()
    min_count: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "class_weights", tuple(self.class_weights))
        allowed = all(0 <= weight <= MAX_WEIGHT for weight in self.class_weights)
        self.check({"class_weights": (allowed, f"in [0, {MAX_WEIGHT:g}] each")})

    def weights_of(self, classes: int) -> Float:
        """Return the weights of all classes.

        Raises
        ------
        ModelError
            If there are not as many.
        """
        if not self.class_weights:
            return np.ones(classes)
        if len(self.class_weights) != classes:
            raise ModelError(
                f"the server weighs {len(self.class_weights)} classes, the layer has {classes}"
            )
        return np.array(self.class_weights)


@dataclass(frozen=True)
class GradientRequest(LossesRequest):
    """Loss, gradient and curvature of a layer, as sums over the node's training data.

    Parameters
    ----------
    dtype : {"int8", "float16", "float32"}
        How the gradient is rounded: to 255 steps for each row, or as a number.
    by_class : bool
        Whether the curvature is told for each class, or once for all of them.
    """

    dtype: GradientType = "int8"
    by_class: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        kinds = list(get_args(GradientType))
        self.check({"dtype": (self.dtype in kinds, f"one of {kinds}")})


def ask_for_gradient(
    content: RecordDict, request: GradientRequest, scale: Float, basis: Float
) -> None:
    """Ask for the gradient of the model in an instruction.

    Parameters
    ----------
    content : RecordDict
        The instruction.
    request : GradientRequest
        How it is to be told.
    scale : array of shape (D,)
        What inputs are divided by.
    basis : array of shape (K, D + 1)
        Directions along which it is told more exactly.
    """
    put(content, GRADIENT_REQUEST, request.to_json())
    arrays = {_SCALE: scale.astype(np.float32), _BASIS: basis.astype(np.float32)}
    content[REFINEMENT] = to_record(arrays)


def ask_for_summed_gradient(
    content: RecordDict, request: GradientRequest, scale: Float, center: Float
) -> None:
    """Ask for the gradient of the model in an instruction as a summand.

    Parameters
    ----------
    content : RecordDict
        The instruction.
    request : GradientRequest
        How samples count.
    scale, center : array of shape (D,)
        The gradient is that of inputs from which `center` was taken, divided by `scale`.
    """
    put(content, GRADIENT_REQUEST, request.to_json())
    arrays = {_SCALE: scale.astype(np.float32), _CENTER: center.astype(np.float32)}
    content[REFINEMENT] = to_record(arrays)


def ask_for_losses(
    content: RecordDict, request: LossesRequest, scale: Float, direction: Float, points: Float
) -> None:
    """Ask for the losses around the model in an instruction.

    Parameters
    ----------
    content : RecordDict
        The instruction.
    request : LossesRequest
        How samples count.
    scale : array of shape (D,)
        What inputs are divided by.
    direction : array of shape (C, D + 1)
        The step.
    points : array of shape (M, 2)
        See `gems_flwr.intersect.refinement.candidates`.
    """
    put(content, LOSSES_REQUEST, request.to_json())
    content[REFINEMENT] = to_record(
        {
            _SCALE: scale.astype(np.float32),
            _DIRECTION: direction.astype(np.float32),
            _POINTS: points,
        }
    )


def requested_gradient(content: RecordDict) -> GradientRequest | None:
    """Return the request for a gradient in an instruction, or None where there is none."""
    return requested(content, GRADIENT_REQUEST, GradientRequest)


def requested_losses(content: RecordDict) -> LossesRequest | None:
    """Return the request for losses in an instruction, or None where there is none."""
    return requested(content, LOSSES_REQUEST, LossesRequest)


@dataclass(frozen=True, eq=False)
class Beside:
    """What comes beside the model: scale, and basis or center, or the step and the points."""

    scale: NDArray
    basis: NDArray
    direction: NDArray
    points: NDArray
    center: NDArray


def take_beside(content: RecordDict) -> Beside:
    """Take the arrays of a refinement out of an instruction, in double precision.

    Raises
    ------
    ModelError
        If they are not there, or do not fit together.
    """
    record = content.pop(REFINEMENT, None)
    if not isinstance(record, ArrayRecord) or _SCALE not in record:
        raise ModelError(
            "the request for a gradient or for losses came without the scale of inputs"
        )
    arrays = {key: array.astype(np.float64) for key, array in to_numpy(record).items()}
    scale = arrays[_SCALE]
    if scale.ndim != 1 or not (np.isfinite(scale).all() and (scale > 0).all()):
        raise ModelError("the scale of inputs must be one number above 0 for each")
    basis = arrays.get(_BASIS, np.zeros((0, len(scale) + 1)))
    if basis.ndim != 2 or basis.shape[1] != len(scale) + 1 or not np.isfinite(basis).all():
        raise ModelError(f"a basis of shape {basis.shape} for {len(scale)} inputs and the bias")
    direction = arrays.get(_DIRECTION, np.zeros((0, 0)))
    center = arrays.get(_CENTER, np.zeros_like(scale))
    if center.shape != scale.shape or not np.isfinite(center).all():
        raise ModelError(f"a center of shape {center.shape} for {len(scale)} inputs")
    return Beside(scale, basis, direction, arrays.get(_POINTS, np.zeros((0, 2))), center)
