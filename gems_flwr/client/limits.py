"""What a node gives away, decided on the node.

A server asks; these limits answer. A request beyond them is refused with a reply that names the
limit, and nothing is computed, spent or sent. They are an argument of the mods, or come from the
node's own ``--node-config``, where whoever runs the node sets them without touching the app::

    --node-config "require-dp=true dp-budget=3.0 privacy-ledger='/srv/spent.json'"

Flower's privacy mods beside ours: the order of mods decides what their clipping and noise hit.

Mods are listed from the outside in. `LocalDpMod`, the clipping mods and `secaggplus_mod` work on
the one ArrayRecord with the model that passes them. What never passes them they cannot protect:

- around `dynamic_averaging_mod` or `good_enough_mod` they refuse by themselves, since a reply
  without a model, or with a space instead of one, is none that they know;
- inside `dynamic_averaging_mod` they work: all that the node keeps and sends is made from models
  that have passed them;
- inside `good_enough_mod` or `statistics_mod` they would be bypassed: moments, radii, scores and
  statistics are computed from the node's data and pass outside. The mods look for them and refuse.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import numpy as np
from flwr.app import Message
from numpy.typing import NDArray

from gems_flwr.errors import BypassedPrivacyError, OptionError, RefusedError
from gems_flwr.moments.automatic_rank import (
    NUMBERS_PER_SAMPLE,
    SAMPLES_PER_DIRECTION,
    allowed_rank,
    coarseness,
    may_send_full,
    smallest_count,
)
from gems_flwr.moments.class_sums import ClassSums
from gems_flwr.moments.cone_building import MIN_COUNT
from gems_flwr.moments.small_means import MEAN_COUNT, MeanRule
from gems_flwr.runtime.flower_internals import ClientAppCallable
from gems_flwr.spaces.cone import ClassMomentCone
from gems_flwr.spaces.covariance import LowRankCovariance
from gems_flwr.spaces.curved_space import CurvedSpace
from gems_flwr.spaces.space_files import Space
from gems_flwr.wire.asking import (
    requested_averaging,
    requested_models,
    requested_neurons,
    requested_space,
    requested_statistics,
    wants_score,
)
from gems_flwr.wire.choice_messages import ChoiceRequest, requested_choice
from gems_flwr.wire.keys import EVALUATE, INTRODUCE, TRAIN
from gems_flwr.wire.private_sum_requests import PrivateSum, requested_private_sum
from gems_flwr.wire.requests import ScoreRequest
from gems_flwr.wire.space_requests import Cone, Means, SpaceRequest, is_rank


@dataclasses.dataclass(frozen=True)
class NodeLimits:
    """What a node answers at most.

    Parameters
    ----------
    min_count : int, default 2
        Classes with fewer samples are never sent, at least 2. A request that names a smaller
        number is refused; one that leaves it open gets this one.
    min_mean_count : int, default 8
        Fewest samples of a class whose mean is sent alone, at least 2: one that is too small for a
        covariance. Under a `largest_rank` of ``"auto"`` a mean of few samples is sent in part
        (see `gems_flwr.moments.small_means`), else as it is.
    largest_rank : "auto", "full" or int, default "auto"
        Most directions of a class's covariance: no more than the number of its samples allows
        (see `gems_flwr.moments.automatic_rank`); any number, full moments and sums included; or a
        fixed number, whatever the number of samples. Noise for differential privacy protects by
        itself: such requests are not limited by it, nor by `min_count`. With ``"full"``, sums have
        every class from `min_count` samples, for the total is what counts.
    require_dp : bool, default False
        Whether nothing but differentially private moments and scores leaves the node. Models,
        balls, statistics and exact scores are then refused.
    dp_budget : float or None, default 10.0
        Epsilon of all private releases together, above 0, at `dp_delta`; past it the node refuses.
        Without a budget noise would protect nobody: whoever asks often enough averages it out.
        None is for simulations.
    dp_delta : float, default 1e-5
        Delta of the budget, in (0, 1).
    ledger : path, optional
        A file of the node's own in which the privacy spent is kept over runs and restarts. By
        default one for the node's name in the folder ``GEMS_FLWR_HOME``, or ``~/.gems-flwr``.
    honest_nodes : int, default 1
        How many nodes, this one included, are sure to add noise that the server does not know to
        every masked sum that this node takes part in (see `gems_flwr.secure.shared_noise`), at
        least 1. So much noise the ledger counts; by default the node's own alone. No more than the
        `least_nodes` of its `secure_sum_mod`, less those who may collude with the server.
    allow_scores : bool, default True
        Whether the node tells how accurate a model is on its own data.
    share_gradients : bool, default True
        Whether the node tells loss and gradient of a model on its training data
        (`Gems(refine=…)`), as sums over no fewer samples than class moments need.
    share_examples, seeded_noise : bool, default False
        Whether the node hands out its raw data (the pooled reference), and draws private noise
        from the run's seed. For simulations only, where all data is on one machine anyway.

    Examples
    --------
    >>> from gems_flwr import NodeLimits
    >>> NodeLimits(require_dp=True, dp_budget=3.0).require_dp
    True
    >>> NodeLimits.of_node({"largest-rank": 20, "name": "north"}).largest_rank
    20
    """

    min_count: int = 2
    largest_rank: int | Literal["auto", "full"] = "auto"
    require_dp: bool = False
    dp_budget: float | None = 10.0
    dp_delta: float = 1e-5
    ledger: str | Path | None = None
    allow_scores: bool = True
    share_gradients: bool = True
    share_examples: bool = False
    seeded_noise: bool = False
    min_mean_count: int = MEAN_COUNT
    honest_nodes: int = 1

    def __post_init__(self) -> None:
        budget = self.dp_budget
        rules = {
            "min_count": (self.min_count >= 2, "at least 2"),
            "min_mean_count": (self.min_mean_count >= 2, "at least 2"),
            "largest_rank": (is_rank(self.largest_rank), "'auto', 'full' or a number from 1"),
            "dp_budget": (budget is None or budget > 0, "above 0, or none"),
            "dp_delta": (0 < self.dp_delta < 1, "in (0, 1)"),
            "honest_nodes": (self.honest_nodes >= 1, "at least 1"),
        }
        for name, (holds, allowed) in rules.items():
            if not holds:
                raise OptionError(f"{name} must be {allowed}, got {getattr(self, name)!r}")

    @classmethod
    def of_node(cls, config: Mapping[str, Any]) -> NodeLimits:
        """Return the limits in a node's ``--node-config``; defaults where it says nothing.

        Raises
        ------
        OptionError
            Names the key and what it may be.
        """
        given: dict[str, Any] = {}
        for key, (name, kinds) in _NODE_KEYS.items():
            if key not in config:
                continue
            value = config[key]
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                allowed = " or ".join(kind.__name__ for kind in kinds)
                raise OptionError(f"node-config {key}: expected {allowed}, got {value!r}")
            given[name] = value
        return cls(**given)

    @property
    def rank_cap(self) -> int | None:
        """The most directions that ``rank="auto"`` may come to, if that is a fixed number."""
        return self.largest_rank if isinstance(self.largest_rank, int) else None

    @property
    def mean_rule(self) -> MeanRule:
        """How the means of classes that are too small for a covariance are shown."""
        least = max(self.min_count, self.min_mean_count)
        return MeanRule(least, exact=self.largest_rank != "auto")

    @property
    def least_in_sums(self) -> int | None:
        """Fewest samples of a class in sums, if the node has opened them; else the request's."""
        return self.min_count if self.largest_rank == "full" else None

    def least_for_sums(self, asked: int | None, *, masked: bool = False) -> int:
        """Return how many samples of a class there must be for it to be in a sum.

        Under masks few hide among those of others; whether there are enough is the total's matter.

        Raises
        ------
        RefusedError
            If the server asks for fewer than the node allows.
        """
        if asked is not None and asked < self.min_count:
            raise RefusedError("min_count", f"it is {self.min_count}, the server asks for {asked}")
        default = self.min_count if masked else max(MIN_COUNT, self.min_count)
        return self.least_in_sums or asked or default

    def check_summand(
        self,
        stage: str,
        counts: NDArray[Any],
        features: int,
        directions: int,
        *,
        masked: bool,
        totals: NDArray[Any] | None = None,
    ) -> None:
        """Look at a summand of class moments that is about to leave the node.

        Unmasked it may tell no more than moments of the node's own could: exact means of classes
        with more samples than features, and as many directions as samples allow. Under masks the
        total is what is told, so its counts are what is looked at: of a class that no other node
        has, they are the node's own.

        Parameters
        ----------
        stage : {"scale", "means", "sketch", "covariances"}
            What is told; see `gems_flwr.moments.moment_sums`.
        counts : int array of shape (C,)
            Samples of each class; classes without any are not told.
        features : int
            Inputs of the layer.
        directions : int
            How many directions are told of all samples, or of every class.
        masked : bool
            Whether nobody sees the summand itself.
        totals : int array of shape (C,), optional
            Under masks, samples of each class on all nodes, as the server says.

        Raises
        ------
        RefusedError
            If it is more than the node allows.
        """
        if self.require_dp:
            raise RefusedError("require_dp", "sums of moments without noise")
        if self.largest_rank == "full" or stage == "scale":
            return
        if masked:
            if totals is None or len(totals) < len(counts) or (totals < counts)[counts > 0].any():
                raise RefusedError(
                    "largest_rank", "the server does not say how many samples the sum is of"
                )
            counts = np.where(counts > 0, totals[: len(counts)], 0)
        groups = {"all classes": int(counts.sum())}
        if stage != "sketch":
            groups = {f"class {c}": int(n) for c, n in enumerate(counts) if n}
        for group, count in groups.items():
            if count:
                self._check_group(stage, group, count, features, directions, masked=masked)

    def _check_group(
        self, stage: str, group: str, count: int, features: int, directions: int, *, masked: bool
    ) -> None:
        """Refuse a mean, or directions, of too few samples."""
        whose = " on all nodes" if masked else ""
        enough = MIN_COUNT if masked else features / NUMBERS_PER_SAMPLE
        if stage == "means" and count < enough and self.largest_rank == "auto":
            raise RefusedError(
                "largest_rank",
                f"an exact mean of {features} features, {group} has {count} samples{whose}; "
                + ("leave it out" if masked else "ask with masks, or for rank='auto' without sums"),
            )
        most = allowed_rank(count, features) if self.rank_cap is None else self.rank_cap
        if directions > most:
            raise RefusedError(
                "largest_rank",
                f"{group} has {count} samples of {features} features{whose}, of which it shows at "
                f"most {most} directions, and the server asks for {directions}; ask for a smaller "
                + (
                    f"sketch, or Cone(min_count={SAMPLES_PER_DIRECTION * directions})"
                    if masked
                    else "sketch, or with masks"
                ),
            )

    def narrowed(self, request: SpaceRequest) -> SpaceRequest:
        """Return a request for a space as this node answers it.

        Raises
        ------
        RefusedError
            If it asks for more than the node allows.
        """
        if request.private is not None:
            self._check_seeded(request.dp_seeded)
            return request
        if self.require_dp:
            raise RefusedError("require_dp", f"a {request.kind} without noise; set dp_epsilon")
        if not isinstance(request, Cone | Means):
            return request
        if request.min_count is None and isinstance(request, Means):
            return request
        if isinstance(request, Cone) and request.min_count is None:
            default = 2 if request.rank == "auto" else MIN_COUNT
            return dataclasses.replace(request, min_count=max(default, self.min_count))
        if request.min_count is not None and request.min_count < self.min_count:
            raise RefusedError(
                "min_count", f"it is {self.min_count}, the server asks for {request.min_count}"
            )
        return request

    def check_release(self, space: Space | CurvedSpace | ClassSums) -> None:
        """Look at what is about to leave the node: how many directions of how many samples.

        Raises
        ------
        RefusedError
            If it is more than the node allows.
        """
        if not isinstance(space, ClassMomentCone | ClassSums) or space.privacy is not None:
            return
        if isinstance(space, ClassMomentCone):
            self._check_means(space)
            larger = space.without_components(space.lacking)
            if larger is None:
                return
            space = larger
        if self.largest_rank == "full":
            return
        width = space.sums.shape[1] if isinstance(space, ClassSums) else space.num_features
        for entry, (label, count) in enumerate(zip(space.labels, space.counts, strict=True)):
            count = int(count)
            if not count or (isinstance(space, ClassMomentCone) and self._allows(space, entry)):
                continue
            if may_send_full(count, width) and self.largest_rank == "auto":
                continue
            raise RefusedError("largest_rank", self._reason(space, entry, int(label), count, width))

    def _check_means(self, cone: ClassMomentCone) -> None:
        counts = cone.counts[cone.lacking]
        if len(counts) and int(counts.min()) < self.mean_rule.least:
            raise RefusedError(
                "min_mean_count",
                f"it is {self.mean_rule.least}, a mean of {int(counts.min())} samples was to go",
            )

    def _allows(self, cone: ClassMomentCone, entry: int) -> bool:
        if not isinstance(cone.covariance, LowRankCovariance):
            return False
        most = self.rank_cap
        if most is None:
            most = allowed_rank(int(cone.counts[entry]), cone.num_features)
        return cone.covariance.rank(entry) <= most

    def _reason(
        self, space: ClassMomentCone | ClassSums, entry: int, label: int, count: int, width: int
    ) -> str:
        low = isinstance(space, ClassMomentCone) and isinstance(space.covariance, LowRankCovariance)
        asked = f"{space.covariance.rank(entry)} directions" if low else "full moments"  # type: ignore[union-attr]
        most = allowed_rank(count, width) if self.rank_cap is None else self.rank_cap
        return (
            f"class {label} has {count} samples of {width} features, of which it shows at most "
            f"{most} directions, and the server asks for {asked}; ask for rank='auto'"
        )

    def check_second_moments(self, count: int, features: int, *, rank: int | None = None) -> None:
        """Refuse the second moments of all inputs of a layer where samples are too few for them.

        Parameters
        ----------
        count, features : int
            Samples of the node, inputs of the layer.
        rank : int, optional
            Directions that are sent beside the variances, exactly; all, if left out.

        Raises
        ------
        RefusedError
            If there are too few.
        """
        if self.largest_rank == "full" or (
            self.largest_rank == "auto" and may_send_full(count, features)
        ):
            return
        if rank is not None and (
            # As of a class: exact as long as they are fewer numbers than the samples hide.
            coarseness(count, features, rank) == 0
            if self.rank_cap is None
            else rank <= self.rank_cap
        ):
            return
        asked = "the second moments" if rank is None else f"{rank} directions of the second moments"
        raise RefusedError(
            "largest_rank",
            f"{asked} of {features} inputs of {count} samples; merge by fisher or "
            "matching, or ask for cones",
        )

    def check_losses(self) -> None:
        """Refuse sums of the training loss and its gradient where nothing of the kind may leave.

        Raises
        ------
        RefusedError
            Names the limit.
        """
        if not self.share_gradients:
            raise RefusedError("share_gradients", "this node tells nobody its loss or gradient")
        if self.require_dp:
            raise RefusedError("require_dp", "gradients leave the node without noise")

    def check_gradient(
        self, count: int, fewest: float, features: int, *, masked: bool = False
    ) -> None:
        """Look at a gradient that is about to leave the node: how many samples are in it.

        Parameters
        ----------
        count : int
            Samples of the node.
        fewest : float
            How many of them stand behind the row that the fewest do.
        features : int
            Inputs of the layer.
        masked : bool
            Whether nobody sees the gradient itself, but only a sum over nodes.

        Raises
        ------
        RefusedError
            If there are fewer than the node allows.
        """
        if masked or self.largest_rank == "full":
            return
        least = max(self.min_count, smallest_count(features))
        if count < least:
            raise RefusedError(
                "largest_rank", f"the gradient of {count} samples, it takes {least} at least"
            )
        if fewest < self.min_count:
            raise RefusedError(
                "min_count",
                f"it is {self.min_count}, and as good as {fewest:.3g} samples make up a row of the "
                "gradient",
            )

    def check_private_sum(self, request: PrivateSum, masked_with: int) -> int:
        """Refuse a share of noise where nothing hides it; return how many shares count.

        Parameters
        ----------
        request : PrivateSum
            What is asked for.
        masked_with : int
            How many nodes there are in the secure sum, 0 where the answer goes out as it is.

        Raises
        ------
        RefusedError
            Names the limit.
        """
        self._check_seeded(request.dp_seeded)
        if request.stage == "gradient" and not self.share_gradients:
            raise RefusedError("share_gradients", "this node tells nobody its loss or gradient")
        if not masked_with and not self.seeded_noise:
            raise RefusedError(
                "honest_nodes",
                "a share of the noise without masks on the sum protects nobody: the server asks "
                "with secure=SecureSum(), the node has secure_sum_mod()",
            )
        return min(self.honest_nodes, masked_with or self.honest_nodes)

    def check_score(self, request: ScoreRequest | ChoiceRequest) -> None:
        """Refuse a score that must not be told, or not exactly."""
        if not self.allow_scores:
            raise RefusedError("allow_scores", "this node tells nobody how accurate a model is")
        if request.private is not None:
            self._check_seeded(request.dp_seeded)
        elif self.require_dp:
            raise RefusedError(
                "require_dp", "an exact score; with dp_epsilon the server asks for a noised one"
            )

    def _check_seeded(self, seeded: bool) -> None:
        if seeded and not self.seeded_noise:
            raise RefusedError(
                "seeded_noise", "noise from a known seed can be subtracted; ask without dp_seeded"
            )

    def check_message(self, message: Message) -> None:
        """Refuse what is neither a space nor a score where all must be private.

        Spaces and scores themselves are held against the limits where they are made. A message
        that asks for something else besides would have another mod answer it.
        """
        content, kind = message.content, message.metadata.message_type
        if kind.startswith(EVALUATE):
            self.check_score(ScoreRequest())
        if not self.require_dp or kind == INTRODUCE:
            return
        ours = requested_space(content) is not None or wants_score(content)
        ours = ours or requested_choice(content) is not None
        ours = ours or requested_private_sum(content) is not None
        others = (
            requested_averaging,
            requested_models,
            requested_neurons,
            requested_statistics,
        )
        if not ours or kind != TRAIN or any(asked(content) is not None for asked in others):
            raise RefusedError("require_dp", "models and statistics leave the node without noise")

    def ledger_of(self, node: str) -> Path | None:
        """Return where the privacy that a node spends is kept; None in a simulation."""
        if self.ledger is not None:
            return Path(self.ledger).expanduser()
        if self.dp_budget is None:
            return None
        home = os.environ.get("GEMS_FLWR_HOME") or "~/.gems-flwr"
        digest = hashlib.blake2b(node.encode(), digest_size=8).hexdigest()
        return Path(home).expanduser() / f"privacy-{quote(node, safe='')[:100]}-{digest}.json"


UNLIMITED = NodeLimits(largest_rank="full", dp_budget=None, share_examples=True, seeded_noise=True)
"""For simulations: all that the papers' experiments ask for."""

# Key in a node's config, field, and what kinds of values it takes.
_NODE_KEYS: dict[str, tuple[str, tuple[type, ...]]] = {
    "min-count": ("min_count", (int,)),
    "min-mean-count": ("min_mean_count", (int,)),
    "largest-rank": ("largest_rank", (int, str)),
    "require-dp": ("require_dp", (bool,)),
    "dp-budget": ("dp_budget", (float, int)),
    "dp-delta": ("dp_delta", (float,)),
    "privacy-ledger": ("ledger", (str,)),
    "allow-scores": ("allow_scores", (bool,)),
    "share-gradients": ("share_gradients", (bool,)),
    "honest-nodes": ("honest_nodes", (int,)),
}


# By name: the mods for secure aggregation are in a part of Flower that is not public.
_PRIVACY_MODS = {
    "LocalDpMod",
    "fixedclipping_mod",
    "adaptiveclipping_mod",
    "secagg_mod",
    "secaggplus_mod",
}


def refuse_bypass(
    call_next: ClientAppCallable,
    *,
    inside: str = "good_enough_mod",
    what: str = "a space",
    instead: str = "for private moments set dp_epsilon in the Gems strategy instead,",
) -> None:
    """Raise if a privacy mod sits between this mod and the handler.

    Parameters
    ----------
    call_next : callable
        What the mod would call.
    inside : str
        The mod's own name.
    what : str
        What would leave the node.
    instead : str
        What to do about it.

    Raises
    ------
    BypassedPrivacyError
        Names the mod and what to do.
    """
    for name in inner_mods(call_next):
        if name in _PRIVACY_MODS:
            raise BypassedPrivacyError(
                f"{name} is inside {inside}, where {what} would bypass it; {instead} or average "
                f"models (FedAvg, dynamic averaging) under {name}"
            )


def inner_mods(call_next: ClientAppCallable) -> list[str]:
    """Return the names of what a call will pass, as far as Flower's wrapping shows it."""
    names, seen = [], set()
    waiting: list[Any] = [call_next]
    while waiting:
        function = waiting.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        names.append(getattr(function, "__name__", type(function).__name__))
        for cell in getattr(function, "__closure__", None) or ():
            try:
                inside = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            if callable(inside):
                waiting.append(inside)
    return names
