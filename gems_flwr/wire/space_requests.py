"""The good-enough spaces that a node can be asked for: one frozen value for each kind.

`Cone`, `Ball`, `Ellipsoid` and `Means` are what `Gems(space=…)` takes, what crosses the wire as
text, and what builds the space on the node. A new kind of space is one more subclass of
`SpaceRequest`, beside its set (see `gems_flwr.spaces.convex_set`); nothing else has to know of it.

Decided here: the values are light (no torch until a space is built), and each has the options
of its own kind alone.
"""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args

from gems_flwr.errors import OptionError
from gems_flwr.keyword_hints import with_hints
from gems_flwr.spaces.radius import METHODS, Method
from gems_flwr.typing import Rank
from gems_flwr.wire.requests import JsonRequest, ScoreRequest, default_of, known_options

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from gems_flwr.moments.class_sums import ClassSums
    from gems_flwr.moments.private_release import PrivateRelease
    from gems_flwr.moments.small_means import MeanRule
    from gems_flwr.radii.layer_data import LayerData
    from gems_flwr.samples import Samples
    from gems_flwr.spaces.ball import BallSpace
    from gems_flwr.spaces.cone import ClassMomentCone
    from gems_flwr.spaces.curved_space import CurvedSpace
    from gems_flwr.spaces.ellipsoid import EllipsoidSpace

Measure = Literal["accuracy", "loss"]
CURVED: tuple[Method, ...] = ("sampled", "worst", "certified")
# What a text means that does not say it, whatever the default of a space: texts are older than
# the spaces' own defaults.
_UNSAID = {"kind": "cone", "epsilon": 0.5, "damping": 0.0}
# Servers before version 1 sent the options of all spaces along, which meant nothing for others.
_IGNORED = {"measure", "radius", "directions", "floor", "curve"}
_IGNORED |= {"rank", "clusters", "int8", "min_count", "dp_delta", "dp_clip", "dp_classes"}


@dataclass(frozen=True, eq=False)
class NodeLayer:
    """A node's output layer and its data: all that a space is built from.

    Parameters
    ----------
    weight, bias : tensor of shape (C, D), tensor of shape (C,)
        The layer, trained if the space needs that.
    samples : Samples
        Inputs of the layer, and classes, of the data that the space `reads`.
    seed : int
        Source of whatever is random, but for private noise without `dp_seeded`.
    largest_rank : int, optional
        Most directions of a class that the node shows.
    mean_rule : MeanRule, optional
        How the node shows the means of classes that are too small for a covariance.
    least_in_sums : int, optional
        Fewest samples of a class in sums of which only the total is looked at, where that is the
        node's own choice and not the request's.
    device : torch.device or str
        Where the space is computed; layer and samples move there.
    """

    weight: Tensor
    bias: Tensor | None
    samples: Samples
    seed: int
    largest_rank: int | None = None
    mean_rule: MeanRule | None = None
    least_in_sums: int | None = None
    device: torch.device | str = "cpu"


@dataclass(frozen=True)
class SpaceRequest(JsonRequest, ABC):
    """Base of what a node can be asked for as its good-enough space.

    A new kind of space is a frozen dataclass that derives from this, has a `kind` and builds its
    set, which has the same `kind` and is told to `gems_flwr.spaces.space_files.register_space`.
    Server and nodes import the module that it stands in; by that they know it.

    Parameters
    ----------
    dp_seeded : bool, default False
        Whether private noise is to come from the run's seed, which protects nobody. Simulations
        ask for it, whatever the space; a node with data of its own refuses.
    """

    kind: ClassVar[str]
    # Whether the node trains first; if not, the model that was sent is all there is to know.
    needs_training: ClassVar[bool] = True
    # Which of the node's data the space is built from.
    reads: ClassVar[Literal["validation", "train"]] = "validation"

    dp_seeded: bool = field(default=False, kw_only=True)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "kind" not in vars(cls):
            return
        known = _KINDS.setdefault(cls.kind, cls)
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise OptionError(
                f"kind '{cls.kind}' is that of {known.__module__}.{known.__qualname__}"
            )
        _KINDS[cls.kind] = cls

    @abstractmethod
    def build(self, node: NodeLayer) -> Any:
        """Build the space that was asked for.

        Raises
        ------
        NotGoodEnoughError
            If not even the node's own model is good enough.
        SpaceError
            If the samples are too few.
        """

    @property
    def private(self) -> PrivateRelease | None:
        """The private release that is asked for, if any."""
        return None

    @property
    def score(self) -> ScoreRequest:
        """How scores are to be asked for by a server that asked for this space."""
        return ScoreRequest()

    @property
    def space_kind(self) -> str:
        """The kind of the set that comes back."""
        return self.kind

    @property
    def is_curved(self) -> bool:
        """Whether the radius for every epsilon comes along."""
        return False

    @property
    def is_summed(self) -> bool:
        """Whether nothing but the total over all nodes is looked at."""
        return False

    @property
    def is_sketched(self) -> bool:
        """Whether all that nodes send, refinement and scores included, is added up in a ring."""
        return False

    def said(self) -> dict[str, Any]:
        """Return what a text has to say, the kind first and `dp_seeded` last."""
        last = "dp_seeded"
        settings = sorted(dataclasses.fields(self), key=lambda setting: setting.name == last)
        values = {"kind": self.kind} | {f.name: getattr(self, f.name) for f in settings}
        unsaid = {f.name: default_of(f) for f in settings} | _UNSAID
        return {name: value for name, value in values.items() if value != unsaid[name]}

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the request that `to_json` wrote, of whatever kind it is."""
        values = {**_UNSAID, **json.loads(text)}
        kind = values.pop("kind")
        if kind not in _KINDS:
            raise OptionError(f"kind must be one of {list(_KINDS)}, got {kind!r}")
        names = {f.name for f in dataclasses.fields(_KINDS[kind])}
        values = {name: values[name] for name in values if name in names or name not in _UNSAID}
        foreign = _IGNORED - names
        own = {name: value for name, value in values.items() if name not in foreign}
        request = _KINDS[kind](**known_options(own, names))
        if not isinstance(request, cls):
            raise OptionError(f"expected a {cls.__name__}, got {request}")
        return request


_KINDS: dict[str, type[SpaceRequest]] = {}


def _hint(space: type, name: str) -> str:
    """Say what a space has, and which one has the option."""
    options = {
        each: [setting.name for setting in dataclasses.fields(each)] for each in _KINDS.values()
    }
    owners = [each.__name__ for each, names in options.items() if name in names]
    hint = f"; it is an option of {' and '.join(owners)}" if owners else ""
    return f"a {space.__name__} has no {name}, it has {', '.join(options[space])}{hint}"


def as_space_request(space: SpaceRequest | str) -> SpaceRequest:
    """Return what a word such as ``"ball"`` stands for: that space with its defaults.

    Raises
    ------
    OptionError
        If it is no space; says what to write.
    """
    if isinstance(space, SpaceRequest):
        return space
    if not isinstance(space, str):
        raise OptionError(
            f"space must be a Cone, Means, Ball or Ellipsoid, or its name, got {space!r}"
        )
    if space not in _KINDS:
        raise OptionError(f"space must be one of {list(_KINDS)}, got '{space}'")
    return _KINDS[space]()


@with_hints(_hint)
@dataclass(frozen=True)
class Cone(SpaceRequest):
    """All layers that tell each class from its rivals, by the moments of the class.

    A node sends means and covariances of the layer's inputs, and need not train.

    Parameters
    ----------
    epsilon : float, default 0.5
        Share of each class to be told from each rival, in [0.5, 1).
    rank : "auto", "full" or int, default "auto"
        Columns of the covariance factors: as many as the samples of each class allow, full
        moments, or a fixed number, at least 1; see `gems_flwr.moments.cone_building.build_cone`.
    clusters : int, default 1
        Mixture components per class at most, at least 1.
    int8 : bool, default True
        Whether low-rank moments are sent in eight bits.
    min_count : int, optional
        Classes with fewer samples, at least 2, go as count and mean alone, as far as the node's
        limits show those; see `cone_building.least_count` and `moments.small_means`. For `sums` the
        total counts.
    sums : bool, default False
        Whether full moments are sent as plain sums over all classes, of one shape for every
        node: all that the server, or a secure summation before it, ever needs is their total.
    sketch : int, optional
        With `sums`: class moments in a few directions instead of full ones, found and measured in
        four sums over nodes (see `gems_flwr.moments.moment_sums`): directions in which the class
        means differ, what the pooled covariance makes of these, and of so many random ones, at
        least 0. Refinement and scores are sums as well then.
    dp_epsilon : float, optional
        Differentially private moments: the privacy loss, above 0. Off if left out.
    dp_delta : float, default 1e-5
        Chance of a larger loss, in (0, 1).
    dp_clip : float, default 1.0
        Length to which inputs are clipped, above 0.
    dp_classes : sequence of int, optional
        Classes in a private release; all of the task if left out.
    dp_seeded : bool, default False
        See `SpaceRequest`.

    Examples
    --------
    >>> from gems_flwr import Cone
    >>> Cone(rank=20, clusters=8).to_json()
    '{"rank": 20, "clusters": 8}'
    >>> Cone(epsilon=0.3)
    Traceback (most recent call last):
        ...
    gems_flwr.errors.OptionError: epsilon must be in [0.5, 1) for a cone, got 0.3
    """

    kind: ClassVar[str] = "cone"
    needs_training: ClassVar[bool] = False
    reads: ClassVar[Literal["validation", "train"]] = "train"

    epsilon: float = 0.5
    rank: Rank = "auto"
    clusters: int = 1
    int8: bool = True
    min_count: int | None = None
    sums: bool = False
    dp_epsilon: float | None = None
    dp_delta: float = 1e-5
    dp_clip: float = 1.0
    dp_classes: Sequence[int] | None = None
    sketch: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", _number(self.epsilon))
        if self.dp_classes is not None:
            object.__setattr__(self, "dp_classes", tuple(self.dp_classes))
        whole = not isinstance(self.rank, int) and self.clusters == 1 and self.dp_epsilon is None
        self.check(
            {
                "rank": (is_rank(self.rank), "'auto', 'full' or a whole number from 1"),
                "clusters": (self.clusters >= 1, "at least 1"),
                "min_count": (self.min_count is None or self.min_count >= 2, "at least 2, or none"),
                "epsilon": (0.5 <= self.epsilon < 1, "in [0.5, 1) for a cone"),
                "sums": (
                    not self.sums or whole,
                    "false with a fixed rank, clusters or dp_epsilon",
                ),
                "sketch": (
                    self.sketch is None or (self.sums and self.sketch >= 0),
                    "at least 0 and with sums=True, or none",
                ),
            }
        )
        _ = self.private

    @property
    def private(self) -> PrivateRelease | None:
        """The private release that is asked for, if any."""
        if self.dp_epsilon is None:
            return None
        from gems_flwr.moments.private_release import PrivateRelease

        classes = None if self.dp_classes is None else tuple(self.dp_classes)
        return PrivateRelease(self.dp_epsilon, self.dp_delta, self.dp_clip, classes)

    @property
    def score(self) -> ScoreRequest:
        """How scores are to be asked for: with as much noise as the moments have."""
        return ScoreRequest(self.dp_epsilon, self.dp_delta, self.dp_seeded)

    @property
    def is_summed(self) -> bool:
        """Whether nothing but the total over all nodes is looked at."""
        return self.sums

    @property
    def is_sketched(self) -> bool:
        """Whether all that nodes send, refinement and scores included, is added up in a ring."""
        return self.sketch is not None

    def build(self, node: NodeLayer) -> ClassMomentCone | ClassSums:
        """Return the moments of the classes; of the layer only the shape counts."""
        from gems_flwr.moments.class_sums import in_chunks, sum_classes
        from gems_flwr.moments.cone_building import MIN_COUNT, build_cone

        inputs, labels = node.samples.inputs, node.samples.labels
        classes = max(2, node.weight.shape[0])
        if self.sums:
            sums = sum_classes(in_chunks(inputs, labels, device=node.device), classes)
            return sums.over_all_classes(node.least_in_sums or self.min_count or MIN_COUNT)
        return build_cone(
            inputs,
            labels,
            classes,
            rank=self.rank,
            int8=self.int8,
            clusters=self.clusters,
            min_count=self.min_count,
            epsilon=self.epsilon,
            private=self.private,
            seed=node.seed,
            noise_seed=node.seed if self.dp_seeded else None,
            largest_rank=node.largest_rank,
            mean_rule=node.mean_rule,
            device=node.device,
        )


def is_rank(value: object) -> bool:
    """Return whether something can be the rank of a cone."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return value >= 1 if whole else value in ("auto", "full")  # type: ignore[operator]


def _number(value: float) -> float:
    """Return a whole number as a float, so that 1 and 1.0 are one text."""
    return float(value) if isinstance(value, int) else value


@dataclass(frozen=True)
class Centered(SpaceRequest):
    """What balls and ellipsoids have in common: a trained centre, and a radius around it."""

    epsilon: float = 0.4
    measure: Measure = "accuracy"
    radius: Method = "sampled"
    directions: int = 500

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", _number(self.epsilon))
        top = 1.0 if self.measure == "accuracy" else float("inf")
        curved = self.radius in CURVED and self.measure == "accuracy"
        self.check(
            {
                "measure": (self.measure in get_args(Measure), f"one of {list(get_args(Measure))}"),
                "radius": (self.radius in METHODS, f"one of {list(METHODS)}"),
                "directions": (self.directions >= 1, "at least 1"),
                "epsilon": (0 < self.epsilon <= top, f"in (0, {top:g}]"),
            }
        )
        if self.is_curved and not curved:
            allowed = f"false unless radius is in {list(CURVED)} for accuracy"
            raise OptionError(f"curve must be {allowed}, got True")

    def build(self, node: NodeLayer) -> BallSpace | EllipsoidSpace | CurvedSpace:
        """Return the space around the node's trained layer."""
        from gems_flwr.devices import exact_device
        from gems_flwr.radii.layer_data import LayerData
        from gems_flwr.radii.layer_radius import radius_curve
        from gems_flwr.spaces.curved_space import CurvedSpace, thin_curve

        where = exact_device(node.device)
        weight, bias = (None if t is None else t.to(where) for t in (node.weight, node.bias))
        assert weight is not None
        data = LayerData(weight, bias, node.samples.inputs, node.samples.labels)
        # Seeds of torch are signed.
        search = {"directions": self.directions, "seed": node.seed % 2**63}
        space, data = self._around(data, search)
        if not self.is_curved:
            return space
        curve = radius_curve(data, self.radius, self.epsilon, **search)
        return CurvedSpace(space, thin_curve(curve.radii))

    @abstractmethod
    def _around(
        self, data: LayerData, search: dict[str, Any]
    ) -> tuple[BallSpace | EllipsoidSpace, LayerData]:
        """Return the space around a layer, and the layer with the space's axes."""


@with_hints(_hint)
@dataclass(frozen=True)
class Ball(Centered):
    """All layers within a radius of the node's own (2019, Section 3.1).

    Parameters
    ----------
    epsilon : float, default 0.4
        What is good enough: an accuracy in (0, 1], or a loss above 0. The default is the 2019
        paper's for MNIST.
    measure : {"accuracy", "loss"}
        What `epsilon` is: as in 2019, or as in 2018.
    radius : {"sampled", "worst", "certified", "bisection", "growing"}
        How the radius is found; see `gems_flwr.spaces.radius.Radius`. ``sampled`` is the papers'
        and too large: random directions miss the bad ones. ``worst`` and ``certified`` are
        honest, and then balls rarely meet.
    directions : int, default 500
        Random directions, for all radii but worst and certified; at least 1.
    curve : bool, default False
        Whether the radius for every epsilon is sent along (sampled, worst and certified only).
        `Gems` asks for it itself where it needs it.
    dp_seeded : bool, default False
        See `SpaceRequest`.

    Examples
    --------
    >>> from gems_flwr import Ball
    >>> Ball(epsilon=0.7, radius="worst").to_json()
    '{"kind": "ball", "epsilon": 0.7, "radius": "worst"}'
    """

    kind: ClassVar[str] = "ball"

    curve: bool = False

    @property
    def is_curved(self) -> bool:
        """Whether the radius for every epsilon comes along."""
        return self.curve

    def _around(self, data: LayerData, search: dict[str, Any]) -> tuple[BallSpace, LayerData]:
        from gems_flwr.radii.layer_radius import build_ball
        from gems_flwr.radii.quality import Quality

        quality = Quality(self.epsilon, self.measure)
        return build_ball(data, quality, self.radius, **search), data


@with_hints(_hint)
@dataclass(frozen=True)
class Ellipsoid(Centered):
    """All layers in an ellipsoid around the node's own, by the Fisher diagonal (2019, App. A).

    Parameters
    ----------
    epsilon, measure, radius, directions, curve, dp_seeded
        See `Ball`.
    floor : float, default 0.1
        c of Eq. 5: shortest axis relative to the longest, in (0, 1].
    damping : float, default 1e-5
        What is added to the Fisher diagonal, at least 0; the default is the released code's. With
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
    '{"kind": "ellipsoid", "epsilon": 0.7, "floor": 0.3, "damping": 1e-05}'
    """

    kind: ClassVar[str] = "ellipsoid"

    floor: float = 0.1
    damping: float = 1e-5
    labels: Literal["exact", "sampled"] = "exact"
    fisher_samples: int | None = None
    curve: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "damping", _number(self.damping))
        self.check(
            {
                "floor": (0 < self.floor <= 1, "in (0, 1]"),
                "damping": (0 <= self.damping < float("inf"), "at least 0 and finite"),
                "labels": (self.labels in ("exact", "sampled"), "exact or sampled"),
                "fisher_samples": (
                    self.fisher_samples is None or self.fisher_samples >= 1,
                    "at least 1",
                ),
            }
        )

    @property
    def is_curved(self) -> bool:
        """Whether the radius for every epsilon comes along."""
        return self.curve

    def _around(self, data: LayerData, search: dict[str, Any]) -> tuple[EllipsoidSpace, LayerData]:
        import numpy as np
        import torch

        from gems_flwr.radii.fisher_axes import linear_fisher
        from gems_flwr.radii.layer_radius import build_ellipsoid
        from gems_flwr.radii.quality import Quality

        quality = Quality(self.epsilon, self.measure)
        fisher = linear_fisher(data, self.labels, search["seed"], self.fisher_samples)
        space = build_ellipsoid(
            data,
            quality,
            self.radius,
            fisher=fisher,
            floor=self.floor,
            damping=self.damping,
            **search,
        )
        axes = space.radii.astype(np.float64) / space.radius.value
        return space, dataclasses.replace(data, axes=torch.from_numpy(axes).to(data.weight))


@with_hints(_hint)
@dataclass(frozen=True)
class Means(SpaceRequest):
    """Counts and means of the classes alone, from whose spread the server estimates covariances.

    FedCOF's message: a few kilobytes. It needs several means of a class, from several nodes or
    from random groups of a node's samples. For ``Gems(head="lda")`` and its like.

    Parameters
    ----------
    groups : int, default 1
        Random groups of each class on a node, whose means are sent; at least 1.
    int8 : bool, default False
        Whether means are sent in eight bits, which blurs the spread of many groups.
    min_count : int, optional
        Fewest samples of a mean, at least 2; by default what the node's limits allow.
    dp_seeded : bool, default False
        See `SpaceRequest`.

    Examples
    --------
    >>> from gems_flwr import Gems, Means
    >>> Gems(space=Means(groups=8), head="lda").request().to_json()
    '{"kind": "means", "groups": 8}'
    """

    kind: ClassVar[str] = "means"
    needs_training: ClassVar[bool] = False
    reads: ClassVar[Literal["validation", "train"]] = "train"

    groups: int = 1
    int8: bool = False
    min_count: int | None = None

    def __post_init__(self) -> None:
        least = self.min_count
        self.check(
            {
                "groups": (self.groups >= 1, "at least 1"),
                "min_count": (least is None or least >= 2, "at least 2, or none"),
            }
        )

    @property
    def space_kind(self) -> str:
        """A cone whose components all lack a covariance."""
        return Cone.kind

    def build(self, node: NodeLayer) -> ClassMomentCone:
        """Return the means; of the layer only the shape counts."""
        from gems_flwr.moments.group_means import build_means
        from gems_flwr.moments.small_means import MeanRule

        rule = node.mean_rule or MeanRule()
        least = max(rule.least, self.min_count or 0)
        return build_means(
            node.samples.inputs,
            node.samples.labels,
            max(2, node.weight.shape[0]),
            groups=self.groups,
            int8=self.int8,
            rule=dataclasses.replace(rule, least=least),
            seed=node.seed,
        )
