"""Small linear layers and data on which the construction is tested."""

import torch

from gems_flwr.spaces.ball import LayerData


def a_problem(seed, n=40, features=4, outputs=3, bias=True, axes=False):
    """Return a random layer and labels that it gets right four times out of five."""
    rng = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, features, generator=rng, dtype=torch.float64)
    offset = torch.randn(outputs, generator=rng, dtype=torch.float64) if bias else None
    # Float32 is what a space stores; the same numbers in double keep comparisons exact.
    weight = weight.float().double()
    offset = None if offset is None else offset.float().double()
    x = torch.randn(n, features, generator=rng, dtype=torch.float64)
    scores = x @ weight.T + (0 if offset is None else offset)
    y = scores.argmax(1) if outputs > 1 else (scores[:, 0] > 0).long()
    flip = torch.rand(n, generator=rng) < 0.2
    classes = max(2, outputs)
    y = torch.where(flip, torch.randint(classes, (n,), generator=rng), y)
    size = weight.numel() + (outputs if bias else 0)
    lengths = torch.rand(size, generator=rng).double() * 0.9 + 0.1 if axes else None
    return LayerData(weight, offset, x, y, lengths)


def blobs(features, n=300, classes=4, seed=0):
    """Return well separated Gaussian classes and the layer of their means."""
    rng = torch.Generator().manual_seed(seed)
    means = torch.randn(classes, features, generator=rng) / features**0.25
    y = torch.randint(classes, (n,), generator=rng)
    x = means[y] + 0.5 * torch.randn(n, features, generator=rng)
    return LayerData(means, -(means**2).sum(1) / 2, x, y)
