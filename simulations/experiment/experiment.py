"""A run's parts, built from its config, the same on the server and in every worker process."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Mapping, Sequence
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

from gems_flwr.client.task import Report, Task, TaskSet
from gems_flwr.networks.inputs import LayerReader
from gems_flwr.networks.subclasses import other_output_layer, split_classes
from gems_flwr.networks.surgery import resize_model, start_afresh
from gems_flwr.runtime.seeding import derive_seed
from gems_flwr.server.local_learners import LocalLearners
from gems_flwr.server.loop import RoundLoop
from gems_flwr.server.members import split_members
from gems_flwr.server.settings import Callback
from gems_flwr.server.stopping import PatienceExhausted, StopRule, TargetReached
from gems_flwr.strategies.fedavg import FedAvg
from gems_flwr.typing import Arrays
from gems_flwr.wire.keys import FROZEN_LAYERS, NEURON_REQUEST, PROXIMAL_MU, SERVER_ROUND
from gems_flwr.wire.records import to_numpy
from simulations.config import ConfigError, RunConfig
from simulations.data.examples import Dataset, Examples, strata
from simulations.data.own_data import read_own_data
from simulations.data.splits import split_validation
from simulations.experiment.fixed_lift import LIFT_MEMORY
from simulations.experiment.linear_optimum import linear_optimum
from simulations.experiment.model_copies import copy_model
from simulations.experiment.needs_classes import refuse_without_classes
from simulations.experiment.remembered import built_once, fit_once
from simulations.experiment.training import TrainOptions, predictions, tensors
from simulations.streams.learning import learn
from simulations.streams.source import BatchSource

# Into how many ranges reports divide labels that are numbers.
_RANGES = 9


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
        In a deployment: where this node's own data lies. It is then the only share there is.
    """

    def __init__(self, config: RunConfig, own_data: str | Path | None = None) -> None:
        self.config = config
        self._own_data = own_data
        # A node in another process knows the kinds of spaces whose modules it has imported.
        for options in (config.strategy, config.strategy.get("head")):
            space = options.get("space") if isinstance(options, dict) else None
            if isinstance(space, dict):
                get_class(space["_target_"])

    # --- data ---------------------------------------------------------------------------------

    @functools.cached_property
    def dataset(self) -> Dataset:
        """The data set, with its test part and public sample."""
        config = self.config
        loaded = built_once(
            repr(("dataset", config.dataset, config.data_dir, config.seed)),
            lambda: self._build(
                "dataset", data_dir=config.data_dir, seed=derive_seed(config.seed, "data")
            ),
        )
        assert isinstance(loaded, Dataset)
        if not loaded.classes:
            refuse_without_classes(self.config)
        return loaded

    @functools.cached_property
    def shares(self) -> Sequence[Share]:
        """Every node's data, as far as it is known here."""
        config, pool = self.config, self.dataset.train
        if self._own_data is not None:
            return [self._own_share(self._own_data)]
        if not len(pool):
            return []

        def divided() -> Sequence[Share]:
            parts = self._divide(pool.labels, self.dataset.groups, config.nodes)
            return [self._share(pool.take(part), node) for node, part in enumerate(parts)]

        settings = (config.dataset, config.data_dir, config.partition, config.nodes)
        return built_once(repr(("shares", *settings, config.validation, config.seed)), divided)

    @functools.cached_property
    def held_out(self) -> Examples:
        """What the server scores models on: the test set, or all nodes' validation parts.

        On all parts together an accuracy is the nodes' mean, weighted by their examples. No server
        sees them but that of a simulation.
        """
        if self.config.evaluate_on != "validation":
            return self.dataset.test
        if self.config.stream.is_on:
            raise ConfigError(
                "evaluate_on=validation is not for streams, whose nodes are judged by what comes "
                "next: set stream.batches_per_round=null"
            )
        parts = [share.validation for share in self.shares if len(share.validation)]
        if not parts:
            raise ConfigError(
                f"dataset={self.config.names['dataset']} has no validation data that the server "
                "knows of, so there is nothing for a search to go by"
            )
        return Examples.concatenate(parts)

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

    def _own_share(self, path: str | Path) -> Share:
        examples, validation = read_own_data(path, self.dataset)
        return self._share(examples, 0) if validation is None else Share(examples, validation)

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
        """Return how many examples of each class every node has, for reports.

        Of numbers it is how many are in each of some equal ranges, whose ``edges`` are told.
        """
        classes = self.dataset.classes
        if not classes:
            return self._number_counts()
        return {
            "classes": classes,
            "nodes": [
                {
                    "name": str(node),
                    "train": share.train.class_counts(classes).tolist(),
                    "validation": share.validation.class_counts(classes).tolist(),
                }
                for node, share in enumerate(self.shares)
            ],
        }

    def _number_counts(self) -> dict[str, Any]:
        edges = np.histogram_bin_edges(self.dataset.train.labels, _RANGES)

        def counts(examples: Examples) -> list[int]:
            # Somebody's own data may lie beyond what the server knows.
            inside = np.clip(examples.labels, edges[0], edges[-1])
            return [int(each) for each in np.histogram(inside, edges)[0]]

        return {
            "classes": _RANGES,
            "edges": [round(float(edge), 4) for edge in edges],
            "nodes": [
                {
                    "name": str(node),
                    "train": counts(share.train),
                    "validation": counts(share.validation),
                }
                for node, share in enumerate(self.shares)
            ],
        }

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
        self, model: nn.Module, examples: Examples, seed: int, proximal_mu: float = 0.0
    ) -> dict[str, float]:
        """Train a model in place with the run's options."""
        return self._fit(model, examples, seed, self.config.train_options, proximal_mu)

    def fit_output(self, model: nn.Module, examples: Examples, seed: int) -> dict[str, float]:
        """Train a model whose other layers are frozen, for as long as that is to take."""
        options = self.config.train_options
        if options.output_epochs is not None:
            options = dataclasses.replace(options, epochs=options.output_epochs, patience=None)
        return self._fit(model, examples, seed, options)

    def _fit(
        self,
        model: nn.Module,
        examples: Examples,
        seed: int,
        options: TrainOptions,
        proximal_mu: float = 0.0,
    ) -> dict[str, float]:
        backend = self.config.backend
        model, examples, scale = self._on_lift(model, examples)
        return fit_once(
            model,
            examples,
            architecture=repr(self.config.model),
            scale=scale,
            options=options,
            seed=seed,
            device=backend.device,
            threads=backend.threads,
            proximal_mu=proximal_mu,
            target=self.dataset.target,
        )

    def learn(
        self, model: nn.Module, nodes: Sequence[int], server_round: int, seed: int, memory: Arrays
    ) -> tuple[int, dict[str, float], Arrays]:
        """Train a model in place on what nodes see in a round; see `streams.learning`."""
        backend, count = self.config.backend, self.config.stream.batches_per_round or 1
        first = (server_round - 1) * count + 1
        return learn(
            model,
            (self.stream.batch(n, t) for t in range(first, first + count) for n in nodes),
            scale=self.dataset.scale,
            options=self.config.train_options,
            seed=seed,
            memory=memory,
            device=backend.device,
            threads=backend.threads,
            target=self.dataset.target,
        )

    def predict(self, model: nn.Module, examples: Examples) -> NDArray:
        """Return the model's class probabilities, or the numbers that it predicts."""
        backend = self.config.backend
        model, examples, scale = self._on_lift(model, examples)
        return predictions(
            model,
            examples,
            scale=scale,
            device=backend.device,
            threads=backend.threads,
            target=self.dataset.target,
        )

    def _on_lift(self, model: nn.Module, examples: Examples) -> tuple[nn.Module, Examples, float]:
        """Return the part of a model that learns, what it sees, and the factor of that."""
        lifted = LIFT_MEMORY.lifted(
            model,
            examples,
            architecture=repr(self.config.model),
            scale=self.dataset.scale,
            threads=self.config.backend.threads,
            device=self.config.backend.device,
        )
        return (model, examples, self.dataset.scale) if lifted is None else (*lifted, 1.0)

    def tensors(self, examples: Examples) -> tuple[torch.Tensor, torch.Tensor]:
        """Return examples as the model sees them."""
        return tensors(examples, scale=self.dataset.scale, device="cpu")

    def output_inputs(self, examples: Examples) -> tuple[NDArray, NDArray]:
        """Return what the initial model's output layer sees of some examples."""
        data = self.tensors(examples)
        device = self.config.backend.device
        reader = LayerReader(to_numpy(self.initial_arrays()), self.build_model(), device=device)
        seen = reader.read(data, reader.output_layer(data))
        return seen.inputs.numpy(), seen.labels.numpy()

    # --- the node's side ----------------------------------------------------------------------

    def task(self, node: int) -> NodeTask | TaskSet:
        """Return what node number `node` can do."""
        self._check_node(node)
        if node >= len(self.shares):
            raise ConfigError(
                f"dataset={self.config.names['dataset']} has no shares to divide: tell this node "
                "where its data lies, --node-config \"data='/folder'\""
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
        """Return the strategy, which keeps its checkpoint in `folder`, if there is one.

        In a simulation private noise comes from the run's seed, so that the run can be repeated.
        """
        config = self.config
        target = get_class(config.strategy["_target_"])
        accepted = {setting.name for setting in dataclasses.fields(target)}
        # Some strategies work with the server's own data or model; they get what they name.
        offered: dict[str, Any] = {
            "fit": self._fit_pooled,
            "optimum": self._pooled_optimum,
            "input_shape": self.dataset.input_shape,
            "numbers": not self.dataset.classes,
            "initialise": self._initialise,
            "build_model": self.build_model,
            "learn": self._learn_serially,
            # Its own nodes build every network at the widths that come.
            "check_widths": False,
            "dp_seeded": simulated,
            "device": config.backend.device,
        }
        if "buffers" in accepted:
            # Those of a lift are made from a seed and not in the arrays.
            sent = self._initial_model.state_dict()
            floats = (n for n, b in self._initial_model.named_buffers() if b.is_floating_point())
            offered["buffers"] = tuple(name for name in floats if name in sent)
        if config.strategy.get("tune", 0) != 0 or config.strategy.get("choose", 0) != 0:
            public = self.dataset.public
            if "public" in accepted:
                offered["public"] = self.output_inputs(public)
            offered["public_data"] = tuple(part.numpy() for part in self.tensors(public))
        if config.secure:
            offered["secure"] = self._build("secure")
        if issubclass(target, FedAvg):
            offered |= self._mcmahans_shares()
        strategy = self._build(
            "strategy",
            seed=config.seed,
            wait_for_nodes=config.nodes,
            wait_seconds=config.wait_seconds,
            return_seconds=config.return_seconds,
            checkpoint_dir=folder,
            resume=folder is not None,
            stop_rules=self._stop_rules(),
            callbacks=list(callbacks),
            seeded_noise=simulated,
            **{name: value for name, value in offered.items() if name in accepted},
        )
        assert isinstance(strategy, RoundLoop)
        return strategy

    def _mcmahans_shares(self) -> dict[str, Any]:
        """Return options by which FedAvg chooses as McMahan et al. do: C = 0 is one node.

        Flower's `fraction_train=0` is nobody, and it asks for at least two nodes unless told
        otherwise. The tiny term keeps 0.29 of 100 nodes from counting as 28.
        """
        chosen = self.config.strategy
        least = chosen.get("min_nodes", 1)
        shares: dict[str, Any] = {
            f"min_{purpose}_nodes": chosen.get(f"min_{purpose}_nodes", least)
            for purpose in ("train", "evaluate", "available")
        }
        tiny = 1e-9 / self.config.nodes
        shares["fraction_train"] = _raised(chosen.get("fraction_train", 1.0), tiny)
        evaluate = chosen.get("fraction_evaluate", 0.0)
        shares["fraction_evaluate"] = _raised(evaluate, tiny) if evaluate else 0.0
        return shares

    @property
    def keeps_models_on_nodes(self) -> bool:
        """Whether a run goes on only with the nodes that it began with."""
        packed = self.config.strategy.get("compress", "float32") != "float32"
        return packed or issubclass(get_class(self.config.strategy["_target_"]), LocalLearners)

    def _stop_rules(self) -> list[StopRule]:
        stop = self.config.stop
        rules: list[StopRule] = []
        if stop.target is not None:
            rules.append(TargetReached(stop.target, stop.metric, stop.goal))  # type: ignore[arg-type]
        if stop.patience is not None:
            rules.append(PatienceExhausted(stop.patience, stop.metric, stop.goal))  # type: ignore[arg-type]
        try:
            return rules + [instantiate(rule, _convert_="all") for rule in stop.rules]
        except InstantiationException as error:
            raise ConfigError(f"stop.rules: {error.__cause__ or error}") from error

    def _initialise(self, server_round: int) -> Arrays:
        """Return new initial weights for a further attempt."""
        return to_numpy(ArrayRecord(self.new_model(server_round).state_dict()))

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
        model = resize_model(self.build_model(), arrays)
        nodes, seed = (
            range(self.config.nodes),
            derive_seed(self.config.seed, "serial", server_round),
        )
        _, metrics, memory = self.learn(model, nodes, server_round, seed, memory)
        return to_numpy(ArrayRecord(model.state_dict())), memory, metrics

    def evaluate(
        self, strategy: RoundLoop, arrays: ArrayRecord, server_round: int = 0
    ) -> MetricRecord | None:
        """Score a strategy's arrays on the test set, as it is in a round where concepts drift.

        Returns None where the server has no test set. In a search it is the validation data.
        """
        test = self.held_out
        if not len(test):
            return None
        if batches := self.config.stream.batches_per_round:
            test = self.stream.test(max(1, server_round * batches))
        members = []
        for member in split_members(to_numpy(arrays)).values():
            model = resize_model(self.build_model(), member)
            members.append(self.predict(model, test))
        score = self.dataset.target.score
        return MetricRecord(dict(strategy.score(members, test.labels, score)))

    def _build(self, group: str, **arguments: Any) -> Any:
        """Instantiate what a config group names; a value out of range is the config's fault."""
        try:
            # In two steps, because Hydra would turn the arguments into configs of its own.
            build = instantiate(getattr(self.config, group), _partial_=True, _convert_="all")
            if arguments.pop("seeded_noise", False) and "space" in build.keywords:
                arguments["space"] = dataclasses.replace(build.keywords["space"], dp_seeded=True)
            return build(**arguments)
        except (InstantiationException, ValueError) as error:
            # What is nested is built by Hydra, which wraps what that raises.
            reason = error.__cause__ if isinstance(error, InstantiationException) else error
            if not isinstance(reason, ValueError):
                raise
            name = self.config.names.get(group, "sum")
            raise ConfigError(f"{group}={name}: {reason}") from error


def _raised(fraction: float, tiny: float) -> float:
    """Return a share that is a little larger; one out of range as it is, to be refused."""
    return min(1.0, fraction + tiny) if 0 <= fraction <= 1 else fraction


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
        features_only = NEURON_REQUEST in config
        server_round = int(config.get(SERVER_ROUND, 1))
        if experiment.config.stream.is_on:
            return self._learn(model, seed, server_round)
        if experiment.config.own_initial_weights and (server_round == 1 or features_only):
            start_afresh(model, experiment.new_model("node", self._name, server_round), seed)
        subclasses = experiment.config.train_options.subclasses
        if FROZEN_LAYERS in config and not features_only:
            start = experiment.config.train_options.output_start
            if start != "zero":
                whose = (self._name,) if start == "own" else ()
                draw_output(model, derive_seed(experiment.config.seed, "output start", *whose))
            return Report(len(share), experiment.fit_output(model, share, seed))
        if not features_only or subclasses == 1:
            mu = float(config.get(PROXIMAL_MU, 0.0))
            return Report(len(share), experiment.fit(model, share, seed, mu))
        inputs, labels = experiment.tensors(share)
        split = split_classes(inputs, labels, subclasses, derive_seed(seed, "subclasses"))
        with other_output_layer(model, int(split.max()) + 1, derive_seed(seed, "output")):
            metrics = experiment.fit(model, Examples(share.features, split.numpy()), seed)
        return Report(len(share), metrics)

    def _learn(self, model: nn.Module, seed: int, server_round: int) -> Report:
        """Learn from the node's stream."""
        noise = self._experiment.config.stream.initial_noise
        if server_round == 1 and noise:
            add_noise(model, noise, seed)
        examples, metrics, self._memory = self._experiment.learn(
            model, [self._node], server_round, seed, self._memory
        )
        return Report(examples, metrics)

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


def draw_output(model: nn.Module, seed: int) -> None:
    """Give the one layer that is not frozen random weights, and biases of zero.

    The weights are Gaussian with a deviation of 0.05, as in the released code of GEMS 2019.
    """
    draws = torch.Generator().manual_seed(seed % 2**63)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad and weight.ndim > 1:
                weight.copy_(0.05 * torch.randn(weight.shape, generator=draws))
            elif weight.requires_grad:
                weight.zero_()


def add_noise(model: nn.Module, scale: float, seed: int) -> None:
    """Add Gaussian noise to every weight, relative to the spread of its own array.

    The spread of freshly drawn weights is the scale of their initialisation (Glorot's, or torch's),
    which is what Kamp et al. 2018, Appendix A.7, measure noise by.
    """
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            spread = float(weight.std()) if weight.numel() > 1 else float(weight.abs())
            weight.add_(torch.randn(weight.shape, generator=draws), alpha=scale * spread)


@functools.lru_cache(maxsize=4)
def experiment_of(config: str, own_data: str | None = None) -> Experiment:
    """Return the experiment of a config in JSON, building it once per process.

    Raises
    ------
    ConfigError
        If a node has data of its own and the config several models.
    """
    parsed = RunConfig.from_json(config)
    if parsed.multi_model.tasks:
        if own_data is not None:
            raise ConfigError(
                "several models take their data from the config's data sets: start the node with "
                f"partition-id, not with data='{own_data}'"
            )
        # Here, because it is built on this module.
        from simulations.experiment.multi_model_experiment import MultiModelExperiment

        return MultiModelExperiment(parsed)
    return Experiment(parsed, own_data)
