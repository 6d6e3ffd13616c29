"""RegMean: every linear layer by least squares (Jin et al. 2023, Dataless Knowledge Fusion).

The merged layer is to give on every node's inputs what the node's own layer gives:
min_W Σ_k ‖X_k W − X_k W_k‖², so W = (Σ G_k)⁻¹ Σ G_k W_k with G_k = X_kᵀX_k. As in the paper, the
off-diagonal entries of G_k are shrunk by a factor (0.9 there), since inputs of a network that was
merged below are not those that G_k was measured on.

Decided here: the ridge pulls towards the nodes' mean, not to zero. An input that no node has ever
seen (a pixel that is always black) keeps its mean weight, and identical models stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import scipy.linalg
from numpy.typing import NDArray

from gems_flwr.device_algebra import solve_positive, solves_elsewhere
from gems_flwr.errors import ModelError
from gems_flwr.model_merging.layer_statistics import Statistics, check_layers
from gems_flwr.model_merging.rows import mean_rows, rows_of, shares, with_rows
from gems_flwr.typing import Arrays, Float

SHRINK = 0.9
RIDGE = 1e-6


def merge_by_regmean(
    models: Sequence[Arrays],
    statistics: Sequence[Statistics],
    weights: Sequence[float],
    *,
    shrink: float = SHRINK,
    ridge: float = RIDGE,
    device: str = "cpu",
) -> dict[str, NDArray]:
    """Merge networks layer by layer.

    Parameters
    ----------
    models : sequence of mappings from str to ndarray
        Chains of linear and convolutional layers, all of the same shapes; at least one.
    statistics : sequence of mappings
        Each model's ``inputs``; see `gems_flwr.model_merging.layer_statistics`.
    weights : sequence of float
        Samples behind each model, above 0.
    shrink : float
        Factor of the off-diagonal entries, in [0, 1].
    ridge : float
        Pull towards the mean, relative to the mean square of the inputs; at least 0.
    device : str
        Where layers are solved for.
    """
    parts = shares(weights, models)
    layers = check_layers(models[0])
    merged = {
        layer.weight: solve_regmean(
            rows_of(models, layer),
            [each[layer.weight]["inputs"] for each in statistics],
            parts,
            shrink=shrink,
            ridge=ridge,
            device=device,
        )
        for layer in layers
    }
    return with_rows(models[0], layers, merged)


def solve_regmean(
    rows: Sequence[Float],
    grams: Sequence[NDArray],
    weights: Sequence[float],
    *,
    shrink: float = SHRINK,
    ridge: float = RIDGE,
    device: str = "cpu",
) -> Float:
    """Merge one layer, given as rows of neurons of shape (width, d), with moments (d, d).

    Raises
    ------
    ValueError
        If an option is out of range, or without a ridge the solution is not unique.
    """
    if not 0 <= shrink <= 1:
        raise ValueError(f"shrink must be in [0, 1], got {shrink}")
    if not ridge >= 0:
        raise ValueError(f"ridge must be at least 0, got {ridge}")
    parts = shares(weights, rows)
    mean = mean_rows(rows, parts)
    total = np.zeros_like(grams[0], dtype=np.float64)
    pull = np.zeros_like(mean)
    for part, row, gram in zip(parts, rows, grams, strict=True):
        own = part * shrink * gram.astype(np.float64)
        np.fill_diagonal(own, part * np.diagonal(gram))
        total += own
        # What is solved for is the step from the mean: 0 where all nodes agree.
        pull += (row - mean) @ own
    size = float(np.trace(total)) / len(total)
    if size == 0:
        return mean
    total[np.diag_indices_from(total)] += ridge * size
    try:
        if solves_elsewhere(device):
            step: Float = solve_positive(total, pull.T, device).T
        else:
            step = scipy.linalg.solve(total, pull.T, assume_a="pos").T
    except np.linalg.LinAlgError:
        if ridge == 0:
            raise ModelError(
                "the nodes' inputs do not determine the layer; set the ridge (damping) above 0"
            ) from None
        # A node's moments may be negative by as much as rounding explains, which is more than the
        # ridge if they are the largest.
        values, vectors = np.linalg.eigh(total)
        step = (pull @ vectors / np.maximum(values, ridge * size)) @ vectors.T
    return mean + step
