"""Dense linear algebra of arrays on a device, for what a server solves outside torch.

Merging, heads of class moments and private steps are written with NumPy, and on the CPU they stay
so to the last digit. On another device the one expensive operation of each, the factorisation of a
matrix or products with many, is done there in double precision, and the result comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from gems_flwr.devices import exact_device
from gems_flwr.typing import Float


def solves_elsewhere(device: str | torch.device) -> bool:
    """Return whether a device other than the CPU is to solve."""
    return exact_device(device).type != "cpu"


def solve_positive(matrix: Float, right: Float, device: str | torch.device) -> Float:
    """Return ``matrix^-1 right`` for a positive definite matrix.

    Raises
    ------
    numpy.linalg.LinAlgError
        If the matrix is not positive definite.
    """
    where = exact_device(device)
    factor, wrong = torch.linalg.cholesky_ex(torch.from_numpy(np.array(matrix)).to(where))
    if int(wrong):
        raise np.linalg.LinAlgError("the matrix is not positive definite")
    found = torch.cholesky_solve(torch.from_numpy(np.array(right)).to(where), factor)
    return np.asarray(found.cpu().numpy())


def eigenpairs(matrix: Float, device: str | torch.device) -> tuple[Float, Float]:
    """Return eigenvalues, rising, and eigenvectors as columns of a symmetric matrix."""
    values, vectors = torch.linalg.eigh(torch.from_numpy(np.array(matrix)).to(exact_device(device)))
    return np.asarray(values.cpu().numpy()), np.asarray(vectors.cpu().numpy())


def product_sums(
    lefts: Sequence[Float], rights: Sequence[Float], device: str | torch.device
) -> Callable[[Float], Float]:
    """Return the function ``X -> sum_k left_k X right_k``, with the factors on a device."""
    where = exact_device(device)
    pairs = [
        (torch.from_numpy(np.array(b)).to(where), torch.from_numpy(np.array(a)).to(where))
        for b, a in zip(lefts, rights, strict=True)
    ]

    def times(step: Float) -> Float:
        moved = torch.from_numpy(np.array(step)).to(where)
        total = torch.zeros_like(moved)
        for left, right in pairs:
            total += left @ moved @ right
        return np.asarray(total.cpu().numpy())

    return times
