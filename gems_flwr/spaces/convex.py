"""What a space has to have, what an intersection returns, checks of both, and layers as points.

The released code of 2019 always reports success. Here the answer is one of three: a verified point
(``feasible``), a proof that there is none (``empty``), or neither within the given effort
(``undecided``); then the point is the least violating one that was met.

Every set checks itself when it is built: one NaN radius would make the solution of Eq. 2 (2019) NaN
for all. An error names the key, what was expected and what came, so that the caller can reject that
one node with a reason and go on with the others.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self, TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gems_flwr.bounds import MAX_WEIGHT
from gems_flwr.errors import ModelError, OptionError, SpaceError, shown
from gems_flwr.typing import Float

if TYPE_CHECKING:
    from gems_flwr.spaces.ball.ball import BallSpace, EllipsoidSpace
    from gems_flwr.spaces.cone.cone import ClassMomentCone

    Space: TypeAlias = "BallSpace | EllipsoidSpace | ClassMomentCone | ConvexSet"
else:
    Space = Any

Status = Literal["feasible", "empty", "undecided"]
T = TypeVar("T")


class ConvexSet(Protocol):
    """A bounded convex set of flat layers: the protocol of a new kind of space.

    A set is known by a ball or ellipsoid that holds it and by half-spaces that cut off a point
    outside. See `register_space`.
    """

    kind: ClassVar[str]

    @property
    def center(self) -> NDArray[Any]:
        """A point inside, such as the node's own layer."""

    @property
    def dimension(self) -> int:
        """Number of weights of a layer."""

    def margin(self, w: ArrayLike) -> float:
        """Return how far a point is inside (at least), or minus the distance outside."""

    def contains(self, w: ArrayLike) -> bool:
        """Return whether a point lies in the set, within rounding."""

    def outer(self) -> BallSpace | EllipsoidSpace:
        """Return a ball or an ellipsoid that holds the set."""

    def cuts(self, w: Float) -> tuple[Float, Float]:
        """Return half-spaces that hold the set but not `w`; none if it is inside.

        Unit normals as rows, and offsets: ``n . u <= offset`` for every u in the set.
        """

    def to_arrays(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Return the arrays and the plain values that describe the set, with its ``kind``."""

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any], meta: Mapping[str, Any]) -> Self:
        """Build the set from what `to_arrays` returned; raises SpaceError if it is malformed."""


@dataclasses.dataclass(frozen=True, eq=False)
class Intersection:
    """Result of intersecting the spaces of all nodes.

    The smallest possible largest constraint value lies between the bounds: a positive lower bound
    is the proof of emptiness, a non-positive upper bound that of membership.
    """

    status: Status  # verified point, proof of emptiness, or neither
    point: Float  # the chosen model (d,)
    margins: tuple[float, ...]  # per node, of weights (balls) or logits (cones); negative outside
    lower_bound: float
    upper_bound: float
    is_average: bool  # whether the point is just the mean of the nodes' centres
    method: str
    seconds: float

    @property
    def feasible(self) -> bool:
        """Whether the point was verified to lie in every space."""
        return self.status == "feasible"

    @property
    def empty(self) -> bool:
        """Whether it was proved that no model lies in every space."""
        return self.status == "empty"

    @property
    def gap(self) -> float:
        """Upper minus lower bound: 0 if the answer is exact."""
        return self.upper_bound - self.lower_bound


def node_margins(spaces: Sequence[Space], point: Float) -> tuple[float, ...]:
    """Return each node's margin at a point."""
    return tuple(space.margin(point) for space in spaces)


def in_all(spaces: Sequence[Space], point: Float) -> bool:
    """Return whether a point lies in every space."""
    return all(space.contains(point) for space in spaces)


def verdict_of(
    spaces: Sequence[Space],
    point: Float,
    method: str,
    began: float,
    *,
    status: Status | None = None,
    bounds: tuple[float, float] = (-np.inf, np.inf),
    is_average: bool = False,
) -> Intersection:
    """Return what is known of a point; without a status only whether it is in all spaces."""
    status = status or ("feasible" if in_all(spaces, point) else "undecided")
    return Intersection(
        status=status,
        point=point,
        margins=node_margins(spaces, point),
        lower_bound=bounds[0],
        upper_bound=min(bounds[1], 0.0) if status == "feasible" else bounds[1],
        is_average=is_average,
        method=method,
        seconds=time.perf_counter() - began,
    )


def check_dimensions(spaces: Sequence[Space]) -> None:
    """Refuse no spaces at all, and spaces of several dimensions."""
    dimensions = sorted({space.dimension for space in spaces})
    if len(dimensions) != 1:
        raise OptionError(f"spaces: expected at least one, all of one dimension, got {dimensions}")


def walk_from(spaces: Sequence[Space], start: Float, goal: Float) -> Float:
    """Return the first point on the way from ``start`` to ``goal`` that is in every space.

    The papers descend from the average and stop at the first feasible point. The spaces are convex
    and the goal lies in all of them, so bisection finds where the feasible part of the straight way
    begins. On the way no margin may be negative, not even within rounding.
    """
    if in_all(spaces, start):
        return start
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if min(node_margins(spaces, start + middle * (goal - start))) >= 0:
            high = middle
        else:
            low = middle
    return goal if high == 1.0 else start + high * (goal - start)


# --- kinds of sets --------------------------------------------------------------------------

_SPACES: dict[str, type[Any]] = {}


def register_space(space: type[T]) -> type[T]:
    """Let replies and files hold another kind of space; a decorator of a `ConvexSet`.

    Its `kind` is that of the question by which nodes are asked for it, a
    `gems_flwr.spaces.question.SpaceQuestion`; an OptionError if another class has it.
    """
    kind: str = space.kind  # type: ignore[attr-defined]
    known = _SPACES.setdefault(kind, space)
    if (known.__module__, known.__qualname__) != (space.__module__, space.__qualname__):
        raise OptionError(f"kind '{kind}' is that of {known.__module__}.{known.__qualname__}")
    return space


def space_from_arrays(arrays: Mapping[str, Any], meta: Mapping[str, Any]) -> Space:
    """Build the space that the arrays describe; raises SpaceError if anything is malformed."""
    kind = take(meta, "kind", "the space's meta")
    if not isinstance(kind, str) or kind not in _SPACES:
        raise SpaceError("kind", f"one of {list(_SPACES)}", shown(kind))
    space: Space = _SPACES[kind].from_arrays(arrays, meta)
    return space


# --- checks ---------------------------------------------------------------------------------


def check_array(
    key: str,
    value: object,
    shape: Sequence[int | None],
    max_abs: float = MAX_WEIGHT,
    dtype: type[np.generic] = np.float32,
) -> NDArray[Any]:
    """Return ``value`` as a read-only finite array of the wanted shape and type.

    Of `shape`, ``None`` accepts any positive length on that axis. A `SpaceError` about `key` if the
    shape or the type is another, or an absolute value is above `max_abs`.
    """
    array = np.asarray(value)
    if array.dtype.kind not in "iuf":
        raise SpaceError(key, "an array of numbers", f"dtype {array.dtype}")
    fits = array.ndim == len(shape) and all(
        have == want if want is not None else have > 0
        for have, want in zip(array.shape, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise SpaceError(key, f"shape ({wanted})", f"shape {array.shape}")
    if not np.isfinite(array).all():
        raise SpaceError(key, "finite values", f"{int((~np.isfinite(array)).sum())} NaN or inf")
    largest = float(np.abs(array.astype(np.float64)).max(initial=0.0))
    if largest > max_abs:
        raise SpaceError(key, f"absolute values up to {max_abs:g}", f"{largest:g}")
    if np.issubdtype(dtype, np.integer) and array.dtype.kind == "f":
        raise SpaceError(key, "integers", f"dtype {array.dtype}")
    out = np.array(array, dtype=dtype)
    out.flags.writeable = False
    return out


def check_number(key: str, value: object, low: float, high: float) -> float:
    """Return ``value`` as a float within ``[low, high]``, or raise a `SpaceError`."""
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    # Compared before it is converted: an integer of 400 digits has no float.
    if not is_number or not low <= value <= high:  # type: ignore[operator]
        raise SpaceError(key, f"a number in [{low:g}, {high:g}]", shown(value))
    return float(value)  # type: ignore[arg-type]


def check_integer(key: str, value: object, low: int, high: int | None = None) -> int:
    """Return ``value`` as an int within ``[low, high]``, or raise a `SpaceError`."""
    is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_whole or value < low or (high is not None and value > high):  # type: ignore[operator]
        most = f", at most {high}" if high is not None else ""
        raise SpaceError(key, f"an integer of at least {low}{most}", shown(value))
    return int(value)  # type: ignore[call-overload, no-any-return]


def take(mapping: Mapping[str, Any], key: str, what: str) -> Any:
    """Return ``mapping[key]``, or raise a `SpaceError` that says what is missing."""
    if key not in mapping:
        raise SpaceError(key, f"to be present in {what}", f"only {sorted(mapping)}")
    return mapping[key]


def check_keys(arrays: Mapping[str, Any], allowed: Sequence[str], what: str) -> None:
    """Raise a `SpaceError` if ``arrays`` has keys other than ``allowed``."""
    if extra := sorted(set(arrays) - set(allowed)):
        raise SpaceError(extra[0], f"only the keys {sorted(allowed)} in {what}", f"extra {extra}")


# --- layers as points -----------------------------------------------------------------------

# One order for the whole project: the weight row by row, then the bias, as in a torch state dict.


def flatten_linear(weight: ArrayLike, bias: ArrayLike) -> Float:
    """Return weight (C, D) and bias (C,) as one flat vector."""
    matrix = np.asarray(weight, dtype=np.float64)
    offset = np.asarray(bias, dtype=np.float64)
    if matrix.ndim != 2 or offset.shape != matrix.shape[:1]:
        raise SpaceError(
            "weight, bias", "shapes (C, D) and (C,)", f"{matrix.shape} and {offset.shape}"
        )
    return np.concatenate([matrix.reshape(-1), offset])


def unflatten_linear(w: ArrayLike, num_classes: int, num_features: int) -> tuple[Float, Float]:
    """Return weight and bias of the layer that `flatten_linear` made flat."""
    vector = np.asarray(w, dtype=np.float64).reshape(-1)
    size = num_classes * (num_features + 1)
    if vector.size != size:
        raise SpaceError("w", f"{size} values ({num_classes} x ({num_features} + 1))", vector.size)
    split = num_classes * num_features
    return vector[:split].reshape(num_classes, num_features), vector[split:]


@dataclasses.dataclass(frozen=True)
class OutputLayer:
    """Which arrays of a model are its linear output layer."""

    weight: str  # key of the array of shape (outputs, features)
    bias: str | None  # key of that of shape (outputs,)
    outputs: int  # one output is a logistic model of two classes
    features: int

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the layer's arrays."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def num_classes(self) -> int:
        """Classes told apart."""
        return max(2, self.outputs)

    @property
    def dimension(self) -> int:
        """Weights and biases together."""
        return self.outputs * self.features + (self.outputs if self.bias else 0)

    def scaled_in(self, arrays: Mapping[str, NDArray], scale: ArrayLike) -> Float:
        """Return a model's output layer (C, D + 1) for inputs divided by `scale`, bias last.

        A single output is the difference of two rows, of which each has half.
        """
        weight = np.asarray(arrays[self.weight], dtype=np.float64) * np.asarray(scale)
        bias = np.asarray(arrays[self.bias], dtype=np.float64) if self.bias else 0.0
        rows = np.column_stack([weight, np.broadcast_to(bias, self.outputs)])
        return np.concatenate([-rows / 2, rows / 2]) if self.outputs == 1 else rows

    def replace_in(self, arrays: Mapping[str, NDArray], point: ArrayLike) -> dict[str, NDArray]:
        """Return a model's arrays with the output layer replaced by a flat one.

        A layer of two classes (from a cone) becomes the difference of its rows where the model
        has a single output.
        """
        vector = np.asarray(point, dtype=np.float64).reshape(-1)
        if vector.size == self.dimension:
            split = self.outputs * self.features
            weight, bias = vector[:split].reshape(self.outputs, self.features), vector[split:]
        else:
            weight, bias = unflatten_linear(vector, self.num_classes, self.features)
            if self.outputs == 1:
                weight, bias = weight[1:] - weight[:1], bias[1:] - bias[:1]
            if self.bias is None and bias.any():
                raise SpaceError("bias", "a layer with a bias, for the solution has one", "none")
        out = dict(arrays)
        out[self.weight] = weight.astype(arrays[self.weight].dtype)
        if self.bias:
            out[self.bias] = bias.astype(arrays[self.bias].dtype)
        return out


def find_output_layer(arrays: Mapping[str, NDArray], name: str | None = None) -> OutputLayer:
    """Find the linear output layer among a model's arrays: the last matrix, and its bias.

    The arrays are in the order of the layers, as in a torch state dict. `name` is the layer's in a
    torch module, where the last matrix is not the one; empty if the module is that layer.
    """
    keys, named = list(arrays), f"{name}.weight" if name else "weight"
    matrices = [key for key in keys if np.ndim(arrays[key]) == 2]
    candidates = [key for key in matrices if name is None or key == named]
    if not candidates:
        wanted = "a matrix among the arrays" if name is None else f"a matrix '{named}'"
        raise ModelError(f"no linear output layer: expected {wanted}, got {keys}")
    weight = candidates[-1]
    outputs, features = np.shape(arrays[weight])
    # A bias follows its matrix, or has the matching name.
    following = keys[keys.index(weight) + 1 :][:1]
    namesakes = [key for key in keys if key == weight.removesuffix("weight") + "bias"]
    fits = [key for key in (namesakes or following) if np.shape(arrays[key]) == (outputs,)]
    return OutputLayer(weight, fits[0] if fits else None, outputs, features)
