"""What strategies, questions and results are made of.

A strategy gets a `Round` and asks `Question` values of nodes (`ask`), or their sum (`total`). A
`Disclosure` is what an answer gives away.
"""

from gems_flwr.core.question import (
    NOTHING,
    Disclosure,
    Group,
    LayerQuestion,
    Question,
    SumQuestion,
    registered_questions,
    take_question,
)
from gems_flwr.core.records import MetricsReply, ModelReply
from gems_flwr.core.round import Round
from gems_flwr.core.run import (
    Callback,
    RoundOutcome,
    RoundRecord,
    RunResult,
    ServerState,
    TargetReached,
    Tolerance,
    Traffic,
    derive_seed,
    generator,
)
from gems_flwr.core.sums import Total

__all__ = [
    "NOTHING", "Callback", "Disclosure", "Group", "LayerQuestion", "MetricsReply", "ModelReply",
    "Question", "Round", "RoundOutcome", "RoundRecord",
    "RunResult", "ServerState", "SumQuestion", "TargetReached", "Tolerance", "Total", "Traffic",
    "derive_seed", "generator", "registered_questions", "take_question",
]  # fmt: skip
