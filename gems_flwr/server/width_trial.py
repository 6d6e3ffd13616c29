"""Before round 1 the app's own code is tried with hidden layers of other widths.

Merged layers may have other widths than the app's module. Code with sizes written into it would
fail after a round that was paid for; so the nodes are asked to try (no model travels), and the
server's own evaluation is tried as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from flwr.app import Message

from gems_flwr.errors import ModelError
from gems_flwr.networks.other_widths import widened
from gems_flwr.server.exchange import Exchange
from gems_flwr.server.round_methods import EvaluateFn
from gems_flwr.typing import Arrays
from gems_flwr.wire.asking import ask_to_try_widths
from gems_flwr.wire.records import to_record
from gems_flwr.wire.width_replies import unpack_widths_reply


def try_evaluation(initial: Arrays, evaluate_fn: EvaluateFn) -> None:
    """Evaluate a network of other widths; what comes out does not matter.

    Raises
    ------
    ModelError
        If it fails. The message begins with what to write.
    """
    try:
        evaluate_fn(0, to_record(widened(initial)))
    except Exception as error:
        raise ModelError(
            "write model = resize_model(Net(), arrays) in evaluate_fn, or keep the app's widths "
            f'(max_hidden="same"): it fails at other widths: {type(error).__name__}: {error}'
        ) from error


def try_nodes(exchange: Exchange, messages: Iterable[Message], at_least: int) -> dict[int, str]:
    """Return the nodes, by id, whose networks do not run at other widths, and why.

    Parameters
    ----------
    exchange : Exchange
        That of the round; nobody counts as having taken part in it.
    messages : iterable of Message
        One for each node, without a model.
    at_least : int
        How many nodes must be fit.

    Raises
    ------
    RoundFailedError
        If fewer are.
    """
    questions = list(messages)
    for message in questions:
        ask_to_try_widths(message.content)
    trial = dataclasses.replace(exchange, inbox=None)
    replies = trial.collect(trial.unbarred(questions))
    trial.accept(replies, unpack_widths_reply, at_least=at_least)
    return trial.refused
