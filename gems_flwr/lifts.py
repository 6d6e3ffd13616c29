"""Layers whose weights are a seed: all nodes have them, they never travel, and no node trains them.

What lies below a linear layer need not be learned, nor sent: a *seeded* random network is common to
all who know the seed. `RandomFilters` makes vectors of images (random convolutions with pooling go
back to Jarrett et al. 2009 and Saxe et al. 2011), `RandomFourier` cosines and sines of vectors
(Rahimi and Recht 2007). Fed3R-RF (Fanì et al. 2024) puts a federated ridge head on such features.

Decided here, on validation data (docs/lifts.md): the defaults; of images, sizes are relative to the
image's, and the border is repeated, not padded with zeros, so that a constant added to the pixels
changes nothing; of vectors, each is first made one of length ``sqrt(D)``: two with nothing in
common then differ by ``sqrt(2 D)`` in every data set, so one relative kernel width suits them all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gems_flwr.errors import OptionError, check_options

SMALLEST_SIDE = 4
# Filters of `kernel` pixels are made for images of about this side; larger ones are averaged first.
_USUAL_SIDE = 28
_LARGE_SIDE = 16  # from this side on the default kernel is 5, below 3
_EMPTY = 1e-3  # squared length of answers below which a window counts as empty
# Answers of all filters held at a time, 4 MB: more leave a processor's cache, and are given
# back to the operating system after each use, which takes longer than the convolution.
_CHUNK_VALUES = 2**20


class RandomFilters(nn.Module):
    """Images to vectors by random filters and Gaussian windows; no weights that travel.

    The weights are buffers made from the seed, the same on every machine and device, and no part
    of the state dict. All nodes and the server must use the same arguments. An image of any scale
    becomes ``filters * grid^2`` numbers:

    1. its range is made [0, 1]: 0 … 255, 0 … 1 and standardised pixels give the same;
    2. every patch is compared with random filters of mean zero and length one, and divided by its
       own length, ``sqrt(|p|^2 + contrast^2)``, its mean taken away (as Coates, Ng and Lee 2011
       do): faint and strong edges then answer alike;
    3. a bias in [-1/2, 0], ReLU;
    4. means under ``grid x grid`` Gaussian windows that overlap and so forgive small shifts,
       divided by the length of the answers of all filters in a window (as in histograms of
       oriented gradients);
    5. the square root: numbers are more nearly normal, which is what class moments describe.

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
    seed : int, default 0
        Source of the filters, at least 0.

    Examples
    --------
    A model whose output layer stands on filters; an app with it needs no training for a cone:

    >>> from torch import nn
    >>> from gems_flwr import RandomFilters
    >>> lift = RandomFilters((1, 8, 8), filters=8, grid=2)
    >>> model = nn.Sequential(lift, nn.Linear(lift.features, 3))
    >>> list(model.state_dict())  # the filters never travel
    ['1.weight', '1.bias']
    """

    # Deviation of a window, and the border's distance from the outer windows' centres, relative to
    # the image's side; length of a patch, for pixels in [0, 1], below which it counts as flat.
    sigma, margin, contrast = 0.09, 0.16, 0.2
    weight: Tensor
    bias: Tensor
    rows: Tensor
    columns: Tensor

    def __init__(
        self,
        input_shape: Sequence[int],
        filters: int = 64,
        kernel: int | None = None,
        grid: int = 4,
        seed: int = 0,
    ) -> None:
        super().__init__()
        channels, *sides = self.input_shape = _checked_shape(input_shape)
        self.block = max(1, min(sides) // _USUAL_SIDE)
        sides = [side // self.block for side in sides]
        if kernel is None:
            kernel = 5 if min(sides) >= _LARGE_SIDE else 3
        self.filters, self.kernel, self.grid, self.seed = filters, kernel, grid, seed
        fits = kernel % 2 == 1 and 3 <= kernel <= min(sides)
        rules = {
            "filters": (filters >= 1, "at least 1"),
            "kernel": (fits, f"odd, from 3 to {min(sides)}"),
            "grid": (grid >= 1, "at least 1"),
            "seed": (seed >= 0, "at least 0"),
        }
        check_options(self, rules)
        weight, bias = _draw_filters(filters, channels, kernel, seed)
        # Channels last: the answers of all filters at a pixel are then neighbours in memory.
        weight = weight.float().to(memory_format=torch.channels_last)
        rows, columns = (_gaussian_windows(side, grid, self.sigma, self.margin) for side in sides)
        buffers = {"weight": weight, "bias": bias, "rows": rows, "columns": columns}
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer.float(), persistent=False)

    @property
    def features(self) -> int:
        """Length of the vectors that come out."""
        return self.filters * self.grid**2

    def forward(self, images: Tensor) -> Tensor:
        """Return one vector per image, of floating-point pixels (n, channels, height, width)."""
        if tuple(images.shape[1:]) != self.input_shape:
            raise OptionError(
                f"images: expected shape (n, {', '.join(map(str, self.input_shape))}), got "
                f"{tuple(images.shape)}"
            )
        pixels = (images.shape[2] // self.block) * (images.shape[3] // self.block)
        size = max(1, _CHUNK_VALUES // (self.filters * pixels))
        # A program that is traced has no number of images yet.
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
        # In place: a second array of this size is a pass more, and new memory at each call.
        answers = F.conv2d(framed, self.weight).mul_(1 / self._patch_lengths(framed))
        answers = answers.add_(self.bias.reshape(-1, 1, 1)).relu_().permute(0, 2, 3, 1)
        # A window is one of rows times one of columns.
        means = self.rows @ answers.flatten(2)
        means = self.columns @ means.reshape(*means.shape[:2], -1, self.filters)
        means = means / (means.square().sum(dim=3, keepdim=True) + _EMPTY).sqrt()
        # The root's slope at zero is infinite; a millionth makes no difference.
        return means.permute(0, 3, 1, 2).flatten(1).clamp_min(1e-12).sqrt()

    def _patch_lengths(self, framed: Tensor) -> Tensor:
        """Return the length of every patch without its mean, (n, 1, height, width)."""
        both, side = torch.stack([framed, framed.square()]), self.kernel
        # Several times as fast as `avg_pool2d` of so few channels.
        mean, square = both.unfold(3, side, 1).mean(dim=-1).unfold(4, side, 1).mean(dim=-1)
        variance: Tensor = (square - mean.square()).clamp_min(0).sum(dim=1, keepdim=True)
        return (side**2 * variance + self.contrast**2).sqrt()


class RandomFourier(nn.Module):
    """Vectors to cosines and sines of random projections; no weights that travel.

    They approximate a Gaussian kernel. The weights are a buffer made from the seed, as those of
    `RandomFilters`: all nodes and the server must use the same arguments.

    Parameters
    ----------
    inputs : int
        Length D of the vectors, at least 2; what has more axes is flattened.
    outputs : int, default 1000
        Features that come out, an even number from 2: half cosines, half sines.
    bandwidth : float, default 0.7
        Width of the Gaussian kernel relative to ``sqrt(D)``, above 0. Wider is nearer to linear.
    keep_inputs : bool, default False
        Whether the normalised vector itself comes out as well, before the cosines and sines: for
        many inputs of which each matters, such as words.
    seed : int, default 0
        Source of the projections, at least 0.

    Examples
    --------
    >>> from torch import nn
    >>> from gems_flwr import RandomFourier
    >>> model = nn.Sequential(RandomFourier(10, outputs=100), nn.Linear(100, 2))
    >>> list(model.state_dict())  # the projections never travel
    ['1.weight', '1.bias']
    """

    frequencies: Tensor

    def __init__(
        self,
        inputs: int,
        outputs: int = 1000,
        bandwidth: float = 0.7,
        keep_inputs: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.inputs, self.outputs, self.seed = inputs, outputs, seed
        self.bandwidth, self.keep_inputs = bandwidth, keep_inputs
        rules = {
            "inputs": (inputs >= 2, "at least 2"),
            "outputs": (outputs >= 2 and outputs % 2 == 0, "an even number from 2"),
            "bandwidth": (0 < bandwidth < math.inf, "above 0"),
            "seed": (seed >= 0, "at least 0"),
        }
        check_options(self, rules)
        # In double precision on the processor: single precision then has the same bits everywhere.
        source = torch.Generator().manual_seed(seed)
        drawn = torch.randn(inputs, outputs // 2, generator=source, dtype=torch.float64)
        frequencies = drawn / (bandwidth * math.sqrt(inputs))
        self.register_buffer("frequencies", frequencies.float(), persistent=False)

    @property
    def features(self) -> int:
        """Length of the vectors that come out."""
        return self.outputs + (self.inputs if self.keep_inputs else 0)

    def forward(self, vectors: Tensor) -> Tensor:
        """Return cosines and sines of vectors of D floating-point numbers."""
        rows = vectors.flatten(1).to(self.frequencies.dtype)
        if rows.shape[1] != self.inputs:
            raise OptionError(f"vectors: expected {self.inputs} numbers, got {rows.shape[1]}")
        # As a `torch.nn.LayerNorm` without weights does; one of zeros alone stays so.
        rows = rows - rows.mean(dim=1, keepdim=True)
        rows = math.sqrt(self.inputs) * F.normalize(rows, dim=1)
        angles = rows @ self.frequencies
        parts = [rows] if self.keep_inputs else []
        return torch.cat([*parts, angles.cos(), angles.sin()], dim=1)


def _checked_shape(input_shape: Sequence[int]) -> tuple[int, int, int]:
    shape = tuple(int(length) for length in input_shape)
    if len(shape) != 3 or min(shape) < 1 or min(shape[1:]) < SMALLEST_SIDE:
        raise OptionError(
            f"input_shape: expected (channels, height, width) with sides of at least "
            f"{SMALLEST_SIDE} pixels, got {shape}; vectors go into RandomFourier"
        )
    return shape[0], shape[1], shape[2]


def _draw_filters(filters: int, channels: int, kernel: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return filters (f, channels, k, k) of mean zero and length one, and biases in [-1/2, 0]."""
    source = torch.Generator().manual_seed(seed)
    shape = (filters, channels, kernel, kernel)
    drawn = torch.randn(shape, generator=source, dtype=torch.float64)
    centered = drawn - drawn.mean(dim=(2, 3), keepdim=True)
    length = centered.flatten(1).norm(dim=1).reshape(-1, 1, 1, 1)
    return centered / length, -torch.rand(filters, generator=source, dtype=torch.float64) / 2


def _gaussian_windows(side: int, grid: int, sigma: float, margin: float) -> Tensor:
    """Return windows (grid, side) along one side, each of sum one."""
    border = margin * side
    centers = torch.linspace(border, side - border, grid, dtype=torch.float64)
    if grid == 1:
        centers = torch.tensor([side / 2], dtype=torch.float64)
    pixels = torch.arange(side, dtype=torch.float64) + 0.5
    away = (pixels - centers[:, None]) / (sigma * side)
    windows = torch.exp(-(away**2) / 2)
    return windows / windows.sum(dim=1, keepdim=True)
