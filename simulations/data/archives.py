"""Finding data on disk, and saying in one sentence what to put where when it is not there."""

from __future__ import annotations

import contextlib
import gzip
import math
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gems_flwr.disk.lock import hold_folder
from gems_flwr.errors import GemsError

DATA_VARIABLE = "GEMS_FLWR_DATA"
"""Environment variable that names the data folder when ``data_dir`` is not given."""

_UNSIGNED_BYTE = 0x08
"""The only element type of the idx format that the MNIST family uses."""


class MissingDataError(GemsError, FileNotFoundError):
    """A data set's files are not there; the message says what to put where."""


def data_folder(data_dir: str | Path | None, name: str) -> Path:
    """Return the data folder: the argument, or else what the environment variable names.

    Parameters
    ----------
    data_dir : str or Path or None
        The folder as configured.
    name : str
        The data set that asks, for the error message.

    Raises
    ------
    MissingDataError
        If neither names a folder.
    """
    chosen = data_dir if data_dir not in (None, "") else os.environ.get(DATA_VARIABLE)
    if not chosen:
        raise MissingDataError(
            f"{name} is read from files: set data_dir=… or the environment variable "
            f"{DATA_VARIABLE} to the folder that holds them."
        )
    return Path(chosen).expanduser()


def data_file(folder: Path, relative: str, name: str) -> Path:
    """Return the path of a data set's file.

    Raises
    ------
    MissingDataError
        If the file is not there.
    """
    path = folder / relative
    if not path.is_file():
        raise MissingDataError(
            f"{name} is not there: put the file {relative} into {folder}, or set data_dir=… "
            f"(or {DATA_VARIABLE}) to the folder that has it."
        )
    return path


@contextlib.contextmanager
def one_downloads(folder: Path, download: bool) -> Iterator[None]:
    """Let one process at a time look for files and fetch them; the others find them whole.

    Parameters
    ----------
    folder : Path
        Where files are looked for, and put.
    download : bool
        Whether anything may be fetched; if not, or if the folder cannot be written to, nobody
        waits.
    """
    if not download or (folder.exists() and not os.access(folder, os.W_OK)):
        yield
        return
    with hold_folder(folder, wait=True):
        yield


def read_arrays(path: Path, keys: tuple[str, ...]) -> list[NDArray[Any]]:
    """Read named arrays of an ``.npz`` file, refusing pickled objects.

    Raises
    ------
    ValueError
        If the file lacks one of the arrays.
    """
    with np.load(path, allow_pickle=False) as archive:
        absent = [key for key in keys if key not in archive.files]
        if absent:
            raise ValueError(f"{path} has no array {absent[0]!r}; it has {archive.files}")
        return [archive[key] for key in keys]


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Read a gzipped idx file of unsigned bytes, the format of MNIST and Fashion-MNIST.

    Torchvision reads only unpacked files and unpacks them in place, which a read-only data folder
    does not allow; this reads them as they were published.

    Raises
    ------
    ValueError
        If the file is damaged or of another type.
    """
    try:
        with gzip.open(path, "rb") as stream:
            content = stream.read()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is not a complete gzip file ({error}); copy it again") from error
    # Header: two zero bytes, the element type, the number of axes, then each axis' length.
    if len(content) < 4 or content[:3] != bytes((0, 0, _UNSIGNED_BYTE)):
        raise ValueError(f"{path} is not an idx file of unsigned bytes")
    axes = content[3]
    start = 4 + 4 * axes
    if len(content) < start:
        raise ValueError(f"{path} ends within its header; copy it again")
    shape = struct.unpack(f">{axes}I", content[4:start])
    if len(content) - start != math.prod(shape):
        raise ValueError(
            f"{path} announces {math.prod(shape)} bytes of shape {shape}, "
            f"but has {len(content) - start}; copy it again"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)
