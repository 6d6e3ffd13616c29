"""Listeners of the round loop: progress bars, loggers, anything that only watches."""

from __future__ import annotations

from gems_flwr.strategies.records import RoundRecord, RunResult


class Callback:
    """Override what you want to hear about; every method does nothing by default."""

    def on_start(self, strategy: str, num_rounds: int, finished_rounds: int) -> None:
        """Hear that a run begins, or goes on after `finished_rounds`."""

    def on_exchange(self, server_round: int, nodes: int) -> None:
        """Hear that `nodes` messages are about to be sent."""

    def on_reply(self, server_round: int, node: str, usable: bool) -> None:
        """Hear that a node has answered."""

    def on_round_end(self, record: RoundRecord) -> None:
        """Hear that a round is done and its checkpoint written."""

    def on_end(self, result: RunResult) -> None:
        """Hear that the run is done."""
