"""Local training and prediction: a plain loop over batches, quick on one CPU thread.

A node's examples are turned into one tensor per call, and batches are rows of it. With models of a
few thousand weights this is several times as fast as a `torch.utils.data.DataLoader`, whose cost
per example would be most of the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from gems_flwr.device_draws import seeded_draws
from gems_flwr.devices import chosen_device, end_step, has_fused_optimizers, moved, sum_type
from gems_flwr.errors import OptionError
from gems_flwr.targets import Classes, Target
from simulations.data.examples import Examples

CLASSES = Classes()
"""What is predicted unless something else is said."""

_PREDICTED_AT_ONCE = 4096
# What a convolution makes of more images leaves the processor's cache: 10,000 digits take
# McMahan's network 1.7 times as long, and half a gigabyte.
_CONVOLVED_AT_ONCE = 256

OPTIMIZERS = ("adam", "sgd", "rmsprop")
"""What `TrainOptions.optimizer` can be."""


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
    output_start : str
        Where that begins: ``zero``, or weights drawn as in the released code of GEMS (Gaussian,
        deviation 0.05), ``common`` to all nodes or each node's ``own``.
    subclasses : int
        Clusters into which a node cuts each of its classes while it trains hidden layers for
        ``strategy=gems_layerwise``, at least 1; see `gems_flwr.networks.subclasses.split_classes`.

    Raises
    ------
    OptionError
        If an option is out of range.
    """

    optimizer: str = "adam"
    lr: float = 1e-3
    momentum: float = 0.0
    batch_size: int = 32
    epochs: int = 1
    patience: int | None = None
    weight_decay: float = 0.0
    subclasses: int = 1
    output_epochs: int | None = None
    output_start: str = "zero"

    def __post_init__(self) -> None:
        rules = {
            "optimizer": (self.optimizer in OPTIMIZERS, f"one of {', '.join(OPTIMIZERS)}"),
            "lr": (0 < self.lr < float("inf"), "a number above 0"),
            "momentum": (0 <= self.momentum < 1, "in [0, 1)"),
            "batch_size": (_is_count(self.batch_size), "a whole number of at least 1"),
            "epochs": (_is_count(self.epochs), "a whole number of at least 1"),
            "patience": (
                self.patience is None or _is_count(self.patience),
                "a whole number of at least 1, or null",
            ),
            "subclasses": (_is_count(self.subclasses), "a whole number of at least 1"),
            "output_epochs": (
                self.output_epochs is None or _is_count(self.output_epochs),
                "a whole number of at least 1, or null",
            ),
            "output_start": (
                self.output_start in ("zero", "common", "own"),
                "one of zero, common, own",
            ),
            "weight_decay": (0 <= self.weight_decay < float("inf"), "a number of at least 0"),
        }
        for option, (holds, allowed) in rules.items():
            if not holds:
                raise OptionError(f"{option} must be {allowed}, got {getattr(self, option)!r}")
        if self.optimizer == "adam" and self.momentum != 0:
            raise OptionError(f"momentum must be 0 with optimizer adam, got {self.momentum}")


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

    The result depends on the arguments only, not on the global random state, which is left as it
    was. (PyTorch draws dropout from that state, so two calls must not run at once in threads of
    one process.) Weights that do not require gradients stay as they are. The model returns to the
    device and the training or evaluation mode that it came with.

    Parameters
    ----------
    model : torch.nn.Module
        Maps a batch to logits.
    examples : Examples
        The node's training part, at least one.
    scale : float
        Factor of the stored features, as in `simulations.data.examples.Dataset`.
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

    Raises
    ------
    OptionError
        If there are no examples or no trainable weights, the device is not there, ``threads`` is
        below 1 or ``proximal_mu`` below 0.
    """
    if not 0 <= proximal_mu < float("inf"):
        raise OptionError(f"proximal_mu must be a number of at least 0, got {proximal_mu!r}")
    if len(examples) == 0:
        raise OptionError("training needs at least one example, got none")
    if not any(weight.requires_grad for weight in model.parameters()):
        raise OptionError("training needs at least one weight that requires gradients, got none")
    # Two streams, so that the order of examples does not change with the dropout rate.
    shuffle_seed, dropout_seed = (int(s) for s in np.random.SeedSequence(seed).generate_state(2))
    shuffler = torch.Generator().manual_seed(shuffle_seed)
    where = chosen_device(device)
    loss, accuracy = 0.0, None
    best, stale, epochs = -float("inf"), 0, 0
    with (
        torch_threads(threads),
        placed(model, where, training=True),
        seeded(dropout_seed, where),
    ):
        # Here, because a model may have other parameters on another device.
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        inputs, targets = tensors(examples, scale=scale, device=where)
        optimizer = make_optimizer(weights, options)
        pull = Proximal(weights, proximal_mu) if proximal_mu else None
        while epochs < options.epochs:
            order = torch.randperm(len(targets), generator=shuffler).to(where)
            batches = torch.split(order, options.batch_size)
            loss, accuracy = _epoch(model, optimizer, inputs, targets, batches, pull, target)
            epochs += 1
            reached = -loss if accuracy is None else accuracy
            stale = 0 if reached > best else stale + 1
            best = max(best, reached)
            if options.patience is not None and stale >= options.patience:
                break
    right = {} if accuracy is None else {"train_accuracy": accuracy}
    return {"train_loss": loss, **right, "epochs": float(epochs)}


def predictions(
    model: nn.Module,
    examples: Examples,
    *,
    scale: float,
    batch_size: int | None = None,
    device: str = "cpu",
    threads: int = 1,
    target: Target = CLASSES,
) -> NDArray[np.float64]:
    """Predict the class probabilities of every example, or its number, without dropout.

    Parameters
    ----------
    model : torch.nn.Module
        Maps a batch to logits. It returns to the device and mode that it came with.
    examples : Examples
        What to predict; may be empty.
    scale : float
        Factor of the stored features, as in `simulations.data.examples.Dataset`.
    batch_size : int, optional
        Examples at once, at least 1; bounds the memory, does not change the result. By default
        4096, and 256 for networks with convolutions, whose layers are large.
    device : str
        Where to compute: a name that `gems_flwr.devices` knows.
    threads : int
        CPU threads, at least 1. Sums are divided among threads, so the same seed gives the same
        bits only for the same number; one is also the quickest for small models.
    target : Target
        What the model predicts.

    Returns
    -------
    np.ndarray
        One row per example, one column per class; rows sum to 1. Of numbers, one per example.

    Raises
    ------
    OptionError
        If ``batch_size`` or ``threads`` is below 1, or the device is not there.
    """
    if batch_size is None:
        convolves = any(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules())
        batch_size = _CONVOLVED_AT_ONCE if convolves else _PREDICTED_AT_ONCE
    if not _is_count(batch_size):
        raise OptionError(f"batch_size must be a whole number of at least 1, got {batch_size!r}")
    where = chosen_device(device)
    rows = []
    with torch_threads(threads), placed(model, where, training=False), torch.no_grad():
        # One batch even if there are no examples: it tells the number of classes.
        for start in range(0, max(1, len(examples)), batch_size):
            inputs = _features(examples.features[start : start + batch_size], scale).to(where)
            rows.append(target.predictions(model(inputs).cpu()).numpy())
    return np.concatenate(rows)


def tensors(
    examples: Examples, *, scale: float, device: str | torch.device = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scaled features (float32) and the labels as tensors of their own.

    Labels are int64 if they are classes, and float32 if they are numbers.
    """
    labels = torch.from_numpy(examples.labels.copy())
    return _features(examples.features, scale).to(device), labels.to(device)


def _features(features: NDArray[np.generic], scale: float) -> torch.Tensor:
    # astype copies, so the tensor may be changed although stored features are read-only.
    return torch.from_numpy(features.astype(np.float32)).mul_(scale)


class Proximal:
    """FedProx's pull towards where the weights were when training began.

    Parameters
    ----------
    weights : list of nn.Parameter
        What is trained, as it stands now.
    mu : float
        How strong the pull is.
    """

    def __init__(self, weights: list[nn.Parameter], mu: float) -> None:
        self._mu = mu
        self._start = [(weight, weight.detach().clone()) for weight in weights]

    def add_gradient(self) -> None:
        """Add the gradient of μ / 2 · |w − w₀|² to that of the loss."""
        with torch.no_grad():
            for weight, start in self._start:
                if weight.grad is not None:
                    weight.grad.add_(weight - start, alpha=self._mu)


def _epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    batches: Sequence[torch.Tensor],
    pull: Proximal | None,
    target: Target,
) -> tuple[float, float | None]:
    """Run one pass over the examples; return its mean loss, and accuracy if there is one."""
    # Sums stay tensors until the end: reading a number each step would stall a GPU.
    loss_sum = torch.zeros((), dtype=sum_type(inputs.device), device=inputs.device)
    correct = torch.zeros((), dtype=torch.int64, device=inputs.device)
    judged = 0
    for batch in batches:
        labels = targets[batch]
        logits = model(inputs[batch])
        loss = target.loss(logits, labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if pull is not None:
            pull.add_gradient()
        optimizer.step()
        with torch.no_grad():
            loss_sum += loss * len(batch)
            if (hits := target.hits(logits, labels)) is not None:
                correct += hits.sum()
                judged += len(batch)
        end_step(inputs.device)
    accuracy = int(correct) / judged if judged else None
    return float(loss_sum) / len(targets), accuracy


def make_optimizer(weights: list[nn.Parameter], options: TrainOptions) -> torch.optim.Optimizer:
    """Return the optimiser that the options name, without any state yet."""
    # One fused kernel per step instead of a dozen small ones; RMSprop has none.
    fused = all(has_fused_optimizers(weight.device) for weight in weights)
    if options.optimizer == "adam":
        return torch.optim.Adam(
            weights, lr=options.lr, weight_decay=options.weight_decay, fused=fused
        )
    if options.optimizer == "sgd":
        return torch.optim.SGD(
            weights,
            lr=options.lr,
            momentum=options.momentum,
            weight_decay=options.weight_decay,
            fused=fused,
        )
    return torch.optim.RMSprop(
        weights, lr=options.lr, momentum=options.momentum, weight_decay=options.weight_decay
    )


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
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed what dropout draws from, the same on every device, and restore it afterwards."""
    with seeded_draws(seed, device):
        yield


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
