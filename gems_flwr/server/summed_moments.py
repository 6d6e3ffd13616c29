"""Class moments of all nodes together, from four sums over nodes.

The mathematics is in `gems_flwr.moments.moment_sums` and `gems_flwr.moments.cone_from_totals`. Here
are the exchanges. Whoever is not in a sum is not asked for the next, for its bounds hold for the
samples that were counted; the result is that of the nodes in the last sum, with the means of those
in the second.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from flwr.app import RecordDict

from gems_flwr.errors import RoundFailedError, SpaceError
from gems_flwr.moments.cone_building import MIN_COUNT
from gems_flwr.moments.cone_from_totals import (
    cone_from_totals,
    find_basis,
    mean_columns,
    pooled_means,
    sketch_columns,
)
from gems_flwr.moments.moment_sums import (
    Standard,
    covariance_sections,
    directions_shown,
    largest_of,
    mean_sections,
    samples_for,
    scale_sections,
    sketch_sections,
)
from gems_flwr.runtime.seeding import derive_seed
from gems_flwr.secure.fixed_point import Section
from gems_flwr.server.summed_exchange import SummedExchange
from gems_flwr.server.summing import Total
from gems_flwr.spaces.cone import ClassMomentCone
from gems_flwr.spaces.covariance import QuantizedArray
from gems_flwr.spaces.output_layer import OutputLayer
from gems_flwr.wire.moment_requests import MomentSums, Stage, ask_for_moment_sums
from gems_flwr.wire.space_requests import Cone


@dataclasses.dataclass(frozen=True, eq=False)
class SummedMoments:
    """What four sums over nodes came to.

    Parameters
    ----------
    cone : ClassMomentCone
        Of all nodes together.
    standard : Standard
        How long inputs are: what later sums are bounded by.
    nodes : tuple of str
        Whose moments these are.
    details : dict
        What the round tells of it.
    """

    cone: ClassMomentCone
    standard: Standard
    nodes: tuple[str, ...]
    details: dict[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class MomentExchanges:
    """Asks nodes for the four sums.

    Parameters
    ----------
    exchange : SummedExchange
        About the model whose output layer the moments are for.
    layer : OutputLayer
        Which that is.
    space : Cone
        What is wanted.
    """

    exchange: SummedExchange
    layer: OutputLayer
    space: Cone
    _totals: list[int] = dataclasses.field(default_factory=list, init=False)

    def play(self, nodes: Sequence[int]) -> SummedMoments:
        """Play all four; every sum has at least `min_nodes` nodes.

        Raises
        ------
        RoundFailedError
            If one has fewer, or the totals are such as no samples have.
        """
        classes, exchange = self.layer.num_classes, self.exchange
        sized = self._asked("scale", nodes, scale_sections(classes, len(nodes)))
        counts, largest = np.rint(sized.values["counts"]), largest_of(sized.values["powers"])
        least = self.space.min_count or MIN_COUNT
        # A class that all nodes together have few samples of would be shown, not hidden.
        counts = np.where(counts >= min(least, MIN_COUNT), counts, 0.0)
        self._totals[:] = [int(count) for count in counts]
        if not counts.max(initial=0) > 0:
            raise RoundFailedError("no class has enough samples on any node", [], ())
        try:
            sections = mean_sections(counts, self.layer.features, largest)
            total = self._asked("means", self._ids(nodes, sized), sections)
            pooled = pooled_means(total.values, total.errors)
            standard, rows = pooled.standard, mean_columns(pooled)
            seed = derive_seed(exchange.strategy.seed, "sketch", exchange.server_round) % 2**63
            columns = sketch_columns(rows, int(self.space.sketch or 0), seed)
            sections = sketch_sections(standard, columns.shape[1])
            ids = self._ids(nodes, total)
            sketch = self._asked("sketch", ids, sections, standard, rows, seed)
            most = None
            if self.exchange.strategy.secure and sized.values["guarded"] > 0.5:
                # More than that its nodes would not show; see `NodeLimits.check_summand`.
                most = directions_shown(pooled.counts, self.layer.features)
                least = max(least, samples_for(most, self.layer.features))
            basis = find_basis(pooled, columns, sketch.values["sketch"], most)
            dense = basis.dense().astype(np.float64)
            lengths = np.linalg.norm(dense, axis=1)
            sections = covariance_sections(pooled.counts, standard, lengths, least)
            ids = self._ids(nodes, sketch)
            last = self._asked("covariances", ids, sections, standard, basis)
            cone = cone_from_totals(
                last.values, pooled, dense, min_count=least, epsilon=self.space.epsilon
            )
        except SpaceError as error:
            raise RoundFailedError(
                f"the sums of {len(sized)} nodes are none that samples have: {error}", [], ()
            ) from error
        told = {"summed_nodes": list(last.nodes), "directions": len(dense)}
        return SummedMoments(cone, standard, last.nodes, told)

    def _ids(self, nodes: Sequence[int], total: Total) -> list[int]:
        return [node for node in nodes if self.exchange.strategy.name_of(node) in total]

    def _asked(
        self,
        stage: Stage,
        nodes: Sequence[int],
        sections: Sequence[Section],
        standard: Standard | None = None,
        directions: QuantizedArray | None = None,
        seed: int = 0,
    ) -> Total:
        random = int(self.space.sketch or 0) if stage == "sketch" else 0
        # Under masks a node's few samples hide among those of others: the total counts.
        own = None if self.exchange.strategy.secure else self.space.min_count
        request = MomentSums(stage, own, random, seed if random else 0, tuple(self._totals))

        def ask(content: RecordDict) -> None:
            center, scale = (None, None) if standard is None else (standard.center, standard.scale)
            ask_for_moment_sums(content, request, center, scale, directions)

        least = self.exchange.strategy.min_nodes
        return self.exchange.total(nodes, ask, sections, stage, at_least=least)
