"""All that a node can be asked for: frozen values that check themselves and travel as text.

- `gems_flwr.wire.space_requests`: the good-enough spaces of the output layer.
- `ScoreRequest`: the score of a model.
- `gems_flwr.wire.gradient_requests`: the gradient of a model's loss, and its losses nearby.
- `Neurons`: the balls of hidden neurons (2019, Section 3.2, step 2); `NeuronRequest`: those of
  one layer.
- `StatisticsRequest`: what a model is merged with others by.
- `AveragingRequest`: what to do with a model that lives on the node.
- `ModelsRequest`: what to do with several models.

Decided here: the values are light (they do without torch), and a text leaves out what is at its
default, so that a request costs few bytes. `gems_flwr.wire.asking` puts them into
instructions and reads them there.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args

from gems_flwr.compression.difference_coding import FORMS, Form
from gems_flwr.errors import OptionError
from gems_flwr.spaces.checks import MAX_WEIGHT
from gems_flwr.spaces.radius import METHODS, Method
from gems_flwr.typing import LOSS_MEASURES, NeuronMeasure

if TYPE_CHECKING:
    from gems_flwr.model_merging.layer_statistics import Kind as StatisticsKind
    from gems_flwr.model_merging.layer_statistics import Method as MergeMethod
    from gems_flwr.moments.private_release import PrivateScore
    from gems_flwr.radii.fisher_axes import Labels


@dataclass(frozen=True)
class JsonRequest:
    """Base of the frozen dataclasses that a server sends along with a message."""

    # Between items, and after a key.
    separators: ClassVar[tuple[str, str]] = (", ", ": ")

    def check(self, rules: Mapping[str, tuple[bool, str]]) -> None:
        """Raise an OptionError for the first field that breaks its rule.

        Parameters
        ----------
        rules : mapping
            From the field's name to whether it holds and what is allowed.
        """
        for name, (holds, allowed) in rules.items():
            if not holds:
                raise OptionError(f"{name} must be {allowed}, got {getattr(self, name)!r}")

    def said(self) -> dict[str, Any]:
        """Return the fields that are not at their defaults."""
        return {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != default_of(f)
        }

    def to_json(self) -> str:
        """Return the request as text, without what is at its default."""
        return json.dumps(self.said(), separators=self.separators)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the request that `to_json` wrote."""
        return cls(**known_options(json.loads(text), {f.name for f in dataclasses.fields(cls)}))


def default_of(setting: dataclasses.Field[Any]) -> Any:
    """Return what a field is if nothing is said."""
    if setting.default_factory is not dataclasses.MISSING:
        return setting.default_factory()
    return setting.default


def known_options(values: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """Return the values in a text, or raise an OptionError that names what is not known."""
    unknown = sorted(values.keys() - names)
    if unknown:
        raise OptionError(f"the server asks for {unknown}, which this version does not know")
    return values


@dataclass(frozen=True)
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
        if self.dp_epsilon is None:
            return None
        from gems_flwr.moments.private_release import PrivateScore

        return PrivateScore(self.dp_epsilon, self.dp_delta)


# --- neurons of hidden layers -----------------------------------------------------------------


@dataclass(frozen=True)
class Neurons(JsonRequest):
    """The balls of all neurons of a hidden layer.

    Parameters
    ----------
    epsilon : float or sequence of float, default 0.02
        Deviation of a neuron's output that is allowed (epsilon_j of Eq. 3), above 0; one for all
        hidden layers, or one for each.
    radius : {"sampled", "worst", "certified", "bisection", "growing"}
        How the radii are found; see `gems_flwr.spaces.radius.Radius`.
    directions : int, default 500
        Random directions, for all radii but worst and certified; at least 1.
    measure : {"absolute", "relative", "loss", "relative_loss"}
        Whether `epsilon` is in units of the outputs, as Eq. 3 stands, which depends on the
        number of samples; or a share of each neuron's own output; or the mean loss that the whole
        network may have with the neuron changed (2018); or the share by which that loss may
        exceed the network's own. Losses are for linear layers below linear layers, and for radii
        that are sampled, bisection or growing.
    outgoing : bool, default False
        Whether the outgoing weights are part of the ball, as in the 2018 paper.
    max_rows : int, default 20000
        Inputs of the layer (for a convolution: patches) used at most, drawn at random; at
        least 1.

    Examples
    --------
    >>> from gems_flwr import Neurons
    >>> Neurons(epsilon=[0.4, 0.6], radius="worst").in_layer(1).to_json()
    '{"layer": 1, "epsilon": 0.6, "radius": "worst"}'
    """

    epsilon: float | Sequence[float] = 0.02
    radius: Method = "sampled"
    directions: int = 500
    measure: NeuronMeasure = "absolute"
    outgoing: bool = False
    max_rows: int = 20000

    def __post_init__(self) -> None:
        if isinstance(self.epsilon, list):
            object.__setattr__(self, "epsilon", tuple(self.epsilon))
        each = self.epsilon if isinstance(self.epsilon, Sequence) else (self.epsilon,)
        measures = list(get_args(NeuronMeasure))
        allowed = all(0 < value <= MAX_WEIGHT for value in each)
        by_loss = self.measure in LOSS_MEASURES and self.radius in ("worst", "certified")
        self.check(
            {
                "epsilon": (allowed, f"in (0, {MAX_WEIGHT:g}]"),
                "radius": (
                    self.radius in METHODS and not by_loss,
                    f"one of {list(METHODS)}, with a loss not worst or certified",
                ),
                "directions": (self.directions >= 1, "at least 1"),
                "measure": (self.measure in measures, f"one of {measures}"),
                "max_rows": (self.max_rows >= 1, "at least 1"),
            }
        )

    def in_layer(self, layer: int) -> NeuronRequest:
        """Return the request for the neurons of one hidden layer, counted from 0."""
        own = self.epsilon[layer] if isinstance(self.epsilon, Sequence) else self.epsilon
        return NeuronRequest(layer, dataclasses.replace(self, epsilon=float(own)))


@dataclass(frozen=True)
class NeuronRequest(JsonRequest):
    """The balls of the neurons of one hidden layer.

    Parameters
    ----------
    layer : int
        Index of the hidden layer, from 0.
    neurons : Neurons
        How they are built, with one epsilon.
    bias_above : bool, default False
        Whether the bias of the layer above is sent along, if it has one.
    """

    layer: int
    neurons: Neurons
    bias_above: bool = False

    def __post_init__(self) -> None:
        whole = isinstance(self.layer, int) and self.layer >= 0
        flag = isinstance(self.bias_above, bool)
        self.check({"layer": (whole, "an integer from 0"), "bias_above": (flag, "true or false")})
        _ = self.epsilon

    @property
    def epsilon(self) -> float:
        """Deviation of a neuron's output that is allowed in this layer."""
        if isinstance(self.neurons.epsilon, Sequence):
            raise OptionError(f"epsilon must be one for the layer, got {self.neurons.epsilon}")
        return self.neurons.epsilon

    def said(self) -> dict[str, Any]:
        """Return what a text has to say, layer and epsilon in any case."""
        said = {"layer": self.layer, "epsilon": self.epsilon} | self.neurons.said()
        return said | ({"bias_above": True} if self.bias_above else {})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the request that `to_json` wrote."""
        names = {"layer", "bias_above"} | {f.name for f in dataclasses.fields(Neurons)}
        values = known_options(json.loads(text), names)
        if not {"layer", "epsilon"} <= values.keys():
            raise OptionError(f"a request for neurons has a layer and an epsilon, got {values}")
        return cls(
            values.pop("layer"),
            bias_above=values.pop("bias_above", False),
            neurons=Neurons(**values),
        )


# --- models and what they are merged by -------------------------------------------------------


@dataclass(frozen=True)
class StatisticsRequest(JsonRequest):
    """Which statistics a node is to send along with its trained model.

    Parameters
    ----------
    method : one of `gems_flwr.model_merging.layer_statistics.NEEDED`
        How models will be merged.
    labels : {"exact", "sampled"}
        Whether gradients are taken in expectation over the labels that the model itself predicts
        (a backward pass per class), or for one label drawn from the prediction.
    share : float
        Bytes of the statistics relative to the model's in single precision, up to 10; 0: as they
        are, whatever that takes.
    """

    method: MergeMethod
    labels: Labels = "exact"
    share: float = 0.0

    def __post_init__(self) -> None:
        from gems_flwr.model_merging.layer_statistics import NEEDED

        self.check(
            {
                "method": (self.method in NEEDED, f"one of {list(NEEDED)}"),
                "labels": (self.labels in ("exact", "sampled"), "one of ['exact', 'sampled']"),
                "share": (0 <= self.share <= 10, "from 0 to 10"),
            }
        )

    @property
    def kinds(self) -> tuple[StatisticsKind, ...]:
        """What is needed of every layer."""
        from gems_flwr.model_merging.layer_statistics import NEEDED

        return NEEDED[self.method]


Send = Literal["never", "violated", "always"]


@dataclass(frozen=True)
class AveragingRequest(JsonRequest):
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
    compress : {"float32", "float16", "int8", "int4", "int2"}
        How models travel in both directions: other than ``float32`` as differences to the
        reference; see `gems_flwr.compression.difference_coding`.
    base : int
        Number of the reference that the model in this message is a difference to, where it is one.
    """

    separators: ClassVar[tuple[str, str]] = (",", ":")

    run: str
    model: int
    reference: int
    steps: int = 1
    send: Send = "never"
    delta: float = 0.0
    measure: bool = False
    adopt: bool = False
    ignore: tuple[str, ...] = ()
    compress: Form = "float32"
    base: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "ignore", tuple(self.ignore))
        self.check(
            {
                "send": (self.send in get_args(Send), f"one of {list(get_args(Send))}"),
                "compress": (self.compress in FORMS, f"one of {list(FORMS)}"),
            }
        )


Action = Literal["introduce", "losses", "train", "send"]
ReportKind = Literal["model", "norm", "residual"]


@dataclass(frozen=True)
class ModelsRequest(JsonRequest):
    """What a node is asked to do with several models.

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

    separators: ClassVar[tuple[str, str]] = (",", ":")

    run: str
    action: Action
    versions: Mapping[str, int] = field(default_factory=dict)
    report: ReportKind = "model"
    settled: Mapping[str, int] = field(default_factory=dict)
    keep: bool = False

    def __post_init__(self) -> None:
        actions = get_args(Action)
        self.check({"action": (self.action in actions, f"one of {list(actions)}")})
