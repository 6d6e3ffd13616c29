"""Matching hidden neurons one to one, then averaging (after Singh & Jaggi 2020, OTFusion).

Networks that were trained from different weights have their hidden neurons in different orders.
Layer by layer, each network's neurons are put into the order of a reference network's: the
assignment with the smallest sum of squared distances between incoming weights (bias included),
once the layer below is in its new order. The layer above follows, so the network's function stays
what it was. Then all are averaged. A network without hidden layers is only averaged.

Simplified against OTFusion: all networks have the same widths, where its transport plan with equal
masses is an assignment, too; neurons are compared by their weights and not by their activations,
the cheaper of its two variants, which needs no data; there is no entropic smoothing of the plan
and no fine-tuning of the result.

Decided here: networks that were trained from the *same* weights have their neurons in the same
order already. The assignment does not see that: after long training the nearest neuron is often
another one, by a hair, and many such exchanges make the mean worse. So it is asked first whether
positions mean something. The sum of distances between neurons in the same position is held against
that of a random assignment, whose mean and variance are known (Hoeffding 1951). Where it is smaller
by more than `SIGMAS` deviations, neurons stay where they are, unless matching brings the networks
nearer than `NEARER` of their distance, as it does with copies that somebody has partly shuffled.
The order is then the identity, and the result the average. Between equally good orders it is the
identity, too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist

from gems_flwr.averaging.means import weighted_mean
from gems_flwr.model_merging.rows import shares
from gems_flwr.networks.layers import WeightLayer, neuron_rows, weight_layers
from gems_flwr.typing import Arrays, Float

SIGMAS = 3.0
NEARER = 0.5


def align_to(reference: Arrays, model: Arrays) -> dict[str, NDArray]:
    """Return a network with its hidden neurons in the order of a reference network's.

    Parameters
    ----------
    reference, model : mappings from str to ndarray
        Chains of linear and convolutional layers, of the same shapes.

    Returns
    -------
    dict of str to ndarray
        The same function as `model`.
    """
    layers = weight_layers(reference)
    aligned = dict(model)
    for layer, above in itertools.pairwise(layers):
        costs = _costs(reference, aligned, layer)
        places, order = linear_sum_assignment(costs)
        if float(costs[places, order].sum()) < float(np.trace(costs)):
            _reorder(aligned, layer, above, order)
    kept = sigmas_below_chance(reference, model) > SIGMAS
    if kept and _distance(reference, aligned) > NEARER * _distance(reference, model):
        return dict(model)
    return aligned


def sigmas_below_chance(reference: Arrays, model: Arrays) -> float:
    """Return how much nearer neurons of the same position are than in a random order.

    Parameters
    ----------
    reference, model : mappings from str to ndarray
        Networks of the same shapes.

    Returns
    -------
    float
        In standard deviations of the random order's sum of distances over all hidden layers; 0
        where there is no order to speak of.
    """
    gain = variance = 0.0
    for layer in weight_layers(reference)[:-1]:
        costs = _costs(reference, model, layer)
        if layer.width < 2:
            continue
        gain += float(costs.sum()) / layer.width - float(np.trace(costs))
        centred = costs - costs.mean(axis=0) - costs.mean(axis=1)[:, None] + costs.mean()
        variance += float((centred**2).sum()) / (layer.width - 1)
    return gain / math.sqrt(variance) if variance > 0 else 0.0


def match_and_average(
    models: Sequence[Arrays], weights: Sequence[float], *, reference: int = 0
) -> dict[str, NDArray]:
    """Align all networks to one of them and return the weighted mean.

    Parameters
    ----------
    models : sequence of mappings from str to ndarray
        Networks of the same shapes; at least one.
    weights : sequence of float
        How much each counts, above 0.
    reference : int
        Position of the network that sets the order.
    """
    parts = shares(weights, models)
    aligned = [
        dict(model) if position == reference else align_to(models[reference], model)
        for position, model in enumerate(models)
    ]
    return weighted_mean(aligned, parts)


def _costs(reference: Arrays, model: Arrays, layer: WeightLayer) -> Float:
    found: Float = cdist(neuron_rows(reference, layer), neuron_rows(model, layer), "sqeuclidean")
    return found


def _distance(reference: Arrays, model: Arrays) -> float:
    layers = weight_layers(reference)
    return sum(float(np.trace(_costs(reference, model, layer))) for layer in layers)


def _reorder(
    arrays: dict[str, NDArray], layer: WeightLayer, above: WeightLayer, order: NDArray
) -> None:
    for key in layer.keys:
        arrays[key] = arrays[key][order]
    weight = arrays[above.weight]
    # A flattened convolution feeds a block of inputs per filter.
    blocks = weight.reshape(above.width, layer.width, -1)
    arrays[above.weight] = np.ascontiguousarray(blocks[:, order]).reshape(weight.shape)
