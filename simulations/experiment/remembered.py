"""The same training only once: a memory for studies that compare methods.

The rows of a table often begin alike: the nodes train the same models on the same data from the
same weights and seed, and only what the server makes of them differs. Inside ::

    with remember_training():
        for config in configs:
            run(config, folder(config))

`fit_once` looks training up before it does it. `training.fit` depends on its arguments
alone, so what is looked up is what training would have given, to the last bit. Data are read once
for runs that follow each other, too (`built_once`). The memory belongs to the process, unless it
has a folder. Nodes in processes of their own (``backend=ray``) train as
ever, and so do streams, whose optimisers go on from round to round.
"""

from __future__ import annotations

import hashlib
import json
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from gems_flwr.disk.files import write_atomically
from gems_flwr.errors import DiskError
from gems_flwr.targets import Target
from simulations.data.examples import Examples
from simulations.experiment.joint_training import TrainingOrder, meeting_place
from simulations.experiment.training import CLASSES, TrainOptions, fit

# What tells nodes which training to do, and `fit` nothing.
_NOT_FITS = ("output_epochs", "output_start", "subclasses")
# A data set, and what the nodes have of it.
_KEPT = 2

Built = TypeVar("Built")


@dataclass(frozen=True)
class _Outcome:
    """What training came to."""

    state: dict[str, torch.Tensor]
    metrics: dict[str, float]

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.state.values())


class TrainingMemory:
    """The outcomes of training, the least recently used of which are forgotten first.

    Parameters
    ----------
    limit_bytes : int
        Most bytes of weights to keep, at least 0.
    folder : path, optional
        Where outcomes are kept as files, too, for processes and days to come.
    """

    def __init__(self, limit_bytes: int, folder: Path | None = None) -> None:
        if limit_bytes < 0:
            raise ValueError(f"limit_bytes must be at least 0, got {limit_bytes}")
        self.limit_bytes = limit_bytes
        self.folder = folder
        self.held_bytes = 0
        # How often training was looked up, and how often it was not there.
        self.recalled = 0
        self.trained = 0
        self._outcomes: OrderedDict[bytes, _Outcome] = OrderedDict()
        self._built: OrderedDict[str, Any] = OrderedDict()
        # A node that overstays is left behind in its thread, where it may still train.
        self._lock = threading.Lock()

    def recall(self, key: bytes) -> _Outcome | None:
        """Return the outcome of a training that was done before, if it is still known."""
        with self._lock:
            outcome = self._outcomes.get(key)
            if outcome is None and (outcome := self._read(key)) is not None:
                self._hold(key, outcome)
            if outcome is None:
                self.trained += 1
            else:
                self.recalled += 1
                if key in self._outcomes:
                    self._outcomes.move_to_end(key)
            return outcome

    def keep(self, key: bytes, outcome: _Outcome) -> None:
        """Keep an outcome, and forget others where there is no room."""
        with self._lock:
            self._hold(key, outcome)
            self._write(key, outcome)

    def built_once(self, key: str, build: Callable[[], Built]) -> Built:
        """Return what was built under this key before, or build it; the last few are kept."""
        with self._lock:
            if key in self._built:
                self._built.move_to_end(key)
                return self._built[key]  # type: ignore[no-any-return]
        built = build()
        with self._lock:
            self._built[key] = built
            while len(self._built) > _KEPT:
                self._built.popitem(last=False)
        return built

    def _hold(self, key: bytes, outcome: _Outcome) -> None:
        if key in self._outcomes or outcome.size_bytes > self.limit_bytes:
            return
        self._outcomes[key] = outcome
        self.held_bytes += outcome.size_bytes
        while self.held_bytes > self.limit_bytes:
            _, oldest = self._outcomes.popitem(last=False)
            self.held_bytes -= oldest.size_bytes

    def _path(self, folder: Path, key: bytes) -> Path:
        return folder / f"{key.hex()}.safetensors"

    def _read(self, key: bytes) -> _Outcome | None:
        if self.folder is None or not (path := self._path(self.folder, key)).is_file():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                metrics = json.loads(file.metadata()["metrics"])
                return _Outcome({name: file.get_tensor(name) for name in file.keys()}, metrics)  # noqa: SIM118
        except (SafetensorError, OSError, ValueError, KeyError, TypeError):
            return None  # a damaged file is as good as none

    def _write(self, key: bytes, outcome: _Outcome) -> None:
        if self.folder is not None:
            metadata = {"metrics": json.dumps(outcome.metrics)}
            # It saves work, nothing else: a full disk must not cost a node its part in the run.
            with suppress(DiskError):
                write_atomically(self._path(self.folder, key), save(outcome.state, metadata))


_memory: TrainingMemory | None = None
# Examples cannot change, so their bytes are read once.
_digests: weakref.WeakKeyDictionary[Examples, bytes] = weakref.WeakKeyDictionary()


@contextmanager
def remember_training(
    limit_bytes: int = 512 * 2**20, folder: Path | None = None
) -> Iterator[TrainingMemory]:
    """Train the same from the same only once while the context lasts.

    Inside another such context the outer memory goes on.

    Parameters
    ----------
    limit_bytes : int
        Most bytes of weights to keep, at least 0.
    folder : path, optional
        Where outcomes are kept as files, too.
    """
    global _memory
    if _memory is not None:
        yield _memory
        return
    _memory = TrainingMemory(limit_bytes, folder)
    try:
        yield _memory
    finally:
        _memory = None


def built_once(key: str, build: Callable[[], Built]) -> Built:
    """Return what cannot change and is built from its key alone; see `remember_training`."""
    return build() if _memory is None else _memory.built_once(key, build)


def fit_once(
    model: nn.Module,
    examples: Examples,
    *,
    architecture: str,
    scale: float,
    options: TrainOptions,
    seed: int,
    device: str = "cpu",
    threads: int = 1,
    proximal_mu: float = 0.0,
    target: Target = CLASSES,
) -> dict[str, float]:
    """Train a model in place, or load what the same training gave before; see `remember_training`.

    Parameters
    ----------
    architecture : str
        What the model was built from: two models with the same weights may still differ in what
        they do with them.
    model, examples, scale, options, seed, device, threads, proximal_mu, target
        As in `simulations.experiment.training.fit`.

    Returns
    -------
    dict of str to float
        As in `simulations.experiment.training.fit`.
    """
    schedule: dict[str, Any] = {
        "scale": scale,
        "options": options,
        "seed": seed,
        "device": device,
        "threads": threads,
    }
    if proximal_mu:
        # Only then, so that what was remembered before FedProx came is still found.
        schedule["proximal_mu"] = proximal_mu
    if target != CLASSES:
        # Likewise.
        schedule["target"] = target
    memory = _memory
    if memory is None or not _shows_all(model):
        return _fit(model, examples, architecture, schedule)
    # Trained together it comes out the same up to rounding, not to the last bit.
    together = {} if meeting_place() is None else {"together": True}
    key = _key(model, examples, architecture, schedule | together)
    outcome = memory.recall(key)
    if outcome is None:
        metrics = _fit(model, examples, architecture, schedule)
        state = {name: each.detach().cpu().clone() for name, each in model.state_dict().items()}
        memory.keep(key, _Outcome(state, dict(metrics)))
        return metrics
    model.load_state_dict(outcome.state)
    return dict(outcome.metrics)


def _fit(
    model: nn.Module, examples: Examples, architecture: str, schedule: dict[str, Any]
) -> dict[str, float]:
    """Train together with others, where there is a place for it, or alone."""
    place = meeting_place()
    metrics = None
    if place is not None:
        metrics = place(TrainingOrder(model, examples, architecture, schedule))
    return fit(model, examples, **schedule) if metrics is None else metrics


def _shows_all(model: nn.Module) -> bool:
    """Return whether training does nothing but change the model's state.

    Hooks on the weights (SCAFFOLD's corrections) see every gradient and may change it, and a
    buffer that is not in the state could not be restored.
    """
    hooked = any(weight._backward_hooks for weight in model.parameters())
    return not hooked and {name for name, _ in model.named_buffers()} <= model.state_dict().keys()


def _key(
    model: nn.Module, examples: Examples, architecture: str, schedule: dict[str, Any]
) -> bytes:
    """Return a digest of all that training depends on."""
    options = {k: v for k, v in asdict(schedule["options"]).items() if k not in _NOT_FITS}
    trainable = [name for name, weight in model.named_parameters() if weight.requires_grad]
    # The module, too: its output layer may have been exchanged since it was built.
    told = (architecture, str(model), trainable, sorted((schedule | {"options": options}).items()))
    digest = hashlib.blake2b(repr(told).encode(), digest_size=32)
    for name, tensor in model.state_dict().items():
        _add(digest, name, tensor.detach().cpu().numpy())
    digest.update(digest_of(examples))
    return digest.digest()


def digest_of(examples: Examples) -> bytes:
    """Return a digest of examples, which is computed once."""
    known = _digests.get(examples)
    if known is None:
        digest = hashlib.blake2b(digest_size=32)
        _add(digest, "features", examples.features)
        _add(digest, "labels", examples.labels)
        known = _digests[examples] = digest.digest()
    return known


def _add(digest: hashlib.blake2b, name: str, array: np.ndarray) -> None:
    digest.update(repr((name, array.dtype.str, array.shape)).encode())
    digest.update(np.ascontiguousarray(array).data)
