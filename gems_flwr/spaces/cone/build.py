"""From the inputs of a linear layer to its class-moment cone: the node's side.

Moments come from the *training* inputs, as they depend on no trained model. How much of a class is
shown is up to `gems_flwr.spaces.cone.rules`.

**A covariance in few numbers** is ``Sigma ~ F F^T + diag(d)``: F are the top-r eigenvectors times
the roots of their eigenvalues, and d is the diagonal of the residual R times
``|R|_F^2 / |diag R|_F^2``: leaving its off-diagonal away understates the spread along directions
that correlated features share, and the factor makes up for it on average. With int8 deviations are
rounded up, for the same reason. Of fewer samples than features only the Gram matrix is made.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse.linalg import eigsh
from torch import Tensor

from gems_flwr.devices import exact_device
from gems_flwr.errors import SpaceError
from gems_flwr.spaces.cone.cone import ClassMomentCone
from gems_flwr.spaces.cone.covariance import (
    DEAD,
    ERROR_SHARE,
    LEVELS,
    MEAN_STEP,
    MOST_COMMON,
    MOST_OWN,
    ROW_STEP,
    CommonCovariance,
    FullCovariance,
    LowRankCovariance,
    Own,
    QuantizedArray,
    Values,
    axes,
    partial_covariance,
    quantize,
    rounded,
    stretched,
)
from gems_flwr.spaces.cone.private import ClassSums, PrivateRelease, private_sums
from gems_flwr.spaces.cone.rules import (
    SMOOTHING,
    WHITE_PUSHES,
    MeanRule,
    allowed_rank,
    check_batch,
    coarseness,
    directions_of_mean,
    few_move,
    least_count,
    mean_step,
    middle_mean,
    smallest_count,
    whole_count,
)
from gems_flwr.typing import Float, Rank

Flags = NDArray[np.bool_]
Part = tuple[Float, Tensor, Float]  # as `Components.centered` returns it
# Least deviation beside the directions of a covariance, relative to a feature's own.
_LEAST_LEFT = 0.02
# How far above those of noise the eigenvalues of directions must be that are shown.
NOISE = 1.5


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
    """Return the class-moment cone of a node's data; a SpaceError if no class has enough samples.

    Parameters
    ----------
    inputs, labels : tensors of shape (n, D) and (n,)
        Inputs of the linear layer (of a plain logistic model, the data itself) and true classes.
    num_classes : int
        Classes of the task.
    rank, int8, clusters, epsilon
        As in `Cone`. With noise for differential privacy moments are full.
    min_count : int, optional
        Fewest samples of a component for a covariance, from 1; by default that of `least_count`,
        with noise four deviations of it. Smaller classes go as count and mean.
    private : PrivateRelease, optional
        Add noise for differential privacy; small classes are withheld then.
    seed : int
        Seed of clustering.
    noise_seed : int, optional
        Seed of the noise, for simulations: whoever knows it can subtract the noise. Without it
        noise comes from the operating system's cryptographic generator.
    largest_rank : int, optional
        Most columns that ``"auto"`` comes to, at least 1.
    mean_rule : MeanRule, optional
        How much is sent of the means of small classes; with ``"auto"`` never all of it.
    device : str or torch.device, optional
        Where to compute, one component at a time; by default where the inputs are.

    Examples
    --------
    >>> import torch
    >>> from gems_flwr.spaces.cone import build_cone
    >>> cone = build_cone(torch.randn(200, 3), torch.arange(200) % 2, num_classes=2)
    >>> cone.num_classes, cone.num_features
    (2, 3)
    """
    where = exact_device(inputs.device if device is None else device)
    if private is not None:
        if clusters > 1:
            raise SpaceError("clusters", "1 with a private release", clusters)
        sums = private_sums(inputs, labels.long(), num_classes, private, noise_seed, where)
        least = max(1, math.ceil(4 * private.noise) if min_count is None else min_count)
        return _cone_from_sums(sums, least, epsilon)
    if isinstance(rank, int) and rank < 1:
        raise SpaceError("rank", "at least 1", rank)
    if not len(labels):
        raise SpaceError("inputs", "at least one sample", 0)
    for part in torch.split(inputs, 8192):
        check_batch(part, labels, num_classes)
    least, features = least_count(rank, inputs.shape[1], min_count), inputs.shape[1]
    groups = None
    if clusters > 1:
        groups = cluster_classes(inputs, labels.long(), clusters, least, seed, where)
    components = Components.of(inputs, labels.long(), groups, where, guards=rank == "auto")
    counts, rule = components.counts, mean_rule or MeanRule()
    keep, is_full = counts >= max(1, least), rank == "full"
    if rank == "auto":
        sent, rule = counts >= max(1, rule.least), dataclasses.replace(rule, exact=False)
        if counts[sent].sum() - sent.sum() + 1 >= smallest_count(features):
            own_at_least = max(least, features)
            stored, common = components.common(sent, own_at_least, largest_rank)
            about = num_classes, components.labels, counts, sent, stored, common
            return _cone(*about, np.zeros_like(sent), epsilon)
        keep = np.zeros_like(keep)
    shown, small = components.small_means(keep, rule)
    _check_any_sent(keep | shown, counts, least)
    means = np.zeros((len(counts), features))
    own: Own | None = None
    if keep.any() and is_full:
        means[keep], own = components.full(keep)
    elif keep.any():
        assert isinstance(rank, int)
        means[keep], own = components.factored(keep, rank, int8)
    means[shown] = small
    sent, eight = keep | shown, int8 and not is_full
    values = quantize(means[sent], axis=1) if eight else means[sent].astype(np.float32)
    return _cone(num_classes, components.labels, counts, sent, values, own, shown, epsilon)


def _cone_from_sums(sums: ClassSums, min_count: int, epsilon: float) -> ClassMomentCone:
    """Return the cone of noisy class sums; smaller components are withheld."""
    counts = np.rint(sums.counts).astype(np.int64)
    sent = counts >= min_count
    _check_any_sent(sent, counts, min_count)
    means, covariances = (moments[sent].astype(np.float32) for moments in sums.moments())
    about = sums.num_classes, sums.labels, np.maximum(counts, 0), sent, means
    cone = _cone(*about, FullCovariance(covariances), np.zeros_like(sent), epsilon)
    return dataclasses.replace(cone, privacy=sums.privacy)


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
    """Return a cone of counts and means alone; a SpaceError if no class has enough samples.

    FedCOF estimates covariances from the spread of class means over nodes. The spread of the means
    of random groups of a class on one node says as much, and no sample is in two groups.

    Parameters
    ----------
    inputs, labels, num_classes, int8
        As in `build_cone`.
    groups : int
        Random groups of each class at most, from 1; fewer where they would be too small for the
        rule to show all of a mean.
    rule : MeanRule, optional
        Fewest samples of a mean, and how much of it is shown.
    seed : int
        Of the groups.
    """
    rule, classes = rule or MeanRule(), labels.cpu().long()
    check_batch(inputs, labels, num_classes)
    smallest = whole_count(inputs.shape[1], rule)
    generator = torch.Generator().manual_seed(seed % 2**63)
    parts = torch.zeros_like(classes)
    for label in torch.unique(classes).tolist():
        mine = torch.nonzero(classes == label).flatten()
        order = torch.randperm(len(mine), generator=generator).numpy()
        count = max(1, min(groups, len(mine) // smallest))
        for number, part in enumerate(np.array_split(order, count)):
            parts[mine[part]] = number
    components = Components.of(inputs, classes, parts, torch.device("cpu"), not rule.exact)
    counts = components.counts
    shown, small = components.small_means(np.zeros(len(counts), dtype=bool), rule)
    if not shown.any():
        expected = f"a class with enough samples to show a mean, at least {smallest}"
        most = int(torch.bincount(classes).max()) if shown.size else 0
        raise SpaceError("counts", expected, most)
    means = quantize(small, axis=1) if int8 else small.astype(np.float32)
    return _cone(num_classes, components.labels, counts, shown, means, None, shown, 0.5)


def _cone(
    num_classes: int,
    labels: NDArray[np.int64],
    counts: NDArray[np.int64],
    sent: Flags,
    means: Values,
    own: Own | CommonCovariance | None,
    shown: Flags,
    epsilon: float,
) -> ClassMomentCone:
    """Return the cone of the components that are `sent`, those `shown` as means alone."""
    return ClassMomentCone(
        num_classes=num_classes,
        labels=labels[sent],
        counts=counts[sent],
        means=means,
        covariance=own
        if isinstance(own, CommonCovariance)
        else partial_covariance(own, shown[sent], means.shape[1]),
        epsilon=epsilon,
        total_count=int(counts.sum()),
        withheld=tuple(sorted(set(labels[~sent].tolist()) - set(labels[sent].tolist()))),
        withheld_count=int(counts[~sent].sum()),
    )


def _check_any_sent(sent: Flags, counts: NDArray[np.int64], least: int) -> None:
    if not sent.any():
        expected = (
            f"a class with at least {least} samples (fewer would show too much of each one: "
            "bring more data, or ask with noise, Cone(dp_epsilon=…))"
        )
        raise SpaceError("counts", expected, f"at most {int(counts.max(initial=0))}")


# --- samples by component -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Components:
    """Samples by component: of a class, or of a cluster of it."""

    inputs: Tensor  # all samples (n, D), on any device
    labels: NDArray[np.int64]  # class of each component, rising
    rows: tuple[Tensor, ...]  # positions of the samples of each
    device: torch.device  # where to compute; the samples of one component go there at a time
    guards: bool = False  # whether features that few samples move are hidden, as "auto" does

    @classmethod
    def of(
        cls,
        inputs: Tensor,
        labels: Tensor,
        groups: Tensor | None,
        device: torch.device,
        guards: bool = False,
    ) -> Components:
        """Sort samples by class, and by their cluster (n,) within it if there are any."""
        part = torch.zeros_like(labels) if groups is None else groups.to(labels)
        keys = torch.unique(torch.stack([labels, part]), dim=1).T.tolist()
        rows = tuple(torch.nonzero((labels == c) & (part == g)).flatten() for c, g in keys)
        classes = np.array([label for label, _ in keys], dtype=np.int64)
        return cls(inputs, classes, rows, device, guards)

    @property
    def counts(self) -> NDArray[np.int64]:
        """Samples of each component."""
        return np.array([len(rows) for rows in self.rows], dtype=np.int64)

    def centered(self, component: int) -> Part:
        """Return mean (D,) of a component, its samples around it, variances (D,) to add to theirs.

        All in double precision. Where features are guarded, samples do not vary in those that few
        of them move.
        """
        samples = self.inputs[self.rows[component]].to(self.device).double()
        mean, added = samples.mean(dim=0), np.zeros(samples.shape[1])
        around = samples - mean
        if self.guards and (few := few_move(samples)).any():
            mean[few], around[:, few] = middle_mean(samples[:, few]), 0
            if not few.all():
                added[few.cpu().numpy()] = float(around[:, ~few].square().mean(dim=0).min())
        return np.asarray(mean.cpu().numpy()), around, added

    def full(self, keep: Flags) -> tuple[Float, FullCovariance]:
        """Return means (kept, D) and full covariances of some components."""
        places, side = np.flatnonzero(keep), self.inputs.shape[1]
        means = np.empty((len(places), side))
        matrices = np.empty((len(places), side, side), np.float32)
        for place, component in enumerate(places.tolist()):
            means[place], samples, added = self.centered(component)
            matrices[place] = (samples.T @ samples / len(samples)).cpu().numpy() + np.diag(added)
        return means, FullCovariance(matrices)

    def factored(self, keep: Flags, rank: int, int8: bool) -> tuple[Float, LowRankCovariance]:
        """Return means (kept, D) of some components, and covariances of a fixed rank as sent."""
        means, tops, deviations = [], [], []
        for component in np.flatnonzero(keep).tolist():
            mean, samples, added = self.centered(component)
            top, rest = factor_samples(samples, rank)
            means.append(mean)
            tops.append(top)
            deviations.append(np.sqrt(rest**2 + added))
        if not int8:
            arrays = (np.array(each, dtype=np.float32) for each in (tops, deviations))
            return np.array(means), LowRankCovariance(*arrays)
        eight = quantize(tops, axis=1), quantize(deviations, axis=1, round_up=True)
        return np.array(means), LowRankCovariance(*eight)

    def common(
        self, sent: Flags, own_at_least: int, largest: int | None
    ) -> tuple[QuantizedArray, CommonCovariance]:
        """Return means of some components, as sent, and the covariance that is common to them."""
        parts = [self.centered(component) for component in np.flatnonzero(sent).tolist()]
        counts, means = self.counts[sent], np.array([mean for mean, *_ in parts])
        total, features = int(counts.sum()), means.shape[1]
        shown = total - len(counts) + 1
        rank = min(allowed_rank(shown, features), MOST_COMMON)
        # Units of few samples are coarse, for how large a sample is in each feature tells it apart.
        coarse = max(1, round(8 * _step(coarseness(shown, features, rank), features, shown)))
        octaves = measured(means, parts, counts, coarse)
        units = 2.0 ** (octaves / 4)
        scale = torch.from_numpy(units)
        around = [samples / scale.to(samples) for _, samples, _ in parts]
        extra = [added / units**2 for *_, added in parts]
        most, added = largest or features, counts @ extra / total
        # The other half of the samples hides what classes show of their own.
        found = _shown_covariance(around, added, min(rank, most), shown // 2, inflated=False)
        rows, deviations = [found[0]], [found[1]]
        # The center less the means of others is a class's own: it is of classes that show all of
        # theirs, if there are any, and as coarse as that of the smallest of these.
        blurs = [coarseness(count, features, 0) for count in counts.tolist()]
        whole = [_step(b, features, n) <= 1 for b, n in zip(blurs, counts.tolist(), strict=True)]
        behind = counts * whole if any(whole) else counts
        step = _step(max(np.array(blurs)[behind > 0]), features, int(behind.sum()))
        center = (rounded(behind @ means / behind.sum() / units, step) * units).astype(np.float32)
        axis = axes(rows[0].dense().astype(np.float64))
        wide = deviations[0].dense()[0] * units
        z = stretched(axis, np.where(octaves > DEAD, means - center, 0) / wide, -0.5)
        shares, ranks, codes = np.zeros(len(counts)), [rows[0].shape[0]], []
        for place, (count, samples) in enumerate(zip(counts.tolist(), around, strict=True)):
            own = min(allowed_rank(count, features), most, MOST_OWN)
            if count >= own_at_least and own:
                shares[place] = count / (count + features)
                pair = _shown_covariance([samples], extra[place], own, count, inflated=True)
                rows.append(pair[0])
                deviations.append(pair[1])
            ranks.append(rows[-1].shape[0] if shares[place] else 0)
            step, mean = _step(coarseness(count, features, ranks[-1]), features, count), z[place]
            if step > 1 and len(counts) > 1:
                mean, step = _in_directions(z, counts, place, axis[1]), 0.0
            # What is rounded to a share of its own error takes few bytes.
            step = max(step, MEAN_STEP, ERROR_SHARE / math.sqrt(count))
            codes.append(quantize(mean[None], axis=1, least_step=step))
        about = center, octaves, shares.astype(np.float32), np.array(ranks)
        return _joined(codes), CommonCovariance(*about, _joined(rows), _joined(deviations))

    def small_means(self, keep: Flags, rule: MeanRule) -> tuple[Flags, Float]:
        """Return which components but those to keep are shown as means, and these (shown, D).

        Not those of which a step would be longer than a typical deviation.
        """
        shown, features = ~keep & (self.counts >= max(1, rule.least)), self.inputs.shape[1]
        found = []
        for component in np.flatnonzero(shown).tolist():
            mean, samples, _ = self.centered(component)
            variance = float((samples**2).mean(dim=0).sum())
            step = 0.0 if rule.exact else mean_step(len(samples), features, variance)
            shown[component] = step <= math.sqrt(variance / features)
            if shown[component]:
                found.append(rounded(mean, step))
        return shown, np.reshape(found, (-1, features))


# --- clusters of a class --------------------------------------------------------------------------


def cluster_classes(
    inputs: Tensor,
    labels: Tensor,
    clusters: int,
    min_count: int,
    seed: int,
    device: torch.device | None = None,
) -> Tensor:
    """Return for each sample its cluster within its class, so that a class is not one Gaussian.

    No cluster has fewer than `min_count` samples, whose moments would give the samples away:
    smaller ones are dissolved, smallest first, and their samples go to the nearest centre left.
    """
    groups = torch.zeros_like(labels)
    for label in torch.unique(labels).tolist():
        mine = labels == label
        # The samples of a class move to the device at once.
        points = inputs[mine].float().to(inputs.device if device is None else device)
        found, centers = k_means(points, clusters, seed + label)
        groups[mine] = _dissolve_small(points, found, centers, min_count).to(groups)
    return groups


def _dissolve_small(points: Tensor, labels: Tensor, centers: Tensor, min_count: int) -> Tensor:
    alive = list(range(len(centers)))
    while True:
        counts = torch.bincount(labels, minlength=len(centers))
        smallest = min(alive, key=lambda k: int(counts[k]))
        if int(counts[smallest]) >= min_count or len(alive) == 1:
            break
        alive.remove(smallest)
        moved = labels == smallest
        left = torch.tensor(alive, device=labels.device)
        labels = labels.clone()
        labels[moved] = left[torch.cdist(points[moved], centers[left]).argmin(dim=1)]
    return torch.searchsorted(torch.tensor(alive, device=labels.device), labels)


def k_means(
    points: Tensor, clusters: int, seed: int, rounds: int = 25, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return labels (n,) and centres (k, D) of a seeded k-means with a k-means++ start.

    Fewer clusters come back if there are fewer distinct points. `weights` (n,), all above 0, say
    how much each point counts; `rounds` limits Lloyd's steps.
    """
    generator = torch.Generator().manual_seed(seed)
    squares = (points**2).sum(dim=1)

    def distances(centers: Tensor) -> Tensor:
        # As torch.cdist does it, less the copy of all points that it makes on every call.
        if len(points) <= 25:
            return torch.cdist(points, centers) ** 2
        apart = squares[:, None] + (centers**2).sum(dim=1)
        return torch.addmm(apart, points, centers.T, alpha=-2).clamp_min_(0)

    first = torch.randint(len(points), (1,), generator=generator)
    centers = points[first.to(points.device)]
    nearest = distances(centers)[:, 0]
    while len(centers) < min(clusters, len(points)) and float(nearest.max()) > 0:
        chance = nearest if weights is None else nearest * weights
        pick = torch.multinomial(chance.double().cpu(), 1, generator=generator)
        centers = torch.cat([centers, points[pick.to(points.device)]])
        nearest = torch.minimum(nearest, distances(centers[-1:])[:, 0])
    labels = distances(centers).argmin(dim=1)
    weighted = points if weights is None else points * weights[:, None]
    for _ in range(rounds):
        totals = torch.zeros_like(centers).index_add_(0, labels, weighted)
        counts = torch.bincount(labels, weights, minlength=len(centers)).to(points)
        full = counts > 0
        means = totals / torch.where(full, counts, torch.ones_like(counts))[:, None]
        centers = torch.where(full[:, None], means, centers)
        fresh = distances(centers).argmin(dim=1)
        if bool((fresh == labels).all()):
            break
        labels = fresh
    return labels, centers


# --- low rank -------------------------------------------------------------------------------------


def top_eigenpairs(covariance: Float, rank: int) -> tuple[Float, Float, float]:
    """Return the largest eigenvalues (r,), their vectors (D, r), the sum of the other squares."""
    side = len(covariance)
    if rank == 0 or not covariance.any():
        return np.zeros(rank), np.zeros((side, rank)), float((covariance**2).sum())
    if 3 * rank >= side or side < 64:
        values, vectors = np.linalg.eigh(covariance)
        return values[-rank:], vectors[:, -rank:], float((values[:-rank] ** 2).sum())
    # Lanczos is some ten times faster than all eigenvalues; a fixed start keeps it reproducible.
    start = np.random.default_rng(0).standard_normal(side)
    values, vectors = eigsh(covariance, k=rank, v0=start)
    return values, vectors, float((covariance**2).sum() - (values**2).sum())


def factor(covariance: Float, rank: int, inflated: bool = True) -> tuple[Float, Float]:
    """Return the factor (D, r) and the residual deviations (D,) of one covariance; r from 0."""
    values, vectors, residual = top_eigenpairs(covariance, min(rank, len(covariance)))
    top = vectors * np.sqrt(np.maximum(values, 0))
    squares = float((covariance**2).sum())
    return top, _inflated(top, np.diag(covariance), residual * inflated, squares)


def factor_samples(samples: Tensor, rank: int, inflated: bool = True) -> tuple[Float, Float]:
    """Return factor (D, r) and residual deviations (D,) of the covariance of samples.

    The samples (n, D) are centred; r may be 0.
    """
    count, features = samples.shape
    if features <= count:
        covariance = (samples.T @ samples / count).cpu().numpy()
        return factor(covariance, rank, inflated)
    gram = (samples @ samples.T / count).cpu().numpy()
    _, vectors, residual = top_eigenpairs(gram, min(rank, count))
    top = np.zeros((features, rank))
    along = samples.T @ torch.from_numpy(np.array(vectors)).to(samples)
    # More columns than samples are zero.
    top[:, rank - along.shape[1] :] = along.cpu().numpy() / np.sqrt(count)
    variances = (samples**2).mean(dim=0).cpu().numpy()
    return top, _inflated(top, variances, residual * inflated, float((gram**2).sum()))


def _inflated(top: Float, variances: Float, residual: float, squares: float) -> Float:
    """Return the deviations (D,) beside a factor (D, r), for what the off-diagonal leaves out.

    `residual` and `squares` are the squares of the residual's and of the covariance's entries.
    """
    diagonal = np.maximum(variances - (top**2).sum(axis=1), 0)
    # Below rounding there is no residual to speak of, and no need to inflate.
    if residual <= 1e-13 * squares:
        return np.asarray(np.sqrt(diagonal))
    squared = max(float((diagonal**2).sum()), 1e-300)
    return np.asarray(np.sqrt(diagonal * max(1.0, residual / squared)))


# --- as it is sent --------------------------------------------------------------------------------


def measured(means: Float, parts: Sequence[Part], counts: NDArray, coarse: int) -> NDArray:
    """Return the units of features, in quarters of octaves, as multiples of so many."""
    second, fourth = (
        np.sum([(samples**power).sum(dim=0).cpu().numpy() for _, samples, _ in parts], axis=0)
        + counts @ [added ** (power // 2) for *_, added in parts]
        for power in (2, 4)
    )
    # What only differs between classes is as large as it differs.
    sizes = np.where(
        second > 0, np.sqrt(fourth / np.maximum(second, 1e-300)), np.ptp(means, axis=0)
    )
    logs = coarse * np.rint(4 * np.log2(np.maximum(sizes, 1e-300)) / coarse)
    return np.where(sizes > 0, np.clip(logs, DEAD, -DEAD), DEAD).astype(np.int64)


def _step(blur: float, features: float, count: int) -> float:
    """Return the step to which numbers are rounded whose squares sum to so many features."""
    return blur * WHITE_PUSHES * math.sqrt(features) / count


def _shown_covariance(
    parts: Sequence[Tensor], added: Float, rank: int, count: int, inflated: bool
) -> tuple[QuantizedArray, QuantizedArray]:
    """Return directions over the deviations of what they leave, and these, as sent.

    `parts` are samples around their means, `added` variances beside theirs, `count` the samples
    that decide how exactly both are shown.
    """
    features, total = parts[0].shape[1], sum(map(len, parts))
    if features <= total:
        matrix = np.sum([(part.T @ part).cpu().numpy() for part in parts], axis=0) / total
        work, variances = functools.partial(factor, matrix), np.diag(matrix)
    else:
        samples = torch.cat(list(parts))
        work = functools.partial(factor_samples, samples)
        variances = (samples**2).mean(dim=0).cpu().numpy()
    top, rest = work(rank, inflated)
    # The largest eigenvalues of mere noise (Marchenko and Pastur) are of the samples' own making.
    left = np.maximum(rest, _LEAST_LEFT * np.sqrt(variances + added) + 1e-300)
    noise = NOISE * (1 + math.sqrt(features / count)) ** 2
    rank = int(np.count_nonzero(((top.T / left) ** 2).sum(axis=1) > noise))
    top, rest = work(rank, inflated)
    blur, squares = coarseness(count, features, rank), rest**2 + added
    smooth = (count * squares + blur * SMOOTHING * squares.mean()) / (count + blur * SMOOTHING)
    step = _step(blur, float(variances.sum()), count)
    # Where directions leave nothing there is still their rounding.
    left = np.maximum(np.sqrt(smooth), _LEAST_LEFT * np.sqrt(variances + added))
    left = np.maximum(left, max(float(left.max()) / LEVELS, 1e-12))
    sent = quantize(left[None], axis=1, round_up=True, least_step=step)
    deviations = sent.dense()[0].astype(np.float64)
    step = _step(blur, float((variances / deviations**2).sum()), count)
    return quantize(top.T / deviations, axis=1, least_step=max(step, ROW_STEP)), sent


def _in_directions(z: Float, counts: NDArray[np.int64], place: int, common: Float) -> Float:
    """Return the part of a mean in some directions, so many that steps along them are not too long.

    First those in which the other classes' means differ, then those of the common covariance (r, D)
    and, of few features, these themselves: none of it depends on the class's own mean.
    """
    count, others = int(counts[place]), np.delete(z, place, 0)
    most = directions_of_mean(count, z.shape[1])
    others = np.sqrt(np.delete(counts, place))[:, None] * (others - others.mean(axis=0))
    squares, left = np.linalg.eigh(others @ others.T)
    rows = (left.T @ others)[squares > 1e-9 * squares[-1]][::-1]
    rows = np.concatenate([rows, common])
    if len(rows) < most:
        rows = np.concatenate([rows, np.eye(z.shape[1])[np.argsort(-(others**2).sum(axis=0))]])
    directions = np.linalg.qr(rows[:most].T)[0].T
    step = _step(coarseness(count, len(directions), 0), len(directions), count)
    return np.asarray(rounded(directions @ z[place], step) @ directions)


def _joined(rows: Sequence[QuantizedArray]) -> QuantizedArray:
    codes, scales = [each.codes for each in rows], [each.scales for each in rows]
    return QuantizedArray(np.concatenate(codes), np.concatenate(scales))
