"""Running a model and noting what some of its modules see."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Step(NamedTuple):
    """One call of a module: its name, first input and output."""

    name: str
    inputs: Tensor
    outputs: Tensor


def watch(model: nn.Module, x: Tensor, names: Iterable[str]) -> list[Step]:
    """Return the calls of some modules in the order in which they ran.

    Parameters
    ----------
    model : torch.nn.Module
        Run once on `x`, without gradients.
    x : tensor
        A batch; moved to where the model is.
    names : iterable of str
        Names of submodules.
    """
    seen: list[Step] = []

    def hook(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def note(_: nn.Module, arguments: Any, out: Any) -> None:
            seen.append(Step(name, arguments[0].detach(), out.detach()))

        return note

    modules = dict(model.named_modules())
    handles = [modules[name].register_forward_hook(hook(name)) for name in names]
    try:
        with torch.no_grad():
            model(on_device_of(model, x))
    finally:
        for handle in handles:
            handle.remove()
    return seen


def on_device_of(model: nn.Module, x: Tensor) -> Tensor:
    """Return a batch as the model wants it."""
    weight = next(model.parameters())
    return x.to(weight.device, weight.dtype)
