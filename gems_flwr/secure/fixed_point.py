"""Real numbers as elements of a ring in which sums over many nodes cannot wrap.

Masks hide a number perfectly if it is an element of a finite group, so what is summed are whole
numbers modulo 2^bits. A `Layout` says what one node adds: named arrays, each with the largest
absolute value that it may have and the bits of its ring; the step of the grid follows. A bound is
on what *each* node adds, then the ring has room for that many times the number of nodes; or on what
*all* add together, where that follows from how they are computed, then no room is lost.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from gems_flwr.errors import OptionError, SpaceError
from gems_flwr.typing import Float

Words = NDArray[np.uint64]

MIN_BITS, MAX_BITS = 8, 64
_log = logging.getLogger("gems_flwr")


@dataclasses.dataclass(frozen=True)
class Section:
    """An array of a summand."""

    name: str
    shape: tuple[int, ...]
    # Largest absolute value; or, `of_total`, the sum of all nodes' absolute values.
    bound: float
    bits: int = 32
    of_total: bool = False
    # The step of the grid where it does not follow from the bound: 1 for whole numbers.
    unit: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        unit = 1.0 if self.unit is None else self.unit
        for name, value in {"unit": unit, "bound": self.bound}.items():
            if not 0 < value < math.inf:
                raise OptionError(f"{self.name}: the {name} must be above 0, got {value}")
        if not MIN_BITS <= self.bits <= MAX_BITS:
            allowed = f"from {MIN_BITS} to {MAX_BITS}"
            raise OptionError(f"{self.name}: bits must be {allowed}, got {self.bits}")

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes on the wire."""
        return (self.size * self.bits + 7) // 8

    def step(self, nodes: int) -> float:
        """Return the distance of two numbers of the grid."""
        # Every node rounds, by half a step at most, and doubles have 53 bits of their own; nothing
        # may reach beyond the last number.
        room = (1 << (self.bits - 1)) - 1 - (nodes + 1) // 2 - (1 << max(0, self.bits - 49))
        most = room if self.of_total else room // nodes
        if most < 1 or (self.unit is not None and self.bound > most * self.unit):
            raise OptionError(f"{self.name}: {self.bits} bits are too few for {nodes} nodes")
        return self.bound / most if self.unit is None else self.unit

    def encode(self, values: Float, nodes: int, *, clip: bool = False) -> Words:
        """Return numbers as elements of the ring; beyond the bound only if they may be clipped."""
        array = np.asarray(values, dtype=np.float64)
        if array.shape != self.shape:
            raise SpaceError(self.name, f"shape {self.shape}", array.shape)
        largest = float(np.abs(array).max(initial=0.0))
        # A NaN fails the comparison.
        if not largest <= self.bound * (1 + 1e-9):
            wanted = f"absolute values up to {self.bound:g}, which the ring holds"
            if not clip:
                raise SpaceError(self.name, wanted, largest)
            # Here alone: a refusal would tell how large the node's numbers are.
            _log.warning("%s: expected %s, got %g; it is clipped", self.name, wanted, largest)
            array = np.nan_to_num(array)
        whole = np.rint(np.clip(array, -self.bound, self.bound).ravel() / self.step(nodes))
        # The largest double below 2^63: what is rounded to 2^63 itself has no int64.
        whole = np.clip(whole, -(2.0**63), np.nextafter(2.0**63, 0)).astype(np.int64)
        return whole.view(np.uint64) & _ones(self.bits)

    def decode(self, words: Words, nodes: int) -> Float:
        """Return the numbers that a sum of elements stands for."""
        values = np.asarray(self.signed(words) * self.step(nodes), dtype=np.float64)
        return values.reshape(self.shape)

    def signed(self, words: Words) -> NDArray[np.int64]:
        """Return elements of the ring as whole numbers around 0."""
        shift = np.uint64(64 - self.bits)
        return (words << shift).view(np.int64) >> np.int64(shift)


def whole_section(name: str, shape: Sequence[int], bound: float, nodes: int) -> Section:
    """Return a section for whole numbers, with no more bits than their sum needs.

    `bound` is that of the sum of all nodes' absolute values.
    """
    for bits in range(MIN_BITS, MAX_BITS + 1):
        section = Section(name, tuple(shape), bound, bits, of_total=True, unit=1.0)
        with contextlib.suppress(OptionError):
            section.step(nodes)
            return section
    raise OptionError(f"{name}: whole numbers up to {bound:g} are too large for {MAX_BITS} bits")


def _ones(bits: int) -> np.uint64:
    return np.uint64(2**bits - 1)


@dataclasses.dataclass(frozen=True)
class Layout:
    """What one of up to `nodes` nodes adds to a sum: sections with different names, in order."""

    sections: Sequence[Section]
    nodes: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "sections", tuple(self.sections))
        names = [section.name for section in self.sections]
        if len(set(names)) < len(names) or not names:
            raise OptionError(f"a summand needs sections of different names, got {names}")
        if self.nodes < 1:
            raise OptionError(f"a sum needs at least 1 node, got {self.nodes}")
        for section in self.sections:
            section.step(self.nodes)

    @property
    def size(self) -> int:
        """How many numbers a node adds."""
        return sum(section.size for section in self.sections)

    @property
    def size_bytes(self) -> int:
        """Bytes that a node sends."""
        return sum(section.size_bytes for section in self.sections)

    def encode(self, values: Mapping[str, Float], *, clip: bool = False) -> Words:
        """Return named arrays as elements of the sections' rings."""
        names = [section.name for section in self.sections]
        if set(values) != set(names):
            raise SpaceError("summand", f"the arrays {sorted(names)}", sorted(values))
        nodes = self.nodes
        return np.concatenate([s.encode(values[s.name], nodes, clip=clip) for s in self.sections])

    def decode(self, words: Words) -> dict[str, Float]:
        """Return the named arrays that a sum stands for."""
        parts = self.split(words)
        return {section.name: section.decode(part, self.nodes) for section, part in parts}

    def split(self, words: Words) -> Iterator[tuple[Section, Words]]:
        """Return each section with its elements."""
        if words.shape != (self.size,):
            raise SpaceError("summand", f"{self.size} numbers", words.shape)
        start = 0
        for section in self.sections:
            yield section, words[start : start + section.size]
            start += section.size

    def reduced(self, words: Words) -> Words:
        """Return numbers modulo the rings of their sections."""
        return np.concatenate([part & _ones(section.bits) for section, part in self.split(words)])

    def add(self, summands: Sequence[Words]) -> Words:
        """Return the sum of several nodes' elements, in the rings."""
        return self.reduced(sum(summands, start=np.zeros(self.size, dtype=np.uint64)))

    def pack(self, words: Words) -> bytes:
        """Return elements as bytes, with no more bits than their rings have."""
        return b"".join(_pack(part, section.bits) for section, part in self.split(words))

    def unpack(self, data: bytes) -> Words:
        """Return the elements that `pack` wrote."""
        if len(data) != self.size_bytes:
            raise SpaceError("summand", f"{self.size_bytes} bytes", len(data))
        parts, start = [], 0
        for section in self.sections:
            end = start + section.size_bytes
            parts.append(_unpack(data[start:end], section.size, section.bits))
            start = end
        return np.concatenate(parts)


def _pack(words: Words, bits: int) -> bytes:
    if bits in (8, 16, 32, 64):
        return words.astype(f"<u{bits // 8}").tobytes()
    columns = np.unpackbits(words.astype(">u8").view(np.uint8).reshape(-1, 8), axis=1)
    return np.packbits(columns[:, 64 - bits :]).tobytes()


def _unpack(data: bytes, size: int, bits: int) -> Words:
    if bits in (8, 16, 32, 64):
        return np.frombuffer(data, dtype=f"<u{bits // 8}").astype(np.uint64)
    columns = np.unpackbits(np.frombuffer(data, dtype=np.uint8))[: size * bits]
    wide = np.zeros((size, 64), dtype=np.uint8)
    wide[:, 64 - bits :] = columns.reshape(size, bits)
    return np.packbits(wide, axis=1).view(">u8").ravel().astype(np.uint64)
