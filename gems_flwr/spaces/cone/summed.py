"""Class moments of all nodes together, from a few sums over nodes: both sides of the exchanges.

The mathematics is in `gems_flwr.spaces.cone.totals`. A node that is not in a sum is not asked for
the next, for its bounds hold for the samples that were counted; the result is that of the nodes in
the last sum, with the means of those in the second.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from gems_flwr.bounds import MAX_COLUMNS
from gems_flwr.core.question import Disclosure, Group, SumQuestion
from gems_flwr.core.run import derive_seed
from gems_flwr.core.sums import Total
from gems_flwr.errors import (
    BadReplyError,
    ModelError,
    RefusedError,
    RoundFailedError,
    SpaceError,
)
from gems_flwr.samples import Samples
from gems_flwr.secure.fixed_point import Section
from gems_flwr.spaces.cone import totals
from gems_flwr.spaces.cone.cone import ClassMomentCone
from gems_flwr.spaces.cone.covariance import QuantizedArray
from gems_flwr.spaces.cone.question import Cone
from gems_flwr.spaces.cone.rules import MIN_COUNT, allowed_rank, samples_for
from gems_flwr.spaces.cone.totals import Standard
from gems_flwr.typing import Float

if TYPE_CHECKING:
    from gems_flwr.node import Node
    from gems_flwr.stages.stage import Play

Sum = Literal["scale", "means", "sketch", "covariances"]


@dataclass(frozen=True, eq=False)
class SummedMoments:
    """What the sums over nodes came to."""

    cone: ClassMomentCone  # of all nodes together
    standard: Standard  # how long inputs are: what later sums are bounded by
    nodes: tuple[str, ...]  # whose moments these are


@dataclass(frozen=True)
class MomentSum(SumQuestion):
    """What do your samples add to the class moments of all nodes?

    Parameters
    ----------
    stage : {"scale", "means", "sketch", "covariances"}
        Which sum.
    min_count : int, optional
        Samples of classes that have fewer on the node do not count, at least 2; by default what the
        node's limits say.
    planned : int, default 0
        Of *scale*: how many adaptive answers the server will ask for after it.
    random, seed : int, default 0
        Random columns of a sketch, and their source.
    totals : tuple of int
        After *scale*: how many samples of each class all nodes have together; 0 for a class that
        is left out because they are too few.
    center, scale : array of shape (D,), optional
        How inputs are standardised, from the sketch on.
    codes, units : arrays, optional
        Columns of the sketch, or the basis, as rows in eight bits, and the unit of each.
    """

    kind: ClassVar[str] = "moments"
    is_about_output_layer: ClassVar[bool] = True
    array_fields: ClassVar[tuple[str, ...]] = ("center", "scale", "codes", "units")

    stage: Sum = "scale"
    min_count: int | None = None
    planned: int = 0
    random: int = 0
    seed: int = 0
    totals: Sequence[int] = ()
    center: NDArray | None = None
    scale: NDArray | None = None
    codes: NDArray | None = None
    units: NDArray | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "totals", tuple(self.totals))
        stages, least = list(get_args(Sum)), self.min_count
        self.check(
            {
                "stage": (self.stage in stages, f"one of {stages}"),
                "min_count": (least is None or least >= 2, "at least 2, or none"),
                "planned": (self.planned >= 0, "at least 0"),
                "random": (0 <= self.random <= MAX_COLUMNS, f"from 0 to {MAX_COLUMNS}"),
                "seed": (self.seed >= 0, "at least 0"),
                "totals": (min(self.totals, default=0) >= 0, "at least 0 each"),
            }
        )
        if self.stage in ("sketch", "covariances"):
            self.directions()

    def directions(self) -> tuple[Float, Float, Float]:
        """Return center and scale of inputs, and the directions as rows, once they are checked."""
        if self.center is None or self.scale is None or self.codes is None or self.units is None:
            raise ModelError(f"the question for {self.stage} came without directions")
        shape = self.scale.shape
        if len(shape) != 1 or self.center.shape != shape or self.codes.shape[1:] != shape:
            shapes = f"{self.center.shape}, directions of {self.codes.shape}"
            raise ModelError(f"a center of shape {shapes}")
        if not (self.scale > 0).all():
            raise ModelError("the scale of inputs must be one number above 0 for each")
        if len(self.codes) > MAX_COLUMNS:
            raise ModelError(f"a sketch of at most {MAX_COLUMNS} directions, not {len(self.codes)}")
        rows = QuantizedArray(self.codes, self.units).dense()
        return self.center.astype(float), self.scale.astype(float), rows.astype(float)

    # --- on the node --------------------------------------------------------------------------

    def discloses(self, node: Node) -> Disclosure:
        """Return what the sum shows: under masks the total, so its counts are what is looked at."""
        samples, classes = (
            summed_samples(node, self.min_count, self.totals),
            node.output_layer().num_classes,
        )
        counts = torch.bincount(samples.labels.long(), minlength=classes).numpy()
        features, has_mean = samples.inputs.shape[1], self.stage == "means"
        if node.hidden_with and self.stage != "scale":
            # Its own samples decide nothing, for a refusal would tell of them.
            if len(self.totals) < classes:
                reason = "the server does not say how many samples the sum is of"
                raise RefusedError("largest_rank", reason)
            counts = np.array(self.totals[:classes])
        if self.stage == "covariances" and node.layout is not None:
            asked = {section.name for section in node.layout.sections}
            shown = np.array([f"second-{label}" in asked for label in range(classes)])
            counts = np.where(shown, counts, 0)
        named = [(f"class {label}", int(count)) for label, count in enumerate(counts)]
        if self.stage == "scale":
            named = []
        elif self.stage == "sketch":
            # A direction of a sketch is of all classes together.
            named = [("all classes", int(counts.sum()))]
        # More directions than features show no more than all of the covariance.
        directions = 0 if self.codes is None else min(len(self.codes) + self.random, features)
        each = max(directions, 0 if has_mean else 1)
        groups = tuple(Group(name, count, each, has_mean) for name, count in named if count)
        about: dict[str, Any] = {"masked_with": node.hidden_with, "planned": self.planned}
        about |= {"adaptive": int(self.stage != "scale"), "entries": classes * directions**2}
        return Disclosure("moments", features, groups, self.min_count, **about)

    def summand(self, node: Node) -> dict[str, Float]:
        """Return the node's sums, by section."""
        node.allow(self.discloses(node), leaves=True)
        samples, classes = (
            summed_samples(node, self.min_count, self.totals),
            node.output_layer().num_classes,
        )
        features = samples.inputs.shape[1]
        if self.scale is not None and len(self.scale) != features:
            raise ModelError(f"directions of {len(self.scale)} inputs, there are {features}")
        if self.stage == "scale":
            guarded = node.limits.largest_rank != "full"
            values = totals.scale_sums(samples, classes, guarded=guarded)
        elif self.stage == "means":
            values = totals.mean_sums(samples, classes, node.device)
        elif self.stage == "sketch":
            center, scale, rows = self.directions()
            columns = totals.sketch_columns(rows, self.random, self.seed)
            values = totals.sketch_sums(samples, center, scale, columns, node.device)
        else:
            values = totals.covariance_sums(samples, classes, *self.directions(), node.device)
        # Of a class that is too small there is no section.
        asked = {section.name for section in node.layout.sections} if node.layout else set()
        return {name: array for name, array in values.items() if name in asked}

    def check_summand(self, values: Mapping[str, Float], errors: Mapping[str, float]) -> None:
        """Refuse sums of inputs that are too large for the sum of their squares (Cauchy-Schwarz).

        Bounds of later sums follow from the totals: one such summand would make others' too large.
        """
        if self.stage != "means":
            return
        counts, squares = values["counts"], values["squares"] + errors["squares"]
        least = np.maximum(np.abs(values["sum"]) - errors["sum"], 0.0) ** 2
        if counts.min() < -0.5 or (squares < 0).any() or (least > counts.sum() * squares).any():
            raise BadReplyError("counts, sums and squares of inputs are such as no samples have")


def summed_samples(node: Node, asked: int | None, in_all: Sequence[int] = ()) -> Samples:
    """Return the training samples that a node adds to sums, of classes that have enough.

    Under masks nothing is refused for a sample: what no sum holds is left out. In the clear a
    feature that few samples of a class move is that of the others, as in a cone.
    """
    samples = node.inputs("train")
    if node.masked_with:
        samples = totals.countable(samples, node.output_layer().num_classes)
    least = node.limits.least_for_sums(asked, masked=node.hidden_with > 0)
    samples = totals.large_enough(samples, least, in_all)
    return totals.without_rare(samples) if node.is_guarded else samples


# --- on the server --------------------------------------------------------------------------


def collect_sums(play: Play, nodes: Sequence[str]) -> None:
    """Find the moments of all nodes together; every sum has at least `min_nodes` nodes.

    A RoundFailedError if a sum has fewer, or the totals are such as no samples have.
    """
    question = play.question
    assert isinstance(question, Cone)
    try:
        play.summed = _collected(play, question, nodes)
    except SpaceError as error:
        text = f"the sums of {len(nodes)} nodes are none that samples have: {error}"
        raise RoundFailedError(text, [], ()) from error
    play.spaces = {"all nodes": play.summed.cone}
    play.details["summed_nodes"] = list(play.summed.nodes)


def _collected(play: Play, space: Cone, nodes: Sequence[str]) -> SummedMoments:
    """Play all four sums."""
    round, features, least = play.round, play.layer.features, space.min_count or MIN_COUNT
    # Under masks a node's few samples hide among those of others: the total counts.
    own = None if round.is_secure else space.min_count

    def ask(stage: Sum, nodes: Iterable[str], sections: Sequence[Section], **more: Any) -> Total:
        question = MomentSum(stage, own, **more)
        return round.total(question, sections, list(nodes), at_least=round.min_nodes)

    # All but this one, and two for each round of refinement.
    planned = {"planned": 3 + 2 * space.refines}
    sections = totals.scale_sections(play.layer.num_classes, len(nodes))
    sized = ask("scale", nodes, sections, **planned)
    counts, largest = np.rint(sized.values["counts"]), totals.largest_of(sized.values["powers"])
    # A class that all nodes together have few samples of would be shown, not hidden.
    counts = np.where(counts >= min(least, MIN_COUNT), counts, 0.0)
    if not counts.max(initial=0) > 0:
        raise RoundFailedError("no class has enough samples on any node", [], ())
    about: dict[str, Any] = {"totals": counts.astype(int).tolist()}
    counted = ask("means", sized, totals.mean_sections(counts, features, largest), **about)
    pooled = totals.pooled_means(counted.values, counted.errors)
    standard, rows = pooled.standard, totals.mean_columns(pooled)
    about |= {"center": standard.center.astype("f4"), "scale": standard.scale.astype("f4")}
    guarded = round.is_secure and sized.values["guarded"] > 0.5
    random = {"random": space.random, "seed": 0}
    if guarded:
        # More than that its nodes would not show; see `NodeLimits.allow`.
        shown = min(features, allowed_rank(int(pooled.counts.sum()), features))
        random["random"] = max(0, min(space.random, shown - rows.shape[0]))
    if random["random"]:
        random["seed"] = derive_seed(round.seed, "sketch", round.number) % 2**63
    columns = totals.sketch_columns(rows.dense().astype(np.float64), *random.values())
    sections = totals.sketch_sections(standard, columns.shape[1])
    asked = about | {"codes": rows.codes, "units": rows.scales, **random}
    sketch = ask("sketch", counted, sections, **asked)
    most = None
    if guarded:
        most = totals.directions_shown(pooled.counts, features)
        least = max(least, samples_for(most, features))
    rows = totals.find_basis(pooled, columns, sketch.values["sketch"], most)
    basis = rows.dense().astype(np.float64)
    lengths = np.linalg.norm(basis, axis=1)
    sections = totals.covariance_sections(pooled.counts, standard, lengths, least)
    last = ask("covariances", sketch, sections, codes=rows.codes, units=rows.scales, **about)
    cone = totals.cone_from_totals(last.values, pooled, basis, least, space.epsilon)
    play.details["directions"] = len(basis)
    return SummedMoments(cone, standard, last.nodes)
