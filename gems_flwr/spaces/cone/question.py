"""Asking for class moments: the cone of good-enough layers, or class means alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from gems_flwr.bounds import MAX_EXAMPLES, MAX_PIECES
from gems_flwr.core.question import Disclosure, Group
from gems_flwr.errors import SpaceError
from gems_flwr.spaces.cone.build import build_cone, build_means
from gems_flwr.spaces.cone.cone import ClassMomentCone
from gems_flwr.spaces.cone.covariance import (
    AND_MEANS,
    MEANS_ONLY,
    CommonCovariance,
    FullCovariance,
    LowRankCovariance,
)
from gems_flwr.spaces.cone.private import PrivateRelease
from gems_flwr.spaces.cone.rules import MIN_COUNT, is_rank
from gems_flwr.spaces.question import SpaceQuestion, as_number
from gems_flwr.typing import Rank

if TYPE_CHECKING:
    from gems_flwr.node import Node


@dataclass(frozen=True)
class _Moments(SpaceQuestion):
    """What cones and means have in common: moments of training inputs, by component."""

    # How a class is taken apart; 1 for not at all.
    _pieces: ClassVar[str] = ""

    def _disclosed(self, node: Node, **about: Any) -> Disclosure:
        """Return what the moments disclose; in what form is the server's choice once.

        What a class falls into, and where numbers are rounded, depends on all of these.
        """
        pieces, chosen = getattr(self, self._pieces), False
        least, rank = (getattr(self, name, None) for name in ("min_count", "rank"))
        if node.limits.adaptive_answers is not None:
            asked = f"{pieces} of {least}, {rank if isinstance(rank, int) else None}"
            chosen = not node.pin(self._pieces if pieces > 1 else self.kind, asked)
        return Disclosure("moments", adaptive=+chosen, planned=2 * self.refines, **about)

    @property
    def offers(self) -> frozenset[str]:
        """Class moments of single nodes."""
        return frozenset({"spaces", "moments", "comparable", "exact"})

    def shown(self, space: ClassMomentCone, node: Node) -> Disclosure:
        """Return samples and directions of every component that is about to leave the node."""
        if space.privacy is not None:
            return Disclosure("moments", squared_mu=0.0)
        return self._disclosed(node, features=space.num_features, groups=_groups(space))

    def _check_moments(self, space: Any, forms: Sequence[str], entries: int) -> None:
        """Refuse moments of another form than asked for: they would weigh and cost more."""
        if not isinstance(space, ClassMomentCone):
            raise SpaceError("kind", ClassMomentCone.kind, space.kind)
        layer = self.output_layer
        wanted = (layer.num_classes, layer.features)
        self._check_shape(wanted, (space.num_classes, space.num_features))
        if space.total_count > MAX_EXAMPLES:
            raise SpaceError("total_count", f"at most {MAX_EXAMPLES:g}", space.total_count)
        # Of small classes there are means alone, whatever the form of the others.
        allowed = (*forms, *(form + AND_MEANS for form in forms), MEANS_ONLY)
        if space.covariance.form not in allowed:
            raise SpaceError("form", " or ".join(allowed), space.covariance.form)
        most = int(np.bincount(space.labels).max())
        if most > entries:
            raise SpaceError("labels", f"at most {entries} entries of a class", most)


def _groups(space: ClassMomentCone) -> tuple[Group, ...]:
    """Return samples and directions of every covariance in a space."""
    pairs = zip(space.labels.tolist(), space.counts.tolist(), strict=True)
    groups = tuple(
        Group(f"class {label}", count, space.covariance.rank(component))
        for component, (label, count) in enumerate(pairs)
    )
    if isinstance(space.covariance, CommonCovariance):
        groups += (Group("all classes", int(space.counts.sum()), int(space.covariance.ranks[0])),)
    return groups


@dataclass(frozen=True)
class Cone(_Moments):
    """All layers that tell each class from its rivals, by the moments of the class.

    A node sends means and covariances of the layer's inputs, and need not train.

    Parameters
    ----------
    epsilon : float, default 0.5
        Share of each class to be told from each rival, in [0.5, 1).
    rank : "auto", "full" or int, default "auto"
        Columns of the covariance factors: as many as the samples of each class allow (see
        `gems_flwr.spaces.cone.rules`), full moments, or a fixed number, at least 1.
    clusters : int, default 1
        Mixture components per class at most, at least 1.
    int8 : bool, default True
        Whether low-rank moments are sent in eight bits.
    min_count : int, optional
        Classes with fewer samples, at least 2, go as count and mean alone, as far as the node's
        limits show those. For `sums` the total counts.
    sums : bool, default False
        Whether moments are only added up over nodes, in a few directions: the server sees totals.
    sketch : int, optional
        With `sums`: how many random directions there are, at least 0, beside those in which class
        means differ; 20 if left out.
    dp_epsilon : float, optional
        Differentially private moments: the privacy loss, above 0. Off if left out.
    dp_delta : float, default 1e-5
        Chance of a larger loss, in (0, 1).
    dp_clip : float, default 1.0
        Length to which inputs are clipped, above 0.
    dp_classes : sequence of int, optional
        Classes in a private release; all of the task if left out.
    dp_seeded : bool, default False
        See `SpaceQuestion`.

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
    _pieces: ClassVar[str] = "clusters"

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
        object.__setattr__(self, "epsilon", as_number(self.epsilon))
        if self.dp_classes is not None:
            object.__setattr__(self, "dp_classes", tuple(self.dp_classes))
        whole = not isinstance(self.rank, int) and self.clusters == 1 and self.dp_epsilon is None
        least, sketch = self.min_count, self.sketch
        self.check(
            {
                "rank": (is_rank(self.rank), "'auto', 'full' or a whole number from 1"),
                "clusters": (1 <= self.clusters <= MAX_PIECES, f"from 1 to {MAX_PIECES}"),
                "min_count": (least is None or least >= 2, "at least 2, or none"),
                "epsilon": (0.5 <= self.epsilon < 1, "in [0.5, 1) for a cone"),
                "sums": (not self.sums or whole, "false with a fixed rank, clusters or dp_epsilon"),
                "sketch": (
                    sketch is None or (self.sums and sketch >= 0),
                    "at least 0 and with sums=True, or none",
                ),
            }
        )
        _ = self.private

    @property
    def random(self) -> int:
        """How many random directions the sums have."""
        return 20 if self.sketch is None else self.sketch

    @property
    def offers(self) -> frozenset[str]:
        """Class moments; of single nodes unless they are only added up; exact without noise."""
        offers = {"moments", "sums"} if self.sums else {"moments", "spaces", "comparable"}
        return frozenset(offers if self.dp_epsilon is not None else {*offers, "exact"})

    @property
    def private(self) -> PrivateRelease | None:
        """The private release that is asked for, if any."""
        if self.dp_epsilon is None:
            return None
        classes: Any = self.dp_classes
        return PrivateRelease(self.dp_epsilon, self.dp_delta, self.dp_clip, classes)

    @property
    def privacy(self) -> dict[str, Any]:
        """How much noise scores get: as much as the moments have."""
        return {name: getattr(self, name) for name in ("dp_epsilon", "dp_delta", "dp_seeded")}

    def discloses(self, node: Node) -> Disclosure:
        """Return the directions of each class that have been asked for, as limits narrow them."""
        if (private := self.private) is not None:
            mu = private.squared_mu
            return Disclosure("moments", squared_mu=mu, is_seeded=self.dp_seeded)
        about = {"least_asked": self.min_count}
        # With "auto" there are as many directions as samples and limits allow, by construction.
        if self.rank == "auto" or node.is_steered:
            return self._disclosed(node, **about)
        samples, least = node.inputs("train"), self._least(node)
        counts, features = samples.labels.long().bincount().tolist(), samples.inputs.shape[1]
        most = features if self.rank == "full" else min(self.rank, features)
        groups = tuple(
            Group(f"class {label}", count, most if self.rank == "full" else min(most, count))
            for label, count in enumerate(counts)
            if count >= least
        )
        return self._disclosed(node, features=features, groups=groups, **about)

    def build(self, node: Node) -> ClassMomentCone:
        """Return the moments of the classes; of the layer only the shape counts."""
        if (private := self.private) is not None:
            layer, asked = node.output_layer(), self.discloses(node)
            classes = len(private.classes or range(layer.num_classes))
            node.allow(dataclasses.replace(asked, entries=classes * layer.features**2))
            node.spend(private.squared_mu)
        samples, seed = node.inputs("train"), node.secret_seed("space")
        # A fixed rank would get around the rounding of the node's automatic rule.
        by_rule = node.limits.largest_rank == "auto" and private is None
        return build_cone(
            samples.inputs,
            samples.labels,
            node.output_layer().num_classes,
            rank="auto" if by_rule else self.rank,
            int8=self.int8,
            clusters=self.clusters,
            min_count=None if private is not None else self._least(node),
            epsilon=self.epsilon,
            private=private,
            seed=seed,
            noise_seed=seed if self.dp_seeded else None,
            largest_rank=self.rank
            if by_rule and isinstance(self.rank, int)
            else node.limits.rank_cap,
            mean_rule=node.limits.mean_rule,
            device=node.device,
        )

    def _least(self, node: Node) -> int:
        """Return the fewest samples of a class for a covariance."""
        if self.min_count is not None:
            return self.min_count
        return max(2 if self.rank == "auto" else MIN_COUNT, node.limits.min_count)

    def check_fit(self, space: Any) -> None:
        """Refuse moments of another form than asked for: they would weigh and cost more."""
        full, low = FullCovariance.form, LowRankCovariance.form
        # A node may answer a fixed rank by its automatic rule.
        common = CommonCovariance.form if self.dp_epsilon is None else full
        forms = {"auto": (common,), "full": (full,)}.get(str(self.rank), (low, common))
        self._check_moments(space, forms, self.clusters)
        if isinstance(self.rank, int):
            rank = max(group.directions or 0 for group in _groups(space))
            if rank > self.rank:
                raise SpaceError("rank", f"at most {self.rank}", rank)


@dataclass(frozen=True)
class Means(_Moments):
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
        See `SpaceQuestion`.

    Examples
    --------
    >>> from gems_flwr import Gems, Means
    >>> strategy = Gems(space=Means(groups=4), head="lda")
    """

    kind: ClassVar[str] = "means"
    _pieces: ClassVar[str] = "groups"

    groups: int = 1
    int8: bool = False
    min_count: int | None = None

    def __post_init__(self) -> None:
        least = self.min_count
        self.check(
            {
                "groups": (1 <= self.groups <= MAX_PIECES, f"from 1 to {MAX_PIECES}"),
                "min_count": (least is None or least >= 2, "at least 2, or none"),
            }
        )

    def discloses(self, node: Node) -> Disclosure:
        """Return that it is means, of as many samples as the limits say at least."""
        return self._disclosed(node, least_asked=self.min_count)

    def build(self, node: Node) -> ClassMomentCone:
        """Return the means; of the layer only the shape counts."""
        rule, samples = node.limits.mean_rule, node.inputs("train")
        return build_means(
            samples.inputs,
            samples.labels,
            node.output_layer().num_classes,
            groups=self.groups,
            int8=self.int8,
            rule=dataclasses.replace(rule, least=max(rule.least, self.min_count or 0)),
            seed=node.secret_seed("space"),
        )

    def check_fit(self, space: Any) -> None:
        """Refuse covariances that were not asked for, and more groups of a class than were."""
        self._check_moments(space, (), self.groups)
