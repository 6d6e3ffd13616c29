"""A run's parts, built from its config, the same on the server and in every worker process."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, MetricRecord
from hydra.errors import InstantiationException
from hydra.utils import get_class, instantiate
from numpy.typing import NDArray
from torch import nn

from gems_flwr import (
    Ensemble,
    FedAvg,
    Report,
    RoundLoop,
    TargetReached,
    Task,
    TaskSet,
    Tolerance,
    resize_model,
    scoring,
)
from gems_flwr.core import Callback, derive_seed
from gems_flwr.core.records import SERVER_ROUND, to_numpy
from gems_flwr.networks import weight_layers
from gems_flwr.node.mod import FROZEN_LAYERS
from gems_flwr.stages.tune import Tune
from gems_flwr.strategies.learner_questions import BATCHES, CORRECT_SHARE_SUM, LOSS_SUM
from gems_flwr.strategies.local_learners import LocalLearners
from gems_flwr.strategies.members import split_models
from gems_flwr.targets import Classes, Numbers
from gems_flwr.typing import Arrays
from simulations.config import PUBLIC_OPTIONS, ConfigError, RunConfig
from simulations.data import (
    Dataset,
    Examples,
    read_own_data,
    split_validation,
    strata,
)
from simulations.experiment.fixed_lift import LIFTS
from simulations.experiment.linear_optimum import linear_optimum
from simulations.experiment.together import Order, carry_out
from simulations.experiment.training import (
    Learned,
    TrainOptions,
    copy_model,
    predictions,
    tensors,
)
from simulations.streams import BatchSource

# Into how many ranges reports divide labels that are numbers.
_RANGES = 9
# What Flower's FedProx calls the weight of its term in a message's config.
_PROXIMAL_MU = "proximal-mu"
_FOR_NUMBERS = "fedavg, one_shot_average, local, global, dynamic, periodic, nosync or serial"


@dataclass(frozen=True)
class Share:
    """One node's data."""

    train: Examples
    validation: Examples


class Experiment:
    """Data, model and strategy of one run.

    Parameters
    ----------
    config : RunConfig
        A validated config.
    own_data : path, optional
        In a deployment: where this node's own data lies, its only share.
    """

    def __init__(self, config: RunConfig, own_data: str | Path | None = None) -> None:
        self.config = config
        self._own_data = own_data

    # --- data ---------------------------------------------------------------------------------

    @functools.cached_property
    def dataset(self) -> Dataset:
        """The data set, with its test part and public sample."""
        config = self.config
        loaded = self._build(
            "dataset", data_dir=config.data_dir, seed=derive_seed(config.seed, "data")
        )
        assert isinstance(loaded, Dataset)
        if not loaded.classes:
            _refuse_without_classes(config)
        return loaded

    @functools.cached_property
    def shares(self) -> Sequence[Share]:
        """Every node's data, as far as it is known here."""
        pool = self.dataset.train
        if self._own_data is not None:
            examples, validation = read_own_data(self._own_data, self.dataset)
            own = self._share(examples, 0) if validation is None else Share(examples, validation)
            return [own]
        if not len(pool):
            return []
        parts = self._divide(pool.labels, self.dataset.groups, self.config.nodes)
        return [self._share(pool.take(part), node) for node, part in enumerate(parts)]

    @functools.cached_property
    def held_out(self) -> Examples:
        """What the server scores models on: the test set, or all nodes' validation parts."""
        if self.config.evaluate_on != "validation":
            return self.dataset.test
        if self.config.stream.is_on:
            raise ConfigError(
                "evaluate_on=validation is not for streams, whose nodes are judged by what comes "
                "next: set stream.batches_per_round=null"
            )
        if not self.shares:
            raise ConfigError("evaluate_on=validation needs data that the server knows of")
        return Examples.concatenate([share.validation for share in self.shares])

    def _divide(self, labels: NDArray, groups: NDArray | None, nodes: int) -> list[NDArray]:
        """Return the positions of every node's examples."""
        partition, config = self._build("partition"), self.config
        options: dict[str, Any] = {
            "nodes": nodes,
            "classes": self.dataset.classes,
            "seed": derive_seed(config.seed, "partition"),
        }
        # Most partitions go by labels alone; those that go by groups name them.
        if "groups" in inspect.signature(partition).parameters:
            options["groups"] = groups
        try:
            parts: list[NDArray] = partition(labels, **options)
        except ValueError as error:
            raise ConfigError(f"partition={config.names['partition']}: {error}") from error
        return parts

    def _share(self, examples: Examples, node: int) -> Share:
        seed = derive_seed(self.config.seed, "validation", node)
        train, validation = split_validation(strata(examples.labels), self.config.validation, seed)
        return Share(examples.take(train), examples.take(validation))

    @functools.cached_property
    def stream(self) -> BatchSource:
        """The nodes' streams, where the config has them."""
        config = self.config
        return BatchSource(
            self.dataset,
            [share.train for share in self.shares],
            config.stream,
            batch_size=config.train_options.batch_size,
            seed=derive_seed(config.seed, "stream"),
        )

    def drift_rounds(self) -> list[int]:
        """Return the rounds of the run in which the concept changes."""
        batches = self.config.stream.batches_per_round
        if batches is None:
            return []
        drifts = self.stream.drift.rounds(self.config.rounds * batches)
        return [(each - 1) // batches + 1 for each in drifts]

    def label_counts(self) -> dict[str, Any]:
        """Return how many examples of each class, or range of numbers, every node has."""
        classes, edges = self.dataset.classes, None
        if not classes:
            edges = np.histogram_bin_edges(self.dataset.train.labels, _RANGES)

        def counts(examples: Examples) -> list[int]:
            if edges is None:
                return [int(each) for each in examples.class_counts(classes)]
            # A node's own data may lie beyond what the server knows.
            inside = np.clip(examples.labels, edges[0], edges[-1])
            return [int(each) for each in np.histogram(inside, edges)[0]]

        nodes = [
            {"name": str(n), "train": counts(s.train), "validation": counts(s.validation)}
            for n, s in enumerate(self.shares)
        ]
        if edges is None:
            return {"classes": classes, "nodes": nodes}
        return {"classes": _RANGES, "edges": [round(float(e), 4) for e in edges], "nodes": nodes}

    # --- model --------------------------------------------------------------------------------

    @functools.cached_property
    def _initial_model(self) -> nn.Module:
        return self.new_model()

    def new_model(self, *purpose: str | int) -> nn.Module:
        """Return a model with fresh initial weights for a purpose."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(self.config.seed, "initial-weights", *purpose))
            model = self._build(
                "model", input_shape=self.dataset.input_shape, classes=self.dataset.classes
            )
        assert isinstance(model, nn.Module)
        return model

    def build_model(self) -> nn.Module:
        """Return a model with initial weights that depend on the run's seed only."""
        # Copied, because Hydra takes longer to build a small model than a node to train it.
        return copy_model(self._initial_model)

    def fit(
        self,
        model: nn.Module,
        examples: Examples,
        seed: int,
        proximal_mu: float = 0.0,
        options: TrainOptions | None = None,
    ) -> dict[str, float]:
        """Train a model in place, with the run's options unless others are given."""
        model, examples, scale = self._on_lift(model, examples)
        order = Order(
            model,
            [examples],
            seed,
            options=options or self.config.train_options,
            proximal_mu=proximal_mu,
            **(self._where | {"scale": scale}),
        )
        metrics = carry_out(order)
        assert isinstance(metrics, dict)
        return metrics

    def learn(
        self, model: nn.Module, nodes: Sequence[int], server_round: int, seed: int, memory: Arrays
    ) -> Learned:
        """Train a model in place on what nodes see in a round; see `training.learn`."""
        count, options = self.config.stream.batches_per_round or 1, self.config.train_options
        first = (server_round - 1) * count + 1
        batches = [self.stream.batch(n, t) for t in range(first, first + count) for n in nodes]
        learned = carry_out(Order(model, batches, seed, memory, options=options, **self._where))
        assert isinstance(learned, Learned)
        return learned

    @property
    def _where(self) -> dict[str, Any]:
        backend, data = self.config.backend, self.dataset
        return {
            "scale": data.scale,
            "device": backend.device,
            "threads": backend.threads,
            "target": data.target,
        }

    def predict(self, model: nn.Module, examples: Examples) -> NDArray:
        """Return the model's class probabilities, or the numbers that it predicts."""
        model, examples, scale = self._on_lift(model, examples)
        return predictions(model, examples, **(self._where | {"scale": scale}))

    def _on_lift(self, model: nn.Module, examples: Examples) -> tuple[nn.Module, Examples, float]:
        """Return the part of a model that learns, what it sees, and the factor of that."""
        backend, scale = self.config.backend, self.dataset.scale
        lifted = LIFTS.lifted(
            model,
            examples,
            architecture=repr(self.config.model),
            scale=scale,
            threads=backend.threads,
            device=backend.device,
        )
        return (model, examples, scale) if lifted is None else (*lifted, 1.0)

    def tensors(self, examples: Examples) -> tuple[torch.Tensor, torch.Tensor]:
        """Return examples as the model sees them."""
        return tensors(examples, scale=self.dataset.scale, device="cpu")

    # --- the node's side ----------------------------------------------------------------------

    def task(self, node: int) -> Task | TaskSet:
        """Return what node number `node` can do."""
        self._check_node(node)
        if node >= len(self.shares):
            raise ConfigError(
                f"dataset={self.config.names['dataset']} has no shares to divide: write where this "
                "node's data lies, --node-config \"data='/folder'\""
            )
        return NodeTask(self, node)

    def _check_node(self, node: int) -> None:
        if not 0 <= node < self.config.nodes:
            raise ConfigError(
                f"partition-id {node} does not exist: the run's config has nodes="
                f"{self.config.nodes}; give the federation as many nodes, or set nodes=…"
            )

    def own_task(self, name: str) -> NodeTask:
        """Return what the node that this experiment's own data belongs to can do."""
        return NodeTask(self, 0, name)

    # --- the server's side --------------------------------------------------------------------

    def initial_arrays(self) -> ArrayRecord:
        """Return the initial model as the server sends it."""
        return ArrayRecord(self.build_model().state_dict())

    def strategy(
        self, folder: Path | None, callbacks: Sequence[Callback], *, simulated: bool = True
    ) -> RoundLoop:
        """Return the strategy; in a simulation private noise comes from the run's seed."""
        config = self.config
        tolerance: dict[str, Any] = {
            "wait_for_nodes": config.nodes,
            "wait_seconds": config.wait_seconds,
            "return_seconds": config.return_seconds,
        }
        tolerance |= config.strategy.get("tolerance") or {}
        given: dict[str, Any] = {
            "seed": config.seed,
            "checkpoint_dir": folder,
            "callbacks": list(callbacks),
            "tolerance": Tolerance(**tolerance),
        }
        if config.secure:
            given["secure"] = self._build("secure")
        return self._strategy(config.strategy, given, simulated)

    def _strategy(
        self, chosen: Mapping[str, Any], given: Mapping[str, Any], simulated: bool
    ) -> RoundLoop:
        target = get_class(chosen["_target_"])
        accepted = {setting.name for setting in dataclasses.fields(target)}
        # Some strategies work with the server's own data or model; they get what they name.
        offered: dict[str, Callable[[], Any]] = {
            "fit": lambda: self._fit_pooled,
            "optimum": lambda: self._pooled_optimum,
            "input_shape": lambda: self.dataset.input_shape,
            "numbers": lambda: not self.dataset.classes,
            "learn": lambda: self._learn_serially,
            "dp_seeded": lambda: simulated,
            "device": lambda: self.config.backend.device,
            "buffers": self._buffers,
            "tune": lambda: self._public_sample(chosen),
        }
        options: dict[str, Any] = {
            key: value
            for key, value in chosen.items()
            if key not in ("_target_", "tolerance", *PUBLIC_OPTIONS)
        }
        if issubclass(target, FedAvg):
            options |= self._mcmahans_shares()
        try:
            options |= {name: make() for name, make in offered.items() if name in accepted}
            for key, value in options.items():
                if isinstance(value, Mapping) and "_target_" in value:
                    is_strategy = issubclass(get_class(value["_target_"]), RoundLoop)
                    options[key] = (
                        # The strategy of an output layer.
                        self._strategy(value, {"seed": self.config.seed}, simulated)
                        if is_strategy
                        else instantiate(value, _convert_="all")
                    )
            space: Any = options.get("space")
            if simulated and hasattr(space, "dp_seeded"):
                options["space"] = dataclasses.replace(space, dp_seeded=True)
            strategy = target(**given, **options)
        except (InstantiationException, ValueError) as error:
            raise self._blamed("strategy", error) from error
        assert isinstance(strategy, RoundLoop)
        return strategy

    def _buffers(self) -> tuple[str, ...]:
        """Return the arrays that are averaged and not trained, such as means of batches."""
        # Those of a lift are made from a seed and not in the arrays.
        sent = self._initial_model.state_dict()
        floats = (n for n, b in self._initial_model.named_buffers() if b.is_floating_point())
        return tuple(name for name in floats if name in sent)

    def _public_sample(self, chosen: Mapping[str, Any]) -> Tune | None:
        """Return the server's own sample to tune on; none where ``tune`` is 0."""
        count, public = chosen.get("tune", 0), self.dataset.public
        if count == 0 or not len(public):
            return None
        inputs, labels = self.tensors(public)
        rate = float(chosen.get("tune_rate", 1e-3))
        return Tune(inputs.numpy(), labels.numpy(), count, rate, self.build_model)

    def _mcmahans_shares(self) -> dict[str, Any]:
        """Return options by which FedAvg chooses as McMahan et al. do: C = 0 is one node.

        The tiny term keeps 0.29 of 100 nodes from counting as 28.
        """
        chosen = self.config.strategy
        least = chosen.get("min_nodes", 1)
        shares: dict[str, Any] = {
            f"min_{purpose}_nodes": chosen.get(f"min_{purpose}_nodes", least)
            for purpose in ("train", "evaluate", "available")
        }
        tiny = 1e-9 / self.config.nodes
        for name, usual in (("fraction_train", 1.0), ("fraction_evaluate", 0.0)):
            share = chosen.get(name, usual)
            # One out of range stays as it is, to be refused.
            raised = 0 <= share <= 1 and (share or name == "fraction_train")
            shares[name] = min(1.0, share + tiny) if raised else share
        return shares

    @property
    def keeps_models_on_nodes(self) -> bool:
        """Whether a run goes on only with the nodes that it began with."""
        packed = self.config.strategy.get("compress", "float32") != "float32"
        return packed or issubclass(get_class(self.config.strategy["_target_"]), LocalLearners)

    def stop_rules(self) -> list[Any]:
        """Return when to end before the last round."""
        stop = self.config.stop
        goal: Any = stop.goal
        return [] if stop.target is None else [TargetReached(stop.target, stop.metric, goal)]

    def _fit_pooled(self, arrays: Arrays, features: NDArray, labels: NDArray, seed: int) -> Arrays:
        model = resize_model(self.build_model(), arrays)
        self.fit(model, Examples(features, labels), seed)
        return to_numpy(ArrayRecord(model.state_dict()))

    def _pooled_optimum(
        self, arrays: Arrays, features: NDArray, labels: NDArray, seed: int
    ) -> tuple[Arrays, Mapping[str, Any]] | None:
        """Return the best model on pooled data, where it is a linear layer on fixed features."""
        model, pooled = resize_model(self.build_model(), arrays), Examples(features, labels)
        return linear_optimum(model, self.tensors(pooled), seed, self.config.backend.device)

    def _learn_serially(
        self, server_round: int, arrays: Arrays, memory: Arrays
    ) -> tuple[Arrays, Arrays, Mapping[str, float]]:
        model, nodes = resize_model(self.build_model(), arrays), range(self.config.nodes)
        seed = derive_seed(self.config.seed, "serial", server_round)
        learned = self.learn(model, nodes, server_round, seed, memory)
        return to_numpy(ArrayRecord(model.state_dict())), learned.memory, _sums_of(learned)

    def evaluate(
        self, strategy: RoundLoop, arrays: ArrayRecord, server_round: int = 0
    ) -> MetricRecord | None:
        """Score arrays on held-out data, as they are in a round where concepts drift."""
        test = self.held_out
        if not len(test):
            return None
        if batches := self.config.stream.batches_per_round:
            test = self.stream.test(max(1, server_round * batches))
        members = [
            self.predict(resize_model(self.build_model(), member), test)
            for member in split_models(to_numpy(arrays)).values()
        ]
        one = self.dataset.target.score
        # An ensemble votes; of models side by side the mean is reported.
        score = strategy.score if isinstance(strategy, Ensemble) else scoring.mean_score
        return MetricRecord(dict(score(members, test.labels, one)))

    # --- helpers ------------------------------------------------------------------------------

    def _build(self, group: str, **arguments: Any) -> Any:
        """Instantiate what a config group names; a value out of range is the config's fault."""
        try:
            # In two steps, because Hydra would turn the arguments into configs of its own.
            build = instantiate(getattr(self.config, group), _partial_=True, _convert_="all")
            return build(**arguments)
        except (InstantiationException, ValueError) as error:
            raise self._blamed(group, error) from error

    def _blamed(self, group: str, error: Exception) -> Exception:
        # What is nested is built by Hydra, which wraps what that raises.
        reason = error.__cause__ if isinstance(error, InstantiationException) else error
        if isinstance(reason, ConfigError) or not isinstance(reason, ValueError):
            return reason if isinstance(reason, ConfigError) else error
        return ConfigError(f"{group}={self.config.names.get(group, 'sum')}: {reason}")


class NodeTask(Task):
    """What one node of an experiment does with its share of the data."""

    def __init__(self, experiment: Experiment, node: int, name: str | None = None) -> None:
        self._experiment = experiment
        self._node = node
        # What tells this node from others in draws of its own.
        self._name = node if name is None else name
        self._share = experiment.shares[node]
        self.target = experiment.dataset.target
        self._memory: Arrays = {}

    def build_model(self) -> nn.Module:
        """Return the experiment's model."""
        return self._experiment.build_model()

    def train(self, model: nn.Module, *, seed: int, config: Mapping[str, Any]) -> Report:
        """Train on the node's training part."""
        experiment, share = self._experiment, self._share.train
        settings, options = experiment.config, experiment.config.train_options
        server_round = int(config.get(SERVER_ROUND, 1))
        if settings.stream.is_on:
            return self._learn(model, seed, server_round)
        hidden_layers = len(weight_layers(to_numpy(ArrayRecord(model.state_dict())))) - 1
        if config.get(FROZEN_LAYERS) == hidden_layers:
            if options.output_epochs is not None:
                options = dataclasses.replace(options, epochs=options.output_epochs, patience=None)
            return Report(len(share), experiment.fit(model, share, seed, options=options))
        if settings.own_initial_weights and (server_round == 1 or FROZEN_LAYERS in config):
            start_afresh(model, experiment.new_model("node", self._name, server_round), seed)
        mu = float(config.get(_PROXIMAL_MU, 0.0))
        return Report(len(share), experiment.fit(model, share, seed, mu))

    def _learn(self, model: nn.Module, seed: int, server_round: int) -> Report:
        """Learn from the node's stream."""
        noise = self._experiment.config.stream.initial_noise
        if server_round == 1 and noise:
            add_noise(model, noise, seed)
        learned = self._experiment.learn(model, [self._node], server_round, seed, self._memory)
        self._memory = learned.memory
        return Report(learned.examples, _sums_of(learned))

    def recall(self, memory: Arrays) -> None:
        """Take back the optimiser's state."""
        self._memory = memory

    def remember(self) -> Arrays:
        """Return the optimiser's state."""
        return self._memory

    def evaluate(self, model: nn.Module, *, config: Mapping[str, Any]) -> Report:
        """Score on the node's validation part."""
        validation = self._share.validation
        metrics = self.target.score(self._experiment.predict(model, validation), validation.labels)
        return Report(len(validation), metrics)

    def validation_data(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the node's validation part as the model sees it."""
        return self._experiment.tensors(self._share.validation)

    def training_data(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the node's training part as the model sees it."""
        return self._experiment.tensors(self._share.train)

    def shared_examples(self) -> tuple[NDArray, NDArray]:
        """Return the raw training data, if this is the pooled reference run."""
        if self._experiment.config.names["strategy"] != "global":
            raise PermissionError("only strategy=global may ask for raw data")
        return self._share.train.features, self._share.train.labels


def _sums_of(learned: Learned) -> dict[str, float]:
    """Return what a node reports of its stream."""
    share = learned.correct_share_sum
    right = {} if share is None else {CORRECT_SHARE_SUM: share}
    return {LOSS_SUM: learned.loss_sum, **right, BATCHES: learned.batches}


# --- initial weights ----------------------------------------------------------------------------


def add_noise(model: nn.Module, scale: float, seed: int) -> None:
    """Add Gaussian noise to every weight, relative to the spread of its own array.

    Of fresh weights that is the scale of their initialisation: Kamp et al. 2018, Appendix A.7.
    """
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            spread = float(weight.std()) if weight.numel() > 1 else float(weight.abs())
            weight.add_(torch.randn(weight.shape, generator=draws), alpha=scale * spread)


def start_afresh(model: nn.Module, other: nn.Module, seed: int) -> None:
    """Give the layers that are not frozen the weights of another, new model where they fit.

    Layers of another width get uniform ones within one over the root of the inputs, as in torch.
    """
    draws, fresh = torch.Generator().manual_seed(seed % 2**63), dict(other.named_parameters())
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not weight.requires_grad:
                continue
            if fresh[name].shape == weight.shape:
                weight.copy_(fresh[name])
            elif weight.ndim > 1:
                bound = weight[0].numel() ** -0.5
                weight.copy_(torch.empty(weight.shape).uniform_(-bound, bound, generator=draws))
            else:
                weight.zero_()


# --- checks and building --------------------------------------------------------------------------


def _refuse_without_classes(config: RunConfig) -> None:
    """Refuse what cannot be done with numbers, before the first message."""
    names, stop, drift = config.names, config.stop, config.stream.drift
    strategy = get_class(config.strategy["_target_"])
    drifts = drift.kind == "labels" and (drift.rounds or drift.probability)
    watched = stop.target is not None
    only_of_classes = set(Classes.metrics) - set(Numbers.metrics)
    rules = {
        "multi_model.tasks compares accuracies: train it alone, with multi_model.tasks=[] and "
        f"strategy={_FOR_NUMBERS}": config.multi_model.tasks,
        f"strategy={names['strategy']} needs classes: take {_FOR_NUMBERS}": getattr(
            strategy, "needs_classes", False
        ),
        "tuning is for classes: set strategy.tune=0": config.strategy.get("tune"),
        "labels cannot be permuted: set stream.drift.kind=pixels": drifts,
        f"there is no {stop.metric}: set stop.metric={Numbers.metrics[0]} stop.goal=min": (
            watched and stop.metric in only_of_classes
        ),
    }
    for complaint, applies in rules.items():
        if applies:
            raise ConfigError(f"dataset={names['dataset']} has numbers for labels, and {complaint}")


@functools.lru_cache(maxsize=4)
def experiment_of(config: str, own_data: str | None = None) -> Experiment:
    """Return the experiment of a config in JSON, building it once per process."""
    parsed = RunConfig.from_json(config)
    if parsed.multi_model.tasks:
        if own_data is not None:
            raise ConfigError(
                "several models take their data from the config's data sets: start the node with "
                f"partition-id, not with data='{own_data}'"
            )
        # Here, because it is built on this module.
        from simulations.experiment.multi_model import MultiModelExperiment

        return MultiModelExperiment(parsed)
    return Experiment(parsed, own_data)
