"""Local training and prediction: plain loops over batches, quick on one CPU thread.

A node's examples are one tensor per call, and batches are rows of it: for small models several
times as fast as a `torch.utils.data.DataLoader`.

`fit` makes passes over a node's examples. `learn` takes batches of a stream as they come: the loss
that counts is that of the model as it was *before* each batch (prequential loss; in-place loss in
Kamp et al. 2018, Equation 1). Following Keras, and the measurements that these runs are compared
with, a batch counts with the mean loss of its samples, and gradients are means likewise.

Results depend on the arguments only, not on the global random state, which is left as it was.
(PyTorch draws dropout from that state, so two calls must not run at once in threads of one
process.) Weights that do not require gradients stay as they are. Models return to the device and
the training or evaluation mode that they came with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gems_flwr.devices import (
    chosen_device,
    end_step,
    has_fused_optimizers,
    moved,
    seeded_draws,
    sum_type,
)
from gems_flwr.errors import OptionError
from gems_flwr.targets import Classes, Target
from gems_flwr.typing import Arrays
from simulations.data.examples import Examples

CLASSES = Classes()
"""What is predicted unless something else is said."""

OPTIMIZERS = ("adam", "sgd", "rmsprop")

_PREDICTED_AT_ONCE = 4096
# What a convolution makes of more images leaves the processor's cache: 10,000 digits take
# McMahan's network 1.7 times as long, and half a gigabyte.
_CONVOLVED_AT_ONCE = 256


@dataclass(frozen=True)
class TrainOptions:
    """How a node trains; the defaults are the GEMS paper's (Appendix B.3) for one epoch.

    Parameters
    ----------
    optimizer : str
        ``"adam"``, ``"sgd"`` or ``"rmsprop"``.
    lr : float
        Learning rate, above 0.
    momentum : float
        0 ≤ momentum < 1, for ``sgd`` and ``rmsprop``; Adam has its own and wants 0 here.
    batch_size : int
        Examples per step, at least 1. The last batch of an epoch may be smaller.
    epochs : int
        The most passes over the data, at least 1.
    patience : int or None
        Stop when the training accuracy has not risen for this many epochs (at least 1), or, of
        numbers, the training loss has not fallen; None never stops early.
    weight_decay : float
        L2 penalty, at least 0.
    output_epochs : int or None
        Passes over the data, without early stopping, where the output layer alone is trained
        for ``strategy=gems_layerwise``, at least 1; None: like the rest.
    """

    optimizer: str = "adam"
    lr: float = 1e-3
    momentum: float = 0.0
    batch_size: int = 32
    epochs: int = 1
    patience: int | None = None
    weight_decay: float = 0.0
    output_epochs: int | None = None

    def __post_init__(self) -> None:
        whole, or_null = "a whole number of at least 1", "a whole number of at least 1, or null"
        rules = {
            "optimizer": (self.optimizer in OPTIMIZERS, f"one of {', '.join(OPTIMIZERS)}"),
            "lr": (0 < self.lr < float("inf"), "a number above 0"),
            "momentum": (0 <= self.momentum < 1, "in [0, 1)"),
            "batch_size": (_is_count(self.batch_size), whole),
            "epochs": (_is_count(self.epochs), whole),
            "patience": (self.patience is None or _is_count(self.patience), or_null),
            "output_epochs": (self.output_epochs is None or _is_count(self.output_epochs), or_null),
            "weight_decay": (0 <= self.weight_decay < float("inf"), "a number of at least 0"),
        }
        for option, (holds, allowed) in rules.items():
            if not holds:
                raise OptionError(f"{option} must be {allowed}, got {getattr(self, option)!r}")
        if self.optimizer == "adam" and self.momentum != 0:
            raise OptionError(f"momentum must be 0 with optimizer adam, got {self.momentum}")


@dataclass
class Progress:
    """How far a training has come, epoch by epoch."""

    options: TrainOptions
    epochs: int = 0
    best: float = -float("inf")
    stale: int = 0

    def ends(self, loss: float, accuracy: float | None) -> bool:
        """Note an epoch's mean loss and accuracy; return whether it was the last."""
        self.epochs += 1
        reached = -loss if accuracy is None else accuracy
        self.stale = 0 if reached > self.best else self.stale + 1
        self.best = max(self.best, reached)
        self.loss, self.accuracy = loss, accuracy
        impatient = self.options.patience is not None and self.stale >= self.options.patience
        return self.epochs >= self.options.epochs or impatient

    def metrics(self) -> dict[str, float]:
        """Return what a node reports."""
        right = {} if self.accuracy is None else {"train_accuracy": self.accuracy}
        return {"train_loss": self.loss, **right, "epochs": float(self.epochs)}


def draws_of(seed: int) -> tuple[torch.Generator, int]:
    """Return what shuffles examples, and the seed of dropout.

    Two streams, so that the order of examples does not change with the dropout rate.
    """
    shuffle, dropout = (int(each) for each in np.random.SeedSequence(seed).generate_state(2))
    return torch.Generator().manual_seed(shuffle), dropout


def fit(
    model: nn.Module,
    examples: Examples,
    *,
    scale: float,
    options: TrainOptions,
    seed: int,
    device: str = "cpu",
    threads: int = 1,
    proximal_mu: float = 0.0,
    target: Target = CLASSES,
) -> dict[str, float]:
    """Train a model in place, with cross entropy or with the squared error of numbers.

    Parameters
    ----------
    model : torch.nn.Module
        Maps a batch to logits.
    examples : Examples
        The node's training part, at least one.
    scale : float
        Factor of the stored features, as in `simulations.data.Dataset`.
    options : TrainOptions
        Optimiser and stopping.
    seed : int
        Decides the order of examples and dropout; at least 0.
    device : str
        Where to compute: a name that `gems_flwr.devices` knows.
    threads : int
        CPU threads, at least 1. Sums are divided among threads, so the same seed gives the same
        bits only for the same number; one is also the quickest for small models.
    proximal_mu : float
        FedProx's μ, at least 0: μ / 2 times the squared distance from the weights that the model
        came with is added to what is minimised (Li et al. 2020, equation 2).
    target : Target
        What the model predicts.

    Returns
    -------
    dict of str to float
        ``train_loss`` (without the proximal term) and, of classes, ``train_accuracy``, means over
        the last epoch as it went (with dropout, and with the weights of each step), and
        ``epochs``, the number run.
    """
    if not 0 <= proximal_mu < float("inf"):
        raise OptionError(f"proximal_mu must be a number of at least 0, got {proximal_mu!r}")
    if len(examples) == 0:
        raise OptionError("training needs at least one example, got none")
    if not any(weight.requires_grad for weight in model.parameters()):
        raise OptionError("training needs at least one weight that requires gradients, got none")
    shuffler, dropout_seed = draws_of(seed)
    where = chosen_device(device)
    with _training(model, where, threads, dropout_seed):
        # Here, because a model may have other parameters on another device.
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        inputs, labels = tensors(examples, scale=scale, device=where)
        optimizer = make_optimizer(weights, options)
        starts = [weight.detach().clone() for weight in weights] if proximal_mu else []
        progress, ended = Progress(options), False
        while not ended:
            order = torch.randperm(len(labels), generator=shuffler).to(where)
            # Sums stay tensors until the end: reading a number each step would stall a GPU.
            loss_sum = torch.zeros((), dtype=sum_type(where), device=where)
            correct = torch.zeros((), dtype=torch.int64, device=where)
            judged = False
            for batch in torch.split(order, options.batch_size):
                outputs, truth = model(inputs[batch]), labels[batch]
                loss = target.loss(outputs, truth)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                if proximal_mu:
                    pull(weights, starts, proximal_mu)
                optimizer.step()
                with torch.no_grad():
                    loss_sum += loss * len(batch)
                    if (hits := target.hits(outputs, truth)) is not None:
                        correct += hits.sum()
                        judged = True
                end_step(where)
            accuracy = int(correct) / len(labels) if judged else None
            ended = progress.ends(float(loss_sum) / len(labels), accuracy)
    return progress.metrics()


@dataclass(frozen=True)
class Learned:
    """What came of the batches of a stream."""

    examples: int
    # Of the batches, summed: mean losses, and shares of right answers (None: numbers).
    loss_sum: float
    correct_share_sum: float | None
    batches: int
    # The optimiser's state; plain SGD has none.
    memory: Arrays


def learn(
    model: nn.Module,
    batches: Iterable[Examples],
    *,
    scale: float,
    options: TrainOptions,
    seed: int,
    memory: Arrays,
    device: str = "cpu",
    threads: int = 1,
    target: Target = CLASSES,
) -> Learned:
    """Train a model in place, one step per batch of a stream.

    Parameters
    ----------
    batches : iterable of Examples
        In order; features as stored.
    memory : mapping from str to ndarray
        The optimiser's state after the last batch before these; empty at first.
    model, scale, options, seed, device, threads, target
        As in `fit`; the seed is that of dropout.
    """
    where = chosen_device(device)
    examples = count = 0
    loss_sum = 0.0
    correct: float | None = None
    with _training(model, where, threads, seed):
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = make_optimizer(weights, options)
        load_state(optimizer, weights, memory)
        for batch in batches:
            inputs, labels = tensors(batch, scale=scale, device=where)
            outputs = model(inputs)
            loss = target.loss(outputs, labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            end_step(where)
            loss_sum += loss.item()
            hits = target.hits(outputs, labels)
            correct = None if hits is None else (correct or 0.0) + hits.sum().item() / len(labels)
            examples += len(labels)
            count += 1
        return Learned(examples, loss_sum, correct, count, dump_state(optimizer, weights))


def predictions(
    model: nn.Module,
    examples: Examples,
    *,
    scale: float,
    device: str = "cpu",
    threads: int = 1,
    target: Target = CLASSES,
) -> NDArray[np.float64]:
    """Predict the class probabilities of every example, or its number, without dropout.

    There is one row per example and one column per class; rows sum to 1. Of numbers there is one
    per example. Arguments are those of `fit`; there may be no examples.
    """
    convolves = any(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules())
    size = _CONVOLVED_AT_ONCE if convolves else _PREDICTED_AT_ONCE
    where = chosen_device(device)
    rows = []
    with torch_threads(threads), placed(model, where, training=False), torch.no_grad():
        # One batch even if there are no examples: it has the number of classes.
        for start in range(0, max(1, len(examples)), size):
            inputs = _features(examples.features[start : start + size], scale).to(where)
            rows.append(target.predictions(model(inputs).cpu()).numpy())
    return np.concatenate(rows)


def tensors(
    examples: Examples, *, scale: float, device: str | torch.device = "cpu"
) -> tuple[Tensor, Tensor]:
    """Return the scaled features (float32) and the labels as tensors of their own.

    Labels are int64 if they are classes, and float32 if they are numbers.
    """
    labels = torch.from_numpy(examples.labels.copy())
    return _features(examples.features, scale).to(device), labels.to(device)


def _features(features: NDArray[np.generic], scale: float) -> Tensor:
    # astype copies, so the tensor may be changed although stored features are read-only.
    return torch.from_numpy(features.astype(np.float32)).mul_(scale)


def pull(weights: Sequence[Tensor], starts: Sequence[Tensor], mu: float) -> None:
    """Add the gradient of FedProx's μ / 2 · |w − w₀|² to that of the loss."""
    with torch.no_grad():
        for weight, start in zip(weights, starts, strict=True):
            if weight.grad is not None:
                weight.grad.add_(weight - start, alpha=mu)


def make_optimizer(weights: list[nn.Parameter], options: TrainOptions) -> torch.optim.Optimizer:
    """Return the optimiser that the options name, without any state yet."""
    # One fused kernel per step instead of a dozen small ones; RMSprop has none.
    fused = all(has_fused_optimizers(weight.device) for weight in weights)
    lr, momentum, decay = options.lr, options.momentum, options.weight_decay
    if options.optimizer == "adam":
        return torch.optim.Adam(weights, lr, weight_decay=decay, fused=fused)
    if options.optimizer == "sgd":
        return torch.optim.SGD(weights, lr, momentum, weight_decay=decay, fused=fused)
    return torch.optim.RMSprop(weights, lr, momentum=momentum, weight_decay=decay)


def dump_state(optimizer: torch.optim.Optimizer, weights: Sequence[nn.Parameter]) -> Arrays:
    """Return an optimiser's state as arrays."""
    return {
        f"{position}/{key}": value.detach().cpu().numpy().copy()
        for position, weight in enumerate(weights)
        for key, value in optimizer.state.get(weight, {}).items()
        if isinstance(value, Tensor)
    }


def load_state(
    optimizer: torch.optim.Optimizer, weights: Sequence[nn.Parameter], memory: Arrays
) -> None:
    """Give an optimiser the state that `dump_state` returned."""
    for name, array in memory.items():
        position, _, key = name.partition("/")
        weight = weights[int(position)]
        value = torch.from_numpy(array.copy())
        # A count of steps lives on the CPU unless the optimiser is fused, as torch has it.
        stays = key == "step" and not optimizer.defaults.get("fused")
        optimizer.state[weight][key] = value if stays else value.to(weight.device)


def copy_model(model: nn.Module) -> nn.Module:
    """Return a copy of a model, for every message, several times as fast as `copy.deepcopy`.

    Attributes that are no weights, modules or tables are shared.
    """
    copied = model.__class__.__new__(model.__class__)
    tables = {
        key: value.copy() if isinstance(value, dict | set) else value
        for key, value in model.__dict__.items()
    }
    tables["_modules"] = {
        key: None if module is None else copy_model(module)
        for key, module in model._modules.items()
    }
    tables["_buffers"] = {
        key: None if buffer is None else buffer.clone() for key, buffer in model._buffers.items()
    }
    tables["_parameters"] = {
        key: None if w is None else nn.Parameter(w.detach().clone(), w.requires_grad)
        for key, w in model._parameters.items()
    }
    copied.__dict__.update(tables)
    return copied


@contextmanager
def _training(model: nn.Module, where: torch.device, threads: int, seed: int) -> Iterator[None]:
    # Dropout draws the same on every device.
    with torch_threads(threads), placed(model, where, training=True), seeded_draws(seed, where):
        yield


@contextmanager
def placed(model: nn.Module, device: torch.device, *, training: bool) -> Iterator[None]:
    """Put a model on a device and in a mode, and back afterwards, module by module."""
    modes = {module: module.training for module in model.modules()}
    with moved(model, device):
        try:
            model.train(training)
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let PyTorch use this many CPU threads, and as many as before afterwards."""
    if not _is_count(count):
        raise OptionError(f"threads must be a whole number of at least 1, got {count!r}")
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
