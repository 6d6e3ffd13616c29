"""What strategies share that replace the models of several nodes by a mean: whom it believes.

The rules are those of `averaging.robust_rules`. This file turns options into a rule, and keeps
account of whom it has left out, for the result. `AveragesReplies` is for strategies whose nodes
send their models in every round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from flwr.app import ConfigRecord
from flwr.serverapp import Grid

from gems_flwr.averaging.robust_rules import RobustKind, RobustRule, combine
from gems_flwr.errors import CheckpointError, OptionError
from gems_flwr.server.exchange import Answer
from gems_flwr.server.log import log_event, log_warning
from gems_flwr.server.loop import RoundLoop
from gems_flwr.server.model_totals import model_total
from gems_flwr.server.screening import unchecked_details
from gems_flwr.server.state import RoundOutcome, ServerState
from gems_flwr.typing import Arrays
from gems_flwr.wire.model_replies import ModelReply
from gems_flwr.wire.model_summands import ModelSummand
from gems_flwr.wire.records import to_record

_ACCOUNT = "robust"


@dataclass(kw_only=True, eq=False)
class AveragesModels(RoundLoop):
    """Base of the strategies that average models.

    Parameters
    ----------
    robust : str, default "none"
        What models are replaced by: ``none`` (the mean), ``median``, ``trimmed_mean``,
        ``geometric_median``, ``krum``, ``multi_krum`` or ``bulyan``; see
        `gems_flwr.averaging.robust_rules`.
    liars : int, optional
        How many nodes may lie, at least 0; by default as many as the rule bears.
    trim : float, default 0.2
        Share that ``trimmed_mean`` cuts off at either end, above 0 and below 0.5.
    **loop
        See `RoundLoop`.
    """

    robust: RobustKind = "none"
    liars: int | None = None
    trim: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rule = RobustRule(self.robust, self.liars, self.trim)
        if self.secure is not None and self.rule.is_on:
            raise OptionError(
                f"robust='{self.robust}' compares the models of single nodes, which secure sums "
                "hide; take one of the two"
            )


@dataclass(frozen=True)
class Outvoted:
    """Whom a rule has left out so far; goes into the run's details under ``robust``.

    Parameters
    ----------
    averagings : int
        How many means were made.
    by_median : int
        How many of them by the median, because there were too few models for the rule.
    too_few : int
        How many of them of fewer than three models, among which nobody can be outvoted.
    times_left_out : mapping from str to int
        How often the rule did not choose a node's model, where it chooses.
    """

    averagings: int = 0
    by_median: int = 0
    too_few: int = 0
    times_left_out: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def from_details(cls, details: Mapping[str, Any]) -> Outvoted:
        """Return the account that a run's details hold."""
        try:
            return cls(**details.get(_ACCOUNT, {}))
        except TypeError as error:
            raise CheckpointError(
                f"the details in the checkpoint cannot be read ({error}); start afresh"
            ) from error

    def after(
        self,
        server_round: int,
        rule: RobustRule,
        *,
        applied: str,
        left_out: Collection[str],
        checked: bool,
    ) -> Outvoted:
        """Return the account after one more mean, and log what is new in it."""
        if not rule.is_on:
            return self
        if not checked and not self.too_few:
            reason = "fewer than three models: nobody can be outvoted"
            log_warning("unchecked", round=server_round, reason=reason)
        elif applied != rule.kind and not self.by_median:
            reason = f"too few models for {rule.kind}, the median stands in"
            log_warning("median_instead", round=server_round, reason=reason)
        if left_out:
            log_event("outvoted", round=server_round, nodes=",".join(left_out))
        times = dict(self.times_left_out)
        for node in left_out:
            times[node] = times.get(node, 0) + 1
        return dataclasses.replace(
            self,
            averagings=self.averagings + 1,
            by_median=self.by_median + (checked and applied != rule.kind),
            too_few=self.too_few + (not checked),
            times_left_out=times,
        )

    def to_details(self, rule: RobustRule) -> dict[str, Any]:
        """Return what a result says of it; nothing where models are simply averaged."""
        if not rule.is_on:
            return {}
        reasons = {
            node: f"{rule.kind} chose other models in {times} of {self.averagings} averagings"
            for node, times in self.times_left_out.items()
        }
        account = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        return {_ACCOUNT: account, "left_out": reasons, **unchecked_details(None)}


@dataclass(kw_only=True, eq=False)
class AveragesReplies(AveragesModels):
    """Base of the strategies that average the models in the replies of a round.

    Parameters
    ----------
    weighted : bool, default True
        Whether a node counts by its number of examples, or all count the same.
    **averaging
        See `AveragesModels`.
    """

    sums_replies: ClassVar[bool] = True

    weighted: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._outvoted = Outvoted()

    def play_round(
        self,
        server_round: int,
        state: ServerState,
        grid: Grid,
        train_config: ConfigRecord,
        evaluate_config: ConfigRecord,
    ) -> RoundOutcome:
        """Play one round, and tell whom the rule did not believe."""
        if self.secure is not None:
            return self._summed_round(server_round, state, grid, train_config)
        self._outvoted = Outvoted.from_details(state.details)
        outcome = super().play_round(server_round, state, grid, train_config, evaluate_config)
        return dataclasses.replace(outcome, details=self._outvoted.to_details(self.rule))

    def _summed_round(
        self, server_round: int, state: ServerState, grid: Grid, config: ConfigRecord
    ) -> RoundOutcome:
        """Play a round in which the server sees the sum of the models alone."""
        outgoing = self.configure_train(server_round, to_record(state.arrays), config, grid)
        messages = list(outgoing)
        if not messages:
            return RoundOutcome(arrays=state.arrays)
        keys = self.record_keys
        request = ModelSummand(
            most_examples=self.max_examples or ModelSummand.most_examples,
            weighted=self.weighted,
            weight_key=keys.weight,
            arrays=keys.arrays,
        )
        total = model_total(
            self,
            server_round,
            messages,
            state.arrays,
            request,
            at_least=self.min_nodes,
            step="models",
        )
        return RoundOutcome(arrays=self.finished(total.mean), train_metrics=total.metrics)

    def finished(self, mean: Arrays) -> Arrays:
        """Return what becomes of a mean that was made of a sum; by default it stays as it is."""
        return mean

    def aggregate(self, answers: Sequence[Answer[ModelReply]]) -> Arrays:
        """Return the (weighted) mean of the nodes' models, or what the rule makes of them."""
        weights = [a.value.num_examples if self.weighted else 1.0 for a in answers]
        combined = combine(self.rule, [a.value.arrays for a in answers], weights)
        self._outvoted = self._outvoted.after(
            self._exchange.server_round,
            self.rule,
            applied=combined.applied,
            left_out=[answers[index].node for index in combined.left_out],
            checked=combined.checked,
        )
        return combined.arrays
