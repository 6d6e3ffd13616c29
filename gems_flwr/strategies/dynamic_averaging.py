"""Dynamic model averaging: talk only when it pays (Kamp et al. 2018, Algorithms 1 and 2).

Every node checks ‖f − r‖² ≤ Δ for its own model f and a common reference r; only violators send
their models, and the coordinator asks for more until the mean is back in the ball. The decisions
are those of `averaging.balancing`; this file turns them into messages. A quiet round moves
some numbers per node and no model.

Beyond the paper, all within Definition 2:

- ``condition="total"``: nodes send their squared distance only, and models are asked for when the
  *mean* distance exceeds Δ.
- ``order``: whom to ask first.
- The threshold may change from check to check, which is an open question of the paper's. Whatever
  it is at a check, the divergence after it is at most that. ``follow_loss=p`` sets it to
  Δ·(loss / first loss)^p with a running mean of the nodes' prequential loss; ``target_rate=c``
  steers it so that a node moves c models per check on average; ``budget_bytes`` finds it from the
  first rounds on so that the whole run costs that many bytes (see `averaging.byte_budget`
  and `server.byte_spending`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from gems_flwr.averaging.balancing import (
    Augmentation,
    Balancing,
    BalancingRule,
    Condition,
    LocalReport,
    Order,
)
from gems_flwr.averaging.synchronisation import Synchronisation
from gems_flwr.averaging.threshold import following_loss, steered
from gems_flwr.errors import OptionError
from gems_flwr.runtime.seeding import generator
from gems_flwr.server.byte_spending import ByteSpending, average_of_farthest
from gems_flwr.server.learner_state import LearnerState, Tally
from gems_flwr.server.local_learners import AskForModels, LocalLearners, Replies


@dataclass(kw_only=True, eq=False)
class DynamicAveraging(LocalLearners):
    """Average local models when they have drifted too far from a reference.

    Parameters
    ----------
    delta : float, default 0.7
        Threshold Δ above 0: a squared distance over all parameters.
    check_every : int, default 1
        The paper's b: rounds between two checks, at least 1.
    augmentation : {"doubling", "random", "all"}
        How many more models are asked for at a time.
    condition : {"local", "total"}
        ``local`` is the paper's; see the module's docstring.
    order : {"random", "nearest", "farthest"}
        Who is asked first.
    follow_loss : float, default 0
        Exponent with which the threshold follows the loss, at least 0; 0 keeps it constant.
    target_rate : float, optional
        Models, up and down, that a node should move per check on average, in (0, 2].
    budget_bytes : float, optional
        Bytes, up and down, that the whole run is to cost, above 0. The threshold is found on the
        way, whatever `delta` is.
    **learners
        See `LocalLearners`.

    Examples
    --------
    Learners that drift apart, each by its number in every round:

    >>> import numpy as np
    >>> from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    >>> from flwr.clientapp import ClientApp
    >>> from gems_flwr import DynamicAveraging, InProcessGrid, dynamic_averaging_mod
    >>> app = ClientApp(mods=[dynamic_averaging_mod()])
    >>> @app.train()
    ... def train(message, context):
    ...     [w] = message.content["arrays"].to_numpy_ndarrays()
    ...     arrays = ArrayRecord([w + context.node_config["partition-id"]])
    ...     metrics = MetricRecord({"num-examples": 1})
    ...     return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
    >>> grid = InProcessGrid(app, nodes=3)
    >>> strategy = DynamicAveraging(delta=10, final_sync=False)
    >>> result = strategy.start(grid, ArrayRecord([np.zeros(2)]), num_rounds=2)
    >>> result.details["violations"], result.details["models_up"]  # both in round 2
    (1, 3)
    """

    sums_replies: ClassVar[bool] = True
    # Reports, models, their delivery after the last round, and the nodes' evaluation.
    sums_in_round: ClassVar[int] = 4

    delta: float = 0.7
    check_every: int = 1
    augmentation: Augmentation = "doubling"
    condition: Condition = "local"
    order: Order = "random"
    follow_loss: float = 0.0
    target_rate: float | None = None
    budget_bytes: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._rule(self.delta)
        if not 0 <= self.follow_loss < math.inf:
            raise OptionError(f"follow_loss must be at least 0, got {self.follow_loss}")
        if self.target_rate is not None and not 0 < self.target_rate <= 2:
            raise OptionError(f"target_rate must be in (0, 2], got {self.target_rate}")
        if self.rule.is_on and (self.follow_loss or self.target_rate is not None):
            raise OptionError(
                "robust goes with neither follow_loss nor target_rate: the threshold would follow "
                "what nodes say of their loss, or how often they claim a violation"
            )
        if self.secure is not None and (self.condition, self.augmentation) != ("total", "all"):
            raise OptionError(
                "secure sums need condition='total' and augmentation='all': a node that is heard "
                "alone, or a sum that one more node joins, would tell of that node"
            )
        if self.follow_loss and self.target_rate is not None:
            raise OptionError("follow_loss and target_rate cannot both set the threshold")
        if self.budget_bytes is not None:
            self._check_budget(self.budget_bytes)

    def _check_budget(self, budget_bytes: float) -> None:
        if not 0 < budget_bytes < math.inf:
            raise OptionError(f"budget_bytes must be a number above 0, got {budget_bytes}")
        if self.follow_loss or self.target_rate is not None:
            raise OptionError(
                "budget_bytes goes with neither follow_loss nor target_rate: only one of them can "
                "set the threshold"
            )
        if self.rule.is_on:
            raise OptionError(
                "budget_bytes does not go with robust: nodes that claim violations would spend it"
            )
        if self.secure is not None:
            raise OptionError(
                "budget_bytes does not go with secure sums, whose messages cost more than models "
                "and reports: set delta, or target_rate"
            )
        if self.fraction_evaluate:
            raise OptionError(
                "budget_bytes needs fraction_evaluate=0: nodes that evaluate are sent the whole "
                "model in every round; evaluate at the server (evaluate_fn)"
            )

    @property
    def period(self) -> int:
        """The paper's b."""
        return self.check_every

    def request(
        self, server_round: int, nodes: Sequence[str], learners: LearnerState
    ) -> Mapping[str, Mapping[str, Any]]:
        """Ask for the model on violation, or for the squared distance alone."""
        asked: dict[str, Any] = {"measure": True}
        is_check, spending = server_round % self.check_every == 0, self._spending
        if spending is not None:
            is_check = is_check and spending.may_send(server_round, learners, len(nodes))
        if self.condition == "local" and is_check:
            asked = {"send": "violated", "delta": self._threshold(learners)}
        return dict.fromkeys(nodes, asked)

    def synchronise(
        self, server_round: int, learners: LearnerState, replies: Replies, ask: AskForModels
    ) -> Synchronisation:
        """Balance violations with as few models as the rule needs."""
        weights = self.rule.fair([self.weight(reply) for reply in replies.values()])
        reports = {
            name: LocalReport(reply.squared_distance or 0.0, weight)
            for (name, reply), weight in zip(replies.items(), weights, strict=True)
        }
        violators = {name: r.arrays for name, r in replies.items() if r.arrays is not None}
        rule, spending = self._rule(self._threshold(learners)), self._spending
        if spending is not None and not violators:
            spending.check(learners, len(reports))
            if not spending.has_begun(server_round, learners):
                return Synchronisation(learners.coordinator)
            models = spending.plan(learners, len(reports)).models
            if self.condition == "local" or models < len(reports):
                return average_of_farthest(rule, learners.coordinator, reports, models, ask)
        rng = generator(self.seed, "balance", server_round)
        balancing = Balancing.begin(rule, learners.coordinator, reports, violators)
        while names := balancing.query(rng):
            given = ask(names)
            balancing = balancing.receive(given, lost=[n for n in names if n not in given])
        return balancing.finish()

    def adapted(
        self, learners: LearnerState, before: Tally, after: Tally, replies: Replies
    ) -> LearnerState:
        """Move the threshold, if it is to move."""
        batches = after.batches - before.batches
        if self.follow_loss and batches:
            loss = (after.cumulative_loss - before.cumulative_loss) / batches
            delta, losses = following_loss(self.delta, self.follow_loss, learners.losses, loss)
            return dataclasses.replace(learners, delta=delta, losses=losses)
        if self.target_rate is not None:
            moved = 2 * sum(n for r, n in after.synchronisations if r == learners.round)
            rate = moved / max(1, len(learners.known))
            delta = steered(self._threshold(learners), rate, self.target_rate)
            return dataclasses.replace(learners, delta=delta)
        if self._spending is not None:
            averaged = sum(n for r, n in after.synchronisations if r == learners.round)
            distances = [reply.squared_distance or 0.0 for reply in replies.values()]
            return self._spending.adapted(learners, averaged, distances)
        return learners

    @property
    def keeps_ledger(self) -> bool:
        """Whether there is a budget."""
        return self.budget_bytes is not None

    def told(self, learners: LearnerState) -> Mapping[str, Any]:
        """Return how far a budget has come."""
        return {} if self._spending is None else self._spending.told(learners)

    @property
    def _spending(self) -> ByteSpending | None:
        if self.budget_bytes is None:
            return None
        return ByteSpending(
            self.budget_bytes, self._last_round, self.check_every, self.final_sync, self.compress
        )

    def _threshold(self, learners: LearnerState) -> float:
        return learners.delta or self.delta

    def _rule(self, delta: float) -> BalancingRule:
        return BalancingRule(
            delta=delta,
            augmentation=self.augmentation,
            order=self.order,
            condition=self.condition,
            robust=self.rule,
            ignore=frozenset(self.buffers),
        )
