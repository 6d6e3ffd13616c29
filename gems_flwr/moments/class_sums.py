"""Class moments of the inputs of a linear layer, gathered in chunks and added over nodes.

The raw material of `gems_flwr.spaces.cone`. What is gathered are the sums ``n``, ``sum x``
and ``sum x x^T`` per class in double precision: they add up exactly over chunks and over
nodes, so that the aggregate does not depend on how the data was split, and they can be
summed under secure aggregation, where the server sees nothing but the total.

Privacy, enforced: moments are not private. A class with no more samples than the rank
sends its data up to a rotation. Classes below ``min_count`` samples are withheld and listed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gems_flwr.bounds import MAX_MOMENT, MAX_POOLED_EXAMPLES, MAX_VALUE, MAX_WEIGHT
from gems_flwr.devices import exact_device
from gems_flwr.errors import SpaceError
from gems_flwr.spaces.checks import check_array
from gems_flwr.typing import Float


@dataclasses.dataclass(frozen=True, eq=False)
class ClassSums:
    """Counts, sums and sums of outer products of some classes (or clusters of classes).

    Parameters
    ----------
    num_classes : int
        Classes of the task.
    labels : int array of shape (components,)
        Class of each component.
    counts : float array of shape (components,)
        Samples of each component (not whole after a private release).
    sums : array of shape (components, D)
        Sum of the inputs.
    outers : array of shape (components, D, D)
        Sum of their outer products.
    privacy : tuple of float, optional
        Epsilon and delta, if noise was added.
    """

    num_classes: int
    labels: NDArray[np.int64]
    counts: Float
    sums: Float
    outers: Float
    privacy: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        components, width = np.shape(self.sums)
        check_array("counts", self.counts, (components,), MAX_POOLED_EXAMPLES)
        check_array("sums", self.sums, (components, width), MAX_VALUE, np.float64)
        check_array("outers", self.outers, (components, width, width), MAX_VALUE, np.float64)
        if np.size(self.labels) != components:
            raise SpaceError("labels", f"{components} components", np.size(self.labels))

    def __add__(self, other: ClassSums) -> ClassSums:
        """Return the sums of both, class by class."""
        if (self.num_classes, self.sums.shape[1]) != (other.num_classes, other.sums.shape[1]):
            mine, theirs = self.sums.shape[1], other.sums.shape[1]
            raise SpaceError(
                "sums",
                f"{self.num_classes} classes of {mine} features",
                f"{other.num_classes} classes of {theirs} features",
            )
        labels = np.union1d(self.labels, other.labels)
        parts = [
            np.zeros((len(labels), *a.shape[1:])) for a in (self.counts, self.sums, self.outers)
        ]
        for term in (self, other):
            where = np.searchsorted(labels, term.labels)
            for part, values in zip(parts, (term.counts, term.sums, term.outers), strict=True):
                np.add.at(part, where, values)
        privacy = self.privacy if self.privacy == other.privacy else None
        counts, sums, outers = parts
        return ClassSums(self.num_classes, labels, counts, sums, outers, privacy)

    def over_all_classes(self, min_count: int) -> ClassSums:
        """Return the same sums with a component for every class, in order.

        A class that is not there, or has fewer than `min_count` samples, is all zeros: what a
        node sends then has the same shape on every node, and says nothing of a handful.
        """
        width = self.sums.shape[1]
        counts = np.zeros(self.num_classes)
        sums = np.zeros((self.num_classes, width))
        outers = np.zeros((self.num_classes, width, width))
        kept = self.counts >= min_count
        for component, label in zip(np.flatnonzero(kept), self.labels[kept], strict=True):
            counts[label] += self.counts[component]
            sums[label] += self.sums[component]
            outers[label] += self.outers[component]
        labels = np.arange(self.num_classes, dtype=np.int64)
        return ClassSums(self.num_classes, labels, counts, sums, outers, self.privacy)

    def moments(self) -> tuple[Float, Float]:
        """Return means (components, D) and covariances (components, D, D) of the samples."""
        counts = np.maximum(self.counts, 1)[:, None]
        means = self.sums / counts
        covariances = self.outers / counts[..., None] - means[:, :, None] * means[:, None, :]
        return means, (covariances + covariances.transpose(0, 2, 1)) / 2

    def with_samples_at_most(self, most: float) -> ClassSums:
        """Return the sums of the same moments over `most` samples, if there are more."""
        total = float(self.counts.sum())
        if total <= most:
            return self
        share = most / total
        return dataclasses.replace(
            self, counts=self.counts * share, sums=self.sums * share, outers=self.outers * share
        )

    def check_moments(self) -> None:
        """Refuse sums that no samples can have, before they are added to those of other nodes.

        Half as much rounding is forgiven as in a cone, and means may be half as large, so that a
        total of sums that pass makes a cone that passes: its spread is at most theirs and the
        square of half the distance between their means.

        Raises
        ------
        SpaceError
            Names the class.
        """
        means, covariances = self.moments()
        for row, label in enumerate(self.labels.tolist()):
            if self.counts[row] < 1:
                if self.sums[row].any() or self.outers[row].any():
                    raise SpaceError(f"class {label}", "sums of 0 for a count below 1", "others")
                continue
            mean, spread = means[row], covariances[row]
            check_array(f"mean of class {label}", mean, mean.shape, MAX_WEIGHT / 2)
            check_array(f"spread of class {label}", spread, spread.shape, MAX_MOMENT / 2)
            slack = 5e-7 * float(np.trace(spread)) + 1e-12
            try:
                np.linalg.cholesky(spread + slack * np.eye(len(mean)))
            except np.linalg.LinAlgError:
                raise SpaceError(
                    f"class {label}", "sums that samples can have", "a negative variance"
                ) from None


def sum_classes(
    batches: Iterable[tuple[Tensor, Tensor]], num_classes: int, groups: Tensor | None = None
) -> ClassSums:
    """Gather the sums of every class, batch by batch.

    Parameters
    ----------
    batches : iterable of (inputs, labels)
        Inputs of shape (n, D) on any device, int labels of shape (n,).
    num_classes : int
        Classes of the task.
    groups : int tensor, optional
        Cluster of each sample within its class, over all batches in order; each pair of
        class and cluster then is a component of its own.

    Raises
    ------
    SpaceError
        If there is no data, or a label or value is out of range.
    """
    gathered: dict[tuple[int, int], list[Tensor]] = {}
    seen = 0
    for x, y in batches:
        check_batch(x, y, num_classes)
        part = torch.zeros_like(y) if groups is None else groups[seen : seen + len(y)].to(y)
        seen += len(y)
        for label, group in torch.unique(torch.stack([y, part]), dim=1).T.tolist():
            chosen = x[(y == label) & (part == group)].double()
            fresh = [
                torch.tensor(float(len(chosen))),
                chosen.sum(0).cpu(),
                (chosen.T @ chosen).cpu(),
            ]
            old = gathered.setdefault((label, group), [torch.zeros_like(v) for v in fresh])
            gathered[label, group] = [a + b for a, b in zip(old, fresh, strict=True)]
    if not gathered:
        raise SpaceError("inputs", "at least one sample", 0)
    keys = sorted(gathered)
    counts, sums, outers = [np.stack([gathered[key][i].numpy() for key in keys]) for i in range(3)]
    labels = np.array([label for label, _ in keys], dtype=np.int64)
    return ClassSums(num_classes, labels, counts, sums, outers)


def check_batch(inputs: Tensor, labels: Tensor, num_classes: int) -> None:
    """Refuse inputs that are not finite, and labels of no class."""
    if not bool(torch.isfinite(inputs).all()):
        raise SpaceError("inputs", "finite values", "NaN or inf")
    if len(labels) and not (int(labels.min()) >= 0 and int(labels.max()) < num_classes):
        got = f"{int(labels.min())} to {int(labels.max())}"
        raise SpaceError("labels", f"0 to {num_classes - 1}", got)


def in_chunks(
    inputs: Tensor,
    labels: Tensor,
    size: int = 8192,
    device: str | torch.device | None = None,
) -> Iterable[tuple[Tensor, Tensor]]:
    """Cut inputs and labels into batches, for exact sums on a device, or where they are."""
    where = exact_device(inputs.device if device is None else device)
    for start in range(0, len(inputs), size):
        rows = slice(start, start + size)
        yield inputs[rows].to(where), labels[rows].to(where).long()
