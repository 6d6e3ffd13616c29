"""Training is stopped at the first step that changes a layer which must stay as it is.

Layers that all nodes share must not be trained. Whether they were shows after training anyway, but
then hours may be lost. So while a handler trains, every torch optimiser is watched: a weight that
came with the values of a frozen layer, and has others after a step, is that layer.

Decided here: only matrices and kernels that are not constant are looked for, because a bias of
zeros has the values of many innocent ones; and only steps of the thread that watches count, so that
a handler which was given up, and still trains elsewhere, is not taken for another one. What cannot
be seen here (training without torch, or in a thread of its own) shows when results are compared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from gems_flwr.typing import Arrays


@contextmanager
def watch_frozen(
    arrays: Arrays, frozen: Iterable[str], fault: Callable[[list[str]], Exception]
) -> Iterator[None]:
    """Raise at the first step of a torch optimiser that changes a frozen array.

    Parameters
    ----------
    arrays : mapping from str to ndarray
        The network as training gets it.
    frozen : iterable of str
        Keys of arrays that must stay.
    fault : callable
        Gets the keys of those that have changed, returns what to raise.
    """
    watch = _Watch(arrays, frozen, fault)
    handles = [
        register_optimizer_step_pre_hook(watch.before),
        register_optimizer_step_post_hook(watch.after),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Watch:
    def __init__(
        self, arrays: Arrays, frozen: Iterable[str], fault: Callable[[list[str]], Exception]
    ) -> None:
        self._thread, self._fault = threading.get_ident(), fault
        self._wanted: dict[tuple[int, ...], list[tuple[str, Tensor]]] = {}
        for key in frozen:
            values = np.asarray(arrays[key])
            if values.ndim > 1 and values.size and (values != values.flat[0]).any():
                shaped = self._wanted.setdefault(values.shape, [])
                shaped.append((key, torch.from_numpy(np.array(values))))
        # By parameter, which frozen array it came as; None if it is none of them.
        self._known: dict[Tensor, tuple[str, Tensor] | None] = {}

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Note which of an optimiser's weights are frozen ones, while they are as they came."""
        if threading.get_ident() != self._thread:
            return
        for weight in _weights(optimizer):
            if weight not in self._known and weight.requires_grad and weight.grad is not None:
                found = self._wanted.get(tuple(weight.shape), ())
                same = (each for each in found if _equal(weight, each[1]))
                self._known[weight] = next(same, None)

    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Raise if a step has changed a frozen one."""
        if threading.get_ident() != self._thread:
            return
        pairs = [(weight, self._known.get(weight)) for weight in _weights(optimizer)]
        changed = [came[0] for weight, came in pairs if came and not _equal(weight, came[1])]
        if changed:
            raise self._fault(changed)


def _weights(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _equal(weight: Tensor, values: Tensor) -> bool:
    return torch.equal(weight.detach(), values.to(weight.device, weight.dtype))
