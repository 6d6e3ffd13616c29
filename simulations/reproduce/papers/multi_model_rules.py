"""Variants of sampling rules that isolate a cause; see `multi_model2025`.

`UnitSteps` and its kind take one thing away: the noise of the step size. d/p sums to 1 over the
draws only on average; here the coefficients of those drawn are divided by their sum, as FedAvg
divides by the data of those who came. The estimate is no longer unbiased.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from gems_flwr.client_sampling import Matrix, aggregation_coefficients
from gems_flwr.strategies.multi_model.sampling_base import SamplingRule
from gems_flwr.strategies.multi_model.sampling_rules import FedVarp, Scaffold


def unit_coefficients(shares: Matrix, probabilities: Matrix, drawn: NDArray[np.bool_]) -> Matrix:
    """Return d/p of the pairs that were drawn, divided by its sum over them, model by model."""
    coefficients = aggregation_coefficients(shares, probabilities, drawn)
    totals = coefficients.sum(axis=0)
    return np.asarray(coefficients / np.where(totals > 0, totals, 1.0))


@dataclass(frozen=True)
class UnitSteps(SamplingRule):
    """Uniform draws, steps of size 1."""

    name: ClassVar[str] = "random, unit steps"

    def coefficients(
        self, shares: Matrix, probabilities: Matrix, drawn: NDArray[np.bool_]
    ) -> Matrix:
        """Return the share of a pair among those drawn."""
        return unit_coefficients(shares, probabilities, drawn)


@dataclass(frozen=True)
class UnitFedVarp(FedVarp):
    """FedVARP whose corrections have size 1, as 1/|S| has in its paper."""

    name: ClassVar[str] = "fedvarp, unit steps"

    def coefficients(
        self, shares: Matrix, probabilities: Matrix, drawn: NDArray[np.bool_]
    ) -> Matrix:
        """Return the share of a pair among those drawn."""
        return unit_coefficients(shares, probabilities, drawn)


@dataclass(frozen=True)
class UnitScaffold(Scaffold):
    """SCAFFOLD with steps of size 1, as 1/|S| has in its paper."""

    name: ClassVar[str] = "scaffold, unit steps"

    def coefficients(
        self, shares: Matrix, probabilities: Matrix, drawn: NDArray[np.bool_]
    ) -> Matrix:
        """Return the share of a pair among those drawn."""
        return unit_coefficients(shares, probabilities, drawn)
