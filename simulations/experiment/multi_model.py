"""The parts of a run with several models: one small experiment for each, and all together."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, MetricRecord
from hydra.utils import get_class
from numpy.typing import NDArray

from gems_flwr import MultiModel, RoundLoop, TaskSet, resize_model, scoring
from gems_flwr.core import derive_seed, generator
from gems_flwr.core.records import to_numpy, to_record
from gems_flwr.strategies.members import join_models, split_models
from simulations.config import CONFIG_DIR, ConfigError, RunConfig, group_config
from simulations.data import Dataset, apportion, stratified_sample
from simulations.experiment.experiment import Experiment, NodeTask, Share

_SCORES = ("accuracy", "balanced_accuracy", "loss")


class TaskExperiment(Experiment):
    """Data and model of one task.

    Parameters
    ----------
    config : RunConfig
        That of the run, with the task's own data set, model and seed.
    holders : sequence of int
        The nodes that have data for it: a `share` in (0, 1] of the training examples.
    """

    def __init__(self, config: RunConfig, holders: Sequence[int], share: float) -> None:
        super().__init__(config)
        self._holders, self._part = holders, share

    @functools.cached_property
    def shares(self) -> Sequence[Share]:
        """Every node's data; empty for a node that lacks the task."""
        config, pool, groups = self.config, self.dataset.train, self.dataset.groups
        if self._part < 1:
            rng = generator(config.seed, "share")
            chosen = stratified_sample(pool.labels, int(self._part * len(pool)), rng)
            pool, groups = pool.take(chosen), None if groups is None else groups[chosen]
        nothing = pool.take([])
        shares = [Share(nothing, nothing)] * config.nodes
        parts = self._divide(pool.labels, groups, len(self._holders))
        for node, part in zip(self._holders, parts, strict=True):
            shares[node] = self._share(pool.take(part), node)
        return shares

    def score(self, arrays: Any) -> dict[str, float]:
        """Score the task's model on held-out examples."""
        model = resize_model(self.build_model(), arrays)
        return scoring.score(self.predict(model, self.held_out), self.held_out.labels)


class MultiTask(NodeTask):
    """One task of a node."""

    def loss(self, model: Any) -> float:
        """Return the loss on the training part, on as many threads as everything else."""
        train = self._share.train
        return scoring.cross_entropy(self._experiment.predict(model, train), train.labels)


class MultiModelExperiment(Experiment):
    """Data, models and strategy of a run with several tasks.

    Parameters
    ----------
    config : RunConfig
        A validated config with ``multi_model.tasks``.
    """

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        if not issubclass(get_class(config.strategy["_target_"]), MultiModel):
            raise ConfigError(
                "multi_model.tasks are for strategy=multi_model, this run has "
                f"strategy={config.names['strategy']}; set multi_model.tasks=[]"
            )
        if config.stream.is_on:
            raise ConfigError(
                "strategy=multi_model has no streams; set stream.batches_per_round=null"
            )

    @functools.cached_property
    def tasks(self) -> dict[str, TaskExperiment]:
        """The tasks, by the names of their models."""
        config, tasks = self.config, {}
        for number, task in enumerate(config.multi_model.tasks):
            name = config.multi_model.name_of(number)
            own: dict[str, Any] = {
                "seed": derive_seed(config.seed, "task", number),
                "names": dict(config.names),
            }
            for group in ("dataset", "model"):
                if chosen := task.get(group):
                    known = sorted(path.stem for path in (CONFIG_DIR / group).glob("*.yaml"))
                    if chosen not in known:
                        raise ConfigError(
                            f"multi_model.tasks[{number}].{group} is {chosen!r}; there are "
                            f"{', '.join(known)}, or null for the run's own"
                        )
                    own[group], own["names"][group] = group_config(group, chosen), chosen
            holders = np.flatnonzero(self.holds[:, number]).tolist()
            if not holders:
                raise ConfigError(f"no node has data for '{name}': lower multi_model.lacking")
            sub = dataclasses.replace(config, **own)
            tasks[name] = TaskExperiment(sub, holders, float(task.get("share", 1.0)))
        return tasks

    @functools.cached_property
    def holds(self) -> NDArray[np.bool_]:
        """Which node (row) has data for which task (column); some, drawn at random, lack one."""
        config = self.config
        held = np.ones((config.nodes, len(config.multi_model.tasks)), dtype=bool)
        rng = generator(config.seed, "lacking")
        lacking = rng.permutation(config.nodes)[: round(config.multi_model.lacking * config.nodes)]
        if held.shape[1] > 1:
            held[lacking, rng.integers(0, held.shape[1], size=len(lacking))] = False
        return held

    @functools.cached_property
    def capacities(self) -> NDArray[np.int64]:
        """How many models each node trains in a round at most."""
        counts = apportion(np.array(self.config.multi_model.capacities), self.config.nodes)
        limits = np.repeat(np.arange(1, len(counts) + 1), counts)
        return generator(self.config.seed, "capacities").permutation(limits)

    @functools.cached_property
    def dataset(self) -> Dataset:
        """The first task's data set."""
        return next(iter(self.tasks.values())).dataset

    @functools.cached_property
    def shares(self) -> Sequence[Share]:
        """The data of all tasks, one task after the other."""
        return [share for task in self.tasks.values() for share in task.shares]

    def label_counts(self) -> dict[str, Any]:
        """Return how many examples of each class every node has; classes of all tasks in a row."""
        by_task = [task.label_counts() for task in self.tasks.values()]
        nodes: list[dict[str, Any]] = [{"name": str(n)} for n in range(self.config.nodes)]
        for number, node in enumerate(nodes):
            for part in ("train", "validation"):
                node[part] = [n for each in by_task for n in each["nodes"][number][part]]
        return {"classes": sum(each["classes"] for each in by_task), "nodes": nodes}

    def task(self, node: int) -> TaskSet:
        """Return what node number `node` can do."""
        self._check_node(node)
        held = {name: e for name, e in self.tasks.items() if len(e.shares[node].train)}
        return TaskSet(
            {name: MultiTask(each, node) for name, each in held.items()},
            {name: len(each.shares[node].train) for name, each in held.items()},
            int(self.capacities[node]),
        )

    def initial_arrays(self) -> ArrayRecord:
        """Return all initial models as the server keeps them."""
        models = {n: to_numpy(each.initial_arrays()) for n, each in self.tasks.items()}
        return to_record(join_models(models))

    @property
    def keeps_models_on_nodes(self) -> bool:
        """Whether a run goes on only with the nodes that it began with."""
        strategy = self.strategy(None, [])
        assert isinstance(strategy, MultiModel)
        return strategy.rule.needs_memory_on_nodes

    def evaluate(
        self, strategy: RoundLoop, arrays: ArrayRecord, server_round: int = 0
    ) -> MetricRecord:
        """Score every model on its own held-out data; means, and each model's accuracy."""
        models = split_models(to_numpy(arrays))
        scores = {name: self.tasks[name].score(model) for name, model in models.items()}
        means = {key: float(np.mean([s[key] for s in scores.values()])) for key in _SCORES}
        return MetricRecord(
            {**means, **{f"accuracy/{n}": s["accuracy"] for n, s in scores.items()}}
        )
