"""How a byte budget is spent by dynamic averaging: `averaging.byte_budget` for learners' states.

Decided here: before the first threshold, in the last round (what is averaged then reaches nobody,
or is averaged anyway), and when the budget no longer pays for a full synchronisation, nodes only
tell their distances. In the last of these cases the models of those farthest from the reference
are averaged, as many as can be paid: the mean of all models stays what it was, but their divergence
may exceed Δ. Bytes by which nodes introduce themselves again to a run that was interrupted are not
counted, so that it goes on as the unbroken one would.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from gems_flwr.averaging.balancing import BalancingRule, LocalReport
from gems_flwr.averaging.byte_budget import BytePlan, steered_by_budget
from gems_flwr.averaging.synchronisation import Coordinator, Synchronisation
from gems_flwr.compression.difference_coding import Form
from gems_flwr.errors import OptionError
from gems_flwr.server.learner_state import LearnerState
from gems_flwr.typing import Arrays

# Size of a model before it is deflated, relative to the plain one.
_SHARES: Mapping[Form, float] = {"float32": 1.0, "float16": 0.5, "int8": 0.25, "int4": 0.125}


@dataclass(frozen=True)
class ByteSpending:
    """A budget and the run that it is for.

    Parameters
    ----------
    budget_bytes : float
        All messages, up and down.
    last_round : int
        How many rounds there are.
    check_every : int
        Rounds between two checks.
    final_sync : bool
        Whether the last round ends in a full synchronisation.
    compress : {"float32", "float16", "int8", "int4"}
        How models travel.
    """

    budget_bytes: float
    last_round: int
    check_every: int
    final_sync: bool
    compress: Form

    def plan(self, learners: LearnerState, nodes: int) -> BytePlan:
        """Return what is left after the rounds that the learners have trained for."""
        assert learners.ledger is not None
        last, b, done = self.last_round, self.check_every, learners.round
        model_bytes = sum(array.nbytes for array in learners.reference.values())
        return BytePlan(
            learners.ledger,
            self.budget_bytes,
            max(1, nodes),
            checks_left=(last - 1) // b - done // b,
            rounds_left=last // b - done // b + (1 if last % b and done < last else 0),
            owed=len(learners.pending),
            final_sync=self.final_sync,
            # What the initial model takes tells little: it may be 0 and deflate to nothing.
            model_bytes=model_bytes * _SHARES[self.compress],
        )

    def has_begun(self, server_round: int, learners: LearnerState) -> bool:
        """Whether there is a threshold that models may be averaged by in this round."""
        assert learners.ledger is not None
        is_known = learners.ledger.checks > 0 and learners.delta > 0
        return is_known and server_round < self.last_round

    def may_send(self, server_round: int, learners: LearnerState, nodes: int) -> bool:
        """Whether nodes may send their models unasked, since all of them may do so."""
        begun = self.has_begun(server_round, learners)
        return begun and self.plan(learners, nodes).models >= nodes

    def check(self, learners: LearnerState, nodes: int) -> None:
        """Raise an OptionError after the first check if the budget is too small for the run."""
        plan = self.plan(learners, nodes)
        if plan.ledger.checks == 1 and plan.needed_bytes > self.budget_bytes:
            raise OptionError(
                f"budget_bytes={self.budget_bytes:.0f} is too small for {self.last_round} rounds "
                f"with {nodes} nodes: the initial model, messages without models and the last "
                f"synchronisation take about {plan.needed_bytes}; give at least that, or check "
                "less often (check_every)"
            )

    def adapted(
        self, learners: LearnerState, averaged: int, squared_distances: Collection[float]
    ) -> LearnerState:
        """Return the state with the threshold of the next check.

        Parameters
        ----------
        learners : LearnerState
            After a check.
        averaged : int
            How many models were averaged at it.
        squared_distances : collection of float
            Of all nodes that took part in it.
        """
        plan = self.plan(learners, len(squared_distances))
        distance = sum(squared_distances) / plan.nodes
        ledger, delta = steered_by_budget(plan.ledger, plan, averaged / plan.nodes, distance)
        return dataclasses.replace(learners, delta=delta, ledger=ledger)

    def told(self, learners: LearnerState) -> Mapping[str, Any]:
        """Return the budget, what was spent, and the threshold that it has come to."""
        assert learners.ledger is not None
        return {
            "budget_bytes": self.budget_bytes,
            "spent_bytes": learners.ledger.spent_bytes,
            "delta": learners.ledger.delta,
        }


def average_of_farthest(
    rule: BalancingRule,
    coordinator: Coordinator,
    reports: Mapping[str, LocalReport],
    models: int,
    ask: Callable[[Collection[str]], Mapping[str, Arrays]],
) -> Synchronisation:
    """Average the models of the nodes farthest from the reference, if the condition is violated.

    Parameters
    ----------
    rule : BalancingRule
        Says when it is.
    coordinator : Coordinator
        What the last round left.
    reports : mapping from str to LocalReport
        Every node that takes part.
    models : int
        How many can be paid.
    ask : callable
        Gets the names of nodes, returns the models of those that could be reached.
    """
    distances = {name: report.squared_distance for name, report in reports.items()}
    measured = max(distances.values(), default=0.0)
    if rule.condition == "total":
        total = sum(report.weight for report in reports.values())
        measured = sum(r.weight / total * r.squared_distance for r in reports.values())
    if models < 2 or measured <= rule.delta:
        return Synchronisation(coordinator)
    chosen = set(sorted(reports, key=lambda name: -distances[name])[:models])
    given = ask([name for name in reports if name in chosen])
    if not given:
        return Synchronisation(coordinator)
    weights = [reports[name].weight for name in given]
    full = len(given) == len(reports)
    return Synchronisation.of_models(rule.robust, coordinator, given, weights, full=full)
