"""One round of `MultiModel`; the decisions that it takes stand in `multi_model`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from flwr.app import ConfigRecord
from flwr.serverapp import Grid
from numpy.typing import NDArray

from gems_flwr.averaging.means import mean_metrics
from gems_flwr.averaging.steps import (
    flat,
    moved_control,
    remembered,
    residual_norm,
    stepped,
    update_of,
)
from gems_flwr.bounds import MAX_GRADIENT, MAX_STEP
from gems_flwr.client_sampling import (
    aggregation_coefficients,
    data_shares,
    draw_assignment,
    estimated_variance,
    loss_importance,
    optimal_probabilities,
    reachable_budget,
    uniform_probabilities,
)
from gems_flwr.errors import MultiModelError
from gems_flwr.runtime.seeding import generator
from gems_flwr.server.log import log_warning
from gems_flwr.server.members import ONLY_MODEL, join_members, split_members, split_models
from gems_flwr.server.state import RoundOutcome, ServerState
from gems_flwr.strategies.multi_model.model_exchange import Parts, Post
from gems_flwr.strategies.multi_model.model_state import Book
from gems_flwr.typing import Arrays
from gems_flwr.wire.keys import TRAIN
from gems_flwr.wire.requests import Action, ReportKind

if TYPE_CHECKING:
    from gems_flwr.strategies.multi_model.multi_model import MultiModel

_REPORTS: dict[str, ReportKind] = {"gvr": "norm", "stale": "residual"}
_WITH_OLD_UPDATES = ("stale", "fedvarp", "mifa")


class MultiModelTurn:
    """One round of `MultiModel`: who could train what, who does, and what comes of it."""

    def __init__(
        self,
        strategy: MultiModel,
        server_round: int,
        state: ServerState,
        grid: Grid,
        config: ConfigRecord,
    ) -> None:
        self.strategy, self.round = strategy, server_round
        self.models = split_models(state.arrays)
        self.joined = set(split_members(state.arrays)) != {""}
        self.book = Book.from_memory(state.memory, strategy.run_name)
        for name in self.models:
            self.book.versions.setdefault(name, 0)
        self.ids = {
            strategy._nodes.name(node): node
            for node in strategy.choose_nodes(server_round, grid, 1.0, TRAIN)
        }
        self.post = Post(
            strategy,
            server_round,
            config,
            self.models,
            self.book,
            keeps=strategy.sampling == "lvr",
            scaffold=strategy.sampling == "scaffold",
        )
        self.metrics: dict[str, float] = {}
        self.betas: dict[str, dict[str, float]] = {name: {} for name in self.models}
        self.delivered: Parts = {}

    # --- the steps of a round -----------------------------------------------------------------

    def introduce(self) -> None:
        """Ask strangers what they have; find out who takes part."""
        strangers = [name for name in self.ids if name not in self.book.holdings]
        if strangers:
            self.ids = self.post.introduce(self.ids, strangers)
        self.nodes = [name for name in self.ids if name in self.book.holdings]
        self.names = list(self.models)
        counts = self.book.examples(self.nodes, self.names, self.strategy.max_examples)
        nobody = [m for m, total in zip(self.names, counts.sum(axis=0), strict=True) if not total]
        if nobody:
            raise MultiModelError(
                f"no node has data for {', '.join(map(repr, nobody))}: leave it out of the models, "
                f"or let nodes name it in their holdings (they have {self._held_names()})"
            )
        self.shares = data_shares(counts)
        self.available = counts > 0
        self.capacity = np.array([self.book.holdings[n].capacity for n in self.nodes], np.int64)
        self.budget = self._reachable()

    def weigh(self) -> None:
        """Find the probability of each pair, asking the nodes for losses or norms if need be."""
        sampling = self.strategy.sampling
        if sampling == "full":
            self.probabilities = self.available.astype(np.float64)
            return
        if sampling in ("lvr", "gvr", "stale"):
            importance = self._losses() if sampling == "lvr" else self._norms()
            if importance.any():
                self.probabilities = optimal_probabilities(importance, self.budget, self.capacity)
                return
            self.book.uniform_rounds.append(self.round)
            log_warning("no_importance", round=self.round, drawn="uniformly")
        self.probabilities = uniform_probabilities(self.available, self.budget, self.capacity)

    def draw(self) -> None:
        """Draw who trains what."""
        rng = generator(self.strategy.seed, "assign", self.round)
        self.drawn = draw_assignment(self.probabilities, rng)
        for node, model in self._pairs(self.drawn):
            self.book.count(node, model)

    def train(self) -> None:
        """Get the models of those drawn."""
        wanted: dict[str, list[str]] = {}
        for node, model in self._pairs(self.drawn):
            wanted.setdefault(node, []).append(model)
        action: Action = "train"
        if self.strategy.sampling in _REPORTS:
            action = "send"
        self.delivered = self.post.ask(
            self.ids, wanted, action, "" if action == "train" else "send"
        )

    def step(self) -> None:
        """Move every model."""
        coefficients = self._coefficients()
        norms = np.zeros_like(coefficients)
        self.new_models: dict[str, dict[str, NDArray]] = {}
        for column, model in enumerate(self.names):
            by_node = {
                node: float(coefficients[row, column])
                for row, node in enumerate(self.nodes)
                if coefficients[row, column] > 0
            }
            trained = {node: self.delivered[node][model].arrays or {} for node in by_node}
            for node, arrays in trained.items():
                norms[self.nodes.index(node), column] = self._residual(model, node, arrays)
            self.new_models[model] = stepped(
                self.models[model],
                list(trained.values()),
                list(by_node.values()),
                self._control_variate(column, by_node),
            )
            self._remember(column, trained)
        self._check_finite()
        variances = estimated_variance(norms, coefficients, self.probabilities)
        for column, model in enumerate(self.names):
            self.metrics[f"step_size/{model}"] = float(coefficients[:, column].sum())
            self.metrics[f"variance/{model}"] = float(variances[column])
        self.metrics["pairs_drawn"] = float(self.drawn.sum())
        self.metrics["pairs"] = float((coefficients > 0).sum())

    def outcome(self) -> RoundOutcome:
        """Return what the round has changed."""
        parts = [part for by_model in self.delivered.values() for part in by_model.values()]
        most = self.strategy.max_examples
        weights = [p.num_examples if most is None else min(p.num_examples, most) for p in parts]
        told = mean_metrics([p.metrics for p in parts], weights) if parts else {}
        return RoundOutcome(
            arrays=join_members(self.new_models) if self.joined else self.new_models[ONLY_MODEL],
            train_metrics={**told, **self.metrics},
            memory=self.book.to_memory(),
            details={
                "sampling": self.strategy.sampling,
                **self.book.details(self.names),
            },
        )

    # --- importance ---------------------------------------------------------------------------

    def _losses(self) -> NDArray[np.float64]:
        """Ask everybody for the loss of every model that they have; return d × loss."""
        parts = self.post.ask(self.ids, self._everything(), "losses", "losses")
        # First, since it takes those whose loss is missing out of what is available.
        losses = self._numbers(parts, "loss")
        return loss_importance(losses, self.shares, self.available)

    def _norms(self) -> NDArray[np.float64]:
        """Let everybody train every model that they have; return d × ‖U‖, or d × ‖U − βh‖."""
        parts = self.post.ask(
            self.ids, self._everything(), "train", "norms", _REPORTS[self.strategy.sampling]
        )
        for node, by_model in parts.items():
            for model, part in list(by_model.items()):
                beta, old = part.beta or 0.0, self.book.old.get(model, {}).get(node)
                if old is not None and abs(beta) * float(np.abs(old).max(initial=0)) > MAX_STEP:
                    # What it would have us subtract of its old update is more than any update.
                    reason = f"beta {beta:.4g} takes its old update above {MAX_STEP:g}"
                    self.post.faults[node, model] = reason
                    del by_model[model]
                    continue
                self.betas[model][node] = beta
        return np.where(self.available, self.shares * self._numbers(parts, "norm"), 0.0)

    def _everything(self) -> dict[str, list[str]]:
        wanted: dict[str, list[str]] = {}
        for node, model in self._pairs(self.available):
            wanted.setdefault(node, []).append(model)
        return wanted

    def _numbers(self, parts: Parts, field: str) -> NDArray[np.float64]:
        """Return one number per pair; pairs of which none came are out of this round."""
        values = np.zeros_like(self.shares)
        for row, node in enumerate(self.nodes):
            for column, model in enumerate(self.names):
                if not self.available[row, column]:
                    continue
                part = parts.get(node, {}).get(model)
                if part is None:
                    self.available[row, column] = False
                    self._lose(node, model, self.shares[row, column], f"no {field} came")
                else:
                    values[row, column] = getattr(part, field)
        return values

    # --- aggregation --------------------------------------------------------------------------

    def _coefficients(self) -> NDArray[np.float64]:
        """Return c of the pairs that delivered; note those that did not."""
        # MIFA counts new and old updates alike.
        certain = self.strategy.sampling == "mifa"
        p = np.where(self.drawn, 1.0, self.probabilities) if certain else self.probabilities
        coefficients = aggregation_coefficients(self.shares, p, self.drawn)
        for row, node in enumerate(self.nodes):
            for column, model in enumerate(self.names):
                if self.drawn[row, column] and model not in self.delivered.get(node, {}):
                    self._lose(node, model, coefficients[row, column], "no model came")
                    coefficients[row, column] = 0.0
        return coefficients

    def _control_variate(self, column: int, by_node: Mapping[str, float]) -> NDArray | None:
        sampling, model = self.strategy.sampling, self.names[column]
        if sampling not in _WITH_OLD_UPDATES:
            return None
        betas = self.betas[model] if sampling == "stale" else None
        return remembered(self._shares_of(column), by_node, self.book.old.get(model, {}), betas)

    def _residual(self, model: str, node: str, arrays: Arrays) -> float:
        update = update_of(self.models[model], arrays)
        if self.strategy.sampling not in _WITH_OLD_UPDATES:
            return residual_norm(update)
        beta = self.betas[model].get(node, 0.0) if self.strategy.sampling == "stale" else 1.0
        return residual_norm(update, self.book.old.get(model, {}).get(node), beta)

    def _remember(self, column: int, trained: Mapping[str, Arrays]) -> None:
        """Keep updates and control variates, and note whose are used."""
        model, book, sampling = self.names[column], self.book, self.strategy.sampling
        if trained or self._moves_by_itself(model):
            book.versions[model] = self.round
        if sampling in _WITH_OLD_UPDATES:
            old = book.old.setdefault(model, {})
            for node, arrays in trained.items():
                old[node] = update_of(self.models[model], arrays)
        if sampling in ("stale", "scaffold"):
            for node in trained:
                book.settled.setdefault(node, {})[model] = self.round
        if sampling == "scaffold":
            changes = {}
            for node in trained:
                change = self.delivered[node][model].control
                assert change is not None
                changes[node] = np.clip(change, -MAX_GRADIENT, MAX_GRADIENT)
            control = book.control(model, self.models[model])
            book.controls[model] = moved_control(control, changes, self._shares_of(column))

    def _moves_by_itself(self, model: str) -> bool:
        return self.strategy.sampling in _WITH_OLD_UPDATES and bool(self.book.old.get(model))

    def _check_finite(self) -> None:
        for model, arrays in self.new_models.items():
            if not np.isfinite(flat(arrays)).all():
                raise MultiModelError(
                    f"model '{model}' is no longer finite after round {self.round}: lower the "
                    "learning rate, or raise the budget, which makes coefficients smaller"
                )

    # --- small things -------------------------------------------------------------------------

    def _pairs(self, chosen: NDArray[np.bool_]) -> list[tuple[str, str]]:
        return [(self.nodes[row], self.names[column]) for row, column in np.argwhere(chosen)]

    def _shares_of(self, column: int) -> dict[str, float]:
        return {n: float(d) for n, d in zip(self.nodes, self.shares[:, column], strict=True)}

    def _lose(self, node: str, model: str, coefficient: float, reason: str) -> None:
        fault = self.post.faults.get((node, model), reason)
        self.book.lose(self.round, node, model, float(coefficient), fault)

    def _held_names(self) -> list[str]:
        return sorted({m for h in self.book.holdings.values() for m in h.examples})

    def _reachable(self) -> float:
        """Return the budget; less, with a warning, if nodes have left since round 1."""
        budget, most = self.strategy.budget, reachable_budget(self.available, self.capacity)
        if budget <= most or self.strategy.sampling == "full":
            return budget
        text = (
            f"budget is {budget:g}, but the {len(self.nodes)} nodes can train at most {most} "
            "models in a round (their capacities, and the data that they have)"
        )
        if self.round == 1 or most == 0:
            raise MultiModelError(f"{text}: lower the budget, or use sampling='full'")
        log_warning("budget_lowered", round=self.round, budget=most, reason=text)
        return float(most)
