"""What a node is asked for as its good-enough space: the base of all kinds of spaces.

`Cone`, `Means`, `Ball` and `Ellipsoid` are what `Gems(space=…)` takes, and the questions that cross
the network. A new kind of space is one more subclass, beside its set: it says how the node builds
the set and what it discloses.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from gems_flwr.core.question import Disclosure, LayerQuestion
from gems_flwr.core.records import checked_array, read_json, to_record
from gems_flwr.errors import BadReplyError, SpaceError
from gems_flwr.spaces.convex import space_from_arrays

if TYPE_CHECKING:
    from gems_flwr.node import Node

SPACE, META = "space", "space-meta"
_TEXT = "text"


@dataclass(frozen=True)
class SpaceQuestion(LayerQuestion[Any]):
    """What is the set of output layers that are good enough on your data?

    Parameters
    ----------
    dp_seeded : bool, default False
        Whether private noise is to come from the run's seed, which protects no one. Simulations
        ask for it, whatever the space; a node with data of its own refuses.
    refines : int, default 0
        How many rounds of refinement the server announces, so that a node whose limits forbid them
        refuses before anything is sent; `Gems` sets it.
    """

    dp_seeded: bool = field(default=False, kw_only=True)
    refines: int = field(default=0, kw_only=True)

    @abstractmethod
    def build(self, node: Node) -> Any:
        """Build the set on the node; an error if the samples or the model do not allow it."""

    @abstractmethod
    def check_fit(self, space: Any) -> None:
        """Refuse a set of another kind, form or dimension than asked for; raises SpaceError."""

    @property
    def offers(self) -> frozenset[str]:
        """What stages find in the spaces; see `gems_flwr.stages.check_needs`."""
        return frozenset({"spaces"})

    def for_node(self, name: str) -> Self:
        """Return what one node is asked; the same for all by default."""
        return self

    def shown(self, space: Any, node: Node) -> Disclosure:
        """Return what a set discloses that is about to leave the node."""
        return self.discloses(node)

    @property
    def privacy(self) -> dict[str, Any]:
        """How much noise scores get that are asked for beside this space."""
        return {}

    def answer(self, node: Node) -> RecordDict:
        """Return the space as arrays and a description."""
        space = self.build(node)
        node.allow(self.shown(space, node), leaves=True)
        arrays, meta = space.to_arrays()
        return RecordDict({SPACE: to_record(arrays), META: ConfigRecord({_TEXT: json.dumps(meta)})})

    def read(self, content: RecordDict) -> Any:
        """Return the space, which has checked itself, and fits the question and the layer."""
        record, text = content.get(SPACE), content.get(META)
        if not isinstance(record, ArrayRecord) or not isinstance(text, ConfigRecord):
            raise BadReplyError(f"expected an ArrayRecord '{SPACE}' and a ConfigRecord '{META}'")
        arrays = {key: checked_array(array, key) for key, array in record.items()}
        try:
            space = space_from_arrays(arrays, read_json(text.get(_TEXT), META))
            self.check_fit(space)
        except SpaceError as error:
            raise BadReplyError(str(error)) from error
        return space

    def _check_shape(self, wanted: tuple[int, ...], got: tuple[int, ...]) -> None:
        if wanted != got:
            raise SpaceError("shape", f"{wanted} as in the model", got)


def as_number(value: float) -> float:
    """Return a whole number as a float, so that 1 and 1.0 are one text."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
