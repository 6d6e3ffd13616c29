"""The local training of many nodes as one computation.

Small networks leave a processor idle: most of a step goes into calling PyTorch, not into numbers.
`fit_together` takes the same steps as `simulations.experiment.training.fit` takes node by node, but
all nodes' at once: weights side by side in one tensor, one forward and one backward pass, one
optimiser, which works number by number and does not notice.

Every node has its own order of examples, dropout masks and early stopping, drawn from its own seed
as it would draw them alone. Nodes need not agree on epochs: each goes through its own, so that all
have taken equally many steps at any time (Adam counts them), and whoever is done leaves. A smaller
last batch is filled up with examples that count for nothing.

Numbers differ from training one by one by rounding alone: products of matrices are summed in
another order. Over a few hundred steps that came to some 1e-6 of the weights' size; the tests ask
for 1e-4. Where early stopping compares accuracies, one example on the border can cost an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gems_flwr.devices import chosen_device, end_step, sum_type
from gems_flwr.targets import Target
from simulations.data.examples import Examples
from simulations.experiment.batched_layers import BatchedNetwork
from simulations.experiment.training import (
    CLASSES,
    TrainOptions,
    make_optimizer,
    torch_threads,
)

# Of weights that are trained at once, unless few nodes are more: what a processor keeps at hand.
_CHUNK_BYTES = 16 * 2**20
_FEW = 16
_ACCELERATOR_CHUNK_BYTES = 512 * 2**20


@dataclass(frozen=True)
class Trainee:
    """What a node trains: a model in place, on at least one example, with a seed of its own."""

    model: nn.Module
    examples: Examples
    seed: int


def why_not_together(model: nn.Module) -> str | None:
    """Return why a model cannot be trained together with others; None if it can."""
    if any(weight._backward_hooks for weight in model.parameters()):
        return "its gradients are corrected on the way (SCAFFOLD)"
    if any(True for _ in model.buffers()):
        return "it has buffers, such as those of batch normalisation"
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and type(module) is not nn.Dropout:
            return f"it has {type(module).__name__}; only Dropout is known"
        if isinstance(module, nn.RNNBase):
            return "it is recurrent"
    if len({weight.dtype for weight in model.parameters()}) != 1:
        return "its weights differ in precision"
    return None


def fit_together(
    trainees: Sequence[Trainee],
    *,
    scale: float,
    options: TrainOptions,
    device: str = "cpu",
    threads: int = 1,
    proximal_mu: float = 0.0,
    target: Target = CLASSES,
) -> list[dict[str, float]]:
    """Train the models of many nodes in place; see `simulations.experiment.training.fit`.

    Parameters
    ----------
    trainees : sequence of Trainee
        Models of one architecture with the same trainable weights, of which `why_not_together` has
        nothing to say.
    scale, options, device, threads, proximal_mu, target
        As in `fit`, the same for all.

    Returns
    -------
    list of dict
        What `fit` would have returned for each.
    """
    where = chosen_device(device)
    found: list[dict[str, float]] = [{} for _ in trainees]
    with torch_threads(threads):
        for chunk in _chunks(trainees, where, options.batch_size):
            chosen = [trainees[index] for index in chunk]
            cohort = _Cohort(chosen, scale, options, where, proximal_mu, target)
            for index, metrics in zip(chunk, cohort.train(), strict=True):
                found[index] = metrics
    return found


def _chunks(
    trainees: Sequence[Trainee], device: torch.device, batch_size: int
) -> Iterator[list[int]]:
    """Yield who is trained at once: those together who have about as many steps to take.

    Batches are filled up to the largest one, so that nobody is put together with others whose
    batches are more than twice as large.
    """
    limit = _CHUNK_BYTES if device.type == "cpu" else _ACCELERATOR_CHUNK_BYTES
    each = sum(weight.nbytes for weight in trainees[0].model.parameters())
    size = max(_FEW, limit // max(1, each))
    by_size = sorted(range(len(trainees)), key=lambda index: -len(trainees[index].examples))
    group: list[int] = []
    for index in by_size:
        widths = [min(batch_size, len(trainees[who].examples)) for who in (*group[:1], index)]
        if widths[0] > 2 * widths[-1]:
            yield from _split(group, size)
            group = []
        group.append(index)
    yield from _split(group, size)


def _split(group: Sequence[int], size: int) -> Iterator[list[int]]:
    """Yield parts of nearly equal length, at most `size` long."""
    for part in np.array_split(np.array(group), -(-len(group) // size)):
        yield [int(index) for index in part]


@dataclass
class _Progress:
    """How far one node has come."""

    shuffler: torch.Generator
    dropper: torch.Generator
    epochs: int = 0
    best: float = -float("inf")
    stale: int = 0
    metrics: dict[str, float] = field(default_factory=dict)

    def ends(self, loss: float, accuracy: float | None, options: TrainOptions) -> bool:
        """Take note of an epoch; return whether it was the last."""
        self.epochs += 1
        reached = -loss if accuracy is None else accuracy
        self.stale = 0 if reached > self.best else self.stale + 1
        self.best = max(self.best, reached)
        right = {} if accuracy is None else {"train_accuracy": accuracy}
        self.metrics = {"train_loss": loss, **right, "epochs": float(self.epochs)}
        impatient = options.patience is not None and self.stale >= options.patience
        return self.epochs >= options.epochs or impatient


class _Cohort:
    """Nodes that are trained at once.

    Their weights are the rows of `_weights`; those still at it are the first rows, `_rows` says
    whose. Whoever is done gives its row to the last.
    """

    def __init__(
        self,
        trainees: Sequence[Trainee],
        scale: float,
        options: TrainOptions,
        device: torch.device,
        mu: float,
        target: Target,
    ) -> None:
        self._trainees, self._options, self._device = trainees, options, device
        self._scale, self._mu, self._target = scale, mu, target
        count = len(trainees)
        self._rows = np.arange(count)
        self._progress = [_progress_of(trainee.seed) for trainee in trainees]
        self._sizes = np.array([len(trainee.examples) for trainee in trainees])
        # All data in one tensor, as they are stored, so that a step takes its batches at once.
        examples = Examples.concatenate([trainee.examples for trainee in trainees])
        self._starts = np.cumsum(self._sizes) - self._sizes
        self._features = torch.from_numpy(examples.features.copy()).to(device)
        self._labels = torch.from_numpy(examples.labels.copy()).to(device)
        self._size = int(min(options.batch_size, self._sizes.max()))
        self._batches = -(-self._sizes // self._size)
        self._orders = np.zeros((count, int(self._batches.max()), self._size), np.int64)
        self._place_weights()

    def _place_weights(self) -> None:
        models = [dict(trainee.model.named_parameters()) for trainee in self._trainees]
        frozen = [name for name, weight in models[0].items() if not weight.requires_grad]
        # Frozen layers that are everybody's need no copies.
        differing = [
            name
            for name in frozen
            if not all(torch.equal(model[name], models[0][name]) for model in models[1:])
        ]
        self._trained = [name for name in models[0] if name not in frozen]
        stacked = {
            name: torch.stack([model[name].detach() for model in models]).to(self._device)
            for name in (*self._trained, *differing)
        }
        self._weights = {
            name: nn.Parameter(tensor, requires_grad=name in self._trained)
            for name, tensor in stacked.items()
        }
        self._optimizer = make_optimizer(
            [self._weights[name] for name in self._trained], self._options
        )
        self._before = {name: stacked[name].clone() for name in self._trained} if self._mu else {}
        first = self._scaled(self._features[:1])
        self._network = BatchedNetwork(self._trainees[0].model, first)
        self._loss = torch.zeros(len(models), dtype=sum_type(self._device), device=self._device)
        self._correct = torch.zeros(len(models), dtype=torch.int64, device=self._device)

    def _scaled(self, features: Tensor) -> Tensor:
        return features.to(torch.float32) * self._scale

    def train(self) -> list[dict[str, float]]:
        """Train until everybody is done; return everybody's metrics."""
        step = 0
        while len(self._rows):
            position = step % self._batches[self._rows]
            for node in self._rows[position == 0]:
                self._shuffle(int(node))
            judged = self._step(position)
            end_step(self._device)
            step += 1
            ending = position == self._batches[self._rows] - 1
            if ending.any():
                self._end_epochs(np.flatnonzero(ending), judged)
        return [progress.metrics for progress in self._progress]

    def _shuffle(self, node: int) -> None:
        size, start = int(self._sizes[node]), self._starts[node]
        drawn = torch.randperm(size, generator=self._progress[node].shuffler).numpy()
        flat = self._orders[node].reshape(-1)
        flat[:size] = drawn + start
        # Fills up the last batch, and counts for nothing.
        flat[size:] = start

    def _step(self, position: NDArray[np.int64]) -> bool:
        """Take everybody's next step; return whether predictions are right or wrong."""
        rows, size = self._rows, self._size
        left = self._sizes[rows] - position * size
        counts = torch.from_numpy(np.minimum(left, size))
        inside = torch.arange(size) < counts.unsqueeze(1)
        shares = (inside / counts.unsqueeze(1)).to(torch.float32).to(self._device)
        chosen = torch.from_numpy(self._orders[rows, position].reshape(-1)).to(self._device)
        labels = self._labels.index_select(0, chosen)
        batches = self._features.index_select(0, chosen)
        inputs = self._scaled(batches).view(len(rows), size, *batches.shape[1:])
        outputs = self._network(self._weights, inputs, self._masks(counts)).flatten(0, 1)
        losses = (self._target.losses(outputs, labels).view_as(shares) * shares).sum(1)
        self._optimizer.zero_grad()
        losses.sum().backward()  # type: ignore[no-untyped-call]
        self._pull()
        self._optimizer.step()
        with torch.no_grad():
            again = torch.from_numpy(position != 0).to(self._device)
            counts = counts.to(self._device)
            self._loss = self._loss * again + losses * counts
            if (hits := self._target.hits(outputs, labels)) is None:
                return False
            right = hits.view_as(shares) & inside.to(self._device)
            self._correct = self._correct * again + right.sum(1)
            return True

    def _masks(self, counts: Tensor) -> dict[str, Tensor]:
        """Draw everybody's dropout, as it would draw it alone."""
        layers = self._network.dropouts
        masks = {layer.name: torch.ones(len(counts), self._size, *layer.shape) for layer in layers}
        for row, node in enumerate(self._rows if layers else ()):
            count, source = int(counts[row]), self._progress[node].dropper
            for layer in layers:
                masks[layer.name][row, :count].bernoulli_(1 - layer.rate, generator=source)
        for layer in layers:
            masks[layer.name] = masks[layer.name].div_(1 - layer.rate).to(self._device)
        return masks

    def _pull(self) -> None:
        """Add the gradient of FedProx's term; see `training.Proximal`."""
        with torch.no_grad():
            for name, before in self._before.items():
                weight = self._weights[name]
                if weight.grad is not None:
                    weight.grad.add_(weight - before[: len(weight)], alpha=self._mu)

    def _end_epochs(self, ending: NDArray[np.int64], judged: bool) -> None:
        options = self._options
        done = []
        sums: list[float] | None = None
        for row in ending:
            node = int(self._rows[row])
            progress, size = self._progress[node], int(self._sizes[node])
            if options.patience is None and progress.epochs + 1 < options.epochs:
                # Nobody will look at it, and reading a number would stall a GPU.
                progress.epochs += 1
                continue
            if sums is None:
                sums, right = self._loss.tolist(), self._correct.tolist()
            accuracy = right[row] / size if judged else None
            if progress.ends(sums[row] / size, accuracy, options):
                done.append(int(row))
        if done:
            self._dismiss(done)

    def _dismiss(self, done: list[int]) -> None:
        """Give weights back to those who are done, and their rows to others."""
        with torch.no_grad():
            for name in self._trained:
                whole = self._weights[name].detach()
                rows = whole[torch.tensor(done, device=self._device)].cpu()
                for row, weights in zip(done, rows, strict=True):
                    model = self._trainees[self._rows[row]].model
                    model.get_parameter(name).copy_(weights)
        last = len(self._rows) - 1
        for row in reversed(done):
            if row != last:
                self._rows[row] = self._rows[last]
                for tensor in self._by_row():
                    tensor[row] = tensor[last]
            last -= 1
        self._keep(last + 1)

    def _by_row(self) -> Iterator[Tensor]:
        """Yield all that has a row for each node."""
        yield from (weight.detach() for weight in self._weights.values())
        yield from self._before.values()
        yield from (self._loss, self._correct)
        for name in self._trained:
            weight = self._weights[name]
            for value in self._optimizer.state[weight].values():
                if isinstance(value, Tensor) and value.shape == weight.shape:
                    yield value

    def _keep(self, count: int) -> None:
        """Go on with the first rows alone."""
        self._rows = self._rows[:count]
        self._loss, self._correct = self._loss[:count], self._correct[:count]
        optimizer = self._optimizer
        for name, weight in self._weights.items():
            fewer = nn.Parameter(weight.detach()[:count], requires_grad=weight.requires_grad)
            self._weights[name] = fewer
            state = optimizer.state.pop(weight, None)
            if state is not None:
                optimizer.state[fewer] = {
                    key: value[:count]
                    if isinstance(value, Tensor) and value.shape == weight.shape
                    else value
                    for key, value in state.items()
                }
        optimizer.param_groups[0]["params"] = [self._weights[name] for name in self._trained]


def _progress_of(seed: int) -> _Progress:
    # As in `fit`: two streams, so that the order of examples does not change with dropout.
    shuffle, dropout = (int(each) for each in np.random.SeedSequence(seed).generate_state(2))
    return _Progress(torch.Generator().manual_seed(shuffle), torch.Generator().manual_seed(dropout))
