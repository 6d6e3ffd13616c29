"""The nodes' held-out data choose a head: what their counts add up to.

Counts of all nodes are summed before they are divided, so that a sample counts the same wherever it
is. For balanced accuracy that is done for every class, and classes without a held-out sample do not
count. Of candidates that are within a standard error of the best the first is taken (the rule of
Breiman et al. 1984 for trees): few samples cannot tell them apart, and the cone comes first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gems_flwr.errors import OptionError
from gems_flwr.intersect.aggregate import Aggregate
from gems_flwr.intersect.cone_objective import ConeOptions
from gems_flwr.intersect.moment_heads import HeadOptions
from gems_flwr.intersect.result import Intersection
from gems_flwr.intersect.solve_heads import NOT_LINEAR, candidate_heads
from gems_flwr.server.log import log_event, log_warning
from gems_flwr.spaces.cone import ClassMomentCone
from gems_flwr.typing import Float
from gems_flwr.wire.choice_messages import ChoiceRequest, Counts
from gems_flwr.wire.requests import ScoreRequest
from gems_flwr.wire.space_requests import Cone, Means, SpaceRequest


def check_head_options(
    head: HeadOptions, space: SpaceRequest, *, tune: int, select: str | None
) -> None:
    """Refuse heads that do not go with the other options.

    Raises
    ------
    OptionError
        Says what to write.
    """
    if head.name == "qda":
        raise OptionError(NOT_LINEAR)
    if head.name == "cone":
        return
    if not isinstance(space, Cone | Means):
        raise OptionError(
            f"head='{head.name}' is made from class moments: write space=Cone() or space=Means()"
        )
    if tune:
        raise OptionError(f"tune joins the cone objective: write head='cone', not '{head.name}'")
    if select not in (None, "objective"):
        raise OptionError(f"head='{head.name}' goes with select=None, got select='{select}'")


@dataclass(frozen=True)
class HeadChoice:
    """Candidates for an output layer, and the request to judge them.

    Parameters
    ----------
    candidates : mapping from str to Intersection
        By name, in order.
    request : ChoiceRequest
        What nodes are asked.
    """

    candidates: Mapping[str, Intersection]
    request: ChoiceRequest

    @classmethod
    def among(
        cls,
        cones: Sequence[ClassMomentCone],
        cone: Intersection,
        head: HeadOptions,
        cone_options: ConeOptions,
        score: ScoreRequest,
    ) -> HeadChoice:
        """Return the heads of some cones; noise as for scores.

        Where classes weigh the same in the objective, they do in the choice.
        """
        balanced = cone_options.class_weight == "balanced"
        candidates = candidate_heads(cones, cone, head, cone_options)
        request = ChoiceRequest(
            len(candidates), balanced, score.dp_epsilon, score.dp_delta, score.dp_seeded
        )
        return cls(candidates, request)

    def decided(
        self, counts: Mapping[str, Counts], found: Aggregate, most: float | None
    ) -> tuple[Aggregate, dict[str, Any]]:
        """Return the layer that is best on the nodes' held-out data, and the details.

        Parameters
        ----------
        counts : mapping from str to Counts
            By node; without any the first candidate stays.
        found : Aggregate
            The first candidate.
        most : float, optional
            Most samples that a node counts for.
        """
        names = list(self.candidates)
        if not counts:
            log_warning("head_not_chosen", head=names[0], reason="no node judged the candidates")
            return found, {"head": names[0], "head_scores": {}}
        capped = [_capped(each, most) for each in counts.values()]
        seen, right = sum(seen for seen, _ in capped), sum(right for _, right in capped)
        there = seen > 0
        shares = right[:, there] / seen[there] if there.any() else np.zeros((len(names), 1))
        scores = dict(zip(names, shares.mean(axis=1).tolist(), strict=True))
        top = shares[int(shares.mean(axis=1).argmax())]
        slack = _standard_error(top, seen[there])
        best = next(name for name in names if scores[name] >= float(top.mean()) - slack)
        log_event("head_chosen", head=best, score=scores[best], nodes=len(counts))
        met = self.candidates[best]
        chosen = replace(found, point=met.point, intersection=met)
        return chosen, {"head": best, "head_scores": scores}


def _standard_error(shares: Float, seen: Float) -> float:
    """Return that of a mean of shares, each over so many samples."""
    variances = shares * (1 - shares) / np.maximum(seen, 1.0) if len(seen) else np.zeros(1)
    return float(np.sqrt(variances.sum())) / len(shares)


def _capped(counts: Counts, most: float | None) -> tuple[Any, Any]:
    total = float(counts.seen.sum())
    share = 1.0 if most is None or total <= most else most / total
    return share * counts.seen, share * counts.right


def warn_of_missing(server_round: int, details: Mapping[str, Any]) -> None:
    """Say in the log which classes the model cannot know, for nobody sent anything of them."""
    missing = details.get("missing_classes")
    if missing:
        log_warning(
            "missing_classes",
            round=server_round,
            classes=missing,
            reason="no node sent anything of them: the model never predicts them",
        )
