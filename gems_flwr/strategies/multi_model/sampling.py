"""The sampling rules of `MultiModel`: how pairs are drawn, and what a step makes of their updates.

A rule is a value: what nodes report before the draw, how probabilities follow, what is kept of old
updates, what counts for a pair that was drawn, what a step is. Messages, failures and checkpoints
are the same for all rules.

d is a node's share of a model's data, p a pair's probability, U the global weights minus the
trained ones, h the last update of a pair that the server has used. The rules here are the rows of
Table I of the CMU 18-786 slides (Haoran Zhang, April 2025); their author's paper is Zhang, Gong,
Li, Siew, Joe-Wong and El-Azouzi 2025, "Towards optimal heterogeneous client sampling in multi-model
federated learning" (arXiv 2504.05138).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from gems_flwr.averaging import (
    LOSS_FLOOR,
    Matrix,
    aggregation_coefficients,
    loss_importance,
    optimal_probabilities,
    remembered,
    stepped,
)
from gems_flwr.errors import OptionError
from gems_flwr.typing import Arrays

Action = Literal["losses", "train", "send"]
ReportKind = Literal["model", "norm", "residual"]


@dataclass(frozen=True)
class Measure:
    """What every node reports, before the draw, of every model that it has.

    The answer is an attribute of `ModelPart`; for the rest see `AboutModels`. If nodes train, they
    keep what they have trained, and those drawn send it.
    """

    answer: Literal["loss", "norm"]
    action: Action
    report: ReportKind = "model"
    keep: bool = False

    @property
    def trains(self) -> bool:
        """Whether the answer needs training."""
        return self.action == "train"


# The local loss, which costs a forward pass.
LOSSES = Measure("loss", "losses", keep=True)
# ‖U‖, which costs training.
NORMS = Measure("norm", "train", "norm")
# β and ‖U − βh‖, which costs training, and memory on the nodes.
RESIDUALS = Measure("norm", "train", "residual")


@dataclass(frozen=True)
class SamplingRule:
    """Base of all rules: every pair alike, and Σ (d/p) U over those drawn.

    Override what differs. Matrices have a row per node and a column per model.

    Examples
    --------
    A rule by which nodes are drawn by their share of the data:

    >>> import numpy as np
    >>> from gems_flwr import MultiModel
    >>> from gems_flwr.strategies.multi_model import SamplingRule
    >>> class DataSampling(SamplingRule):
    ...     def importance(self, shares, answers, available):
    ...         return shares
    >>> rule = MultiModel(sampling=DataSampling(), budget=1).rule
    >>> rule.probabilities(np.array([[0.75, 0.25]]), budget=1, capacity=np.ones(1, int))
    array([[0.75, 0.25]])
    """

    # What results call the rule; the class's name if a subclass gives none.
    name: ClassVar[str] = "SamplingRule"
    # `LOSSES`, `NORMS` or `RESIDUALS`, reported before the draw; None: nothing.
    measure: ClassVar[Measure | None] = None
    # False if the rule takes no notice of the budget and the capacities.
    has_budget: ClassVar[bool] = True
    # Whether the server keeps the last update of every pair, the h of `step`.
    keeps_updates: ClassVar[bool] = False
    # Whether nodes correct their gradients by c − c_i and send how c_i has changed (SCAFFOLD); not
    # together with a measure.
    corrects_gradients: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "name" not in vars(cls):
            cls.name = cls.__name__
        if cls.corrects_gradients and cls.measure is not None:
            raise OptionError(f"{cls.__name__} corrects gradients, so it cannot have a measure too")

    @property
    def needs_memory_on_nodes(self) -> bool:
        """Whether nodes must remember what they sent in earlier rounds."""
        return self.corrects_gradients or self.measure == RESIDUALS

    def importance(
        self, shares: Matrix, answers: Matrix, available: NDArray[np.bool_]
    ) -> Matrix | None:
        """Return the importance of every pair, at least 0; None if all are alike.

        The `shares` are d, `answers` were reported by `measure` (0 where there is none); of pairs
        that are not `available` the importance does not count.
        """
        return None

    def probabilities(self, importance: Matrix, budget: float, capacity: NDArray) -> Matrix:
        """Return p: by default those with the least variance, see `optimal_probabilities`."""
        return optimal_probabilities(importance, budget, capacity)

    def coefficients(
        self, shares: Matrix, probabilities: Matrix, drawn: NDArray[np.bool_]
    ) -> Matrix:
        """Return c: what the update of a pair that was drawn counts for; by default d / p."""
        return aggregation_coefficients(shares, probabilities, drawn)

    def beta(self, reported: float | None) -> float:
        """Return β: how much of h is taken for a guess of U.

        `reported` is the node's own, if it was asked for `RESIDUALS`.
        """
        return 0.0

    def step(
        self,
        model: Arrays,
        trained: Mapping[str, Arrays],
        coefficients: Mapping[str, float],
        shares: Mapping[str, float],
        old: Mapping[str, NDArray],
        betas: Mapping[str, float],
    ) -> dict[str, NDArray]:
        """Return the new global model: w − Σ_all d β h − Σ_drawn c (U − β h).

        `model` is w; `trained` and `coefficients` are the models of those drawn, in the order of
        summation, and their c; `shares` and `betas` are d and β of all nodes; `old` has h where
        there is one, and is empty unless `keeps_updates`.
        """
        extra = remembered(shares, coefficients, old, betas)
        return stepped(model, list(trained.values()), list(coefficients.values()), extra)


@dataclass(frozen=True)
class UniformSampling(SamplingRule):
    """Every pair with the same probability, as far as capacities allow (``random``)."""

    name: ClassVar[str] = "random"


@dataclass(frozen=True)
class FullParticipation(SamplingRule):
    """Every pair in every round, whatever budget and capacities are: the reference."""

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
        no node is left out for good.

    Examples
    --------
    >>> from gems_flwr import MultiModel
    >>> MultiModel(sampling="lvr").rule
    LossSampling(floor=0.01)
    """

    name: ClassVar[str] = "lvr"
    measure: ClassVar[Measure | None] = LOSSES

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
    """

    name: ClassVar[str] = "gvr"
    measure: ClassVar[Measure | None] = NORMS

    def importance(self, shares: Matrix, answers: Matrix, available: NDArray[np.bool_]) -> Matrix:
        """Return d × the norm."""
        return np.asarray(shares * answers)


@dataclass(frozen=True)
class ResidualSampling(NormSampling):
    """By ‖d (U − βh)‖, with old updates as control variates (GVR* of the slides).

    Of GVR* the slides have the name alone; MMFL-StaleVR of Zhang et al. 2025 is of this kind. The
    node reports β = ⟨U, h⟩ / ‖h‖², which makes ‖U − βh‖ smallest.
    """

    name: ClassVar[str] = "stale"
    measure: ClassVar[Measure | None] = RESIDUALS
    keeps_updates: ClassVar[bool] = True

    def beta(self, reported: float | None) -> float:
        """Return the reported one, or 0."""
        return reported or 0.0


@dataclass(frozen=True)
class FedVarp(SamplingRule):
    """Uniform draws, old updates as control variates with β = 1.

    Jhunjhunwala, Sharma, Nagarkatti and Joshi 2022, "FedVARP: tackling the variance due to partial
    client participation in federated learning" (UAI); d and d/p stand for its 1/N and 1/|S|.
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
    """

    name: ClassVar[str] = "scaffold"
    corrects_gradients: ClassVar[bool] = True


_RULES = (
    *(UniformSampling, FullParticipation, LossSampling, NormSampling),
    *(ResidualSampling, FedVarp, Mifa, Scaffold),
)
# By name; a new rule of the library is added here.
RULES: Mapping[str, type[SamplingRule]] = {rule.name: rule for rule in _RULES}


def sampling_rule(chosen: str | SamplingRule) -> SamplingRule:
    """Return a rule as it is, or the one of a name with its defaults."""
    if isinstance(chosen, SamplingRule):
        return chosen
    if not isinstance(chosen, str) or chosen not in RULES:
        raise OptionError(
            f"sampling must be one of {list(RULES)}, or a SamplingRule, got {chosen!r}"
        )
    return RULES[chosen]()
