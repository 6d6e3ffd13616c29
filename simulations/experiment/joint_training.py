"""Where training meets the training of other nodes.

A node trains by itself, unless somebody has set a place where nodes meet (`meeting`): then what it
is about to train is handed over as an order, and it waits for what comes of it. Whoever collected
orders has `fit_orders` carry them out, as few computations as possible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from simulations.data.examples import Examples
from simulations.experiment.batched_training import Trainee, fit_together, why_not_together
from simulations.experiment.plain_sgd import fit_plainly, suits


@dataclass(frozen=True, eq=False)
class TrainingOrder:
    """What a node is about to train.

    Parameters
    ----------
    model : torch.nn.Module
        Is trained in place.
    examples : Examples
        What on.
    architecture : str
        What the model was built from.
    schedule : dict
        The keyword arguments of `simulations.experiment.training.fit`.
    """

    model: nn.Module
    examples: Examples
    architecture: str
    schedule: dict[str, Any]

    def why_alone(self) -> str | None:
        """Return why it has to be carried out by itself; None if it need not be."""
        if not len(self.examples) or not any(w.requires_grad for w in self.model.parameters()):
            return "there is nothing to train"
        return why_not_together(self.model)

    def kind(self) -> str:
        """Return what orders that can be carried out together have in common."""
        shared = {key: value for key, value in self.schedule.items() if key != "seed"}
        shared["options"] = asdict(self.schedule["options"])
        weights = [
            (name, tuple(weight.shape), weight.dtype, weight.requires_grad)
            for name, weight in self.model.named_parameters()
        ]
        features, labels = self.examples.features, self.examples.labels
        data = (features.shape[1:], features.dtype.str, labels.dtype.str)
        # The module, too: its output layer may have been exchanged since it was built.
        return repr((self.architecture, str(self.model), weights, data, sorted(shared.items())))


Meeting = Callable[[TrainingOrder], dict[str, float] | None]

_meeting: ContextVar[Meeting | None] = ContextVar("meeting", default=None)


@contextmanager
def meeting(place: Meeting) -> Iterator[None]:
    """Let what is trained in this thread be handed over to `place`.

    It trains the order's model and returns its metrics, or None if the node is to do it itself.
    """
    token = _meeting.set(place)
    try:
        yield
    finally:
        _meeting.reset(token)


def meeting_place() -> Meeting | None:
    """Return where orders go, if anywhere."""
    return _meeting.get()


def fit_orders(orders: Sequence[TrainingOrder]) -> list[dict[str, float] | None]:
    """Carry out orders that can be carried out together.

    Returns
    -------
    list
        The metrics of each; None where there is no other of its kind, so that nothing is gained.
        Large dense networks are trained one by one, which is quicker (`plain_sgd`).
    """
    found: list[dict[str, float] | None] = [None] * len(orders)
    kinds: dict[str, list[int]] = {}
    for index, order in enumerate(orders):
        kinds.setdefault(order.kind(), []).append(index)
    for members in kinds.values():
        if suits(orders[members[0]].model, orders[members[0]].schedule):
            for index in members:
                found[index] = _fit_plainly(orders[index])
            continue
        if len(members) == 1:
            continue
        chosen = [orders[index] for index in members]
        shared = {key: value for key, value in chosen[0].schedule.items() if key != "seed"}
        trainees = [Trainee(each.model, each.examples, each.schedule["seed"]) for each in chosen]
        for index, metrics in zip(members, fit_together(trainees, **shared), strict=True):
            found[index] = metrics
    return found


def _fit_plainly(order: TrainingOrder) -> dict[str, float]:
    named = ("scale", "options", "seed", "threads")
    known = {key: value for key, value in order.schedule.items() if key in named}
    return fit_plainly(order.model, order.examples, **known)
