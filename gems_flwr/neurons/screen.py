"""Which nodes' neurons are plausible beside those of the others, before they are merged.

Always, `oversized_layers` refuses neurons so long that no node could train the layer above: longer
than `MAX_NEURON_RATIO` times the longest that the server sent out, or that most nodes have.
`screen_neurons` is stricter, for robust runs: a neuron of length 1,000 drowns the others in the
inputs of the next layer, balls of no size merge with nothing, and a boasted importance takes the
places of others' neurons. It holds while fewer than half of the nodes lie:

- the longest neuron above `FAR` times the median of the nodes' longest, or the median length below
  a `FAR`-th of the nodes': the node is left out;
- a radius below a third of the median of the nodes' smallest counts as that;
- importance whose sum is above `HEAVY` times the median is scaled down to that.

Radii are cut where they reach beyond all plausible neurons, which keeps merging within single
precision. What cannot be checked: neurons of plausible length that are useless.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gems_flwr.averaging import HEAVY, LEAST_MODELS
from gems_flwr.bounds import MAX_NEURON_RATIO
from gems_flwr.neurons.balls import NeuronBalls
from gems_flwr.spaces import FAR, SMALL
from gems_flwr.typing import Float


def oversized_layers(layers: Sequence[NeuronBalls], sent: NDArray) -> dict[int, str]:
    """Return which nodes, by position, have neurons too long beside those sent out, and why."""
    if not layers:
        return {}
    longest = [float(_lengths(layer.centers).max()) for layer in layers]
    usual = sorted(longest)[(len(longest) - 1) // 2]
    limit = MAX_NEURON_RATIO * max(usual, float(_lengths(sent).max()))
    return {
        position: f"neurons: expected lengths up to {limit:.4g}, {MAX_NEURON_RATIO:g} times what "
        f"the server or most nodes have, got {length:.4g}"
        for position, length in enumerate(longest)
        if length > limit
    }


def _lengths(rows: NDArray) -> Float:
    return np.asarray(np.linalg.norm(rows.astype(np.float64), axis=1))


def screen_neurons(layers: Sequence[NeuronBalls]) -> tuple[list[NeuronBalls | None], list[str]]:
    """Hold each node's balls against those of the others; see the module's docstring.

    Returns the balls as they may be merged, None for a node that is left out; and what was changed
    or why the node is left out, empty where nothing was. With fewer than three nodes nothing is.
    """
    if len(layers) < LEAST_MODELS:
        return list(layers), [""] * len(layers)
    lengths = [_lengths(layer.centers) for layer in layers]
    far = FAR * float(np.median([each.max() for each in lengths]))
    usual = float(np.median([np.median(each) for each in lengths]))
    smallest = float(np.median([layer.radii.min() for layer in layers]))
    largest = float(np.median([layer.radii.max() for layer in layers]))
    totals = [layer.importance.astype(np.float64).sum() for layer in layers]
    bounds = (smallest / SMALL, max(SMALL * largest, 2 * far), HEAVY * float(np.median(totals)))
    kept: list[NeuronBalls | None] = []
    reasons = []
    for layer, mine in zip(layers, lengths, strict=True):
        longest, typical = float(mine.max()), float(np.median(mine))
        plausible: NeuronBalls | None = None
        if longest > far:
            reason = f"it has a neuron of length {longest:.4g}, up to {far:.4g} is plausible"
        elif typical * FAR < usual:
            reason = f"the median length of its neurons is {typical:.4g}, of others' {usual:.4g}"
        else:
            plausible, reason = _bounded(layer, *bounds)
        kept.append(plausible)
        reasons.append(reason)
    return kept, reasons


def _bounded(
    layer: NeuronBalls, least: float, most: float, heaviest: float
) -> tuple[NeuronBalls, str]:
    """Return a layer within bounds of radii and importance, and what that has changed."""
    radii, importance = layer.radii.astype(np.float64), layer.importance.astype(np.float64)
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
