"""Finding data on disk, and one sentence about what to put where when it is not there."""

from __future__ import annotations

import contextlib
import functools
import gzip
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ParamSpec

import numpy as np
from numpy.typing import NDArray

from gems_flwr.core.disk import hold_folder
from gems_flwr.errors import GemsError
from simulations.data.examples import Dataset

DATA_VARIABLE = "GEMS_FLWR_DATA"
"""Environment variable that names the data folder when ``data_dir`` is not given."""

# A run needs one data set, a sweep over seeds at most two at once.
_KEPT = 2
P = ParamSpec("P")


class MissingDataError(GemsError, FileNotFoundError):
    """A data set's files are not there; the message says what to put where."""


def kept_in_memory(load: Callable[P, Dataset]) -> Callable[P, Dataset]:
    """Keep the last data sets of a loader: nodes of one process ask for them with every message."""

    @functools.lru_cache(maxsize=_KEPT)
    def kept(_: str | None, *arguments: P.args, **options: P.kwargs) -> Dataset:
        return load(*arguments, **options)

    @functools.wraps(load)
    def loader(*arguments: P.args, **options: P.kwargs) -> Dataset:
        return kept(os.environ.get(DATA_VARIABLE), *arguments, **options)  # type: ignore[arg-type]

    return loader


def data_folder(data_dir: str | Path | None, name: str) -> Path:
    """Return the folder as configured, or else what the environment variable names.

    If neither names one, it is a MissingDataError of the data set `name`.
    """
    chosen = data_dir if data_dir not in (None, "") else os.environ.get(DATA_VARIABLE)
    if not chosen:
        raise MissingDataError(
            f"{name} is read from files: set data_dir=… or the environment variable "
            f"{DATA_VARIABLE} to the folder that holds them."
        )
    return Path(chosen).expanduser()


def data_file(data_dir: str | Path | None, relative: str, name: str) -> Path:
    """Return the path of a data set's file, or raise a MissingDataError."""
    folder = data_folder(data_dir, name)
    path = folder / relative
    if not path.is_file():
        raise MissingDataError(
            f"{name} is not there: put the file {relative} into {folder}, or set data_dir=… "
            f"(or {DATA_VARIABLE}) to the folder that has it."
        )
    return path


def read_arrays(path: Path, *keys: str) -> list[NDArray[Any]]:
    """Read named arrays of an ``.npz`` file, refusing pickled objects."""
    with np.load(path, allow_pickle=False) as archive:
        absent = [key for key in keys if key not in archive.files]
        if absent:
            raise ValueError(f"{path} has no array {absent[0]!r}; it has {archive.files}")
        return [archive[key] for key in keys]


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Read a gzipped idx file of unsigned bytes, as MNIST and its like are published.

    torchvision unpacks such files beside themselves, which a read-only data folder does not allow.
    """
    try:
        with gzip.open(path, "rb") as stream:
            content = stream.read()
        # Two zero bytes, the element type, the number of axes, each axis' length, the elements.
        if content[:3] != b"\0\0\x08":
            raise ValueError("not an idx file of unsigned bytes")
        axes = content[3]
        shape = np.frombuffer(content, ">u4", axes, offset=4)
        return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape)
    except (EOFError, IndexError, ValueError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is damaged ({error}); copy it again") from error


def torchvision_dataset(kind: str, name: str, folder: Path, train: bool, download: bool) -> Any:
    """Return a data set of torchvision; whatever goes wrong is a MissingDataError."""
    from torchvision import datasets  # late: it takes seconds that most loads can save

    try:
        return getattr(datasets, kind)(folder, train=train, download=download)
    except (OSError, RuntimeError) as error:  # its way to say absent, damaged or unreachable
        raise MissingDataError(
            f"{name} is not in {folder} ({error}); put its files there, or set data_dir=… (or "
            f"{DATA_VARIABLE}) to the folder that has them, or dataset.download=true to fetch them."
        ) from error


@contextlib.contextmanager
def one_downloads(folder: Path, download: bool) -> Iterator[None]:
    """Let one process at a time look for files and fetch them; the others find them whole."""
    if not download or (folder.exists() and not os.access(folder, os.W_OK)):
        yield
        return
    with hold_folder(folder, wait=True):
        yield
