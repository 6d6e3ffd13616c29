"""The Fisher diagonal, and the axes of the ellipsoid that it gives.

Model Aggregation via Good-Enough Model Spaces (2019), Appendix A, Eq. 5:
``r_i = max(min_j F_j / F_i, c) * R``, so that no axis is shorter than ``c R``.

The released code sums squared gradients of the log-likelihood of one *sampled* label over
200 images. Here: over all the data that is given, in closed form, with a sampled label (the
papers' way) or the exact expectation over all labels, which has no noise.

Decided here: a weight with F = 0 (a pixel that is always black) is the least sensitive of
all and gets the full length; the minimum is taken over the *positive* F, or else one dead
pixel would push every other axis to the floor.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from gems_flwr.radii.layer_data import LayerData

Labels = Literal["sampled", "exact"]


def linear_fisher(data: LayerData, labels: Labels = "exact", seed: int = 0) -> Tensor:
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
        Seed of the drawn labels.
    """
    generator = torch.Generator().manual_seed(seed)
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


def relative_axes(fisher: Tensor, floor: float = 0.1) -> Tensor:
    """Return ``max(min_j F_j / F_i, c)``, the axes of Eq. 5 relative to R.

    Parameters
    ----------
    fisher : tensor
        Fisher diagonal, not negative.
    floor : float
        c of Eq. 5, in (0, 1); 0.1 in the released code.
    """
    if not 0 < floor < 1:
        raise ValueError(f"floor: expected a number in (0, 1), got {floor}")
    if not bool(torch.isfinite(fisher).all()) or bool((fisher < 0).any()):
        raise ValueError("fisher: expected finite values of at least 0")
    positive = fisher[fisher > 0]
    if not len(positive):
        return torch.ones_like(fisher)
    ratio = positive.min() / fisher.clamp_min(float(positive.min()))
    return ratio.clamp_min(floor)
