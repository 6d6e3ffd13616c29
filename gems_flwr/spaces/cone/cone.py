"""The class-moment cone: what a linear layer must do on a node's classes.

Beyond the papers (2019, Section 4.6, asks for richer spaces). A node sends count, mean and
covariance of the *inputs of the linear layer* for each class c that it holds, or for each cluster
of a class: a component. For a rival j::

    m_cj = (w_c - w_j)^T mu_c + b_c - b_j        mean of the margin
    v_cj = (w_c - w_j)^T Sigma_c (w_c - w_j)     variance of the margin

A layer is good enough if ``m_cj >= kappa(epsilon) * sqrt(v_cj)`` and ``m_cj > 0`` for every
component and rival: a second-order cone, convex for epsilon of at least 1/2. Of a class too small
for a covariance only count and mean are sent: its mean must lie on its side of the rivals, and the
server lends it a covariance (`gems_flwr.spaces.cone.solve`), unless the node sent one that is
common to all of its classes (`gems_flwr.spaces.cone.covariance`). Decided here: ``kappa`` is the
normal quantile, and ``m > 0`` keeps out the zero layer, which ties on every sample.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtri

from gems_flwr.bounds import MAX_CLASSES, MAX_FEATURES, MAX_POOLED_EXAMPLES
from gems_flwr.errors import SpaceError, shown
from gems_flwr.spaces.cone.covariance import (
    FORM_KEYS,
    CommonCovariance,
    Covariance,
    PartialCovariance,
    QuantizedArray,
    Values,
    check_values,
    covariance_from_arrays,
    deflate,
    dense,
    inflate,
    pack_values,
    select_values,
    unpack_values,
)
from gems_flwr.spaces.convex import (
    check_array,
    check_integer,
    check_keys,
    check_number,
    register_space,
    take,
    unflatten_linear,
)
from gems_flwr.typing import Float


@register_space
@dataclasses.dataclass(frozen=True, eq=False)
class ClassMomentCone:
    """Moments per class of the inputs of a linear layer, and the layers they allow.

    A SpaceError if anything is malformed or the counts do not add up.

    Parameters
    ----------
    num_classes : int
        Classes of the task, at least 2, whether the node holds them or not.
    labels, counts : int arrays of shape (components,)
        Class of each component, and its samples, at least 1.
    means : array of shape (components, features), float32 or int8
        Mean input of each component.
    covariance : FullCovariance, LowRankCovariance, PartialCovariance or CommonCovariance
        Spread of the inputs of each component. With a common one means are in its coordinates.
    epsilon : float
        Share of each component to be told from each rival, in [0.5, 1).
    total_count : int
        All samples of the node: the counts plus ``withheld_count``.
    withheld, withheld_count : tuple of int, int
        Classes with too few samples to be sent, and these samples.
    privacy : tuple of float, optional
        Epsilon and delta of a differentially private release.
    """

    kind: ClassVar[str] = "cone"
    num_classes: int
    labels: NDArray[np.int64]
    counts: NDArray[np.int64]
    means: Values
    covariance: Covariance | CommonCovariance
    epsilon: float = 0.5
    total_count: int = 0
    withheld: tuple[int, ...] = ()
    withheld_count: int = 0
    privacy: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        def keep(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        most = MAX_POOLED_EXAMPLES
        keep("num_classes", check_integer("num_classes", self.num_classes, 2, MAX_CLASSES))
        keep("labels", check_array("labels", self.labels, (None,), MAX_CLASSES, np.int64))
        components = int(self.labels.size)
        classes = [*self.labels.tolist(), *self.withheld]
        if not all(0 <= c < self.num_classes for c in classes):
            raise SpaceError("labels", f"classes 0 to {self.num_classes - 1}", sorted(set(classes)))
        keep("counts", check_array("counts", self.counts, (components,), most, np.int64))
        if int(self.counts.min()) < 1:
            raise SpaceError("counts", "at least 1 each", int(self.counts.min()))
        if self.covariance.shape[0] != components:
            raise SpaceError("covariance", f"{components} components", self.covariance.shape[0])
        keep("means", check_values("means", self.means, self.covariance.shape))
        if self._is_common and not isinstance(self.means, QuantizedArray):
            raise SpaceError("means", "eight bits with a common covariance", "others")
        keep("epsilon", check_number("epsilon", self.epsilon, 0.5, 1 - 1e-9))
        keep("withheld", tuple(int(c) for c in self.withheld))
        if len(set(self.withheld)) < len(self.withheld):
            raise SpaceError("withheld", "each class once", f"{len(self.withheld)} classes")
        keep("withheld_count", check_integer("withheld_count", self.withheld_count, 0, most))
        sent = sum(self.counts.tolist())
        stated = self.total_count or sent + self.withheld_count
        keep("total_count", check_integer("total_count", stated, 1, most))
        if sent + self.withheld_count != self.total_count:
            summed = f"{sent} + {self.withheld_count} withheld"
            raise SpaceError("total_count", f"the sum of the counts, {summed}", self.total_count)
        if self.privacy is not None:
            epsilon, delta = self.privacy
            pair = (check_number("dp_epsilon", epsilon, 0, 1e6), check_number("delta", delta, 0, 1))
            keep("privacy", pair)

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
    def has_only_common(self) -> bool:
        """Whether no class has a covariance of its own, but all have the common one."""
        covariance = self.covariance
        return isinstance(covariance, CommonCovariance) and not covariance.shares.any()

    @property
    def _is_common(self) -> bool:
        return isinstance(self.covariance, CommonCovariance)

    @property
    def kappa(self) -> float:
        """Standard deviations that a mean margin must be above zero."""
        return float(ndtri(self.epsilon))

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
            **(deflate if self._is_common else pack_values)("means", self.means),  # type: ignore
            **self.covariance.to_arrays(),
        }
        plain = ("kind", "num_classes", "epsilon", "total_count", "withheld_count", "num_features")
        meta: dict[str, Any] = {name: getattr(self, name) for name in plain}
        meta |= {"form": self.covariance.form, "withheld": list(self.withheld)}
        return arrays, meta | {"privacy": list(self.privacy) if self.privacy else None}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any], meta: Mapping[str, Any]) -> ClassMomentCone:
        """Build a cone from what `to_arrays` returned, checking everything again."""
        wanted = ("form", "num_features", "num_classes", "epsilon", "total_count")
        form, given, classes, epsilon, total = (take(meta, k, "the cone's meta") for k in wanted)
        forms = FORM_KEYS | {CommonCovariance.form: CommonCovariance.keys}
        if not isinstance(form, str) or form not in forms:
            raise SpaceError("form", " or ".join(forms), shown(form))
        own = ("labels", "counts", "means", "means.codes", "means.scales")
        check_keys(arrays, (*own, *forms[form]), f"a {form} cone")
        features = check_integer("num_features", given, 1, MAX_FEATURES)
        covariance: Covariance | CommonCovariance
        if form == CommonCovariance.form:
            covariance = CommonCovariance.from_arrays(arrays, features)
            means = inflate("means", arrays, features)
        else:
            covariance = covariance_from_arrays(arrays, form, features)
            means = unpack_values("means", arrays)
        if covariance.shape[1] != features:
            raise SpaceError("num_features", f"{covariance.shape[1]} as in the arrays", features)
        privacy, withheld = meta.get("privacy"), meta.get("withheld", [])
        if not isinstance(withheld, list) or not all(type(c) is int for c in withheld):
            raise SpaceError("withheld", "a list of class indices", shown(withheld))
        if privacy is not None and (not isinstance(privacy, list) or len(privacy) != 2):
            raise SpaceError("privacy", "a list of epsilon and delta, or null", shown(privacy))
        return cls(
            num_classes=classes,
            labels=take(arrays, "labels", "the cone's arrays"),
            counts=take(arrays, "counts", "the cone's arrays"),
            means=means,
            covariance=covariance,
            epsilon=epsilon,
            total_count=check_integer("total_count", total, 1, MAX_POOLED_EXAMPLES),
            withheld=tuple(withheld),
            withheld_count=meta.get("withheld_count", 0),
            privacy=None if privacy is None else (privacy[0], privacy[1]),
        )


def mean_values(cone: ClassMomentCone) -> NDArray[np.float64]:
    """Return the means of a cone's components in double precision."""
    values = dense(cone.means).astype(np.float64)
    common = cone.covariance
    return common.means(values) if isinstance(common, CommonCovariance) else values


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
        scores = mean_values(cone) @ weight.T + bias
        own = np.take_along_axis(scores, labels[:, None], axis=1)
        mean = own - np.take_along_axis(scores, rivals, axis=1)
        variance, common = np.empty_like(mean), cone.covariance
        if isinstance(common, CommonCovariance):
            images = common.common[0] @ weight.T, weight * common.common[1]
        for component, label in enumerate(labels):
            differences = weight[label] - weight[rivals[component]]
            if isinstance(common, CommonCovariance) and not common.shares[component]:
                along, across = images[0][:, [label]] - images[0], images[1][label] - images[1]
                squares = (along**2).sum(axis=0) + (across**2).sum(axis=1)
                variance[component] = squares[rivals[component]]
                continue
            variance[component] = (differences * spread(cone, component, differences)).sum(axis=1)
        return cls(mean, np.sqrt(np.maximum(variance, 0)), rivals)

    def slack(self, kappa: float) -> Float:
        """Return ``m - kappa * sqrt(v)`` for every component and rival."""
        return np.asarray(self.mean - kappa * self.deviation)


def spread(cone: ClassMomentCone, component: int, rows: Float) -> Float:
    """Return ``rows @ Sigma`` for one component, without building a low-rank Sigma."""
    return cone.covariance.times(component, rows)
