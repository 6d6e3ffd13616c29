"""Federated averaging (McMahan et al., 2017): Flower's FedAvg on the shared round loop."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg as FlowersFedAvg

from gems_flwr.averaging import metric_form
from gems_flwr.core.log import log_warning
from gems_flwr.core.records import (
    ARRAYS,
    CONFIG,
    NUM_EXAMPLES,
    TRAIN,
    MetricsReply,
    ModelReply,
    RecordKeys,
    records_of,
)
from gems_flwr.errors import OptionError
from gems_flwr.strategies.averaging import AveragesReplies

# Gets the replies and the name of the metric that they are weighted by.
MergeMetrics = Callable[[list[RecordDict], str], MetricRecord]
_FLOWERS_OPTIONS = tuple(inspect.signature(FlowersFedAvg).parameters)
_FLOWERS_MEAN = FlowersFedAvg().train_metrics_aggr_fn


@dataclass(eq=False)
class FedAvg(AveragesReplies, FlowersFedAvg):
    """Average the models of a fraction of the nodes, round after round, as Flower's FedAvg does.

    The options before ``*`` are Flower's, in its order and with its defaults; so are the four
    methods that a subclass or a wrapper may call. On the same replies in the same order the
    result equals Flower's bit for bit, except that integer arrays stay integers; with `robust`
    that of Flower's FedMedian, FedTrimmedAvg, Krum, MultiKrum or Bulyan (see
    `gems_flwr.averaging.robust`). What differs on purpose stands in ``docs/deployment.md``.

    Parameters
    ----------
    fraction_train : float, default 1.0
        Share of the connected nodes that train in a round, in [0, 1]: McMahan's C. 0 sends no
        train messages and keeps the model.
    fraction_evaluate : float, default 1.0
        Share of the nodes that score the new model on their own data, in [0, 1]. It costs as many
        bytes down as training does; 0 sends nothing.
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
    **averaging
        See `AveragesModels` and `RoundLoop`, keywords all.

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
    >>> result.arrays.to_numpy_ndarrays(), result.traffic.messages_up
    ([array([2., 2.])], 6)
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
        FlowersFedAvg.__init__(self, **{name: getattr(self, name) for name in _FLOWERS_OPTIONS})

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

    def nodes_needed(self, purpose: str) -> tuple[int, str]:
        """Return how many nodes Flower would wait for, and no fewer than must answer."""
        training = purpose == TRAIN
        if (self.fraction_train if training else self.fraction_evaluate) == 0:
            return 0, "min_available_nodes"
        least = "min_train_nodes" if training else "min_evaluate_nodes"
        options = ["min_available_nodes", least, *(["min_nodes"] if training else [])]
        option = max(options, key=lambda name: int(getattr(self, name)))
        return getattr(self, option), option

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check the replies, leave out the bad ones, average the rest."""
        replies = list(replies)
        if not replies and not self._current(server_round).asked:
            return None, None  # no node was to train
        return super().aggregate_train(server_round, replies)

    def merge_metrics(
        self, replies: Mapping[str, ModelReply] | Mapping[str, MetricsReply], purpose: str
    ) -> MetricRecord:
        """Return what the function for metrics makes of the replies.

        It gets whole replies. Flower ends the run if nodes do not all report the same metrics, and
        its own mean if lists are of different lengths; here such metrics are left out, and the
        reply says so where the run lets a node count for less than it claims.
        """
        training, key = purpose == TRAIN, self.weighted_by_key
        merge = self.train_metrics_aggr_fn if training else self.evaluate_metrics_aggr_fn
        assert merge is not None
        left_out = _left_out(replies, is_mean=merge is _FLOWERS_MEAN)
        contents = []
        for reply in replies.values():
            content, weight = reply.content, reply.num_examples
            assert content is not None
            [(name, record)] = records_of(content, MetricRecord).items()
            if left_out or record[key] != weight:
                kept = {k: v for k, v in record.items() if k not in left_out}
                content = RecordDict(dict(content))
                content[name] = MetricRecord({**kept, key: weight})
            contents.append(content)
        return merge(contents, key)


def _left_out(
    replies: Mapping[str, ModelReply] | Mapping[str, MetricsReply], *, is_mean: bool
) -> set[str]:
    """Return the metrics that not all nodes have in one form, and log who differs from most."""
    left_out, odd = dict[str, None](), dict[str, None]()
    for key in dict.fromkeys(key for reply in replies.values() for key in reply.metrics):
        values = {node: reply.metrics.get(key) for node, reply in replies.items()}
        # Any lists will do for a function of the user's own.
        forms = {
            node: metric_form(value) if is_mean or not isinstance(value, list) else "a list"
            for node, value in values.items()
        }
        [(usual, count)] = Counter(forms.values()).most_common(1)
        if count < len(forms):
            left_out[key] = None
            odd |= dict.fromkeys(node for node, form in forms.items() if form != usual)
    if left_out:
        log_warning(
            "metrics_left_out",
            metrics=", ".join(left_out),
            nodes=", ".join(odd),
            reason="not all nodes report them in one form",
        )
    return set(left_out)
