"""One round of merging trained models by something better than their average.

The peers of one-round GEMS, under its conditions: one message to every node and one back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, get_args

import numpy as np
from flwr.app import ArrayRecord, RecordDict
from numpy.typing import NDArray

from gems_flwr.bounds import MAX_MOMENT
from gems_flwr.core.question import ON_SERVER, Disclosure, Group, Question
from gems_flwr.core.records import (
    ARRAYS,
    TRAIN,
    ModelReply,
    checked_array,
    largest,
    to_record,
    unpack_model_reply,
)
from gems_flwr.core.round import Round
from gems_flwr.core.run import RoundOutcome, ServerState
from gems_flwr.devices import check_device
from gems_flwr.errors import BadReplyError, OptionError
from gems_flwr.merging import (
    NEEDED,
    SHRINK,
    Kind,
    Method,
    Statistics,
    check_layers,
    check_statistics,
    measure_statistics,
    merge_models,
    statistics_shapes,
)
from gems_flwr.networks import count_samples
from gems_flwr.strategies.loop import RoundLoop
from gems_flwr.typing import Arrays

if TYPE_CHECKING:
    from gems_flwr.node import Node

STATISTICS = "statistics"
_SINGLE = np.dtype(np.float32)


@dataclass(frozen=True)
class MergeReply(ModelReply):
    """A trained model, and the statistics by which it is merged with others."""

    statistics: Statistics = field(default_factory=dict, kw_only=True)


@dataclass(frozen=True)
class MergeStatistics(Question[MergeReply]):
    """What is your trained model, and by what is it merged with others?

    Symmetric matrices travel as their upper halves, all in single precision, one array
    ``<weight>/<kind>`` each.
    """

    kind: ClassVar[str] = STATISTICS

    method: Method
    # The model that was sent out.
    sent: Arrays = field(
        default_factory=dict, kw_only=True, repr=False, compare=False, metadata=ON_SERVER
    )

    def __post_init__(self) -> None:
        methods = list(get_args(Method))
        self.check({"method": (self.method in methods, f"one of {methods}")})

    @property
    def statistic(self) -> Kind:
        """What a node measures on its data."""
        return NEEDED[self.method]

    # --- on the node --------------------------------------------------------------------------

    def discloses(self, node: Node) -> Disclosure:
        """Return that it is the second moments of all inputs of the widest layer, if any."""
        widest = max(layer.dimension for layer in check_layers(node.model))
        if self.statistic != "inputs":
            return Disclosure("second moments", widest, adaptive=1)
        group = Group("all samples", count_samples(node.data("train")), widest)
        return Disclosure("second moments", widest, (group,), adaptive=1)

    def answer(self, node: Node) -> RecordDict:
        """Let the handler train; return its model and the statistics on the training data."""
        trained = node.train()
        statistics = measure_statistics(
            self.statistic,
            trained,
            node.data("train"),
            model=None if node.options.model is None else node.module(),
            device=node.device,
        )
        packed = {
            f"{weight}/{self.statistic}": (
                array[np.triu_indices(len(array))] if self.statistic == "inputs" else array
            ).astype(np.float32)
            for weight, array in statistics.items()
        }
        return RecordDict({ARRAYS: to_record(trained), STATISTICS: to_record(packed)})

    # --- on the server ------------------------------------------------------------------------

    def read(self, content: RecordDict) -> MergeReply:
        """Return the model, and statistics that some data can have."""
        rest = RecordDict({key: each for key, each in content.items() if key != STATISTICS})
        model = unpack_model_reply(rest, self.sent)
        shapes = statistics_shapes(self.statistic, self.sent)
        names = {f"{weight}/{self.statistic}": weight for weight in shapes}
        record = content.get(STATISTICS)
        if not isinstance(record, ArrayRecord) or record.keys() != names.keys():
            raise BadReplyError(f"expected an ArrayRecord '{STATISTICS}' with {sorted(names)}")
        statistics: Statistics = {
            weight: _full(record, key, shapes[weight], self.statistic == "inputs")
            for key, weight in names.items()
        }
        try:
            check_statistics(self.statistic, statistics)
        except ValueError as error:
            raise BadReplyError(str(error)) from error
        return MergeReply(model.arrays, model.num_examples, model.metrics, statistics=statistics)


def _full(record: ArrayRecord, key: str, shape: tuple[int, int], is_symmetric: bool) -> NDArray:
    rows, columns = np.triu_indices(shape[0])
    found = checked_array(record[key], key, rows.shape if is_symmetric else shape, _SINGLE)
    if largest(found) > MAX_MOMENT:
        raise BadReplyError(f"array '{key}' holds mean squares above {MAX_MOMENT:g}")
    if not is_symmetric:
        return found
    full = np.zeros(shape, np.float32)
    full[rows, columns] = full[columns, rows] = found
    return full


@dataclass(kw_only=True, eq=False)
class MergedModels(RoundLoop):
    """Let every node train to the end, then merge the models once.

    Parameters
    ----------
    method : {"regmean", "fisher"}
        See `gems_flwr.merging`. All take chains of linear and convolutional layers.
    shrink : float, default 0.9
        Of regmean: factor of the off-diagonal entries of Gram matrices, in [0, 1].
    weighted : bool, default True
        Whether a node counts by its number of examples, or all count the same.
    device : str, default "cpu"
        Where the server computes; see `gems_flwr.good_enough_mod`.
    **loop
        See `RoundLoop`.

    Examples
    --------
    >>> from gems_flwr import MergedModels
    >>> strategy = MergedModels(method="fisher")
    """

    needs_classes: ClassVar[bool] = True
    rounds_needed: ClassVar[int | None] = 1
    mod_needed: ClassVar[str] = "good_enough_mod(data, model=Net)"

    method: Method = "regmean"
    shrink: float = SHRINK
    weighted: bool = True
    device: str = "cpu"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_device(self.device)
        MergeStatistics(self.method)
        if not 0 <= self.shrink <= 1:
            raise OptionError(f"shrink must be in [0, 1], got {self.shrink}")

    def prepare(self, initial: Arrays, num_rounds: int) -> None:
        """Refuse a model that cannot be merged before any node trains it."""
        check_layers(initial)

    def play_round(self, round: Round, state: ServerState) -> RoundOutcome:
        """Ask for models and statistics, and merge."""
        question = MergeStatistics(self.method, sent=state.arrays)
        nodes = round.sample(self.fraction_train)
        answers = round.ask(question, nodes, at_least=self.min_nodes)
        models = answers.values()
        merged = merge_models(
            self.method,
            [model.arrays for model in models],
            [model.statistics for model in models],
            [model.num_examples if self.weighted else 1.0 for model in models],
            shrink=self.shrink,
            device=self.device,
        )
        details = {"method": self.method}
        return RoundOutcome(
            merged, train_metrics=self.merge_metrics(answers, TRAIN), details=details
        )
