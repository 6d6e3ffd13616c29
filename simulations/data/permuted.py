"""Images beside copies of themselves with permuted pixels (Guha 2018, Section 5.2).

"We scramble every image's pixels (in a uniform manner) to generate a transformed MNIST dataset":
one permutation, drawn from the seed, for all images. Group 0 are the originals, group 1 the copies;
``partition=groups`` gives each group to a node. Training, public and test part hold both.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gems_flwr.runtime.seeding import generator
from simulations.data.archives import data_folder
from simulations.data.examples import Dataset, Examples, assemble
from simulations.data.images import digits, mnist_like
from simulations.data.splits import stratified_sample

_CACHED = 2


def mnist_permuted(
    *,
    data_dir: str | Path | None = None,
    seed: int,
    public: int = 400,
    examples: int | None = None,
    download: bool = False,
) -> Dataset:
    """Load MNIST and its permuted copy.

    Parameters
    ----------
    data_dir, download
        As in `simulations.data.images.mnist`.
    seed : int
        Decides the permutation, the public sample and which images are used; at least 0.
    public : int
        Size of the server's public sample, even; half of it are originals, half their copies. The
        paper has 200 of each.
    examples : int or None
        Training images that nodes share, even, originals and copies together; None: all.

    Raises
    ------
    MissingDataError
        If the files are not there.
    ValueError
        If an option is out of range or a file is damaged.
    """
    folder = data_folder(data_dir, "mnist_permuted")
    return _mnist_permuted(folder, seed, public, examples, download)


def digits_permuted(
    *,
    data_dir: str | Path | None = None,
    seed: int,
    public: int = 200,
    examples: int | None = None,
    test_fraction: float = 0.2,
) -> Dataset:
    """Load scikit-learn's digits and their permuted copy: the same task without files.

    Parameters
    ----------
    data_dir, test_fraction
        As in `simulations.data.images.digits`.
    seed, public, examples
        As in `mnist_permuted`.

    Raises
    ------
    ValueError
        If an option is out of range.
    """
    return _digits_permuted(seed, public, examples, test_fraction)


def pixel_permutation(shape: tuple[int, ...], seed: int) -> NDArray[np.int64]:
    """Return the permutation of an image's pixels (all channels) that a seed stands for."""
    return generator(seed, "pixel-permutation").permutation(math.prod(shape))


def beside_permuted(
    base: Dataset, *, name: str, public: int, examples: int | None, seed: int
) -> Dataset:
    """Put a data set and its permuted copy side by side.

    An image and its copy are in the same part, so no public or test image is, in either form, on
    a node.

    Parameters
    ----------
    base : Dataset
        The originals; its training part is what the public sample is taken from.
    name : str
        Name of the result.
    public : int
        Size of the public sample, even. Originals and copies alternate in it, so that whoever
        takes the first of them gets half of each.
    examples : int or None
        Size of the training part, even; None: all that there are.
    seed : int
        Decides the permutation and the samples.

    Raises
    ------
    ValueError
        If a size is odd or out of range.
    """
    room = len(base.train)
    _check_even("public", public, 0, 2 * (room - 1), name)
    halves = assemble(
        name,
        classes=base.classes,
        scale=base.scale,
        pool=base.train,
        test=base.test,
        public=public // 2,
        seed=seed,
    )
    train = halves.train
    if examples is not None:
        _check_even("examples", examples, 2, 2 * len(train), name)
        rng = generator(seed, "permuted-examples")
        train = train.take(stratified_sample(train.labels, examples // 2, rng))
    order = pixel_permutation(base.input_shape, seed)
    alternating = np.arange(public).reshape(2, public // 2).T.ravel()
    return Dataset(
        name=name,
        classes=base.classes,
        input_shape=base.input_shape,
        scale=base.scale,
        train=_pair(train, order),
        public=_pair(halves.public, order).take(alternating),
        test=_pair(base.test, order),
        groups=np.repeat([0, 1], len(train)),
    )


def _pair(originals: Examples, order: NDArray[np.int64]) -> Examples:
    """Return the originals, then their copies in the same order."""
    pixels = originals.features
    copies = pixels.reshape(len(pixels), len(order))[:, order].reshape(pixels.shape)
    return Examples.concatenate([originals, Examples(copies, originals.labels)])


def _check_even(option: str, value: Any, least: int, most: int, name: str) -> None:
    if not isinstance(value, int) or value % 2 or not least <= value <= most:
        raise ValueError(
            f"dataset.{option} must be an even number from {least} to {most} for {name}, as half "
            f"of it are permuted copies, got {value!r}"
        )


@functools.lru_cache(maxsize=_CACHED)
def _mnist_permuted(
    folder: Path, seed: int, public: int, examples: int | None, download: bool
) -> Dataset:
    name = "mnist_permuted"
    base = mnist_like(name, "MNIST", folder, seed, 0, download)
    return beside_permuted(base, name=name, public=public, examples=examples, seed=seed)


@functools.lru_cache(maxsize=_CACHED)
def _digits_permuted(seed: int, public: int, examples: int | None, test_fraction: float) -> Dataset:
    base = digits(seed=seed, public=0, test_fraction=test_fraction)
    return beside_permuted(
        base, name="digits_permuted", public=public, examples=examples, seed=seed
    )
