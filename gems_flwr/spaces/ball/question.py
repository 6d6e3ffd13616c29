"""Asking for the papers' spaces: balls and ellipsoids around a node's own trained layer."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from gems_flwr.bounds import MAX_DIRECTIONS
from gems_flwr.core.question import Disclosure
from gems_flwr.devices import exact_device
from gems_flwr.errors import SpaceError
from gems_flwr.networks import linear_layer
from gems_flwr.spaces.ball.ball import CURVE, METHODS, BallSpace, CenteredSpace, EllipsoidSpace
from gems_flwr.spaces.ball.layer_data import LayerData
from gems_flwr.spaces.ball.radii import build_ball, build_ellipsoid
from gems_flwr.spaces.question import SpaceQuestion, as_number

if TYPE_CHECKING:
    from gems_flwr.node import Node
    from gems_flwr.spaces.ball.ball import Method

# Any that every centre meets: the curve has the radius for all others.
_TINY_EPSILON = 1e-6


@dataclass(frozen=True)
class Centered(SpaceQuestion):
    """What balls and ellipsoids have in common: a trained centre, and a radius around it.

    Parameters
    ----------
    epsilon : float, "auto", or mapping from node name to float, default 0.4
        The accuracy that is good enough, in (0, 1]. The default is the 2019 paper's for MNIST.
        ``"auto"`` takes the largest at which all spaces meet; a mapping has numbers for some nodes,
        others get the default.
    radius : {"sampled", "certified"}
        How the radius is found; see `gems_flwr.spaces.ball.Radius`. ``sampled`` is the papers'
        and too large: random directions miss the bad ones. ``certified`` is honest, and then balls
        rarely meet.
    directions : int, default 500
        Random directions for sampled radii, at least 1.
    curve : bool, default False
        Whether the radius for every epsilon is sent along; set where `epsilon` needs it.
    dp_seeded : bool, default False
        See `SpaceQuestion`.
    """

    trains: ClassVar[bool] = True

    epsilon: float | str | Mapping[str, float] = 0.4
    radius: Method = "sampled"
    directions: int = 500
    curve: bool = False

    def __post_init__(self) -> None:
        if self.epsilon == "auto":
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
        numbers = all(isinstance(e, int | float) and 0 < e <= 1 for e in each)
        self.check(
            {
                "radius": (self.radius in METHODS, f"one of {list(METHODS)}"),
                "directions": (
                    1 <= self.directions <= MAX_DIRECTIONS,
                    f"from 1 to {MAX_DIRECTIONS:,}",
                ),
                "epsilon": (numbers, "in (0, 1], 'auto' or a mapping of such numbers"),
            }
        )

    @property
    def offers(self) -> frozenset[str]:
        """Spaces of single nodes; comparable unless the server chooses the radii."""
        return frozenset({"spaces"} if self.epsilon == "auto" else {"spaces", "comparable"})

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
        search = {"directions": self.directions, "seed": seed, "curve": self.curve}
        return self._around(data, self.epsilon, search)

    @abstractmethod
    def _around(self, data: LayerData, epsilon: float, search: dict[str, Any]) -> CenteredSpace:
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
    epsilon, radius, directions, curve, dp_seeded
        See `Centered`.

    Examples
    --------
    >>> from gems_flwr import Ball
    >>> Ball(epsilon=0.7, radius="certified").to_json()
    '{"epsilon": 0.7, "radius": "certified"}'
    """

    kind: ClassVar[str] = "ball"

    def _around(self, data: LayerData, epsilon: float, search: dict[str, Any]) -> BallSpace:
        return build_ball(data, epsilon, self.radius, **search)


@dataclass(frozen=True)
class Ellipsoid(Centered):
    """All layers in an ellipsoid around the node's own, by the Fisher diagonal (2019, App. A).

    Parameters
    ----------
    epsilon, radius, directions, curve, dp_seeded
        See `Centered`.
    floor : float, default 0.1
        c of Eq. 5: shortest axis relative to the longest, in (0, 1].

    Examples
    --------
    >>> from gems_flwr import Ellipsoid
    >>> Ellipsoid(epsilon=0.7, floor=0.3).to_json()
    '{"epsilon": 0.7, "floor": 0.3}'
    """

    kind: ClassVar[str] = "ellipsoid"

    floor: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check({"floor": (0 < self.floor <= 1, "in (0, 1]")})

    def _around(self, data: LayerData, epsilon: float, search: dict[str, Any]) -> EllipsoidSpace:
        return build_ellipsoid(data, epsilon, self.radius, floor=self.floor, **search)
