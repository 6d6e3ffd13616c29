"""One exchange in which the nodes' held-out data choose among several output layers.

The server sends all candidates in one train message: the first as the model that the message is
about, all of them beside it. A node answers with two small arrays: how many of its held-out samples
it saw, and how many of them each candidate classifies correctly; by class where the classes are to
weigh the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from flwr.app import Array, ArrayRecord, RecordDict
from numpy.typing import NDArray

from gems_flwr.bounds import MAX_CLASSES, MAX_EXAMPLES
from gems_flwr.errors import BadReplyError, ModelError
from gems_flwr.typing import Arrays, Float
from gems_flwr.wire.asking import put, requested
from gems_flwr.wire.keys import CANDIDATES, CHOICE, CHOICE_REQUEST, RIGHT, SEEN
from gems_flwr.wire.model_replies import pack_name
from gems_flwr.wire.records import checked_array, to_numpy, to_record
from gems_flwr.wire.requests import JsonRequest

if TYPE_CHECKING:
    from gems_flwr.moments.private_choice import PrivateChoice

# More would be a search over models on data that was held out.
MAX_CANDIDATES = 64
_SINGLE = np.dtype(np.float32)


@dataclass(frozen=True)
class ChoiceRequest(JsonRequest):
    """How a node is to judge several output layers.

    Parameters
    ----------
    candidates : int
        How many there are, from 1 to 64.
    by_class : bool, default False
        Whether right answers are counted for each class.
    dp_epsilon, dp_delta : float
        Differentially private counts; exact while `dp_epsilon` is None.
    dp_seeded : bool, default False
        As in `SpaceRequest`.
    """

    candidates: int = 1
    by_class: bool = False
    dp_epsilon: float | None = None
    dp_delta: float = 1e-5
    dp_seeded: bool = False

    def __post_init__(self) -> None:
        fits = 1 <= self.candidates <= MAX_CANDIDATES
        self.check({"candidates": (fits, f"from 1 to {MAX_CANDIDATES}")})
        _ = self.private

    @property
    def private(self) -> PrivateChoice | None:
        """The private release that is asked for, if any."""
        if self.dp_epsilon is None:
            return None
        from gems_flwr.moments.private_choice import PrivateChoice

        return PrivateChoice(self.dp_epsilon, self.dp_delta, self.candidates)


@dataclass(frozen=True, eq=False)
class Counts:
    """A node's judgement of several candidates.

    Parameters
    ----------
    seen : array of shape (K,)
        Held-out samples of each class; of all together (K = 1) where classes are not told apart.
    right : array of shape (candidates, K)
        How many of them each candidate classifies correctly.
    """

    seen: Float
    right: Float


def ask_for_choice(
    content: RecordDict, request: ChoiceRequest, candidates: Sequence[Arrays]
) -> None:
    """Put candidates into an instruction, and ask how good each is."""
    put(content, CHOICE_REQUEST, request.to_json())
    named = {f"{i}/{key}": a for i, layer in enumerate(candidates) for key, a in layer.items()}
    content[CANDIDATES] = to_record(named)


def requested_choice(content: RecordDict) -> ChoiceRequest | None:
    """Return the request to judge candidates in an instruction, or None where there is none."""
    return requested(content, CHOICE_REQUEST, ChoiceRequest)


def take_candidates(content: RecordDict, request: ChoiceRequest) -> list[dict[str, NDArray]]:
    """Remove the candidates from an instruction and return the arrays of each.

    Raises
    ------
    ModelError
        If they are not as many as the request says.
    """
    record = content.pop(CANDIDATES, None)
    arrays = to_numpy(record) if isinstance(record, ArrayRecord) else {}
    layers: list[dict[str, NDArray]] = [{} for _ in range(request.candidates)]
    for name, array in arrays.items():
        place, _, key = name.partition("/")
        if not place.isdecimal() or int(place) >= request.candidates:
            raise ModelError(f"candidate '{name}' is none of {request.candidates}")
        layers[int(place)][key] = array
    if not all(layer.keys() == layers[0].keys() and layer for layer in layers):
        raise ModelError(f"expected {request.candidates} candidates of the same arrays")
    return layers


def pack_choice_reply(counts: Counts, *, name: str) -> RecordDict:
    """Return the content of a reply with a node's judgement."""
    parts = {SEEN: counts.seen.astype(_SINGLE), RIGHT: counts.right.astype(_SINGLE)}
    record = ArrayRecord({key: Array(array) for key, array in parts.items()})
    return RecordDict({CHOICE: record, **pack_name(name)})


def unpack_choice_reply(content: RecordDict, request: ChoiceRequest, num_classes: int) -> Counts:
    """Validate a node's judgement.

    Parameters
    ----------
    content : RecordDict
        What the node sent.
    request : ChoiceRequest
        What it was asked.
    num_classes : int
        Classes of the task.

    Raises
    ------
    BadReplyError
        Names the key at fault, what was expected and what came.
    """
    record = content.get(CHOICE)
    if not isinstance(record, ArrayRecord) or record.keys() != {SEEN, RIGHT}:
        raise BadReplyError(f"expected an ArrayRecord '{CHOICE}' with '{SEEN}' and '{RIGHT}'")
    groups = min(num_classes, MAX_CLASSES) if request.by_class else 1
    seen = checked_array(record[SEEN], SEEN, (groups,), _SINGLE).astype(np.float64)
    shape = (request.candidates, groups)
    right = checked_array(record[RIGHT], RIGHT, shape, _SINGLE).astype(np.float64)
    if seen.min() < 0 or seen.sum() > MAX_EXAMPLES:
        raise BadReplyError(
            f"'{SEEN}' must be at least 0 and sum to at most {MAX_EXAMPLES:g}, got "
            f"{seen.min():g} and {seen.sum():g}"
        )
    if right.min() < 0 or (right > seen).any():
        raise BadReplyError(f"'{RIGHT}' must be at least 0 and nowhere above '{SEEN}'")
    return Counts(seen, right)
