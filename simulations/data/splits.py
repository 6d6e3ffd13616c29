"""Seeded draws that keep class proportions, and the rounding that they need."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int64]


def apportion(weights: NDArray[Any], total: int, limits: Positions | None = None) -> Positions:
    """Divide ``total`` whole items in proportion to ``weights`` (largest remainder method).

    Parameters
    ----------
    weights : np.ndarray
        Non-negative, not all zero.
    total : int
        Number of items, at least 0.
    limits : np.ndarray, optional
        The most items that each part can take. What a full part cannot take goes to the others.

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
    counts: Positions = np.minimum(np.floor(exact + 1e-9).astype(np.int64), room)
    # A stable sort, so that equal remainders go to the first parts on every machine.
    order = np.argsort(-(exact - counts), kind="stable")
    while (missing := total - int(counts.sum())) > 0:
        counts[order[counts[order] < room[order]][:missing]] += 1
    return counts


def stratified_sample(
    labels: NDArray[Any], size: int, rng: np.random.Generator, limits: Positions | None = None
) -> Positions:
    """Draw sorted positions without repetition, each class in proportion to its frequency.

    Of each class at most ``limits`` are drawn, in the order of ``np.unique(labels)``.
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


def balanced_sample(labels: NDArray[Any], per_class: int, rng: np.random.Generator) -> Positions:
    """Draw sorted positions so that every class that occurs has the same number, at least 1.

    A class with enough examples is drawn from without repetition; of a smaller one every example
    is taken as often as any other, give or take one.
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
    labels: NDArray[Any], fraction: float, seed: int
) -> tuple[Positions, Positions]:
    """Split one node's examples into training and validation positions, by class.

    Every class keeps at least one training example, so a class with a single example is never
    validated on. With a positive ``fraction``, below 1, the validation part has at least one
    example as long as some class has two.
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
