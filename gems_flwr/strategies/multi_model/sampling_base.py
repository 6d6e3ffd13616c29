"""What a sampling rule of `MultiModel` can say, and what it says unless a subclass differs.

A rule is a value. It says what nodes are asked before the draw (`SamplingRule.question`), how
probabilities follow from the answers (`importance`, `probabilities`), what the server keeps of old
updates and how much of them it takes for a guess of new ones (`keeps_updates`, `beta`), what counts
for a pair that was drawn (`coefficients`) and what a step is (`step`). Everything else, messages,
failures, checkpoints, is the same for all rules and knows none of them by name.

d is a node's share of a model's data, p a pair's probability, U the global weights minus the
trained ones, h the last update of a pair that the server has used. The rules that the library has
stand in `sampling_rules`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from gems_flwr.averaging.steps import remembered, stepped
from gems_flwr.client_sampling import Matrix, aggregation_coefficients, optimal_probabilities
from gems_flwr.errors import OptionError
from gems_flwr.typing import Arrays
from gems_flwr.wire.requests import Action, ReportKind


@dataclass(frozen=True)
class Question:
    """What every node is asked, before the draw, about every model that it has.

    Parameters
    ----------
    step : str
        Tells this exchange from the others of the round; names the replies that are kept.
    answer : {"loss", "norm"}
        The number that comes back, see `wire.multi_model_replies.ModelPart`.
    action, report
        See `wire.requests.ModelsRequest`. If nodes train, they keep what they have trained, and
        those drawn send it.
    keep : bool
        Whether nodes keep the models that they are given, and train these if they are drawn.
    """

    step: str
    answer: Literal["loss", "norm"]
    action: Action
    report: ReportKind = "model"
    keep: bool = False

    @property
    def trains(self) -> bool:
        """Whether the answer needs training; the trained models wait on the nodes."""
        return self.action == "train"

    @property
    def compares(self) -> bool:
        """Whether the answer needs the last update that the server has used."""
        return self.report == "residual"


# The local loss, which costs a forward pass.
LOSSES = Question("losses", "loss", "losses", keep=True)
# ‖U‖, which costs training.
NORMS = Question("norms", "norm", "train", "norm")
# β and ‖U − βh‖, which costs training, and memory on the nodes.
RESIDUALS = Question("norms", "norm", "train", "residual")


@dataclass(frozen=True)
class SamplingRule:
    """Base of all rules: every pair alike, and Σ (d/p) U over those drawn.

    Override what differs. Matrices have one row per node and one column per model.

    Attributes
    ----------
    name : str
        What results call the rule; the class's name if a subclass gives none.
    question : Question, optional
        `LOSSES`, `NORMS` or `RESIDUALS`, asked before the draw; None: nothing.
    has_budget : bool
        False if the rule takes no notice of the budget and the capacities.
    keeps_updates : bool
        Whether the server keeps the last update of every pair, the h of `step`.
    corrects_gradients : bool
        Whether nodes correct their gradients by c − c_i and send how c_i has changed (SCAFFOLD).
        It does not go together with a question.

    Examples
    --------
    A rule by which nodes are drawn by their share of the data:

    >>> import numpy as np
    >>> from gems_flwr import MultiModel, SamplingRule
    >>> class DataSampling(SamplingRule):
    ...     def importance(self, shares, answers, available):
    ...         return shares
    >>> rule = MultiModel(sampling=DataSampling(), budget=1).rule
    >>> rule.name
    'DataSampling'
    >>> shares = np.array([[0.75], [0.25]])
    >>> importance = rule.importance(shares, np.zeros((2, 1)), np.ones((2, 1), bool))
    >>> rule.probabilities(importance, budget=1, capacity=np.ones(2, int))
    array([[0.75],
           [0.25]])
    """

    name: ClassVar[str] = "SamplingRule"
    question: ClassVar[Question | None] = None
    has_budget: ClassVar[bool] = True
    keeps_updates: ClassVar[bool] = False
    corrects_gradients: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "name" not in vars(cls):
            cls.name = cls.__name__
        if cls.corrects_gradients and cls.question is not None:
            raise OptionError(
                f"{cls.__name__} corrects gradients, so it cannot have a question too"
            )

    @property
    def needs_memory_on_nodes(self) -> bool:
        """Whether nodes must remember what they sent in earlier rounds."""
        return self.corrects_gradients or (self.question is not None and self.question.compares)

    def importance(
        self,
        shares: Matrix,
        answers: Matrix,
        available: NDArray[np.bool_],
    ) -> Matrix | None:
        """Return the importance of every pair, at least 0; None if all are alike.

        Parameters
        ----------
        shares : array of shape (nodes, models)
            d.
        answers : array of the same shape
            The answers to `question`; 0 where there is none.
        available : array of bool of the same shape
            The pairs that can be drawn; the importance of the others does not count.
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
        """Return β: how much of h is taken for a guess of U; by default nothing.

        Parameters
        ----------
        reported : float, optional
            What the node has found best, if it was asked for `RESIDUALS`.
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

        Parameters
        ----------
        model : mapping from str to ndarray
            w.
        trained : mapping from node to arrays
            What those drawn have delivered; the order of summation.
        coefficients : mapping from node to float
            Their c.
        shares : mapping from node to float
            d of all nodes.
        old : mapping from node to vector
            h where there is one; empty unless `keeps_updates`.
        betas : mapping from node to float
            β of all nodes.
        """
        extra = remembered(shares, coefficients, old, betas)
        return stepped(model, list(trained.values()), list(coefficients.values()), extra)
