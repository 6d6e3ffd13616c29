"""The nodes whose states lie in ``tests/artifacts/nodes``, and the strategies that asked them.

A node's state is a file, so that it lives on while the server is away; where there is none, the
node has lost everything.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict

from gems_flwr.client.dynamic_averaging_mod import dynamic_averaging_mod
from gems_flwr.client.multi_model_mod import multi_model_mod
from gems_flwr.client.task import Report, Task, TaskSet
from gems_flwr.client.task_app import task_client_app
from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.server.members import join_models
from gems_flwr.strategies.dynamic_averaging import DynamicAveraging
from gems_flwr.strategies.fedavg import FedAvg
from gems_flwr.strategies.multi_model.multi_model import MultiModel
from gems_flwr.strategies.periodic_averaging import PeriodicAveraging
from gems_flwr.wire.records import to_numpy, to_record

NODES, ROUNDS = 4, 8
SHAPES = {"a": (3,), "b": (2, 2)}
SIZES = {"a": (4, 2), "b": (6, 3)}


def strategy_of(name, **options):
    """Return the strategy of a checkpoint."""
    if name == "dynamic":
        return DynamicAveraging(delta=0.15, seed=5, **options)
    if name == "dynamic-steered":
        return DynamicAveraging(delta=0.05, check_every=2, target_rate=0.5, seed=5, **options)
    if name == "periodic":
        return PeriodicAveraging(b=2, fraction=0.5, seed=5, **options)
    if name == "fedavg":
        return FedAvg(fraction_train=0.6, fraction_evaluate=0.0, seed=5, **options)
    return MultiModel(sampling=name.removeprefix("multi-"), budget=4, seed=5, **options)


def living(states: Path):
    """Return a mod that keeps a node's state in a file."""

    def mod(message, context, call_next):
        path = states / f"{partition(context)}.state"
        if path.exists():
            context.state = recorddict_from_proto(ProtoRecordDict.FromString(path.read_bytes()))
        reply = call_next(message, context)
        path.write_bytes(recorddict_to_proto(context.state).SerializeToString())
        return reply

    return mod


def partition(context: Context) -> int:
    return int(context.node_config["partition-id"])


def stepping_app(mods, decay=1.0, metrics=()):
    """Return an app whose nodes take a random step of their own in every round."""
    app = ClientApp(mods=mods)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        node, number = partition(context), message.content["config"]["server-round"]
        arrays = to_numpy(message.content["arrays"])
        step = np.random.default_rng([node, number]).normal(size=3) * 0.1
        trained = {"w": arrays["w"] * decay + step, "steps": arrays["steps"] + 1}
        said = MetricRecord({"num-examples": node + 1, **dict(metrics)})
        if "batches" in said:
            said["loss-sum"] = float(node + number)
        return Message(
            RecordDict({"arrays": to_record(trained), "metrics": said}), reply_to=message
        )

    return app


def pull(node, model, weights):
    """Return the way to a node's own minimum."""
    size = (node + 1) * (1 if model == "a" else -2)
    waves = np.cos(np.arange(weights.size) * (node + 1)).reshape(SHAPES[model])
    return (weights - size * waves) / 3


def pulling_app(states):
    """Return an app with two models, of which node 0 has no data for the second."""
    mod = multi_model_mod(
        holdings=lambda c: {m: partition(c) + 1 for m in SHAPES if (m, partition(c)) != ("b", 0)},
        capacity=lambda _: 2,
        loss=lambda c, m, arrays: float(np.linalg.norm(pull(partition(c), m, arrays["w"].numpy()))),
    )
    app = ClientApp(mods=[living(states), mod])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        node, model = partition(context), message.content["config"]["model"]
        arrays = to_numpy(message.content["arrays"])
        trained = {"w": arrays["w"] - pull(node, model, arrays["w"]), "n": arrays["n"] + 1}
        metrics = MetricRecord({"num-examples": node + 1, "loss": 1.0})
        return Message(RecordDict({"m": to_record(trained), "metrics": metrics}), reply_to=message)

    return app


class LinearTask(Task):
    """Logistic regression in double precision, three steps of plain SGD."""

    def __init__(self, node, model):
        inputs, classes = self.size = SIZES[model]
        rng = np.random.default_rng([node, inputs])
        self.inputs = torch.from_numpy(rng.normal(size=(5 + node, inputs)))
        self.labels = torch.from_numpy(rng.integers(0, classes, size=5 + node))

    def build_model(self):
        return torch.nn.Linear(*self.size).double()

    def train(self, model, *, seed, config):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(self.inputs), self.labels).backward()
            optimizer.step()
        return Report(len(self.labels), {"seed": float(seed % 1000)})

    def evaluate(self, model, *, config):
        return Report(len(self.labels), {"loss": 0.0})

    def validation_data(self):
        return self.inputs, self.labels


def scaffold_app(states):
    """Return the ready app, which corrects every gradient."""

    def make_tasks(context):
        tasks = {model: LinearTask(partition(context), model) for model in SIZES}
        return TaskSet(tasks, {model: len(task.labels) for model, task in tasks.items()}, 2)

    inner, around = task_client_app(make_tasks), living(states)
    return lambda message, context: around(message, context, inner)


def go_on(name, folder):
    """Go on from a checkpoint with the nodes whose states lie beside it."""
    states = folder / "states"
    states.mkdir(exist_ok=True)
    if name == "multi-scaffold":
        app = scaffold_app(states)
        models = {
            model: {"weight": np.zeros((classes, inputs)), "bias": np.zeros(classes)}
            for model, (inputs, classes) in SIZES.items()
        }
        initial = join_models(models)
    elif name.startswith("multi-"):
        app = pulling_app(states)
        initial = join_models({m: {"w": np.zeros(s), "n": np.array(0)} for m, s in SHAPES.items()})
    else:
        if name == "fedavg":
            app = stepping_app([], decay=0.9, metrics={"loss": 1.0})
        else:
            counts = {"batches": 1, "correct-share-sum": 0.5}
            app = stepping_app([living(states), dynamic_averaging_mod()], metrics=counts)
        initial = {"w": np.zeros(3), "steps": np.array(0)}
    strategy = strategy_of(name, checkpoint_dir=folder / "checkpoint", resume=True)
    return strategy.start(InProcessGrid(app, NODES), to_record(initial), num_rounds=ROUNDS)
