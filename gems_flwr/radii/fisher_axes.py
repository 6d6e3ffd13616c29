"""The Fisher diagonal, and the axes of the ellipsoid that it gives.

Model Aggregation via Good-Enough Model Spaces (2019), Appendix A, Eq. 5:
``r_i = max(min_j F_j / F_i, c) * R``, so that no axis is shorter than ``c R``.

The released code sums squared gradients of the log-likelihood of one *sampled* label over
200 images. Here: over all the data that is given or so many samples of it, in closed form, with a
sampled label (the papers' way) or the exact expectation over all labels, which has no noise. Of a
model that is sure of every label the sampled F is nearly 0, and the ellipsoid a ball.

The released code adds a damping of 1e-5 to every F first, which Eq. 5 does not have. Without it
the least F of thousands is so small that nearly every axis lies on the floor: the ellipsoid is a
ball that costs twice the bytes. With it, axes are longer than the floor where F is below
(1/c - 1) times the damping (if some F is 0). The damping is an absolute number, so what it does
depends on the scale of the inputs.

Decided here: a weight with F = 0 (a pixel that is always black) is the least sensitive of
all and gets the full length. Without damping the minimum is taken over the *positive* F, or else
one dead pixel would push every other axis to the floor.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import torch
from torch import Tensor

from gems_flwr.radii.layer_data import LayerData

Labels = Literal["sampled", "exact"]
# What the released code adds to the Fisher diagonal.
DAMPING = 1e-5


def linear_fisher(
    data: LayerData, labels: Labels = "exact", seed: int = 0, samples: int | None = None
) -> Tensor:
    """Return the flat Fisher diagonal of a linear layer in closed form.

    The gradient of a sample is ``(e_y - p) x^T``; in expectation over y its square is
    ``p (1 - p)`` times ``x^2``: two matmuls.

    Parameters
    ----------
    data : LayerData
        The layer and its inputs; no labels are needed.
    labels : {"sampled", "exact"}
        One label per input drawn from the model's own prediction, or the expectation over all of
        them.
    seed : int
        Seed of the drawn samples and labels.
    samples : int, optional
        How many of the inputs are drawn, without repetition; all if left out, or not that many.
    """
    generator = torch.Generator().manual_seed(seed)
    if samples is not None and samples < len(data.inputs):
        drawn = torch.randperm(len(data.inputs), generator=generator)[:samples]
        data = dataclasses.replace(data, inputs=data.inputs[drawn], labels=data.labels[drawn])
    total = torch.zeros_like(data.center_matrix())
    for rows in data.row_chunks(data.weight.shape[1] + data.num_classes):
        scores, _ = data.scores(rows)
        x, _ = data.augmented(rows)
        chances = scores.softmax(dim=1)
        if labels == "sampled":
            y = torch.multinomial(chances.cpu(), 1, generator=generator)[:, 0].to(x.device)
            squared = (torch.nn.functional.one_hot(y, chances.shape[1]) - chances) ** 2
        else:
            squared = chances * (1 - chances)
        squared = squared if data.weight.shape[0] > 1 else squared[:, 1:]
        total += squared.T @ (x * x)
    return data.flat(total[None] / len(data.inputs))[0]


def relative_axes(fisher: Tensor, floor: float = 0.1, damping: float = 0.0) -> Tensor:
    """Return ``max(min_j F_j / F_i, c)`` with damped F, the axes of Eq. 5 relative to R.

    Parameters
    ----------
    fisher : tensor
        Fisher diagonal, not negative.
    floor : float
        c of Eq. 5, in (0, 1); 0.1 in the released code.
    damping : float
        What is added to every F, at least 0; `DAMPING` in the released code, nothing in Eq. 5.
    """
    if not 0 < floor < 1:
        raise ValueError(f"floor: expected a number in (0, 1), got {floor}")
    if not bool(torch.isfinite(fisher).all()) or bool((fisher < 0).any()):
        raise ValueError("fisher: expected finite values of at least 0")
    if not 0 <= damping < math.inf:
        raise ValueError(f"damping: expected a finite number of at least 0, got {damping}")
    fisher = fisher + damping
    positive = fisher[fisher > 0]
    if not len(positive):
        return torch.ones_like(fisher)
    ratio = positive.min() / fisher.clamp_min(float(positive.min()))
    return ratio.clamp_min(floor)
