"""One task's local training on many nodes at once, where a node's whole share is one batch.

Then local training draws nothing: it is a few steps of gradient descent, and those of all nodes are
one computation. Data are made ready once, not in every round, which is what is gained over
`batched_training`; weights agree with it up to rounding.

A network with one hidden layer W, whose inputs are far more than a node has examples, gains again.
Descent moves W by sums of XᵀG alone, G being the loss's gradient by what the layer puts out, and
that is needed only behind X: X(W − η XᵀΣG) = XW − η (XXᵀ) ΣG. So steps take products with XXᵀ, as
large as the node's examples, and weights are written once at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from gems_flwr.averaging.steps import flat, unflat
from gems_flwr.typing import Arrays
from simulations.config import ConfigError
from simulations.experiment.batched_layers import BatchedNetwork
from simulations.experiment.experiment import Experiment


@dataclass(frozen=True)
class _Group:
    """Nodes with shares of about the same size; smaller ones are filled up, and count for less."""

    nodes: NDArray[np.int64]
    inputs: Tensor
    labels: Tensor
    shares: Tensor
    products: Tensor


@dataclass(frozen=True)
class TrainedPair:
    """What a node made of a model, and the mean of its gradients if they were corrected."""

    arrays: Arrays
    gradient: NDArray | None = None


class PairTraining:
    """The nodes that have data for a task.

    Parameters
    ----------
    task : Experiment
        Data, model and options of the task.

    Raises
    ------
    ConfigError
        If local training is not plain gradient descent on whole shares.
    """

    def __init__(self, task: Experiment) -> None:
        options = task.config.train_options
        sizes = np.array([len(share.train) for share in task.shares])
        plain = options.optimizer == "sgd" and not options.momentum and not options.weight_decay
        if not plain or options.patience is not None or options.batch_size < sizes.max():
            raise ConfigError(
                "only plain SGD on whole shares can do without messages: set train.optimizer=sgd, "
                f"train.patience=null, train.batch_size={sizes.max()} or more, and no momentum or "
                "weight decay"
            )
        self._rate, self._steps = options.lr, options.epochs
        self.sizes = sizes
        self._groups: list[_Group] = []
        waiting = sorted(np.flatnonzero(sizes).tolist(), key=lambda node: -int(sizes[node]))
        while waiting:
            members = [n for n in waiting if 2 * sizes[n] >= sizes[waiting[0]]]
            self._groups.append(_group(task, members))
            waiting = waiting[len(members) :]
        self._model = task.build_model()
        self._network = BatchedNetwork(self._model, self._groups[0].inputs[0, :1])
        if self._network.dropouts:
            raise ConfigError("dropout draws masks: set model.dropout=0 to do without messages")
        self._is_shallow = _is_shallow(self._model)

    def updates(self, model: Arrays, nodes: Sequence[int]) -> NDArray:
        """Return what some nodes would take off a model, a row per node."""
        base, places = flat(model), {node: row for row, node in enumerate(nodes)}
        found = np.empty((len(nodes), len(base)), base.dtype)
        if not self._is_shallow:
            for node, pair in self.train(model, nodes).items():
                found[places[node]] = base - flat(pair.arrays)
            return found
        for group in self._groups:
            rows = np.flatnonzero(np.isin(group.nodes, nodes))
            if len(rows):
                hidden, inputs, _, *others = self._descend(model, group, torch.from_numpy(rows))
                parts = [self._rate * each for each in (hidden.mT @ inputs, *others)]
                joined = torch.cat([part.flatten(1) for part in parts], dim=1)
                found[[places[node] for node in group.nodes[rows].tolist()]] = joined.numpy()
        return found

    def norms(self, model: Arrays) -> dict[int, float]:
        """Return the norm of every node's update, without the updates where that is possible."""
        found: dict[int, float] = {}
        for group in self._groups:
            nodes = group.nodes.tolist()
            if not self._is_shallow:
                updates = self.updates(model, nodes).astype(np.float64)
                found |= zip(nodes, np.linalg.norm(updates, axis=1).tolist(), strict=True)
                continue
            # ‖XᵀG‖² is the trace of Gᵀ(XXᵀ)G.
            every = torch.arange(len(nodes))
            hidden, _, products, *others = self._descend(model, group, every)
            squared = ((products @ hidden).double() * hidden).sum((1, 2))
            squared += sum(other.double().square().flatten(1).sum(1) for other in others)
            found |= zip(nodes, (self._rate * squared.sqrt()).tolist(), strict=True)
        return found

    def _descend(self, model: Arrays, group: _Group, rows: Tensor) -> list[Tensor]:
        """Return ΣG, X, XXᵀ, and the summed gradients of all weights but the first."""
        first, first_bias, last, last_bias = (torch.from_numpy(a) for a in model.values())
        every = len(rows) == len(group.nodes)
        inputs, shares, labels, products = (
            each if every else each[rows]
            for each in (group.inputs, group.shares, group.labels, group.products)
        )
        inputs = inputs.flatten(2)
        start = (inputs.flatten(0, 1) @ first.T + first_bias).view(*inputs.shape[:2], -1)
        # Sums of gradients so far: by what the hidden layer puts out, and of all else.
        hidden = torch.zeros_like(start)
        bias = torch.zeros(len(rows), len(first_bias))
        top = torch.zeros(len(rows), *last.shape)
        top_bias = torch.zeros(len(rows), len(last_bias))
        rate = self._rate
        right = F.one_hot(labels, len(last)).to(torch.float32)
        for _ in range(self._steps):
            put = start - rate * (products @ hidden + bias.unsqueeze(1))
            active = put.clamp(min=0)
            weights = last - rate * top
            outputs = active @ weights.mT + (last_bias - rate * top_bias).unsqueeze(1)
            wrong = (outputs.softmax(-1) - right) * shares.unsqueeze(-1)
            inner = (wrong @ weights) * (put > 0)
            hidden, bias = hidden + inner, bias + inner.sum(1)
            top, top_bias = top + wrong.mT @ active, top_bias + wrong.sum(1)
        return [hidden, inputs, products, bias, top, top_bias]

    def train(
        self,
        model: Arrays,
        nodes: Sequence[int],
        corrections: Mapping[int, NDArray] | None = None,
    ) -> dict[int, TrainedPair]:
        """Train a model on some nodes.

        Parameters
        ----------
        model : mapping from str to ndarray
            Where all begin.
        nodes : sequence of int
            Those that train; each must have data.
        corrections : mapping from int to vector, optional
            What is added to every gradient of a node (SCAFFOLD's c − c_i).
        """
        found: dict[int, TrainedPair] = {}
        for group in self._groups:
            rows = np.flatnonzero(np.isin(group.nodes, nodes))
            if len(rows):
                chosen = group.nodes[rows].tolist()
                added = None if corrections is None else [corrections[n] for n in chosen]
                found |= zip(chosen, self._train(model, group, rows, added), strict=True)
        return {node: found[node] for node in nodes}

    def _train(
        self,
        model: Arrays,
        group: _Group,
        rows: NDArray[np.int64],
        added: Sequence[NDArray] | None,
    ) -> list[TrainedPair]:
        picked = torch.from_numpy(rows)
        every = len(rows) == len(group.nodes)
        inputs, shares, labels = (
            each if every else each[picked] for each in (group.inputs, group.shares, group.labels)
        )
        weights = {
            name: nn.Parameter(torch.from_numpy(array).expand(len(rows), *array.shape).clone())
            for name, array in model.items()
        }
        pulls = [unflat(each, model) for each in added] if added else []
        extra = {n: torch.from_numpy(np.stack([p[n] for p in pulls])) for n in model if pulls}
        sums = {name: torch.zeros_like(weight) for name, weight in weights.items() if added}
        for _ in range(self._steps):
            outputs = self._network(weights, inputs, {}).flatten(0, 1)
            losses = F.cross_entropy(outputs, labels.flatten(), reduction="none")
            gradients = torch.autograd.grad(
                (losses.view_as(shares) * shares).sum(), list(weights.values())
            )
            with torch.no_grad():
                for (name, weight), gradient in zip(weights.items(), gradients, strict=True):
                    if added:
                        sums[name] += gradient
                        weight.sub_(gradient + extra[name], alpha=self._rate)
                    else:
                        weight.sub_(gradient, alpha=self._rate)
        stacked = {name: weight.detach().numpy() for name, weight in weights.items()}
        means = {name: (total / self._steps).numpy() for name, total in sums.items()}
        return [
            TrainedPair(
                {name: array[row] for name, array in stacked.items()},
                flat({name: array[row] for name, array in means.items()}) if added else None,
            )
            for row in range(len(rows))
        ]

    def losses(self, model: Arrays) -> dict[int, float]:
        """Return every node's mean loss on its own data before training."""
        self._model.load_state_dict({n: torch.from_numpy(a) for n, a in model.items()})
        found: dict[int, float] = {}
        with torch.no_grad():
            for group in self._groups:
                outputs = self._model.eval()(group.inputs.flatten(0, 1))
                losses = F.cross_entropy(outputs, group.labels.flatten(), reduction="none")
                means = (losses.view_as(group.shares).double() * group.shares).sum(1)
                found |= zip(group.nodes.tolist(), means.tolist(), strict=True)
        return found


def _group(task: Experiment, members: Sequence[int]) -> _Group:
    tables = [task.tensors(task.shares[node].train) for node in members]
    size = len(tables[0][1])
    inputs = torch.stack([_filled(features, size) for features, _ in tables])
    labels = torch.stack([_filled(labels, size) for _, labels in tables])
    counts = torch.tensor([len(labels) for _, labels in tables])
    shares = (torch.arange(size) < counts.unsqueeze(1)) / counts.unsqueeze(1)
    rows = inputs.flatten(2)
    return _Group(
        np.array(members, np.int64), inputs, labels, shares.to(torch.float32), rows @ rows.mT
    )


def _is_shallow(model: nn.Module) -> bool:
    """Return whether a network is linear, ReLU, linear, and nothing else that counts."""
    layers = [each for each in model.modules() if not list(each.children())]
    kinds = [type(each) for each in layers if type(each) not in (nn.Flatten, nn.Dropout)]
    biased = all(each.bias is not None for each in layers if isinstance(each, nn.Linear))
    return kinds == [nn.Linear, nn.ReLU, nn.Linear] and biased


def _filled(values: Tensor, size: int) -> Tensor:
    """Return values followed by copies of the first, which count for nothing."""
    return torch.cat([values, values[:1].expand(size - len(values), *values.shape[1:])])
