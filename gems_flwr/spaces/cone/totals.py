"""A cone from totals over nodes: class moments in a few directions.

There are four sums, each of which needs the totals before it:

1. *scale*: how many samples each class has, and which power of two no input exceeds (a count of
   nodes for each power, so that the largest is known and no node's own), and how many nodes show no
   more directions than the samples in a sum allow;
2. *means*: the sum of the inputs of each class, and pooled sums and squares. From here on inputs
   are standardised, ``z = (x - center) / scale``;
3. *sketch*: ``sum z (z . v)`` for some columns v: the directions in which the class means differ (a
   block Krylov space, in which the layer of Fisher's discriminant nearly lies already), and random
   ones (Halko, Martinsson and Tropp 2011);
4. *covariances*: sums and outer products of each class in a basis of these directions.

Every sum has a bound that follows from earlier totals (by Cauchy-Schwarz, where inputs are
multiplied), so rings need room for one bound, not for one of each node. The covariance of a class
is what was measured in the basis, and outside of it the pooled within-class variance of each
feature: ``F F^T + diag(s^2)``. Decided on validation data: outside of the basis classes share one
variance; features are standardised by what they vary within classes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from gems_flwr.bounds import MAX_EXAMPLES, MAX_WEIGHT
from gems_flwr.core.log import log_warning
from gems_flwr.devices import exact_device
from gems_flwr.errors import SpaceError
from gems_flwr.samples import Samples
from gems_flwr.secure.fixed_point import Section
from gems_flwr.spaces.cone.cone import ClassMomentCone
from gems_flwr.spaces.cone.covariance import (
    LowRankCovariance,
    QuantizedArray,
    partial_covariance,
    quantize,
    symmetric,
    upper_half,
)
from gems_flwr.spaces.cone.rules import MIN_COUNT, allowed_rank, check_batch, few_move, middle_mean
from gems_flwr.typing import Float

# Powers of two that an input can be shown to be below, from the least on.
LEAST_POWER, POWERS = -43, 64
# Bits of the rings: on validation data some more or fewer made no difference beyond noise.
MEAN_BITS, SQUARE_BITS, SKETCH_BITS, COVARIANCE_BITS = 14, 24, 12, 20
# For the rounding of what bounds are computed from.
SLACK = 1 + 1e-3
_CHUNK = 1024
# Directions whose length is a smaller part of the longest are rounding.
_NEGLIGIBLE = 1e-6
# A feature that hardly varies is not blown up to more than ten times the others.
_FLOOR = 0.1


# --- the sections of each sum ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Standard:
    """How inputs are standardised, and how long they are then."""

    center: Float  # as nodes get them, in single precision (D,)
    scale: Float  # likewise, above 0 (D,)
    count: float  # samples in all, of which squares are known
    squares: Float  # at least the sum over all of each squared standardised feature (D,)

    @property
    def trace(self) -> float:
        """At least the sum of the squared lengths of all standardised inputs."""
        return float(self.squares.sum())


def _count_section(classes: int) -> Section:
    return Section("counts", (classes,), float(MAX_EXAMPLES), 64)


def scale_sections(classes: int, nodes: int) -> list[Section]:
    """Return the sections of the first sum, for a number of nodes."""
    bits = 16 if nodes < 2**14 else 32
    powers, guarded = Section("powers", (POWERS,), 1.0, bits), Section("guarded", (), 1.0, bits)
    return [_count_section(classes), powers, guarded]


def mean_sections(counts: Float, features: int, largest: float) -> list[Section]:
    """Return the sections of the second sum; inputs are at most `largest`.

    `counts` (C,) are the samples of each class in all; a class without any has no section.
    """
    total = float(counts.sum())
    sums = [
        Section(f"sums-{label}", (features,), float(counts[label]) * largest, MEAN_BITS, True)
        for label in np.flatnonzero(counts > 0)
    ]
    pooled = [
        Section("sum", (features,), total * largest, SQUARE_BITS, True),
        Section("squares", (features,), total * largest**2, SQUARE_BITS, True),
    ]
    return [_count_section(len(counts)), *pooled, *sums]


def sketch_sections(standard: Standard, columns: int) -> list[Section]:
    """Return the sections of the third sum; columns have length 1 at most.

    Over all samples, ``sum |z_f| |z . v|`` is at most the root of ``sum z_f^2`` times that of
    ``sum (z . v)^2``, and the latter is at most the sum of all squares.
    """
    bound = math.sqrt(float(standard.squares.max()) * standard.trace) * SLACK
    return [Section("sketch", (len(standard.scale), columns), bound, SKETCH_BITS, True)]


def covariance_sections(
    counts: Float, standard: Standard, lengths: Float, least: int = 1
) -> list[Section]:
    """Return the sections of the fourth sum, for a basis whose rows have `lengths` (r,).

    A class has sections if it has at least `least` samples in all.
    """
    rank = len(lengths)
    # A class's own squares are no more than those of all, nor than its samples can have.
    second = standard.trace * float(lengths.max()) ** 2 * SLACK
    sections = [_count_section(len(counts))]
    for label in np.flatnonzero(counts >= least):
        first, half = math.sqrt(float(counts[label]) * second), rank * (rank + 1) // 2
        sections += [
            Section(f"first-{label}", (rank,), first, COVARIANCE_BITS, True),
            Section(f"second-{label}", (half,), second, COVARIANCE_BITS, True),
        ]
    return sections


# --- the node's side ------------------------------------------------------------------------------


def large_enough(samples: Samples, least: int, totals: Sequence[int] = ()) -> Samples:
    """Return the samples of classes with at least so many, and a total above 0 if it is known."""
    labels = samples.labels.long()
    if not len(labels):
        return samples
    enough = torch.bincount(labels, minlength=len(totals)) >= least
    if totals:
        known = torch.zeros(len(enough), dtype=torch.bool)
        known[: len(totals)] = torch.tensor(totals) > 0
        enough &= known
    keep = enough[labels]
    return Samples(samples.inputs[keep], samples.labels[keep])


def countable(samples: Samples, classes: int) -> Samples:
    """Return the samples of known classes, inputs within what sums hold; no number counts as 0."""
    labels, inputs = samples.labels.long(), samples.inputs
    if not bool(torch.isfinite(inputs).all()):
        log_warning("not_finite", reason="of inputs that are no numbers NaN counts as 0")
    known = (labels >= 0) & (labels < classes)
    inputs = inputs[known].nan_to_num(0.0).clamp(-MAX_WEIGHT, MAX_WEIGHT)
    return Samples(inputs, samples.labels[known])


def without_rare(samples: Samples) -> Samples:
    """Return samples in which features that few of a class move have the value of the others."""
    inputs = samples.inputs.clone()
    for label in torch.unique(samples.labels):
        mine = samples.labels == label
        own = inputs[mine]
        inputs[mine] = torch.where(few_move(own), middle_mean(own), own)
    return Samples(inputs, samples.labels)


def scale_sums(samples: Samples, classes: int, *, guarded: bool = False) -> dict[str, Float]:
    """Return a node's summand of *scale*; refuses inputs that no node can have.

    With `guarded` the node shows no more directions than the samples in a sum allow.
    """
    check_batch(samples.inputs, samples.labels, classes)
    largest = float(samples.inputs.abs().max()) if len(samples) else 0.0
    if largest > MAX_WEIGHT:
        raise SpaceError("inputs", f"values up to {MAX_WEIGHT:g}", largest)
    powers = np.zeros(POWERS)
    if len(samples):
        # The least power of two that is no smaller, within those that can be shown.
        mantissa, power = math.frexp(max(largest, 2.0**LEAST_POWER))
        powers[power - (mantissa == 0.5) - LEAST_POWER] = 1
    return {"counts": _counts(samples, classes), "powers": powers, "guarded": np.array(+guarded)}


def directions_shown(counts: Float, features: int) -> int:
    """Return in how many directions the covariances of classes of so many samples are shown.

    As many as all classes allow but rare ones, which have a twentieth of the samples together:
    these are shown by their means alone.
    """
    order = np.argsort(counts)
    rare = np.cumsum(counts[order]) <= counts.sum() / 20
    return max(1, allowed_rank(int(counts[order[~rare]][0]), features))


def largest_of(powers: Float) -> float:
    """Return what no input of any node exceeds."""
    shown = np.flatnonzero(np.rint(powers) > 0)
    return 2.0 ** (LEAST_POWER + (int(shown[-1]) if len(shown) else 0))


def mean_sums(samples: Samples, classes: int, device: str = "cpu") -> dict[str, Float]:
    """Return a node's summand of *means*, with all classes; computed on a device in chunks."""
    features = samples.inputs.shape[1]
    sums, squares = np.zeros((classes, features)), np.zeros(features)
    for inputs, labels in chunks(samples, exact_device(device)):
        squares += inputs.square().sum(dim=0).cpu().numpy()
        for label in torch.unique(labels).tolist():
            sums[label] += inputs[labels == label].sum(dim=0).cpu().numpy()
    pooled = {"sum": sums.sum(axis=0), "squares": squares}
    by_class = {f"sums-{label}": sums[label] for label in range(classes)}
    return {"counts": _counts(samples, classes), **pooled, **by_class}


def sketch_sums(
    samples: Samples, center: Float, scale: Float, columns: Float, device: str = "cpu"
) -> dict[str, Float]:
    """Return a node's summand of *sketch*, for columns of shape (D, k)."""
    vectors = torch.from_numpy(columns).to(exact_device(device))
    total = torch.zeros_like(vectors, dtype=torch.float64)
    for inputs, _ in chunks(samples, vectors.device, scale, center):
        total += inputs.T @ (inputs @ vectors)
    return {"sketch": total.cpu().numpy()}


def covariance_sums(
    samples: Samples,
    classes: int,
    center: Float,
    scale: Float,
    basis: Float,
    device: str = "cpu",
) -> dict[str, Float]:
    """Return a node's summand of *covariances*, for a basis of shape (r, D), with all classes."""
    rank, vectors = len(basis), torch.from_numpy(basis).to(exact_device(device))
    first, second = np.zeros((classes, rank)), np.zeros((classes, rank, rank))
    for inputs, labels in chunks(samples, vectors.device, scale, center):
        along = inputs @ vectors.T
        for label in torch.unique(labels).tolist():
            mine = along[labels == label]
            first[label] += mine.sum(dim=0).cpu().numpy()
            second[label] += (mine.T @ mine).cpu().numpy()
    firsts = {f"first-{label}": own for label, own in enumerate(first)}
    seconds = {f"second-{label}": own for label, own in enumerate(upper_half(second))}
    return {"counts": _counts(samples, classes), **firsts, **seconds}


def random_columns(features: int, count: int, seed: int) -> Float:
    """Return random signs over the root of D, (D, count): columns of length 1 from a seed.

    From the raw words of PCG64, which are the same in every version of NumPy.
    """
    words = np.random.PCG64(seed).random_raw((features * count + 63) // 64)
    bits = np.unpackbits(np.asarray(words, dtype="<u8").view(np.uint8))[: features * count]
    return np.asarray((2.0 * bits.reshape(features, count) - 1) / math.sqrt(features))


def _counts(samples: Samples, classes: int) -> Float:
    labels = samples.labels.long().cpu()
    return np.asarray(torch.bincount(labels, minlength=classes).numpy(), dtype=np.float64)


def chunks(
    samples: Samples,
    device: torch.device,
    scale: Float | None = None,
    center: Float | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs, centred and divided by a scale if there is one, and classes, in doubles.

    Some at a time go to the device, which has to compute in double precision.
    """
    for start in range(0, len(samples), _CHUNK):
        rows = slice(start, start + _CHUNK)
        inputs = samples.inputs[rows].detach().to(device).double()
        if center is not None:
            inputs = inputs - torch.from_numpy(center).to(device)
        if scale is not None:
            inputs = inputs / torch.from_numpy(scale).to(device)
        yield inputs, samples.labels[rows].to(device).long()


# --- the server's side ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class PooledMeans:
    """What the second sum says of all samples."""

    counts: Float  # samples of each class (C,)
    means: Float  # zero for classes without samples (C, D)
    within: Float  # pooled variance of each feature within classes (D,)
    standard: Standard

    @property
    def shares(self) -> Float:
        """Each class's share of all samples."""
        return np.asarray(self.counts / self.counts.sum())

    @property
    def weighted(self) -> Float:
        """Class means as the nodes see them, times the roots of their shares."""
        there = (self.counts > 0)[:, None]
        means = (self.means - self.standard.center) / self.standard.scale
        return np.asarray(np.sqrt(self.shares)[:, None] * np.where(there, means, 0.0))


def pooled_means(values: Mapping[str, Float], errors: Mapping[str, float]) -> PooledMeans:
    """Return what the totals of *means* say; `errors` is by how much each section's may be off."""
    counts = _counted(values, "sums")
    total, features = float(counts.sum()), len(values["sum"])
    if total < 1:
        raise SpaceError("counts", "at least one sample", total)
    means = np.zeros((len(counts), features))
    for label in np.flatnonzero(counts > 0):
        means[label] = values[f"sums-{label}"] / counts[label]
    center = _single(values["sum"] / total)
    variance = values["squares"] / total - (values["sum"] / total) ** 2
    between = (counts / total) @ np.where((counts > 0)[:, None], means - center, 0) ** 2
    within = np.maximum(variance - between, 0)
    typical = float(np.sqrt(within.mean()))
    scale = _single(np.maximum(np.sqrt(within), _FLOOR * typical if typical > 0 else 1.0))
    off = errors["squares"] + 2 * np.abs(center) * errors["sum"]
    squares = values["squares"] - 2 * center * values["sum"] + total * center**2 + off
    standard = Standard(center, scale, total, np.maximum(squares, off) / scale**2)
    return PooledMeans(counts, means, within, standard)


def _counted(values: Mapping[str, Float], section: str) -> Float:
    """Return the samples of each class; none of classes that have no such section."""
    there = np.array([f"{section}-{label}" in values for label in range(len(values["counts"]))])
    return np.where(there, np.maximum(np.rint(values["counts"]), 0), 0.0)


def mean_columns(pooled: PooledMeans) -> QuantizedArray:
    """Return directions of length 1 at most that span the class means' differences, as rows.

    In eight bits: nodes and server use the rounded ones alike.
    """
    return _unit_rows(_mean_directions(pooled).T)


def _unit_rows(rows: Float) -> QuantizedArray:
    """Return rows in eight bits, none longer than 1."""
    rounded = quantize(rows, axis=1)
    lengths = np.linalg.norm(rounded.dense().astype(np.float64), axis=1, keepdims=True)
    scales = rounded.scales / np.maximum(lengths, 1e-30) * (1 - 1e-6)
    return QuantizedArray(rounded.codes, scales.astype(np.float32))


def sketch_columns(rows: Float, random: int, seed: int) -> Float:
    """Return all columns of a sketch, (D, k): directions of the means, and random ones."""
    return np.concatenate([rows.T, random_columns(rows.shape[1], random, seed)], axis=1)


def find_basis(
    pooled: PooledMeans, columns: Float, sketch: Float, most: int | None = None
) -> QuantizedArray:
    """Return the basis, as rows of length 1: the means' directions and the covariance's.

    `sketch` (D, k) is ``sum z (z . v)`` over all samples for the `columns` v (D, k). At most `most`
    directions; those of the means come first.
    """
    # What the means make of the columns is known; the rest is the covariance within classes.
    within = sketch / pooled.standard.count - pooled.weighted.T @ (pooled.weighted @ columns)
    joined = np.concatenate([_mean_directions(pooled), _spanned(within)], axis=1)[:, :most]
    return _unit_rows(_spanned(joined).T)


def cone_from_totals(
    values: Mapping[str, Float],
    pooled: PooledMeans,
    basis: Float,
    min_count: int = MIN_COUNT,
    epsilon: float = 0.5,
) -> ClassMomentCone:
    """Return the cone of all nodes from the totals of *covariances* in a basis (r, D)."""
    counts = _counted(values, "second")
    rank, scale = len(basis), pooled.standard.scale
    # The basis as it was rounded is only nearly orthonormal: U^T = Q R.
    orthonormal, triangle = np.linalg.qr(basis.T)
    inverse = np.linalg.inv(triangle)
    inside, factors = np.zeros((rank, rank)), {}
    for label in np.flatnonzero(counts > 0):
        mean = values[f"first-{label}"] / counts[label]
        second = symmetric(values[f"second-{label}"][None] / counts[label], rank)[0]
        sizes, vectors = np.linalg.eigh(inverse.T @ (second - np.outer(mean, mean)) @ inverse)
        vectors = vectors * np.sqrt(np.maximum(sizes, 0))
        inside += counts[label] / counts.sum() * (vectors @ vectors.T)
        if counts[label] >= min_count:
            factors[int(label)] = orthonormal @ vectors * scale[:, None]
    along = np.einsum("ij,jk,ik->i", orthonormal, inside, orthonormal) * scale**2
    outside = np.sqrt(np.maximum(pooled.within - along, 0)).astype(np.float32)
    labels = np.flatnonzero(pooled.counts > 0)
    own = None
    if factors:
        stacked = np.stack([factors[label] for label in sorted(factors)]).astype(np.float32)
        own = LowRankCovariance(stacked, np.tile(outside, (len(factors), 1)))
    lacking = ~np.isin(labels, list(factors))
    return ClassMomentCone(
        num_classes=len(pooled.counts),
        labels=labels,
        counts=pooled.counts[labels].astype(np.int64),
        means=pooled.means[labels].astype(np.float32),
        covariance=partial_covariance(own, lacking, len(outside)),
        epsilon=epsilon,
    )


def _mean_directions(pooled: PooledMeans) -> Float:
    """Return orthonormal columns in which the class means differ, at least one."""
    # Their weighted mean is zero, up to rounding: one direction fewer than classes.
    most = max(1, int((pooled.counts > 0).sum()) - 1)
    return _spanned(pooled.weighted.T)[:, :most]


def _spanned(columns: Float) -> Float:
    """Return orthonormal columns that span what columns do, but for rounding."""
    vectors, sizes, _ = np.linalg.svd(columns, full_matrices=False)
    if not sizes[0] > 0:
        return np.eye(len(columns), 1)
    return np.asarray(vectors[:, sizes > _NEGLIGIBLE * sizes[0]])


def _single(values: Float) -> Float:
    return values.astype(np.float32).astype(np.float64)
