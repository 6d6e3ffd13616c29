"""Any strategy of Flower's on this library's round loop.

FedAdam, FedAvgM, FedProx and the others are Flower's own: they choose the nodes, write the messages
and aggregate. What comes from here is the loop around them: counted bytes, replies that are checked
one by one and summed in the order of the nodes' names, stop rules, checkpoints and `resume`.
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

from gems_flwr.server.exchange import Answer
from gems_flwr.server.loop import RoundLoop
from gems_flwr.server.state import RoundOutcome, ServerState
from gems_flwr.typing import Arrays
from gems_flwr.wire.keys import ARRAYS, RUN_SEED
from gems_flwr.wire.model_replies import USUAL_KEYS, ModelReply, RecordKeys
from gems_flwr.wire.records import to_numpy, to_record

# Between the parts of a name in the memory: attribute, kind of container, key.
_BETWEEN = "|"


@dataclass(kw_only=True, eq=False)
class FlowerStrategy(RoundLoop):
    """Play the rounds of a strategy of Flower's.

    On the same replies in the same order the result is that of the strategy by itself. Nodes get,
    beside what the strategy sends, the run's seed. With a fraction of the nodes it is Flower that
    chooses them, by Python's own generator, so two such runs differ.

    Parameters
    ----------
    inner : Strategy
        Such as ``flwr.serverapp.strategy.FedAdam(eta=0.01)``. It belongs to this run: arrays that
        it keeps from round to round (momentum, second moments) go into the checkpoint.
    **loop
        See `RoundLoop`. `fraction_train` and `fraction_evaluate` are those of `inner`.

    Examples
    --------
    Nodes whose training adds their number to each weight, and a server with momentum:

    >>> import numpy as np
    >>> from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    >>> from flwr.clientapp import ClientApp
    >>> from flwr.serverapp.strategy import FedAvgM
    >>> from gems_flwr import FlowerStrategy, InProcessGrid
    >>> app = ClientApp()
    >>> @app.train()
    ... def train(message, context):
    ...     [w] = message.content["arrays"].to_numpy_ndarrays()
    ...     arrays = ArrayRecord([w + context.node_config["partition-id"]])
    ...     metrics = MetricRecord({"num-examples": 1})
    ...     return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
    >>> strategy = FlowerStrategy(inner=FedAvgM(fraction_evaluate=0.0, server_momentum=0.5))
    >>> result = strategy.start(InProcessGrid(app, nodes=3), ArrayRecord([np.zeros(2)]), 2)
    >>> result.arrays.to_numpy_ndarrays(), result.traffic.messages_up
    ([array([2.5, 2.5])], 6)
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

    def play_round(
        self,
        server_round: int,
        state: ServerState,
        grid: Grid,
        train_config: ConfigRecord,
        evaluate_config: ConfigRecord,
    ) -> RoundOutcome:
        """Play one round, with what the strategy knew after the last one."""
        recall(self.inner, state.memory)
        outcome = super().play_round(server_round, state, grid, train_config, evaluate_config)
        return dataclasses.replace(outcome, memory=memory_of(self.inner))

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return what the strategy sends, with the run's seed."""
        if not self._is_playing:
            self._join_another_loop(server_round)
        config[RUN_SEED] = self.seed
        return _of_round(
            server_round, self.inner.configure_train(server_round, arrays, config, grid)
        )

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Let the strategy aggregate the replies that can be used, ordered by node name."""
        replies = list(replies)
        if not replies and not self._exchange.asked:
            return None, None  # nobody was to train
        answers = self.accept(replies, self._unpack_model, at_least=self.min_nodes)
        return self.inner.aggregate_train(server_round, self._usable(replies, answers))

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
        """Let the strategy aggregate what nodes tell."""
        return self.inner.aggregate_evaluate(server_round, list(replies))

    def _usable(
        self, replies: list[Message], answers: Iterable[Answer[ModelReply]]
    ) -> list[Message]:
        by_name = {self._nodes.name(reply.metadata.src_node_id): reply for reply in replies}
        return [by_name[answer.node] for answer in answers]


def _of_round(server_round: int, messages: Iterable[Message]) -> list[Message]:
    """Return messages that say which round they belong to, where Flower's own do not."""
    return [
        Message(
            message.content,
            dst_node_id=message.metadata.dst_node_id,
            message_type=message.metadata.message_type,
            group_id=str(server_round),
        )
        for message in messages
    ]


def memory_of(strategy: Strategy) -> Arrays:
    """Return the arrays that a strategy keeps in its attributes, by name.

    Parameters
    ----------
    strategy : Strategy
        Records, lists and dicts of arrays among its attributes count; anything else is an option.
    """
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
            for key, array in items.items():
                memory[_BETWEEN.join((attribute, kind, key))] = np.asarray(array)
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
