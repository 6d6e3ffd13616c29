"""An averaging of models that live on the nodes: who gets what, and what is kept of it.

Shared by periodic averaging, dynamic averaging and the last synchronisation of a run, so that every
mean of models is made by one rule (see `gems_flwr.averaging.robust_rules`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gems_flwr.averaging.means import with_floats_of
from gems_flwr.averaging.robust_rules import Combined, RobustRule, combine
from gems_flwr.typing import Arrays


@dataclass(frozen=True)
class Coordinator:
    """What is kept from round to round: the reference r and the violation counter v."""

    reference: Arrays
    violations: int = 0


@dataclass(frozen=True)
class Synchronisation:
    """What came of a round.

    Parameters
    ----------
    coordinator : Coordinator
        For the next round.
    average : mapping from str to ndarray, optional
        What replaces the models of the receivers; None if no model was sent.
    receivers : tuple of str
        Exactly the nodes that gave their models.
    full : bool
        Whether those are all, and the average is the new reference.
    applied : str
        The rule that made the average; see `Combined`.
    left_out : tuple of str
        Receivers whose models the rule did not choose.
    checked : bool
        Whether there were enough models for one to be outvoted.
    """

    coordinator: Coordinator
    average: Arrays | None = None
    receivers: tuple[str, ...] = ()
    full: bool = False
    applied: str = "none"
    left_out: tuple[str, ...] = ()
    checked: bool = True

    def with_average(self, average: Arrays) -> Synchronisation:
        """Return the same with another average, which is the reference if all nodes get it."""
        if not self.full:
            return replace(self, average=average)
        reference = with_floats_of(self.coordinator.reference, average)
        coordinator = replace(self.coordinator, reference=reference)
        return replace(self, coordinator=coordinator, average=average)

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
        """Average models, by node, at least one; with all models in the mean is the reference."""
        names = tuple(models)
        combined = combined_floats(rule, list(models.values()), weights)
        if full:
            reference = with_floats_of(coordinator.reference, combined.arrays)
            coordinator = replace(coordinator, reference=reference)
        return cls(
            coordinator,
            combined.arrays,
            names,
            full,
            combined.applied,
            tuple(names[index] for index in combined.left_out),
            combined.checked,
        )


def combined_floats(
    rule: RobustRule, models: Sequence[Arrays], weights: Sequence[float]
) -> Combined:
    """Return the mean by a rule; integer arrays, a node's own business, are the first model's."""
    combined = combine(rule, models, weights)
    return replace(combined, arrays=with_floats_of(models[0], combined.arrays))
