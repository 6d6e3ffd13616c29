"""What strategies share whose nodes send models: the mean, and whom a robust rule leaves out.

With `secure` the server sees only the sum of the models: `ModelSum` asks for w · (trained - sent)
for every array, w itself, and w times the metrics, in fixed point, where w is the number of
examples as a part of the largest that counts. The mean is the quotient of the sums. Floating-point
arrays move by no more than a clip, or the node refuses; whole numbers (counters of batches) have a
ring of 64 bits. Metrics fill a fixed number of places in the order of their names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from gems_flwr.averaging import Combined, RobustKind, RobustRule, combine, mean_metrics
from gems_flwr.bounds import MAX_EXAMPLES
from gems_flwr.carriers import PackedModels
from gems_flwr.compression import Form, check_form
from gems_flwr.core import records as wire
from gems_flwr.core.log import log_event, log_warning
from gems_flwr.core.question import Disclosure, SumQuestion
from gems_flwr.core.round import Carrier, Round
from gems_flwr.core.run import RoundOutcome, ServerState
from gems_flwr.core.sums import Total
from gems_flwr.errors import (
    BadReplyError,
    CheckpointError,
    OptionError,
    RoundFailedError,
    SecureSumError,
)
from gems_flwr.secure.fixed_point import Section
from gems_flwr.strategies.loop import RoundLoop
from gems_flwr.typing import Arrays, Float, Metrics

if TYPE_CHECKING:
    from gems_flwr.node import Node

_ACCOUNT = "robust"
MAX_METRICS = 16
# Losses, accuracies, seconds: what is larger is not sent.
LARGEST_METRIC = 1e6
_LARGEST_WHOLE = 2.0**40
_WEIGHT, _METRICS, _ARRAY, _NAMES = "weight", "metrics", "array/", "metric-names"


@dataclass(kw_only=True, eq=False)
class PacksModels(RoundLoop):
    """Base of the strategies whose nodes get and send models.

    Parameters
    ----------
    compress : {"float32", "int8", "int4"}
        How models travel, in both directions. ``float32``: as they are. Otherwise as differences to
        what the receiver has, rounded to so many bits and deflated; the rounding error is added
        to the next message (`gems_flwr.compression`).
    **loop
        See `RoundLoop`.
    """

    compress: Form = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_form(self.compress)

    def carriers(self) -> Sequence[Carrier]:
        """Return the carrier that packs models, if they are to be packed."""
        if self.compress == "float32":
            return ()
        return (PackedModels(self.compress, self.record_keys.arrays),)


@dataclass(kw_only=True, eq=False)
class AveragesModels(PacksModels):
    """Base of the strategies that average models.

    Parameters
    ----------
    robust : str or RobustRule, default "none"
        What models are replaced by: ``none`` (the mean), ``median``, ``trimmed_mean``,
        ``geometric_median`` or ``multi_krum``, or a `RobustRule` that also
        says how many nodes may lie, and how much is trimmed.
    **packing
        See `PacksModels`.
    """

    sums_replies: ClassVar[bool] = True

    robust: RobustKind | RobustRule = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = self.robust
        self.rule = rule if isinstance(rule, RobustRule) else RobustRule(rule)
        if self.secure is not None and self.rule.is_on:
            raise OptionError(
                f"robust='{self.rule.kind}' compares the models of single nodes, which secure sums "
                "hide; take one of the two"
            )
        if self.secure is not None and self.compress != "float32":
            raise OptionError(
                f"compress={self.compress!r} rounds what a single node sends, and a secure sum has "
                "bits of its own (SecureSum(bits=…)); take one of the two"
            )


@dataclass
class Outvoted:
    """Whom a rule has left out so far; goes into the run's details under ``robust``."""

    # How many means were made, and of these not by the rule, for which there were too few models.
    averagings: int = 0
    too_few: int = 0
    # How often the rule did not choose a node's model, where it chooses.
    times_left_out: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def from_details(cls, details: Mapping[str, Any]) -> Outvoted:
        """Return the account that a run's details hold."""
        with checkpoint_faults("the details"):
            return cls(**details.get(_ACCOUNT, {}))

    def add(self, number: int, rule: RobustRule, mean: Combined, nodes: Sequence[str]) -> None:
        """Add one more mean, of the models of `nodes`, in round `number`; log what is new."""
        if not rule.is_on:
            return
        too_few = not mean.checked or mean.applied != rule.kind
        if too_few and not self.too_few:
            instead = "the median stands in" if mean.checked else "none can be outvoted"
            reason = f"too few models for {rule.kind}, {instead}"
            log_warning("unchecked", round=number, reason=reason)
        if left_out := [nodes[index] for index in mean.left_out]:
            log_event("outvoted", round=number, nodes=",".join(left_out))
        self.averagings += 1
        self.too_few += too_few
        self.times_left_out = dict(Counter(self.times_left_out) + Counter(left_out))

    def to_details(self, rule: RobustRule) -> dict[str, Any]:
        """Return what a result says of it; nothing where models are simply averaged."""
        if not rule.is_on:
            return {}
        chose, of = f"{rule.kind} chose other models in", f"of {self.averagings} averagings"
        reasons = {node: f"{chose} {n} {of}" for node, n in self.times_left_out.items()}
        return {_ACCOUNT: dict(vars(self)), "left_out": reasons}


@dataclass(kw_only=True, eq=False)
class AveragesReplies(AveragesModels):
    """Base of the strategies that average the models of a round's replies."""

    # Whether a node counts by its number of examples, or all count the same.
    weighted: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._outvoted = Outvoted()

    def play_round(self, round: Round, state: ServerState) -> RoundOutcome:
        """Play one round, and report whom the rule did not believe."""
        if self.secure is None:
            self._outvoted = Outvoted.from_details(state.details)
            outcome = super().play_round(round, state)
            return dataclasses.replace(outcome, details=self._outvoted.to_details(self.rule))
        nodes = self._chosen(round, round.grid, self.fraction_train, wire.TRAIN)
        if not nodes:
            return RoundOutcome(arrays=state.arrays)
        question = ModelSum(
            most_examples=self.tolerance.max_examples or ModelSum.most_examples,
            weighted=self.weighted,
            weight_key=self.record_keys.weight,
        )
        sections = model_sections(state.arrays, self.secure.clip, self.secure.bits)
        total = round.total(question, sections, nodes, at_least=self.min_nodes)
        mean = mean_of_total(total, state.arrays)
        return RoundOutcome(arrays=self.finished(mean), train_metrics=mean_metrics_of(total))

    def evaluate_metrics(self, round: Round, messages: Sequence[Message]) -> MetricRecord | None:
        """Send evaluate messages, and return what is made of the answers."""
        if self.secure is None or not messages:
            return super().evaluate_metrics(round, messages)
        nodes = [round.nodes.name(message.metadata.dst_node_id) for message in messages]
        question = MetricsSum(weight_key=self.record_keys.weight)
        try:
            total = round.total(question, model_sections({}, 1.0, 64), nodes)
        except RoundFailedError as error:
            # The model is there; what is missing is the nodes' evaluation of it.
            log_warning("not_evaluated", round=round.number, reason=str(error))
            return None
        return MetricRecord(dict(mean_metrics_of(total)))

    def finished(self, mean: Arrays) -> Arrays:
        """Return what becomes of a mean; by default it stays as it is."""
        return mean

    def aggregate(self, replies: Mapping[str, wire.ModelReply]) -> Arrays:
        """Return the (weighted) mean of the nodes' models, or what the rule makes of them."""
        weights = [reply.num_examples if self.weighted else 1.0 for reply in replies.values()]
        mean = combine(self.rule, [reply.arrays for reply in replies.values()], weights)
        number = self._round.number if self._round else 0
        self._outvoted.add(number, self.rule, mean, list(replies))
        return self.finished(mean.arrays)


# --- models as sums -------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelSum(SumQuestion):
    """What is the weighted sum of the trained models, as steps from the one that was sent?"""

    kind: ClassVar[str] = "model-sum"

    # Examples that count as weight 1; a node with more counts as that many.
    most_examples: float = 2.0**24
    # Whether nodes count by their examples, or all the same; and the metric that has the number.
    weighted: bool = True
    weight_key: str = wire.NUM_EXAMPLES

    def __post_init__(self) -> None:
        allowed = 0 < self.most_examples <= MAX_EXAMPLES
        self.check({"most_examples": (allowed, f"above 0 and at most {MAX_EXAMPLES:g}")})

    def discloses(self, node: Node) -> Disclosure:
        """A trained model, under masks or not."""
        return Disclosure("model", masked_with=node.masked_with)

    def summand(self, node: Node) -> dict[str, Float]:
        """Let the handler train; return the model's step, its weight and its metrics."""
        sent, content = node.model, node.call_handler()
        with unusable_answers():
            reply = wire.unpack_model_reply(content, sent, self.weight_key)
        return self.weighted_step(node, reply, reply.arrays, sent)

    def weighted_step(
        self, node: Node, reply: wire.ModelReply | wire.MetricsReply, trained: Arrays, sent: Arrays
    ) -> dict[str, Float]:
        """Return the sections of a summand; the names of the metrics go beside it."""
        weight = min(1.0, reply.num_examples / self.most_examples) if self.weighted else 1.0
        bounds = {s.name: s.bound for s in node.layout.sections} if node.layout else {}
        values: dict[str, Float] = {}
        for key, array in trained.items():
            step = array.astype(np.float64) - sent[key]
            most = bounds.get(_ARRAY + key, 0.0)
            if (moved := float(np.abs(step).max(initial=0.0))) > most:
                # A refusal would tell the server how far.
                what = f"training moved '{key}' by {moved:g}, and the ring holds {most:g}"
                log_warning("clipped", node=node.name, reason=what)
            values[_ARRAY + key] = weight * np.clip(step, -most, most)
        # Only single, finite numbers can be sent, so many of them, and in the order of their names.
        metrics = [
            (key, float(value))
            for key, value in sorted(reply.metrics.items())
            if not isinstance(value, list) and math.isfinite(value) and abs(value) <= LARGEST_METRIC
        ][:MAX_METRICS]
        places = np.zeros(MAX_METRICS)
        places[: len(metrics)] = [weight * value for _, value in metrics]
        if metrics:
            node.beside[_NAMES] = ConfigRecord({_NAMES: [key for key, _ in metrics]})
        return {**values, _WEIGHT: np.array(weight), _METRICS: places}

    def note(self, content: RecordDict) -> tuple[str, ...]:
        """Return the names of metrics beside a summand; none if they cannot be used."""
        record = content.get(_NAMES)
        names = record.get(_NAMES) if isinstance(record, ConfigRecord) else None
        if not isinstance(names, list) or len(names) > MAX_METRICS:
            return ()
        fine = all(isinstance(name, str) and 0 < len(name) <= 100 for name in names)
        return tuple(map(str, names)) if fine else ()


@dataclass(frozen=True)
class MetricsSum(ModelSum):
    """What is the weighted sum of the metrics of the nodes' evaluate handlers?"""

    kind: ClassVar[str] = "metrics-sum"
    message_type: ClassVar[str] = wire.EVALUATE

    def discloses(self, node: Node) -> Disclosure:
        """How good a model is on the node's data."""
        return Disclosure("score", masked_with=node.masked_with)

    def summand(self, node: Node) -> dict[str, Float]:
        """Let the handler evaluate; return its metrics, weighted."""
        content = node.call_handler()
        with unusable_answers():
            reply = wire.unpack_metrics_reply(content, self.weight_key)
        return self.weighted_step(node, reply, {}, {})


@contextlib.contextmanager
def unusable_answers() -> Iterator[None]:
    """Let a node refuse to add up what its handler returned, if the server would leave it out."""
    try:
        yield
    except BadReplyError as error:
        raise SecureSumError(f"the handler's answer cannot be summed: {error}") from error


def model_sections(model: Arrays, clip: float, bits: int) -> list[Section]:
    """Return what a model's summand is made of, if no weight moves farther than `clip`."""
    arrays = [
        Section(_ARRAY + key, array.shape, clip, bits)
        if array.dtype.kind == "f"
        else Section(_ARRAY + key, array.shape, _LARGEST_WHOLE, 64)
        for key, array in model.items()
    ]
    metrics = Section(_METRICS, (MAX_METRICS,), LARGEST_METRIC, 64)
    return [*arrays, Section(_WEIGHT, (), 1.0, 64), metrics]


def mean_of_total(total: Total, model: Arrays) -> dict[str, NDArray]:
    """Return the weighted mean of the models whose summands add up to a total."""
    weight = float(total.values[_WEIGHT])
    if not weight > 0:
        raise OptionError("the weights of all nodes together are 0: lower most_examples")
    mean = {}
    for key, array in model.items():
        moved = array.astype(np.float64) + total.values[_ARRAY + key] / weight
        whole = array.dtype.kind != "f"
        mean[key] = np.asarray(np.rint(moved) if whole else moved).astype(array.dtype)
    return mean


def mean_metrics_of(total: Total) -> dict[str, float]:
    """Return the weighted means of the metrics, where all nodes have the same."""
    names = set(total.notes)
    if len(names) != 1:
        return {}
    values = total.values[_METRICS] / float(total.values[_WEIGHT])
    return {name: float(value) for name, value in zip(names.pop(), values, strict=False)}


def mean_reports(
    reports: Iterable[wire.MetricsReply], without: Collection[str] = ()
) -> dict[str, float | list[float]]:
    """Return the mean of what handlers reported, weighted by their examples as in Flower."""
    given = [report for report in reports if report.num_examples > 0]
    kept = [{k: v for k, v in report.metrics.items() if k not in without} for report in given]
    return mean_metrics(kept, [report.num_examples for report in given]) if given else {}


def beside(
    ours: Mapping[str, float], theirs: Metrics, reserved: Collection[str] = ()
) -> dict[str, float | list[int] | list[float]]:
    """Return a strategy's metrics and those of the handlers, each under its own name.

    A handler's metric that is called like one of the strategy's, or is one of the `reserved`, gets
    the prefix ``client/``.
    """
    taken = {*ours, *reserved}
    named = {f"client/{key}" if key in taken else key: value for key, value in theirs.items()}
    return {**named, **ours}


@contextlib.contextmanager
def checkpoint_faults(what: str) -> Iterator[None]:
    """Raise a CheckpointError where what a checkpoint holds cannot be read."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{what} in the checkpoint cannot be read ({error}); start afresh"
        ) from error
