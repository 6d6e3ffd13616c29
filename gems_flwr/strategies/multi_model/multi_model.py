"""Several unrelated models on the same nodes, under a budget (CMU 18-786 slides, April 2025).

A round trains about m client-model pairs. Who trains what is drawn by importance, so that the
aggregate, which is unbiased, varies as little as possible; the mathematics is in
`gems_flwr.averaging`, the rules of the slides' Table I in the module ``sampling`` beside this one.

Decided where the slides are silent:

- m counts pairs, in expectation. `full` trains every pair, and gvr and stale compute every update
  (that is their price), whatever the nodes' capacities are; those count for what is *drawn*.
- Nodes report once which models they have how many examples for, and their capacity.
- gvr and stale: nodes report norms and keep what they trained; those drawn are then asked for it.
  lvr: losses are asked for with the current model, unless the node still has it; those drawn train
  what they were given then.
- Without any importance, sampling is uniform; `details` lists those rounds.
- What a node fails to deliver drops out, and nothing is scaled up for it: `details["lost"]` has
  the coefficient that is missing.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from gems_flwr import averaging
from gems_flwr.bounds import MAX_GRADIENT, MAX_STEP
from gems_flwr.core.log import log_warning, readable
from gems_flwr.core.records import to_record
from gems_flwr.core.round import Round
from gems_flwr.core.run import RoundOutcome, ServerState, generator
from gems_flwr.errors import MultiModelError, OptionError, check_options
from gems_flwr.strategies.averaging import PacksModels, beside
from gems_flwr.strategies.members import ONLY_MODEL, join_models, split_models
from gems_flwr.strategies.multi_model.question import (
    AboutModels,
    Holdings,
    HoldingsQuestion,
    ModelPart,
)
from gems_flwr.strategies.multi_model.sampling import (
    Action,
    Measure,
    ReportKind,
    SamplingRule,
    sampling_rule,
)
from gems_flwr.typing import Arrays

# By node and model.
Parts = dict[str, dict[str, ModelPart]]
_NOTES, _OLD, _CONTROL = "notes", "old", "control"


@dataclass(kw_only=True, eq=False)
class MultiModel(PacksModels):
    """Train several models at once; see the module's docstring.

    The arrays of `start` are those of all models, joined by `join_models`; those of one model may
    stay as they are. With one model, and a budget for all nodes, it is `FedAvg`, bit for bit.

    Parameters
    ----------
    budget : float, default 10
        m, expected client-model pairs per round, above 0 and at most what the nodes' capacities
        allow. ``full`` takes no notice of it.
    sampling : SamplingRule or str, default "lvr"
        How pairs are drawn and what is made of their updates: a rule, such as
        ``LossSampling(floor=0.1)``, or the name of one.
    **loop
        See `RoundLoop`, and `compress` of `FedAvg`. `fraction_train` must stay 1, since the budget
        decides who trains. Models are evaluated at the server (`evaluate_fn`). `min_nodes` is about
        how many nodes report their holdings, not about those drawn. ``Tolerance(max_examples=…)``
        holds for each model by itself.

    Examples
    --------
    >>> import numpy as np
    >>> from gems_flwr import MultiModel
    >>> from gems_flwr.strategies.multi_model import join_models
    >>> start = join_models({"faces": {"w": np.zeros(2)}, "words": {"w": np.zeros(3)}})
    >>> sorted(start)
    ['member/faces/w', 'member/words/w']
    >>> MultiModel(budget=2, sampling="random").rule
    UniformSampling()
    """

    mod_needed: ClassVar[str] = "good_enough_mod(data, model={…})"

    budget: float = 10.0
    sampling: SamplingRule | str = "lvr"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.run_name = ""
        self.rule = sampling_rule(self.sampling)
        finite = bool(np.isfinite(self.budget) and self.budget > 0)
        all_train = self.fraction_train == 1, "1, since budget decides who trains"
        check_options(self, {"budget": (finite, "a number above 0"), "fraction_train": all_train})
        if self.compress != "float32" and self.rule.corrects_gradients:
            raise OptionError(
                f"compress={self.compress!r} rounds models, and SCAFFOLD's control variates, as "
                "large as they, would travel as they are: take another sampling, or leave it out"
            )

    def prepare(self, initial: Arrays, num_rounds: int) -> None:
        """Give the run a name: what nodes keep from another one does not count."""
        self.run_name = secrets.token_hex(4)

    def play_round(self, round: Round, state: ServerState) -> RoundOutcome:
        """Ask for what sampling needs, draw, let those drawn train, and take a step per model."""
        current = MultiModelRound(self, round, state)
        current.introduce()
        current.weigh()
        current.draw()
        current.train()
        current.step()
        return current.outcome()


@dataclass
class MultiModelState:
    """A run's memory: loaded for one round and saved with the round's outcome."""

    # So that what nodes keep from another run does not count.
    run: str
    # By node: its examples and capacity.
    holdings: dict[str, Holdings] = field(default_factory=dict)
    # By model: the round after which it was last changed.
    versions: dict[str, int] = field(default_factory=dict)
    # By node and model: the version that the node still has; the round of its last reply that was
    # used; in how many rounds the pair was drawn.
    kept: dict[str, dict[str, int]] = field(default_factory=dict)
    settled: dict[str, dict[str, int]] = field(default_factory=dict)
    sampled: dict[str, dict[str, int]] = field(default_factory=dict)
    # Pairs that were drawn, or should have been considered, and gave nothing: round, node, model,
    # coefficient (d / p, or d if there was no draw) and reason.
    lost: list[dict[str, Any]] = field(default_factory=list)
    # Rounds without any importance, in which sampling was uniform.
    uniform_rounds: list[int] = field(default_factory=list)
    # By model and node: its last known update, for rules that keep them.
    old: dict[str, dict[str, NDArray]] = field(default_factory=dict)
    # By model: SCAFFOLD's c.
    controls: dict[str, NDArray] = field(default_factory=dict)

    def examples(
        self, nodes: Iterable[str], models: Sequence[str], most: float | None
    ) -> NDArray[np.float64]:
        """Return examples that each node (rows) counts for in each model (columns)."""
        rows = [[self.holdings[n].examples.get(m, 0) for m in models] for n in nodes]
        counts = np.array(rows, dtype=np.float64).reshape(-1, len(models))
        return counts if most is None else np.minimum(counts, most)

    def control(self, model: str, like: Arrays) -> NDArray:
        """Return SCAFFOLD's c of a model; zero at first."""
        return self.controls.get(model, np.zeros_like(averaging.flat(like)))

    def to_memory(self) -> dict[str, NDArray]:
        """Return everything as arrays, for a checkpoint."""
        notes = {k: v for k, v in vars(self).items() if k not in ("old", "controls")}
        notes["holdings"] = {n: [dict(h.examples), h.capacity] for n, h in self.holdings.items()}
        text = np.frombuffer(json.dumps(notes).encode(), dtype=np.uint8)
        old = {f"{_OLD}/{key}": vector for key, vector in join_models(self.old).items()}
        return {_NOTES: text, **old, **{f"{_CONTROL}/{m}": c for m, c in self.controls.items()}}

    @classmethod
    def from_memory(cls, memory: Arrays, run: str) -> MultiModelState:
        """Return the state that `to_memory` wrote; a new one, of this run, if there is none."""
        if _NOTES not in memory:
            return cls(run)

        def part(kind: str) -> dict[str, NDArray]:
            start = f"{kind}/"
            return {k.removeprefix(start): v for k, v in memory.items() if k.startswith(start)}

        notes = json.loads(memory[_NOTES].tobytes())
        notes["holdings"] = {n: Holdings(*each) for n, each in notes["holdings"].items()}
        return cls(**notes, old=split_models(part(_OLD)), controls=part(_CONTROL))

    def details(self, models: Iterable[str]) -> Mapping[str, Any]:
        """Return a result's details of the run."""
        vectors = [v for by_node in self.old.values() for v in by_node.values()]
        return {
            "models": list(models),
            "sampled": {node: dict(counts) for node, counts in self.sampled.items()},
            "examples": {node: dict(h.examples) for node, h in self.holdings.items()},
            "capacities": {node: h.capacity for node, h in self.holdings.items()},
            "lost": list(self.lost),
            "uniform_rounds": list(self.uniform_rounds),
            "server_memory_bytes": sum(v.nbytes for v in (*vectors, *self.controls.values())),
        }


class MultiModelRound:
    """One round of `MultiModel`: who could train what, who does, and what comes of it."""

    def __init__(self, strategy: MultiModel, round: Round, before: ServerState) -> None:
        self.strategy, self.rule, self.round = strategy, strategy.rule, round
        self.most = strategy.tolerance.max_examples
        self.models = split_models(before.arrays)
        self.names = list(self.models)
        self.joined = join_models(self.models).keys() == before.arrays.keys()
        self.state = MultiModelState.from_memory(before.memory, strategy.run_name)
        for name in self.names:
            self.state.versions.setdefault(name, 0)
        self._records = {name: to_record(arrays) for name, arrays in self.models.items()}
        self.betas: dict[str, dict[str, float]] = {name: {} for name in self.names}
        self.delivered: Parts = {}
        # Why a model is missing from a reply, by node and model.
        self.faults: dict[tuple[str, str], str] = {}

    def introduce(self) -> None:
        """Ask newly joined nodes what they have; find out who takes part."""
        round, state = self.round, self.state
        ids = [round.id_of(name) for name in round.sample()]
        newcomers = [n for n in map(round.nodes.name, ids) if n not in state.holdings]
        if newcomers:
            state.holdings |= round.ask(
                HoldingsQuestion(tuple(self.names)),
                newcomers,
                at_least=max(0, self.strategy.min_nodes - (len(ids) - len(newcomers))),
            )
        # A reply may have been the first with a name in it.
        present = map(round.nodes.name, sorted(ids, key=round.nodes.position))
        self.nodes = [name for name in present if name in state.holdings]
        counts = state.examples(self.nodes, self.names, self.most)
        without = [m for m, total in zip(self.names, counts.sum(axis=0), strict=True) if not total]
        if without:
            held = sorted({m for h in state.holdings.values() for m in h.examples})
            raise MultiModelError(
                f"no node has data for {', '.join(map(repr, without))}: leave it out of the "
                f"models, or let data(context) of a node return some (nodes have {held})"
            )
        self.shares, self.available = averaging.data_shares(counts), counts > 0
        self.capacity = np.array([state.holdings[n].capacity for n in self.nodes], np.int64)
        self.budget = self._reachable()

    def weigh(self) -> None:
        """Find the probability of each pair, asking the nodes first if the rule has a measure."""
        answers = np.zeros_like(self.shares)
        if self.rule.measure is not None:
            answers = self._answers(self.rule.measure)
        available = self.available.astype(np.float64)
        importance = self.rule.importance(self.shares, answers, self.available)
        if importance is None:
            importance = available
        elif not (importance * available).any():
            self.state.uniform_rounds.append(self.round.number)
            log_warning("no_importance", round=self.round.number, drawn="uniformly")
            importance = available
        else:
            importance = np.where(self.available, importance, 0.0)
        self.probabilities = self.rule.probabilities(importance, self.budget, self.capacity)

    def draw(self) -> None:
        """Draw who trains what."""
        rng = generator(self.strategy.seed, "assign", self.round.number)
        self.drawn = averaging.draw_assignment(self.probabilities, rng)
        for node, models in self._by_node(self.drawn).items():
            counts = self.state.sampled.setdefault(node, {})
            counts |= {model: counts.get(model, 0) + 1 for model in models}

    def train(self) -> None:
        """Get the models of those drawn; note who does not deliver."""
        waiting = self.rule.measure is not None and self.rule.measure.trains
        self.delivered = self._ask(self._by_node(self.drawn), "send" if waiting else "train")
        self.coefficients = self.rule.coefficients(self.shares, self.probabilities, self.drawn)
        for row, column in np.argwhere(self.drawn):
            node, model = self.nodes[row], self.names[column]
            if model not in self.delivered.get(node, {}):
                self._note_lost(node, model, self.coefficients[row, column], "no model came")
                self.coefficients[row, column] = 0.0

    def step(self) -> None:
        """Move every model, and keep what the rule remembers."""
        self.new_models: dict[str, dict[str, NDArray]] = {}
        for column, model in enumerate(self.names):
            counts = dict(zip(self.nodes, self.coefficients[:, column].tolist(), strict=True))
            counts = {node: c for node, c in counts.items() if c > 0}
            trained = {node: self.delivered[node][model].arrays or {} for node in counts}
            shares = dict(zip(self.nodes, self.shares[:, column].tolist(), strict=True))
            old = self.state.old.get(model, {}) if self.rule.keeps_updates else {}
            betas = {node: self.rule.beta(self.betas[model].get(node)) for node in self.nodes}
            moved = self.rule.step(self.models[model], trained, counts, shares, old, betas)
            if not np.isfinite(averaging.flat(moved)).all():
                raise MultiModelError(
                    f"model '{model}' is no longer finite after round {self.round.number}: lower "
                    "the learning rate, or raise the budget, which makes coefficients smaller"
                )
            self.new_models[model] = moved
            # Old updates move a model even where no node has trained it.
            if trained or old:
                self.state.versions[model] = self.round.number
            self._remember(model, trained, shares)

    def _remember(
        self, model: str, trained: Mapping[str, Arrays], shares: Mapping[str, float]
    ) -> None:
        state, rule = self.state, self.rule
        if rule.keeps_updates:
            updates = {
                n: averaging.update_of(self.models[model], arrays) for n, arrays in trained.items()
            }
            state.old.setdefault(model, {}).update(updates)
        if rule.needs_memory_on_nodes:
            for node in trained:
                state.settled.setdefault(node, {})[model] = self.round.number
        if rule.corrects_gradients:
            sent = {node: self.delivered[node][model].control for node in trained}
            changes = {
                node: np.clip(change, -MAX_GRADIENT, MAX_GRADIENT)
                for node, change in sent.items()
                if change is not None
            }
            control = state.control(model, self.models[model])
            state.controls[model] = averaging.moved_control(control, changes, shares)

    def outcome(self) -> RoundOutcome:
        """Return what the round has changed."""
        parts = [part for by_model in self.delivered.values() for part in by_model.values()]
        weights = [min(part.num_examples, self.most or np.inf) for part in parts]
        reported = (
            averaging.mean_metrics([part.metrics for part in parts], weights) if parts else {}
        )
        sizes = zip(self.names, self.coefficients.sum(axis=0).tolist(), strict=True)
        metrics = {f"step_size/{model}": size for model, size in sizes}
        metrics["pairs_drawn"] = float(self.drawn.sum())
        metrics["pairs"] = float((self.coefficients > 0).sum())
        return RoundOutcome(
            arrays=join_models(self.new_models) if self.joined else self.new_models[ONLY_MODEL],
            train_metrics=beside(metrics, reported),
            memory=self.state.to_memory(),
            details={"sampling": self.rule.name, **self.state.details(self.names)},
        )

    def _answers(self, measure: Measure) -> averaging.Matrix:
        """Ask every node about every model that it has; return the answers, one per pair."""
        parts = self._ask(self._by_node(self.available), measure.action, measure.report)
        values = np.zeros_like(self.shares)
        for row, column in np.argwhere(self.available):
            node, model = self.nodes[row], self.names[column]
            part = parts.get(node, {}).get(model)
            if part is None or (measure.trains and not self._take_beta(node, model, part)):
                # The pair is out of this round.
                self.available[row, column] = False
                self._note_lost(node, model, self.shares[row, column], f"no {measure.answer} came")
            else:
                values[row, column] = getattr(part, measure.answer)
        return values

    def _take_beta(self, node: str, model: str, part: ModelPart) -> bool:
        """Note a node's beta; False if more would be subtracted of h than any update has."""
        beta, old = part.beta or 0.0, self.state.old.get(model, {}).get(node)
        if old is not None and abs(beta) * float(np.abs(old).max(initial=0)) > MAX_STEP:
            reason = f"beta {beta:.4g} takes its old update above {MAX_STEP:g}"
            self.faults[node, model] = reason
            return False
        self.betas[model][node] = beta
        return True

    def _ask(
        self, wanted: Mapping[str, Sequence[str]], action: Action, report: ReportKind = "model"
    ) -> Parts:
        """Ask nodes about models, and those that lack something once more.

        Returns the parts of usable replies, by node and model.
        """
        if not wanted:
            return {}
        parts, needs = self._send(wanted, action, report)
        if needs:
            # They have lost what they were given, or what they trained; now it comes with the
            # message, and the same seed gives the same training.
            for node, models in needs.items():
                for model in models:
                    self.state.kept.get(node, {}).pop(model, None)
            more, _ = self._send(needs, "train" if action == "send" else action, report)
            for node, by_model in more.items():
                parts[node] = {**parts.get(node, {}), **by_model}
        return parts

    def _send(
        self, wanted: Mapping[str, Sequence[str]], action: Action, report: ReportKind
    ) -> tuple[Parts, dict[str, Sequence[str]]]:
        round, state, rule = self.round, self.state, self.rule
        questions, records = {}, {}
        for node, models in wanted.items():
            settled, kept = state.settled.get(node, {}), state.kept.get(node, {})
            questions[node] = question = AboutModels(
                run=state.run,
                action=action,
                versions={model: state.versions[model] for model in models},
                report=report,
                settled={m: settled[m] for m in models if m in settled},
                keep=rule.measure is not None and rule.measure.keep,
                models=self.models,
                with_control=rule.corrects_gradients,
            )
            # Packed models are differences to what a node has; the carrier leaves those out.
            lacks = [m for m in models if action != "send" and kept.get(m) != state.versions[m]]
            lacks = list(models) if round.carriers else lacks
            controls = models if rule.corrects_gradients else ()
            records[node] = question.beside(
                {model: self._records[model] for model in lacks},
                {m: to_record({"c": state.control(m, self.models[m])}) for m in controls},
            )
        replies = round.exchange(
            questions, lambda q, content: q.read(content), beside=lambda name: records[name]
        )
        parts: Parts = {}
        for node, reply in replies.items():
            parts[node] = dict(reply.parts)
            if questions[node].keep:
                versions = {model: state.versions[model] for model in reply.parts}
                state.kept.setdefault(node, {}).update(versions)
            for model, why in reply.failed.items():
                self.faults[node, model] = reason = readable(why)
                log_warning("left_out", round=round.number, node=node, model=model, reason=reason)
        return parts, {node: reply.needs for node, reply in replies.items() if reply.needs}

    def _by_node(self, chosen: NDArray[np.bool_]) -> dict[str, list[str]]:
        wanted: dict[str, list[str]] = {}
        for row, column in np.argwhere(chosen):
            wanted.setdefault(self.nodes[row], []).append(self.names[column])
        return wanted

    def _note_lost(self, node: str, model: str, coefficient: float, reason: str) -> None:
        reason = self.faults.get((node, model), reason)
        pair = {"round": self.round.number, "node": node, "model": model}
        self.state.lost.append({**pair, "coefficient": float(coefficient), "reason": reason})

    def _reachable(self) -> float:
        """Return the budget; less, with a warning, if nodes have left since round 1."""
        budget, most = (
            self.strategy.budget,
            averaging.reachable_budget(self.available, self.capacity),
        )
        if budget <= most or not self.rule.has_budget:
            return budget
        text = (
            f"budget is {budget:g}, but the {len(self.nodes)} nodes can train at most {most} "
            "models in a round (their capacities, and the data that they have)"
        )
        if self.round.number == 1 or most == 0:
            raise MultiModelError(f"{text}: lower the budget, or use sampling='full'")
        log_warning("budget_lowered", round=self.round.number, budget=most, reason=text)
        return float(most)
