"""The balls of a hidden layer's neurons, on a node's own data."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from gems_flwr.devices import exact_device
from gems_flwr.errors import ModelError
from gems_flwr.networks.hidden import read_neuron_inputs
from gems_flwr.networks.inputs import Data, batches
from gems_flwr.networks.layers import outgoing_rows, weight_layers
from gems_flwr.networks.layers_above import finish_network
from gems_flwr.radii.neuron_data import NeuronData, draw_rows
from gems_flwr.radii.neuron_loss import LayersAbove
from gems_flwr.radii.neuron_radii import build_neuron_balls
from gems_flwr.spaces.neuron_balls import NeuronBalls
from gems_flwr.typing import LOSS_MEASURES, Arrays
from gems_flwr.wire.requests import NeuronRequest


def build_neurons(
    request: NeuronRequest,
    arrays: Arrays,
    model: nn.Module,
    data: Data,
    *,
    seed: int,
    activation: nn.Module | None = None,
    device: str | torch.device = "cpu",
) -> NeuronBalls:
    """Build the balls that were asked for.

    Parameters
    ----------
    request : NeuronRequest
        Which layer, and how.
    arrays : mapping from str to ndarray
        The node's trained network.
    model : torch.nn.Module
        Its architecture.
    data : pair of arrays, or iterable of batches
        Where deviations are measured.
    seed : int
        Source of directions and of the choice of patches.
    activation : torch.nn.Module, optional
        What follows the layer where the model does not show it.
    device : str or torch.device
        Where to compute.
    """
    layers, asked = weight_layers(arrays), request.neurons
    if request.layer >= len(layers) - 1:
        raise ModelError(
            f"the server asks for hidden layer {request.layer}, the model has {len(layers) - 1}"
        )
    layer, above = layers[request.layer], layers[request.layer + 1]
    by_loss = asked.measure in LOSS_MEASURES
    if by_loss:
        # Read once: a stream of batches may come in another order the next time.
        data = _whole(data)
    inputs = read_neuron_inputs(
        model,
        arrays,
        request.layer,
        data,
        max_rows=asked.max_rows,
        seed=seed,
        activation=activation,
        device=device,
    )
    where = exact_device(device)
    outgoing = _tensor(outgoing_rows(arrays, layer, above), where)
    bias = None if above.bias is None else _tensor(arrays[above.bias], where)
    neurons = NeuronData(
        weight=_tensor(arrays[layer.weight].reshape(layer.width, -1), where),
        bias=None if layer.bias is None else _tensor(arrays[layer.bias], where),
        inputs=inputs.rows,
        activation=inputs.activation,
        outgoing=outgoing if asked.outgoing else None,
    )
    upper = None
    if by_loss:
        samples, labels = data
        finish = finish_network(
            model, arrays, request.layer, samples[:2], activation=activation, device=where
        )
        # The rows that the inputs are of, by the same draw.
        drawn = draw_rows(labels.long(), asked.max_rows, seed).to(where)
        upper = LayersAbove(outgoing, bias, finish, drawn)
    return build_neuron_balls(
        neurons,
        request.epsilon,
        asked.radius,
        directions=asked.directions,
        measure=asked.measure,
        seed=seed % 2**63,
        outgoing_norms=outgoing.norm(dim=1),
        above=upper,
        bias_above=bias if request.bias_above else None,
    )


def _whole(data: Data) -> tuple[torch.Tensor, torch.Tensor]:
    parts = list(batches(data))
    if not parts:
        raise ModelError("there is no data to build a space on")
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def _tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.array(array)).float().to(device)
