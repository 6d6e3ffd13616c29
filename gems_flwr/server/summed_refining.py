"""Rounds of refinement in which the server sees nothing but totals over nodes.

The steps are those of `gems_flwr.server.refining`; gradients, curvatures and losses come as sums of
which every one is bounded beforehand (`gems_flwr.moments.refine_sections`). Decided here: a round
counts if most samples of every class are in its sums, as the sums tell themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import numpy as np
from flwr.app import RecordDict

from gems_flwr.errors import RoundFailedError
from gems_flwr.intersect.refinement import Evaluation, points_at
from gems_flwr.moments.refine_sections import (
    curvature_of,
    gradient_of,
    gradient_sections,
    losses_sections,
    rescaled,
)
from gems_flwr.secure.fixed_point import Section
from gems_flwr.server.log import log_warning
from gems_flwr.server.refining import BY_CLASS, RefineRound
from gems_flwr.server.summed_exchange import SummedExchange
from gems_flwr.server.summing import Summing, Total
from gems_flwr.typing import Float
from gems_flwr.wire.gradient_requests import (
    GradientRequest,
    LossesRequest,
    ask_for_losses,
    ask_for_summed_gradient,
)

# Beside the rounding to the grid: that of doubles.
_DOUBLE = 1e-12


class SummedRefineRound(RefineRound):
    """One round of refinement by totals.

    Parameters
    ----------
    summing : Summing
        Adds up.
    min_count : int, optional
        As in the request for the moments.
    *arguments
        See `RefineRound`; the memory knows how long inputs are.
    """

    def __init__(self, summing: Summing, min_count: int | None, *arguments: Any) -> None:
        super().__init__(*arguments)
        assert self.memory.standard is not None
        self.summing, self.min_count = summing, min_count
        self.standard = rescaled(self.memory.standard, self.scale)
        self.center = self.standard.center / self.scale
        # A class that was left out of the moments is in no later sum: bounds do not cover it.
        known = np.zeros(self.layer.num_classes)
        for cone in self.memory.cones.values():
            known[cone.labels] = 1
        self.weights = self.weights * known

    def _told_weights(self) -> tuple[float, ...]:
        return () if (self.weights == 1).all() else tuple(self.weights.tolist())

    def _gradients(self, nodes: Sequence[int]) -> Total:  # type: ignore[override]
        request = GradientRequest(
            class_weights=self._told_weights(),
            by_class=self.layer.num_classes <= BY_CLASS,
            min_count=self.min_count,
        )
        sections = gradient_sections(
            self.point, self.standard, self.weights, by_class=request.by_class
        )
        ask = partial(
            ask_for_summed_gradient,
            request=request,
            scale=self.scale,
            center=self.standard.center,
        )
        return self._summed(nodes, ask, sections, "gradient")

    def _losses(self, replies: Any, direction: Float, tried: Float) -> Total:  # type: ignore[override]
        nodes = [i for i in self.strategy.answered_ids if self.strategy.name_of(i) in replies]
        request = LossesRequest(class_weights=self._told_weights(), min_count=self.min_count)
        layers = points_at(self.point, direction, tried)
        ask = partial(
            ask_for_losses, request=request, scale=self.scale, direction=direction, points=tried
        )
        sections = losses_sections(layers, self.standard, self.weights)
        return self._summed(nodes, ask, sections, "losses")

    def _summed(
        self,
        nodes: Sequence[int],
        ask: Callable[[RecordDict], None],
        sections: Sequence[Section],
        step: str,
    ) -> Total:
        server_round, config = self.place
        exchange = SummedExchange(
            self.strategy, self.summing, self.backbones, server_round, self.model, config
        )
        try:
            return exchange.total(nodes, ask, sections, step)
        except RoundFailedError as error:
            # A secure sum that too few nodes are left to open: the layer stays as it is.
            log_warning("not_opened", round=server_round, what=step, reason=str(error))
            return Total({}, ())

    def _pooled(self, replies: Any) -> tuple[Evaluation, Float]:
        total, classes = replies, len(self.point)
        values, errors = total.values, total.errors
        weight = self._weight(total)
        gradient = gradient_of(values["gradient"], values["bias"], self.center)
        off = errors["gradient"] + errors["bias"] * float(np.abs(self.center).max(initial=1.0))
        off += _DOUBLE * float(np.abs(gradient).max(initial=0))
        softmax = curvature_of(values["curvature"], classes) / weight
        loss, gradient, softmax = self._with_public(
            float(values["loss"][0]) / weight, gradient / weight, softmax
        )
        rows = np.full(classes, off / weight)
        return Evaluation(self.point, loss, gradient, rows, tuple(total)), softmax

    def _mean_losses(self, replies: Any, answers: Any) -> Float:
        return np.asarray(answers.values["losses"] / self._weight(answers))

    def _lost_classes(self, nodes: Collection[str]) -> list[int]:
        assert isinstance(nodes, Total)
        there, in_all = nodes.values["weights"], np.zeros(self.layer.num_classes)
        for cone in self.memory.cones.values():
            np.add.at(in_all, cone.labels, cone.counts)
        return [int(c) for c in np.flatnonzero(2 * there < self.weights * in_all)]

    def _takes_part(self, node: int) -> bool:
        # Of a sum nobody can be left out afterwards.
        return self._knows(self.strategy.name_of(node))

    @staticmethod
    def _weight(total: Total) -> float:
        return max(float(total.values["weights"].sum()), float(np.finfo(np.float64).tiny))
