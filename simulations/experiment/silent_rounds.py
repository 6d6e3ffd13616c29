"""The rounds of `MultiModel` without messages, for long runs where every pair trains.

Sampling rules, draws, steps and evaluations are those of the strategy, called in the same order
with the same seeds; local training is `pair_training`. What comes out is what a run with messages
writes into ``rounds.jsonl``, up to rounding (a test compares them). Bytes are those of the weights
that would travel, without what is around them. Nobody fails, and nobody joins late.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from hydra.utils import instantiate
from numpy.typing import NDArray

from gems_flwr.averaging.steps import (
    best_beta,
    flat,
    moved_control,
    residual_norm,
    unflat,
    update_of,
)
from gems_flwr.client_sampling import data_shares, draw_assignment, estimated_variance
from gems_flwr.runtime.seeding import generator
from gems_flwr.server.members import split_models
from gems_flwr.strategies.multi_model.multi_model import MultiModel
from gems_flwr.typing import Arrays
from gems_flwr.wire.records import to_numpy
from simulations.experiment.multi_model_experiment import MultiModelExperiment
from simulations.experiment.pair_training import PairTraining, TrainedPair

Trained = dict[int, TrainedPair]
_SCORES = ("accuracy", "balanced_accuracy", "loss")


class SilentRounds:
    """Models, old updates and control variates of a run.

    Parameters
    ----------
    experiment : MultiModelExperiment
        Data, models and strategy.

    Attributes
    ----------
    models : dict
        The global models, by name.
    sampled : dict
        How often each node was drawn for each model.
    rule : SamplingRule
        How pairs are drawn.
    """

    def __init__(self, experiment: MultiModelExperiment) -> None:
        self._experiment = experiment
        strategy = instantiate(experiment.config.strategy, _convert_="all")
        assert isinstance(strategy, MultiModel)
        self._strategy, self.rule = strategy, strategy.rule
        self.sampled: dict[str, dict[str, int]] = {}
        self.models: dict[str, Arrays] = {
            name: {key: np.array(array) for key, array in arrays.items()}
            for name, arrays in split_models(to_numpy(self._experiment.initial_arrays())).items()
        }
        tasks = self._experiment.tasks
        self._training = {name: PairTraining(tasks[name]) for name in self.models}
        counts = np.stack([each.sizes for each in self._training.values()], axis=1)
        self._shares, self._available = data_shares(counts), counts > 0
        self._old: dict[str, dict[str, NDArray]] = {name: {} for name in self.models}
        zero = {name: np.zeros_like(flat(arrays)) for name, arrays in self.models.items()}
        self._control, self._zero = dict(zero), zero
        self._own: dict[str, dict[int, NDArray]] = {name: {} for name in self.models}

    def evaluate(self) -> dict[str, float]:
        """Return the models' mean scores, and each one's accuracy."""
        tasks = self._experiment.tasks
        by_model = {
            name: self._experiment.score_model(tasks[name], arrays, tasks[name].held_out)
            for name, arrays in self.models.items()
        }
        means = {key: float(np.mean([s[key] for s in by_model.values()])) for key in _SCORES}
        return means | {f"accuracy/{name}": each["accuracy"] for name, each in by_model.items()}

    def play(self, number: int) -> tuple[dict[str, float], int, int]:
        """Play a round; return what the strategy would tell of it, and bytes up and down."""
        answers, betas = self._ask()
        probabilities = self._probabilities(number, answers)
        drawn = draw_assignment(
            probabilities, generator(self._experiment.config.seed, "assign", number)
        )
        coefficients = self.rule.coefficients(self._shares, probabilities, drawn)
        norms, metrics = np.zeros_like(coefficients), {}
        for column, model in enumerate(self.models):
            nodes = np.flatnonzero(coefficients[:, column] > 0).tolist()
            trained = self._train(model, nodes)
            before = after = 0.0
            # What is certain does not vary, and needs no norm unless there is an old update.
            unsure = [n for n in nodes if probabilities[n, column] < 1 or self._old_of(model)]
            for node in unsure:
                update = update_of(self.models[model], trained[node].arrays)
                old = self._old_of(model).get(str(node))
                beta = self.rule.beta(betas.get((model, node)))
                norms[node, column] = residual_norm(update, old, beta)
                if old is not None:
                    before += residual_norm(update) ** 2
                    after += norms[node, column] ** 2
            if before > 0:
                metrics[f"residual/{model}"] = after / before
            self._step(column, model, {node: trained[node] for node in nodes}, coefficients, betas)
        variances = estimated_variance(norms, coefficients, probabilities)
        for column, model in enumerate(self.models):
            metrics[f"step_size/{model}"] = float(coefficients[:, column].sum())
            metrics[f"variance/{model}"] = float(variances[column])
        metrics["pairs_drawn"] = metrics["pairs"] = float(drawn.sum())
        return metrics, *self._account(drawn)

    def _account(self, drawn: NDArray[np.bool_]) -> tuple[int, int]:
        """Count who was drawn; return the bytes of all weights that go up and down."""
        up = down = 0
        for column, (model, arrays) in enumerate(self.models.items()):
            size = sum(array.nbytes for array in arrays.values())
            size *= 2 if self.rule.corrects_gradients else 1
            nodes = np.flatnonzero(drawn[:, column]).tolist()
            up += size * len(nodes)
            asked = int(self._available[:, column].sum()) if self.rule.question else len(nodes)
            down += size * asked
            for node in nodes:
                counts = self.sampled.setdefault(str(node), {})
                counts[model] = counts.get(model, 0) + 1
        return up, down

    def _ask(self) -> tuple[NDArray, dict[tuple[str, int], float]]:
        """Return answers to the rule's question, and betas."""
        question, answers = self.rule.question, np.zeros_like(self._shares)
        betas: dict[tuple[str, int], float] = {}
        for column, model in enumerate(self.models if question else ()):
            assert question is not None
            if not question.trains:
                for node, loss in self._training[model].losses(self.models[model]).items():
                    answers[node, column] = loss
                continue
            for node, norm in self._training[model].norms(self.models[model]).items():
                answers[node, column] = norm
            old = self._old[model] if question.compares else {}
            nodes = [int(name) for name in old]
            updates = self._training[model].updates(self.models[model], nodes)
            for node, update in zip(nodes, updates, strict=True):
                betas[model, node] = best_beta(update, old[str(node)])
                rest = residual_norm(update, old[str(node)], betas[model, node])
                answers[node, column] = rest
        return answers, betas

    def _probabilities(self, number: int, answers: NDArray) -> NDArray:
        everyone = self._available.astype(np.float64)
        if self._strategy.warm_start and number == 1:
            return everyone
        importance = self.rule.importance(self._shares, answers, self._available)
        if importance is not None:
            importance = np.where(self._available, importance, 0.0)
        if importance is None or not importance.any():
            importance = everyone
        capacity = self._experiment.capacities
        return self.rule.probabilities(importance, self._strategy.budget, capacity)

    def _train(self, model: str, nodes: list[int]) -> Trained:
        """Return what those drawn have trained; again, if they had before the draw."""
        before, training = self.models[model], self._training[model]
        if self.rule.corrects_gradients:
            own, zero = self._own[model], self._zero[model]
            pulls = {node: self._control[model] - own.get(node, zero) for node in nodes}
            return training.train(before, nodes, pulls)
        base, updates = flat(before), training.updates(before, nodes)
        return {
            node: TrainedPair(unflat(base - update, before))
            for node, update in zip(nodes, updates, strict=True)
        }

    def _old_of(self, model: str) -> Mapping[str, NDArray]:
        return self._old[model] if self.rule.keeps_updates else {}

    def _step(
        self,
        column: int,
        model: str,
        trained: Trained,
        coefficients: NDArray,
        betas: Mapping[tuple[str, int], float],
    ) -> None:
        """Move a model, and remember what the rule wants remembered."""
        shares = {str(node): float(d) for node, d in enumerate(self._shares[:, column])}
        before = self.models[model]
        self.models[model] = self.rule.step(
            before,
            {str(node): pair.arrays for node, pair in trained.items()},
            {str(node): float(coefficients[node, column]) for node in trained},
            shares,
            self._old_of(model),
            {name: self.rule.beta(betas.get((model, int(name)))) for name in shares},
        )
        if self.rule.keeps_updates:
            for node, pair in trained.items():
                self._old[model][str(node)] = update_of(before, pair.arrays)
        if self.rule.corrects_gradients:
            changes = {}
            for node, pair in trained.items():
                assert pair.gradient is not None
                changes[str(node)] = pair.gradient - self._own[model].get(node, self._zero[model])
                self._own[model][node] = pair.gradient
            self._control[model] = moved_control(self._control[model], changes, shares)
