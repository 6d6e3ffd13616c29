"""The low-rank cone of a node with many features, without a D x D matrix for any class.

The same cone as by way of full moments (`gems_flwr.moments.low_rank.compress`,
`gems_flwr.moments.automatic_rank.as_counts_allow`), whose covariances would take ``8 D^2`` bytes
for every class: 1.3 GB for ten classes of 4,000 features. Here the samples themselves are read a
few times instead; see `gems_flwr.moments.sample_covariance`.

Decided here: from `STREAMED_FEATURES` features on, and where the rank of every component is below
an eighth of them; with more, all eigenvectors at once are no more work. Below, full moments cost
little, and numbers stay what they were to the last bit. Above they are the same within rounding:
factors and deviations differ by less than 1e-4 of the largest, where a step in eight bits is 8e-3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gems_flwr.errors import SpaceError
from gems_flwr.moments.automatic_rank import (
    chosen_rank,
    feature_units,
    smoothed,
    store_shapes,
)
from gems_flwr.moments.class_sums import check_batch
from gems_flwr.moments.low_rank import stack_factors
from gems_flwr.moments.sample_covariance import SampleCovariance, factor_samples
from gems_flwr.spaces.cone import ClassMomentCone
from gems_flwr.spaces.covariance import quantize
from gems_flwr.typing import Rank

STREAMED_FEATURES = 2048


@dataclasses.dataclass(frozen=True, eq=False)
class Components:
    """Which samples make up which component: those of a class, or of a cluster of it.

    Parameters
    ----------
    labels : int array of shape (components,)
        Class of each, rising.
    rows : tuple of int tensors
        Positions of the samples of each.
    """

    labels: NDArray[np.int64]
    rows: tuple[Tensor, ...]

    @classmethod
    def of(cls, labels: Tensor, groups: Tensor | None = None) -> Components:
        """Sort samples by class, and by their cluster (n,) within it if there are any."""
        part = torch.zeros_like(labels) if groups is None else groups.to(labels)
        keys = torch.unique(torch.stack([labels, part]), dim=1).T.tolist()
        rows = tuple(torch.nonzero((labels == c) & (part == g)).flatten() for c, g in keys)
        return cls(np.array([label for label, _ in keys], dtype=np.int64), rows)

    @property
    def counts(self) -> NDArray[np.int64]:
        """Samples of each component."""
        return np.array([len(rows) for rows in self.rows], dtype=np.int64)

    def select(self, keep: NDArray[np.bool_]) -> Components:
        """Return some of the components."""
        rows = tuple(each for each, kept in zip(self.rows, keep, strict=True) if kept)
        return Components(self.labels[keep], rows)


def streams(
    counts: NDArray[np.int64], features: int, rank: Rank, largest_rank: int | None = None
) -> bool:
    """Return whether a low-rank cone is built from samples instead of full moments.

    Parameters
    ----------
    counts : int array
        Samples of each component.
    features, rank, largest_rank
        As in `stream_cone`.
    """
    if features < STREAMED_FEATURES:
        return False
    if isinstance(rank, int):
        return 8 * rank < features
    ranks = (chosen_rank(count, features, largest_rank) for count in counts.tolist())
    return rank == "auto" and all(8 * most < features for most in ranks)


def stream_cone(
    inputs: Tensor,
    components: Components,
    num_classes: int,
    *,
    rank: Rank,
    int8: bool = True,
    epsilon: float = 0.5,
    largest_rank: int | None = None,
    device: torch.device | None = None,
) -> ClassMomentCone:
    """Return a cone with low-rank covariances.

    Parameters
    ----------
    inputs : tensor of shape (n, D)
        Inputs of the linear layer.
    components : Components
        Which of them belong together, and are sent: at least one.
    num_classes, rank, int8, epsilon, largest_rank, device
        As in `gems_flwr.moments.cone_building.build_cone`; the rank is not ``"full"``.
    """
    if isinstance(rank, int):
        means, covariance = _of_one_rank(inputs, components.rows, rank, int8, device)
    else:
        means, covariance = _as_counts_allow(inputs, components.rows, largest_rank, int8, device)
    return ClassMomentCone(
        num_classes=num_classes,
        labels=components.labels,
        counts=components.counts,
        means=means,
        covariance=covariance,
        epsilon=epsilon,
    )


def _of_one_rank(
    inputs: Tensor, kept: Sequence[Tensor], rank: int, int8: bool, device: torch.device | None
) -> tuple[Any, Any]:
    if rank < 1:
        raise SpaceError("rank", "at least 1", rank)
    means, pairs = [], []
    for rows in kept:
        covariance = SampleCovariance(inputs, rows, device=device)
        means.append(covariance.mean.astype(np.float32))
        pairs.append(factor_samples(covariance, rank)[:2])
    table = np.stack(means)
    return quantize(table, axis=1) if int8 else table, stack_factors(pairs, int8)


def _as_counts_allow(
    inputs: Tensor,
    kept: Sequence[Tensor],
    largest_rank: int | None,
    int8: bool,
    device: torch.device | None,
) -> tuple[Any, Any]:
    units = feature_units(inputs)
    means, shapes = [], []
    for rows in kept:
        in_units = None if (units == 1).all() else units
        covariance = SampleCovariance(inputs, rows, in_units, device)
        rank = chosen_rank(len(rows), covariance.side, largest_rank)
        columns, deviations, trace = factor_samples(covariance, rank)
        means.append(covariance.mean / units)
        shapes.append(smoothed(columns, deviations, trace, len(rows)))
    return store_shapes(np.stack(means), shapes, units, int8)


def check_samples(inputs: Tensor, components: Components, num_classes: int) -> None:
    """Refuse samples with a value or label out of range, or none at all."""
    if not len(components.labels):
        raise SpaceError("inputs", "at least one sample", 0)
    labels = torch.from_numpy(components.labels)
    # Of the labels, only the least and the largest are looked at.
    for start in range(0, len(inputs), 8192):
        check_batch(inputs[start : start + 8192], labels, num_classes)
