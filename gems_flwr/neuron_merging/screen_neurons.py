"""What the neurons of a node may be, seen from those of the others: plausibility before merging.

A merged layer has a neuron in every ball of every node, so what one node sends becomes part of the
network of all: a neuron of length 1,000 drowns the others in the inputs of the next layer, balls of
no size merge with nothing, and a boasted importance takes the places of others' neurons where they
are limited. What is checked here needs no data, only the other nodes' balls, and holds while fewer
than half of the nodes lie. The thresholds are those of `gems_flwr.intersect.screen_spaces`:

==================  =============================================================================
the longest neuron  longer than `FAR` times the median of the nodes' longest: the node is left out
the median length   below a `FAR`-th of the median of the nodes': the node is left out
a radius            below a third of the median of the nodes' smallest radii: counts as that
importance          whose sum is above `HEAVY` times the median: scaled down to that
==================  =============================================================================

Radii are cut where they reach beyond all plausible neurons: no centre moves by that, and the
arithmetic of merging stays within single precision.

What cannot be checked: neurons of plausible length that are useless. Nodes that start from weights
of their own have neurons as unlike as random ones, and from common weights a node with other
classes than most gets other neurons, so how far neurons are from the others' says nothing. Useless
ones add columns that the next layer can do without; every honest neuron still has a merged one in
its ball.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from gems_flwr.averaging.robust_rules import HEAVY, LEAST_MODELS
from gems_flwr.intersect.screen_spaces import FAR, SMALL
from gems_flwr.spaces.neuron_balls import NeuronBalls
from gems_flwr.typing import Float


@dataclasses.dataclass(frozen=True, eq=False)
class ScreenedNeurons:
    """Balls as they may be merged.

    Parameters
    ----------
    layers : tuple of NeuronBalls or None
        One per node; None for a node that is left out.
    reasons : tuple of str
        What was changed or why the node is left out; empty where nothing was.
    """

    layers: tuple[NeuronBalls | None, ...]
    reasons: tuple[str, ...]


def screen_neurons(layers: Sequence[NeuronBalls]) -> ScreenedNeurons:
    """Hold each node's balls against those of the others; see the module's docstring.

    Parameters
    ----------
    layers : sequence of NeuronBalls
        One per node, all of one shape. With fewer than three nothing is changed.
    """
    if len(layers) < LEAST_MODELS:
        return ScreenedNeurons(tuple(layers), ("",) * len(layers))
    lengths = [np.linalg.norm(layer.centers.astype(np.float64), axis=1) for layer in layers]
    far = FAR * float(np.median([each.max() for each in lengths]))
    reasons = _implausible(lengths, far)
    smallest = float(np.median([layer.radii.min() for layer in layers]))
    largest = float(np.median([layer.radii.max() for layer in layers]))
    totals = [_importance(layer).sum() for layer in layers]
    bounds = (smallest / SMALL, max(SMALL * largest, 2 * far), HEAVY * float(np.median(totals)))
    kept: list[NeuronBalls | None] = []
    for index, layer in enumerate(layers):
        if reasons[index]:
            kept.append(None)
            continue
        plausible, reasons[index] = _bounded(layer, *bounds)
        kept.append(plausible)
    return ScreenedNeurons(tuple(kept), tuple(reasons))


def _implausible(lengths: Sequence[Float], far: float) -> list[str]:
    """Return why each node is left out; empty for those that are not."""
    usual = float(np.median([np.median(each) for each in lengths]))
    reasons = []
    for mine in lengths:
        longest, typical = float(mine.max()), float(np.median(mine))
        if longest > far:
            reason = f"it has a neuron of length {longest:.4g}, up to {far:.4g} is plausible"
        elif typical * FAR < usual:
            reason = f"the median length of its neurons is {typical:.4g}, of others' {usual:.4g}"
        else:
            reason = ""
        reasons.append(reason)
    return reasons


def _bounded(
    layer: NeuronBalls, least: float, most: float, heaviest: float
) -> tuple[NeuronBalls, str]:
    """Return a layer within bounds of radii and importance, and what that has changed."""
    radii, importance = layer.radii.astype(np.float64), _importance(layer)
    small, total = int((radii < least).sum()), float(importance.sum())
    notes = []
    if small:
        notes.append(f"{small} of its radii count as {least:.4g}, a third of the others' smallest")
    if total > heaviest:
        notes.append(f"its neurons' importance of {total:.4g} counts as {heaviest:.4g}")
        importance = importance * (heaviest / total)
    if not notes and radii.max() <= most:
        return layer, ""
    plausible = dataclasses.replace(
        layer, radii=np.clip(radii, least, most), importance=importance.astype(np.float32)
    )
    return plausible, "; ".join(notes)


def _importance(layer: NeuronBalls) -> Float:
    assert layer.importance is not None
    return layer.importance.astype(np.float64)
