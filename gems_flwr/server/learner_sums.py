"""Local learners under secure sums: every node's report is the mean of all.

All that periodic and dynamic averaging make of the nodes' reports and models is a mean in which
each counts the same. So each node that is in a sum is taken to have answered with the mean: of
squared distances, losses and batches, and of models where these were asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flwr.app import Message

from gems_flwr.server.exchange import Answer
from gems_flwr.server.model_totals import model_total
from gems_flwr.typing import Arrays
from gems_flwr.wire.averaging_replies import AveragingReply, mean_reply, needs_model
from gems_flwr.wire.model_summands import ModelSummand

if TYPE_CHECKING:
    from gems_flwr.server.round_methods import RoundMethods

# Losses are summed over the batches of many rounds, squared distances over all weights.
_LARGEST = 1e12


def summed_answers(
    strategy: RoundMethods,
    server_round: int,
    messages: Sequence[Message],
    reference: Arrays | None,
    *,
    at_least: int,
    step: str,
) -> tuple[list[Answer[AveragingReply]], list[Message]]:
    """Send messages to learners; return the answers that stand for theirs, and all replies.

    Parameters
    ----------
    strategy : RoundMethods
        Whose round it is.
    server_round : int
        The round.
    messages : sequence of Message
        One for each node.
    reference : mapping from str to ndarray, optional
        What models are told relative to; without it none are asked for.
    at_least : int
        How many must be in the sum.
    step : str
        Name of the exchange.

    Raises
    ------
    RoundFailedError
        If too few nodes are left.
    """
    collected: list[Message] = []

    def noted(reply: Message) -> bool:
        collected.append(reply)
        return _lacks_model(reply)

    origin = "nothing" if reference is None else "reference"
    total = model_total(
        strategy,
        server_round,
        messages,
        reference or {},
        ModelSummand(weighted=False, origin=origin),  # type: ignore[arg-type]
        at_least=at_least,
        largest_metric=_LARGEST,
        aside=noted,
        step=step,
    )
    mean = mean_reply(total.metrics, None if reference is None else total.mean)
    lacking = [
        Answer(strategy.name_of(reply.metadata.src_node_id), AveragingReply(needs_model=True))
        for reply in collected
        if _lacks_model(reply)
    ]
    return [*(Answer(node, mean) for node in total.total.nodes), *lacking], collected


def _lacks_model(reply: Message) -> bool:
    return reply.has_content() and needs_model(reply.content)
