"""A sum of many arrays that come a few at a time."""

from __future__ import annotations

import torch
from torch import Tensor

# As in `torch.sum` over a leading axis.
_RUN, _LEVELS = 16, 4


class CascadeSum:
    """Sum arrays in runs of 16, the runs' sums again in runs of 16, and so on.

    Rounding then grows with the logarithm of how many there are. The order is that of
    `torch.sum`, so that it does not matter in how many parts the arrays come.
    """

    def __init__(self) -> None:
        self._count, self._parts = 0, 0
        self._levels: list[Tensor] = []

    def add(self, terms: Tensor) -> None:
        """Add arrays that are stacked along the first axis."""
        self._parts += 1
        if self._parts == 1:
            # Of what does not fill its vectors torch has another order: all of it at once is its.
            self._first = terms.sum(dim=0)
            self._levels = [torch.zeros_like(self._first) for _ in range(_LEVELS)]
        for term in terms:
            self._levels[0] += term
            self._count += 1
            self._carry()

    def _carry(self) -> None:
        """Hand on the sum of every run that is complete."""
        run = _RUN
        for level in range(1, _LEVELS):
            if self._count % run:
                return
            self._levels[level] += self._levels[level - 1]
            self._levels[level - 1].zero_()
            run *= _RUN

    def total(self) -> Tensor:
        """Return the sum of all that was added; at least one array must have been."""
        if self._parts == 1:
            return self._first
        total, *others = self._levels
        for other in others:
            total = total + other
        return total
