"""Fine-tuning at the server on a small public sample.

2019, Section 3.3; 2018, Section 3.4: the server updates h_G on public data for a few epochs,
all weights of a convex model, the last layer of a network. The released code tunes GEMS and the
average with Adam at 1e-2 but local and raw models at 1e-3, which flatters GEMS. Decided
here: one rate (1e-3) for everything that is compared, five epochs, batches of 32.

A layer from class-moment cones hardly gains from that and Adam at 1e-2 damages it: it already
stands on all the data. `tune_cones` instead adds the public sample's loss to the cone objective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gems_flwr.devices import chosen_device, end_step, moved
from gems_flwr.intersect.cone_objective import ConeOptions
from gems_flwr.intersect.cones import solve_cones
from gems_flwr.intersect.result import Intersection
from gems_flwr.samples import Samples
from gems_flwr.spaces.cone import ClassMomentCone
from gems_flwr.spaces.output_layer import flatten_linear, unflatten_linear
from gems_flwr.typing import Float


def fine_tune_linear(
    point: Float,
    inputs: Tensor,
    labels: Tensor,
    num_classes: int,
    *,
    epochs: int = 5,
    rate: float = 1e-3,
    batch: int = 32,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> Float:
    """Return a linear layer after a few epochs of Adam on a public sample.

    Parameters
    ----------
    point : array of shape (d,)
        Flat layer to start from; zeros for the ``raw`` baseline.
    inputs : tensor of shape (n, D)
        Public inputs of the layer.
    labels : int tensor of shape (n,)
        Their classes.
    num_classes : int
        Classes of the task.
    epochs, rate, batch : int, float, int
        Adam's schedule; the same for every model that is compared.
    seed : int
        Seed of the order of the samples.
    device : str or torch.device
        Where to compute.
    """
    where = chosen_device(device)
    start_weight, start_bias = unflatten_linear(point, num_classes, inputs.shape[1])
    weight = torch.tensor(start_weight, dtype=torch.float32).to(where).requires_grad_()
    bias = torch.tensor(start_bias, dtype=torch.float32).to(where).requires_grad_()
    optimizer = torch.optim.Adam([weight, bias], lr=rate)
    data = (inputs.to(where), labels.to(where))
    _descend(lambda x: x @ weight.T + bias, optimizer, *data, epochs, batch, seed)
    return flatten_linear(weight.detach().cpu().numpy(), bias.detach().cpu().numpy())


def fine_tune_network(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    *,
    epochs: int = 5,
    rate: float = 1e-3,
    batch: int = 32,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> None:
    """Train all weights of a network for a few epochs of Adam on a public sample, in place.

    Parameters
    ----------
    model : torch.nn.Module
        Maps inputs to class scores; stays in evaluation mode, without dropout.
    inputs, labels, epochs, rate, batch, seed, device
        As in `fine_tune_linear`, with the inputs of the whole network.
    """
    where = chosen_device(device)
    with moved(model, where):
        optimizer = torch.optim.Adam(model.parameters(), lr=rate)
        data = (inputs.to(where), labels.to(where))
        _descend(lambda x: model.eval()(x), optimizer, *data, epochs, batch, seed)


def _descend(
    predict: Callable[[Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    inputs: Tensor,
    labels: Tensor,
    epochs: int,
    batch: int,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed % 2**63)
    x, y = inputs.float(), labels.long()
    for _ in range(epochs):
        order = torch.randperm(len(x), generator=generator)
        for start in range(0, len(x), batch):
            rows = order[start : start + batch].to(x.device)
            optimizer.zero_grad()
            loss = cross_entropy(predict(x[rows]), y[rows])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            end_step(x.device)


def public_weight(count: int, factor: float = 0.2) -> float:
    """Return the weight of a public sample in the cone objective.

    It grows with the size of the sample; ``factor`` (0.1 to 0.3 works) is that of a
    thousand samples.
    """
    if not factor >= 0:
        raise ValueError(f"factor: expected at least 0, got {factor}")
    return factor * count / 1000


def tune_cones(
    cones: Sequence[ClassMomentCone],
    inputs: Tensor,
    labels: Tensor,
    options: ConeOptions | None = None,
    factor: float = 0.2,
    start: Float | None = None,
) -> Intersection:
    """Return the layer that serves the nodes' moments and a public sample together.

    Parameters
    ----------
    cones : sequence of ClassMomentCone
        One per node.
    inputs, labels : tensor
        The public sample.
    options : ConeOptions, optional
        As in `solve_cones`.
    factor : float
        See `public_weight`.
    start : array of shape (d,), optional
        Layer to start from.
    """
    weight = public_weight(len(inputs), factor)
    return solve_cones(cones, options, Samples(inputs, labels), start, weight)
