"""The class-moment cone: what a linear layer must do on a node's classes.

Beyond the papers (2019, Section 4.6 asks for richer spaces). A node sends, for each class c
that it holds, the count, mean and covariance of the *inputs of the linear layer*; a class
may be cut into several clusters, each a component of its own. For a rival j::

    m_cj = (w_c - w_j)^T mu_c + b_c - b_j        mean of the margin
    v_cj = (w_c - w_j)^T Sigma_c (w_c - w_j)     variance of the margin

A layer is good enough if ``m_cj >= kappa(epsilon) * sqrt(v_cj)`` and ``m_cj > 0`` for every
component and rival: a second-order cone, convex for epsilon of at least 1/2. A class that the
node never saw is only ever a rival, so missing classes need no correction. Of a class too small for
a covariance only count and mean are sent: here its mean alone is to be told from the rivals; the
server lends it a covariance (`gems_flwr.intersect.small_classes`).

Decided here: ``kappa`` is the normal quantile. Strictness (``m > 0``) keeps out the zero layer,
which ties on every sample.

The distance to the cone: every constraint ``kappa * sqrt(v) - m <= 0`` is positively homogeneous
and convex, so its gradient at any point is a half-space through the origin that holds the whole
cone. The projection onto finitely many such half-spaces is a small
non-negative least-squares problem; adding the ones that the projection violates drives the
distance up to the true one. The same half-spaces serve `gems_flwr.intersect.mixed`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import lsq_linear, nnls
from scipy.special import ndtri

from gems_flwr.bounds import MAX_CLASSES, MAX_FEATURES, MAX_POOLED_EXAMPLES
from gems_flwr.errors import SpaceError
from gems_flwr.spaces.checks import check_array, check_integer, check_keys, check_number, take
from gems_flwr.spaces.covariance import (
    FullCovariance,
    Values,
    check_values,
    dense,
    pack_values,
    select_values,
    unpack_values,
)
from gems_flwr.spaces.output_layer import flatten_linear, unflatten_linear
from gems_flwr.spaces.partial_covariance import (
    FORM_KEYS,
    Covariance,
    PartialCovariance,
    covariance_from_arrays,
)
from gems_flwr.typing import Float

# What messages and files call the quantile by which epsilon becomes kappa; there is no other.
_RULE = "gaussian"


def kappa(epsilon: float) -> float:
    """Return how many standard deviations the mean margin must be above zero."""
    return float(ndtri(epsilon))


@dataclasses.dataclass(frozen=True, eq=False)
class ClassMomentCone:
    """Moments per class of the inputs of a linear layer, and the layers they allow.

    Parameters
    ----------
    num_classes : int
        Classes of the task, at least 2, whether the node holds them or not.
    labels : int array of shape (components,)
        Class of each component, from 0 to ``num_classes - 1``.
    counts : int array of shape (components,)
        Samples behind each component, at least 1.
    means : array of shape (components, features), float32 or int8
        Mean input of each component.
    covariance : FullCovariance, LowRankCovariance or PartialCovariance
        Spread of the inputs of each component, or of some.
    epsilon : float
        Share of each component to be told from each rival, in [0.5, 1).
    total_count : int
        All samples of the node: the counts plus ``withheld_count``.
    withheld : tuple of int
        Classes with too few samples to be sent.
    withheld_count : int
        Samples in the withheld classes.
    privacy : tuple of float, optional
        Epsilon and delta of a differentially private release.

    Raises
    ------
    SpaceError
        If anything is malformed or the counts do not add up.
    """

    kind: ClassVar[str] = "cone"
    num_classes: int
    labels: NDArray[np.int64]
    counts: NDArray[np.int64]
    means: Values
    covariance: Covariance
    epsilon: float = 0.5
    total_count: int = 0
    withheld: tuple[int, ...] = ()
    withheld_count: int = 0
    privacy: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        set_(self, "num_classes", check_integer("num_classes", self.num_classes, 2, MAX_CLASSES))
        set_(self, "labels", check_array("labels", self.labels, (None,), MAX_CLASSES, np.int64))
        components, most = int(self.labels.size), MAX_POOLED_EXAMPLES
        classes = [*self.labels.tolist(), *self.withheld]
        if not all(0 <= c < self.num_classes for c in classes):
            raise SpaceError("labels", f"classes 0 to {self.num_classes - 1}", sorted(set(classes)))
        set_(self, "counts", check_array("counts", self.counts, (components,), most, np.int64))
        if int(self.counts.min()) < 1:
            raise SpaceError("counts", "at least 1 each", int(self.counts.min()))
        if self.covariance.shape[0] != components:
            raise SpaceError("covariance", f"{components} components", self.covariance.shape[0])
        set_(self, "means", check_values("means", self.means, self.covariance.shape))
        set_(self, "epsilon", check_number("epsilon", self.epsilon, 0.5, 1 - 1e-9))
        set_(self, "withheld", tuple(int(c) for c in self.withheld))
        if len(set(self.withheld)) < len(self.withheld):
            raise SpaceError("withheld", "each class once", f"{len(self.withheld)} classes")
        set_(self, "withheld_count", check_integer("withheld_count", self.withheld_count, 0, most))
        sent = sum(self.counts.tolist())
        stated = self.total_count or sent + self.withheld_count
        set_(self, "total_count", check_integer("total_count", stated, 1, most))
        if sent + self.withheld_count != self.total_count:
            summed = f"{sent} + {self.withheld_count} withheld"
            raise SpaceError("total_count", f"the sum of the counts, {summed}", self.total_count)
        if self.privacy is not None:
            epsilon, delta = self.privacy
            pair = (check_number("dp_epsilon", epsilon, 0, 1e6), check_number("delta", delta, 0, 1))
            set_(self, "privacy", pair)

    @property
    def num_features(self) -> int:
        """Inputs of the linear layer."""
        return self.covariance.shape[1]

    @property
    def dimension(self) -> int:
        """Number of weights and biases of the layer."""
        return self.num_classes * (self.num_features + 1)

    @property
    def size_bytes(self) -> int:
        """Bytes of all arrays on the wire."""
        return sum(int(a.nbytes) for a in self.to_arrays()[0].values())

    @property
    def lacking(self) -> NDArray[np.bool_]:
        """Which components have no covariance of their own, shape (components,)."""
        if isinstance(self.covariance, PartialCovariance):
            return self.covariance.lacking
        return np.zeros(len(self.labels), dtype=bool)

    @property
    def kappa(self) -> float:
        """Standard deviations that a mean margin must be above zero."""
        return kappa(self.epsilon)

    def margins(self, w: ArrayLike) -> ConeMargins:
        """Return mean and deviation of every component's margin over every rival."""
        weight, bias = unflatten_linear(w, self.num_classes, self.num_features)
        return ConeMargins.of(self, weight, bias)

    def margin(self, w: ArrayLike) -> float:
        """Return the smallest ``m - kappa * sqrt(v)``, in units of the logits."""
        return float(self.margins(w).slack(self.kappa).min())

    def contains(self, w: ArrayLike) -> bool:
        """Return whether every component is told from every rival well enough."""
        margins = self.margins(w)
        return bool(margins.slack(self.kappa).min() >= 0 and margins.mean.min() > 0)

    def distance(self, w: ArrayLike) -> float:
        """Return the Euclidean distance from ``w`` to the closed cone, from below.

        Found by cutting planes: never above the true distance, and within 1e-6 of it
        unless the planes run out. The closed cone holds the zero layer, so the distance
        is never above ``|w|``.
        """
        return distance_to_cone(self, np.asarray(w, dtype=np.float64).reshape(-1), self.kappa)

    def without_components(self, gone: NDArray[np.bool_]) -> ClassMomentCone | None:
        """Return the cone without some of its components; None if nothing is left."""
        if not gone.any():
            return self
        if gone.all():
            return None
        return dataclasses.replace(
            self,
            labels=self.labels[~gone],
            counts=self.counts[~gone],
            means=select_values(self.means, ~gone),
            covariance=self.covariance.select(~gone),
            total_count=0,
        )

    def with_samples_at_most(self, most: float) -> ClassMomentCone:
        """Return the cone with its counts scaled down to a total of `most`, if they exceed it."""
        if self.total_count <= most:
            return self
        factor = most / self.total_count
        counts = np.maximum(1, np.floor(self.counts * factor)).astype(np.int64)
        rest = int(self.withheld_count * factor)
        return dataclasses.replace(self, counts=counts, withheld_count=rest, total_count=0)

    def to_arrays(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Return the arrays and the plain values that describe the cone."""
        arrays: dict[str, NDArray[Any]] = {
            "labels": self.labels.astype(np.int32),
            "counts": self.counts,
            **pack_values("means", self.means),
            **self.covariance.to_arrays(),
        }
        meta: dict[str, Any] = {"kind": self.kind, "form": self.covariance.form}
        meta |= {"num_classes": self.num_classes, "epsilon": self.epsilon, "rule": _RULE}
        meta |= {"total_count": self.total_count, "withheld_count": self.withheld_count}
        meta |= {"num_features": self.num_features, "withheld": list(self.withheld)}
        return arrays, meta | {"privacy": list(self.privacy) if self.privacy else None}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any], meta: Mapping[str, Any]) -> ClassMomentCone:
        """Build a cone from what `to_arrays` returned, checking everything again."""
        form = take(meta, "form", "the cone's meta")
        if not isinstance(form, str) or form not in FORM_KEYS:
            raise SpaceError("form", " or ".join(FORM_KEYS), repr(form)[:80])
        own = ("labels", "counts", "means", "means.codes", "means.scales")
        check_keys(arrays, (*own, *FORM_KEYS[form]), f"a {form} cone")
        features = check_integer(
            "num_features", take(meta, "num_features", "meta"), 1, MAX_FEATURES
        )
        covariance = covariance_from_arrays(arrays, form, features)
        if covariance.shape[1] != features:
            raise SpaceError("num_features", f"{covariance.shape[1]} as in the arrays", features)
        if (rule := take(meta, "rule", "the cone's meta")) != _RULE:
            raise SpaceError("rule", f"{_RULE}, the only one that is known", repr(rule)[:80])
        privacy, withheld = meta.get("privacy"), meta.get("withheld", [])
        if not isinstance(withheld, list) or not all(type(c) is int for c in withheld):
            raise SpaceError("withheld", "a list of class indices", repr(withheld)[:80])
        if privacy is not None and (not isinstance(privacy, list) or len(privacy) != 2):
            raise SpaceError("privacy", "a list of epsilon and delta, or null", repr(privacy)[:80])
        return cls(
            num_classes=take(meta, "num_classes", "the cone's meta"),
            labels=take(arrays, "labels", "the cone's arrays"),
            counts=take(arrays, "counts", "the cone's arrays"),
            means=unpack_values("means", arrays),
            covariance=covariance,
            epsilon=take(meta, "epsilon", "the cone's meta"),
            total_count=check_integer(
                "total_count", take(meta, "total_count", "meta"), 1, MAX_POOLED_EXAMPLES
            ),
            withheld=tuple(withheld),
            withheld_count=meta.get("withheld_count", 0),
            privacy=None if privacy is None else (privacy[0], privacy[1]),
        )


def mean_values(cone: ClassMomentCone) -> NDArray[np.float64]:
    """Return the means of a cone's components in double precision."""
    return dense(cone.means).astype(np.float64)


@dataclasses.dataclass(frozen=True, eq=False)
class ConeMargins:
    """Mean and standard deviation of margins, shape (components, classes - 1) each.

    ``rivals[e, i]`` is the class against which ``mean[e, i]`` is taken.
    """

    mean: Float
    deviation: Float
    rivals: NDArray[np.int64]

    @classmethod
    def of(cls, cone: ClassMomentCone, weight: Float, bias: Float) -> ConeMargins:
        """Compute the margins of one layer on all components of a cone."""
        labels = cone.labels
        rivals = np.array([np.delete(np.arange(cone.num_classes), c) for c in labels])
        scores = dense(cone.means).astype(np.float64) @ weight.T + bias
        own = np.take_along_axis(scores, labels[:, None], axis=1)
        mean = own - np.take_along_axis(scores, rivals, axis=1)
        variance = np.empty_like(mean)
        for component, label in enumerate(labels):
            differences = weight[label] - weight[rivals[component]]
            variance[component] = (differences * spread(cone, component, differences)).sum(axis=1)
        return cls(mean, np.sqrt(np.maximum(variance, 0)), rivals)

    def slack(self, kappa: float) -> Float:
        """Return ``m - kappa * sqrt(v)`` for every component and rival."""
        return np.asarray(self.mean - kappa * self.deviation)


def spread(cone: ClassMomentCone, component: int, rows: Float) -> Float:
    """Return ``rows @ Sigma`` for one component, without building a low-rank Sigma."""
    covariance = cone.covariance
    if isinstance(covariance, PartialCovariance):
        place = covariance.place(component)
        if place is None or covariance.own is None:
            return np.zeros_like(rows)
        covariance, component = covariance.own, place
    if isinstance(covariance, FullCovariance):
        return np.asarray(rows @ covariance.matrices[component].astype(np.float64))
    factor = covariance.factor(component).astype(np.float64)
    only = slice(component, component + 1)
    variances = dense(covariance.deviations, only)[0].astype(np.float64) ** 2
    return np.asarray((rows @ factor) @ factor.T + rows * variances)


def half_spaces(cone: ClassMomentCone, w: Float, kappa: float, above: float = 0.0) -> Float:
    """Return unit normals ``a`` with ``a . u <= 0`` for every ``u`` in the cone.

    As rows, one per component and rival whose constraint ``w`` violates by more than ``above``
    in units of the weights.
    """
    weight, bias = unflatten_linear(w, cone.num_classes, cone.num_features)
    margins = ConeMargins.of(cone, weight, bias)
    means = dense(cone.means).astype(np.float64)
    normals: list[Float] = []
    for component, label in enumerate(cone.labels):
        slack = margins.slack(kappa)[component]
        picked = np.flatnonzero(slack < 0)
        differences = weight[label] - weight[margins.rivals[component, picked]]
        spreads = spread(cone, component, differences)
        for row, index in enumerate(picked):
            deviation = margins.deviation[component, index]
            pull = kappa * spreads[row] / deviation if deviation > 1e-12 else 0 * spreads[row]
            gradient, offset = np.zeros_like(weight), np.zeros_like(bias)
            gradient[label], offset[label] = pull - means[component], -1.0
            rival = margins.rivals[component, index]
            gradient[rival], offset[rival] = -gradient[label], 1.0
            normal = flatten_linear(gradient, offset)
            length = float(np.linalg.norm(normal))
            if float(normal @ w) > above * length:
                normals.append(normal / length)
    return np.array(normals).reshape(-1, w.size)


def distance_to_cone(cone: ClassMomentCone, w: Float, kappa: float, rounds: int = 50) -> float:
    """Return the distance from ``w`` to the closed cone, from below (see module)."""
    planes = np.zeros((0, w.size))
    point, distance, tolerance = w, 0.0, 1e-7 * (1.0 + float(np.linalg.norm(w)))
    for _ in range(rounds):
        fresh = half_spaces(cone, point, kappa, above=tolerance)
        if not len(fresh):
            break
        planes = np.concatenate([planes, fresh])
        # The projection is w - planes^T x with x >= 0 nearest to w.
        multipliers, distance_left = nnls(planes.T, w, maxiter=50 * len(planes))
        point = w - planes.T @ multipliers
        if abs(float(np.linalg.norm(point)) - distance_left) > tolerance:
            # Among nearly equal planes scipy's active set may end beside the residual it reports.
            multipliers = lsq_linear(planes.T, w, bounds=(0, np.inf), tol=1e-12).x
            point = w - planes.T @ multipliers
            distance_left = float(np.linalg.norm(point))
        distance = float(np.linalg.norm(w - point))
        if distance_left <= tolerance:
            break
    return distance
