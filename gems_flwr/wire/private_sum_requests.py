"""What nodes are asked to add up with noise: class means, one spread, a gradient.

See `gems_flwr.moments.whole_sums` for the three sums. The request says how much noise each node
adds, in units of the most that one sample can change: what it spends of its privacy is for the
node to find out. What inputs are centred by comes in an ArrayRecord beside the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from flwr.app import ArrayRecord, RecordDict

from gems_flwr.errors import ModelError
from gems_flwr.moments.whole_sums import GRADIENT, MEANS, SPREAD
from gems_flwr.secure.fixed_point import Section, whole_section
from gems_flwr.secure.shared_noise import tail
from gems_flwr.typing import Float
from gems_flwr.wire.asking import put, requested
from gems_flwr.wire.keys import CENTER, PRIVATE_SUM, PRIVATE_SUM_REQUEST
from gems_flwr.wire.records import to_numpy, to_record
from gems_flwr.wire.requests import JsonRequest

PrivateStage = Literal["means", "spread", "gradient"]

# The count of samples has more room than it should need: too many are noticed by it.
_SPARE = 2**12


@dataclass(frozen=True)
class PrivateSum(JsonRequest):
    """A sum over nodes to which every node adds its share of the noise.

    Parameters
    ----------
    stage : {"means", "spread", "gradient"}
        What is summed.
    noise : float
        Deviation of each node's noise over the sensitivity of the sum, above 0.
    clip : float
        Length to which inputs, from the spread on centred ones, are shortened; above 0.
    longest : float
        Length to which a sample's gradient is shortened, in units of clipped inputs; above 0.
    dp_seeded : bool, default False
        Whether noise is to come from the run's seed, which protects nobody. For simulations.
    """

    stage: PrivateStage = "means"
    noise: float = 1.0
    clip: float = 1.0
    longest: float = 1.0
    dp_seeded: bool = False

    def __post_init__(self) -> None:
        stages = list(get_args(PrivateStage))
        rules = {"stage": (self.stage in stages, f"one of {stages}")}
        for name in ("noise", "clip", "longest"):
            rules[name] = (0 < getattr(self, name) < math.inf, "above 0")
        self.check(rules)

    @property
    def sensitivity(self) -> int:
        """By how much one sample changes the sum at most, in length."""
        return {"means": MEANS, "spread": SPREAD**2, "gradient": GRADIENT}[self.stage]

    def shapes(self, classes: int, features: int) -> dict[str, tuple[int, ...]]:
        """Return the arrays of a summand and their shapes."""
        if self.stage == "means":
            return {"sums": (classes, features), "counts": (classes,), "squares": (1,)}
        if self.stage == "spread":
            return {"diagonal": (features,), "corner": (features * (features - 1) // 2,)}
        return {"gradient": (classes, features + 1)}

    def deviation(self, array: str) -> float:
        """Return the deviation of a node's noise in one array, in whole numbers."""
        # Both halves of a symmetric matrix count, and only one is told.
        return self.noise * self.sensitivity / (math.sqrt(2) if array == "corner" else 1.0)

    def sections(self, classes: int, features: int, nodes: int, examples: int) -> Sequence[Section]:
        """Return the sections of a summand, with room for the noise of all nodes.

        Parameters
        ----------
        classes, features : int
            Of the layer.
        nodes : int
            How many may add something.
        examples : int
            How many samples there may be on all nodes together.
        """
        shapes = self.shapes(classes, features)
        numbers = sum(math.prod(shape) for shape in shapes.values())
        sections = []
        for name, shape in shapes.items():
            noise = tail(max(1, numbers), self.deviation(name) * math.sqrt(nodes))
            most: float = examples * self.sensitivity * (_SPARE if name == "counts" else 1)
            # A single pixel's square is at most the squared length, a product half of that.
            most = most / 2 if name == "corner" else most
            sections.append(whole_section(name, shape, most + noise, nodes))
        return sections


def ask_for_private_sum(
    content: RecordDict, request: PrivateSum, center: Float | None = None
) -> None:
    """Ask in an instruction for a noisy summand.

    Parameters
    ----------
    content : RecordDict
        The instruction.
    request : PrivateSum
        Which sum.
    center : array of shape (D,), optional
        What is taken from inputs, from the spread on.
    """
    put(content, PRIVATE_SUM_REQUEST, request.to_json())
    if center is not None:
        content[PRIVATE_SUM] = to_record({CENTER: center.astype(np.float32)})


def requested_private_sum(content: RecordDict) -> PrivateSum | None:
    """Return which noisy sum an instruction asks for, or None where it asks for none."""
    return requested(content, PRIVATE_SUM_REQUEST, PrivateSum)


def take_center(content: RecordDict) -> Float | None:
    """Take what inputs are centred by out of an instruction; None where nothing came.

    Raises
    ------
    ModelError
        If it is none.
    """
    record = content.pop(PRIVATE_SUM, None)
    if record is None:
        return None
    if not isinstance(record, ArrayRecord) or CENTER not in record:
        raise ModelError("the request for a noisy sum came with something else than a center")
    center = to_numpy(record)[CENTER].astype(np.float64)
    if center.ndim != 1 or not np.isfinite(center).all():
        raise ModelError(f"a center of shape {center.shape} that is not finite numbers in a row")
    return np.asarray(center)
