"""Krum, Multi-Krum and Bulyan: means that choose whose models count.

- Krum (Blanchard et al. 2017): a model's score is the sum of its squared distances to its
  n − f − 2 nearest others, with f liars among n ≥ 2f + 3. The lowest score wins; Multi-Krum takes
  the mean of several of the lowest.
- Bulyan (El Mhamdi et al. 2018): choose n − 2f by Krum, then take, number by number, the mean of
  the n − 4f values nearest to the median. It needs n ≥ 4f + 3.

On the same models in the same order the choice is that of Flower's Krum, MultiKrum and Bulyan, and
their means follow bit for bit. (As there, Bulyan's choice takes one scoring, not n − 2f of them.)

Decided here: Multi-Krum keeps n − f. There are as many honest models, so no model that is kept has
a higher score than the honest one with the highest; and of its n − f − 2 ≥ f + 1 nearest at least
two are honest. A liar that is kept is therefore no farther from an honest model than that score
allows.
Distances are added up in double precision, where Flower's single precision overflows at weights of
1e19. *All* floating-point arrays count: a liar could hide in what is left out of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gems_flwr.averaging.robust_means import by_coordinate
from gems_flwr.typing import Arrays, Float


def squared_distances(models: Sequence[Arrays]) -> Float:
    """Return the squared distances between all pairs of models, of shape (n, n)."""
    products = np.zeros((len(models), len(models)))
    for name, array in models[0].items():
        if array.dtype.kind == "f":
            rows = np.stack([np.ravel(model[name]) for model in models]).astype(np.float64)
            products += rows @ rows.T
    squares = np.diag(products)
    distances = np.maximum(squares[:, None] + squares[None, :] - 2 * products, 0)
    np.fill_diagonal(distances, 0)
    return np.asarray(distances)


def krum_order(models: Sequence[Arrays], liars: int) -> list[int]:
    """Return the positions of all models, the lowest score first.

    Parameters
    ----------
    models : sequence of mappings from str to ndarray
        At least two.
    liars : int
        f, at least 0.
    """
    nearest = max(1, len(models) - liars - 2)
    distances = squared_distances(models)
    np.fill_diagonal(distances, np.inf)
    scores = np.sort(distances, axis=1)[:, :nearest].sum(axis=1)
    return [int(index) for index in np.argsort(scores, kind="stable")]


def bulyan_mean(chosen: Sequence[Arrays], liars: int) -> dict[str, NDArray]:
    """Return Bulyan's second step: the mean of the values nearest to the median.

    Parameters
    ----------
    chosen : sequence of mappings from str to ndarray
        Krum's choice, more than 2f models.
    liars : int
        f, at least 0.
    """
    kept = len(chosen) - 2 * liars
    if liars < 0 or kept < 1:
        raise ValueError(f"liars must be at least 0 and below half of {len(chosen)}, got {liars}")

    def near_median(stack: NDArray) -> NDArray:
        gaps = np.abs(stack - np.median(stack, axis=0))
        nearest = np.argpartition(gaps, kept - 1, axis=0)[:kept]
        return np.asarray(np.mean(np.take_along_axis(stack, nearest, axis=0), axis=0))

    return by_coordinate(chosen, near_median)
