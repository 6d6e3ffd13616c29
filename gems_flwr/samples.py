"""Inputs and their classes: what every computation on labelled data takes and gives."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Samples:
    """Inputs of a layer, of shape (n, D), and the true classes, of shape (n,)."""

    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)
