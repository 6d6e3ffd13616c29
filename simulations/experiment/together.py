"""The local training of many nodes as one computation: what ``backend=lockstep`` adds.

Most of a small network's step goes into calling PyTorch. `train_together` takes the steps that
`simulations.experiment.training` takes node by node for all nodes at once: weights side by side in
one tensor, one forward and one backward pass, one optimiser.

Every node has its own order of examples, dropout masks and early stopping, drawn from its own seed
as it would draw them alone. All have taken equally many steps at any time (Adam counts them), and
nodes that are done leave. A smaller batch is filled up with examples that do not count.

Numbers differ from training one by one by rounding alone, some 1e-6 of the weights' size over a few
hundred steps. Where early stopping compares accuracies, that can cost an epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gems_flwr.devices import chosen_device, end_step, sum_type
from gems_flwr.targets import Target
from gems_flwr.typing import Arrays
from simulations.data.examples import Examples
from simulations.experiment.training import (
    CLASSES,
    Learned,
    Progress,
    TrainOptions,
    draws_of,
    fit,
    learn,
    make_optimizer,
    pull,
    torch_threads,
)

# Of weights that are trained at once, unless few nodes are more: what a processor keeps at hand.
_CHUNK_BYTES = 16 * 2**20
_ACCELERATOR_CHUNK_BYTES = 512 * 2**20
_FEW = 16
# They have no weights and treat every example by itself, so nodes need not be told apart.
_PLAIN = (nn.Identity, nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh)


@dataclass(frozen=True, eq=False)
class Order:
    """What a node is about to train, in place; options as in `training.fit`."""

    model: nn.Module
    # All of a node's examples as one, or batches of a stream in their order.
    batches: Sequence[Examples]
    seed: int
    # Of a stream: the optimiser's state. None: passes over examples.
    memory: Arrays | None = None
    scale: float = field(default=1.0, kw_only=True)
    options: TrainOptions = field(kw_only=True)
    device: str = field(default="cpu", kw_only=True)
    threads: int = field(default=1, kw_only=True)
    proximal_mu: float = field(default=0.0, kw_only=True)
    target: Target = field(default=CLASSES, kw_only=True)

    def alone(self) -> dict[str, float] | Learned:
        """Train by itself; return what `fit` or `learn` does."""
        shared: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("scale", "options", "seed", "device", "threads", "target")
        }
        if self.memory is not None:
            return learn(self.model, self.batches, memory=self.memory, **shared)
        [examples] = self.batches
        return fit(self.model, examples, proximal_mu=self.proximal_mu, **shared)

    def why_alone(self) -> str | None:
        """Return why it cannot be trained together with others; None if it can."""
        model = self.model
        if not sum(map(len, self.batches)) or not any(w.requires_grad for w in model.parameters()):
            return "there is nothing to train"
        if any(weight._backward_hooks for weight in model.parameters()):
            return "its gradients are corrected on the way (SCAFFOLD)"
        other = next((layer for _, layer in _chain(model) if not _is_known(layer)), None)
        if other is not None:
            return f"it has {type(other).__name__}; a chain of dense layers is needed"
        if len({weight.dtype for weight in model.parameters()}) != 1:
            return "its weights differ in precision"
        return None

    def kind(self) -> tuple[Any, ...]:
        """Return what orders that can be trained together have in common."""
        model, first, memory = self.model, self.batches[0], self.memory
        layers = [(name, type(layer), layer.extra_repr()) for name, layer in _chain(model)]
        weights = [(tuple(w.shape), w.dtype, w.requires_grad) for w in model.parameters()]
        data = (first.features.shape[1:], first.features.dtype.str, first.labels.dtype.str)
        where = (self.scale, self.device, self.threads, self.proximal_mu, type(self.target))
        if memory is None:
            return (*layers, *weights, data, where, self.options)
        # Adam's count of steps is one for all.
        steps = [(key, float(array)) for key, array in memory.items() if array.size == 1]
        return (*layers, *weights, data, where, self.options, len(self.batches), *steps)


Outcome = dict[str, float] | Learned
# Trains an order, or returns None if the node is to do it itself.
Meeting = Callable[[Order], Outcome | None]

_meeting: ContextVar[Meeting | None] = ContextVar("meeting", default=None)


@contextmanager
def meeting(place: Meeting) -> Iterator[None]:
    """Let what is trained in this thread be handed over to `place`."""
    token = _meeting.set(place)
    try:
        yield
    finally:
        _meeting.reset(token)


def carry_out(order: Order) -> Outcome:
    """Train where nodes meet, if they do; else alone."""
    place = _meeting.get()
    outcome = None if place is None else place(order)
    return order.alone() if outcome is None else outcome


def train_together(orders: Sequence[Order]) -> list[Outcome | None]:
    """Carry out orders that need not be alone, in few computations.

    The outcome is None where there is no other of its kind, so that nothing is gained.
    """
    found: list[Outcome | None] = [None] * len(orders)
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for index, order in enumerate(orders):
        kinds.setdefault(order.kind(), []).append(index)
    for members in kinds.values():
        first = orders[members[0]]
        if len(members) == 1:
            continue
        with torch_threads(first.threads):
            for chunk in _chunks(orders, members, chosen_device(first.device)):
                for index, outcome in zip(
                    chunk, _Cohort([orders[i] for i in chunk]).train(), strict=True
                ):
                    found[index] = outcome
    return found


def _chunks(
    orders: Sequence[Order], members: Sequence[int], device: torch.device
) -> Iterator[list[int]]:
    """Yield who is trained at once, with batches at most twice as large as another's."""
    limit = _CHUNK_BYTES if device.type == "cpu" else _ACCELERATOR_CHUNK_BYTES
    each = sum(weight.nbytes for weight in orders[members[0]].model.parameters())
    most = max(_FEW, limit // max(1, each))
    groups: list[list[int]] = []
    for index in sorted(members, key=lambda index: -sum(map(len, orders[index].batches))):
        if not groups or _width(orders[groups[-1][0]]) > 2 * _width(orders[index]):
            groups.append([])
        groups[-1].append(index)
    for group in groups:
        for part in np.array_split(np.array(group), -(-len(group) // most)):
            yield part.tolist()


def _width(order: Order) -> int:
    """Return how many examples a step has."""
    count = len(order.batches[0])
    return count if order.memory is not None else min(order.options.batch_size, count)


class _Cohort:
    """Nodes that are trained at once.

    Their weights are the rows of `_weights`; `_rows` says whose rows are left.
    """

    def __init__(self, orders: Sequence[Order]) -> None:
        self._orders, self._options = orders, orders[0].options
        self._streams = orders[0].memory is not None
        self._device = chosen_device(orders[0].device)
        count = len(orders)
        self._rows = np.arange(count)
        draws = [draws_of(order.seed) for order in orders]
        self._shufflers = [shuffler for shuffler, _ in draws]
        self._droppers = [
            torch.Generator().manual_seed(order.seed if self._streams else dropout)
            for order, (_, dropout) in zip(orders, draws, strict=True)
        ]
        self._progress = [Progress(self._options) for _ in orders]
        # All data in one tensor, as they are stored, so that a step takes its batches at once.
        examples = Examples.concatenate([batch for order in orders for batch in order.batches])
        self._sizes = np.array([sum(map(len, order.batches)) for order in orders])
        self._starts = np.cumsum(self._sizes) - self._sizes
        self._features = torch.from_numpy(examples.features.copy()).to(self._device)
        self._labels = torch.from_numpy(examples.labels.copy()).to(self._device)
        self._widths = np.array([_width(order) for order in orders])
        self._size = int(self._widths.max())
        self._batches = -(-self._sizes // self._widths)
        self._places = np.zeros((count, int(self._batches.max()), self._size), np.int64)
        self._place_weights()

    def _place_weights(self) -> None:
        models = [dict(order.model.named_parameters()) for order in self._orders]
        self._trained = [name for name, weight in models[0].items() if weight.requires_grad]
        self._weights = {
            name: nn.Parameter(
                torch.stack([model[name].detach() for model in models]).to(self._device),
                requires_grad=name in self._trained,
            )
            for name in models[0]
        }
        self._optimizer = make_optimizer(self._params, self._options)
        self._load_memory()
        mu = self._orders[0].proximal_mu
        self._before = [weight.detach().clone() for weight in self._params] if mu else []
        first = self._features[:1].to(torch.float32)
        self._network = _SideBySide(self._orders[0].model, first)
        self._loss = torch.zeros(len(models), dtype=sum_type(self._device), device=self._device)
        self._correct = torch.zeros_like(self._loss)

    @property
    def _params(self) -> list[nn.Parameter]:
        return [self._weights[name] for name in self._trained]

    def train(self) -> list[Outcome]:
        """Train until all are done; return each one's outcome."""
        found: list[Any] = [None] * len(self._orders)
        step = 0
        while len(self._rows):
            position = step % self._batches[self._rows]
            for node in self._rows[position == 0]:
                self._shuffle(int(node))
            judged = self._step(position)
            end_step(self._device)
            step += 1
            done = []
            for row in np.flatnonzero(position == self._batches[self._rows] - 1):
                outcome = self._end_epoch(int(row), judged)
                if outcome is not None:
                    found[self._rows[row]] = outcome
                    done.append(int(row))
            if done:
                self._dismiss(done)
        return found

    def _shuffle(self, node: int) -> None:
        """Set the order of a node's examples for a pass."""
        size, batches, width = (int(a[node]) for a in (self._sizes, self._batches, self._widths))
        order = np.arange(size)
        if not self._streams:
            order = torch.randperm(size, generator=self._shufflers[node]).numpy()
        # What fills up the last batch counts for nothing.
        filled = np.concatenate([order, np.zeros(batches * width - size, np.int64)])
        self._places[node] = self._starts[node]
        self._places[node, :batches, :width] += filled.reshape(batches, width)

    def _step(self, position: NDArray[np.int64]) -> bool:
        """Take the next step of all; return whether predictions are right or wrong."""
        rows, size, target = self._rows, self._size, self._orders[0].target
        left = self._sizes[rows] - position * self._widths[rows]
        counts = torch.from_numpy(np.minimum(left, self._widths[rows]))
        inside = torch.arange(size) < counts.unsqueeze(1)
        shares = (inside / counts.unsqueeze(1)).to(torch.float32).to(self._device)
        chosen = torch.from_numpy(self._places[rows, position].reshape(-1)).to(self._device)
        labels = self._labels.index_select(0, chosen)
        stored = self._features.index_select(0, chosen)
        scaled = stored.to(torch.float32) * self._orders[0].scale
        inputs = scaled.view(-1, size, *stored.shape[1:])
        outputs = self._network(self._weights, inputs, self._masks(counts)).flatten(0, 1)
        losses = (target.losses(outputs, labels).view_as(shares) * shares).sum(1)
        self._optimizer.zero_grad()
        losses.sum().backward()  # type: ignore[no-untyped-call]
        if self._before:
            pull(self._params, self._before, self._orders[0].proximal_mu)
        self._optimizer.step()
        with torch.no_grad():
            # Of a stream every batch counts as much, of a pass every example.
            weights = torch.ones_like(counts) if self._streams else counts
            goes_on = torch.from_numpy(position != 0).to(self._device)
            self._loss = self._loss * goes_on + losses * weights.to(self._device)
            hits = target.hits(outputs, labels)
            if hits is not None:
                right = (hits.view_as(shares) & inside.to(self._device)).sum(1)
                each = right.to(self._loss.dtype) / counts.to(self._device)
                self._correct = self._correct * goes_on + each * weights.to(self._device)
        return hits is not None

    def _masks(self, counts: Tensor) -> dict[str, Tensor]:
        """Draw each node's dropout, as it would draw it alone."""
        masks = {}
        for name, (rate, shape) in self._network.dropouts.items():
            mask = torch.ones(len(counts), self._size, *shape)
            for row, node in enumerate(self._rows):
                mask[row, : int(counts[row])].bernoulli_(1 - rate, generator=self._droppers[node])
            masks[name] = mask.div_(1 - rate).to(self._device)
        return masks

    def _end_epoch(self, row: int, judged: bool) -> Outcome | None:
        """Return a node's outcome if its last pass is over."""
        node, options = int(self._rows[row]), self._options
        progress, size = self._progress[node], int(self._sizes[node])
        if self._streams:
            right = float(self._correct[row]) if judged else None
            count = int(self._batches[node])
            return Learned(size, float(self._loss[row]), right, count, self._memory_of(row))
        if options.patience is None and progress.epochs + 1 < options.epochs:
            # Nothing depends on it, and reading a number would stall a GPU.
            progress.epochs += 1
            return None
        accuracy = round(float(self._correct[row])) / size if judged else None
        ended = progress.ends(float(self._loss[row]) / size, accuracy)
        return progress.metrics() if ended else None

    def _dismiss(self, done: list[int]) -> None:
        """Give weights back to those who are done, and go on without them."""
        with torch.no_grad():
            for name in self._trained:
                rows = self._weights[name].detach()[done].cpu()
                for row, weights in zip(done, rows, strict=True):
                    model = self._orders[self._rows[row]].model
                    model.get_parameter(name).copy_(weights)
        stay = np.setdiff1d(np.arange(len(self._rows)), done)
        self._rows = self._rows[stay]
        if not len(stay):
            return
        kept = torch.from_numpy(stay).to(self._device)
        self._loss, self._correct = self._loss[kept], self._correct[kept]
        self._before = [weight[kept] for weight in self._before]
        for name, weight in self._weights.items():
            fewer = nn.Parameter(weight.detach()[kept], requires_grad=weight.requires_grad)
            self._weights[name] = fewer
            for key, value in self._optimizer.state.pop(weight, {}).items():
                by_row = isinstance(value, Tensor) and value.shape == weight.shape
                self._optimizer.state[fewer][key] = value[kept] if by_row else value
        self._optimizer.param_groups[0]["params"] = self._params

    # --- the optimisers' state, between batches of a stream -------------------------------------

    def _load_memory(self) -> None:
        memories = [order.memory or {} for order in self._orders]
        for name in memories[0]:
            position, _, key = name.partition("/")
            weight = self._params[int(position)]
            values = [torch.from_numpy(np.array(memory[name])) for memory in memories]
            # A count of steps is the same for all: see `Order.kind`.
            value = torch.stack(values) if values[0].shape == weight.shape[1:] else values[0]
            stays = key == "step" and not self._optimizer.defaults.get("fused")
            self._optimizer.state[weight][key] = value if stays else value.to(self._device)

    def _memory_of(self, row: int) -> Arrays:
        return {
            f"{position}/{key}": (
                value[row] if value.shape == weight.shape else value
            ).detach().cpu().numpy().copy()
            for position, weight in enumerate(self._params)
            for key, value in self._optimizer.state.get(weight, {}).items()
            if isinstance(value, Tensor)
        }  # fmt: skip


class _SideBySide:
    """Copies of a chain of layers, with weights of their own, run at once.

    Weights are shaped ``(copies, …)``, inputs ``(copies, batch, …)``. What has no weights sees the
    batches of all copies as one; a linear layer is one batched product.
    """

    def __init__(self, model: nn.Module, example: Tensor) -> None:
        self._layers = list(_chain(model))
        # What dropout modules multiply by: rate and shape of one example, by name.
        self.dropouts: dict[str, tuple[float, tuple[int, ...]]] = {}
        with torch.no_grad():
            for name, layer in self._layers:
                if isinstance(layer, nn.Dropout) and layer.p > 0:
                    self.dropouts[name] = (layer.p, tuple(example.shape[1:]))
                elif isinstance(layer, nn.Linear):
                    example = example.new_zeros(*example.shape[:-1], layer.out_features)
                else:
                    example = layer(example)

    def __call__(
        self, weights: Mapping[str, Tensor], inputs: Tensor, masks: Mapping[str, Tensor]
    ) -> Tensor:
        for name, layer in self._layers:
            prefix = f"{name}." if name else ""
            if name in masks:
                inputs = inputs * masks[name]
            elif isinstance(layer, nn.Linear):
                weight, bias = weights[f"{prefix}weight"], weights.get(f"{prefix}bias")
                outputs = _BatchedLinear.apply(inputs.flatten(1, -2), weight, bias)  # type: ignore[no-untyped-call]
                inputs = outputs.view(*inputs.shape[:-1], weight.shape[1])
            elif not isinstance(layer, nn.Dropout):
                inputs = layer(inputs.flatten(0, 1)).unflatten(0, inputs.shape[:2])
        return inputs


def _chain(model: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers of nested `Sequential` networks, one after the other."""
    if type(model) is not nn.Sequential:
        yield name, model
        return
    for key, child in model.named_children():
        yield from _chain(child, f"{name}.{key}" if name else key)


def _is_known(layer: nn.Module) -> bool:
    if isinstance(layer, nn.Flatten):
        return layer.start_dim == 1
    if getattr(layer, "inplace", False):
        # What is changed in place may be needed for the gradient of another copy's layer.
        return False
    return type(layer) in (nn.Linear, nn.Dropout, *_PLAIN)


class _BatchedLinear(torch.autograd.Function):
    """Linear layers side by side, whose gradients come out in the layout of their weights.

    PyTorch's own backward pass copies a transposed gradient, which takes as long as all else.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        if bias is None:
            return torch.bmm(inputs, weight.mT)
        return torch.baddbmm(bias.unsqueeze(1), inputs, weight.mT)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        inputs, weight = ctx.saved_tensors
        below = torch.bmm(gradient, weight) if ctx.needs_input_grad[0] else None
        own = torch.bmm(gradient.mT, inputs) if ctx.needs_input_grad[1] else None
        return below, own, gradient.sum(1) if ctx.needs_input_grad[2] else None
