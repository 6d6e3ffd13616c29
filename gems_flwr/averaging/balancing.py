"""The coordinator of dynamic averaging, without a network (Kamp et al. 2018, Algorithms 1 and 2).

One round: the nodes that took part report their local condition, violators with their model. The
coordinator holds a set of models, and while their mean lies outside the ball of squared radius Δ
around the reference it asks for more. The mean goes back to exactly the nodes whose models it
holds; if those are all, it becomes the new reference::

    balancing = Balancing.begin(rule, coordinator, reports, models_of_violators)
    while names := balancing.query(rng):
        balancing = balancing.receive(models_of(names))
    synchronisation = balancing.finish()

Values are frozen and chance comes in as an argument, so a test can drive it for as long as it
likes. Whatever the options, two things hold after `finish` (Definition 2): the mean of all models
is what it was, and their divergence is at most Δ. With a robust mean only the second holds, for
the honest nodes: what a liar has, or says of its distance, is its own business.

Decided here, where the paper is silent:

- The violation counter grows by several at a time, so it is compared with ≥; a node that did not
  take part is neither in the set nor in [m].
- ``doubling`` asks for 1, 2, 4 … and for all the rest once more than half would be in.
- ``condition="total"`` is ours. Since the mean minimises the sum of squares, the divergence is at
  most (1/m)Σ‖f − r‖², for any r. The nodes' squared distances, some bytes each, therefore tell the
  coordinator that all is well although some local conditions are violated; no model is sent
  before their mean exceeds Δ.
- ``order`` decides who is asked first: anyone (the paper's), or by the squared distances that all
  have reported anyway, those nearest to the reference or those farthest from it.
- Under a robust rule no average is made of fewer models than outvote the liars, for these may be
  the first to claim a violation: with f known, of at least `RobustRule.models_needed` (f),
  otherwise of all. Whoever gave a model gets the average, chosen or not, so that the divergence
  stays bounded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import numpy as np

from gems_flwr.averaging.distances import squared_distance
from gems_flwr.averaging.robust_rules import RobustRule
from gems_flwr.averaging.synchronisation import Coordinator, Synchronisation, combined_floats
from gems_flwr.errors import OptionError
from gems_flwr.typing import Arrays

Augmentation = Literal["random", "doubling", "all"]
Condition = Literal["local", "total"]
Order = Literal["random", "nearest", "farthest"]


@dataclass(frozen=True)
class BalancingRule:
    """How a coordinator decides.

    Parameters
    ----------
    delta : float
        Threshold Δ above 0: a squared distance over all parameters.
    augmentation : {"random", "doubling", "all"}
        How many more models are asked for at a time: one; 1, 2, 4 …; or all at once.
    order : {"random", "nearest", "farthest"}
        Who is asked first.
    condition : {"local", "total"}
        Whether every node must be within Δ of the reference, or their mean squared distance.
    robust : RobustRule
        What replaces the models; the mean by default.
    ignore : collection of str
        Names of floating-point arrays that are no parameters.
    """

    delta: float
    augmentation: Augmentation = "doubling"
    order: Order = "random"
    condition: Condition = "local"
    robust: RobustRule = field(default_factory=RobustRule)
    ignore: Collection[str] = ()

    def __post_init__(self) -> None:
        if not 0 < self.delta < float("inf"):
            raise OptionError(f"delta must be a number above 0, got {self.delta}")
        for name, kinds in (
            ("augmentation", Augmentation),
            ("order", Order),
            ("condition", Condition),
        ):
            if getattr(self, name) not in get_args(kinds):
                raise OptionError(
                    f"{name} must be one of {list(get_args(kinds))}, got '{getattr(self, name)}'"
                )


@dataclass(frozen=True)
class LocalReport:
    """What a node says of its model without sending it.

    Parameters
    ----------
    squared_distance : float
        ‖f − r‖², over the parameters.
    weight : float, default 1
        The node's weight in means, above 0: its samples B_i, or 1 for all.
    """

    squared_distance: float
    weight: float = 1.0


@dataclass(frozen=True)
class Balancing:
    """A round under way; see the module's docstring."""

    rule: BalancingRule
    coordinator: Coordinator
    reports: Mapping[str, LocalReport]
    held: Mapping[str, Arrays] = field(default_factory=dict)
    must_be_full: bool = False
    requests: int = 0

    @classmethod
    def begin(
        cls,
        rule: BalancingRule,
        coordinator: Coordinator,
        reports: Mapping[str, LocalReport],
        violators: Mapping[str, Arrays],
    ) -> Balancing:
        """Start a round.

        Parameters
        ----------
        rule : BalancingRule
            How to decide.
        coordinator : Coordinator
            What the last round left.
        reports : mapping from str to LocalReport
            Every node that takes part, in an order that does not depend on arrival.
        violators : mapping from str to model
            The models that came with the reports.
        """
        violations = coordinator.violations + len(violators)
        full = bool(violators) and violations >= len(reports)
        return cls(
            rule=rule,
            coordinator=replace(coordinator, violations=0 if full else violations),
            reports=reports,
            held=dict(violators),
            must_be_full=full,
        )

    def query(self, rng: np.random.Generator) -> tuple[str, ...]:
        """Return the nodes to ask for their models now; none if the round can be finished."""
        rest = [name for name in self.reports if name not in self.held]
        if not rest or self._is_settled():
            return ()
        if self.must_be_full or self.rule.augmentation == "all":
            return tuple(rest)
        wanted = 2**self.requests if self.rule.augmentation == "doubling" else 1
        if self.rule.augmentation == "doubling" and (
            2 * (len(self.held) + wanted) > len(self.reports)
        ):
            return tuple(rest)
        return tuple(self._in_order(rest, rng)[:wanted])

    def receive(self, models: Mapping[str, Arrays], lost: Collection[str] = ()) -> Balancing:
        """Return the round with more models; nodes that could not be reached are out of it."""
        return replace(
            self,
            held={**self.held, **models},
            reports={name: each for name, each in self.reports.items() if name not in lost},
            requests=self.requests + 1,
        )

    def finish(self) -> Synchronisation:
        """Return who gets which model, and the coordinator for the next round."""
        if not self.held:
            return Synchronisation(self.coordinator)
        names = self._holders()
        return Synchronisation.of_models(
            self.rule.robust,
            self.coordinator,
            {name: self.held[name] for name in names},
            [self.reports[name].weight for name in names],
            full=len(self.held) == len(self.reports),
        )

    def _is_settled(self) -> bool:
        if self.must_be_full or 0 < len(self.held) < self.rule.robust.least_models(
            len(self.reports)
        ):
            return False
        rule, reference = self.rule, self.coordinator.reference
        moved = squared_distance(self._average(), reference, rule.ignore) if self.held else 0.0
        if rule.condition == "local":
            return moved <= rule.delta
        total = sum(report.weight for report in self.reports.values())
        after = sum(
            report.weight / total * (moved if name in self.held else report.squared_distance)
            for name, report in self.reports.items()
        )
        return after <= rule.delta

    def _in_order(self, names: list[str], rng: np.random.Generator) -> list[str]:
        # Shuffled first, so that equal distances are in no particular order either.
        shuffled = [names[i] for i in rng.permutation(len(names))]
        if self.rule.order == "random":
            return shuffled
        sign = 1 if self.rule.order == "nearest" else -1
        return sorted(shuffled, key=lambda name: sign * self.reports[name].squared_distance)

    def _holders(self) -> tuple[str, ...]:
        return tuple(name for name in self.reports if name in self.held)

    def _average(self) -> Arrays:
        names = self._holders()
        return combined_floats(
            self.rule.robust,
            [self.held[name] for name in names],
            [self.reports[name].weight for name in names],
        ).arrays
