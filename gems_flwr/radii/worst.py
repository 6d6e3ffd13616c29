"""The directions in which a linear layer fails first.

The papers sample random directions (2019, Algorithm 2, line 6). In thousands of dimensions
these miss the bad ones: the sampled radius is tens of times the distance of a failing
model. What hurts most is to push many samples over their boundary at once:

- towards one class c, every sample's score of c up and of its own class down;
- towards each sample's nearest rival, all right samples together, and only as many of
  the easiest ones as it takes to fail;
- then again from what the last rays broke, a few rounds (``refine``).

For the loss, which is convex, the gradient at the surface point is the next direction:
maximising a convex function over a sphere this way never goes down.

The radius is exact along these rays. It is an upper bound of the true one (some failing
model *is* there), not a proof that nothing nearer fails: see `certified` for that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gems_flwr.radii.certified import safe_radii
from gems_flwr.radii.layer_data import LayerData
from gems_flwr.radii.quality import Quality, class_margins, required_correct
from gems_flwr.radii.rays import RadiusCurve, accuracy_curve, loss_radius, right_intervals
from gems_flwr.spaces.checks import MAX_WEIGHT


def push(data: LayerData, changes: Tensor) -> Tensor:
    """Return the flat sums over samples of score change times input.

    Parameters
    ----------
    data : LayerData
        Layer and samples.
    changes : tensor of shape (b, n, classes)
        How each sample's scores should change, for b directions.

    Returns
    -------
    tensor of shape (b, d)
        The directions, not normalised.
    """
    outputs = data.weight.shape[0]
    # One output is the second class's score minus the first's.
    wanted = changes if outputs > 1 else changes[..., 1:] - changes[..., :1]
    total = torch.zeros(len(wanted), outputs, data.center_matrix().shape[1]).to(data.weight)
    for rows in data.row_chunks(data.weight.shape[1]):
        x, _ = data.augmented(rows)
        total += wanted[:, rows].transpose(1, 2) @ x
    return data.flat(total)


def _score_changes(data: LayerData, labels: Tensor, rivals: Tensor) -> Tensor:
    """Return +1 for the rival and -1 for the true class of each sample."""
    changes = torch.zeros(len(labels), data.num_classes).to(data.weight)
    changes.scatter_(1, rivals[:, None], 1.0)
    changes.scatter_add_(1, labels[:, None], -torch.ones_like(changes[:, :1]))
    return changes


def worst_directions(data: LayerData, need: int) -> Tensor:
    """Return the candidate directions as surface points (R = 1), shape (classes + 2, d).

    Parameters
    ----------
    data : LayerData
        Layer and samples.
    need : int
        Samples that must stay right.
    """
    scores, y = data.scores()
    changes = [_score_changes(data, y, torch.full_like(y, c)) for c in range(data.num_classes)]
    margins = class_margins(scores, y)
    right = margins.amin(dim=1) > 0
    nearest = _score_changes(data, y, margins.argmin(dim=1))
    changes.append(nearest * right[:, None])
    easiest = torch.argsort(safe_radii(data))
    few = torch.zeros_like(right)
    few[easiest[: max(1, len(y) - need + 1)]] = True
    changes.append(nearest * (few & right)[:, None])
    return data.unit_on_surface(push(data, torch.stack(changes)))


def worst_curve(data: LayerData, epsilon: float, refine: int = 2) -> tuple[RadiusCurve, int]:
    """Return the curve along the worst directions, and how many there were.

    Parameters
    ----------
    data : LayerData
        Layer and samples.
    epsilon : float
        Accuracy for which the directions are made.
    refine : int
        Rounds in which new directions are made from the samples that the last ones broke.
    """
    need = required_correct(epsilon, len(data.inputs))
    directions = worst_directions(data, need)
    curve, count = accuracy_curve(data, [directions]), len(directions)
    scores, y = data.scores()
    right = class_margins(scores, y).amin(dim=1) > 0
    if need > int(right.sum()):
        return curve, count
    for _ in range(refine):
        radius = curve.radius(epsilon)
        _, ends = right_intervals(data, directions)
        kth = int(right.sum()) - need + 1
        order = torch.where(right, ends, torch.inf).kthvalue(kth, dim=1).values.argsort()
        fresh = []
        for best in order[:3].tolist():
            x, _ = data.augmented(slice(None))
            reach = float(ends[best][right].kthvalue(kth).values)
            moved = scores + reach * data.slopes(directions[best : best + 1], x)[..., 0]
            margins = class_margins(moved, y)
            broken = right & (ends[best] <= reach * (1 + 1e-6))
            changes = _score_changes(data, y, margins.argmin(dim=1))
            fresh.append(changes * broken[:, None])
        directions = data.unit_on_surface(push(data, torch.stack(fresh)))
        curve, count = curve.minimum(accuracy_curve(data, [directions])), count + len(directions)
        if curve.radius(epsilon) >= radius * (1 - 1e-3):
            break
    return curve, count


def worst_loss_radius(data: LayerData, quality: Quality, refine: int = 5) -> tuple[float, int]:
    """Return the loss radius along the ascent directions, and how many there were."""
    scores, y = data.scores()
    x, _ = data.augmented(slice(None))
    truth = torch.nn.functional.one_hot(y, data.num_classes).to(scores)
    radius, count, point = float("inf"), 0, torch.zeros(1, data.dimension).to(data.weight)
    directions = torch.cat(
        [
            data.unit_on_surface(push(data, (scores.softmax(dim=1) - truth)[None])),
            worst_directions(data, len(y)),
        ]
    )
    for _ in range(1 + refine):
        found = float("inf")
        for u in directions:
            # Only rays that fail nearer than the nearest so far are solved.
            nearer = loss_radius(data, [u[None]], quality, min(found, MAX_WEIGHT))
            if nearer < found:
                found, point = nearer, u[None]
        count += len(directions)
        if found >= radius * (1 - 1e-6):
            break
        radius = found
        moved = scores + radius * data.slopes(point, x)[..., 0]
        directions = data.unit_on_surface(push(data, (moved.softmax(dim=1) - truth)[None]))
    return radius, count
