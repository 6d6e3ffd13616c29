"""The coordinator of dynamic averaging, without a network (Kamp et al. 2018, Algorithms 1 and 2).

The coordinator holds the models of violators, and while their mean lies outside the ball of squared
radius Δ around the reference it asks for more. The mean goes back to exactly the nodes whose models
it holds; if those are all, it becomes the new reference::

    balancing = Balancing.begin(rule, coordinator, reports, models_of_violators)
    while names := balancing.query(rng):
        balancing = balancing.receive(models_of(names))
    synchronisation = balancing.finish()

After `finish` the mean of all models is what it was, and their divergence is at most Δ
(Definition 2). With a robust mean only the second holds, for the honest nodes.

- The violation counter grows by several at a time, so it is compared with ≥; a node that did not
  take part is neither in the set nor in [m].
- ``doubling`` asks for 1, 2, 4 … and for all the rest once more than half would be in.
- ``condition="total"`` is ours. The mean minimises the sum of squares, so the divergence is at most
  (1/m)Σ‖f − r‖² for any r: no model is sent before the mean of the squared distances exceeds Δ.
- Under a robust rule no average is made of fewer models than outvote the liars, who may be the
  first to claim a violation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import numpy as np

from gems_flwr.averaging.means import squared_distance, with_floats_of
from gems_flwr.averaging.robust import Combined, RobustRule, combine
from gems_flwr.errors import OptionError
from gems_flwr.typing import Arrays

Augmentation = Literal["random", "doubling", "all"]
Condition = Literal["local", "total"]


@dataclass(frozen=True)
class Coordinator:
    """What is kept from round to round: the reference r and the violation counter v."""

    reference: Arrays
    violations: int = 0


@dataclass(frozen=True)
class Synchronisation:
    """An averaging of models that live on the nodes: who gets what, and what is kept of it."""

    # For the next round.
    coordinator: Coordinator
    # What replaces the models of the receivers, exactly the nodes that gave theirs; None if no
    # model was sent. If those are all, it is `full`, and the average is the new reference.
    mean: Combined | None = None
    receivers: tuple[str, ...] = ()
    full: bool = False

    @property
    def average(self) -> Arrays | None:
        """The mean of the models, if there is one."""
        return self.mean.arrays if self.mean else None

    def with_average(self, average: Arrays) -> Synchronisation:
        """Return the same with another average, which is the reference if all nodes get it."""
        assert self.mean is not None
        coordinator = self.coordinator
        if self.full:
            reference = with_floats_of(coordinator.reference, average)
            coordinator = replace(coordinator, reference=reference)
        mean = replace(self.mean, arrays=dict(average))
        return replace(self, coordinator=coordinator, mean=mean)

    @classmethod
    def of_models(
        cls,
        rule: RobustRule,
        coordinator: Coordinator,
        models: Mapping[str, Arrays],
        weights: Sequence[float],
        *,
        full: bool,
    ) -> Synchronisation:
        """Average models, by node, at least one."""
        mean = combined_floats(rule, list(models.values()), weights)
        return cls(coordinator, mean, tuple(models), full).with_average(mean.arrays)


def combined_floats(
    rule: RobustRule, models: Sequence[Arrays], weights: Sequence[float]
) -> Combined:
    """Return the mean by a rule; integer arrays, a node's own business, are the first model's."""
    combined = combine(rule, models, weights)
    return replace(combined, arrays=with_floats_of(models[0], combined.arrays))


@dataclass(frozen=True)
class BalancingRule:
    """How a coordinator decides."""

    # Threshold Δ above 0: a squared distance over all parameters.
    delta: float
    # How many more models are asked for at a time: one; 1, 2, 4 …; or all at once.
    augmentation: Augmentation = "doubling"
    # Whether every node must be within Δ of the reference, or their mean squared distance.
    condition: Condition = "local"
    # What replaces the models; the mean by default.
    robust: RobustRule = field(default_factory=RobustRule)

    def __post_init__(self) -> None:
        if not 0 < self.delta < float("inf"):
            raise OptionError(f"delta must be a number above 0, got {self.delta}")
        for name, kinds in (("augmentation", Augmentation), ("condition", Condition)):
            if getattr(self, name) not in get_args(kinds):
                raise OptionError(
                    f"{name} must be one of {list(get_args(kinds))}, got '{getattr(self, name)}'"
                )


@dataclass(frozen=True)
class LocalReport:
    """What a node says of its model without sending it."""

    # ‖f − r‖², over the parameters.
    squared_distance: float
    # The node's weight in means, above 0: its samples B_i, or 1 for all.
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
        """Start a round; the models of `violators` came with the `reports` of all who take part."""
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
        doubling = self.rule.augmentation == "doubling"
        wanted = 2**self.requests if doubling else 1
        if doubling and 2 * (len(self.held) + wanted) > len(self.reports):
            return tuple(rest)
        return tuple(rest[i] for i in rng.permutation(len(rest))[:wanted])

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
        full = len(self.held) == len(self.reports)
        robust, coordinator = self.rule.robust, self.coordinator
        return Synchronisation.of_models(robust, coordinator, *self._models(), full=full)

    def _is_settled(self) -> bool:
        least = self.rule.robust.least_models(len(self.reports))
        if self.must_be_full or 0 < len(self.held) < least:
            return False
        rule, moved = self.rule, 0.0
        if self.held:
            models, weights = self._models()
            average = combined_floats(rule.robust, list(models.values()), weights).arrays
            moved = squared_distance(average, self.coordinator.reference)
        if rule.condition == "local":
            return moved <= rule.delta
        total = sum(report.weight for report in self.reports.values())
        after = sum(
            report.weight / total * (moved if name in self.held else report.squared_distance)
            for name, report in self.reports.items()
        )
        return after <= rule.delta

    def _models(self) -> tuple[dict[str, Arrays], list[float]]:
        """Return the models that are here and their weights, in the order of the reports."""
        models = {name: self.held[name] for name in self.reports if name in self.held}
        return models, [self.reports[name].weight for name in models]
