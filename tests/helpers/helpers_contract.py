"""Honest questions and replies of every kind, as whole runs make them: what the contract is about.

Nothing is written by hand: the scenarios of the battery are played once, and of each exchange the
question, the request and an honest reply are kept. A question that no scenario asks has no place in
the registry (`test_every_registered_question_is_asked_in_a_run`).
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Any

from flwr.app import RecordDict
from helpers_scenarios import MASKED, NODES, SCENARIOS

import gems_flwr.questions  # noqa: F401 - registers them
from gems_flwr import InProcessGrid
from gems_flwr.core import Question, Round
from gems_flwr.core.records import records_from_bytes, records_to_bytes


@dataclass(frozen=True)
class Exchange:
    """One question, what was sent to a node, and what came back."""

    scenario: str
    question: Question[Any]
    request: bytes
    reply: bytes
    read: Any  # the server's check and reading, as the round does it

    def content(self) -> RecordDict:
        return records_from_bytes(self.reply)


@functools.cache
def exchanges() -> dict[str, Exchange]:
    """Return one exchange for each kind of question, and for each form of its reply."""
    found: dict[str, Exchange] = {}
    plain, sent = Round.exchange, Round.send
    current: dict[str, Any] = {}

    def exchange(self, questions, read, **options):
        def noted(question, content):
            kind = question.kind
            # Of cones one for each form: replies differ by rank, privacy and sums.
            for key in (kind, f"{kind} {question.to_json()}" if kind == "cone" else kind):
                if key not in found:
                    reply = records_to_bytes(content)
                    about = (current["scenario"], question, current["requests"])
                    found[key] = Exchange(*about, reply, read)
            return read(question, content)

        return plain(self, questions, noted, **options)

    def send(self, messages, question=None):
        messages = list(messages)
        if question is not None and messages:
            current["requests"] = records_to_bytes(messages[0].content)
        return sent(self, messages, question)

    logging.disable(logging.CRITICAL)
    Round.exchange, Round.send = exchange, send
    try:
        for name, scenario in {**SCENARIOS, **MASKED}.items():
            current["scenario"] = name
            grid = InProcessGrid(scenario.app(), NODES)
            scenario.strategy().start(grid, scenario.initial(), num_rounds=scenario.rounds)
    finally:
        Round.exchange, Round.send = plain, sent
        logging.disable(logging.NOTSET)
    return found


def use(exchange: Exchange, content: RecordDict) -> Any:
    """Check and read a reply as the server does."""
    return exchange.read(exchange.question, content)
