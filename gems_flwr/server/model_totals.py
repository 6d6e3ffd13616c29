"""The sum of the models, or of the metrics, that nodes answer with, as secure sums give it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flwr.app import Message
from numpy.typing import NDArray

from gems_flwr.server.summing import Total
from gems_flwr.typing import Arrays
from gems_flwr.wire.model_summands import (
    LARGEST_METRIC,
    ModelSummand,
    ask_for_model_summand,
    mean_metrics_of,
    mean_of_total,
    model_sections,
    names_in,
)

if TYPE_CHECKING:
    from gems_flwr.server.round_methods import RoundMethods


@dataclass(frozen=True, eq=False)
class ModelTotal:
    """The sums, and what was trained.

    Parameters
    ----------
    total : Total
        Of weighted steps, weights and weighted metrics.
    model : mapping from str to ndarray
        What training began with.
    names : tuple of str
        Of the metrics, where all nodes have the same.
    """

    total: Total
    model: Arrays
    names: tuple[str, ...]

    @property
    def mean(self) -> dict[str, NDArray]:
        """The weighted mean of the trained models."""
        return mean_of_total(self.total.values, self.model)

    @property
    def metrics(self) -> dict[str, float]:
        """The weighted means of the metrics."""
        return mean_metrics_of(self.total.values, self.names)


def model_total(
    strategy: RoundMethods,
    server_round: int,
    messages: Sequence[Message],
    model: Arrays,
    request: ModelSummand,
    *,
    at_least: int = 0,
    largest_metric: float = LARGEST_METRIC,
    aside: Callable[[Message], bool] | None = None,
    step: str,
) -> ModelTotal:
    """Send messages and return the sum of the models and metrics in the answers.

    Parameters
    ----------
    strategy : RoundMethods
        Whose round it is; it has `secure`.
    server_round : int
        The round.
    messages : sequence of Message
        One for each node, as they would go out otherwise.
    model : mapping from str to ndarray
        What is trained; nothing where only metrics are wanted.
    request : ModelSummand
        How nodes count.
    at_least : int
        How many must be in the sum.
    largest_metric : float
        Above which nodes do not tell a metric.
    aside : callable, optional
        Gets every reply; says of which that they have nothing to add, for a reason of their own.
    step : str
        Name of the exchange.

    Raises
    ------
    RoundFailedError
        If fewer nodes than that, or than the threshold of secure sums, are left.
    """
    assert strategy.secure is not None
    told: list[tuple[str, ...]] = []

    def send(nodes: Sequence[int], put: Callable[[Message], None]) -> list[Message]:
        chosen = [each for each in messages if each.metadata.dst_node_id in set(nodes)]
        for message in chosen:
            ask_for_model_summand(message.content, request)
            put(message)
        replies = strategy.collect(chosen)
        return replies if aside is None else [reply for reply in replies if not aside(reply)]

    total = strategy.sums.total(
        strategy,
        server_round,
        [message.metadata.dst_node_id for message in messages],
        model_sections(model, strategy.secure.clip, strategy.secure.bits, largest_metric),
        send,
        check=lambda content: told.append(names_in(content)),
        at_least=at_least,
        step=step,
    )
    return ModelTotal(total, model, told[0] if len(set(told)) == 1 else ())
