"""What a filter of a convolution sees: the patches under its kernel, one row each.

A convolution is a linear layer that runs at every position of the image. Its inputs are the
patches, its outputs the pixels of its feature maps.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn import functional as F

from gems_flwr.errors import ModelError

# Of all patches that are looked at together: those of all images would not fit.
CHUNK_VALUES = 16 * 2**20


def check_convolution(module: nn.Conv2d) -> None:
    """Refuse a convolution whose filters do not all see the same plain patches.

    Raises
    ------
    ModelError
        Says which convolutions are known.
    """
    plain = module.padding_mode == "zeros" and not isinstance(module.padding, str)
    if module.groups != 1 or not plain:
        raise ModelError("only convolutions without groups and with plain zero padding are known")


def patches_of(module: nn.Conv2d, images: Tensor) -> Tensor:
    """Return the patches of images, shape (images, positions, weights of a filter).

    Parameters
    ----------
    module : torch.nn.Conv2d
        With any stride, padding by zeros and dilation; see `check_convolution`.
    images : tensor of shape (images, channels, height, width)
        What it sees.
    """
    assert not isinstance(module.padding, str)
    patches: Tensor = F.unfold(
        images, module.kernel_size, module.dilation, module.padding, module.stride
    )
    return patches.transpose(1, 2)


def image_chunks(module: nn.Conv2d, images: Tensor) -> Iterator[slice]:
    """Yield parts of many images whose patches fit into memory together."""
    positions, width = patches_of(module, images[:1]).shape[1:]
    step = max(1, CHUNK_VALUES // (positions * width))
    for start in range(0, len(images), step):
        yield slice(start, start + step)
