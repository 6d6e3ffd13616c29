"""All that a node can be asked for: frozen values that check themselves and travel as text.

- `SpaceRequest`, `ScoreRequest`: a good-enough space of the output layer, the score of a model.
- `NeuronRequest`: the balls of a hidden layer's neurons (2019, Section 3.2, step 2).
- `StatisticsRequest`: what a model is merged with others by.
- `AveragingRequest`: what to do with a model that lives on the node.
- `ModelsRequest`: what to do with several models.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self, get_args

from gems_flwr.model_merging.layer_statistics import NEEDED
from gems_flwr.model_merging.layer_statistics import Kind as StatisticsKind
from gems_flwr.model_merging.layer_statistics import Method as MergeMethod
from gems_flwr.moments.cone_building import Rank
from gems_flwr.moments.private_release import PrivateRelease, PrivateScore
from gems_flwr.radii.fisher_axes import Labels
from gems_flwr.radii.neuron_data import NeuronMeasure
from gems_flwr.spaces.checks import MAX_WEIGHT
from gems_flwr.spaces.radius import METHODS, Method


@dataclasses.dataclass(frozen=True)
class JsonRequest:
    """Base of the frozen dataclasses that a server sends along with a message."""

    def check(self, rules: Mapping[str, tuple[bool, str]]) -> None:
        """Raise a ValueError for the first field that breaks its rule.

        Parameters
        ----------
        rules : mapping
            From the field's name to whether it holds and what is allowed.
        """
        for name, (holds, allowed) in rules.items():
            if not holds:
                raise ValueError(f"{name} must be {allowed}, got {getattr(self, name)!r}")

    def to_json(self) -> str:
        """Return the request as text, without what is at its default."""
        given = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        }
        return json.dumps(given)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the request that `to_json` wrote."""
        values: dict[str, Any] = json.loads(text)
        unknown = sorted(values.keys() - {f.name for f in dataclasses.fields(cls)})
        if unknown:
            raise ValueError(f"the server asks for {unknown}, which this version does not know")
        return cls(**values)


Kind = Literal["ball", "ellipsoid", "cone"]
Measure = Literal["accuracy", "loss"]
CURVED: tuple[Method, ...] = ("sampled", "worst", "certified")


@dataclasses.dataclass(frozen=True)
class SpaceRequest(JsonRequest):
    """Which space a node is to build.

    Parameters
    ----------
    kind : {"ball", "ellipsoid", "cone"}
        Shape of the space.
    epsilon : float
        What is good enough: an accuracy in (0, 1], or a loss above 0; for cones the share of
        each class to be told from each rival, in [0.5, 1).
    measure : {"accuracy", "loss"}
        What `epsilon` is, for balls and ellipsoids.
    radius : {"sampled", "worst", "certified", "bisection", "growing"}
        How the radius is found; see `gems_flwr.spaces.radius.Radius`.
    directions : int
        Random directions, for all radii but worst and certified; at least 1.
    floor : float
        c of Eq. 5: shortest axis of an ellipsoid relative to the longest, in (0, 1].
    curve : bool
        Whether the radius for every epsilon is sent along (sampled, worst and certified only).
    rank : "auto", "full" or int
        Columns of the covariance factors of a cone: as many as the samples of each class allow,
        full moments, or a fixed number, at least 1; see `moments.cone_building.build_cone`.
    clusters : int
        Entries per class of a cone at most, at least 1.
    int8 : bool
        Whether low-rank moments are sent in eight bits.
    min_count : int, optional
        Classes with fewer samples are withheld, at least 2; see `cone_building.least_count`.
    sums : bool
        Whether full moments are sent as plain sums over all classes, of one shape for every
        node: all that the server, or a secure summation before it, ever needs is their total.
    dp_epsilon, dp_delta, dp_clip : float
        Differentially private cone: privacy loss, chance of more, and the length to which
        inputs are clipped. Off while `dp_epsilon` is None.
    dp_classes : sequence of int, optional
        Classes in a private release; all of the task if left out.
    dp_seeded : bool
        Whether the noise is to come from the run's seed, which protects nobody. Simulations ask
        for it; a node with data of its own refuses.
    """

    kind: Kind = "cone"
    epsilon: float = 0.5
    measure: Measure = "accuracy"
    radius: Method = "sampled"
    directions: int = 500
    floor: float = 0.1
    curve: bool = False
    rank: Rank = "auto"
    clusters: int = 1
    int8: bool = True
    min_count: int | None = None
    sums: bool = False
    dp_epsilon: float | None = None
    dp_delta: float = 1e-5
    dp_clip: float = 1.0
    dp_classes: Sequence[int] | None = None
    dp_seeded: bool = False

    def __post_init__(self) -> None:
        top = 1.0 if self.measure == "accuracy" else float("inf")
        rules: dict[str, tuple[bool, str]] = {
            "kind": (self.kind in get_args(Kind), f"one of {list(get_args(Kind))}"),
            "measure": (self.measure in get_args(Measure), f"one of {list(get_args(Measure))}"),
            "radius": (self.radius in METHODS, f"one of {list(METHODS)}"),
            "directions": (self.directions >= 1, "at least 1"),
            "floor": (0 < self.floor <= 1, "in (0, 1]"),
            "rank": (is_rank(self.rank), "'auto', 'full' or a whole number from 1"),
            "clusters": (self.clusters >= 1, "at least 1"),
            "min_count": (self.min_count is None or self.min_count >= 2, "at least 2, or none"),
        }
        if self.kind == "cone":
            rules["epsilon"] = (0.5 <= self.epsilon < 1, "in [0.5, 1) for a cone")
            whole = not isinstance(self.rank, int) and self.clusters == 1
            whole = whole and self.dp_epsilon is None
            rules["sums"] = (
                not self.sums or whole,
                "false with a fixed rank, clusters or dp_epsilon",
            )
        else:
            rules["epsilon"] = (0 < self.epsilon <= top, f"in (0, {top:g}]")
            curved = not self.curve or (self.radius in CURVED and self.measure == "accuracy")
            rules["curve"] = (curved, f"false unless radius is in {list(CURVED)} for accuracy")
        self.check(rules)
        _ = self.private

    @property
    def private(self) -> PrivateRelease | None:
        """The private release that is asked for, if any."""
        if self.dp_epsilon is None:
            return None
        classes = None if self.dp_classes is None else tuple(self.dp_classes)
        return PrivateRelease(self.dp_epsilon, self.dp_delta, self.dp_clip, classes)


def is_rank(value: object) -> bool:
    """Return whether something can be the rank of a cone."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return value >= 1 if whole else value in ("auto", "full")  # type: ignore[operator]


@dataclasses.dataclass(frozen=True)
class ScoreRequest(JsonRequest):
    """How a node is to tell how accurate a model is on its held-out data.

    Parameters
    ----------
    dp_epsilon, dp_delta : float
        Differentially private score; exact while `dp_epsilon` is None.
    dp_seeded : bool
        As in `SpaceRequest`.
    """

    dp_epsilon: float | None = None
    dp_delta: float = 1e-5
    dp_seeded: bool = False

    def __post_init__(self) -> None:
        _ = self.private

    @property
    def private(self) -> PrivateScore | None:
        """The private release that is asked for, if any."""
        return None if self.dp_epsilon is None else PrivateScore(self.dp_epsilon, self.dp_delta)


@dataclasses.dataclass(frozen=True)
class NeuronRequest(JsonRequest):
    """Which balls a node is to build for the neurons of a hidden layer.

    Parameters
    ----------
    layer : int
        Index of the hidden layer, from 0.
    epsilon : float
        Deviation of a neuron's output that is allowed (epsilon_j of Eq. 3), above 0.
    radius : {"sampled", "worst", "certified", "bisection", "growing"}
        How the radii are found; see `gems_flwr.spaces.radius.Radius`.
    directions : int
        Random directions, for all radii but worst and certified; at least 1.
    measure : {"absolute", "relative"}
        Whether `epsilon` is in units of the outputs, or a share of each neuron's own output.
    outgoing : bool
        Whether the outgoing weights are part of the ball, as in the 2018 paper.
    max_rows : int
        Inputs of the layer (for a convolution: patches) used at most, drawn at random; at
        least 1.
    """

    layer: int
    epsilon: float
    radius: Method = "sampled"
    directions: int = 500
    measure: NeuronMeasure = "absolute"
    outgoing: bool = False
    max_rows: int = 20000

    def __post_init__(self) -> None:
        measures = list(get_args(NeuronMeasure))
        self.check(
            {
                "layer": (isinstance(self.layer, int) and self.layer >= 0, "an integer from 0"),
                "epsilon": (0 < self.epsilon <= MAX_WEIGHT, f"in (0, {MAX_WEIGHT:g}]"),
                "radius": (self.radius in METHODS, f"one of {list(METHODS)}"),
                "directions": (self.directions >= 1, "at least 1"),
                "measure": (self.measure in measures, f"one of {measures}"),
                "max_rows": (self.max_rows >= 1, "at least 1"),
            }
        )


@dataclasses.dataclass(frozen=True)
class StatisticsRequest(JsonRequest):
    """Which statistics a node is to send along with its trained model.

    Parameters
    ----------
    method : {"regmean", "fisher", "kfac", "matching"}
        How models will be merged.
    labels : {"exact", "sampled"}
        Whether gradients are taken in expectation over the labels that the model itself predicts
        (a backward pass per class), or for one label drawn from the prediction.
    """

    method: MergeMethod
    labels: Labels = "exact"

    def __post_init__(self) -> None:
        methods, labels = list(get_args(MergeMethod)), list(get_args(Labels))
        self.check(
            {
                "method": (self.method in methods, f"one of {methods}"),
                "labels": (self.labels in labels, f"one of {labels}"),
            }
        )

    @property
    def kinds(self) -> tuple[StatisticsKind, ...]:
        """What is needed of every layer."""
        return NEEDED[self.method]


Send = Literal["never", "violated", "always"]


@dataclass(frozen=True)
class AveragingRequest:
    """What a node is to do with its local model.

    Parameters
    ----------
    run : str
        Which run this is; what a node keeps from another run does not count.
    model : int
        Number of the last model that the node was given, which may come with this message.
    reference : int
        Number of the reference, likewise.
    steps : int
        How often to call the train handler, at least 0: 0 only asks for what is there.
    send : {"never", "violated", "always"}
        Whether the model is to be sent: ``violated`` if ‖f − r‖² > `delta`.
    delta : float
        The threshold.
    measure : bool
        Whether ‖f − r‖² is to be reported.
    adopt : bool
        Whether the model in this message is the new reference too.
    ignore : tuple of str
        Names of floating-point arrays that are no parameters.
    """

    run: str
    model: int
    reference: int
    steps: int = 1
    send: Send = "never"
    delta: float = 0.0
    measure: bool = False
    adopt: bool = False
    ignore: tuple[str, ...] = ()


Action = Literal["introduce", "losses", "train", "send"]
ReportKind = Literal["model", "norm", "residual"]


@dataclass(frozen=True)
class ModelsRequest:
    """What a node is asked to do.

    Parameters
    ----------
    run : str
        Which run this is; what a node keeps from another run does not count.
    action : {"introduce", "losses", "train", "send"}
        Say what data there is; report the losses of models; train models; send models that were
        trained earlier in this round.
    versions : mapping from str to int
        Which models, and the number of each that it is about.
    report : {"model", "norm", "residual"}
        What comes back of training: the model, ‖U‖, or β and ‖U − βh‖. In the last two cases the
        trained model stays on the node until it is to be sent.
    settled : mapping from str to int
        The round of the last reply by this node, for each model, that the server has used. Only
        what was sent then counts as h, or as SCAFFOLD's control variate of the node.
    keep : bool
        Whether the node keeps the models that it is given.
    """

    run: str
    action: Action
    versions: Mapping[str, int] = field(default_factory=dict)
    report: ReportKind = "model"
    settled: Mapping[str, int] = field(default_factory=dict)
    keep: bool = False
