"""Held-out data as a judge: which layer is best, and how accurate the result is on each node.

`Choose` lets nodes choose among the functions of class moments that can become the output layer.
Counts of all nodes are summed before they are divided, so that a sample counts the same wherever it
is. For balanced accuracy that is done for every class, and classes without a held-out sample do not
count. Of candidates within a standard error of the best the first is taken (the rule of Breiman et
al. 1984 for trees): few samples cannot separate them, and the cone comes first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from flwr.app import ConfigRecord, RecordDict
from numpy.typing import NDArray

from gems_flwr.bounds import MAX_EXAMPLES
from gems_flwr.core.log import log_event, log_warning
from gems_flwr.core.question import Disclosure, LayerQuestion, Question, SumQuestion
from gems_flwr.core.round import Round
from gems_flwr.errors import BadReplyError, ModelError, OptionError, RoundFailedError, shown
from gems_flwr.networks import linear_layer
from gems_flwr.secure.fixed_point import Section
from gems_flwr.spaces.ball import LayerData, class_margins
from gems_flwr.spaces.cone import ClassMomentCone, PrivateChoice, candidate_heads, countable
from gems_flwr.stages.gradients import raw_values
from gems_flwr.stages.stage import Play, Stage
from gems_flwr.typing import Arrays, Float

if TYPE_CHECKING:
    from gems_flwr.node import Node
    from gems_flwr.spaces import OutputLayer
    from gems_flwr.spaces.question import SpaceQuestion

COUNTS, SEEN, RIGHT = "counts", "seen", "right"
# More would be a search over models on data that was held out.
MAX_CANDIDATES = 64


@dataclass(frozen=True, eq=False)
class Counts:
    """A node's judgement of one or several layers."""

    # Held-out samples of each class (K,); of all (K = 1) where classes are not told apart.
    seen: Float
    # How many of them each candidate classifies correctly (candidates, K).
    right: Float

    @property
    def share(self) -> float | None:
        """The share of right answers of a single candidate; None without samples."""
        seen = float(self.seen.sum())
        return float(self.right.sum()) / seen if seen > 0 else None

    def capped(self, most: float | None) -> Counts:
        """Return the same shares of no more samples than a node counts for."""
        total = float(self.seen.sum())
        share = 1.0 if most is None or total <= most else most / total
        return Counts(share * self.seen, share * self.right)


@dataclass(frozen=True)
class _Judgement(Question[Any]):
    """What questions about held-out samples share."""

    array_fields: ClassVar[tuple[str, ...]] = ("weights", "biases")

    # Of the candidates (M, outputs, features); without any, the model's own layer is judged.
    weights: NDArray | None = None
    biases: NDArray | None = None  # likewise (M, outputs)
    by_class: bool = False  # whether right answers are counted for each class

    def __post_init__(self) -> None:
        stacked = self.weights is None or self.weights.ndim == 3
        if not (stacked and 1 <= self.candidates <= MAX_CANDIDATES):
            raise OptionError(f"there must be from 1 to {MAX_CANDIDATES} candidates of one shape")

    @property
    def candidates(self) -> int:
        """How many layers are judged."""
        return 1 if self.weights is None else len(self.weights)

    def counts(self, node: Node) -> Counts:
        """Return how many held-out samples each candidate classifies correctly."""
        layer, samples = node.output_layer("validation"), node.inputs("validation")
        if node.masked_with:
            samples = countable(samples, layer.num_classes)
        groups = layer.num_classes if self.by_class else 1
        labels = samples.labels.long()
        group = labels if self.by_class else torch.zeros_like(labels)
        right = []
        for arrays in self._models(layer) or [node.model]:
            weight, bias = linear_layer(arrays, layer, node.device)
            data = LayerData(weight, bias, samples.inputs, samples.labels)
            hits = (class_margins(*data.scores()).amin(dim=1) > 0).cpu()
            right.append(torch.bincount(group[hits], minlength=groups)[:groups])
        seen = torch.bincount(group, minlength=groups)[:groups]
        return Counts(seen.double().numpy(), torch.stack(right).double().numpy())

    def _models(self, layer: OutputLayer) -> list[Arrays]:
        if self.weights is None:
            return []
        shape, wanted = self.weights.shape[1:], (layer.outputs, layer.features)
        if shape != wanted:
            raise ModelError(f"candidates of shape {shape} for a layer of shape {wanted}")
        if layer.bias is None:
            return [{layer.weight: weight} for weight in self.weights]
        if self.biases is None or len(self.biases) != len(self.weights):
            raise ModelError("the candidates have no biases, the layer has one")
        both = zip(self.weights, self.biases, strict=True)
        return [{layer.weight: weight, layer.bias: bias} for weight, bias in both]


@dataclass(frozen=True)
class Judge(LayerQuestion[Counts], _Judgement):
    """How many of your held-out samples does each of these output layers classify correctly?"""

    kind: ClassVar[str] = "score"

    dp_epsilon: float | None = None  # counts are exact while it is None, else private
    dp_delta: float = 1e-5
    dp_seeded: bool = False  # as in `SpaceQuestion`

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.private

    @property
    def private(self) -> PrivateChoice | None:
        """The private release that is asked for, if any."""
        if self.dp_epsilon is None:
            return None
        return PrivateChoice(self.dp_epsilon, self.dp_delta, self.candidates)

    def discloses(self, node: Node) -> Disclosure:
        """Return that it is scores, and under which noise."""
        mu = None if self.private is None else self.private.squared_mu
        count = self.candidates if mu is None else 0
        return Disclosure("score", squared_mu=mu, is_seeded=self.dp_seeded, adaptive=count)

    def answer(self, node: Node) -> RecordDict:
        """Return the counts."""
        counts = self.counts(node)
        if (private := self.private) is not None:
            node.spend(private.squared_mu)
            seed = node.seed("score") if self.dp_seeded else None
            counts = Counts(*private.noised(counts.seen, counts.right, seed))
        # Raw bytes have no headers, which would be longer than the numbers.
        parts = {SEEN: counts.seen, RIGHT: counts.right}
        raw: dict[str, Any] = {name: part.astype("<f4").tobytes() for name, part in parts.items()}
        return RecordDict({COUNTS: ConfigRecord(raw)})

    def read(self, content: RecordDict) -> Counts:
        """Return counts of the right shape, none above the samples that were seen."""
        record = content.get(COUNTS)
        if not isinstance(record, ConfigRecord):
            raise BadReplyError(f"expected a ConfigRecord '{COUNTS}', got {shown(record)}")
        groups = self.output_layer.num_classes if self.by_class else 1
        seen = raw_values(record, SEEN, "<f4", (groups,), (0, MAX_EXAMPLES))
        right = raw_values(record, RIGHT, "<f4", (self.candidates, groups), (0, MAX_EXAMPLES))
        if seen.sum() > MAX_EXAMPLES:
            raise BadReplyError(
                f"'{SEEN}' must sum to {MAX_EXAMPLES:g} at most, got {seen.sum():g}"
            )
        if (right > seen).any():
            raise BadReplyError(f"'{RIGHT}' must be nowhere above '{SEEN}'")
        return Counts(seen, right)


@dataclass(frozen=True)
class JudgeSum(SumQuestion, _Judgement):
    """How many held-out samples does each layer classify correctly, all nodes together?"""

    kind: ClassVar[str] = "score-sum"
    is_about_output_layer: ClassVar[bool] = True

    def discloses(self, node: Node) -> Disclosure:
        """Return that it is scores, under masks or not."""
        return Disclosure("score", masked_with=node.hidden_with, adaptive=self.candidates)

    def summand(self, node: Node) -> dict[str, Float]:
        """Return the counts."""
        counts = self.counts(node)
        return {SEEN: counts.seen, RIGHT: counts.right}


# --- on the server --------------------------------------------------------------------------


def verify(
    round: Round, question: SpaceQuestion, model: Arrays, *, summed: bool = False
) -> dict[str, Any]:
    """Ask nodes how accurate a model is, for the details: each node, or with `summed` all together.

    Scores get as much noise as `question` has asked for.
    """
    if not summed:
        counts = round.ask(Judge(**question.privacy), model=model)
        shares = {name: each.share for name, each in counts.items()}
        return {"node_scores": {name: s for name, s in shares.items() if s is not None}}
    try:
        return {"score": _summed(round, JudgeSum(), 1, model).share}
    except RoundFailedError as error:
        # The model is there; what is missing is the nodes' word on it.
        log_warning("not_opened", round=round.number, what="verification", reason=str(error))
        return {"score": None}


def _summed(round: Round, question: JudgeSum, groups: int, model: Arrays | None = None) -> Counts:
    """Return the counts of all nodes together."""
    most, shape = float(MAX_EXAMPLES), (question.candidates, groups)
    sections = [Section(SEEN, (groups,), most, 64), Section(RIGHT, shape, most, 64)]
    total = round.total(question, sections, model=model)
    return Counts(total.values[SEEN].round(), total.values[RIGHT].round())


class Choose(Stage):
    """Let the nodes' held-out data choose among the heads that class moments allow."""

    option: ClassVar[str] = "head='auto'"
    needs: ClassVar[frozenset[str]] = frozenset({"moments"})

    def play(self, play: Play) -> None:
        """Replace the layer by the candidate that is best on the nodes' held-out data."""
        cones = [s for s in play.spaces.values() if isinstance(s, ClassMomentCone)]
        head, device, layer = play.head, play.device, play.layer
        options = head.head_options(device), head.cone_options(device)
        heads = candidate_heads(cones, play.aggregate.intersection, *options)
        models = [layer.replace_in(play.start, met.point) for met in heads.values()]
        weights, biases = (
            np.stack([np.asarray(model[key]) for model in models]) if key else None
            for key in (layer.weight, layer.bias)
        )
        by_class = head.class_weight == "balanced"
        if play.summed is None:
            question = Judge(weights, biases, by_class, **play.question.privacy)
            counts = list(play.round.ask(question).values())
        else:
            groups = layer.num_classes if by_class else 1
            counts = [_summed(play.round, JudgeSum(weights, biases, by_class), groups)]
        best, scores = decided(list(heads), counts, play.round.tolerance.max_examples)
        met = heads[best]
        play.found = replace(play.aggregate, point=met.point, intersection=met)
        play.details |= {"head": best, "head_scores": scores}


def decided(
    names: Sequence[str], counts: Sequence[Counts], most: float | None
) -> tuple[str, Mapping[str, float]]:
    """Return which candidate is best by the counts of nodes, and the score of each.

    Of candidates within a standard error of the best the first counts; without counts the first.
    No node counts for more than `most` samples.
    """
    if not counts:
        log_warning("head_not_chosen", head=names[0], reason="no node judged the candidates")
        return names[0], {}
    parts = [each.capped(most) for each in counts]
    seen = np.sum([part.seen for part in parts], axis=0)
    right = np.sum([part.right for part in parts], axis=0)
    there = seen > 0
    shares = right[:, there] / seen[there] if there.any() else np.zeros((len(names), 1))
    scores = dict(zip(names, shares.mean(axis=1).tolist(), strict=True))
    top = shares[int(shares.mean(axis=1).argmax())]
    # That of a mean of shares, each over so many samples.
    variances = top * (1 - top) / np.maximum(seen[there], 1.0) if there.any() else np.zeros(1)
    slack = float(np.sqrt(variances.sum())) / len(top)
    best = next(name for name in names if scores[name] >= float(top.mean()) - slack)
    log_event("head_chosen", head=best, score=scores[best], nodes=len(counts))
    return best, scores
