"""One cone of components with a covariance and of components with a mean alone.

Small classes have no covariance of their own (see `gems_flwr.moments.small_means`). The larger ones
are compressed without them, and here they are put together again, in the order of classes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from gems_flwr.moments.cone_streaming import Components
from gems_flwr.spaces.cone import ClassMomentCone, mean_values
from gems_flwr.spaces.covariance import (
    FullCovariance,
    LowRankCovariance,
    QuantizedArray,
    Values,
    quantize,
)
from gems_flwr.spaces.partial_covariance import Covariance, PartialCovariance
from gems_flwr.typing import Float


def join_cone(
    larger: ClassMomentCone | None,
    components: Components,
    num_classes: int,
    keep: NDArray[np.bool_],
    shown: NDArray[np.bool_],
    small: Float,
    int8: bool,
    epsilon: float,
) -> ClassMomentCone:
    """Return the cone of components with a covariance, and of others by their means alone."""
    sent, counts = keep | shown, components.counts
    lacking = shown[sent]
    own: LowRankCovariance | None = None
    means: Values = quantize(small, axis=1) if int8 else small.astype(np.float32)
    if larger is not None:
        means = _joined(larger.means, small, lacking)
        assert isinstance(larger.covariance, LowRankCovariance)
        own = larger.covariance
    return ClassMomentCone(
        num_classes=num_classes,
        labels=components.labels[sent],
        counts=counts[sent],
        means=means,
        covariance=partial_covariance(own, lacking, small.shape[1]),
        epsilon=epsilon,
        total_count=int(counts.sum()),
        withheld=tuple(sorted(set(components.labels[~sent].tolist()))),
        withheld_count=int(counts[~sent].sum()),
    )


def but_for_means(
    cone: ClassMomentCone, compressed: Callable[[ClassMomentCone], ClassMomentCone], int8: bool
) -> ClassMomentCone:
    """Return a cone whose covariances are compressed, components without one left as they are."""
    lacking = cone.lacking
    if not lacking.any():
        return compressed(cone)
    means = mean_values(cone)
    if lacking.all():
        stored = quantize(means, axis=1) if int8 else cone.means
        return dataclasses.replace(cone, means=stored)
    larger = cone.without_components(lacking)
    assert larger is not None
    larger = compressed(larger)
    own = larger.covariance
    assert isinstance(own, FullCovariance | LowRankCovariance)
    return dataclasses.replace(
        cone,
        means=_joined(larger.means, means[lacking], lacking),
        covariance=partial_covariance(own, lacking, cone.num_features),
    )


def partial_covariance(
    own: FullCovariance | LowRankCovariance | None, lacking: NDArray[np.bool_], features: int
) -> Covariance:
    """Return the covariances of the components that have one, and which have none."""
    if own is not None and not lacking.any():
        return own
    return PartialCovariance(own, lacking, features)


def _joined(larger: Values, small: Float, places: NDArray[np.bool_]) -> Values:
    """Return the means of all components, the small ones' at their places, stored alike."""
    if isinstance(larger, QuantizedArray):
        codes, own = np.zeros((len(places), small.shape[1]), np.int8), quantize(small, axis=1)
        scales = np.zeros((len(places), 1), np.float32)
        codes[~places], codes[places] = larger.codes, own.codes
        scales[~places], scales[places] = larger.scales, own.scales
        return QuantizedArray(codes, scales)
    joined = np.zeros((len(places), small.shape[1]), np.float32)
    joined[~places], joined[places] = larger, small
    return joined
