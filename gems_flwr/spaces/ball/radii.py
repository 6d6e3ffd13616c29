"""Radii of a linear layer, and from them its ball or ellipsoid: the node's side in one call.

2019, Section 3.1 and Appendix A. How a radius is found is a choice, which the space names.

**Along rays** (``sampled``). Along ``w = c + R u`` every margin is ``m + R s``, so a sample is
right on one interval of R, and the number of right samples changes at finitely many known radii.
The first at which fewer than ``ceil(epsilon n)`` are right is an order statistic of those: no
search, and the whole curve r(epsilon) in one pass. Samples that are wrong at the centre may become
right further out, and count (Eq. 1 counts them).

In thousands of dimensions random directions miss the bad ones: the sampled radius is tens of times
the distance of a failing model.

**Proofs** (``certified``) hold in every direction. A model ``c + D`` moves the margin of sample i
over class j by at most ``|D| * |grad|``, and the gradient has length ``sqrt(2) |x_i|`` (x with the
one for the bias; for an ellipsoid with relative axes s that of ``s * grad``). So sample i is safe
up to ``rho_i = min_j m_ij / (sqrt(2) |x_i|)``, and within the k-th smallest rho at most k - 1
samples break. Radii are shrunk by 1e-5 to cover single-precision rounding.

**The axes** of an ellipsoid are ``r_i = max(min_j F_j / F_i, c) * R`` (Eq. 5) with the Fisher
diagonal F, here in closed form: in expectation over labels, where the released code draws one for
each of 200 samples. As there 1e-5 is added to every F; without it the least F of thousands is so
small that nearly every axis lies on the floor: a ball of twice the bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gems_flwr.errors import NotGoodEnoughError
from gems_flwr.spaces.ball.ball import BallSpace, EllipsoidSpace, Method, Radius, thin_curve
from gems_flwr.spaces.ball.layer_data import (
    LayerData,
    class_margins,
    random_directions,
    required_correct,
)

# What the released code adds to the Fisher diagonal.
DAMPING = 1e-5
SHRINK = 1 - 1e-5
# R_max of 2019.
LARGEST = 4000.0


def build_ball(
    data: LayerData,
    epsilon: float,
    method: Method,
    *,
    curve: bool = False,
    **search: Any,
) -> BallSpace:
    """Return the ball around a linear layer, with or without its curve; search: `find_extent`."""
    radius, radii = find_extent(data, epsilon, method, **search)
    return BallSpace(data.center, radius, thin_curve(radii) if curve else None)


def build_ellipsoid(
    data: LayerData,
    epsilon: float,
    method: Method,
    *,
    floor: float = 0.1,
    curve: bool = False,
    **search: Any,
) -> EllipsoidSpace:
    """Return the ellipsoid around a linear layer; curve and search as in `build_ball`.

    `floor` is c of Eq. 5. The data's own axes are replaced.
    """
    axes = relative_axes(linear_fisher(data), floor).to(data.weight)
    shaped = dataclasses.replace(data, axes=axes)
    radius, radii = find_extent(shaped, epsilon, method, **search)
    lengths = (axes.double().cpu().numpy() * radius.value).astype(np.float32)
    return EllipsoidSpace(data.center, lengths, radius, thin_curve(radii) if curve else None)


def find_extent(
    data: LayerData,
    epsilon: float,
    method: Method,
    *,
    directions: int = 500,
    seed: int = 0,
) -> tuple[Radius, NDArray[np.float64]]:
    """Return the radius of a layer for an accuracy of epsilon, and those of all accuracies.

    The method is one of `Radius`. A NotGoodEnoughError if not even the centre is good enough.
    """
    used = directions
    if method == "certified":
        curve, used = certified_curve(data), 0
    else:
        curve = accuracy_curve(data, random_directions(data, directions, seed))
    return Radius(min(curve.radius(epsilon), LARGEST), method, epsilon, used), curve.radii


@dataclasses.dataclass(frozen=True, eq=False)
class RadiusCurve:
    """Radius for every number of samples that must stay right (n + 1,).

    ``radii[k]`` is the first radius at which fewer than k of n samples are right; 0 for every k
    above the number right at the centre, infinite where nothing fails.
    """

    radii: NDArray[np.float64]

    @property
    def count(self) -> int:
        """Number of samples n."""
        return len(self.radii) - 1

    @property
    def accuracy(self) -> float:
        """Accuracy at the centre."""
        return float(np.flatnonzero(self.radii > 0).max()) / self.count

    def radius(self, epsilon: float) -> float:
        """Return the radius at which the accuracy first falls below ``epsilon``."""
        need = required_correct(epsilon, self.count)
        if need > round(self.accuracy * self.count):
            raise NotGoodEnoughError(epsilon, self.accuracy, "accuracy")
        return float(self.radii[need])


def right_intervals(data: LayerData, directions: Tensor) -> tuple[Tensor, Tensor]:
    """Return where each sample is right along each direction: ``start`` and ``end``, (p, n) each.

    Right for start < R < end (start is negative if right at R = 0); start >= end if never right
    for R >= 0.
    """
    p, starts, ends = len(directions), [], []
    for rows in data.row_chunks(3 * p * data.num_classes):
        scores, y = data.scores(rows)
        margins = class_margins(scores, y)
        slopes = data.slopes(directions, data.augmented(rows)[0])
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
    """Return the radius for every accuracy, along surface points (R = 1) in chunks (p, d)."""
    curve = torch.full((len(data.inputs) + 1,), torch.inf, dtype=torch.float64)
    right_now: int | None = None
    for chunk in directions:
        start, end = right_intervals(data, chunk)
        at_center = start[0] < 0
        right_now = int(at_center.sum())
        gains = torch.where(start < end, start, torch.inf)[:, ~at_center]
        losses = torch.where(start < end, end, torch.inf)
        level, value = _first_failures(right_now, gains, losses)
        curve.scatter_reduce_(0, level.cpu(), value.double().cpu(), "amin")
    if right_now is None:
        raise ValueError("directions: expected at least one, got none")
    curve[right_now + 1 :] = 0
    return RadiusCurve(curve.numpy())


def _first_failures(right_now: int, gains: Tensor, losses: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each level k the first radius with fewer than k right, over all rays.

    `right_now` are right at the centre; `gains` and `losses` (p, any) are the radii at which one
    more, or one fewer, sample is right, infinite for never.
    """
    if not bool(torch.isfinite(gains).any()):
        ordered = losses.sort(dim=1).values[:, :right_now].amin(dim=0)
        return torch.arange(right_now, 0, -1, device=losses.device), ordered
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


def safe_radii(data: LayerData) -> Tensor:
    """Return how far each sample is sure to stay right; 0 if it is wrong, shape (n,)."""
    parts, outputs = [], data.weight.shape[0]
    for rows in data.row_chunks(3 * (data.num_classes + data.weight.shape[1])):
        scores, y = data.scores(rows)
        x, _ = data.augmented(rows)
        # The squared length of each score's gradient (n, classes).
        if data.axes is None:
            lengths = (x * x).sum(dim=1, keepdim=True).expand(-1, outputs)
        else:
            lengths = (x * x) @ data.matrix(data.axes.to(data.weight)[None] ** 2)[0].T
        if outputs == 1:
            # The rival score of a layer with one output is constant and does not move.
            lengths = torch.cat([torch.zeros_like(lengths), lengths], dim=1)
        pair = (lengths + lengths.gather(1, y[:, None])).sqrt()
        safe = (class_margins(scores, y) / pair.clamp_min(1e-30)).amin(dim=1)
        parts.append(safe.clamp_min(0))
    return torch.cat(parts)


def certified_curve(data: LayerData) -> RadiusCurve:
    """Return a radius for every accuracy within which no model at all fails."""
    safe = np.sort(safe_radii(data).double().cpu().numpy()) * SHRINK
    # With k samples asked for, failing takes n - k + 1 broken ones: the (n - k + 1)-th.
    return RadiusCurve(np.concatenate([[np.inf], safe[::-1]]))


def linear_fisher(data: LayerData) -> Tensor:
    """Return the flat Fisher diagonal of a linear layer in closed form.

    The gradient of a sample is ``(e_y - p) x^T``; in expectation over y its square is ``p (1 - p)``
    times ``x^2``: two matmuls.
    """
    total = torch.zeros_like(data.center_matrix())
    for rows in data.row_chunks(data.weight.shape[1] + data.num_classes):
        chances = data.scores(rows)[0].softmax(dim=1)
        squared = chances * (1 - chances)
        squared = squared if data.weight.shape[0] > 1 else squared[:, 1:]
        total += squared.T @ data.augmented(rows)[0] ** 2
    return data.flat(total[None] / len(data.inputs))[0]


def relative_axes(fisher: Tensor, floor: float = 0.1, damping: float = DAMPING) -> Tensor:
    """Return ``max(min_j F_j / F_i, c)`` with damped F, the axes of Eq. 5 relative to R.

    c, the `floor` in (0, 1], is 0.1 in the released code.
    """
    ratio = (fisher.min() + damping) / (fisher + damping)
    return ratio.clamp_min(floor)
