"""From the inputs of a linear layer to its class-moment cone: the node's side in one call.

See `gems_flwr.spaces.cone` for what the cone is. Decided here: moments come from the
*training* inputs (the papers build spaces on validation data because a trained model is
good on its training data by construction; moments do not depend on any trained model). Classes too
small for a covariance go as count and mean; see `gems_flwr.moments.small_means`.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gems_flwr.devices import exact_device
from gems_flwr.errors import SpaceError
from gems_flwr.moments.automatic_rank import (
    PUSHES,
    allowed_rank,
    as_counts_allow,
    coarseness,
    feature_units,
    smallest_count,
)
from gems_flwr.moments.class_clusters import cluster_classes
from gems_flwr.moments.class_sums import ClassSums, in_chunks, sum_classes
from gems_flwr.moments.cone_streaming import Components, check_samples, stream_cone, streams
from gems_flwr.moments.join_components import but_for_means, join_cone, partial_covariance
from gems_flwr.moments.low_rank import compress
from gems_flwr.moments.private_release import PrivateRelease, private_sums
from gems_flwr.moments.small_means import (
    ClassSource,
    MeanRule,
    SampledClasses,
    SummedClasses,
    small_means,
)
from gems_flwr.spaces.cone import ClassMomentCone
from gems_flwr.spaces.covariance import FullCovariance
from gems_flwr.typing import Float, Rank

# Of classes whose form does not follow from their counts.
MIN_COUNT = 32


def cone_from_sums(
    sums: ClassSums,
    *,
    min_count: int = MIN_COUNT,
    epsilon: float = 0.5,
    mean_rule: MeanRule | None = None,
    better_as_mean: int = 0,
) -> ClassMomentCone:
    """Return the cone of class sums with full moments.

    Parameters
    ----------
    sums : ClassSums
        Of one node, or added over several.
    min_count : int
        Fewest samples of a component for a covariance.
    epsilon : float
        As in `ClassMomentCone`.
    mean_rule : MeanRule, optional
        How smaller components are sent as means alone; withheld if left out.
    better_as_mean : int
        Components with fewer samples go as means alone even if `min_count` allows a covariance,
        where the rule shows such means and the node has larger components.

    Raises
    ------
    SpaceError
        If no component has enough samples.
    """
    counts = np.rint(sums.counts).astype(np.int64)
    keep = _with_covariance(counts, min_count, mean_rule, better_as_mean)
    shown, small = _shown_means(SummedClasses(sums), keep, mean_rule, min_count)
    means, covariances = sums.moments()
    means[shown] = small
    sent = keep | shown
    gone = sorted(set(sums.labels[~sent].tolist()))
    own = FullCovariance(covariances[keep].astype(np.float32)) if keep.any() else None
    lacking = shown[sent]
    return ClassMomentCone(
        num_classes=sums.num_classes,
        labels=sums.labels[sent],
        counts=counts[sent],
        means=means[sent].astype(np.float32),
        covariance=partial_covariance(own, lacking, means.shape[1]),
        epsilon=epsilon,
        total_count=int(np.maximum(counts, 0).sum()),
        withheld=tuple(gone),
        withheld_count=int(np.maximum(counts[~sent], 0).sum()),
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
    mean_rule: MeanRule | None = None,
    device: str | torch.device | None = None,
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
        Fewest samples of a component for a covariance, from 1; see `least_count` for what holds by
        default. Smaller classes go as count and mean.
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
    mean_rule : MeanRule, optional
        How much of the means of classes that are too small for a covariance is sent; with
        ``"auto"`` never all of it. Under differential privacy small classes are withheld.
    device : str or torch.device, optional
        Where to compute: samples go there in chunks (for clusters, class by class). By default
        where the inputs are; see `gems_flwr.devices.exact_device`.

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
    where = exact_device(inputs.device if device is None else device)
    rule, better_as_mean = mean_rule or MeanRule(), 0
    if rank == "auto":
        rule = dataclasses.replace(rule, exact=False)
        better_as_mean = _rounded_away_below(inputs.shape[1])
    if private is not None:
        if clusters > 1:
            raise SpaceError("clusters", "1 with a private release", clusters)
        sums = private_sums(inputs, labels.long(), num_classes, private, noise_seed, where)
    else:
        groups = None
        if clusters > 1:
            groups = cluster_classes(inputs, labels.long(), clusters, least, seed, where)
        components = Components.of(labels.long(), groups)
        if rank != "full" and streams(components.counts, inputs.shape[1], rank, largest_rank):
            check_samples(inputs, components, num_classes)
            keep = _with_covariance(components.counts, least, rule, better_as_mean)
            sampled = SampledClasses(inputs, components.rows, where)
            shown, small = _shown_means(sampled, keep, rule, least)
            larger = None
            if keep.any():
                larger = stream_cone(
                    inputs,
                    components.select(keep),
                    num_classes,
                    rank=rank,
                    int8=int8,
                    epsilon=epsilon,
                    largest_rank=largest_rank,
                    device=where,
                )
            return join_cone(larger, components, num_classes, keep, shown, small, int8, epsilon)
        sums = sum_classes(in_chunks(inputs, labels, device=where), num_classes, groups)
    cone = cone_from_sums(
        sums,
        min_count=least,
        epsilon=epsilon,
        mean_rule=None if private is not None else rule,
        better_as_mean=better_as_mean,
    )
    if rank == "full" or private is not None:
        return cone

    def compressed(larger: ClassMomentCone) -> ClassMomentCone:
        if isinstance(rank, int):
            return compress(larger, rank, int8)
        return as_counts_allow(larger, feature_units(inputs), int8, largest_rank)

    return but_for_means(cone, compressed, int8)


def _rounded_away_below(features: int) -> int:
    """Return the count below which the automatic rule rounds by more than a typical deviation.

    There it shows no direction of the covariance, and a mean of few exact numbers tells more.
    """
    count = smallest_count(features)
    while (
        allowed_rank(count, features) == 0
        and PUSHES * coarseness(count, features, 0) * math.sqrt(features) > count
    ):
        count += 1
    return count


def _with_covariance(
    counts: NDArray[np.int64], min_count: int, rule: MeanRule | None, better_as_mean: int
) -> NDArray[np.bool_]:
    """Return which components are sent with a covariance; see `cone_from_sums`."""
    keep = counts >= max(1, min_count)
    if rule is not None and (counts >= max(min_count, better_as_mean)).any():
        keep &= (counts >= better_as_mean) | (counts < rule.least)
    return keep


def _shown_means(
    source: ClassSource, keep: NDArray[np.bool_], rule: MeanRule | None, min_count: int
) -> tuple[NDArray[np.bool_], Float]:
    """Return which other components are sent as means, and those; refuse to send nothing."""
    shown, small = np.zeros_like(keep), np.zeros((0, source.features))
    if rule is not None and not keep.all():
        shown, small = small_means(source, ~keep, rule)
    if not (keep | shown).any():
        expected = (
            f"a class with at least {min_count} samples (fewer would show too much of each one: "
            "bring more data, or ask with noise, Cone(dp_epsilon=…))"
        )
        raise SpaceError("counts", expected, f"at most {int(source.counts.max(initial=0))}")
    return shown, small


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
