"""Several unrelated models on the same nodes, under a budget (CMU 18-786 slides, April 2025).

A round trains about m client-model pairs. Who trains what is drawn by importance, so that the
aggregate, which is unbiased, varies as little as possible; the mathematics stands in
`gems_flwr.sampling` and `gems_flwr.averaging.steps`. `sampling` names the rows of the slides'
Table I:

==========  =============================  ==================================================
name        a pair's importance            what is applied
==========  =============================  ==================================================
random      the same for all               Σ (d/p) U over those drawn
full        all pairs, no budget           Σ d U
lvr         d × local loss                 Σ (d/p) U
gvr         ‖d U‖                          Σ (d/p) U
stale       ‖d (U − βh)‖, GVR*             Σ d β h over all + Σ (d/p) (U − βh)
fedvarp     the same for all               the same with β = 1
mifa        the same for all               Σ d × the last update known, over all
scaffold    the same for all               Σ (d/p) U, local steps corrected by c − c_i
==========  =============================  ==================================================

Decided where the slides are silent:

- m counts pairs, in expectation. `full` trains every pair, and gvr and stale compute every update
  (that is their price), whatever the nodes' capacities are; those count for what is *drawn*.
- Nodes say once, in round 1, which models they have how many examples for, and their capacity.
- gvr and stale: nodes report norms only and keep what they trained; those drawn are then asked for
  it, in a message without weights. lvr: losses are asked for with the current model, without
  weights where the node still has it; those drawn train what they were given then.
- A node with data has a loss of at least 1 % of the model's mean loss, so that lvr leaves nobody
  out for good. Without any importance, sampling is uniform; `details` says in which rounds.
- MIFA counts a client that was never drawn as zero.
- What a node fails to deliver drops out, and nothing is scaled up for it: `details["lost"]` says
  which coefficient is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from flwr.app import ConfigRecord
from flwr.serverapp import Grid
from numpy.typing import NDArray

from gems_flwr import wire
from gems_flwr.averaging import (
    Arrays,
    flat,
    mean_metrics,
    remembered,
    residual_norm,
    stepped,
    update_of,
)
from gems_flwr.errors import MultiModelError
from gems_flwr.runtime.seeding import generator
from gems_flwr.sampling import (
    aggregation_coefficients,
    data_shares,
    draw_assignment,
    estimated_variance,
    optimal_probabilities,
    reachable_budget,
    uniform_probabilities,
)
from gems_flwr.strategies.book import Book
from gems_flwr.strategies.events import log_warning
from gems_flwr.strategies.loop import RoundLoop
from gems_flwr.strategies.members import join_members, split_members
from gems_flwr.strategies.records import RoundOutcome, ServerState

Sampling = Literal["random", "full", "lvr", "gvr", "stale", "fedvarp", "mifa", "scaffold"]
# The one model of arrays that were not joined from several.
ONLY = "model"
# Least loss of a node, relative to the mean, that lvr goes by.
_LOSS_FLOOR = 0.01

_REPORTS: dict[str, wire.ReportKind] = {"gvr": "norm", "stale": "residual"}
_WITH_OLD_UPDATES = ("stale", "fedvarp", "mifa")

Parts = dict[str, dict[str, wire.ModelPart]]


@dataclass(kw_only=True, eq=False)
class MultiModel(RoundLoop):
    """Train several models at once; see the module's docstring.

    The arrays of `start` are those of all models, joined by `join_models`; those of one model may
    stay as they are. With one model, and a budget for all nodes, it is `FedAvg`, bit for bit.

    Parameters
    ----------
    budget : float, default 10
        m, expected client-model pairs per round, above 0 and at most what the nodes' capacities
        allow. ``full`` takes no notice of it.
    sampling : {"random", "full", "lvr", "gvr", "stale", "fedvarp", "mifa", "scaffold"}
        How pairs are drawn and what is made of their updates.
    **loop
        See `RoundLoop`. `fraction_train` must stay 1, since the budget says who trains;
        `fraction_evaluate` 0: models are evaluated at the server. `min_nodes` is about
        introductions, not about those drawn, who may be few.
    """

    budget: float = 10.0
    sampling: Sampling = "lvr"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sampling not in get_args(Sampling):
            raise ValueError(
                f"sampling must be one of {list(get_args(Sampling))}, got '{self.sampling}'"
            )
        if not (np.isfinite(self.budget) and self.budget > 0):
            raise ValueError(f"budget must be a number above 0, got {self.budget}")
        if self.fraction_train != 1:
            raise ValueError(
                f"fraction_train must be 1, since budget says who trains, got {self.fraction_train}"
            )
        if self.fraction_evaluate != 0:
            raise ValueError(
                "fraction_evaluate must be 0, since models are evaluated at the server "
                f"(evaluate_fn), got {self.fraction_evaluate}"
            )

    def play_round(
        self,
        server_round: int,
        state: ServerState,
        grid: Grid,
        train_config: ConfigRecord,
        evaluate_config: ConfigRecord,
    ) -> RoundOutcome:
        """Ask for what sampling needs, draw, let those drawn train, and take a step per model."""
        turn = _Turn(self, server_round, state, grid, train_config)
        turn.introduce()
        turn.weigh()
        turn.draw()
        turn.train()
        turn.step()
        return turn.outcome()


def join_models(models: Mapping[str, Arrays]) -> dict[str, NDArray]:
    """Return the arrays of several models, by name, as those that `MultiModel` starts from."""
    return join_members(models)


def split_models(arrays: Arrays) -> dict[str, dict[str, NDArray]]:
    """Return the models that `join_models` joined, by name; one model alone is named ``model``."""
    members = split_members(arrays)
    return {ONLY: members[""]} if set(members) == {""} else members


class _Turn:
    """One round."""

    def __init__(
        self,
        strategy: MultiModel,
        server_round: int,
        state: ServerState,
        grid: Grid,
        config: ConfigRecord,
    ) -> None:
        self.strategy, self.round, self.config = strategy, server_round, config
        self.models = split_models(state.arrays)
        self.joined = set(split_members(state.arrays)) != {""}
        self.book = Book.from_memory(state.memory)
        for name in self.models:
            self.book.versions.setdefault(name, 0)
        self.ids = {
            strategy._roster.name(node): node
            for node in strategy.choose_nodes(server_round, grid, 1.0, wire.TRAIN)
        }
        self._records = {name: wire.to_record(arrays) for name, arrays in self.models.items()}
        self.metrics: dict[str, float] = {}
        self.betas: dict[str, dict[str, float]] = {name: {} for name in self.models}
        self.delivered: Parts = {}
        self.faults: dict[tuple[str, str], str] = {}

    # --- the steps of a round -----------------------------------------------------------------

    def introduce(self) -> None:
        """Ask strangers what they have; find out who takes part."""
        strangers = [name for name in self.ids if name not in self.book.holdings]
        if strangers:
            self._introduce(strangers)
        self.nodes = [name for name in self.ids if name in self.book.holdings]
        self.names = list(self.models)
        counts = self.book.examples(self.nodes, self.names)
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
        action: wire.Action = "train"
        if self.strategy.sampling in _REPORTS:
            action = "send"
        self.delivered = self._exchange(wanted, action, "" if action == "train" else "send")

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
        told = (
            mean_metrics([p.metrics for p in parts], [p.num_examples for p in parts])
            if parts
            else {}
        )
        return RoundOutcome(
            arrays=join_members(self.new_models) if self.joined else self.new_models[ONLY],
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
        parts = self._exchange(self._everything(), "losses", "losses")
        losses = self._numbers(parts, "loss")
        known = np.where(self.available, self.shares, 0.0)
        totals = known.sum(axis=0)
        means = np.divide(
            (known * losses).sum(axis=0), totals, out=np.zeros_like(totals), where=totals > 0
        )
        return np.where(self.available, self.shares * np.maximum(losses, _LOSS_FLOOR * means), 0.0)

    def _norms(self) -> NDArray[np.float64]:
        """Let everybody train every model that they have; return d × ‖U‖, or d × ‖U − βh‖."""
        parts = self._exchange(
            self._everything(), "train", "norms", report=_REPORTS[self.strategy.sampling]
        )
        for node, by_model in parts.items():
            for model, part in by_model.items():
                self.betas[model][node] = part.beta or 0.0
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
        shares = {n: float(d) for n, d in zip(self.nodes, self.shares[:, column], strict=True)}
        betas = self.betas[model] if sampling == "stale" else None
        return remembered(shares, by_node, self.book.old.get(model, {}), betas)

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
            total = self._control(model).astype(np.float64)
            for node in trained:
                change = self.delivered[node][model].control
                assert change is not None
                total += self.shares[self.nodes.index(node), column] * change
            book.controls[model] = total.astype(self._control(model).dtype)

    def _moves_by_itself(self, model: str) -> bool:
        return self.strategy.sampling in _WITH_OLD_UPDATES and bool(self.book.old.get(model))

    def _control(self, model: str) -> NDArray:
        if model not in self.book.controls:
            return np.zeros_like(flat(self.models[model]))
        return self.book.controls[model]

    def _check_finite(self) -> None:
        for model, arrays in self.new_models.items():
            if not np.isfinite(flat(arrays)).all():
                raise MultiModelError(
                    f"model '{model}' is no longer finite after round {self.round}: lower the "
                    "learning rate, or raise the budget, which makes coefficients smaller"
                )

    # --- messages -----------------------------------------------------------------------------

    def _introduce(self, strangers: Sequence[str]) -> None:
        strategy = self.strategy
        messages = strategy.messages(
            self.round,
            [self.ids[name] for name in strangers],
            wire.TRAIN,
            None,
            self.config,
            step="introduce",
        )
        for message in messages:
            wire.ask_for_models(message.content, wire.ModelsRequest(self.book.run, "introduce"))
        known = len(self.ids) - len(strangers)
        answers = strategy.accept(
            strategy.collect(messages),
            lambda content: wire.unpack_holdings(content, self.models),
            at_least=max(0, strategy.min_nodes - known),
        )
        # A node may have told its name only now.
        ordered = sorted(self.ids.values(), key=strategy._roster.position)
        self.ids = {strategy._roster.name(node): node for node in ordered}
        self.book.holdings |= {answer.node: answer.value for answer in answers}

    def _exchange(
        self,
        wanted: Mapping[str, Sequence[str]],
        action: wire.Action,
        step: str,
        report: wire.ReportKind = "model",
    ) -> Parts:
        """Ask nodes about models; return the parts of usable replies, by node and model."""
        if not wanted:
            return {}
        parts, needs = self._ask(wanted, action, step, report)
        if needs:
            # They have lost what they were given, or what they trained; now it comes with the
            # message, and the same seed gives the same training.
            for node, models in needs.items():
                for model in models:
                    self.book.kept.get(node, {}).pop(model, None)
            again: wire.Action = "train" if action == "send" else action
            more, _ = self._ask(needs, again, f"{step}-again", report)
            for node, by_model in more.items():
                parts[node] = {**parts.get(node, {}), **by_model}
        return parts

    def _ask(
        self,
        wanted: Mapping[str, Sequence[str]],
        action: wire.Action,
        step: str,
        report: wire.ReportKind,
    ) -> tuple[Parts, dict[str, list[str]]]:
        strategy, book = self.strategy, self.book
        keeps, scaffold = strategy.sampling == "lvr", strategy.sampling == "scaffold"
        messages = strategy.messages(
            self.round, [self.ids[n] for n in wanted], wire.TRAIN, None, self.config, step=step
        )
        requests = {}
        for (node, models), message in zip(wanted.items(), messages, strict=True):
            versions = {model: book.versions[model] for model in models}
            kept = book.kept.get(node, {})
            lacks = [m for m in models if action != "send" and kept.get(m) != versions[m]]
            settled = book.settled.get(node, {})
            requests[node] = wire.ModelsRequest(
                run=book.run,
                action=action,
                versions=versions,
                report=report,
                settled={m: settled[m] for m in models if m in settled},
                keep=keeps,
            )
            wire.ask_for_models(
                message.content,
                requests[node],
                {model: self._records[model] for model in lacks},
                {m: wire.vector_record(self._control(m)) for m in models} if scaffold else None,
            )
        return self._accept(strategy.collect(messages), requests, scaffold)

    def _accept(
        self, replies: Sequence[Any], requests: Mapping[str, wire.ModelsRequest], scaffold: bool
    ) -> tuple[Parts, dict[str, list[str]]]:
        strategy, book = self.strategy, self.book
        parts: Parts = {}
        needs: dict[str, list[str]] = {}
        # One by one, since what a reply must hold depends on whose it is.
        position = strategy._roster.position
        for reply in sorted(replies, key=lambda r: position(r.metadata.src_node_id)):
            node = strategy._roster.name(reply.metadata.src_node_id)
            request = requests[node]
            answers = strategy.accept(
                [reply],
                lambda content, request=request: wire.unpack_models_reply(  # type: ignore[misc]
                    content, request, self.models, control=scaffold
                ),
            )
            if not answers:
                book.kept.pop(node, None)
                continue
            value = answers[0].value
            parts[node] = dict(value.parts)
            for model in value.parts:
                if request.keep:
                    book.kept.setdefault(node, {})[model] = request.versions[model]
            for model, reason in value.failed.items():
                self.faults[node, model] = reason
                log_warning("left_out", round=self.round, node=node, model=model, reason=reason)
            if value.needs:
                needs[node] = list(value.needs)
        return parts, needs

    # --- small things -------------------------------------------------------------------------

    def _pairs(self, chosen: NDArray[np.bool_]) -> list[tuple[str, str]]:
        return [(self.nodes[row], self.names[column]) for row, column in np.argwhere(chosen)]

    def _lose(self, node: str, model: str, coefficient: float, reason: str) -> None:
        fault = self.faults.get((node, model), reason)
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
