"""What can a hostile node do to averages and hidden layers? The sibling of the study `hostile`.

``python -m simulations.reproduce hostile_models --dataset mnist dataset.public=54000`` lets one of
five and three of ten nodes lie to FedAvg, dynamic averaging and LayerwiseGems (an MLP, 6,000 images
for all nodes), with and without `robust`, over the wire. Liars work as honest nodes do and then
change what they send; in dynamic averaging they claim a violation at every check. Every case is
written as it is done, and not repeated.

=========  ==================================  ==================================================
attack     on a model                          on neurons, then on the cone of the output layer
=========  ==================================  ==================================================
far        10,000 away, in any direction       every neuron so; inputs a thousand times as large
minus      its negative                        negatives with radii of nothing; hardly any spread
flipped    the rows of class c and 9 - c of    as they are; labels c called 9 - c
           the output layer exchanged
counts     that, with a million times the      negatives that claim all importance; a million
           samples                             times the samples
garbage    a random one of the same length     random ones of the same lengths; random moments
=========  ==================================  ==================================================
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from numpy.typing import NDArray
from rich.console import Console

from gems_flwr.networks.layers import weight_layers
from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.runtime.seeding import generator
from gems_flwr.spaces.checks import MAX_WEIGHT
from gems_flwr.spaces.space_files import space_from_arrays
from gems_flwr.wire.asking import ask_for_averaging, requested_averaging
from gems_flwr.wire.keys import ARRAYS, JSON, METRICS, NEURONS, NUM_EXAMPLES, SPACE, SPACE_META
from gems_flwr.wire.model_replies import unpack_name
from gems_flwr.wire.records import to_numpy, to_record
from gems_flwr.wire.space_replies import pack_space_reply
from simulations.backends.launch import simulated_client_app
from simulations.config import compose_config
from simulations.experiment.experiment import Experiment, experiment_of
from simulations.experiment.remembered import remember_training
from simulations.experiment.training import torch_threads
from simulations.report.tables import print_table
from simulations.reproduce.studies.hostile import (
    CONE_LIES,
    SETTINGS,
    SPLITS,
    Case,
    random_direction,
    results_table,
)
from simulations.run import quiet_flower

SEEDS = (0,)
ATTACKS = ("none", "far", "minus", "flipped", "counts", "garbage")
# Cones have no negative: a liar about its spread does what `hostile` calls tiny.
_CONE_ATTACKS = {"minus": "tiny"}
COMMON = ["model=mlp", "progress=false"]
METHODS = {
    "fedavg": ["strategy=fedavg", "rounds=6"],
    "dynamic": [
        "strategy=dynamic",
        "rounds=40",
        "stream.batches_per_round=5",
    ],
    # Low rank, so that the lies of `hostile` about cones serve here, too.
    "layerwise": [
        "strategy=gems_layerwise",
        "train.epochs=4",
        "train.patience=null",
        "strategy.max_hidden=100",
        "strategy.head.space.rank=10",
        "strategy.head.space.int8=false",
        "strategy.head.space.min_count=11",
    ],
}
DEFENCES = {
    "fedavg": ("off", "median", "trimmed_mean", "multi_krum"),
    "dynamic": ("off", "median", "multi_krum"),
    "layerwise": ("off", "robust"),
}
COLUMNS = [(method, defence) for method in METHODS for defence in DEFENCES[method]]


def run(overrides: Sequence[str], output: Path, console: Console) -> Path:
    """Run the study; return the path of its results."""
    output.mkdir(parents=True, exist_ok=True)
    name = compose_config([*COMMON, *overrides]).names["dataset"]
    path = output / f"hostile_models-{name}.json"
    done: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
    for split in SPLITS:
        for nodes, liars in SETTINGS:
            with remember_training(), quiet_flower():
                for case in _cases(split, nodes, liars):
                    if case.key not in done:
                        done[case.key] = _measure(case, overrides)
                        path.write_text(json.dumps(done, indent=2))
            table = results_table(done, split, nodes, liars, COLUMNS, ATTACKS, SEEDS)
            print_table(table, console, title=f"{liars} of {nodes} nodes lie, {split}")
    console.print(f"Results: {path}")
    return path


def _cases(split: str, nodes: int, liars: int) -> Iterable[Case]:
    for seed in SEEDS:
        for method, defence in COLUMNS:
            for attack in ATTACKS:
                # Nodes weigh the same in dynamic averaging.
                if (method, attack) != ("dynamic", "counts"):
                    yield Case(method, split, nodes, liars, attack, defence, seed)


def _measure(case: Case, overrides: Sequence[str]) -> float:
    """Return the test accuracy of a run in which some nodes lie."""
    options = [f"partition={case.split}", f"nodes={case.nodes}", f"seed={case.seed}"]
    base = [*COMMON, *METHODS[case.space], *options]
    nodes_config = compose_config([*base, *overrides])
    config = compose_config([*base, *_defence(case), *overrides])
    liars = case.liars if case.attack != "none" else 0
    app = LyingApp(simulated_client_app(nodes_config), case.attack, liars, case.seed)
    # The data is the same with every defence, so it is read once.
    experiment = _WithDataOf(experiment_of(nodes_config.to_json()), config)
    strategy = experiment.strategy(None, [])
    with torch_threads(config.backend.threads):
        result = strategy.start(
            InProcessGrid(app, case.nodes),  # type: ignore[arg-type]
            experiment.initial_arrays(),
            num_rounds=config.rounds,
        )
        scores = experiment.evaluate(strategy, result.arrays, config.rounds)
    assert scores is not None
    return float(scores["accuracy"])  # type: ignore[arg-type]


def _defence(case: Case) -> list[str]:
    if case.defence == "off":
        return []
    if case.space == "layerwise":
        return ["strategy.robust=true"]
    # A share of 0.3 bears one of five and three of ten.
    return [f"strategy.robust={case.defence}", f"strategy.liars={case.liars}", "strategy.trim=0.3"]


class _WithDataOf(Experiment):
    """An experiment with the data and the streams of another."""

    def __init__(self, other: Experiment, config: Any) -> None:
        super().__init__(config)
        self.other = other

    @property
    def dataset(self) -> Any:  # type: ignore[override]
        return self.other.dataset

    @property
    def stream(self) -> Any:  # type: ignore[override]
        return self.other.stream


# --- lies -----------------------------------------------------------------------------------


class LyingApp:
    """An app whose first nodes change what they send.

    Parameters
    ----------
    app : callable
        The honest app.
    attack : str
        One of `ATTACKS`.
    liars : int
        How many nodes lie, from node 0 on.
    seed : int
        Source of what is random in lies.
    """

    def __init__(self, app: Any, attack: str, liars: int, seed: int) -> None:
        self.app, self.attack, self.liars, self.seed = app, attack, liars, seed

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message, truly or not."""
        node = int(context.node_config["partition-id"])
        if node >= self.liars:
            return self.app(message, context)  # type: ignore[no-any-return]
        request = requested_averaging(message.content)
        if request is not None and request.send == "violated":
            eager = dataclasses.replace(request, send="always", measure=True)
            ask_for_averaging(message.content, eager)
        reply: Message = self.app(message, context)
        if reply.has_content():
            rng = generator(self.seed, "hostile", self.attack, node, message.metadata.group_id)
            lie(reply.content, self.attack, rng)
        return reply


def lie(content: RecordDict, attack: str, rng: np.random.Generator) -> None:
    """Change the model, the neurons or the cone in a reply."""
    if ARRAYS in content:
        arrays = to_numpy(content[ARRAYS])  # type: ignore[arg-type]
        content[ARRAYS] = to_record(lie_of_model(arrays, attack, rng))
    if NEURONS in content:
        rows = content[NEURONS][NEURONS].numpy()  # type: ignore[index, union-attr]
        content[NEURONS] = ArrayRecord({NEURONS: Array(lie_of_neurons(rows, attack, rng))})
    if SPACE in content:
        arrays = to_numpy(content[SPACE])  # type: ignore[arg-type]
        cone: Any = space_from_arrays(arrays, json.loads(content[SPACE_META][JSON]))  # type: ignore
        lied = CONE_LIES[_CONE_ATTACKS.get(attack, attack)](cone, rng)
        packed = pack_space_reply(lied, name=unpack_name(content) or "")
        content[SPACE], content[SPACE_META] = packed[SPACE], packed[SPACE_META]
    metrics = content.get(METRICS)
    if attack == "counts" and metrics is not None and NUM_EXAMPLES in metrics:
        metrics[NUM_EXAMPLES] *= 10**6  # type: ignore


def lie_of_model(
    arrays: dict[str, NDArray], attack: str, rng: np.random.Generator
) -> dict[str, NDArray]:
    """Return what a liar sends instead of its model."""
    if attack == "minus":
        return {name: -array for name, array in arrays.items()}
    if attack in ("flipped", "counts"):
        last = weight_layers(arrays)[-1]
        return {k: a[::-1].copy() if k in last.keys else a for k, a in arrays.items()}
    length = np.sqrt(sum(float((array.astype(np.float64) ** 2).sum()) for array in arrays.values()))
    size = sum(array.size for array in arrays.values())
    random = random_direction(size, 1e4 if attack == "far" else length, rng)
    found, start = {}, 0
    for name, array in arrays.items():
        part = random[start : start + array.size].reshape(array.shape)
        found[name] = (part + (array if attack == "far" else 0)).astype(array.dtype)
        start += array.size
    return found


def lie_of_neurons(rows: NDArray, attack: str, rng: np.random.Generator) -> NDArray:
    """Return what a liar sends instead of its neurons: centres, radii, importance by row."""
    rows = rows.copy()
    centers = rows[:, :-2]
    if attack in ("far", "garbage"):
        for row in centers:
            length = 1e4 if attack == "far" else float(np.linalg.norm(row))
            random = random_direction(len(row), length, rng)
            row[:] = row + random if attack == "far" else random
    if attack in ("minus", "counts"):
        centers *= -1
    if attack == "minus":
        rows[:, -2] = 1e-6
    if attack == "counts":
        rows[:, -1] = MAX_WEIGHT
    return rows
