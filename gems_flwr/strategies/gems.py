"""Good-Enough Model Spaces in one round (Guha & Smith 2019, Section 3.1; Guha 2018).

Every node computes the set of output layers that are good enough on its own data and sends it
once; the server intersects the sets. Beyond the papers: class-moment cones, which close the gap
to pooled data in the same round; radii that say how honest they are; a proof where there is no
intersection; and rounds of refinement.

A round is a short pipeline: the spaces, then one stage after the other (`gems_flwr.stages`).
Decided here: one round is about the linear output layer. The layers below it, if there are any, are
common to all nodes and stay as the server sent them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from gems_flwr.carriers import KnownLayers
from gems_flwr.core.log import log_warning
from gems_flwr.core.question import registered_questions
from gems_flwr.core.round import Carrier, Round
from gems_flwr.core.run import RoundOutcome, ServerState
from gems_flwr.devices import check_device
from gems_flwr.errors import DiskError, OptionError
from gems_flwr.spaces import (
    SpaceFolder,
    aggregate_spaces,
    find_output_layer,
    intersection_details,
)
from gems_flwr.spaces.cone import ClassMomentCone
from gems_flwr.spaces.cone.summed import collect_sums
from gems_flwr.spaces.question import SpaceQuestion
from gems_flwr.stages.judge import Choose, verify
from gems_flwr.stages.refine import Refine
from gems_flwr.stages.screen import Screen
from gems_flwr.stages.stage import Head, Play, Stage, as_head, check_needs
from gems_flwr.stages.tune import Tune
from gems_flwr.strategies.averaging import mean_reports
from gems_flwr.strategies.loop import RoundLoop


@dataclass(kw_only=True, eq=False)
class Gems(RoundLoop):
    """Intersect the nodes' good-enough spaces.

    Parameters
    ----------
    space : Cone, Means, Ball or Ellipsoid, or "cone", "means", "ball" or "ellipsoid"
        What nodes are asked for; a word stands for the space with its defaults. Class moments,
        or the papers' balls and ellipsoids.
    head : Head or str, default "cone"
        What is made of class moments: the layer of the cone objective, a closed form of others
        (``ridge``, ``lda``, ``nearest_mean``), or what the nodes' held-out data choose (``auto``).
    refine : Refine or int, default 0
        Further rounds, for class moments, in which nodes send the gradient of their training loss
        and the server steps towards the pooled optimum. The loss falls in each or the layer stays;
        `details` have ``loss``, ``gradient_norm`` and ``loss_bound``: how much lower the pooled
        optimum can be, at most.
    robust : bool, default False
        Whether each node's space is held against those of the others before it counts. Who is left
        out, or counts for less, is in the details, and which classes too few nodes hold for a lie
        about them to be noticed.
    tune : Tune, optional
        Fine-tune on public samples.
    verify : bool, default False
        Whether every node is asked how accurate the result is on its own held-out data; with a
        `Cone` of sums all together (`details["score"]`).
    layer : str, optional
        Name of the linear output layer, where it is not the last matrix of the model.
    device : str, default "cpu"
        Where the server computes; see `gems_flwr.good_enough_mod`.
    **loop
        See `RoundLoop`. With a `checkpoint_dir` the received spaces are kept in its folder
        ``spaces``, where ``gems-flwr aggregate`` can add a late one.

    Examples
    --------
    >>> from gems_flwr import Cone, Gems
    >>> strategy = Gems(space=Cone(rank=20, clusters=8), refine=5, verify=True)
    """

    needs_classes: ClassVar[bool] = True
    mod_needed: ClassVar[str] = "good_enough_mod(data, model=Net)"
    sums_replies: ClassVar[bool] = True
    # Four of moments, the choice of a head, and the nodes' verdict.
    sums_in_round: ClassVar[int] = 6

    space: SpaceQuestion | str = "cone"
    head: Head | str = "cone"
    refine: Refine | int = 0
    robust: bool = False
    tune: Tune | None = None
    verify: bool = False
    layer: str | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_device(self.device)
        self.space = self.question = as_space(self.space)
        self._head = as_head(self.head)
        self._refine = Refine(self.refine) if isinstance(self.refine, int) else self.refine
        self.question = dataclasses.replace(self.question, refines=self._refine.rounds)
        self._before: list[Stage] = [Screen()] if self.robust else []
        after = [
            self.tune,
            Choose() if self._head.name == "auto" else None,
            self._refine if self._refine.rounds else None,
        ]
        self._after: list[Stage] = [stage for stage in after if stage is not None]
        self._check_needs()
        self._first_round = 1

    def _check_needs(self) -> None:
        """Refuse spaces, stages and options that cannot work together."""
        offers, cone = self.question.offers, self._head.name == "cone"
        capped = self.tolerance.max_examples is not None
        needs = {each.option: each.needs for each in (*self._before, *self._after)}
        needs[f"head='{self._head.name}'"] = frozenset(() if cone else {"moments"})
        needs["secure"] = frozenset({"sums"} if self.secure else ())
        needs["max_examples"] = frozenset({"spaces"} if capped else ())
        check_needs(offers | {"cone head"} if cone else offers, needs)

    @property
    def is_summed(self) -> bool:
        """Whether all that the server sees of the nodes are sums."""
        return "sums" in self.question.offers

    @property
    def rounds_needed(self) -> int:  # type: ignore[override]
        """One, and as many more as refining may take."""
        return 1 + self._refine.rounds

    def needs_names(self) -> bool:
        """Whether names must be known first: for an epsilon of each, or to refine by sums."""
        named = isinstance(getattr(self.question, "epsilon", None), Mapping)
        # Who is in a sum cannot be left out afterwards.
        return named or (self.is_summed and self._refine.rounds > 0)

    def carriers(self) -> Sequence[Carrier]:
        """Return the carrier that sends no node what it has below the output layer."""
        return (KnownLayers(),)

    def play_round(self, round: Round, state: ServerState) -> RoundOutcome:
        """Ask for the spaces and make a layer of them; in later rounds refine it."""
        round.layer = find_output_layer(state.arrays, self.layer)
        if self.is_summed:
            round.inbox = None  # what single nodes add is never written
        play = Play(round, self.question, round.layer, state.arrays, self._head, self.device)
        number = round.number - self._first_round
        if number > 0:
            outcome = self._refine.play_round(play, state, robust=self.robust, tune=self.tune)
        else:
            outcome = self._first(play, state)
        is_last = number == self._refine.rounds
        if self.verify and (is_last or self._refine.reason_to_stop(outcome.details)):
            found = verify(round, self.question, outcome.arrays, summed=self.is_summed)
            outcome = dataclasses.replace(outcome, details={**outcome.details, **found})
        return outcome

    def _first(self, play: Play, state: ServerState) -> RoundOutcome:
        """Play the first round."""
        self._collect(play)
        for stage in self._before:
            stage.play(play)
        # A point of all spaces, or a proof that there is none.
        play.found = aggregate_spaces(
            list(play.spaces.values()),
            auto_epsilon=getattr(self.question, "epsilon", None) == "auto",
            cone_options=self._head.cone_options(self.device),
            head=None if self._head.name == "cone" else self._head.head_options(self.device),
        )
        for stage in self._after:
            stage.play(play)
        self._keep(play)
        reports = play.round.reports
        return RoundOutcome(
            arrays=play.arrays,
            train_metrics=mean_reports(reports.values()) if reports else {},
            details=self._details(play),
            memory={**state.memory, **play.memory},
        )

    def _collect(self, play: Play) -> None:
        """Ask nodes for their spaces, or for the sum of their moments."""
        round, most = play.round, self.tolerance.max_examples
        nodes = round.sample(self.fraction_train)
        if self.is_summed:
            collect_sums(play, nodes)
            return
        play.received = round.ask(self.question.for_node, nodes, at_least=self.min_nodes)
        play.spaces = dict(play.received)
        for name, space in play.received.items():
            if most is not None and isinstance(space, ClassMomentCone):
                play.spaces[name] = space.with_samples_at_most(most)

    @property
    def _folder(self) -> SpaceFolder | None:
        """Where received spaces are kept."""
        return SpaceFolder(Path(self.checkpoint_dir) / "spaces") if self.checkpoint_dir else None

    def _keep(self, play: Play) -> None:
        """Put what was received into the run's folder."""
        if (folder := self._folder) is None:
            return
        try:
            folder.clear()
            folder.save(play.received)
        except DiskError as error:
            log_warning("spaces_not_kept", round=play.round.number, reason=error)

    def _details(self, play: Play) -> dict[str, Any]:
        """Return what was found, how sure that is, and for which node it is how good."""
        found, notes = play.aggregate, play.details.pop("screened", {})
        details = intersection_details(self.question.kind, found, play.spaces, notes)
        details |= {"head": self._head.name, **play.details}
        if self._head.class_weight != "counts":
            details["class_weight"] = self._head.class_weight
        if self.tolerance.max_examples is not None:
            details["max_examples"] = self.tolerance.max_examples
        if missing := details["missing_classes"]:
            reason = "no node sent anything of them: the model never predicts them"
            log_warning("missing_classes", round=play.round.number, classes=missing, reason=reason)
        return details

    # --- beside the rounds --------------------------------------------------------------------

    def reason_to_stop(self, state: ServerState) -> str | None:
        """Stop when refining has converged."""
        return self._refine.reason_to_stop(state.details) if self._refine.rounds else None

    def take_over(self, first_round: int) -> None:
        """Play from this round of another strategy's run on."""
        self._first_round = first_round


def as_space(space: SpaceQuestion | str) -> SpaceQuestion:
    """Return what a word such as ``"ball"`` stands for: that space with its defaults."""
    if isinstance(space, SpaceQuestion):
        return space
    kinds = {k: q for k, q in registered_questions().items() if issubclass(q, SpaceQuestion)}
    if not isinstance(space, str) or space not in kinds:
        raise OptionError(f"space must be one of {sorted(kinds)} or such a value, got {space!r}")
    return kinds[space]()
