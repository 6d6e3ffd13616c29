"""Random filters over images, smoothly pooled: a layer whose weights are a seed.

A cone is about a linear layer, and what lies below that layer need not be learned, nor sent: a
*seeded* random network is common to all who know the seed. Random convolutions with pooling go back
to Jarrett et al. 2009 and Saxe et al. 2011 ("On Random Weights and Unsupervised Feature Learning");
Fed3R-RF (Fanì et al. 2024) has random features below a federated ridge head.

An image of any scale becomes ``filters * grid^2`` numbers:

1. its range is made [0, 1]: 0 … 255, 0 … 1 and standardised pixels give the same;
2. every patch is compared with random filters of mean zero and length one, and divided by its own
   length, ``sqrt(|p|^2 + contrast^2)``, its mean taken away (as Coates, Ng and Lee 2011 do): faint
   and strong edges then answer alike;
3. a bias in [-1/2, 0], ReLU;
4. means under ``grid x grid`` Gaussian windows that overlap, divided by the length of the answers
   of all filters in a window (as in histograms of oriented gradients);
5. the square root.

Windows that overlap forgive small shifts, and the root makes the numbers more nearly normal, which
is what class moments describe. Decided here, on validation data: sizes are relative to the image's
(see `RandomFilters`); the border is repeated, not padded with zeros, so that a constant added to
the pixels changes nothing; images of at least twice 28 pixels are averaged over blocks first, since
filters of five pixels say nothing about them otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gems_flwr.errors import OptionError

SMALLEST_SIDE = 4
# Filters of `kernel` pixels are made for images of about this side.
_USUAL_SIDE = 28
# From this side on the default kernel is 5, below 3.
_LARGE_SIDE = 16
# Squared length of answers below which a window counts as empty.
_EMPTY = 1e-3
# Answers of all filters that are held at a time: more would not fit a processor's cache.
_CHUNK_VALUES = 2**21


class RandomFilters(nn.Module):
    """Images to vectors by random filters and Gaussian windows; no weights that travel.

    The weights are buffers made from the seed, the same on every machine and device, and no part
    of the state dict. All nodes and the server must use the same arguments.

    Parameters
    ----------
    input_shape : sequence of int
        ``(channels, height, width)`` of one image, sides of at least 4.
    filters : int, default 64
        Random filters, at least 1.
    kernel : int, optional
        Their side in pixels, odd, at most the image's smaller side. By default 5, and 3 for images
        of less than 16 pixels.
    grid : int, default 4
        Windows along each side, at least 1.
    sigma : float, default 0.09
        Deviation of a window, relative to the image's side; above 0.
    margin : float, default 0.16
        Distance of the outer windows' centres from the border, relative to the side; in [0, 0.5].
    contrast : float, default 0.2
        Length of a patch, for pixels in [0, 1], below which it counts as flat; above 0.
    seed : int, default 0
        Source of the filters, at least 0.

    Raises
    ------
    OptionError
        If an option is out of range.

    Examples
    --------
    Three nodes with images of one class each, and one round of GEMS on top of the filters:

    >>> import numpy as np
    >>> from flwr.app import ArrayRecord
    >>> from flwr.clientapp import ClientApp
    >>> from torch import nn
    >>> from gems_flwr import Cone, Gems, InProcessGrid, RandomFilters, good_enough_mod
    >>> def Net():
    ...     lift = RandomFilters((1, 8, 8), filters=8, grid=2)
    ...     return nn.Sequential(lift, nn.Linear(lift.features, 3))
    >>> def data(context):
    ...     node = context.node_config["partition-id"]
    ...     images = np.random.default_rng(node).uniform(0, 255, (400, 1, 8, 8))
    ...     images[:, 0, 2 * node : 2 * node + 3] = 255  # bars at other heights
    ...     labels = np.full(400, node)
    ...     return (images[:300], labels[:300]), (images[300:], labels[300:])
    >>> app = ClientApp(mods=[good_enough_mod(data, model=Net)])
    >>> @app.train()
    ... def train(message, context):
    ...     raise NotImplementedError("a cone needs no trained model")
    >>> initial = ArrayRecord(Net().state_dict())
    >>> list(initial)  # the filters never travel
    ['1.weight', '1.bias']
    >>> strategy = Gems(space=Cone(rank=4), verify=True)
    >>> result = strategy.start(InProcessGrid(app, nodes=3), initial)
    >>> min(result.details["node_scores"].values()) > 0.95
    True
    """

    weight: Tensor
    bias: Tensor
    windows: Tensor

    def __init__(
        self,
        input_shape: Sequence[int],
        filters: int = 64,
        kernel: int | None = None,
        grid: int = 4,
        sigma: float = 0.09,
        margin: float = 0.16,
        contrast: float = 0.2,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.input_shape = _checked_shape(input_shape)
        channels, *sides = self.input_shape
        self.block = max(1, min(sides) // _USUAL_SIDE)
        sides = [side // self.block for side in sides]
        if kernel is None:
            kernel = 5 if min(sides) >= _LARGE_SIDE else 3
        rules = {
            "filters": (filters >= 1, "at least 1", filters),
            "kernel": (
                kernel % 2 == 1 and 3 <= kernel <= min(sides),
                f"odd, from 3 to {min(sides)}",
                kernel,
            ),
            "grid": (grid >= 1, "at least 1", grid),
            "sigma": (sigma > 0, "above 0", sigma),
            "contrast": (contrast > 0, "above 0", contrast),
            "margin": (0 <= margin <= 0.5, "in [0, 0.5]", margin),
            "seed": (seed >= 0, "at least 0", seed),
        }
        for option, (holds, allowed, value) in rules.items():
            if not holds:
                raise OptionError(f"{option}: expected {allowed}, got {value}")
        self.filters, self.kernel, self.grid, self.seed = filters, kernel, grid, seed
        self.sigma, self.margin, self.contrast = sigma, margin, contrast
        weight, bias = draw_filters(filters, channels, kernel, seed)
        rows, columns = (gaussian_windows(side, grid, sigma, margin) for side in sides)
        windows = torch.einsum("ai,bj->ijab", rows, columns).reshape(sides[0] * sides[1], grid**2)
        for name, buffer in (("weight", weight), ("bias", bias), ("windows", windows)):
            self.register_buffer(name, buffer.float(), persistent=False)

    @property
    def features(self) -> int:
        """Length of the vectors that come out."""
        return self.filters * self.grid**2

    def forward(self, images: Tensor) -> Tensor:
        """Return one vector per image.

        Parameters
        ----------
        images : tensor of shape (n, channels, height, width)
            Floating-point pixels.
        """
        if tuple(images.shape[1:]) != self.input_shape:
            raise OptionError(
                f"images: expected shape (n, {', '.join(map(str, self.input_shape))}), got "
                f"{tuple(images.shape)}"
            )
        pixels = (images.shape[2] // self.block) * (images.shape[3] // self.block)
        size = max(1, _CHUNK_VALUES // (self.filters * pixels))
        # In parts for the sake of memory; a program that is traced has no number of images yet.
        if torch.compiler.is_compiling() or len(images) <= size:
            return self._lift(images)
        return torch.cat([self._lift(part) for part in torch.split(images, size)])

    def _lift(self, images: Tensor) -> Tensor:
        images = images.to(self.weight.dtype)
        if self.block > 1:
            images = F.avg_pool2d(images, self.block)
        low = images.amin(dim=(1, 2, 3), keepdim=True)
        span = images.amax(dim=(1, 2, 3), keepdim=True) - low
        # A blank image has no range, and becomes zero.
        images = (images - low) / torch.where(span > 0, span, 1.0)
        framed = F.pad(images, (self.kernel // 2,) * 4, mode="replicate")
        answers = F.conv2d(framed, self.weight) / self._patch_lengths(framed)
        answers = F.relu(answers + self.bias.reshape(-1, 1, 1))
        means = answers.flatten(2) @ self.windows
        means = means / (means.square().sum(dim=1, keepdim=True) + _EMPTY).sqrt()
        # The root's slope at zero is infinite; nobody tells a millionth from nothing.
        return means.flatten(1).clamp_min(1e-12).sqrt()

    def _patch_lengths(self, framed: Tensor) -> Tensor:
        """Return the length of every patch without its mean, (n, 1, height, width)."""
        mean = F.avg_pool2d(framed, self.kernel, stride=1)
        variance = F.avg_pool2d(framed.square(), self.kernel, stride=1) - mean.square()
        squares = self.kernel**2 * variance.clamp_min(0).sum(dim=1, keepdim=True)
        return (squares + self.contrast**2).sqrt()

    def extra_repr(self) -> str:
        """Return what tells this lift from others."""
        return (
            f"{self.input_shape}, filters={self.filters}, kernel={self.kernel}, grid={self.grid}, "
            f"seed={self.seed}"
        )


def draw_filters(filters: int, channels: int, kernel: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return filters (f, channels, k, k) of mean zero and length one, and biases in [-1/2, 0].

    In double precision on the processor, so that single precision has the same bits everywhere.
    """
    source = torch.Generator().manual_seed(seed)
    shape = (filters, channels, kernel, kernel)
    drawn = torch.randn(shape, generator=source, dtype=torch.float64)
    centered = drawn - drawn.mean(dim=(2, 3), keepdim=True)
    length = centered.flatten(1).norm(dim=1).reshape(-1, 1, 1, 1)
    return centered / length, -torch.rand(filters, generator=source, dtype=torch.float64) / 2


def gaussian_windows(side: int, grid: int, sigma: float, margin: float) -> Tensor:
    """Return windows (grid, side) along one side, each of sum one; see `RandomFilters`."""
    border = margin * side
    centers = torch.linspace(border, side - border, grid, dtype=torch.float64)
    if grid == 1:
        centers = torch.tensor([side / 2], dtype=torch.float64)
    pixels = torch.arange(side, dtype=torch.float64) + 0.5
    away = (pixels - centers[:, None]) / (sigma * side)
    windows = torch.exp(-(away**2) / 2)
    return windows / windows.sum(dim=1, keepdim=True)


def _checked_shape(input_shape: Sequence[int]) -> tuple[int, int, int]:
    shape = tuple(int(length) for length in input_shape)
    if len(shape) != 3 or min(shape) < 1 or min(shape[1:]) < SMALLEST_SIDE:
        raise OptionError(
            f"input_shape: expected (channels, height, width) with sides of at least "
            f"{SMALLEST_SIDE} pixels, got {shape}; vectors go into RandomFourier"
        )
    return shape[0], shape[1], shape[2]
