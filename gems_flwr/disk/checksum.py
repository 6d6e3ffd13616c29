"""A checksum for what safetensors files hold, which have none of their own.

It notices damage: a flipped bit, a lost block. It is no signature; whoever can write the file can
write a checksum that fits. It covers the names, types, shapes and bytes of all arrays and every
text of the header, and stands in that header itself, so readers that do not know it pass over it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Set

import numpy as np
from numpy.typing import NDArray

CHECKSUM = "checksum"
DIGEST_BYTES = 16


def checksum(arrays: Mapping[str, NDArray], texts: Mapping[str, str]) -> str:
    """Return the checksum of arrays and of a header's texts, in whatever order they come."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for key in sorted(texts):
        if key != CHECKSUM:
            digest.update(repr((key, texts[key])).encode(errors="surrogatepass"))
    for name in sorted(arrays):
        array = np.asarray(arrays[name])
        digest.update(repr((name, array.dtype.name, array.shape)).encode(errors="surrogatepass"))
        # As in the file: little-endian, row by row.
        stored = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)
        digest.update(stored.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


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
