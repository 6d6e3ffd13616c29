"""What a node answers in the rounds of refinement: sums of its training loss, within its limits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from flwr.app import RecordDict

from gems_flwr.client.limits import NodeLimits
from gems_flwr.errors import ModelError
from gems_flwr.moments.loss_sums import LossSums, loss_sums, losses_along
from gems_flwr.samples import Samples
from gems_flwr.spaces.output_layer import OutputLayer
from gems_flwr.typing import Arrays, Float
from gems_flwr.wire.gradient_replies import pack_gradient_reply, pack_losses_reply
from gems_flwr.wire.gradient_requests import Beside, GradientRequest, LossesRequest

# Many more than a server has use for; each takes the node a moment.
_MOST_POINTS = 1000


def answer_gradient(
    request: GradientRequest,
    beside: Beside,
    arrays: Arrays,
    output: OutputLayer,
    samples: Samples,
    bounds: NodeLimits,
    *,
    name: str,
    report: Callable[[LossSums], None] | None = None,
    device: str | torch.device = "cpu",
) -> RecordDict:
    """Return the reply with loss, gradient and curvature of a model.

    Parameters
    ----------
    request : GradientRequest
        What is asked for.
    beside : Beside
        What came beside the model.
    arrays : mapping from str to ndarray
        The model.
    output : OutputLayer
        Its output layer.
    samples : Samples
        What that layer sees of the node's training data.
    bounds : NodeLimits
        What the node gives away at most.
    name : str
        The node's.
    report : callable, optional
        Told what is about to leave the node.
    device : str or torch.device
        Where to compute.

    Raises
    ------
    RefusedError
        If too few samples stand behind the gradient.
    """
    layer = scaled_layer(arrays, output, beside.scale)
    weights = request.weights_of(len(layer))
    by_class = request.by_class
    sums = loss_sums(samples, layer, beside.scale, weights, by_class=by_class, device=device)
    bounds.check_gradient(sums.count, sums.fewest, output.features)
    if report is not None:
        report(sums)
    return pack_gradient_reply(sums, request, beside.basis, name=name)


def answer_losses(
    request: LossesRequest,
    beside: Beside,
    arrays: Arrays,
    output: OutputLayer,
    samples: Samples,
    *,
    name: str,
    device: str | torch.device = "cpu",
) -> RecordDict:
    """Return the reply with the losses at the points that a server wants to try."""
    layer = scaled_layer(arrays, output, beside.scale)
    return pack_losses_reply(losses_at(request, beside, layer, samples, device), name=name)


def losses_at(
    request: LossesRequest,
    beside: Beside,
    layer: Float,
    samples: Samples,
    device: str | torch.device = "cpu",
) -> Float:
    """Return the losses at the points that a server wants to try."""
    points = beside.points
    if beside.direction.shape != layer.shape:
        raise ModelError(f"a step of shape {beside.direction.shape} for a layer of {layer.shape}")
    if points.ndim != 2 or points.shape[1] != 2 or not 1 <= len(points) <= _MOST_POINTS:
        raise ModelError(f"points must be 1 to {_MOST_POINTS} pairs, got shape {points.shape}")
    # The layer itself is the first direction: its multiples cost no bytes.
    directions = np.stack([layer, beside.direction])
    weights = request.weights_of(len(layer))
    return losses_along(samples, layer, directions, points, beside.scale, weights, device)


def scaled_layer(arrays: Arrays, output: OutputLayer, scale: Float) -> Float:
    """Return the output layer of a model with weights of scaled inputs."""
    if len(scale) != output.features:
        raise ModelError(f"{len(scale)} scales for {output.features} inputs")
    return output.scaled_in(arrays, scale)
