"""The sampling rules of `MultiModel`: how pairs are drawn, and what a step makes of their updates.

They are the rows of Table I of the CMU 18-786 slides (Haoran Zhang, April 2025); their author's
paper is Zhang, Gong, Li, Siew, Joe-Wong and El-Azouzi 2025, "Towards optimal heterogeneous client
sampling in multi-model federated learning" (arXiv 2504.05138). What a rule can say, and what d, p,
U, h and β are, stands in `sampling_base`.

A rule of your own is a subclass with what differs from uniform sampling, and is given as it is::

    class DataSampling(SamplingRule):
        def importance(self, shares, answers, available):
            return shares

    MultiModel(sampling=DataSampling(), budget=12)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from gems_flwr.client_sampling import (
    LOSS_FLOOR,
    Matrix,
    aggregation_coefficients,
    loss_importance,
)
from gems_flwr.errors import OptionError
from gems_flwr.strategies.multi_model.sampling_base import (
    LOSSES,
    NORMS,
    RESIDUALS,
    Question,
    SamplingRule,
)


@dataclass(frozen=True)
class UniformSampling(SamplingRule):
    """Every pair with the same probability, as far as capacities allow ("random" of Table I).

    Examples
    --------
    >>> from gems_flwr import MultiModel, UniformSampling
    >>> MultiModel(sampling=UniformSampling()).rule == MultiModel(sampling="random").rule
    True
    """

    name: ClassVar[str] = "random"


@dataclass(frozen=True)
class FullParticipation(SamplingRule):
    """Every pair in every round, whatever budget and capacities are: the slides' reference.

    Examples
    --------
    >>> from gems_flwr import FullParticipation, MultiModel
    >>> MultiModel(sampling=FullParticipation()).rule == MultiModel(sampling="full").rule
    True
    """

    name: ClassVar[str] = "full"
    has_budget: ClassVar[bool] = False

    def probabilities(self, importance: Matrix, budget: float, capacity: NDArray) -> Matrix:
        """Return 1 for every pair that is available."""
        return (importance > 0).astype(np.float64)


@dataclass(frozen=True)
class LossSampling(SamplingRule):
    """By d × local loss (LVR of the slides, MMFL-LVR of Zhang et al. 2025).

    Costs a forward pass for every pair, and models go down to all nodes.

    Parameters
    ----------
    floor : float, default 0.01
        Least loss that a node counts with, relative to the model's mean loss, in [0, 1]. Above 0
        nobody is left out for good.

    Examples
    --------
    >>> from gems_flwr import LossSampling, MultiModel
    >>> MultiModel(sampling=LossSampling(floor=0.1)).rule
    LossSampling(floor=0.1)
    >>> MultiModel(sampling="lvr").rule
    LossSampling(floor=0.01)
    """

    name: ClassVar[str] = "lvr"
    question: ClassVar[Question | None] = LOSSES

    floor: float = LOSS_FLOOR

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= 1:
            raise OptionError(f"floor must be between 0 and 1, got {self.floor}")

    def importance(self, shares: Matrix, answers: Matrix, available: NDArray[np.bool_]) -> Matrix:
        """Return d × loss."""
        return loss_importance(answers, shares, available, self.floor)


@dataclass(frozen=True)
class NormSampling(SamplingRule):
    """By the norm of the weighted update, ‖d U‖ (GVR of the slides, their Eq. 5).

    It has the least variance that any p can give to Σ (d/p) U. All pairs train.

    Examples
    --------
    >>> from gems_flwr import MultiModel, NormSampling
    >>> MultiModel(sampling=NormSampling()).rule == MultiModel(sampling="gvr").rule
    True
    """

    name: ClassVar[str] = "gvr"
    question: ClassVar[Question | None] = NORMS

    def importance(
        self,
        shares: Matrix,
        answers: Matrix,
        available: NDArray[np.bool_],
    ) -> Matrix:
        """Return d × the norm."""
        return np.asarray(shares * answers)


@dataclass(frozen=True)
class ResidualSampling(NormSampling):
    """By ‖d (U − βh)‖, with old updates as control variates (GVR* of the slides).

    Of GVR* the slides have the name alone; MMFL-StaleVR of Zhang et al. 2025 is of this kind. Taken
    here: β = ⟨U, h⟩ / ‖h‖², which makes ‖U − βh‖ smallest. The node knows U and h and reports β.

    Examples
    --------
    >>> from gems_flwr import MultiModel, ResidualSampling
    >>> MultiModel(sampling=ResidualSampling()).rule == MultiModel(sampling="stale").rule
    True
    """

    name: ClassVar[str] = "stale"
    question: ClassVar[Question | None] = RESIDUALS
    keeps_updates: ClassVar[bool] = True

    def beta(self, reported: float | None) -> float:
        """Return what the node has reported; 0 for one that has not."""
        return reported or 0.0


@dataclass(frozen=True)
class FedVarp(SamplingRule):
    """Uniform draws, old updates as control variates with β = 1.

    Jhunjhunwala, Sharma, Nagarkatti and Joshi 2022, "FedVARP: tackling the variance due to partial
    client participation in federated learning" (UAI); d and d/p stand for its 1/N and 1/|S|.

    Examples
    --------
    >>> from gems_flwr import FedVarp, MultiModel
    >>> MultiModel(sampling=FedVarp()).rule == MultiModel(sampling="fedvarp").rule
    True
    """

    name: ClassVar[str] = "fedvarp"
    keeps_updates: ClassVar[bool] = True

    def beta(self, reported: float | None) -> float:
        """Return 1."""
        return 1.0


@dataclass(frozen=True)
class Mifa(FedVarp):
    """Uniform draws; a step is Σ d × the last update known, over all nodes: biased, but steady.

    Gu, Huang, Zhang and Huang 2021, "Fast federated learning in the presence of arbitrary device
    unavailability" (NeurIPS). A node that was never drawn counts as zero.

    Examples
    --------
    >>> from gems_flwr import Mifa, MultiModel
    >>> MultiModel(sampling=Mifa()).rule == MultiModel(sampling="mifa").rule
    True
    """

    name: ClassVar[str] = "mifa"

    def coefficients(
        self, shares: Matrix, probabilities: Matrix, drawn: NDArray[np.bool_]
    ) -> Matrix:
        """Return d: new and old updates count alike."""
        return aggregation_coefficients(shares, np.where(drawn, 1.0, probabilities), drawn)


@dataclass(frozen=True)
class Scaffold(SamplingRule):
    """Uniform draws, local gradients corrected by c − c_i.

    Karimireddy et al. 2020, "SCAFFOLD: stochastic controlled averaging for federated learning"
    (ICML), option II: c_i becomes the mean gradient of local training.

    Examples
    --------
    >>> from gems_flwr import MultiModel, Scaffold
    >>> MultiModel(sampling=Scaffold()).rule == MultiModel(sampling="scaffold").rule
    True
    """

    name: ClassVar[str] = "scaffold"
    corrects_gradients: ClassVar[bool] = True


# What a name alone stands for; a new rule of the library is added here.
RULES: Mapping[str, type[SamplingRule]] = {
    rule.name: rule
    for rule in (
        UniformSampling,
        FullParticipation,
        LossSampling,
        NormSampling,
        ResidualSampling,
        FedVarp,
        Mifa,
        Scaffold,
    )
}


def sampling_rule(chosen: str | SamplingRule) -> SamplingRule:
    """Return a rule as it is, or the one that a name stands for, with its defaults.

    Raises
    ------
    OptionError
        If there is no such rule.
    """
    if isinstance(chosen, SamplingRule):
        return chosen
    if not isinstance(chosen, str) or chosen not in RULES:
        raise OptionError(
            f"sampling must be one of {list(RULES)}, or a SamplingRule, got {chosen!r}"
        )
    return RULES[chosen]()
