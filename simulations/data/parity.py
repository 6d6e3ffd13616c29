"""Even or odd digits, seen through a hidden layer (Guha 2018, Section 5.1).

The label is the digit's parity, the features are what 50 hidden ReLU neurons of a two-layer network
for digits make of the image. Two things the paper leaves open:

On which data that network is trained. Here it is the server's public sample alone, because nodes'
data must not move; the public part of the result is therefore what the features were fitted to.

Who has which digits. The text says that learner 1 has the even digits and learner 2 the odd ones,
and two paragraphs on that h^1 was trained on digits 0-4 and h^2 on 5-9. With the first, a learner
would see one class only and its model could be right about half of the test set, not .75 of it. So
``division="halves"`` (0-4, 5-9) is the default, and ``"parity"`` the other reading.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from gems_flwr.runtime.seeding import derive_seed
from simulations.data.archives import data_folder
from simulations.data.examples import Dataset, Examples
from simulations.data.images import digits, mnist_like

Division = Literal["halves", "parity"]

_CACHED = 2
_EPOCHS = 40
"""At most, with a patience of 3, as for all networks of the GEMS papers here."""


def mnist_parity(
    *,
    data_dir: str | Path | None = None,
    seed: int,
    public: int = 5000,
    division: Division = "halves",
    features: int = 50,
    download: bool = False,
) -> Dataset:
    """Load MNIST for the parity task.

    Parameters
    ----------
    data_dir, download
        As in `simulations.data.images.mnist`.
    seed : int
        Decides the public sample and the features; at least 0.
    public : int
        Size of the server's public sample, 1 … 59,999, from which the features are learned.
    division : str
        The groups: ``"halves"``, digits 0-4 and 5-9, or ``"parity"``, even and odd digits.
    features : int
        Hidden neurons of the network for digits, at least 1.

    Raises
    ------
    MissingDataError
        If the files are not there.
    ValueError
        If an option is out of range or a file is damaged.
    """
    folder = data_folder(data_dir, "mnist_parity")
    return _mnist_parity(folder, seed, public, division, features, download)


def digits_parity(
    *,
    data_dir: str | Path | None = None,
    seed: int,
    public: int = 200,
    division: Division = "halves",
    features: int = 50,
    test_fraction: float = 0.2,
) -> Dataset:
    """Load scikit-learn's digits for the parity task: the same without files.

    Parameters
    ----------
    data_dir, test_fraction
        As in `simulations.data.images.digits`.
    seed, public, division, features
        As in `mnist_parity`.

    Raises
    ------
    ValueError
        If an option is out of range.
    """
    return _digits_parity(seed, public, division, features, test_fraction)


def parity_of(base: Dataset, *, name: str, division: Division, features: int, seed: int) -> Dataset:
    """Turn a data set of digits into the parity task.

    Parameters
    ----------
    base : Dataset
        Images of the digits 0-9, with a public sample.
    name : str
        Name of the result.
    division, features, seed
        As in `mnist_parity`.

    Raises
    ------
    ValueError
        If an option is out of range, or there is no public sample.
    """
    if division not in get_args(Division):
        raise ValueError(f"dataset.division must be halves or parity, got {division!r}")
    if not isinstance(features, int) or features < 1:
        raise ValueError(f"dataset.features must be a whole number from 1, got {features!r}")
    if not len(base.public):
        raise ValueError(
            f"dataset.public must be at least 1 for {name}: the features are learned from it"
        )
    parts = _seen_through_hidden_layer(base, features, seed)
    train, public, test = (Examples(seen, part.labels % 2) for seen, part in parts)
    shown = base.train.labels
    return Dataset(
        name=name,
        classes=2,
        input_shape=(features,),
        scale=1.0,
        train=train,
        public=public,
        test=test,
        groups=shown // 5 if division == "halves" else shown % 2,
    )


def _seen_through_hidden_layer(
    base: Dataset, features: int, seed: int
) -> list[tuple[NDArray[np.float32], Examples]]:
    """Train a network on the public sample; return every part with its hidden activations."""
    # Late, because training is built on this package.
    import torch

    from simulations.experiment.training import TrainOptions, fit, tensors, torch_threads
    from simulations.models import mlp

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "parity-initial-weights"))
        network = mlp(input_shape=base.input_shape, classes=base.classes, hidden=[features])
    options = TrainOptions(epochs=_EPOCHS, patience=3)
    fit(
        network,
        base.public,
        scale=base.scale,
        options=options,
        seed=derive_seed(seed, "parity-training"),
    )
    hidden = network[:3].eval()  # flatten, linear, ReLU
    with torch_threads(1), torch.inference_mode():
        return [
            (hidden(tensors(part, scale=base.scale)[0]).numpy(), part)
            for part in (base.train, base.public, base.test)
        ]


@functools.lru_cache(maxsize=_CACHED)
def _mnist_parity(
    folder: Path, seed: int, public: int, division: Division, features: int, download: bool
) -> Dataset:
    name = "mnist_parity"
    base = mnist_like(name, "MNIST", folder, seed, public, download)
    return parity_of(base, name=name, division=division, features=features, seed=seed)


@functools.lru_cache(maxsize=_CACHED)
def _digits_parity(
    seed: int, public: int, division: Division, features: int, test_fraction: float
) -> Dataset:
    base = digits(seed=seed, public=public, test_fraction=test_fraction)
    return parity_of(base, name="digits_parity", division=division, features=features, seed=seed)
