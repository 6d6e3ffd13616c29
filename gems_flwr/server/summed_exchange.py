"""One exchange about a model whose answers are only ever added up."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from flwr.app import ConfigRecord, Message, RecordDict

from gems_flwr.networks.backbone import SplitModel
from gems_flwr.secure.fixed_point import Section
from gems_flwr.server.backbone_sending import BackboneSender
from gems_flwr.server.loop import RoundLoop
from gems_flwr.server.summing import Put, Summing, Total


@dataclasses.dataclass(frozen=True, eq=False)
class SummedExchange:
    """Asks nodes about a model, and adds up what they say.

    Parameters
    ----------
    strategy : RoundLoop
        Whose round it is.
    summing : Summing
        Adds up.
    backbones : BackboneSender
        Sends models.
    server_round : int
        The round.
    model : SplitModel
        What the question is about.
    config : ConfigRecord
        Sent along.
    """

    strategy: RoundLoop
    summing: Summing
    backbones: BackboneSender
    server_round: int
    model: SplitModel
    config: ConfigRecord

    def total(
        self,
        nodes: Sequence[int],
        ask: Callable[[RecordDict], None],
        sections: Sequence[Section],
        step: str,
        *,
        at_least: int = 0,
    ) -> Total:
        """Return the sum over the nodes that answer.

        Parameters
        ----------
        nodes : sequence of int
            Whom to ask.
        ask : callable
            Puts the question into a message.
        sections : sequence of Section
            What a summand is made of.
        step : str
            Name of the exchange.
        at_least : int
            How many must be in the sum.

        Raises
        ------
        RoundFailedError
            If fewer are.
        """

        def send(receivers: Sequence[int], put: Put) -> list[Message]:
            def both(message: Message) -> None:
                ask(message.content)
                put(message)

            return self.backbones.collect(
                self.strategy, self.server_round, receivers, self.model, self.config, both, step
            )

        def check(content: RecordDict) -> None:
            self.backbones.refuse_lacking(content, next(iter(self.model.head)))

        return self.summing.total(
            self.strategy,
            self.server_round,
            nodes,
            sections,
            send,
            check=check,
            at_least=at_least,
            step=step,
        )
