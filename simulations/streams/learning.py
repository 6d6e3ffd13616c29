"""Learning from a stream: for each batch measure, then step.

The loss that counts is that of the model as it was *before* the batch (prequential
loss; in-place loss in Kamp et al. 2018, Equation 1). Following Keras, and the measurements that
these runs are compared with, a batch counts with the mean loss of its samples, and gradients are
means likewise.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from numpy.typing import NDArray
from torch import nn

from gems_flwr.devices import chosen_device, end_step
from gems_flwr.targets import Target
from gems_flwr.typing import Arrays
from gems_flwr.wire.keys import BATCHES, CORRECT_SHARE_SUM, LOSS_SUM
from simulations.experiment.training import (
    CLASSES,
    TrainOptions,
    make_optimizer,
    placed,
    seeded,
    torch_threads,
)


def learn(
    model: nn.Module,
    batches: Iterable[tuple[NDArray, NDArray]],
    *,
    scale: float,
    options: TrainOptions,
    seed: int,
    memory: Arrays,
    device: str = "cpu",
    threads: int = 1,
    target: Target = CLASSES,
) -> tuple[int, dict[str, float], Arrays]:
    """Train a model in place, one step per batch.

    Parameters
    ----------
    model : torch.nn.Module
        Maps a batch to logits, or to numbers.
    batches : iterable of (features, labels)
        In order; features as stored.
    scale : float
        Factor of the stored features.
    options : TrainOptions
        The optimiser; epochs, patience and batch size do not matter here.
    seed : int
        Source of dropout.
    memory : mapping from str to ndarray
        The optimiser's state after the last batch before these; empty at first.
    device, threads, target
        As in `simulations.experiment.training.fit`.

    Returns
    -------
    tuple
        Number of samples; the metrics that a node reports, without shares of right answers where
        numbers are predicted; the optimiser's state.
    """
    where = chosen_device(device)
    examples = count = 0
    loss_sum = 0.0
    correct: float | None = None
    with torch_threads(threads), placed(model, where, training=True), seeded(seed, where):
        # Here, because a model may have other parameters on another device.
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = make_optimizer(weights, options)
        _load(optimizer, weights, memory)
        for features, labels in batches:
            inputs = torch.tensor(features, dtype=torch.float32).to(where) * scale
            targets = torch.tensor(labels).to(where)
            logits = model(inputs)
            loss = target.loss(logits, targets)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            end_step(where)
            loss_sum += loss.item()
            hits = target.hits(logits, targets)
            correct = None if hits is None else (correct or 0.0) + hits.sum().item() / len(labels)
            examples += len(labels)
            count += 1
        kept = _dump(optimizer, weights)
    right = {} if correct is None else {CORRECT_SHARE_SUM: correct}
    metrics = {LOSS_SUM: loss_sum, **right, BATCHES: count}
    return examples, metrics, kept


def _dump(optimizer: torch.optim.Optimizer, weights: list[nn.Parameter]) -> Arrays:
    """Return an optimiser's state as arrays; plain SGD has none."""
    return {
        f"{position}/{key}": value.detach().cpu().numpy().copy()
        for position, weight in enumerate(weights)
        for key, value in optimizer.state.get(weight, {}).items()
        if isinstance(value, torch.Tensor)
    }


def _load(optimizer: torch.optim.Optimizer, weights: list[nn.Parameter], memory: Arrays) -> None:
    for name, array in memory.items():
        position, _, key = name.partition("/")
        weight = weights[int(position)]
        value = torch.from_numpy(array.copy())
        # A count of steps lives on the CPU unless the optimiser is fused, as torch has it.
        stays = key == "step" and not optimizer.defaults.get("fused")
        optimizer.state[weight][key] = value if stays else value.to(weight.device)
