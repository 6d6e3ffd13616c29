"""The mod that adds a node's answers to sums which only the total is known of.

It sits around the other mods and the user's handler::

    app = ClientApp(mods=[secure_sum_mod(), good_enough_mod(data, model=Net)])

and does nothing unless the server's strategy has ``secure=SecureSum()``. Then it answers the
exchanges of the protocol (`gems_flwr.secure`), and puts masks on what the others answer.

Decided here: the node keeps its secrets in its state in Flower (every message of a deployment is a
new process), one session at a time, and forgets each as soon as it is used. An error inside is told
the server without numbers, which might be those of the node's data; its log has them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict

from gems_flwr.client.fault_reply_mod import fault_reply_mod, node_name
from gems_flwr.client.masking import masking
from gems_flwr.errors import GemsError, OptionError, RefusedError, SecureSumError
from gems_flwr.runtime.flower_internals import ClientAppCallable, Mod
from gems_flwr.secure.node_secrets import NodeSecrets
from gems_flwr.secure.signatures import Signer, TrustedKeys
from gems_flwr.typing import Arrays
from gems_flwr.wire.asking import wants_name
from gems_flwr.wire.averaging_replies import needs_model
from gems_flwr.wire.backbone_messages import needs_backbone
from gems_flwr.wire.fault_reasons import without_numbers
from gems_flwr.wire.keys import JSON, LOCAL_REFERENCE, LOCAL_SECRETS
from gems_flwr.wire.model_summands import ModelSummand, model_summand, take_model_summand
from gems_flwr.wire.records import to_numpy
from gems_flwr.wire.secure_messages import (
    ConfirmStage,
    KeysStage,
    MaskStage,
    RevealStage,
    SharesStage,
    Stage,
    pack_confirm_reply,
    pack_keys_reply,
    pack_letters_reply,
    pack_shares_reply,
    take_stage,
    with_words,
)
from gems_flwr.wire.summands import requested_layout, summand_words

_log = logging.getLogger("gems_flwr")


@dataclass(frozen=True)
class _Keys:
    """Where a node's own key and those that it trusts are; empty where it signs nothing."""

    signing: str
    trusted: str

    @property
    def signer(self) -> Signer | None:
        return _signer(self.signing) if self.signing else None

    @property
    def others(self) -> TrustedKeys | None:
        return TrustedKeys.load(self.trusted) if self.trusted else None


@lru_cache(maxsize=8)
def _signer(path: str) -> Signer:
    return Signer.load(path)


def secure_sum_mod(
    *,
    signing_key: str | Path | None = None,
    trusted_keys: str | Path | None = None,
    least_nodes: int = 3,
    only_sums: bool = False,
) -> Mod:
    """Return a mod that masks what the server asks for as a sum.

    Parameters
    ----------
    signing_key : path, optional
        The node's own private key: Ed25519 or ECDSA (that of the SuperNode, say), PEM or OpenSSH.
        By default what ``signing-key`` in its ``--node-config`` says, if it does.
    trusted_keys : path, optional
        A folder with the public keys of the other nodes; by default ``trusted-keys`` of the
        ``--node-config``. With both, neighbours must have signed their keys and the list of those
        who are in a sum, and a server that deceives the nodes about each other opens nothing.
        Without them the server is believed to follow the protocol.
    least_nodes : int, default 3
        Fewest nodes of the neighbourhood, this one included, in a sum; at least 3. In the
        ``--node-config``: ``least-nodes``.
    only_sums : bool, default False
        Whether everything but masked sums is refused. In the ``--node-config``: ``only-sums``.

    Examples
    --------
    Three nodes whose models the server sees the mean of, and nothing else:

    >>> import numpy as np
    >>> from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    >>> from flwr.clientapp import ClientApp
    >>> from gems_flwr import FedAvg, InProcessGrid, SecureSum, secure_sum_mod
    >>> app = ClientApp(mods=[secure_sum_mod()])
    >>> @app.train()
    ... def train(message, context):
    ...     [w] = message.content["arrays"].to_numpy_ndarrays()
    ...     arrays = ArrayRecord([w + context.node_config["partition-id"]])
    ...     metrics = MetricRecord({"num-examples": 1})
    ...     return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
    >>> strategy = FedAvg(fraction_evaluate=0.0, secure=SecureSum())
    >>> result = strategy.start(InProcessGrid(app, nodes=3), ArrayRecord([np.zeros(2)]), 2)
    >>> [np.round(w, 4).tolist() for w in result.arrays.to_numpy_ndarrays()]
    [[2.0, 2.0]]
    """
    if least_nodes < 3:
        raise OptionError(f"least_nodes must be at least 3, got {least_nodes}")

    def secure_sum(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        config = context.node_config
        keys = _Keys(
            str(signing_key or config.get("signing-key", "")),
            str(trusted_keys or config.get("trusted-keys", "")),
        )
        least = max(least_nodes, _whole(config.get("least-nodes", 3)))
        stage = take_stage(message.content)
        if stage is None:
            if (only_sums or config.get("only-sums")) and not wants_name(message.content):
                raise RefusedError("only_sums", "this node answers with nothing but masked sums")
            return call_next(message, context)
        if isinstance(stage, MaskStage):
            return _mask(stage, least, message, context, call_next)
        return Message(_answer(stage, least, keys, context), reply_to=message)

    def guarded(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        # The stage is for this mod: those inside refuse a message that still has one.
        return fault_reply_mod(
            message, context, lambda m, c: secure_sum(m, c, call_next), secure=True
        )

    return guarded


def _answer(stage: Stage, least: int, keys: _Keys, context: Context) -> RecordDict:
    """Answer a stage that has nothing to do with the node's data."""
    name = node_name(context)
    if isinstance(stage, KeysStage):
        secrets = NodeSecrets.begin(stage.session, stage.sums, keys.signer)
        _keep(secrets, context)
        return pack_keys_reply(secrets.own, name=name)
    secrets = _recall(stage.session, context)
    if isinstance(stage, SharesStage):
        if len(stage.peers) + 1 < least:
            raise RefusedError(
                "least_nodes", f"it is {least}, the sum would be over {len(stage.peers) + 1} nodes"
            )
        secrets, letters = secrets.share(stage.index, stage.peers, stage.threshold, keys.others)
        content = pack_letters_reply(letters, name=name)
    elif isinstance(stage, ConfirmStage):
        if keys.signer is None:
            raise SecureSumError("this node has no signing-key to confirm a sum with")
        signature = secrets.confirm(stage.number, stage.survivors, keys.signer)
        content = pack_confirm_reply(signature, name=name)
    else:
        assert isinstance(stage, RevealStage)
        there = {*stage.survivors} & {secrets.index, *secrets.peers}
        if len(there) < least:
            raise RefusedError(
                "least_nodes", f"it is {least}, the sum is over {len(there)} nodes it knows"
            )
        secrets, shares = secrets.reveal(
            stage.number, stage.survivors, stage.confirmations, keys.others
        )
        content = pack_shares_reply(shares, name=name)
    _keep(secrets, context)
    return content


def _mask(
    stage: MaskStage, least: int, message: Message, context: Context, call_next: ClientAppCallable
) -> Message:
    """Let the others answer, and put masks on the answer."""
    secrets = _recall(stage.session, context).receive(stage.letters)
    if len(stage.present) + 1 < least:
        raise RefusedError(
            "least_nodes", f"it is {least}, the sum would be over {len(stage.present) + 1} nodes"
        )
    layout = requested_layout(message.content)
    if layout is None:
        raise SecureSumError("the server asks for a masked answer without saying of what form")
    of_model = take_model_summand(message.content)
    # The handler may change what it was sent.
    sent = dict(message.content.array_records)
    with masking(len(stage.present) + 1):
        reply = call_next(message, context)
    name = node_name(context)
    if reply.has_error():
        reason = _said_without_numbers(reply.error.reason or "", name)
        return Message(Error(code=reply.error.code, reason=reason), reply_to=message)
    content = reply.content
    if needs_backbone(content) or needs_model(content):
        return reply  # it says what the node lacks, and nothing of its data
    try:
        if of_model is not None:
            before = _before(of_model, sent, context)
            content = model_summand(content, before, layout, of_model, name=name)
        words = _words(content)
    except GemsError as error:
        raise SecureSumError(_said_without_numbers(str(error), name)) from error
    secrets, masked = secrets.masked(stage.number, layout, layout.unpack(words), stage.present)
    # Kept before it leaves: no second set of numbers under the same masks.
    _keep(secrets, context)
    return Message(with_words(content, layout.pack(masked)), reply_to=message)


def _before(request: ModelSummand, sent: Mapping[str, ArrayRecord], context: Context) -> Arrays:
    """Return what the step of a model is taken from."""
    if request.origin == "nothing":
        return {}
    record = sent.get(request.arrays)
    if request.origin == "reference":
        kept = context.state.get(LOCAL_REFERENCE)
        record = kept if isinstance(kept, ArrayRecord) else None
    if record is None:
        raise SecureSumError("the server asks for the step of a model that this node does not have")
    return to_numpy(record)


def _words(content: RecordDict) -> bytes:
    words = summand_words(content)
    if words is None:
        raise SecureSumError(
            "the app answered with something that cannot be summed; put good_enough_mod(...) "
            "inside: ClientApp(mods=[secure_sum_mod(), good_enough_mod(data, model=Net)])"
        )
    return words


def _said_without_numbers(reason: str, name: str) -> str:
    """Return what the server is told of a fault: numbers may be those of the data."""
    told = without_numbers(reason)
    if told != reason:
        _log.warning("node %s: %s", name, reason)
    return told


def _recall(session: str, context: Context) -> NodeSecrets:
    record = context.state.get(LOCAL_SECRETS)
    text = record.get(JSON) if isinstance(record, ConfigRecord) else None
    secrets = NodeSecrets.from_json(text) if isinstance(text, str) else None
    if secrets is None or secrets.session != session:
        raise SecureSumError(
            "this node has no keys of that session: it has restarted, or joined since"
        )
    return secrets


def _keep(secrets: NodeSecrets, context: Context) -> None:
    context.state[LOCAL_SECRETS] = ConfigRecord({JSON: secrets.to_json()})


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise OptionError(f"node-config least-nodes: expected int, got {value!r}")
    return value
