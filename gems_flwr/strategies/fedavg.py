"""Federated averaging (McMahan et al., 2017): Flower's FedAvg on the shared round loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg as FlowersFedAvg

from gems_flwr.errors import OptionError
from gems_flwr.server.exchange import Answer
from gems_flwr.server.model_averaging import AveragesReplies
from gems_flwr.server.reply_metrics import comparable_contents
from gems_flwr.server.settings import Need
from gems_flwr.wire.keys import ARRAYS, CONFIG, NUM_EXAMPLES, TRAIN
from gems_flwr.wire.model_replies import MetricsReply, ModelReply, RecordKeys

# Gets the replies and the name of the metric that they are weighted by.
MergeMetrics = Callable[[list[RecordDict], str], MetricRecord]


@dataclass(eq=False)
class FedAvg(AveragesReplies, FlowersFedAvg):
    """Average the models of a fraction of the nodes, round after round, as Flower's FedAvg does.

    The options before ``*`` are Flower's, in its order and with its defaults; so are the four
    methods that a subclass or a wrapper may call. On the same replies in the same order the
    result equals Flower's bit for bit, except that integer arrays stay integers; with `robust`
    that of Flower's FedMedian, FedTrimmedAvg, Krum, MultiKrum or Bulyan (see
    `averaging.robust_rules` for what differs). What differs on purpose stands in
    ``docs/deployment.md``.

    Parameters
    ----------
    fraction_train : float, default 1.0
        Share of the connected nodes that train in a round, in [0, 1]: McMahan's C. 0 sends no
        train messages and keeps the model.
    fraction_evaluate : float, default 1.0
        Share of the nodes that score the new model on their own data after each round, in
        [0, 1]. It costs as many bytes down as training does; 0 sends nothing.
    min_train_nodes, min_evaluate_nodes : int, default 2
        Fewest nodes that are chosen, whatever the fraction.
    min_available_nodes : int, default 2
        Fewest nodes that must be connected.
    weighted_by_key : str, default "num-examples"
        The metric by which models and metrics are weighted.
    arrayrecord_key, configrecord_key : str, default "arrays" and "config"
        What the records in messages are called; in replies they may have any name.
    train_metrics_aggr_fn, evaluate_metrics_aggr_fn : callable, optional
        Gets the replies as a list of RecordDict, and `weighted_by_key`; returns the MetricRecord of
        the round. By default Flower's weighted mean, of lists number by number.
    min_nodes : int, default 1
        Fewest usable replies to training that a round may end with, at least 1.
    weighted : bool, default True
        Whether a node's model counts by `weighted_by_key`, or all count the same.
    **averaging
        See `AveragesModels` and `LoopSettings`, keywords all.

    Examples
    --------
    Nodes whose training adds their number to each weight:

    >>> import numpy as np
    >>> from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    >>> from flwr.clientapp import ClientApp
    >>> from gems_flwr import FedAvg, InProcessGrid
    >>> app = ClientApp()
    >>> @app.train()
    ... def train(message, context):
    ...     [w] = message.content["arrays"].to_numpy_ndarrays()
    ...     arrays = ArrayRecord([w + context.node_config["partition-id"]])
    ...     metrics = MetricRecord({"num-examples": 1})
    ...     return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
    >>> strategy = FedAvg(fraction_evaluate=0.0, min_nodes=3, seed=1)
    >>> grid = InProcessGrid(app, nodes=3)
    >>> result = strategy.start(grid, ArrayRecord([np.zeros(2)]), num_rounds=2)
    >>> result.arrays.to_numpy_ndarrays()
    [array([2., 2.])]
    >>> result.traffic.messages_up
    6
    """

    fraction_train: float = 1.0
    fraction_evaluate: float = 1.0
    min_train_nodes: int = 2
    min_evaluate_nodes: int = 2
    min_available_nodes: int = 2
    weighted_by_key: str = NUM_EXAMPLES
    arrayrecord_key: str = ARRAYS
    configrecord_key: str = CONFIG
    train_metrics_aggr_fn: MergeMetrics | None = None  # type: ignore[assignment]
    evaluate_metrics_aggr_fn: MergeMetrics | None = None  # type: ignore[assignment]
    _: KW_ONLY
    min_nodes: int = 1

    plays_in_other_loops: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("min_train_nodes", "min_evaluate_nodes", "min_available_nodes"):
            if getattr(self, name) < 0:
                raise OptionError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.arrayrecord_key == self.configrecord_key:
            raise OptionError(
                f"arrayrecord_key and configrecord_key must differ, both are "
                f"'{self.arrayrecord_key}'"
            )
        own = self.train_metrics_aggr_fn or self.evaluate_metrics_aggr_fn
        if self.secure is not None and own is not None:
            raise OptionError(
                "train_metrics_aggr_fn and evaluate_metrics_aggr_fn get the replies of single "
                "nodes, which secure sums hide: leave them out, metrics are averaged"
            )
        # Flower's own says what a fraction of 0 means, and has the functions for metrics.
        FlowersFedAvg.__init__(
            self,
            fraction_train=self.fraction_train,
            fraction_evaluate=self.fraction_evaluate,
            min_train_nodes=self.min_train_nodes,
            min_evaluate_nodes=self.min_evaluate_nodes,
            min_available_nodes=self.min_available_nodes,
            weighted_by_key=self.weighted_by_key,
            arrayrecord_key=self.arrayrecord_key,
            configrecord_key=self.configrecord_key,
            train_metrics_aggr_fn=self.train_metrics_aggr_fn,
            evaluate_metrics_aggr_fn=self.evaluate_metrics_aggr_fn,
        )

    @property
    def record_keys(self) -> RecordKeys:
        """What the records in messages are called, and the metric that replies are weighted by."""
        return RecordKeys(self.arrayrecord_key, self.configrecord_key, self.weighted_by_key)

    def sample_size(self, connected: int, fraction: float, purpose: str) -> int:
        """Return how many nodes Flower would choose, and no fewer than must answer."""
        if fraction == 0:
            return 0
        least = self.min_train_nodes if purpose == TRAIN else self.min_evaluate_nodes
        size = max(int(connected * fraction), least)
        return max(size, self.min_nodes) if size and purpose == TRAIN else size

    def nodes_needed(self, purpose: str) -> Need:
        """Return how many nodes Flower would wait for, and no fewer than must answer."""
        training = purpose == TRAIN
        if (self.fraction_train if training else self.fraction_evaluate) == 0:
            return Need(0, "min_available_nodes")
        least = "min_train_nodes" if training else "min_evaluate_nodes"
        options = ["min_available_nodes", least, *(["min_nodes"] if training else [])]
        return max((Need(getattr(self, name), name) for name in options), key=lambda n: n.nodes)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Validate the replies, leave out the bad ones, average the rest."""
        replies = list(replies)
        if not replies and not self._exchange.asked:
            return None, None  # nobody was to train
        return super().aggregate_train(server_round, replies)

    def merge_metrics(
        self, answers: Sequence[Answer[ModelReply] | Answer[MetricsReply]], purpose: str
    ) -> MetricRecord:
        """Return what the function for metrics makes of the replies."""
        training = purpose == TRAIN
        merge = self.train_metrics_aggr_fn if training else self.evaluate_metrics_aggr_fn
        flowers = FlowersFedAvg().train_metrics_aggr_fn
        merge = merge or flowers
        contents = comparable_contents(
            answers, self.weighted_by_key, equal_lengths=merge is flowers
        )
        return merge(contents, self.weighted_by_key)
