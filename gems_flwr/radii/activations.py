"""Activations whose neurons have one radius per ray: the monotone ones.

2019, Section 3.2 writes g for "some non-linearity (e.g. ReLU)". Everything that is computed
about a neuron's ball rests on two properties of g. If g is monotone, the output of every sample
moves one way along a ray, so Eq. 3's deviation never falls again and one crossing is the
radius. If g is Lipschitz, the deviation is at most that constant times the distance times the
largest singular value of the inputs, which is a proof.

Decided here: an activation that is not monotone (GELU, SiLU, Mish, Hardswish) or not known is
an error, not an approximation. A module that acts on all neurons at once (softmax) is no
activation in this sense.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gems_flwr.errors import ModelError

Function = Callable[[Tensor], Tensor]


@dataclasses.dataclass(frozen=True, eq=False)
class Activation:
    """A non-decreasing function applied to each neuron's output.

    Parameters
    ----------
    name : str
        What it is called in messages.
    function : callable
        g, element by element.
    lipschitz : float
        A constant with ``|g(a) - g(b)| <= lipschitz * |a - b|``, above 0.
    derivative : callable, optional
        g'; automatic differentiation if left out.
    below : float, optional
        Slope below 0 of an activation that is the identity above 0 and linear below it. Along
        a ray the squared deviation is then piecewise quadratic, and is solved, not searched.
    """

    name: str
    function: Function
    lipschitz: float = 1.0
    derivative: Function | None = None
    below: float | None = None

    def __post_init__(self) -> None:
        if not self.lipschitz > 0:
            raise ModelError(f"lipschitz: expected a number above 0, got {self.lipschitz}")

    def slope(self, values: Tensor) -> Tensor:
        """Return g' at each value."""
        if self.derivative is not None:
            return self.derivative(values)
        with torch.enable_grad():
            at = values.detach().requires_grad_()
            return torch.autograd.grad(self.function(at).sum(), at)[0]


def _kinked(name: str, below: float) -> Activation:
    """Return the activation that is the identity above 0 and has slope ``below`` under it."""

    def derivative(values: Tensor) -> Tensor:
        return torch.where(values > 0, 1.0, below).to(values)

    function: Function = partial(F.leaky_relu, negative_slope=below) if below else torch.relu
    return Activation(name, function, max(1.0, below), derivative, below)


def _elu(alpha: float) -> Activation:
    return Activation("elu", partial(F.elu, alpha=alpha), max(1.0, alpha))


def _softplus(beta: float, threshold: float) -> Activation:
    return Activation("softplus", partial(F.softplus, beta=beta, threshold=threshold))


def _hardtanh(name: str, low: float, high: float) -> Activation:
    return Activation(name, partial(torch.clamp, min=low, max=high))


ACTIVATIONS: dict[str, Activation] = {
    activation.name: activation
    for activation in (
        _kinked("relu", 0.0),
        _kinked("leaky_relu", 0.01),
        Activation("tanh", torch.tanh, 1.0, lambda a: 1 - torch.tanh(a) ** 2),
        Activation("sigmoid", torch.sigmoid, 0.25),
        _elu(1.0),
        _softplus(1.0, 20.0),
        _hardtanh("hardtanh", -1.0, 1.0),
        _hardtanh("relu6", 0.0, 6.0),
        Activation("identity", lambda a: a, 1.0, torch.ones_like, 1.0),
    )
}

_PLAIN: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.Tanh: "tanh",
    nn.Sigmoid: "sigmoid",
    nn.ReLU6: "relu6",
    nn.Identity: "identity",
}
# In PyTorch's file of activations, but of all neurons at once.
_JOINT = (nn.Softmax, nn.Softmin, nn.LogSoftmax, nn.Softmax2d, nn.MultiheadAttention)


def activation_of(module: nn.Module) -> Activation | None:
    """Return the activation that a module computes, or None if it is no activation.

    Raises
    ------
    ModelError
        If it is an activation, but not one that is known to be monotone.
    """
    kind = type(module)
    if kind in _PLAIN:
        return ACTIVATIONS[_PLAIN[kind]]
    if isinstance(module, nn.LeakyReLU) and module.negative_slope >= 0:
        return _kinked("leaky_relu", float(module.negative_slope))
    if isinstance(module, nn.ELU) and module.alpha >= 0:
        return _elu(float(module.alpha))
    # Where PyTorch goes over to the identity the function falls by exp(-threshold) / beta.
    if isinstance(module, nn.Softplus) and module.beta > 0 and module.threshold >= 15:
        return _softplus(float(module.beta), float(module.threshold))
    if isinstance(module, nn.Hardtanh):
        return _hardtanh("hardtanh", float(module.min_val), float(module.max_val))
    if kind.__module__ != nn.ReLU.__module__ or isinstance(module, _JOINT):
        return None
    raise ModelError(
        f"activation: a neuron's deviation must be monotone along a ray, which is known of "
        f"{sorted(ACTIVATIONS)}, got {module}"
    )
