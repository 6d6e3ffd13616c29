"""Many copies of one network with weights of their own, run side by side.

The weights of all copies lie in one tensor per name, shaped ``(copies, …)``, inputs in one shaped
``(copies, batch, …)``. What has no weights (activations, pooling) sees the batches of all copies as
one; a linear layer is one batched product. Its backward pass is written out here, because the one
that PyTorch finds by itself computes the transposed gradient and copies it, which takes as long as
all else. Any other network goes through `torch.func.vmap`, which is slower and knows nearly
everything.

Dropout multiplies by masks that the caller draws, so that every copy can have those that it would
have drawn alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.func import functional_call, vmap
from torch.nn import functional as F

from simulations.experiment.model_copies import copy_model

Tensors = Mapping[str, Tensor]

# They have no weights and treat every example by itself, so copies need not be told apart.
_PLAIN = (
    nn.Identity,
    nn.ReLU,
    nn.LeakyReLU,
    nn.ELU,
    nn.GELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Tanh,
    nn.Softplus,
    nn.MaxPool2d,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool2d,
)


@dataclass(frozen=True)
class DropoutLayer:
    """A dropout module: its name, its rate, and the shape of one example where it stands."""

    name: str
    rate: float
    shape: tuple[int, ...]


class BatchedNetwork:
    """Copies of a network, all run at once.

    Parameters
    ----------
    model : torch.nn.Module
        The network. Weights that the calls do not name are the same for all copies: those of this
        one.
    example : torch.Tensor
        Inputs of one example, shaped ``(1, …)``, on the device where the copies are to run.
    """

    def __init__(self, model: nn.Module, example: Tensor) -> None:
        self._model = copy_model(model).to(example.device).train()
        for module in self._model.modules():
            if getattr(module, "inplace", False):
                # What is changed in place may be needed for the gradient of another copy's layer.
                module.inplace = False  # type: ignore[assignment]
        self.dropouts = _dropouts(self._model, example)
        self._steps = _steps(self._model)
        if self._steps is None:
            for layer in self.dropouts:
                parent, _, last = layer.name.rpartition(".")
                setattr(self._model.get_submodule(parent), last, _Masked())
            self._run = vmap(self._one, randomness="error")

    def __call__(self, weights: Tensors, inputs: Tensor, masks: Tensors) -> Tensor:
        """Return the outputs of all copies.

        Parameters
        ----------
        weights : mapping from str to Tensor
            Shaped ``(copies, …)``.
        inputs : Tensor
            Shaped ``(copies, batch, …)``.
        masks : mapping from str to Tensor
            What each layer of `dropouts` multiplies by, shaped ``(copies, batch, …)``.
        """
        if self._steps is None:
            outputs: Tensor = self._run(dict(weights), inputs, dict(masks))
            return outputs
        for name, module in self._steps:
            prefix = f"{name}." if name else ""
            if name in masks:
                inputs = inputs * masks[name]
            elif f"{prefix}weight" in weights or f"{prefix}bias" in weights:
                inputs = _apply(module, prefix, weights, inputs)
            elif not isinstance(module, nn.Dropout):
                merged = module(inputs.flatten(0, 1))
                inputs = merged.view(*inputs.shape[:2], *merged.shape[1:])
        return inputs

    def _one(self, weights: dict[str, Tensor], inputs: Tensor, masks: dict[str, Tensor]) -> Any:
        given = weights | {f"{name}.mask": mask for name, mask in masks.items()}
        return functional_call(self._model, given, (inputs,))


class _Masked(nn.Module):
    """Dropout with a mask that is given."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(()))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.mask


def _dropouts(model: nn.Module, example: Tensor) -> list[DropoutLayer]:
    """Return the dropout modules that draw, in the order in which they do."""
    found: list[DropoutLayer] = []

    def note(name: str, module: nn.Dropout, inputs: Tensor) -> None:
        found.append(DropoutLayer(name, module.p, tuple(inputs.shape[1:])))

    hooks = [
        module.register_forward_pre_hook(
            lambda module, args, name=name: note(name, module, args[0])
        )
        for name, module in model.named_modules()
        if isinstance(module, nn.Dropout) and module.p > 0
    ]
    model.eval()
    with torch.no_grad():
        model(example)
    model.train()
    for hook in hooks:
        hook.remove()
    return found


def _steps(model: nn.Module) -> list[tuple[str, nn.Module]] | None:
    """Return the layers one after the other; None if that is not all there is to the network."""
    if isinstance(model, nn.Linear):
        return [("", model)]
    if type(model) is not nn.Sequential:
        return None
    steps: list[tuple[str, nn.Module]] = []
    for name, module in model.named_children():
        inner = _steps(module) if type(module) is nn.Sequential else [("", module)]
        if inner is None or not all(_is_known(each) for _, each in inner):
            return None
        steps += [(f"{name}.{below}" if below else name, each) for below, each in inner]
    return steps


def _is_known(module: nn.Module) -> bool:
    if isinstance(module, nn.Conv2d):
        return module.padding_mode == "zeros"
    if isinstance(module, nn.Flatten):
        return module.start_dim == 1
    return type(module) in (nn.Linear, nn.Dropout, *_PLAIN)


def _apply(module: nn.Module, prefix: str, weights: Tensors, inputs: Tensor) -> Tensor:
    """Let a layer of every copy see the inputs of its copy."""
    copies = len(inputs)
    own: dict[str, Tensor] = dict(module.named_parameters())
    # What is not given is the same for all.
    weight, bias = (
        weights.get(f"{prefix}{name}", own[name].expand(copies, *own[name].shape))
        if name in own
        else None
        for name in ("weight", "bias")
    )
    assert weight is not None
    if isinstance(module, nn.Conv2d):
        return _convolve(module, weight, bias, inputs)
    flat = inputs.flatten(1, -2)
    outputs: Tensor = _BatchedLinear.apply(flat, weight, bias)  # type: ignore[no-untyped-call]
    return outputs.view(*inputs.shape[:-1], weight.shape[1])


class _BatchedLinear(torch.autograd.Function):
    """Linear layers side by side, whose gradients come out in the layout of their weights."""

    @staticmethod
    def forward(ctx: FunctionCtx, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        if bias is None:
            return torch.bmm(inputs, weight.transpose(1, 2))
        return torch.baddbmm(bias.unsqueeze(1), inputs, weight.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        inputs, weight = ctx.saved_tensors
        below = torch.bmm(gradient, weight) if ctx.needs_input_grad[0] else None
        own = torch.bmm(gradient.transpose(1, 2), inputs) if ctx.needs_input_grad[1] else None
        return below, own, gradient.sum(1) if ctx.needs_input_grad[2] else None


def _convolve(module: nn.Conv2d, weight: Tensor, bias: Tensor | None, inputs: Tensor) -> Tensor:
    if inputs.device.type == "cpu":
        # One after the other: on a processor a grouped convolution takes up to twice as long.
        biases = [None] * len(weight) if bias is None else bias.unbind()
        outputs = [
            F.conv2d(each, w, b, module.stride, module.padding, module.dilation, module.groups)
            for each, w, b in zip(inputs.unbind(), weight.unbind(), biases, strict=True)
        ]
        return torch.stack(outputs)
    copies = len(weight)
    joined = F.conv2d(
        inputs.transpose(0, 1).flatten(1, 2),
        weight.flatten(0, 1),
        None if bias is None else bias.flatten(),
        module.stride,
        module.padding,
        module.dilation,
        copies * module.groups,
    )
    return joined.reshape(len(joined), copies, -1, *joined.shape[2:]).transpose(0, 1)
