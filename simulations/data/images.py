"""Image data sets: digits (bundled with scikit-learn), the MNIST family, CIFAR-10, HAM10000.

All images are stored as bytes shaped ``(channels, height, width)``. Standard train and test splits
are kept where there are any; the server's public sample is taken from the training part.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulations.data.archives import (
    MissingDataError,
    data_file,
    data_folder,
    one_downloads,
    read_arrays,
    read_idx,
)
from simulations.data.examples import Dataset, Examples, assemble
from simulations.data.splits import split_validation

HAM10000_CLASSES = 7
"""akiec, bcc, bkl, df, mel, nv, vasc, in this order."""

_CACHED = 2
"""Data sets kept in memory per loader: a run needs one, a sweep over seeds at most two at once."""


def digits(
    *,
    data_dir: str | Path | None = None,
    seed: int,
    public: int = 200,
    test_fraction: float = 0.2,
) -> Dataset:
    """Load the 1,797 handwritten digits, 8×8, that come with scikit-learn.

    Parameters
    ----------
    data_dir : str or Path or None
        Not used; accepted so that all loaders are called alike.
    seed : int
        Decides the test and public samples; at least 0.
    public : int
        Size of the server's public sample.
    test_fraction : float
        Share of all images held out for testing, 0 < fraction < 1.

    Raises
    ------
    ValueError
        If ``public`` or ``test_fraction`` is out of range.
    """
    return _digits(seed, public, test_fraction)


def mnist(
    *, data_dir: str | Path | None = None, seed: int, public: int = 5000, download: bool = False
) -> Dataset:
    """Load MNIST: 60,000 + 10,000 handwritten digits, 28×28.

    Parameters
    ----------
    data_dir : str or Path or None
        Folder that holds ``MNIST/raw``, with the published ``.gz`` files or unpacked ones; None
        means the folder named by ``GEMS_FLWR_DATA``. Nothing is written to it unless ``download``.
    seed : int
        Decides the public sample; at least 0.
    public : int
        Size of the server's public sample, 0 … 59,999; the default leaves 55,000 to the nodes.
    download : bool
        Let torchvision fetch the files if they are not there.

    Raises
    ------
    MissingDataError
        If the files are not there.
    ValueError
        If ``public`` is out of range or a file is damaged.
    """
    return mnist_like("mnist", "MNIST", data_folder(data_dir, "mnist"), seed, public, download)


def fashion_mnist(
    *, data_dir: str | Path | None = None, seed: int, public: int = 5000, download: bool = False
) -> Dataset:
    """Load Fashion-MNIST: 60,000 + 10,000 pieces of clothing, 28×28.

    Parameters and errors as in `mnist`; the folder is ``FashionMNIST/raw``.
    """
    folder = data_folder(data_dir, "fashion_mnist")
    return mnist_like("fashion_mnist", "FashionMNIST", folder, seed, public, download)


def cifar10(
    *, data_dir: str | Path | None = None, seed: int, public: int = 5000, download: bool = False
) -> Dataset:
    """Load CIFAR-10: 50,000 + 10,000 colour photographs, 32×32.

    Parameters and errors as in `mnist`; torchvision reads the folder ``cifar-10-batches-py``.
    """
    return _cifar10(data_folder(data_dir, "cifar10"), seed, public, download)


def ham10000(*, data_dir: str | Path | None = None, seed: int, public: int = 1000) -> Dataset:
    """Load HAM10000: 10,015 photographs of skin lesions in 7 classes, reduced to 28×28.

    The file's own split is used, in which no lesion is in two parts: training and validation
    images go to the nodes and the public sample, test images are tested. Below that split samples
    are drawn by image, so a node and the server may hold different photographs of one lesion.

    Two thirds of the images are of one class: report balanced accuracy next to accuracy.

    Parameters
    ----------
    data_dir : str or Path or None
        Folder that holds ``HAM10000/ham10000_28x28.npz``; None means the one named by
        ``GEMS_FLWR_DATA``.
    seed : int
        Decides the public sample; at least 0.
    public : int
        Size of the server's public sample, 0 … 8,006.

    Raises
    ------
    MissingDataError
        If the file is not there.
    ValueError
        If ``public`` is out of range.
    """
    return _ham10000(data_folder(data_dir, "ham10000"), seed, public)


def by_split_column(
    features: NDArray[Any], labels: NDArray[Any], split: NDArray[Any]
) -> tuple[Examples, Examples]:
    """Divide HAM10000 by its split column (0 train, 1 validation, 2 test) into pool and test."""
    everything = Examples(features, labels)
    return everything.take(np.flatnonzero(split != 2)), everything.take(np.flatnonzero(split == 2))


@functools.lru_cache(maxsize=_CACHED)
def _digits(seed: int, public: int, test_fraction: float) -> Dataset:
    if not 0 < test_fraction < 1:
        raise ValueError(f"dataset.test_fraction must be in (0, 1), got {test_fraction}")
    from sklearn.datasets import load_digits  # late: a Ray worker on other data can save seconds

    bunch = load_digits()
    everything = Examples(bunch.images.astype(np.uint8)[:, None], bunch.target)
    training, testing = split_validation(everything.labels, test_fraction, seed)
    return assemble(
        "digits",
        classes=10,
        scale=1 / 16,  # scikit-learn stores 17 grey levels, 0 … 16
        pool=everything.take(training),
        test=everything.take(testing),
        public=public,
        seed=seed,
    )


@functools.lru_cache(maxsize=_CACHED)
def mnist_like(
    name: str, kind: str, folder: Path, seed: int, public: int, download: bool
) -> Dataset:
    """Load a data set in MNIST's format, which lies in the folder `kind`, under a name."""
    with one_downloads(folder, download):
        pool, test = (
            _read_mnist_like(name, kind, folder, train, download) for train in (True, False)
        )
    return assemble(name, classes=10, scale=1 / 255, pool=pool, test=test, public=public, seed=seed)


def _read_mnist_like(name: str, kind: str, folder: Path, train: bool, download: bool) -> Examples:
    """Read unpacked files through torchvision, else published ``.gz`` files, else download."""
    prefix = folder / kind / "raw" / ("train" if train else "t10k")
    packed = [Path(f"{prefix}-{part}-ubyte.gz") for part in ("images-idx3", "labels-idx1")]
    if all(path.with_suffix("").is_file() for path in packed):
        stored = _torchvision(kind)(folder, train=train)
    elif all(path.is_file() for path in packed):
        images, labels = (read_idx(path) for path in packed)
        return Examples(images[:, None], labels.astype(np.int64))
    elif download:
        stored = _download(kind, name, folder, train)
    else:
        raise MissingDataError(
            f"{name} is not there: put {packed[0].name} and {packed[1].name} into "
            f"{packed[0].parent}, or set data_dir=… (or GEMS_FLWR_DATA) to the folder that has "
            f"{kind}/raw, or dataset.download=true to fetch it."
        )
    return Examples(stored.data.numpy()[:, None], stored.targets.numpy())


@functools.lru_cache(maxsize=_CACHED)
def _cifar10(folder: Path, seed: int, public: int, download: bool) -> Dataset:
    with one_downloads(folder, download):
        pool, test = _read_cifar10(folder, download)
    return assemble(
        "cifar10", classes=10, scale=1 / 255, pool=pool, test=test, public=public, seed=seed
    )


def _read_cifar10(folder: Path, download: bool) -> tuple[Examples, Examples]:
    parts = []
    for train in (True, False):
        try:
            stored = _torchvision("CIFAR10")(folder, train=train)
        except RuntimeError as error:  # torchvision's way to say absent or damaged
            if not download:
                raise MissingDataError(
                    f"cifar10 is not there: put the unpacked folder cifar-10-batches-py into "
                    f"{folder}, or set data_dir=… (or GEMS_FLWR_DATA) to the folder that has it, "
                    f"or dataset.download=true to fetch it."
                ) from error
            stored = _download("CIFAR10", "cifar10", folder, train)
        pixels = np.ascontiguousarray(stored.data.transpose(0, 3, 1, 2))
        parts.append(Examples(pixels, np.asarray(stored.targets)))
    return parts[0], parts[1]


@functools.lru_cache(maxsize=_CACHED)
def _ham10000(folder: Path, seed: int, public: int) -> Dataset:
    path = data_file(folder, "HAM10000/ham10000_28x28.npz", "ham10000")
    images, labels, split = read_arrays(path, ("images", "labels", "split"))
    pool, test = by_split_column(np.ascontiguousarray(images.transpose(0, 3, 1, 2)), labels, split)
    return assemble(
        "ham10000",
        classes=HAM10000_CLASSES,
        scale=1 / 255,
        pool=pool,
        test=test,
        public=public,
        seed=seed,
    )


def _torchvision(kind: str) -> Any:
    """Return torchvision's class; imported late, as that takes seconds that most loads can save."""
    from torchvision import datasets

    return getattr(datasets, kind)


def _download(kind: str, name: str, folder: Path, train: bool) -> Any:
    """Let torchvision fetch a data set, and turn its many network errors into ours."""
    try:
        return _torchvision(kind)(folder, train=train, download=True)
    except (OSError, RuntimeError) as error:
        raise MissingDataError(
            f"{name} is not in {folder} and could not be downloaded ({error}); fetch it by hand "
            f"or check the network and that the folder can be written."
        ) from error
