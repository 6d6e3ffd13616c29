"""Merging by Kronecker factors of the Fisher matrix (Tam, Bansal & Raffel 2024, MaTS).

As Fisher merging, but the precision of a layer is the Kronecker product of two second moments
(Martens & Grosse 2015): A of its inputs and B of the gradients in its outputs. The merged layer
solves Σ n_k B_k W A_k = Σ n_k B_k W_k A_k (neurons as rows), a linear system too large to write
down and easy to multiply with: conjugate gradients, as in the paper.

Decided here: as in K-FAC, damping is added to each factor, relative to the factor's own mean
eigenvalue. A node's factor B is nearly zero for classes that it never saw; damped, the node still
has a small say in them. Both sides of the system have it, so identical models stay as they are.
How far the iteration came is told and not hidden.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator, cg

from gems_flwr.device_algebra import product_sums, solves_elsewhere
from gems_flwr.model_merging.layer_statistics import Statistics, check_layers
from gems_flwr.model_merging.rows import mean_rows, rows_of, shares, with_rows
from gems_flwr.typing import Arrays, Float

# Chosen on public samples of MNIST, logistic model.
DAMPING = 1e-3
TOLERANCE = 1e-5
MAX_STEPS = 3000


@dataclasses.dataclass(frozen=True, eq=False)
class KfacSolution:
    """One merged layer.

    Parameters
    ----------
    rows : array of shape (width, d)
        Its neurons.
    steps : int
        Conjugate gradient steps that it took.
    residual : float
        What is left of the right-hand side, as a share of it.
    """

    rows: Float
    steps: int
    residual: float


def merge_by_kfac(
    models: Sequence[Arrays],
    statistics: Sequence[Statistics],
    weights: Sequence[float],
    *,
    damping: float = DAMPING,
    device: str = "cpu",
) -> tuple[dict[str, NDArray], dict[str, KfacSolution]]:
    """Merge networks layer by layer; return the network, and how each layer was solved.

    Parameters
    ----------
    models : sequence of mappings from str to ndarray
        Chains of linear and convolutional layers, all of the same shapes; at least one.
    statistics : sequence of mappings
        Each model's ``inputs`` and ``gradients``; see `gems_flwr.model_merging.layer_statistics`.
    weights : sequence of float
        Samples behind each model, above 0.
    damping : float
        Added to the diagonal of every factor, relative to its mean; above 0.
    device : str
        Where layers are solved for.
    """
    parts = shares(weights, models)
    layers = check_layers(models[0])
    solved = {
        layer.weight: solve_kfac(
            rows_of(models, layer),
            [each[layer.weight]["inputs"] for each in statistics],
            [each[layer.weight]["gradients"] for each in statistics],
            parts,
            damping=damping,
            device=device,
        )
        for layer in layers
    }
    rows = {weight: solution.rows for weight, solution in solved.items()}
    return with_rows(models[0], layers, rows), solved


def solve_kfac(
    rows: Sequence[Float],
    inputs: Sequence[NDArray],
    gradients: Sequence[NDArray],
    weights: Sequence[float],
    *,
    damping: float = DAMPING,
    tolerance: float = TOLERANCE,
    max_steps: int = MAX_STEPS,
    device: str = "cpu",
) -> KfacSolution:
    """Merge one layer.

    Parameters
    ----------
    rows : sequence of arrays of shape (width, d)
        Every model's neurons.
    inputs, gradients : sequences of arrays of shape (d, d) and (width, width)
        Every model's second moments.
    weights : sequence of float
        How much each counts, above 0.
    damping : float
        See `merge_by_kfac`.
    tolerance : float
        Residual, as a share of the right-hand side, at which to stop.
    max_steps : int
        Steps after which to stop anyway.
    device : str
        Where products are computed.
    """
    if not damping > 0:
        raise ValueError(f"damping must be above 0, got {damping}")
    parts = shares(weights, rows)
    mean = mean_rows(rows, parts)
    lefts = [p * _damped(each, damping) for p, each in zip(parts, gradients, strict=True)]
    rights = [_damped(each, damping) for each in inputs]
    diagonal = np.zeros_like(mean)
    for a, b in zip(rights, lefts, strict=True):
        diagonal += np.outer(np.diagonal(b), np.diagonal(a))
    size = float(np.mean(diagonal))
    if size == 0:
        return KfacSolution(mean, 0, 0.0)
    # In units of the mean eigenvalue, so that no confident node's tiny gradients underflow.
    lefts = [b / size for b in lefts]

    there = product_sums(lefts, rights, device) if solves_elsewhere(device) else None

    def times(flat: Float) -> Float:
        step = flat.reshape(mean.shape)
        if there is not None:
            return there(step).ravel()
        product = np.zeros_like(step)
        for a, b in zip(rights, lefts, strict=True):
            product += b @ step @ a
        return product.ravel()

    pull = np.zeros_like(mean)
    for row, a, b in zip(rows, rights, lefts, strict=True):
        pull += b @ (row - mean) @ a
    wanted = pull.ravel()
    length = float(np.linalg.norm(wanted))
    if length == 0:
        return KfacSolution(mean, 0, 0.0)
    scale = (diagonal / size).ravel()
    shape, steps = (mean.size, mean.size), []
    step, _ = cg(
        LinearOperator(shape, matvec=times, dtype=np.float64),
        wanted,
        rtol=tolerance,
        maxiter=max_steps,
        M=LinearOperator(shape, matvec=lambda flat: flat / scale, dtype=np.float64),
        callback=lambda _: steps.append(1),
    )
    if not np.isfinite(step).all():
        # Factors that are negative by rounding can lead nowhere; the mean is a solution of a kind.
        step = np.zeros_like(wanted)
    residual = float(np.linalg.norm(wanted - times(step))) / length
    return KfacSolution(mean + step.reshape(mean.shape), len(steps), residual)


def _damped(moment: NDArray, damping: float) -> Float:
    damped: Float = moment.astype(np.float64)
    damped[np.diag_indices_from(damped)] += damping * np.trace(damped) / len(damped)
    return damped
