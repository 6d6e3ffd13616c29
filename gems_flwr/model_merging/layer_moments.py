"""Sums over samples of one layer's statistics; what they are says `layer_statistics`.

A filter of a convolution is one neuron at many positions t. The gradient of one sample in its
kernel is the sum over positions of g_t a_tᵀ, with a_t the patch and g_t the gradient in the pixel.
The Fisher diagonal has the square of that sum. The Kronecker factors are those of Grosse & Martens
2016: patches as inputs, summed over positions, and output gradients averaged over them, so that
their product has the size of the Fisher matrix.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gems_flwr.devices import exact
from gems_flwr.model_merging.layer_statistics import Kind
from gems_flwr.networks.patches import image_chunks, patches_of


def statistic_sum(
    kind: Kind,
    module: nn.Linear | nn.Conv2d,
    inputs: Tensor,
    gradients: Sequence[Tensor] | None,
) -> Tensor:
    """Return one statistic of a layer, summed over the samples of a batch.

    Parameters
    ----------
    kind : {"inputs", "gradients", "fisher"}
        Which one.
    module : torch.nn.Linear or torch.nn.Conv2d
        The layer.
    inputs : tensor of shape (n, d) or (n, channels, height, width)
        What it saw.
    gradients : sequence of tensors of shape (n, width) or (n, width, height, width), optional
        In its outputs, one tensor for each label, times the root of the label's chance; not needed
        for ``inputs``.
    """
    if isinstance(module, nn.Linear):
        return _linear_sum(kind, _with_one(exact(inputs), module), gradients)
    return _convolution_sum(kind, module, inputs, gradients)


def _linear_sum(kind: Kind, a: Tensor, gradients: Sequence[Tensor] | None) -> Tensor:
    if kind == "inputs":
        return a.T @ a
    assert gradients is not None
    if kind == "gradients":
        return torch.stack([g.T @ g for g in gradients]).sum(0)
    return torch.stack([g**2 for g in gradients]).sum(0).T @ a**2


def _convolution_sum(
    kind: Kind, module: nn.Conv2d, images: Tensor, gradients: Sequence[Tensor] | None
) -> Tensor:
    if kind == "gradients":
        assert gradients is not None
        positions = gradients[0][0, 0].numel()
        rows = [g.transpose(0, 1).reshape(g.shape[1], -1) for g in gradients]
        return torch.stack([g @ g.T for g in rows]).sum(0) / positions
    total: Tensor | None = None
    for part in image_chunks(module, images):
        a = _with_one(exact(patches_of(module, images[part])), module)
        if kind == "inputs":
            flat = a.reshape(-1, a.shape[-1])
            fresh = flat.T @ flat
        else:
            assert gradients is not None
            # Of every sample and label the gradient in the kernel, a matrix (width, d); all labels
            # in one product, which is much faster than one each.
            maps = torch.cat([torch.flatten(g[part], start_dim=2) for g in gradients], dim=1)
            squares = ((maps @ a) ** 2).sum(0)
            fresh = squares.reshape(len(gradients), -1, a.shape[-1]).sum(0)
        total = fresh if total is None else total + fresh
    assert total is not None
    return total


def _with_one(a: Tensor, module: nn.Linear | nn.Conv2d) -> Tensor:
    return a if module.bias is None else torch.cat([a, torch.ones_like(a[..., :1])], dim=-1)
