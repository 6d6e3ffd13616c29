"""Class sums of many nodes as one kept total, and back: full moments that only ever add up.

A node's summand has a count, a sum and half of the symmetric sum of outer products for every class
of the task, so it has the same shape on every node. `gems_flwr.secure.kept_total` keeps the total,
`gems_flwr.secure.signed_difference` takes a node out of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gems_flwr.bounds import MAX_EXAMPLES
from gems_flwr.errors import SecureSumError, SpaceError
from gems_flwr.moments.class_sums import ClassSums
from gems_flwr.secure.fixed_point import Layout, Section, Words
from gems_flwr.secure.kept_total import KeptTotal
from gems_flwr.typing import Float

KIND = "sums of classes"
_COUNTS, _SUMS, _OUTERS = "counts", "sums", "outers"


def class_sums_layout(
    num_classes: int, features: int, nodes: int, *, largest: float, samples: float, bits: int = 64
) -> Layout:
    """Return how class sums are written as a summand.

    Parameters
    ----------
    num_classes, features : int
        Size of the layer.
    nodes : int
        How many may add something, at least 1.
    largest : float
        No input is larger, above 0.
    samples : float
        No node has more of one class, above 0.
    bits : int, default 64
        Of the rings of sums and outer products, 8 to 64. Fewer lose digits.
    """
    half = features * (features + 1) // 2
    return Layout(
        [
            Section(_COUNTS, (num_classes,), min(samples, float(MAX_EXAMPLES)), 64),
            Section(_SUMS, (num_classes, features), samples * largest, bits),
            Section(_OUTERS, (num_classes, half), samples * largest**2, bits),
        ],
        nodes,
    )


def class_sums_words(layout: Layout, sums: ClassSums, min_count: int = 1) -> Words:
    """Return a node's class sums as a summand.

    Parameters
    ----------
    layout : Layout
        See `class_sums_layout`.
    sums : ClassSums
        Of the node; classes below `min_count` samples are left out.
    min_count : int, default 1
        Fewest samples of a class.

    Raises
    ------
    SpaceError
        If a number is larger than the layout has room for.
    """
    whole = sums.over_all_classes(min_count)
    rows, columns = np.triu_indices(whole.sums.shape[1])
    outers = whole.outers[:, rows, columns]
    return layout.encode({_COUNTS: whole.counts, _SUMS: whole.sums, _OUTERS: outers})


def total_of(layout: Layout, words: Words, nodes: Sequence[str]) -> KeptTotal:
    """Return a sum of summands as a total that can be kept."""
    return KeptTotal(layout, words, tuple(nodes), {"kind": KIND})


def class_sums_of(total: KeptTotal) -> ClassSums:
    """Return the class sums of all nodes in a total.

    Raises
    ------
    SecureSumError
        If it is the total of something else.
    SpaceError
        If no samples have such sums: a count below 0, a negative variance.
    """
    sections = {section.name: section for section in total.layout.sections}
    if total.about.get("kind") != KIND or set(sections) != {_COUNTS, _SUMS, _OUTERS}:
        raise SecureSumError(f"a total of class sums is needed, got one of {sorted(sections)}")
    values = total.layout.decode(total.words)
    counts, (classes, features) = np.rint(values[_COUNTS]), sections[_SUMS].shape
    if (counts < 0).any():
        raise SpaceError(_COUNTS, "at least 0 of every class", float(counts.min()))
    rows, columns = np.triu_indices(features)
    outers = np.zeros((classes, features, features))
    outers[:, rows, columns] = outers[:, columns, rows] = values[_OUTERS]
    labels = np.arange(classes, dtype=np.int64)
    sums = ClassSums(classes, labels, counts, values[_SUMS], outers)
    _check(sums, _rounding(total, _OUTERS) + 2 * _largest_mean(sums) * _rounding(total, _SUMS))
    return sums


def _rounding(total: KeptTotal, name: str) -> float:
    """Return by how much rounding can have moved a number, at most."""
    [section] = [s for s in total.layout.sections if s.name == name]
    return section.step(total.layout.nodes) * len(total.nodes) / 2


def _largest_mean(sums: ClassSums) -> float:
    return float(np.abs(sums.sums / np.maximum(sums.counts, 1)[:, None]).max(initial=0.0))


def _check(sums: ClassSums, rounding: float) -> None:
    """Refuse sums that no samples can have, but for rounding."""
    _, covariances = sums.moments()
    width = covariances.shape[-1]
    for label, count in enumerate(sums.counts):
        if count < 1:
            if sums.sums[label].any() or sums.outers[label].any():
                raise SpaceError(f"class {label}", "sums of 0 for a count of 0", "others")
            continue
        spread: Float = covariances[label]
        slack = 5e-7 * float(np.trace(spread)) + width * rounding / count + 1e-12
        try:
            np.linalg.cholesky(spread + slack * np.eye(width))
        except np.linalg.LinAlgError:
            raise SpaceError(
                f"class {label}", "sums that samples can have", "a negative variance"
            ) from None
