"""What are the peers of GEMS worth on convolutional networks? Five LeNets become one.

``python -m simulations.reproduce merged_networks`` divides Fashion-MNIST over five nodes by a
Dirichlet distribution of 0.1, as Jhunjhunwala et al. 2024 (FedFisher) do. Every node trains a
LeNet from the same weights for ten epochs. Then the same five networks are averaged, matched,
merged by RegMean, by Fisher matrices and by FedFisher, with statistics as they are and in so few
bytes that a node sends no more than for an average, and left apart as an ensemble. GEMS stands
beside them: layer by layer on LeNets with two epochs for each of five layers, and class-moment
cones on random filters, which nobody trains or sends.

What a method leaves open (FedFisher's steps, the shrink of RegMean, the damping of K-FAC) is chosen
by the first 500 public samples, as FedFisher's authors do; test data is looked at once. All rows
are runs of the strategies over messages, whose bytes are counted. The nodes' training and
statistics are done once per seed, from initial weights that were not rounded: the compressed rows
cost some per cent more bytes here than in a run of their own. What is finished is not run again
with the same options.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from rich.console import Console

from gems_flwr.client.compression_mod import compression_mod
from gems_flwr.client.limits import UNLIMITED
from gems_flwr.client.task_app import task_client_app
from gems_flwr.model_merging.layer_statistics import Kind, Statistics
from gems_flwr.model_merging.measure import measure_kinds
from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.server.members import split_members
from gems_flwr.strategies.local_models import LocalModels
from gems_flwr.typing import Arrays
from gems_flwr.wire.asking import requested_statistics
from gems_flwr.wire.model_replies import pack_model_reply
from gems_flwr.wire.records import to_numpy, to_record
from gems_flwr.wire.statistics_replies import plan_of, put_statistics
from simulations.config import ConfigError, RunConfig, compose_config
from simulations.experiment.experiment import Experiment, NodeTask
from simulations.experiment.remembered import remember_training
from simulations.experiment.training import torch_threads
from simulations.report.tables import TextTable, print_table
from simulations.run import quiet_flower

SEEDS = (0, 1, 2)
SETTING = ("dataset=fashion_mnist", "partition=dirichlet", "nodes=5", "model=lenet")
EPOCHS = 10
CHOOSE = 500
STEPS = 2000
# FedFisher: the model in half precision, and as many bytes for its statistics.
AS_SENT = ("strategy.compress=float16", "strategy.statistics_share=0.5")
KINDS: tuple[Kind, ...] = ("inputs", "gradients", "fisher")

# Accuracy, kilobytes up per node and what was chosen, by row and seed.
Found = dict[str, dict[str, dict[str, Any]]]


def _merge(method: str, *more: str) -> tuple[str, ...]:
    return ("strategy=merge", f"strategy.method={method}", *more)


# Made of the same five networks.
MERGED: Mapping[str, tuple[str, ...]] = {
    "average": ("strategy=one_shot_average",),
    "neuron matching": _merge("matching"),
    "RegMean": _merge("regmean", "strategy.choose={choose}"),
    "Fisher, diagonal": _merge("fisher"),
    "FedFisher, diagonal": _merge(
        "fedfisher_diagonal", "strategy.choose={choose}", "strategy.steps={steps}"
    ),
    "FedFisher, K-FAC": _merge(
        "fedfisher_kfac", "strategy.choose={choose}", "strategy.steps={steps}"
    ),
    "RegMean, compressed": _merge("regmean", "strategy.choose={choose}", *AS_SENT),
    "FedFisher, diagonal, compressed": _merge(
        "fedfisher_diagonal", "strategy.choose={choose}", "strategy.steps={steps}", *AS_SENT
    ),
    "FedFisher, K-FAC, compressed": _merge(
        "fedfisher_kfac", "strategy.choose={choose}", "strategy.steps={steps}", *AS_SENT
    ),
    "ensemble, softmax mean": ("strategy=ensemble", "strategy.vote=softmax_mean"),
    "Fisher, K-FAC": _merge("kfac", "strategy.choose={choose}"),
}
# With nodes that do something else, or nothing.
OTHERS: Mapping[str, tuple[str, ...]] = {
    "GEMS, cones on random filters": (
        "model=random_filters",
        "strategy=gems",
        "strategy.space.rank=20",
    ),
    "GEMS, layer by layer": (
        "strategy=gems_layerwise",
        "strategy.max_hidden=same",
        "train.epochs={layer_epochs}",
        "train.output_epochs={layer_epochs}",
    ),
    "pooled data": ("strategy=global", "strategy.converged=false"),
}


def run(
    overrides: Sequence[str], output: Path, console: Console, seeds: Sequence[int] = SEEDS
) -> Path:
    """Run the study; return the path of its numbers."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    words, numbers = _take_numbers(overrides)
    base = [*SETTING, f"train.epochs={EPOCHS}", "progress=false", *words]
    epochs = compose_config(base).train_options.epochs
    fill = {**numbers, "layer_epochs": max(1, epochs // 5)}
    path = output / "merged_networks.json"
    found = _read(path, overrides)

    def keep(seed: int, name: str, numbers: dict[str, Any]) -> None:
        found.setdefault(name, {})[str(seed)] = numbers
        path.write_text(json.dumps({"options": list(overrides), "rows": found}, indent=2))

    with remember_training(folder=output / "trained"), quiet_flower():
        # The table's own rows first: what stands beside them takes longest.
        for rows, seed in itertools.product((MERGED, OTHERS), seeds):
            seeded = [*base, f"seed={seed}"]
            configs = {
                name: compose_config([*seeded, *(word.format(**fill) for word in row)])
                for name, row in rows.items()
                if str(seed) not in found.get(name, {})
            }
            # How long nodes train is the strategy's to say, and the same for all that merge.
            nodes = compose_config([*seeded, *MERGED["average"]])
            _one_seed(nodes, configs, partial(keep, seed))
    print_table(_table(found, seeds), console, title="Test accuracy of one network for all nodes")
    console.print(f"Results: {path}", soft_wrap=True, highlight=False, markup=False)
    return path


def _read(path: Path, overrides: Sequence[str]) -> Found:
    """Return what was found before with the same options."""
    if not path.exists():
        return {}
    before = json.loads(path.read_text())
    rows: Found = before["rows"] if before["options"] == list(overrides) else {}
    return rows


def _take_numbers(overrides: Sequence[str]) -> tuple[list[str], dict[str, int]]:
    """Return the options of runs, and those of merging, which only some rows have."""
    numbers, others = {"steps": STEPS, "choose": CHOOSE}, []
    for word in overrides:
        key, _, value = word.partition("=")
        if key not in numbers:
            others.append(word)
        elif not value.isdecimal():
            raise ConfigError(f"{key} must be a whole number, got {value!r}")
        else:
            numbers[key] = int(value)
    return others, numbers


def _one_seed(
    config: RunConfig,
    configs: Mapping[str, RunConfig],
    keep: Callable[[str, dict[str, Any]], None],
) -> None:
    """Run the rows that are missing."""
    if not configs:
        return
    first = Experiment(config)
    with torch_threads(config.backend.threads):
        prepared: ClientApp | None = None
        for name, chosen in configs.items():
            experiment = Experiment(chosen)
            experiment.__dict__.update(dataset=first.dataset, shares=first.shares)
            if name in MERGED:
                prepared = prepared or _prepared_app(first)
                app = prepared
            else:
                app = _app(experiment)
            strategy = experiment.strategy(None, [])
            result = strategy.start(
                InProcessGrid(app, config.nodes),
                experiment.initial_arrays(),
                num_rounds=chosen.rounds,
            )
            scores = experiment.evaluate(strategy, result.arrays, chosen.rounds)
            assert scores is not None
            told = {
                key: result.details[key]
                for key in ("steps", "shrink", "damping", "public_score")
                if key in result.details
            }
            keep(
                name,
                {
                    "accuracy": scores["accuracy"],
                    "kilobytes_up": result.traffic.bytes_up / config.nodes / 1000,
                    "chosen": told,
                },
            )


def _app(experiment: Experiment) -> ClientApp:
    return task_client_app(
        lambda context: experiment.task(int(context.node_config["partition-id"])), limits=UNLIMITED
    )


def _prepared_app(first: Experiment) -> ClientApp:
    """Return nodes that have trained already, and have measured what any method asks for."""
    config = first.config
    alone = LocalModels(min_nodes=config.nodes, seed=config.seed)
    result = alone.start(InProcessGrid(_app(first), config.nodes), first.initial_arrays())
    models = [dict(arrays) for arrays in split_members(to_numpy(result.arrays)).values()]
    return prepared_app(
        models, [_statistics(first, node, model) for node, model in enumerate(models)], first
    )


def _statistics(first: Experiment, node: int, model: Arrays) -> Statistics:
    task = first.task(node)
    assert isinstance(task, NodeTask)
    return measure_kinds(KINDS, "exact", model, task.training_data(), model=first.build_model())


def prepared_app(
    models: Sequence[Arrays], statistics: Sequence[Statistics], experiment: Experiment
) -> ClientApp:
    """Return an app whose nodes answer at once with their model and what they are asked for."""
    app = ClientApp(mods=[compression_mod()])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        node = int(context.node_config["partition-id"])
        model, name = models[node], str(node)
        count = len(experiment.shares[node].train)
        content = pack_model_reply(to_record(model), {}, num_examples=count, name=name)
        request = requested_statistics(message.content)
        if request is not None:
            kinds = {
                weight: {kind: found[kind] for kind in request.kinds}
                for weight, found in statistics[node].items()
            }
            put_statistics(content, kinds, name=name, plan=plan_of(request, model))
        return Message(content, reply_to=message)

    return app


def _table(found: Found, seeds: Sequence[int]) -> TextTable:
    rows = []
    for name in (*MERGED, *OTHERS):
        done = [found[name][str(seed)] for seed in seeds if str(seed) in found.get(name, {})]
        if not done:
            continue
        scores = [each["accuracy"] for each in done]
        spread = f" ± {np.std(scores, ddof=1):.3f}" if len(scores) > 1 else ""
        kilobytes = f"{np.mean([each['kilobytes_up'] for each in done]):,.0f}"
        rows.append((name, kilobytes, f"{np.mean(scores):.3f}{spread}", str(len(done))))
    return TextTable.of(("method", "KB up per node", "accuracy", "seeds"), rows, names=(0,))
