"""Any strategy of Flower's on this library's round loop.

FedAdam, FedAvgM, FedProx and the others choose the nodes, write the messages and aggregate. What
comes from here is the loop around them: counted bytes, replies that are checked one by one and
summed in the order of the nodes' names, stop rules, checkpoints and `resume`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from gems_flwr.core.records import ARRAYS, RUN_SEED, USUAL_KEYS, RecordKeys, to_numpy, to_record
from gems_flwr.core.round import Round
from gems_flwr.core.run import RoundOutcome, ServerState
from gems_flwr.strategies.averaging import PacksModels
from gems_flwr.typing import Arrays

_BETWEEN = "|"  # between the parts of a name in the memory: attribute, kind of container, key


@dataclass(kw_only=True, eq=False)
class FlowerStrategy(PacksModels):
    """Play the rounds of a strategy of Flower's.

    On the same replies in the same order the result is that of the strategy by itself. Nodes get,
    beside what the strategy sends, the run's seed. With a fraction of the nodes it is Flower that
    chooses them, by Python's own generator, so two such runs differ.

    Parameters
    ----------
    inner : Strategy
        Such as ``flwr.serverapp.strategy.FedAdam(eta=0.01)``. It belongs to this run: arrays that
        it keeps from round to round (momentum, second moments) go into the checkpoint.
    **packing
        See `PacksModels` and `RoundLoop`. `fraction_train` and `fraction_evaluate` are those of
        `inner`.

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedAvgM
    >>> from gems_flwr import FlowerStrategy
    >>> strategy = FlowerStrategy(inner=FedAvgM(server_momentum=0.5), compress="int8", seed=1)
    """

    inner: Strategy

    @property
    def _name(self) -> str:
        return type(self.inner).__name__

    @property
    def record_keys(self) -> RecordKeys:
        """What the strategy's own messages call the model."""
        return dataclasses.replace(
            USUAL_KEYS, arrays=str(getattr(self.inner, "arrayrecord_key", ARRAYS))
        )

    def summary(self) -> None:
        """Log the settings of both."""
        super().summary()
        self.inner.summary()

    def prepare(self, initial: Arrays, num_rounds: int) -> None:
        """Note what models look like: FedAdam's own become double precision, the nodes' do not."""
        self._template = initial

    def play_round(self, round: Round, state: ServerState) -> RoundOutcome:
        """Play one round, with what the strategy knew after the last one."""
        recall(self.inner, state.memory)
        outcome = super().play_round(round, state)
        return dataclasses.replace(outcome, memory=memory_of(self.inner))

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return what the strategy sends, with the run's seed."""
        self._current(server_round)  # refuses another strategy's loop
        config[RUN_SEED] = self.seed
        return _of_round(
            server_round, self.inner.configure_train(server_round, arrays, config, grid)
        )

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Let the strategy aggregate the replies that can be used, ordered by node name."""
        replies = list(replies)
        round = self._current(server_round)
        if not replies and not round.asked:
            return None, None  # no node was to train
        usable = round.accept(replies, self._read_model, at_least=self.min_nodes)
        by_name = {round.nodes.name(reply.metadata.src_node_id): reply for reply in replies}
        return self.inner.aggregate_train(server_round, [by_name[name] for name in usable])

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return what the strategy sends."""
        return _of_round(
            server_round, self.inner.configure_evaluate(server_round, arrays, config, grid)
        )

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Let the strategy aggregate what nodes report."""
        return self.inner.aggregate_evaluate(server_round, list(replies))


def _of_round(server_round: int, messages: Iterable[Message]) -> list[Message]:
    """Return messages that say which round they belong to, where Flower's own do not."""
    group = str(server_round)
    return [
        Message(m.content, m.metadata.dst_node_id, m.metadata.message_type, group_id=group)
        for m in messages
    ]


def memory_of(strategy: Strategy) -> Arrays:
    """Return the arrays among a strategy's attributes, in records, lists and dicts."""
    memory: dict[str, NDArray] = {}
    for attribute, value in vars(strategy).items():
        items: Mapping[str, object]
        if isinstance(value, ArrayRecord):
            kind, items = "record", to_numpy(value)
        elif isinstance(value, dict):
            kind, items = "dict", value
        elif isinstance(value, list):
            kind, items = "list", {str(index): each for index, each in enumerate(value)}
        else:
            continue
        if all(isinstance(each, np.ndarray | np.generic) for each in items.values()):
            names = (_BETWEEN.join((attribute, kind, key)) for key in items)
            memory.update(zip(names, map(np.asarray, items.values()), strict=True))
    return memory


def recall(strategy: Strategy, memory: Arrays) -> None:
    """Put the arrays that `memory_of` returned back into a strategy's attributes."""
    found: dict[tuple[str, str], dict[str, np.ndarray]] = {}
    for name, array in memory.items():
        attribute, kind, key = name.split(_BETWEEN, 2)
        found.setdefault((attribute, kind), {})[key] = array
    for (attribute, kind), items in found.items():
        value: object = items
        if kind == "record":
            value = to_record(items)
        elif kind == "list":
            value = [items[str(index)] for index in range(len(items))]
        setattr(strategy, attribute, value)
