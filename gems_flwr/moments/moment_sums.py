"""What nodes add up so that all of them together have class moments in a few directions.

Four sums, each of which needs the totals before it:

1. *scale*: how many samples each class has, and which power of two no input exceeds (a count of
   nodes for each power, so that the largest is known and nobody's own), and how many nodes
   show no more directions than the samples in a sum allow;
2. *means*: the sum of the inputs of each class, and pooled sums and squares. From here on inputs
   are standardised, ``z = (x - center) / scale``;
3. *sketch*: ``sum z (z . v)`` for some columns v: what the pooled covariance makes of the
   directions in which the class means differ, and of random ones (Halko, Martinsson and Tropp
   2011). The former are a block Krylov space of the means, in which the layer of Fisher's
   discriminant nearly lies already (as in partial least squares);
4. *covariances*: sums and outer products of each class in a basis of these directions.

Every sum has a bound that follows from earlier totals (by Cauchy-Schwarz, where inputs are
multiplied), so the rings of `gems_flwr.secure.fixed_point` need room for one bound, not for one of
each node, and small ones suffice. This module has the node's side and the sections; what is made
of the totals stands in `gems_flwr.moments.cone_from_totals`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from gems_flwr.bounds import MAX_EXAMPLES, MAX_WEIGHT
from gems_flwr.devices import exact_device
from gems_flwr.errors import SpaceError
from gems_flwr.moments.automatic_rank import allowed_rank
from gems_flwr.moments.class_sums import check_batch
from gems_flwr.samples import Samples
from gems_flwr.secure.fixed_point import Section
from gems_flwr.typing import Float

# Powers of two that an input can be told to be below, from the least on.
LEAST_POWER, POWERS = -43, 64
# Bits of the rings: on validation data some more or fewer made no difference beyond noise.
MEAN_BITS, SQUARE_BITS, SKETCH_BITS, COVARIANCE_BITS = 14, 24, 12, 20
_COUNT_BITS = 64
# For the rounding of what bounds are computed from.
_SLACK = 1 + 1e-3
_CHUNK = 4096


@dataclasses.dataclass(frozen=True, eq=False)
class Standard:
    """How inputs are standardised, and how long they are then.

    Parameters
    ----------
    center, scale : array of shape (D,)
        As nodes get them: in single precision; scales are above 0.
    count : float
        Samples in all, of which squares are known.
    squares : array of shape (D,)
        At least the sum of the squares of each standardised feature over all of them.
    """

    center: Float
    scale: Float
    count: float
    squares: Float

    @property
    def trace(self) -> float:
        """At least the sum of the squared lengths of all standardised inputs."""
        return float(self.squares.sum())


# --- sections -----------------------------------------------------------------------------------


def count_section(classes: int, name: str = "counts") -> Section:
    """Return how many samples of each class there are, as a section."""
    return Section(name, (classes,), float(MAX_EXAMPLES), _COUNT_BITS)


def scale_sections(classes: int, nodes: int) -> list[Section]:
    """Return the sections of the first sum, for a number of nodes."""
    bits = 16 if nodes < 2**14 else 32
    return [
        count_section(classes),
        Section("powers", (POWERS,), 1.0, bits),
        Section("guarded", (), 1.0, bits),
    ]


def mean_sections(counts: Float, features: int, largest: float) -> list[Section]:
    """Return the sections of the second sum.

    Parameters
    ----------
    counts : array of shape (C,)
        Samples of each class in all; a class without any has no section.
    features : int
        D.
    largest : float
        No input is larger.
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
    return [count_section(len(counts)), *pooled, *sums]


def sketch_sections(standard: Standard, columns: int) -> list[Section]:
    """Return the sections of the third sum; columns have length 1 at most.

    Over all samples, ``sum |z_f| |z . v|`` is at most the root of ``sum z_f^2`` times that of
    ``sum (z . v)^2``, and the latter is at most the sum of all squares.
    """
    features = len(standard.scale)
    bound = math.sqrt(float(standard.squares.max()) * standard.trace) * _SLACK
    return [Section("sketch", (features, columns), bound, SKETCH_BITS, True)]


def covariance_sections(
    counts: Float, standard: Standard, lengths: Float, least: int = 1
) -> list[Section]:
    """Return the sections of the fourth sum.

    Parameters
    ----------
    counts : array of shape (C,)
        As in `mean_sections`.
    standard : Standard
        How inputs are standardised.
    lengths : array of shape (r,)
        Of the rows of the basis.
    least : int
        Fewest samples in all of a class that has sections, at least 1.
    """
    rank, longest = len(lengths), float(lengths.max())
    # A class's own squares are no more than those of all, nor than its samples can have.
    second = standard.trace * longest**2 * _SLACK
    sections = [count_section(len(counts))]
    for label in np.flatnonzero(counts >= least):
        first = math.sqrt(float(counts[label]) * second)
        half = rank * (rank + 1) // 2
        sections += [
            Section(f"first-{label}", (rank,), first, COVARIANCE_BITS, True),
            Section(f"second-{label}", (half,), second, COVARIANCE_BITS, True),
        ]
    return sections


# --- the node's side ----------------------------------------------------------------------------


def samples_for(directions: int, features: int) -> int:
    """Return how many samples a class must have for so many directions of its covariance."""
    count = 1
    while allowed_rank(count, features) < directions:
        count += 1
    return count


def large_enough(samples: Samples, least: int, totals: Sequence[int] = ()) -> Samples:
    """Return the samples of the classes that have at least so many, and are not left out by all."""
    labels = samples.labels.long()
    if not len(labels):
        return samples
    counts = torch.bincount(labels, minlength=len(totals))
    enough = counts >= least
    if totals:
        known = torch.zeros(len(counts), dtype=torch.bool)
        known[: len(totals)] = torch.tensor(totals) > 0
        enough &= known
    keep = enough[labels]
    return Samples(samples.inputs[keep], samples.labels[keep])


def scale_sums(samples: Samples, classes: int, *, guarded: bool = False) -> dict[str, Float]:
    """Return a node's summand of *scale*.

    Parameters
    ----------
    samples : Samples
        The node's.
    classes : int
        Of the task.
    guarded : bool
        Whether the node shows no more directions than the samples in a sum allow.

    Raises
    ------
    SpaceError
        If an input is not finite or larger than any can be, or a label is of no class.
    """
    check_batch(samples.inputs, samples.labels, classes)
    largest = float(samples.inputs.abs().max()) if len(samples) else 0.0
    if largest > MAX_WEIGHT:
        raise SpaceError("inputs", f"values up to {MAX_WEIGHT:g}", largest)
    powers = np.zeros(POWERS)
    if len(samples):
        powers[_power(largest) - LEAST_POWER] = 1
    told = {"counts": _counts(samples, classes), "powers": powers}
    return {**told, "guarded": np.array(float(guarded))}


def directions_shown(counts: Float, features: int) -> int:
    """Return in how many directions the covariances of classes of so many samples may be told.

    As many as all classes allow but those that have a twentieth of the samples together: rare ones
    are told by their means alone.

    Parameters
    ----------
    counts : array of shape (C,)
        Samples of each class in all.
    features : int
        D.
    """
    order = np.argsort(counts)
    rare = np.cumsum(counts[order]) <= counts.sum() / 20
    return max(1, allowed_rank(int(counts[order[~rare]][0]), features))


def largest_of(powers: Float) -> float:
    """Return what no input of any node exceeds."""
    told = np.flatnonzero(np.rint(powers) > 0)
    return 2.0 ** (LEAST_POWER + (int(told[-1]) if len(told) else 0))


def mean_sums(
    samples: Samples, classes: int, device: str | torch.device = "cpu"
) -> dict[str, Float]:
    """Return a node's summand of *means*, with all classes; computed on a device in chunks."""
    features = samples.inputs.shape[1]
    sums, squares = np.zeros((classes, features)), np.zeros(features)
    for inputs, labels in _chunks(samples, device):
        squares += inputs.square().sum(dim=0).cpu().numpy()
        for label in torch.unique(labels).tolist():
            sums[label] += inputs[labels == label].sum(dim=0).cpu().numpy()
    by_class = {f"sums-{label}": sums[label] for label in range(classes)}
    pooled = {"sum": sums.sum(axis=0), "squares": squares}
    return {"counts": _counts(samples, classes), **pooled, **by_class}


def sketch_sums(
    samples: Samples,
    center: Float,
    scale: Float,
    columns: Float,
    device: str | torch.device = "cpu",
) -> dict[str, Float]:
    """Return a node's summand of *sketch*, for columns of shape (D, k)."""
    vectors = torch.from_numpy(columns).to(exact_device(device))
    total = torch.zeros_like(vectors, dtype=torch.float64)
    for inputs, _ in _chunks(samples, device, center, scale):
        total += inputs.T @ (inputs @ vectors)
    return {"sketch": total.cpu().numpy()}


def covariance_sums(
    samples: Samples,
    classes: int,
    center: Float,
    scale: Float,
    basis: Float,
    device: str | torch.device = "cpu",
) -> dict[str, Float]:
    """Return a node's summand of *covariances*, for a basis of shape (r, D), with all classes."""
    rank, vectors = len(basis), torch.from_numpy(basis).to(exact_device(device))
    first = torch.zeros(classes, rank, dtype=torch.float64)
    second = torch.zeros(classes, rank, rank, dtype=torch.float64)
    for inputs, labels in _chunks(samples, device, center, scale):
        along = inputs @ vectors.T
        for label in torch.unique(labels).tolist():
            mine = along[labels == label]
            first[label] += mine.sum(dim=0).cpu()
            second[label] += (mine.T @ mine).cpu()
    rows, columns = np.triu_indices(rank)
    firsts = {f"first-{label}": first[label].numpy() for label in range(classes)}
    halves = {f"second-{label}": second[label].numpy()[rows, columns] for label in range(classes)}
    return {"counts": _counts(samples, classes), **firsts, **halves}


def asked_for(values: Mapping[str, Float], sections: Mapping[str, object]) -> dict[str, Float]:
    """Return the arrays that have a section; of a class that is too small for one, nothing."""
    return {name: array for name, array in values.items() if name in sections}


def random_columns(features: int, count: int, seed: int) -> Float:
    """Return random signs over the root of D, (D, count): columns of length 1 from a seed.

    From the raw words of PCG64, which are the same in every version of NumPy.
    """
    words = np.random.PCG64(seed).random_raw((features * count + 63) // 64)
    bits = np.unpackbits(np.asarray(words, dtype="<u8").view(np.uint8))[: features * count]
    signs = 2.0 * bits.reshape(features, count) - 1
    return np.asarray(signs / math.sqrt(features))


def _power(largest: float) -> int:
    """Return the least power of two, within those that are told, that is no smaller."""
    if largest <= 2.0**LEAST_POWER:
        return LEAST_POWER
    mantissa, power = math.frexp(largest)
    return power - 1 if mantissa == 0.5 else power


def _counts(samples: Samples, classes: int) -> Float:
    labels = samples.labels.long().cpu()
    return np.asarray(torch.bincount(labels, minlength=classes).numpy(), dtype=np.float64)


def _chunks(
    samples: Samples,
    device: str | torch.device,
    center: Float | None = None,
    scale: Float | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs, standardised if told how, and classes, in double precision."""
    where = exact_device(device)
    for start in range(0, len(samples), _CHUNK):
        rows = slice(start, start + _CHUNK)
        inputs = samples.inputs[rows].detach().to(where).double()
        if center is not None and scale is not None:
            inputs = (inputs - torch.from_numpy(center).to(where)) / torch.from_numpy(scale).to(
                where
            )
        yield inputs, samples.labels[rows].to(where).long()
