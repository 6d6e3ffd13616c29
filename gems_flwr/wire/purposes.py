"""What a message is for, in one word: what logs and records call an exchange."""

from __future__ import annotations

from flwr.app import Message

from gems_flwr.wire.asking import (
    requested_averaging,
    requested_models,
    requested_neurons,
    requested_space,
    requested_statistics,
    wants_name,
    wants_score,
)
from gems_flwr.wire.choice_messages import requested_choice
from gems_flwr.wire.gradient_requests import requested_gradient, requested_losses
from gems_flwr.wire.keys import SHARE_EXAMPLES
from gems_flwr.wire.moment_requests import requested_moment_sums
from gems_flwr.wire.private_sum_requests import requested_private_sum
from gems_flwr.wire.requests import AveragingRequest, ModelsRequest
from gems_flwr.wire.secure_messages import MaskStage, stage_word


def purpose_of(message: Message) -> str:
    """Return what a node is asked for.

    ``train`` and ``evaluate`` are what an ordinary handler does. Most of what this library asks
    for travels in train messages as well, and has words of its own: ``names``, ``space``,
    ``moments``, ``score``, ``choice``, ``gradient``, ``losses``, ``sum``, ``neurons``,
    ``statistics``; for local learners ``models`` (that nodes have) and ``delivery`` (of an
    average); for several models ``holdings``, ``losses``, ``norms`` and ``models``; and for secure
    sums ``keys``, ``shares``, ``confirm`` and ``reveal``.

    Examples
    --------
    >>> from flwr.app import ConfigRecord, Message, RecordDict
    >>> content = RecordDict({"config": ConfigRecord({"verify": True})})
    >>> purpose_of(Message(content, dst_node_id=1, message_type="train"))
    'score'
    """
    content, kind = message.content, message.metadata.message_type
    stage = stage_word(content)
    if stage is not None and stage != MaskStage.word:
        return stage
    averaging, models = requested_averaging(content), requested_models(content)
    if averaging is not None:
        return _of_learners(averaging)
    if models is not None:
        return _of_several(models)
    words = {
        "names": wants_name(content),
        "space": requested_space(content) is not None,
        "moments": requested_moment_sums(content) is not None,
        "gradient": requested_gradient(content) is not None,
        "losses": requested_losses(content) is not None,
        "sum": requested_private_sum(content) is not None,
        "neurons": requested_neurons(content) is not None,
        "score": wants_score(content),
        "choice": requested_choice(content) is not None,
        "statistics": requested_statistics(content) is not None,
        "examples": kind == SHARE_EXAMPLES,
    }
    return next((word for word, holds in words.items() if holds), kind)


def _of_learners(request: AveragingRequest) -> str:
    if request.steps:
        return "train"
    return "models" if request.send == "always" else "delivery"


def _of_several(request: ModelsRequest) -> str:
    if request.action == "train":
        return "train" if request.report == "model" else "norms"
    return {"introduce": "holdings", "losses": "losses", "send": "models"}[request.action]
