"""Exact radii along rays: no search, and the whole curve r(epsilon) in one pass.

Replaces the search of Algorithm 2 (2019) and of Algorithm 1 (2018) for a linear layer.
Along ``w = c + R u`` every margin is ``m + R s``. A sample is right on one interval of R:
from the last rising margin's zero to the first falling margin's zero. The number of right
samples therefore changes at finitely many known radii, and the first radius at which fewer
than ``ceil(epsilon n)`` are right is an order statistic of those. The mean cross-entropy is
convex in R, so it crosses a loss epsilon from below once; bisection on the scores of the
directions that still matter finds it.

Decided here: samples that are wrong at the centre may become right further out, and count
(Eq. 1 counts them), so the radius is the *first* at which Q fails. Algorithm 2 may end
at a later crossing if accuracy recovers; it never ends below the first by more than its
tolerance.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gems_flwr.errors import NotGoodEnoughError
from gems_flwr.radii.layer_data import LayerData
from gems_flwr.radii.quality import Quality, class_margins, required_correct
from gems_flwr.spaces.checks import MAX_WEIGHT


@dataclasses.dataclass(frozen=True, eq=False)
class RadiusCurve:
    """Radius for every number of samples that must stay right.

    Parameters
    ----------
    radii : array of shape (n + 1,)
        ``radii[k]`` is the first radius at which fewer than k of n samples are right;
        0 for every k above the number right at the centre, infinite where nothing fails.
    """

    radii: NDArray[np.float64]

    @property
    def count(self) -> int:
        """Number of samples n."""
        return len(self.radii) - 1

    @property
    def accuracy(self) -> float:
        """Accuracy at the centre."""
        positive = np.flatnonzero(self.radii > 0)
        return float(positive.max()) / self.count

    def radius(self, epsilon: float) -> float:
        """Return the radius at which the accuracy first falls below ``epsilon``."""
        need = required_correct(epsilon, self.count)
        if need > round(self.accuracy * self.count):
            raise NotGoodEnoughError(epsilon, self.accuracy, "accuracy")
        return float(self.radii[need])

    def minimum(self, other: RadiusCurve) -> RadiusCurve:
        """Return the curve of both sets of directions together."""
        return RadiusCurve(np.minimum(self.radii, other.radii))


def right_intervals(data: LayerData, directions: Tensor) -> tuple[Tensor, Tensor]:
    """Return where each sample is right along each direction.

    Returns
    -------
    tuple of tensor
        ``start`` and ``end``, shape (p, n) each: right for start < R < end (start is
        negative if right at R = 0); start >= end if never right for R >= 0.
    """
    p, starts, ends = len(directions), [], []
    for rows in data.row_chunks(3 * p * data.num_classes):
        scores, y = data.scores(rows)
        x, _ = data.augmented(rows)
        margins = class_margins(scores, y)
        slopes = data.slopes(directions, x)
        falls = slopes - slopes[torch.arange(len(y), device=y.device), y][:, None]
        wrong = torch.nonzero(margins.amin(dim=1) <= 0)[:, 0]
        # Right at the centre: the first falling margin's zero is m / fall, the smallest of
        # which is one over the largest fall / m. The own class has fall 0 and m infinite.
        losses = falls[wrong]
        rates = falls.mul_(margins[..., None].reciprocal()).amax(dim=1)
        end = torch.where(rates > 0, rates.reciprocal(), torch.inf)
        start = torch.full_like(end, -1.0)
        if len(wrong):
            m = margins[wrong][..., None]
            zeros = m / losses
            rising = torch.where(losses < 0, zeros, -1.0).amax(dim=1)
            # A margin that is not positive and does not rise is never right.
            stuck = ((m <= 0) & (losses >= 0)).any(dim=1)
            start[wrong] = torch.where(stuck, torch.inf, rising)
            end[wrong] = torch.where(losses > 0, zeros, torch.inf).amin(dim=1)
        starts.append(start.T)
        ends.append(end.T)
    return torch.cat(starts, dim=1), torch.cat(ends, dim=1)


def accuracy_curve(data: LayerData, directions: Iterable[Tensor]) -> RadiusCurve:
    """Return the radius for every accuracy at once.

    Parameters
    ----------
    data : LayerData
        Layer and samples.
    directions : iterable of tensor
        Surface points (R = 1) in chunks of shape (p, d).
    """
    n = len(data.inputs)
    curve = torch.full((n + 1,), torch.inf, dtype=torch.float64)
    right_now: int | None = None
    for chunk in directions:
        start, end = right_intervals(data, chunk)
        at_center = start[0] < 0
        right_now = int(at_center.sum())
        gains = torch.where(start < end, start, torch.inf)[:, ~at_center]
        losses = torch.where(start < end, end, torch.inf)
        level, value = first_failures(right_now, gains, losses)
        curve.scatter_reduce_(0, level.cpu(), value.double().cpu(), "amin")
    if right_now is None:
        raise ValueError("directions: expected at least one, got none")
    curve[right_now + 1 :] = 0
    return RadiusCurve(curve.numpy())


def first_failures(right_now: int, gains: Tensor, losses: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each level k the first radius with fewer than k right, over all rays.

    Parameters
    ----------
    right_now : int
        Right at the centre.
    gains, losses : tensor of shape (p, any)
        Radii at which one more, or one fewer, sample is right; infinite for never.
    """
    if not gains.shape[1] or not bool(torch.isfinite(gains).any()):
        ordered = losses.sort(dim=1).values[:, :right_now].amin(dim=0)
        levels = torch.arange(right_now, 0, -1, device=losses.device)
        return levels, ordered
    events = torch.cat([losses, gains], dim=1)
    signs = torch.ones_like(events, dtype=torch.int32)
    signs[:, : losses.shape[1]] = -1
    # A stable sort keeps losses before gains at equal radii: the cautious order.
    values, order = events.sort(dim=1, stable=True)
    counts = right_now + signs.gather(1, order).cumsum(dim=1)
    # Counts move in steps of one, so a level is first missed at the first drop through it;
    # later drops through the same level are farther out and lose against it.
    drop = (order < losses.shape[1]) & torch.isfinite(values)
    return (counts[drop] + 1).long(), values[drop]


def loss_radius(
    data: LayerData, directions: Iterable[Tensor], quality: Quality, largest: float = MAX_WEIGHT
) -> float:
    """Return the first radius at which the mean cross-entropy exceeds epsilon on any ray.

    Parameters
    ----------
    data : LayerData
        Layer and samples.
    directions : iterable of tensor
        Surface points (R = 1) in chunks of shape (p, d).
    quality : Quality
        With the loss as measure.
    largest : float
        Radius beyond which is not looked.
    """
    scores, y = data.scores()
    at_center = quality.score(scores, y)
    if at_center > quality.epsilon:
        raise NotGoodEnoughError(quality.epsilon, at_center, "loss")
    best = largest
    for chunk in directions:
        slopes = torch.cat(
            [data.slopes(chunk, data.augmented(rows)[0]) for rows in data.row_chunks(chunk.numel())]
        )
        high = torch.full((len(chunk),), best, dtype=torch.float64, device=slopes.device)
        low = torch.zeros_like(high)
        # Convexity: beyond its crossing a ray stays beyond, so one look at `best` sorts out
        # the rays that cannot lower it.
        alive = torch.nonzero(ray_losses(scores, slopes, y, high) > quality.epsilon)[:, 0]
        for _ in range(80):
            if not len(alive) or float((high - low)[alive].max()) <= 1e-7 * float(
                high[alive].max()
            ):
                break
            middle = (low[alive] + high[alive]) / 2
            failed = ray_losses(scores, slopes[..., alive], y, middle) > quality.epsilon
            high[alive[failed]] = middle[failed]
            low[alive[~failed]] = middle[~failed]
            alive = alive[low[alive] <= high[alive].min()]
        if len(alive):
            best = min(best, float(low[alive].min()))
    return best


def ray_losses(scores: Tensor, slopes: Tensor, labels: Tensor, radii: Tensor) -> Tensor:
    """Return the mean cross-entropy of each direction at its own radius, shape (p,)."""
    moved = scores[..., None] + radii.to(scores) * slopes
    own = moved[torch.arange(len(labels), device=labels.device), labels]
    return (moved.logsumexp(dim=1) - own).double().mean(dim=0)
