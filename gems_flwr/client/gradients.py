"""SCAFFOLD on a node: add a correction to every gradient, whatever the training loop looks like.

The correction c − c_i is added by hooks on the weights, so a task's own training code need not
know of it. One call of ``backward`` counts as one local step: a loop that accumulates gradients
over several calls would be corrected several times.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from gems_flwr.errors import ModelError


class GradientSum:
    """The uncorrected gradients of all steps, added up, in the order of the model's arrays."""

    def __init__(self, model: nn.Module) -> None:
        self._arrays = [a for a in model.state_dict().values() if a.is_floating_point()]
        self._sums: dict[int, torch.Tensor] = {}
        self._steps: dict[int, int] = {}

    def add(self, position: int, gradient: torch.Tensor) -> None:
        """Note a gradient of the array at a position."""
        seen = self._sums.get(position)
        self._sums[position] = gradient.clone() if seen is None else seen.add_(gradient)
        self._steps[position] = self._steps.get(position, 0) + 1

    def mean(self) -> NDArray:
        """Return the mean gradient as one vector; zero for arrays that are no weights."""
        parts = [
            (self._sums[i] / self._steps[i]).cpu() if i in self._sums else torch.zeros_like(a).cpu()
            for i, a in enumerate(self._arrays)
        ]
        return np.concatenate([part.detach().numpy().ravel() for part in parts])


@contextmanager
def corrected_gradients(
    model: nn.Module, correction: NDArray | None
) -> Iterator[GradientSum | None]:
    """Add a correction to every gradient of a model while the context lasts.

    Parameters
    ----------
    model : torch.nn.Module
        About to be trained.
    correction : ndarray, optional
        One number for each floating-point number in the model's ``state_dict``, in its order;
        None changes nothing, and None is what the context gives then.
    """
    if correction is None:
        yield None
        return
    sums = GradientSum(model)
    floats = [name for name, array in model.state_dict().items() if array.is_floating_point()]
    sizes = [model.state_dict()[name].numel() for name in floats]
    if sum(sizes) != len(correction):
        raise ModelError(f"the correction has {len(correction)} numbers, the model {sum(sizes)}")
    parts = dict(zip(floats, np.split(correction, np.cumsum(sizes)[:-1]), strict=True))
    hooks = []
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            continue
        part = torch.from_numpy(parts[name].copy()).reshape(weight.shape).to(weight.dtype)

        def correct(
            gradient: torch.Tensor, part: torch.Tensor = part, at: int = floats.index(name)
        ) -> torch.Tensor:
            sums.add(at, gradient)
            return gradient + part.to(gradient.device)

        hooks.append(weight.register_hook(correct))  # type: ignore[no-untyped-call]
    try:
        yield sums
    finally:
        for hook in hooks:
            hook.remove()
