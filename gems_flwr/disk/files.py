"""Files that a reader finds whole, or as they were before; and a checksum for what they hold.

A safetensors file has no checksum of its own. Ours notices damage: a flipped bit, a lost block. It
is no signature; whoever can write the file can write a checksum that fits. It covers the names,
types, shapes and bytes of all arrays and every text of the header, and stands in that header
itself, so readers that do not know it pass over it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gems_flwr.disk.faults import disk_faults
from gems_flwr.disk.lock import make_folder

PRIVATE_FILE = 0o600


@contextlib.contextmanager
def replacing(path: Path, *, private: bool = False) -> Iterator[Path]:
    """Give a place beside `path` to write to; what was written there becomes `path` at the end.

    Parameters
    ----------
    path : Path
        The file to replace; its folder is made if need be.
    private : bool
        Whether nobody but the owner may read the file.

    Raises
    ------
    DiskError
        If it cannot be written, or lies in a folder that we held and that is gone. `path` is as it
        was, and nothing else is left behind.
    """
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with disk_faults(f"write {path}"):
            wanted = PRIVATE_FILE if private else 0o666
            os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, wanted))
            mode = PRIVATE_FILE if private else stat.S_IMODE(temporary.stat().st_mode)
            yield temporary
            # Writers that replace the file themselves (safetensors) choose a mode of their own.
            with contextlib.suppress(OSError):
                temporary.chmod(mode)
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def write_atomically(path: Path, data: bytes, *, private: bool = False) -> None:
    """Write a file so that a reader sees all of it or what was there before; see `replacing`."""
    with replacing(path, private=private) as temporary:
        temporary.write_bytes(data)


CHECKSUM = "checksum"
DIGEST_BYTES = 16


class _Hash(Protocol):
    def update(self, data: bytes | memoryview, /) -> None: ...


def checksum(arrays: Mapping[str, NDArray], texts: Mapping[str, str]) -> str:
    """Return the checksum of arrays and of a header's texts, in whatever order they come."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    _feed(digest, arrays, texts)
    return digest.hexdigest()


def contents_digest(arrays: Mapping[str, NDArray], texts: Mapping[str, str]) -> str:
    """Return the sha256 of arrays and texts, in whatever order they come, as a hexadecimal text.

    Of what a file holds rather than of the file: safetensors writes the texts of a header in an
    order that differs from one process to the next.
    """
    digest = hashlib.sha256()
    _feed(digest, arrays, texts)
    return digest.hexdigest()


def _feed(digest: _Hash, arrays: Mapping[str, NDArray], texts: Mapping[str, str]) -> None:
    for key in sorted(texts):
        if key != CHECKSUM:
            digest.update(repr((key, texts[key])).encode(errors="surrogatepass"))
    for name in sorted(arrays):
        array = np.asarray(arrays[name])
        digest.update(repr((name, array.dtype.name, array.shape)).encode(errors="surrogatepass"))
        # As in the file: little-endian, row by row.
        stored = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)
        digest.update(stored.reshape(-1).view(np.uint8).data)


def verify_checksum(
    header: Mapping[str, str], arrays: Mapping[str, NDArray], known: Set[str]
) -> None:
    """Hold a file's arrays and header against the checksum in that header, if there is one.

    Parameters
    ----------
    header : mapping from str to str
        The texts of the file's header.
    arrays : mapping from str to ndarray
        All arrays of the file.
    known : set of str
        Texts that such a header has beside the checksum. Any other is damage: a file whose word
        "checksum" is itself damaged would pass for one of the time before there were checksums.

    Raises
    ------
    ValueError
        Says what does not fit.
    """
    unknown = sorted(header.keys() - known - {CHECKSUM})
    if unknown:
        raise ValueError(f"its header has the unknown entries {unknown}, so it is damaged")
    if CHECKSUM in header and header[CHECKSUM] != checksum(arrays, header):
        raise ValueError("its checksum does not fit its contents, so it is damaged")
