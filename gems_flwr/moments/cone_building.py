"""From the inputs of a linear layer to its class-moment cone: the node's side in one call.

See `gems_flwr.spaces.cone` for what the cone is. Decided here: moments come from the
*training* inputs (the papers build spaces on validation data because a trained model is
good on its training data by construction; moments do not depend on any trained model).
"""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from gems_flwr.errors import SpaceError
from gems_flwr.moments.automatic_rank import as_counts_allow, feature_units, smallest_count
from gems_flwr.moments.class_clusters import cluster_classes
from gems_flwr.moments.class_sums import ClassSums, check_counts, in_chunks, sum_classes
from gems_flwr.moments.cone_streaming import Components, stream_cone, streams
from gems_flwr.moments.low_rank import compress
from gems_flwr.moments.private_release import PrivateRelease, private_sums
from gems_flwr.spaces.cone import ClassMomentCone
from gems_flwr.spaces.covariance import FullCovariance
from gems_flwr.typing import Rank

# Of classes whose form does not follow from their counts.
MIN_COUNT = 32


def cone_from_sums(
    sums: ClassSums,
    *,
    min_count: int = MIN_COUNT,
    epsilon: float = 0.5,
) -> ClassMomentCone:
    """Return the cone of class sums with full moments, small classes withheld.

    Parameters
    ----------
    sums : ClassSums
        Of one node, or added over several.
    min_count : int
        Components with fewer samples are withheld.
    epsilon : float
        As in `ClassMomentCone`.

    Raises
    ------
    SpaceError
        If no component has enough samples.
    """
    counts = np.rint(sums.counts).astype(np.int64)
    check_counts(counts, min_count)
    keep = counts >= max(1, min_count)
    means, covariances = sums.moments()
    gone = sorted(set(sums.labels[~keep].tolist()))
    return ClassMomentCone(
        num_classes=sums.num_classes,
        labels=sums.labels[keep],
        counts=counts[keep],
        means=means[keep].astype(np.float32),
        covariance=FullCovariance(covariances[keep].astype(np.float32)),
        epsilon=epsilon,
        total_count=int(np.maximum(counts, 0).sum()),
        withheld=tuple(gone),
        withheld_count=int(np.maximum(counts[~keep], 0).sum()),
        privacy=sums.privacy,
    )


def build_cone(
    inputs: Tensor,
    labels: Tensor,
    num_classes: int,
    *,
    rank: Rank = "auto",
    int8: bool = True,
    clusters: int = 1,
    min_count: int | None = None,
    epsilon: float = 0.5,
    private: PrivateRelease | None = None,
    seed: int = 0,
    noise_seed: int | None = None,
    largest_rank: int | None = None,
) -> ClassMomentCone:
    """Return the class-moment cone of a node's data.

    Parameters
    ----------
    inputs : tensor of shape (n, D)
        Inputs of the linear layer; for a plain logistic model, the data itself.
    labels : int tensor of shape (n,)
        True classes.
    num_classes : int
        Classes of the task.
    rank : "auto", "full" or int
        Columns of the covariance factor: as many as the samples of each class allow (see
        `gems_flwr.moments.automatic_rank`), full moments, or a fixed number from 1. With noise for
        differential privacy, which protects by itself, ``"auto"`` means full moments.
    int8 : bool
        Store low-rank moments in eight bits; full moments are never quantised.
    clusters : int
        Components per class at most.
    min_count : int, optional
        Least samples of a component, from 1; see `least_count` for what holds by default.
    epsilon : float
        As in `ClassMomentCone`.
    private : PrivateRelease, optional
        Add noise for differential privacy; one component per class then.
    seed : int
        Seed of clustering.
    noise_seed : int, optional
        Seed of the noise, for simulations: whoever knows it can subtract the noise. Without it
        noise comes from the operating system's cryptographic generator.
    largest_rank : int, optional
        Most columns that ``"auto"`` comes to, at least 1.

    Raises
    ------
    SpaceError
        If no class has enough samples.

    Examples
    --------
    >>> import torch
    >>> from gems_flwr import build_cone
    >>> cone = build_cone(torch.randn(200, 3), torch.arange(200) % 2, num_classes=2)
    >>> cone.num_classes, cone.num_features
    (2, 3)
    """
    least = least_count(rank, inputs.shape[1], min_count, private)
    if private is not None:
        if clusters > 1:
            raise SpaceError("clusters", "1 with a private release", clusters)
        sums = private_sums(inputs, labels.long(), num_classes, private, noise_seed)
    else:
        groups = None
        if clusters > 1:
            groups = cluster_classes(inputs, labels.long(), clusters, least, seed)
        components = Components.of(labels.long(), groups)
        if rank != "full" and streams(components.counts, inputs.shape[1], rank, largest_rank):
            return stream_cone(
                inputs,
                components,
                num_classes,
                rank=rank,
                int8=int8,
                min_count=least,
                epsilon=epsilon,
                largest_rank=largest_rank,
            )
        sums = sum_classes(in_chunks(inputs, labels), num_classes, groups)
    cone = cone_from_sums(sums, min_count=least, epsilon=epsilon)
    if isinstance(rank, int):
        return compress(cone, rank, int8)
    if rank == "full" or private is not None:
        return cone
    return as_counts_allow(cone, feature_units(inputs), int8, largest_rank)


def least_count(
    rank: Rank, features: int, min_count: int | None = None, private: PrivateRelease | None = None
) -> int:
    """Return how many samples a class must have to be sent.

    Parameters
    ----------
    rank : "auto", "full" or int
        As in `build_cone`. A fixed rank needs more samples than columns, or the samples themselves
        would be sent; ``"auto"`` at least `gems_flwr.moments.automatic_rank.smallest_count`.
    features : int
        D.
    min_count : int, optional
        What is wanted. By default what ``"auto"`` needs; 32 for other ranks; under differential
        privacy four deviations of the noise, so that classes without samples are rarely sent.
    private : PrivateRelease, optional
        Noise, if there is any.
    """
    if private is not None:
        default, enforced = math.ceil(4 * private.noise), 1
    elif rank == "auto":
        default = enforced = smallest_count(features)
    else:
        default, enforced = MIN_COUNT, 1
    if isinstance(rank, int):
        enforced = max(enforced, rank + 1)
    return max(default if min_count is None else min_count, enforced)
