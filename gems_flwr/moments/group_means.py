"""Counts and means alone: what a node sends for FedCOF.

FedCOF estimates covariances from the spread of class means over nodes. Where a class is on few
nodes, a node may cut it into random groups and send the mean of each: their spread tells as much,
and no sample is in two groups.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gems_flwr.errors import SpaceError
from gems_flwr.moments.small_means import MeanRule, whole_count, whole_mean
from gems_flwr.spaces.cone import ClassMomentCone
from gems_flwr.spaces.covariance import Values, quantize
from gems_flwr.spaces.partial_covariance import PartialCovariance


def build_means(
    inputs: Tensor,
    labels: Tensor,
    num_classes: int,
    *,
    groups: int = 1,
    int8: bool = False,
    rule: MeanRule | None = None,
    seed: int = 0,
) -> ClassMomentCone:
    """Return a cone of counts and means alone.

    Parameters
    ----------
    inputs : tensor of shape (n, D)
        Inputs of the linear layer.
    labels : int tensor of shape (n,)
        True classes.
    num_classes : int
        Classes of the task.
    groups : int
        Random groups of each class at most, from 1; fewer where they would be too small for the
        rule to show all of a mean.
    int8 : bool
        Whether means are sent in eight bits, which is too coarse to tell many groups apart.
    rule : MeanRule, optional
        Fewest samples of a mean, and how much of it is shown.
    seed : int
        Who is in which group.

    Raises
    ------
    SpaceError
        If no class has enough samples, or values are not finite.
    """
    rule, total = rule or MeanRule(), len(labels)
    rows, classes = inputs.double().cpu().numpy(), labels.cpu().numpy().astype(np.int64)
    if not np.isfinite(rows).all():
        raise SpaceError("inputs", "finite values", "NaN or inf")
    if total and (classes.min() < 0 or classes.max() >= num_classes):
        raise SpaceError("labels", f"0 to {num_classes - 1}", f"{classes.min()} to {classes.max()}")
    smallest = whole_count(rows.shape[1], rule)
    generator = torch.Generator().manual_seed(seed % 2**63)
    sent: list[tuple[int, int]] = []
    means = []
    for label in np.unique(classes).tolist():
        mine = np.flatnonzero(classes == label)
        order = torch.randperm(len(mine), generator=generator).numpy()
        parts = max(1, min(groups, len(mine) // smallest))
        for part in np.array_split(mine[order], parts):
            own = rows[part]
            shown = None
            if len(part) >= rule.least:
                variance = float(own.var(axis=0).sum())
                shown = whole_mean(own.mean(axis=0), len(part), variance, rule)
            if shown is not None:
                sent.append((label, len(part)))
                means.append(shown)
    if not sent:
        expected = f"a class with enough samples to show a mean, at least {smallest}"
        raise SpaceError("counts", expected, int(np.bincount(classes).max(initial=0)))
    table = np.stack(means)
    stored: Values = quantize(table, axis=1) if int8 else table.astype(np.float32)
    held = {label for label, _ in sent}
    count = sum(size for _, size in sent)
    return ClassMomentCone(
        num_classes=num_classes,
        labels=np.array([label for label, _ in sent], dtype=np.int64),
        counts=np.array([size for _, size in sent], dtype=np.int64),
        means=stored,
        covariance=PartialCovariance.none(len(sent), rows.shape[1]),
        total_count=total,
        withheld=tuple(sorted(set(classes.tolist()) - held)),
        withheld_count=total - count,
    )
