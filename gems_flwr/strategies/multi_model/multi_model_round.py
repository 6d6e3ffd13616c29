"""One round of `MultiModel`: its steps. What differs by rule stands in `sampling_base`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from flwr.app import ConfigRecord
from flwr.serverapp import Grid
from numpy.typing import NDArray

from gems_flwr.averaging.means import mean_metrics
from gems_flwr.averaging.steps import flat, moved_control, residual_norm, update_of
from gems_flwr.bounds import MAX_GRADIENT, MAX_STEP
from gems_flwr.client_sampling import (
    Matrix,
    data_shares,
    draw_assignment,
    estimated_variance,
    reachable_budget,
)
from gems_flwr.errors import MultiModelError
from gems_flwr.runtime.seeding import generator
from gems_flwr.server.client_metrics import beside
from gems_flwr.server.log import log_warning
from gems_flwr.server.members import ONLY_MODEL, join_members, split_members, split_models
from gems_flwr.server.state import RoundOutcome, ServerState
from gems_flwr.strategies.multi_model.multi_model_exchange import MultiModelExchange, Parts
from gems_flwr.strategies.multi_model.multi_model_state import MultiModelState
from gems_flwr.strategies.multi_model.sampling_base import Question
from gems_flwr.typing import Arrays
from gems_flwr.wire.keys import TRAIN

if TYPE_CHECKING:
    from gems_flwr.strategies.multi_model.multi_model import MultiModel


class MultiModelRound:
    """One round of `MultiModel`: who could train what, who does, and what comes of it."""

    def __init__(
        self,
        strategy: MultiModel,
        server_round: int,
        before: ServerState,
        grid: Grid,
        config: ConfigRecord,
    ) -> None:
        self.strategy, self.rule, self.round = strategy, strategy.rule, server_round
        self.models = split_models(before.arrays)
        self.joined = set(split_members(before.arrays)) != {""}
        self.state = MultiModelState.from_memory(before.memory, strategy.run_name)
        for name in self.models:
            self.state.versions.setdefault(name, 0)
        self.ids = {
            strategy._nodes.name(node): node
            for node in strategy.choose_nodes(server_round, grid, 1.0, TRAIN)
        }
        self.exchange = MultiModelExchange(
            strategy,
            server_round,
            config,
            self.models,
            self.state,
            keeps=self.rule.question is not None and self.rule.question.keep,
            control_variates=self.rule.corrects_gradients,
        )
        self.metrics: dict[str, float] = {}
        self.betas: dict[str, dict[str, float]] = {name: {} for name in self.models}
        self.delivered: Parts = {}

    # --- the steps of a round -----------------------------------------------------------------

    def introduce(self) -> None:
        """Ask newly joined nodes what they have; find out who takes part."""
        newcomers = [name for name in self.ids if name not in self.state.holdings]
        if newcomers:
            self.ids = self.exchange.introduce(self.ids, newcomers)
        self.nodes = [name for name in self.ids if name in self.state.holdings]
        self.names = list(self.models)
        counts = self.state.examples(self.nodes, self.names, self.strategy.max_examples)
        nobody = [m for m, total in zip(self.names, counts.sum(axis=0), strict=True) if not total]
        if nobody:
            raise MultiModelError(
                f"no node has data for {', '.join(map(repr, nobody))}: leave it out of the models, "
                f"or let nodes name it in their holdings (they have {self._held_names()})"
            )
        self.shares = data_shares(counts)
        self.available = counts > 0
        self.capacity = np.array([self.state.holdings[n].capacity for n in self.nodes], np.int64)
        self.budget = self._reachable()

    def weigh(self) -> None:
        """Find the probability of each pair, asking the nodes first if the rule has a question."""
        answers = np.zeros_like(self.shares)
        if self.rule.question is not None:
            answers = self._answers(self.rule.question)
        importance = self.rule.importance(self.shares, answers, self.available)
        if importance is not None:
            importance = np.where(self.available, importance, 0.0)
            if not importance.any():
                self.state.uniform_rounds.append(self.round)
                log_warning("no_importance", round=self.round, drawn="uniformly")
                importance = None
        if importance is None:
            importance = self.available.astype(np.float64)
        if self.strategy.warm_start and self.round == 1:
            self.probabilities = self.available.astype(np.float64)
        else:
            self.probabilities = self.rule.probabilities(importance, self.budget, self.capacity)

    def draw(self) -> None:
        """Draw who trains what."""
        rng = generator(self.strategy.seed, "assign", self.round)
        self.drawn = draw_assignment(self.probabilities, rng)
        for node, model in self._pairs(self.drawn):
            self.state.count(node, model)

    def train(self) -> None:
        """Get the models of those drawn."""
        wanted = self._by_node(self.drawn)
        if self.rule.question is not None and self.rule.question.trains:
            self.delivered = self.exchange.ask(self.ids, wanted, "send", "send")
        else:
            self.delivered = self.exchange.ask(self.ids, wanted, "train", "")

    def step(self) -> None:
        """Move every model."""
        coefficients = self._coefficients()
        norms, rests = np.zeros_like(coefficients), {}
        self.new_models: dict[str, dict[str, NDArray]] = {}
        for column, model in enumerate(self.names):
            by_node = {
                node: float(coefficients[row, column])
                for row, node in enumerate(self.nodes)
                if coefficients[row, column] > 0
            }
            trained = {node: self.delivered[node][model].arrays or {} for node in by_node}
            shares, old = self._shares_of(column), self._old_updates(model)
            betas = {node: self.rule.beta(self.betas[model].get(node)) for node in self.nodes}
            before = after = 0.0
            for node, arrays in trained.items():
                update = update_of(self.models[model], arrays)
                norm = residual_norm(update, old.get(node), betas[node])
                norms[self.nodes.index(node), column] = norm
                if node in old:
                    before, after = before + residual_norm(update) ** 2, after + norm**2
            if before > 0:
                rests[f"residual/{model}"] = after / before
            self.new_models[model] = self.rule.step(
                self.models[model], trained, by_node, shares, old, betas
            )
            self._remember(column, trained)
        self._check_finite()
        variances = estimated_variance(norms, coefficients, self.probabilities)
        for column, model in enumerate(self.names):
            self.metrics[f"step_size/{model}"] = float(coefficients[:, column].sum())
            self.metrics[f"variance/{model}"] = float(variances[column])
        self.metrics |= rests
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
            train_metrics=beside(self.metrics, told),
            memory=self.state.to_memory(),
            details={
                "sampling": self.rule.name,
                **self.state.details(self.names),
            },
        )

    # --- importance ---------------------------------------------------------------------------

    def _answers(self, question: Question) -> Matrix:
        """Ask everybody about every model that they have; return the answers, one per pair."""
        wanted = self._by_node(self.available)
        parts = self.exchange.ask(self.ids, wanted, question.action, question.step, question.report)
        if question.trains:
            self._take_betas(parts)
        return self._numbers(parts, question.answer)

    def _take_betas(self, parts: Parts) -> None:
        """Note the nodes' betas; a part with a beta out of range is taken out."""
        for node, by_model in parts.items():
            for model, part in list(by_model.items()):
                beta, old = part.beta or 0.0, self.state.old.get(model, {}).get(node)
                if old is not None and abs(beta) * float(np.abs(old).max(initial=0)) > MAX_STEP:
                    # What it would have us subtract of its old update is more than any update.
                    reason = f"beta {beta:.4g} takes its old update above {MAX_STEP:g}"
                    self.exchange.faults[node, model] = reason
                    del by_model[model]
                    continue
                self.betas[model][node] = beta

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
                    self._note_lost(node, model, self.shares[row, column], f"no {field} came")
                else:
                    values[row, column] = getattr(part, field)
        return values

    # --- aggregation --------------------------------------------------------------------------

    def _coefficients(self) -> NDArray[np.float64]:
        """Return c of the pairs that delivered; note those that did not."""
        coefficients = self.rule.coefficients(self.shares, self.probabilities, self.drawn)
        for row, node in enumerate(self.nodes):
            for column, model in enumerate(self.names):
                if self.drawn[row, column] and model not in self.delivered.get(node, {}):
                    self._note_lost(node, model, coefficients[row, column], "no model came")
                    coefficients[row, column] = 0.0
        return coefficients

    def _old_updates(self, model: str) -> Mapping[str, NDArray]:
        return self.state.old.get(model, {}) if self.rule.keeps_updates else {}

    def _remember(self, column: int, trained: Mapping[str, Arrays]) -> None:
        """Keep updates and control variates, and note whose are used."""
        model, state, rule = self.names[column], self.state, self.rule
        # Old updates move a model even where nobody has trained it.
        if trained or self._old_updates(model):
            state.versions[model] = self.round
        if rule.keeps_updates:
            old = state.old.setdefault(model, {})
            for node, arrays in trained.items():
                old[node] = update_of(self.models[model], arrays)
        if rule.needs_memory_on_nodes:
            for node in trained:
                state.settled.setdefault(node, {})[model] = self.round
        if rule.corrects_gradients:
            changes = {}
            for node in trained:
                change = self.delivered[node][model].control
                assert change is not None
                changes[node] = np.clip(change, -MAX_GRADIENT, MAX_GRADIENT)
            control = state.control(model, self.models[model])
            state.controls[model] = moved_control(control, changes, self._shares_of(column))

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

    def _by_node(self, chosen: NDArray[np.bool_]) -> dict[str, list[str]]:
        wanted: dict[str, list[str]] = {}
        for node, model in self._pairs(chosen):
            wanted.setdefault(node, []).append(model)
        return wanted

    def _shares_of(self, column: int) -> dict[str, float]:
        return {n: float(d) for n, d in zip(self.nodes, self.shares[:, column], strict=True)}

    def _note_lost(self, node: str, model: str, coefficient: float, reason: str) -> None:
        fault = self.exchange.faults.get((node, model), reason)
        self.state.note_lost(self.round, node, model, float(coefficient), fault)

    def _held_names(self) -> list[str]:
        return sorted({m for h in self.state.holdings.values() for m in h.examples})

    def _reachable(self) -> float:
        """Return the budget; less, with a warning, if nodes have left since round 1."""
        budget, most = self.strategy.budget, reachable_budget(self.available, self.capacity)
        if budget <= most or not self.rule.has_budget:
            return budget
        text = (
            f"budget is {budget:g}, but the {len(self.nodes)} nodes can train at most {most} "
            "models in a round (their capacities, and the data that they have)"
        )
        if self.round == 1 or most == 0:
            raise MultiModelError(f"{text}: lower the budget, or use sampling='full'")
        log_warning("budget_lowered", round=self.round, budget=most, reason=text)
        return float(most)
