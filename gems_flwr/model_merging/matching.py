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
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist

from gems_flwr.averaging.means import weighted_mean
from gems_flwr.model_merging.rows import shares
from gems_flwr.networks.layers import WeightLayer, neuron_rows, weight_layers
from gems_flwr.typing import Arrays


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
        costs = cdist(neuron_rows(reference, layer), neuron_rows(aligned, layer), "sqeuclidean")
        _, order = linear_sum_assignment(costs)
        _reorder(aligned, layer, above, order)
    return aligned


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


def _reorder(
    arrays: dict[str, NDArray], layer: WeightLayer, above: WeightLayer, order: NDArray
) -> None:
    for key in layer.keys:
        arrays[key] = arrays[key][order]
    weight = arrays[above.weight]
    # A flattened convolution feeds a block of inputs per filter.
    blocks = weight.reshape(above.width, layer.width, -1)
    arrays[above.weight] = np.ascontiguousarray(blocks[:, order]).reshape(weight.shape)
