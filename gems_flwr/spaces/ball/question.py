"""Asking for the papers' spaces: balls and ellipsoids around a node's own trained layer."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args

from gems_flwr.bounds import MAX_DIRECTIONS
from gems_flwr.core.question import ON_SERVER, Disclosure
from gems_flwr.devices import exact_device
from gems_flwr.errors import OptionError, SpaceError
from gems_flwr.networks import linear_layer
from gems_flwr.spaces.ball.ball import CURVE, METHODS, BallSpace, CenteredSpace, EllipsoidSpace
from gems_flwr.spaces.ball.layer_data import LayerData, Quality
from gems_flwr.spaces.ball.radii import DAMPING, build_ball, build_ellipsoid, linear_fisher
from gems_flwr.spaces.question import SpaceQuestion, as_number

if TYPE_CHECKING:
    from gems_flwr.node import Node
    from gems_flwr.spaces.ball.ball import Method

Measure = Literal["accuracy", "loss"]
OnEmpty = Literal["least", "relax", "subset", "fail"]
CURVED = ("sampled", "worst", "certified")
BY_LOSS = ("sampled", "bisection", "growing")
# Any that every centre meets: the curve has the radius for all others.
_TINY_EPSILON = 1e-6


@dataclass(frozen=True)
class Centered(SpaceQuestion):
    """What balls and ellipsoids have in common: a trained centre, and a radius around it.

    Parameters
    ----------
    epsilon : float, "auto", or mapping from node name to float, default 0.4
        What is good enough: an accuracy in (0, 1], or a loss above 0. The default is the 2019
        paper's for MNIST. ``"auto"`` takes the largest at which all spaces meet; a mapping has
        numbers for some nodes, others get the default.
    measure : {"accuracy", "loss"}
        What `epsilon` is: as in 2019, or as in 2018.
    radius : {"sampled", "worst", "certified", "bisection", "growing"}
        How the radius is found; see `gems_flwr.spaces.ball.Radius`. ``sampled`` is the papers'
        and too large: random directions miss the bad ones. ``worst`` and ``certified`` are
        honest, for accuracies alone, and then balls rarely meet.
    directions : int, default 500
        Random directions, for all radii but worst and certified; at least 1.
    curve : bool, default False
        Whether the radius for every epsilon is sent along (sampled, worst and certified only); set
        where `epsilon` or `on_empty` needs it.
    on_empty : {"least", "relax", "subset", "fail"}
        If the spaces do not meet: take the least violating point; lower epsilon until they do;
        leave out as few nodes as possible; or fail.
    select : {"first", "margin"}
        Which point of the intersection: the first on the way from the average, as in the papers,
        or the deepest.
    dp_seeded : bool, default False
        See `SpaceQuestion`.
    """

    trains: ClassVar[bool] = True

    epsilon: float | str | Mapping[str, float] = 0.4
    measure: Measure = "accuracy"
    radius: Method = "sampled"
    directions: int = 500
    curve: bool = False
    on_empty: OnEmpty = field(default="least", metadata=ON_SERVER)
    select: Literal["first", "margin"] = field(default="first", metadata=ON_SERVER)

    def __post_init__(self) -> None:
        if self.epsilon == "auto" or self.on_empty == "relax":
            object.__setattr__(self, "curve", True)
        each: list[Any] = [self.epsilon]
        if isinstance(self.epsilon, Mapping):
            # Names are text, though YAML reads the name 0 as a number.
            named = {str(node): as_number(value) for node, value in self.epsilon.items()}
            object.__setattr__(self, "epsilon", named)
            each = list(named.values())
        elif self.epsilon == "auto":
            each = []
        else:
            object.__setattr__(self, "epsilon", as_number(self.epsilon))  # type: ignore[arg-type]
        by_loss = self.measure == "loss"
        top, allowed = (float("inf"), BY_LOSS) if by_loss else (1.0, METHODS)
        numbers = all(isinstance(e, int | float) and 0 < e <= top for e in each)
        self.check(
            {
                "measure": (self.measure in get_args(Measure), f"one of {list(get_args(Measure))}"),
                "radius": (self.radius in allowed, f"one of {list(allowed)} for {self.measure}"),
                "directions": (
                    1 <= self.directions <= MAX_DIRECTIONS,
                    f"from 1 to {MAX_DIRECTIONS:,}",
                ),
                "epsilon": (numbers, f"in (0, {top:g}], 'auto' or a mapping of such numbers"),
                "on_empty": (self.on_empty in get_args(OnEmpty), f"one of {get_args(OnEmpty)}"),
                "select": (self.select in ("first", "margin"), "'first' or 'margin'"),
            }
        )
        if self.curve and (by_loss or self.radius not in CURVED):
            needed = f"radius in {list(CURVED)} for accuracy"
            raise OptionError(f"curve, epsilon='auto' and on_empty='relax' need {needed}")

    @property
    def offers(self) -> frozenset[str]:
        """Spaces of single nodes; comparable unless the server chooses the radii."""
        chosen = self.epsilon == "auto" or self.on_empty == "relax"
        return frozenset({"spaces"} if chosen else {"spaces", "comparable"})

    def for_node(self, name: str) -> Self:
        """Return what one node is asked, with a number for epsilon."""
        epsilon = self.epsilon
        if isinstance(epsilon, Mapping):
            epsilon = epsilon.get(name, Centered.epsilon)  # type: ignore[call-overload]
        elif epsilon == "auto":
            epsilon = _TINY_EPSILON
        return dataclasses.replace(self, epsilon=epsilon)

    def discloses(self, node: Node) -> Disclosure:
        """Return that it is a trained layer, and a radius around it."""
        return Disclosure("radius")

    def build(self, node: Node) -> CenteredSpace:
        """Return the space around the node's trained layer."""
        layer = node.output_layer("validation")
        below = [key for key in node.model if key not in layer.keys]
        trained = node.train(below)
        where = exact_device(node.device)
        weight, bias = (
            None if tensor is None else tensor.to(where)
            for tensor in linear_layer(trained, layer, node.device)
        )
        assert weight is not None
        samples = node.inputs("validation")
        data = LayerData(weight, bias, samples.inputs, samples.labels)
        # Seeds of torch are signed.
        seed = node.seed("space") % 2**63
        assert isinstance(self.epsilon, int | float)
        quality = Quality(self.epsilon, self.measure)
        search = {"directions": self.directions, "seed": seed, "curve": self.curve}
        return self._around(data, quality, search)

    @abstractmethod
    def _around(self, data: LayerData, quality: Quality, search: dict[str, Any]) -> CenteredSpace:
        """Return the space around a layer."""

    def check_fit(self, space: Any) -> None:
        """Refuse another kind of set, or one without the curve that was asked for."""
        if space.kind != self.kind:
            raise SpaceError("kind", self.kind, space.kind)
        self._check_shape((self.output_layer.dimension,), (space.dimension,))
        if (space.curve is not None) != self.curve:
            wanted = "the radius for every epsilon" if self.curve else "none"
            raise SpaceError(CURVE, wanted, "none" if self.curve else "one")


@dataclass(frozen=True)
class Ball(Centered):
    """All layers within a radius of the node's own (2019, Section 3.1).

    Parameters
    ----------
    epsilon, measure, radius, directions, curve, on_empty, select, dp_seeded
        See `Centered`.

    Examples
    --------
    >>> from gems_flwr import Ball
    >>> Ball(epsilon=0.7, radius="worst").to_json()
    '{"epsilon": 0.7, "radius": "worst"}'
    """

    kind: ClassVar[str] = "ball"

    def _around(self, data: LayerData, quality: Quality, search: dict[str, Any]) -> BallSpace:
        return build_ball(data, quality, self.radius, **search)


@dataclass(frozen=True)
class Ellipsoid(Centered):
    """All layers in an ellipsoid around the node's own, by the Fisher diagonal (2019, App. A).

    Parameters
    ----------
    epsilon, measure, radius, directions, curve, on_empty, select, dp_seeded
        See `Centered`.
    floor : float, default 0.1
        c of Eq. 5: shortest axis relative to the longest, in (0, 1].
    damping : float, default 1e-5
        Added to the Fisher diagonal, at least 0; the default is the released code's. With
        0, Eq. 5 as it is printed, nearly every axis has the same length: a ball.
    labels : {"exact", "sampled"}
        Fisher diagonal in expectation over predicted labels, or for one drawn label per sample, as
        in the released code.
    fisher_samples : int, optional
        Samples that it is computed from, drawn at random; all if left out, 200 in the released
        code.

    Examples
    --------
    >>> from gems_flwr import Ellipsoid
    >>> Ellipsoid(epsilon=0.7, floor=0.3).to_json()
    '{"epsilon": 0.7, "floor": 0.3}'
    """

    kind: ClassVar[str] = "ellipsoid"

    floor: float = 0.1
    damping: float = DAMPING
    labels: Literal["exact", "sampled"] = "exact"
    fisher_samples: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "damping", as_number(self.damping))
        samples = self.fisher_samples
        self.check(
            {
                "floor": (0 < self.floor <= 1, "in (0, 1]"),
                "damping": (0 <= self.damping < float("inf"), "at least 0 and finite"),
                "labels": (self.labels in ("exact", "sampled"), "exact or sampled"),
                "fisher_samples": (samples is None or samples >= 1, "at least 1"),
            }
        )

    def _around(self, data: LayerData, quality: Quality, search: dict[str, Any]) -> EllipsoidSpace:
        search["fisher"] = linear_fisher(data, self.labels, search["seed"], self.fisher_samples)
        search |= {"floor": self.floor, "damping": self.damping}
        return build_ellipsoid(data, quality, self.radius, **search)
