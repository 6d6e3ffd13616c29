"""Masks: numbers that look random to all but those who have the key, and cancel in a sum."""

from __future__ import annotations

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

from gems_flwr.secure.fixed_point import Layout, Words

# Every key makes one mask.
_NONCE = bytes(16)


def mask(key: bytes, layout: Layout) -> Words:
    """Return the mask of a key of 32 bytes: uniform elements of the sections' rings."""
    stream = Cipher(ChaCha20(key, _NONCE), mode=None).encryptor()
    parts = []
    for section in layout.sections:
        width = next(size for size in (1, 2, 4, 8) if 8 * size >= section.bits)
        drawn = stream.update(bytes(width * section.size))
        parts.append(np.frombuffer(drawn, dtype=f"<u{width}").astype(np.uint64))
    return layout.reduced(np.concatenate(parts))
