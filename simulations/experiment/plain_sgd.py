"""Plain gradient descent of a dense network, written out: for ``backend=lockstep``.

A step of stochastic gradient descent with ten examples on a network of some hundred thousand
weights reads and writes every weight several times: for the gradient, which is stored and read
again, and for the step. Here the products of a layer are added to its weights as they are made, so
that no gradient is stored, and nothing is recorded for a backward pass. With McMahan's 2NN (199,210
weights) and batches of 10 a client takes 16 ms, where training by itself takes 46 and training ten
clients together 32 ms each, as their weights no longer fit a processor's cache.

Numbers differ from those of `simulations.experiment.training.fit` by rounding alone: the same
examples come in the same order. Small networks, where calling PyTorch is what takes time, are
better trained together (`simulations.experiment.batched_training`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gems_flwr.devices import chosen_device
from gems_flwr.targets import Classes
from simulations.data.examples import Examples
from simulations.experiment.training import TrainOptions, tensors, torch_threads

# Below it, training nodes together is quicker.
_LEAST_WEIGHTS = 100_000


def suits(model: nn.Module, schedule: dict[str, Any]) -> bool:
    """Return whether a training is one that is written out here, and worth it.

    Parameters
    ----------
    model : torch.nn.Module
        What is to be trained.
    schedule : dict
        The keyword arguments of `simulations.experiment.training.fit`.
    """
    options: TrainOptions = schedule["options"]
    return (
        options.optimizer == "sgd"
        and options.momentum == options.weight_decay == 0
        and options.patience is None
        and not schedule.get("proximal_mu")
        and isinstance(schedule.get("target", Classes()), Classes)
        and chosen_device(schedule.get("device", "cpu")).type == "cpu"
        and sum(weight.numel() for weight in model.parameters()) >= _LEAST_WEIGHTS
        and is_dense(model)
    )


def is_dense(model: nn.Module) -> bool:
    """Return whether a network is dense layers with ReLU or nothing between, and no dropout."""
    if type(model) is not nn.Sequential:
        return False
    modules = list(model)
    linear = [each for each in modules if type(each) is nn.Linear]
    return (
        bool(linear)
        and modules[-1] is linear[-1]
        and all(each.bias is not None for each in linear)
        and all(w.requires_grad and w.dtype == torch.float32 for w in model.parameters())
        and not any(weight._backward_hooks for weight in model.parameters())
        and all(_is_known(each, first=index == 0) for index, each in enumerate(modules))
    )


def _is_known(module: nn.Module, *, first: bool) -> bool:
    if type(module) is nn.Flatten:
        return first and module.start_dim == 1
    if type(module) is nn.Dropout:
        return module.p == 0
    return type(module) in (nn.Linear, nn.ReLU) and not (first and type(module) is nn.ReLU)


def fit_plainly(
    model: nn.Module,
    examples: Examples,
    *,
    scale: float,
    options: TrainOptions,
    seed: int,
    threads: int = 1,
) -> dict[str, float]:
    """Train a dense network in place; see `simulations.experiment.training.fit`.

    Parameters
    ----------
    model : torch.nn.Module
        One of which `is_dense` holds.
    examples, scale, options, seed, threads
        As in `fit`. Of the options learning rate, batch size and epochs count.

    Returns
    -------
    dict of str to float
        What `fit` would have returned.
    """
    # As in `fit`, which has a second stream for dropout.
    shuffle_seed = int(np.random.SeedSequence(seed).generate_state(2)[0])
    shuffler = torch.Generator().manual_seed(shuffle_seed)
    with torch_threads(threads), torch.no_grad():
        network = _Dense(model)
        inputs, labels = tensors(examples, scale=scale)
        inputs = inputs.flatten(1)
        wanted = F.one_hot(labels, network.outputs).to(torch.float32)
        for _ in range(options.epochs):
            order = torch.randperm(len(labels), generator=shuffler)
            # Once an epoch: batches are then rows that lie side by side.
            mixed, targets = inputs[order], wanted[order]
            batches = zip(
                torch.split(mixed, options.batch_size),
                torch.split(targets, options.batch_size),
                strict=True,
            )
            seen = torch.cat([network.step(*batch, options.lr) for batch in batches])
        truth = labels[order]
        loss = float(F.cross_entropy(seen.double(), truth))
        right = int((seen.argmax(1) == truth).sum())
    return {
        "train_loss": loss,
        "train_accuracy": right / len(labels),
        "epochs": float(options.epochs),
    }


class _Dense:
    """A dense network whose weights are changed in place."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.children())
        places = [index for index, each in enumerate(modules) if isinstance(each, nn.Linear)]
        linear = [each for each in modules if isinstance(each, nn.Linear)]
        self._weights = [each.weight.detach() for each in linear]
        self._biases = [each.bias.detach() for each in linear]
        ends = [*places[1:], len(modules)]
        self._is_cut = [
            any(isinstance(each, nn.ReLU) for each in modules[start:end])
            for start, end in zip(places, ends, strict=True)
        ]
        self.outputs = linear[-1].out_features

    def step(self, inputs: Tensor, wanted: Tensor, rate: float) -> Tensor:
        """Take a step on the mean cross entropy; return the logits before it."""
        seen = [inputs]
        for weight, bias, is_cut in zip(self._weights, self._biases, self._is_cut, strict=True):
            outputs = torch.addmm(bias, seen[-1], weight.t())
            seen.append(outputs.relu_() if is_cut else outputs)
        logits = seen.pop()
        # The gradient of the cross entropy at the logits, times the number of examples.
        error = torch.softmax(logits, 1).sub_(wanted)
        share = -rate / len(inputs)
        for index in reversed(range(len(self._weights))):
            weight, below = self._weights[index], None
            if index:
                below = torch.mm(error, weight)
                if self._is_cut[index - 1]:
                    below.mul_(seen[index] > 0)
            weight.addmm_(error.t(), seen[index], alpha=share)
            self._biases[index].add_(error.sum(0), alpha=share)
            if below is not None:
                error = below
        return logits
