"""The base of stages: a value in a file of its own, with both sides of what it asks of nodes.

A stage works on a `Play`: the spaces, the layer found so far, the details of the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from gems_flwr.core.round import Round
from gems_flwr.errors import OptionError
from gems_flwr.spaces.cone import ConeOptions, HeadOptions
from gems_flwr.typing import Arrays

if TYPE_CHECKING:
    from gems_flwr.spaces import Aggregate, OutputLayer
    from gems_flwr.spaces.cone.summed import SummedMoments
    from gems_flwr.spaces.question import SpaceQuestion

HeadName = Literal["cone", "ridge", "lda", "nearest_mean", "auto"]


@dataclass(frozen=True)
class Head:
    """What is made of class moments.

    Parameters
    ----------
    name : {"cone", "ridge", "lda", "nearest_mean", "auto"}
        The layer of the cone objective, or a closed form of others; see
        `gems_flwr.spaces.cone.linear_head`. ``auto`` sends all of them to the nodes in one more
        exchange, whose held-out data choose.
    ridge : float, optional
        Ridge of the cone objective, at least 0; by default that of the form of the moments. For
        ``ridge`` in units of the mean variance of a feature, 0.01 by default.
    class_weight : {"counts", "balanced"}
        Whether a class counts by its samples, or all the same: in the cone objective, in the loss
        that is refined, and in what ``auto`` chooses by (balanced accuracy then).
    prior : "counts", "uniform" or float in [0, 1], default "counts"
        How likely a class is for ridge and lda: by its samples, all the same, or samples to that
        power.
    shrinkage : float, optional
        Of lda's covariance towards a round one, in [0, 1]; 0.05 by default.

    Examples
    --------
    >>> from gems_flwr import Gems, Head
    >>> strategy = Gems(head=Head("lda", prior="uniform"))
    """

    name: HeadName = "cone"
    ridge: float | None = None
    class_weight: Literal["counts", "balanced"] = "counts"
    prior: Literal["counts", "uniform"] | float = "counts"
    shrinkage: float | None = None

    def __post_init__(self) -> None:
        _ = self.cone_options(), self.head_options()

    def cone_options(self, device: str = "cpu") -> ConeOptions:
        """Return how the cone objective is minimised."""
        return ConeOptions(ridge=self.ridge, class_weight=self.class_weight, device=device)

    def head_options(self, device: str = "cpu") -> HeadOptions:
        """Return how closed forms are computed."""
        return HeadOptions(self.name, self.prior, self.shrinkage, self.ridge, device)


def as_head(head: Head | str) -> Head:
    """Return what a word such as ``"lda"`` stands for."""
    return head if isinstance(head, Head) else Head(head)  # type: ignore[arg-type]


@dataclass
class Play:
    """One round of GEMS under way."""

    round: Round  # asks the nodes
    question: SpaceQuestion  # what nodes were asked for
    layer: OutputLayer  # which of the model's arrays it is about
    start: Arrays  # the model that the round began with
    head: Head = field(default_factory=Head)  # what is made of class moments
    device: str = "cpu"  # where the server computes
    # By node; a stage may leave some out. One of ``all nodes`` where only sums are looked at.
    spaces: dict[str, Any] = field(default_factory=dict)
    received: dict[str, Any] = field(default_factory=dict)  # what came, whatever became of it
    summed: SummedMoments | None = None  # totals over nodes, where no single space is seen
    found: Aggregate | None = None  # the layer so far, once there is one
    details: dict[str, Any] = field(default_factory=dict)  # what is reported of the result
    memory: dict[str, Any] = field(default_factory=dict)  # what later rounds need

    @property
    def aggregate(self) -> Aggregate:
        """The layer that was found so far."""
        assert self.found is not None, "no stage has found a layer yet"
        return self.found

    @property
    def arrays(self) -> dict[str, Any]:
        """The model with the layer that was found so far."""
        return self.layer.replace_in(self.start, self.aggregate.point)


class Stage:
    """Base of the stages."""

    # What the option is called that asks for it, and what must be there; see `check_needs`.
    option: ClassVar[str] = ""
    needs: ClassVar[frozenset[str]] = frozenset()

    def play(self, play: Play) -> None:
        """Do the stage's part of the first round."""
        raise NotImplementedError


# What spaces and options have to offer (`SpaceQuestion.offers`), and how to get it.
_MEANING = {
    "spaces": "the spaces of single nodes, which sums hide",
    "sums": (
        "sums, since secure sums hide the spaces of single nodes: write "
        "space=Cone(sums=True, sketch=20)"
    ),
    "moments": "class moments: write space=Cone() or space=Means()",
    "comparable": (
        "spaces that can be held against each other: class moments, or balls and ellipsoids of "
        "an epsilon that is not left to the server (epsilon='auto')"
    ),
    "exact": "moments without noise, as gradients are: leave out dp_epsilon",
    "cone head": "head='cone', whose objective public samples join",
}


def check_needs(offers: frozenset[str], needs: Mapping[str, frozenset[str]]) -> None:
    """Refuse what cannot work together, with one sentence.

    `offers` is what spaces and options have to offer, `needs` what each option needs.
    """
    for option, each in needs.items():
        for need, meaning in _MEANING.items():
            if need in each - offers:
                raise OptionError(f"{option} needs {meaning}")
