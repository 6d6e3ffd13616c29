"""Seeded draws that keep class proportions, and the rounding that they need."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def apportion(
    weights: NDArray[Any], total: int, limits: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Divide ``total`` whole items in proportion to ``weights`` (largest remainder method).

    Parameters
    ----------
    weights : np.ndarray
        Non-negative, not all zero.
    total : int
        Number of items, at least 0.
    limits : np.ndarray, optional
        The most items that each part can take; together at least ``total``. What a full part
        cannot take goes to the others.

    Returns
    -------
    np.ndarray
        One whole number per weight; they sum to ``total``.

    Raises
    ------
    ValueError
        If the limits leave no room for all items.
    """
    shares = np.asarray(weights, dtype=np.float64)
    room = np.full(len(shares), total, dtype=np.int64) if limits is None else limits
    if room.sum() < total:
        raise ValueError(f"limits must sum to at least {total}, got {room.sum()}")
    exact = np.minimum(shares * (total / shares.sum()), room)
    # The tiny push undoes floating-point products such as 0.1 * 30 = 2.9999999999999996.
    counts: NDArray[np.int64] = np.minimum(np.floor(exact + 1e-9).astype(np.int64), room)
    # A stable sort, so that equal remainders go to the first parts on every machine.
    order = np.argsort(-(exact - counts), kind="stable")
    while (missing := total - int(counts.sum())) > 0:
        takers = order[counts[order] < room[order]][:missing]
        counts[takers] += 1
    return counts


def stratified_sample(
    labels: NDArray[np.int64],
    size: int,
    rng: np.random.Generator,
    limits: NDArray[np.int64] | None = None,
) -> NDArray[np.int64]:
    """Draw positions without repetition, each class in proportion to its frequency.

    Parameters
    ----------
    labels : np.ndarray
        The class of every example.
    size : int
        How many to draw, 0 … ``len(labels)``.
    rng : np.random.Generator
        The source of chance.
    limits : np.ndarray, optional
        The most to draw from each class, in the order of ``np.unique(labels)``.

    Returns
    -------
    np.ndarray
        Sorted positions.
    """
    if size == 0:
        return np.empty(0, dtype=np.int64)
    names, counts = np.unique(labels, return_counts=True)
    quotas = apportion(counts, size, counts.astype(np.int64) if limits is None else limits)
    drawn = [
        rng.permutation(np.flatnonzero(labels == name))[:quota]
        for name, quota in zip(names, quotas, strict=True)
    ]
    return np.sort(np.concatenate(drawn)).astype(np.int64)


def balanced_sample(
    labels: NDArray[np.int64], per_class: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Draw positions so that every class that occurs has the same number.

    A class with enough examples is drawn from without repetition; of a smaller one every example
    is taken as often as any other, give or take one.

    Parameters
    ----------
    labels : np.ndarray
        The class of every example.
    per_class : int
        How many of each class, at least 1.
    rng : np.random.Generator
        The source of chance.

    Returns
    -------
    np.ndarray
        Sorted positions, with repetitions.
    """
    if not isinstance(per_class, int) or per_class < 1:
        raise ValueError(f"dataset.balance must be at least 1, or null, got {per_class!r}")
    drawn = []
    for name in np.unique(labels):
        positions = np.flatnonzero(labels == name)
        whole, rest = divmod(per_class, len(positions))
        drawn += [np.tile(positions, whole), rng.permutation(positions)[:rest]]
    return np.sort(np.concatenate(drawn)).astype(np.int64)


def split_validation(
    labels: NDArray[np.int64], fraction: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split one node's examples into training and validation, each class in proportion.

    Every class keeps at least one training example, so a class with a single example is never
    validated on. With a positive ``fraction`` the validation part has at least one example as
    long as some class has two; only a node whose classes all have one example gets none.

    Parameters
    ----------
    labels : np.ndarray
        The classes of the node's examples.
    fraction : float
        Share of the examples for validation, 0 ≤ fraction < 1.
    seed : int
        Decides which examples; at least 0.

    Returns
    -------
    tuple of np.ndarray
        Sorted positions for training, and for validation; together they are all positions.

    Raises
    ------
    ValueError
        If ``fraction`` is out of range.
    """
    if not 0 <= fraction < 1:
        raise ValueError(f"the validation fraction must be in [0, 1), got {fraction}")
    labels = np.asarray(labels)
    _, counts = np.unique(labels, return_counts=True)
    spare = counts.astype(np.int64) - 1
    wanted = max(1, round(fraction * len(labels))) if fraction > 0 else 0
    validation = stratified_sample(
        labels, min(wanted, int(spare.sum())), np.random.default_rng(seed), spare
    )
    training = np.setdiff1d(np.arange(len(labels)), validation, assume_unique=True)
    return training.astype(np.int64), validation
