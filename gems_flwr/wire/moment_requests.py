"""What nodes are asked to add up on the way to class moments in a few directions.

See `gems_flwr.moments.moment_sums` for the four sums. What a sum needs of earlier totals
comes in an ArrayRecord beside the model: how inputs are standardised in single precision, and
directions in eight bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from flwr.app import ArrayRecord, RecordDict
from numpy.typing import NDArray

from gems_flwr.errors import ModelError, SpaceError
from gems_flwr.spaces.covariance import QuantizedArray, pack_values, unpack_values
from gems_flwr.typing import Float
from gems_flwr.wire.asking import put, requested
from gems_flwr.wire.keys import MOMENT_SUMS, SUMS_REQUEST
from gems_flwr.wire.records import to_numpy, to_record
from gems_flwr.wire.requests import JsonRequest

Stage = Literal["scale", "means", "sketch", "covariances", "full"]

_CENTER, _SCALE, _DIRECTIONS = "center", "scale", "directions"


@dataclass(frozen=True)
class MomentSums(JsonRequest):
    """One of the sums over nodes from which class moments are made.

    Parameters
    ----------
    stage : {"scale", "means", "sketch", "covariances", "full"}
        Which one; *full* has all moments of every class at once.
    min_count : int, optional
        Samples of classes that have fewer on the node do not count, at least 2; by default what the
        node's limits say.
    random : int, default 0
        Random columns of a sketch, at least 0.
    seed : int, default 0
        Their source, at least 0.
    totals : tuple of int
        After *scale*: how many samples of each class all nodes have together; 0 for a class that
        is left out because they are too few.
    """

    stage: Stage = "scale"
    min_count: int | None = None
    random: int = 0
    seed: int = 0
    totals: Sequence[int] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "totals", tuple(self.totals))
        stages = list(get_args(Stage))
        self.check(
            {
                "stage": (self.stage in stages, f"one of {stages}"),
                "min_count": (self.min_count is None or self.min_count >= 2, "at least 2, or none"),
                "random": (self.random >= 0, "at least 0"),
                "seed": (self.seed >= 0, "at least 0"),
                "totals": (min(self.totals, default=0) >= 0, "at least 0 each"),
            }
        )


@dataclass(frozen=True, eq=False)
class Directions:
    """What came beside a request: how inputs are standardised, and directions as rows."""

    center: Float
    scale: Float
    rows: Float


def ask_for_moment_sums(
    content: RecordDict,
    request: MomentSums,
    center: Float | None = None,
    scale: Float | None = None,
    directions: QuantizedArray | None = None,
) -> None:
    """Ask in an instruction for a summand.

    Parameters
    ----------
    content : RecordDict
        The instruction.
    request : MomentSums
        Which sum.
    center, scale : array of shape (D,), optional
        How inputs are standardised, from the sketch on.
    directions : QuantizedArray of shape (r, D), optional
        Columns of the sketch, or the basis, as rows.
    """
    put(content, SUMS_REQUEST, request.to_json())
    if center is None or scale is None or directions is None:
        return
    arrays: dict[str, NDArray] = {
        _CENTER: center.astype(np.float32),
        _SCALE: scale.astype(np.float32),
        **pack_values(_DIRECTIONS, directions),
    }
    content[MOMENT_SUMS] = to_record(arrays)


def requested_moment_sums(content: RecordDict) -> MomentSums | None:
    """Return which sum an instruction asks for, or None where it asks for none."""
    return requested(content, SUMS_REQUEST, MomentSums)


def take_directions(content: RecordDict, request: MomentSums) -> Directions | None:
    """Take what came beside a request out of an instruction; None where nothing has to.

    Raises
    ------
    ModelError
        If it is not there, or does not fit together.
    """
    record = content.pop(MOMENT_SUMS, None)
    if request.stage not in ("sketch", "covariances"):
        return None
    if not isinstance(record, ArrayRecord):
        raise ModelError(f"the request for {request.stage} came without directions")
    arrays: Mapping[str, NDArray] = to_numpy(record)
    try:
        center, scale = (arrays[key].astype(np.float64) for key in (_CENTER, _SCALE))
        rows = unpack_values(_DIRECTIONS, arrays).dense().astype(np.float64)
    except (KeyError, AttributeError, SpaceError) as error:
        raise ModelError(f"directions that cannot be read: {error}") from error
    fits = scale.ndim == 1 and center.shape == scale.shape and rows.shape[1:] == scale.shape
    if not fits or not np.isfinite(center).all():
        raise ModelError(f"a center of shape {center.shape}, directions of {rows.shape}")
    if not (np.isfinite(scale).all() and (scale > 0).all()):
        raise ModelError("the scale of inputs must be one number above 0 for each")
    return Directions(center, scale, rows)
