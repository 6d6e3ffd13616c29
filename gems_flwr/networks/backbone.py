"""The layers below the output layer, and a digest that says which they are.

One round of GEMS is about the output layer, the *head*; everything below it, the *backbone*, is
common to all nodes and stays as it is. Where a node has it already it need not travel: equal
digests mean equal weights, buffers included.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gems_flwr.typing import Arrays

_DIGEST_BYTES = 16


def backbone_digest(arrays: Arrays) -> str:
    """Return a digest of arrays: their names, types, shapes and values, in whatever order.

    Parameters
    ----------
    arrays : mapping from str to ndarray
        The layers below the output layer.
    """
    total = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for name in sorted(arrays):
        # As little-endian numbers, whatever the machine has.
        array = np.asarray(arrays[name])
        plain = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        total.update(f"{len(name)}:{name}{plain.dtype.str}{array.shape}".encode())
        total.update(plain.data if plain.size else b"")
    return total.hexdigest()


@dataclass(frozen=True)
class SplitModel:
    """A model as head and backbone.

    Parameters
    ----------
    head, backbone : mapping from str to ndarray
        The output layer, and everything else.
    """

    head: Arrays
    backbone: Arrays

    @classmethod
    def of(cls, arrays: Arrays, head: Iterable[str | None]) -> SplitModel:
        """Return a model split by the keys of its output layer."""
        keys = set(head)
        return cls(
            {key: array for key, array in arrays.items() if key in keys},
            {key: array for key, array in arrays.items() if key not in keys},
        )

    @cached_property
    def digest(self) -> str:
        """The backbone's digest."""
        return backbone_digest(self.backbone)

    @property
    def backbone_bytes(self) -> int:
        """How much the backbone's values take."""
        return sum(np.asarray(array).nbytes for array in self.backbone.values())
