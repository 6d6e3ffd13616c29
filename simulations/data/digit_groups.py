"""Digits in two groups, one for each of two nodes (``partition=groups``): Guha 2018.

*Permuted* (Section 5.2): "We scramble every image's pixels (in a uniform manner) to generate a
transformed MNIST dataset": one permutation, drawn from the seed, for all images. Group 0 are the
originals, group 1 the copies. Training, public and test part hold both.

*Parity* (Section 5.1): the label is even or odd, the features are what 50 hidden ReLU neurons of a
two-layer network for digits make of the image. Two things the paper leaves open. On which data that
network is trained: here on the server's public sample alone, because nodes' data must not move.
And who has which digits: the text gives learner 1 the even ones and learner 2 the odd ones, and two
paragraphs on 0-4 and 5-9. With the first, a learner would see one class only and its model could be
right about half of the test set, not .75 of it. So ``division="halves"`` (0-4, 5-9) is the default,
and ``"parity"`` the other reading.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from gems_flwr.core.run import derive_seed, generator
from simulations.data.archives import kept_in_memory
from simulations.data.examples import Dataset, Examples, assemble
from simulations.data.images import digits, mnist
from simulations.data.splits import stratified_sample

Base = Literal["mnist", "digits"]
Division = Literal["halves", "parity"]
# At most, with a patience of 3, as for all networks of the GEMS papers here.
_EPOCHS = 40


@kept_in_memory
def permuted(
    *,
    data_dir: str | Path | None = None,
    seed: int,
    base: Base = "mnist",
    public: int = 400,
    examples: int | None = None,
) -> Dataset:
    """Load digits and their permuted copy.

    Parameters
    ----------
    data_dir, seed
        See `simulations.data`; the seed also decides the permutation and which images are used.
    base : str
        ``"mnist"``, or ``"digits"``: the same task without files.
    public : int
        Size of the server's public sample, even: half originals, half copies; the paper has 200
        of each.
    examples : int or None
        Training images that nodes share, even, originals and copies together; None: all.
    """
    originals = _base(base, data_dir, seed, public=0)
    return beside_permuted(originals, public=public, examples=examples, seed=seed)


@kept_in_memory
def parity(
    *,
    data_dir: str | Path | None = None,
    seed: int,
    base: Base = "mnist",
    public: int = 1000,
    division: Division = "halves",
    features: int = 50,
) -> Dataset:
    """Load digits for the parity task.

    Parameters
    ----------
    data_dir, seed
        See `simulations.data`; the seed also decides the features.
    base : str
        ``"mnist"``, or ``"digits"``: the same task without files.
    public : int
        Size of the server's public sample, at least 1, from which the features are learned.
    division : str
        The groups: ``"halves"``, digits 0-4 and 5-9, or ``"parity"``, even and odd digits.
    features : int
        Hidden neurons of the network for digits, at least 1.
    """
    images = _base(base, data_dir, seed, public)
    return parity_of(images, division=division, features=features, seed=seed)


def _base(base: Base, data_dir: str | Path | None, seed: int, public: int) -> Dataset:
    if base not in get_args(Base):
        raise ValueError(f"dataset.base must be mnist or digits, got {base!r}")
    load = mnist if base == "mnist" else digits
    return load(data_dir=data_dir, seed=seed, public=public)


def pixel_permutation(shape: tuple[int, ...], seed: int) -> NDArray[np.int64]:
    """Return the permutation of an image's pixels (all channels) that a seed stands for."""
    return generator(seed, "pixel-permutation").permutation(math.prod(shape))


def beside_permuted(base: Dataset, *, public: int, examples: int | None, seed: int) -> Dataset:
    """Put a data set and its permuted copy side by side.

    An image and its copy are in the same part, so no public or test image is, in either form, on
    a node. In the public sample originals and copies alternate, so that its first examples are half
    of each.
    """
    name = f"{base.name}_permuted"
    _check_even("public", public, 0, 2 * (len(base.train) - 1), name)
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
    return dataclasses.replace(
        halves,
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


def parity_of(base: Dataset, *, division: Division, features: int, seed: int) -> Dataset:
    """Turn a data set of digits, with a public sample, into the parity task."""
    name = f"{base.name}_parity"
    if division not in get_args(Division):
        raise ValueError(f"dataset.division must be halves or parity, got {division!r}")
    if not isinstance(features, int) or features < 1:
        raise ValueError(f"dataset.features must be a whole number from 1, got {features!r}")
    if not len(base.public):
        raise ValueError(
            f"dataset.public must be at least 1 for {name}: the features are learned from it"
        )
    shown = base.train.labels
    train, public, test = _seen_through_hidden_layer(base, features, seed)
    groups = shown // 5 if division == "halves" else shown % 2
    return Dataset(name, 2, (features,), 1.0, train, public, test, groups=groups)


def _seen_through_hidden_layer(base: Dataset, features: int, seed: int) -> list[Examples]:
    """Train a network on the public sample; return every part with its hidden activations."""
    # Late, because training is built on this package.
    import torch

    from simulations.experiment.training import TrainOptions, fit, tensors, torch_threads
    from simulations.models import mlp

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "parity-initial-weights"))
        network = mlp(input_shape=base.input_shape, classes=base.classes, hidden=[features])
    options = TrainOptions(epochs=_EPOCHS, patience=3)
    training_seed = derive_seed(seed, "parity-training")
    fit(network, base.public, scale=base.scale, options=options, seed=training_seed)
    hidden = network[:3].eval()  # flatten, linear, ReLU
    with torch_threads(1), torch.inference_mode():
        return [
            Examples(hidden(tensors(part, scale=base.scale)[0]).numpy(), part.labels % 2)
            for part in (base.train, base.public, base.test)
        ]
