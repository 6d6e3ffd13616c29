"""Sending a model without the layers that nodes have already.

Every message about an output layer names the layers below it by their digest. Nodes that do not
have them are sent them, each at most once in a run as long as it does not lose its state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from flwr.app import ConfigRecord, Message, RecordDict

from gems_flwr.errors import BadReplyError
from gems_flwr.networks.backbone import SplitModel
from gems_flwr.server.log import log_event
from gems_flwr.server.loop import RoundLoop
from gems_flwr.wire.backbone_messages import needs_backbone, put_backbone, refer_to_backbone
from gems_flwr.wire.keys import TRAIN
from gems_flwr.wire.records import to_record

BackboneMode = Literal["auto", "send", "local"]

# Up to here it is cheaper to send the layers along than to ask whether they are needed: a second
# exchange costs a node more than a megabyte does.
SMALL_BACKBONE_BYTES = 2**20


@dataclass
class BackboneSender:
    """Asks nodes about models, and remembers who has which backbone.

    Parameters
    ----------
    mode : {"auto", "send", "local"}
        Who gets the layers below the output layer; see `gems_flwr.Gems`.
    keep : bool
        Whether nodes will be asked about the same layers again.
    """

    mode: BackboneMode
    keep: bool
    # By digest, the ids of the nodes that were given these layers.
    _given: dict[str, set[int]] = field(default_factory=dict, init=False)

    def collect(
        self,
        strategy: RoundLoop,
        server_round: int,
        nodes: Sequence[int],
        model: SplitModel,
        config: ConfigRecord,
        ask: Callable[[Message], None],
        step: str = "",
    ) -> list[Message]:
        """Ask nodes about a model; return their replies.

        Parameters
        ----------
        strategy : RoundLoop
            Whose round it is.
        server_round : int
            The round.
        nodes : sequence of int
            Whom to ask.
        model : SplitModel
            What it is about.
        config : ConfigRecord
            Sent along.
        ask : callable
            Puts the question into a message.
        step : str
            Name of the exchange, where a round has several.
        """

        def exchange(receivers: Iterable[int], carriers: set[int], name: str) -> list[Message]:
            messages = strategy.messages(
                server_round, receivers, TRAIN, to_record(model.head), config, step=name
            )
            backbone = to_record(model.backbone) if carriers else None
            for message in messages:
                ask(message)
                if model.backbone:
                    refer_to_backbone(message.content, model.digest, keep=self.keep)
                if backbone is not None and message.metadata.dst_node_id in carriers:
                    put_backbone(message.content, backbone)
            given.update(carriers)
            return strategy.collect(messages)

        given = self._given.setdefault(model.digest if model.backbone else "", set())
        carriers = {node for node in nodes if node not in given} if self._carries(model) else set()
        replies = exchange(nodes, carriers, step)
        if self.mode == "local":
            return replies
        lacking = [
            reply.metadata.src_node_id
            for reply in replies
            if reply.has_content()
            and needs_backbone(reply.content)
            # Who was given it a moment ago does not get it again.
            and reply.metadata.src_node_id not in carriers
        ]
        if not lacking:
            return replies
        log_event("send_backbone", round=server_round, nodes=len(lacking), digest=model.digest)
        others = [reply for reply in replies if reply.metadata.src_node_id not in lacking]
        asked_again = exchange(lacking, set(lacking), f"{step}-backbone" if step else "backbone")
        return [*others, *asked_again]

    def _carries(self, model: SplitModel) -> bool:
        """Return whether the first message to a node has the backbone."""
        if not model.backbone or self.mode == "local":
            return False
        return self.mode == "send" or model.backbone_bytes <= SMALL_BACKBONE_BYTES

    def refuse_lacking(self, content: RecordDict, layer: str) -> None:
        """Raise if a reply says that the node has other layers than the server means."""
        if not needs_backbone(content):
            return
        if self.mode == "local":
            raise BadReplyError(
                f"the layers below '{layer}' of this node's model() are not the server's: load the "
                "same weights there, or let the server send them (backbone='auto')"
            )
        raise BadReplyError(f"it asks again for the layers below '{layer}', which it was sent")
