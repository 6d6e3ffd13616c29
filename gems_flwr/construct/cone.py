"""From the inputs of a linear layer to its class-moment cone: the node's side in one call.

See `gems_flwr.spaces.cone` for what the cone is. Decided here: moments come from the
*training* inputs (the papers build spaces on validation data because a trained model is
good on its training data by construction; moments do not depend on any trained model).
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from gems_flwr.construct.clusters import cluster_classes
from gems_flwr.construct.low_rank import compress
from gems_flwr.construct.moments import ClassSums, in_chunks, sum_classes
from gems_flwr.construct.privacy import PrivateRelease, private_sums
from gems_flwr.spaces.cone import ClassMomentCone, Rule
from gems_flwr.spaces.covariance import FullCovariance
from gems_flwr.spaces.errors import SpaceError

MIN_COUNT = 32


def cone_from_sums(
    sums: ClassSums,
    *,
    min_count: int = MIN_COUNT,
    epsilon: float = 0.5,
    rule: Rule = "gaussian",
) -> ClassMomentCone:
    """Return the cone of class sums with full moments, small classes withheld.

    Parameters
    ----------
    sums : ClassSums
        Of one node, or added over several.
    min_count : int
        Entries with fewer samples are withheld.
    epsilon, rule
        As in `ClassMomentCone`.

    Raises
    ------
    SpaceError
        If no entry has enough samples.
    """
    counts = np.rint(sums.counts).astype(np.int64)
    keep = counts >= max(1, min_count)
    if not keep.any():
        expected = f"a class with at least {min_count} samples"
        raise SpaceError("counts", expected, f"at most {int(counts.max(initial=0))}")
    means, covariances = sums.moments()
    gone = sorted(set(sums.labels[~keep].tolist()))
    return ClassMomentCone(
        num_classes=sums.num_classes,
        labels=sums.labels[keep],
        counts=counts[keep],
        means=means[keep].astype(np.float32),
        covariance=FullCovariance(covariances[keep].astype(np.float32)),
        epsilon=epsilon,
        rule=rule,
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
    rank: int | None = None,
    int8: bool = True,
    clusters: int = 1,
    min_count: int = MIN_COUNT,
    epsilon: float = 0.5,
    rule: Rule = "gaussian",
    private: PrivateRelease | None = None,
    seed: int = 0,
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
    rank : int, optional
        Columns of the covariance factor; full moments if left out.
    int8 : bool
        Store low-rank moments in eight bits; full moments are never quantised.
    clusters : int
        Entries per class at most.
    min_count : int
        Least samples of an entry; at least ``rank + 1`` is enforced.
    epsilon, rule
        As in `ClassMomentCone`.
    private : PrivateRelease, optional
        Add noise for differential privacy; one entry per class then.
    seed : int
        Seed of clustering and noise.

    Raises
    ------
    SpaceError
        If no class has enough samples.
    """
    least = max(min_count, 1 if rank is None else rank + 1)
    if private is not None:
        if clusters > 1:
            raise SpaceError("clusters", "1 with a private release", clusters)
        sums = private_sums(inputs, labels.long(), num_classes, private, seed)
    else:
        groups = None
        if clusters > 1:
            groups = cluster_classes(inputs, labels.long(), clusters, least, seed)
        sums = sum_classes(in_chunks(inputs, labels), num_classes, groups)
    cone = cone_from_sums(sums, min_count=least, epsilon=epsilon, rule=rule)
    return cone if rank is None else compress(cone, rank, int8)
