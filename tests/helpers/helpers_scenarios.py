"""Every strategy on tiny nodes that need no training to speak of: what the battery plays.

Five nodes. Their models are a few numbers, their data some dozen samples, so that a whole run takes
some hundredths of a second.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from helpers_blobs import both_parts
from helpers_multi_model import Several, several_mod
from torch import nn

from gems_flwr import (
    Ball,
    Cone,
    DynamicAveraging,
    Ellipsoid,
    Ensemble,
    FedAvg,
    Gems,
    LayerwiseGems,
    LocalModels,
    Means,
    MergedModels,
    MultiModel,
    Neurons,
    NoSync,
    OneShotAverage,
    PeriodicAveraging,
    Pooled,
    PrivateGems,
    SecureSum,
    Serial,
    Tolerance,
    Tune,
)
from gems_flwr.averaging import RobustRule
from gems_flwr.core.records import pack_name, pack_reply, to_numpy, to_record
from gems_flwr.node import NodeOptions, node_name
from gems_flwr.node.limits import UNLIMITED
from gems_flwr.node.mod import respond
from gems_flwr.node.scaffold import CORRECTION, GRADIENT, vector_in, vector_record
from gems_flwr.strategies.multi_model import join_models

NODES = 5
CLASSES, FEATURES, HIDDEN = 3, 3, 3
CENTERS = np.random.default_rng(5).normal(size=(CLASSES, FEATURES)) * 3


@dataclass(frozen=True)
class Scenario:
    """A strategy, the nodes that it is played with, and for how many rounds."""

    make: Callable[..., Any]
    app: Callable[[], Any]
    initial: Callable[[], ArrayRecord]
    rounds: int = 2

    def strategy(self, folder=None, **options):
        return self.make(
            min_nodes=2, tolerance=Tolerance(wait_seconds=0), checkpoint_dir=folder, **options
        )


def number(context):
    return int(context.node_config["partition-id"])


def blobs(node, per_class=12):
    rng = np.random.default_rng(node)
    y = np.repeat(np.arange(CLASSES), per_class)
    x = CENTERS[y] + rng.normal(size=(len(y), FEATURES))
    return torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y)


def data(context: Context):
    return blobs(number(context))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def layer():
    torch.manual_seed(0)
    return nn.Linear(FEATURES, CLASSES)


def arrays_of(build):
    return ArrayRecord(build().state_dict())


def nudged(message, context, frozen=0):
    """Train: move every weight above the frozen layers a little, each node its own way."""
    arrays = to_numpy(message.content["arrays"])
    rng = np.random.default_rng([number(context), 7])
    keep = list(arrays)[: 2 * frozen]
    return {
        key: array
        if key in keep or array.dtype.kind != "f"
        else (array * 0.9 + 0.1 * rng.normal(size=array.shape)).astype(array.dtype)
        for key, array in arrays.items()
    }


def fitted(trained, context):
    """Give the output layer what is best for the node, so that its own model is good enough."""
    x, y = (part.numpy() for part in data(context))
    *below, weight, bias = trained
    for matrix, offset in zip(below[::2], below[1::2], strict=True):
        x = np.maximum(x @ trained[matrix].T + trained[offset], 0)
    inputs = np.column_stack([x, np.ones(len(x))]).astype(np.float64)
    best = np.linalg.lstsq(inputs, np.eye(CLASSES)[y], rcond=1e-2)[0].astype(np.float32)
    return trained | {weight: best[:-1].T, bias: best[-1]}


def handler(fit=False):
    """Return a train handler; one that fits gives the output layer what is best for the node."""

    def train(message: Message, context: Context) -> Message:
        node = number(context)
        trained = nudged(message, context, message.content["config"].get("frozen-layers", 0))
        trained = fitted(trained, context) if fit else trained
        metrics = {"num-examples": 20 + node, "loss": 1.0, "loss-sum": 2.0, "batches": 2}
        content = pack_name(node_name(context))
        content["arrays"] = to_record(trained)
        content["metrics"] = MetricRecord({**metrics, "correct-share-sum": 1.0})
        return Message(content, reply_to=message)

    return train


def app_of(limits=UNLIMITED, *, model=None, fit=False) -> ClientApp:
    """Return an app with the common handlers and the one mod."""
    options = NodeOptions(both_parts(data), model, limits=limits, examples=raw)

    def mod(message, context, call_next):
        return respond(options, message, context, call_next)

    app = ClientApp(mods=[mod])
    app.train()(handler(fit))

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        total = sum(float(a.numpy().sum()) for a in message.content["arrays"].values())
        content = pack_reply(
            {"sum": total}, num_examples=number(context) + 1, name=node_name(context)
        )
        return Message(content, reply_to=message)

    return app


def raw(context):
    return tuple(part.numpy() for part in data(context))


MODELS = {"a": (3,), "b": (2, 2)}


def several_models():
    models = {n: {"w": np.zeros(s, np.float32), "n": np.array(0)} for n, s in MODELS.items()}
    return to_record(join_models(models))


def several_app(limits=UNLIMITED):
    """Nodes with two models each; for SCAFFOLD the handler reports a gradient, and is corrected."""

    def several(context):
        node = number(context)
        return Several(dict.fromkeys(MODELS, 10 + node), 2, lambda name, arrays: 1.0 + node)

    mod = several_mod(several, limits=limits)
    app = ClientApp(mods=[mod])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        node = number(context)
        arrays = to_numpy(message.content["arrays"])
        pull = (arrays["w"] - node - 1).astype(np.float32) / 4
        correction = vector_in(message.content.get(CORRECTION))
        if correction is not None:
            pull = pull + 0.25 * correction.reshape(pull.shape)
        trained = {"w": (arrays["w"] - pull).astype(np.float32), "n": arrays["n"] + 1}
        metrics = MetricRecord({"num-examples": node + 1, "loss": 1.0})
        content = RecordDict({"m": to_record(trained), "metrics": metrics})
        if correction is not None:
            content[GRADIENT] = vector_record(pull.ravel())
        return Message(content, reply_to=message)

    return app


def fit(arrays, features, labels, seed):
    """A server's training, as careless as anybody's: labels are taken for what they should be."""
    hot = np.eye(CLASSES)[labels]
    assert features.dtype == np.float32
    weight = (hot.T @ features / len(labels)).astype(np.float32)
    return {"weight": weight, "bias": np.zeros(CLASSES, np.float32)}


def learn(server_round, arrays, memory):
    return arrays, memory, {"loss-sum": 1.0}


PUBLIC = tuple(part.numpy() for part in blobs(99, 4))
TUNED = Tune(*PUBLIC, model=network)
CAPPED = Tolerance(wait_seconds=0, max_examples=20)


def nodes_of(app, initial, rounds=2):
    """Return what makes scenarios on such nodes, from a strategy and its options."""

    def scenario(make, *, rounds=rounds, **options):
        return Scenario(partial(make, **options), app, initial, rounds)

    return scenario


LAYER, NETWORK = partial(arrays_of, layer), partial(arrays_of, network)
plain = nodes_of(app_of, LAYER)
net = nodes_of(partial(app_of, model=network), NETWORK)
space = nodes_of(partial(app_of, fit=True), LAYER, 1)
deep = nodes_of(partial(app_of, model=network, fit=True), NETWORK, 3)
several = nodes_of(several_app, several_models, 3)
small = partial(Cone, min_count=4)
noised = Cone(dp_epsilon=20.0, dp_clip=9.0, dp_seeded=True)
Merged = partial(net, MergedModels, rounds=1)
Layers = partial(LayerwiseGems, neurons=Neurons(directions=5))
Dynamic = partial(DynamicAveraging, delta=0.02)

SCENARIOS = {
    "FedAvg": plain(FedAvg, fraction_evaluate=1.0),
    "FedAvg, capped": net(FedAvg, tolerance=CAPPED),
    "FedAvg, int8": net(FedAvg, compress="int8"),
    "FedAvg, trimmed": plain(FedAvg, robust="trimmed_mean"),
    "FedAvg, Multi-Krum": net(FedAvg, robust=RobustRule("multi_krum", liars=1)),
    "OneShotAverage, tuned": net(OneShotAverage, tune=TUNED),
    "MergedModels, regmean": Merged(method="regmean"),
    "MergedModels, fisher": Merged(method="fisher"),
    "LocalModels, tuned": net(LocalModels, tune=TUNED),
    "Ensemble": net(Ensemble),
    "PeriodicAveraging": plain(PeriodicAveraging, weighted=True),
    "PeriodicAveraging, median": plain(
        PeriodicAveraging, weighted=True, robust="geometric_median", rounds=3
    ),
    "DynamicAveraging, local": plain(Dynamic, rounds=3),
    "DynamicAveraging, total": plain(Dynamic, condition="total", compress="int4", rounds=3),
    "DynamicAveraging, robust": plain(Dynamic, robust="median", rounds=3),
    "NoSync": plain(NoSync),
    "Serial": plain(Serial, learn=learn),
    "Pooled": plain(Pooled, fit=fit, input_shape=(FEATURES,)),
    **{
        f"MultiModel, {sampling}": several(MultiModel, budget=4, sampling=sampling)
        for sampling in ("random", "lvr", "stale", "mifa", "scaffold")
    },
    "MultiModel, capped": several(MultiModel, budget=4, sampling="gvr", tolerance=CAPPED),
    "Gems, ball": space(Gems, space=Ball(directions=10), verify=True),
    "Gems, ball, robust": space(Gems, space=Ball(directions=10), robust=True),
    "Gems, ellipsoid": space(Gems, space=Ellipsoid(directions=10), robust=True),
    "Gems, ellipsoid, auto": space(Gems, space=Ellipsoid(directions=10, epsilon="auto")),
    "Gems, cone": space(Gems, space=small(rank="full"), verify=True),
    "Gems, cone, automatic": space(Gems, verify=True),
    "Gems, cone, private": space(Gems, space=noised),
    "Gems, cone, capped": space(Gems, space=small(), tolerance=CAPPED),
    "Gems, cone, robust": space(Gems, space=small(rank=2), robust=True),
    "Gems, means": space(Gems, space=Means(groups=3), head="lda"),
    "Gems, chosen": space(Gems, space=small(), head="auto", robust=True),
    "Gems, refined": space(Gems, space=small(), refine=2, robust=True),
    "Gems, sums": space(Gems, space=small(sums=True), verify=True),
    "Gems, sums, refined": space(Gems, space=small(sums=True), refine=2, tolerance=CAPPED),
    "LayerwiseGems": deep(Layers, head=Gems(verify=True)),
    "LayerwiseGems, robust": deep(Layers, clusters=4, head=Gems(robust=True)),
    "LayerwiseGems, balls": deep(Layers, head=Ball(epsilon=0.05, directions=5)),
}
# Played for their questions; single summands cannot be told from lies under masks.
MASKED = {
    "Gems, masked": space(Gems, space=small(sums=True, sketch=2), refine=1, secure=SecureSum()),
    "FedAvg, masked": plain(FedAvg, secure=SecureSum()),
    "PrivateGems": space(
        PrivateGems, epsilon=20.0, steps=2, secure=SecureSum(), dp_seeded=True, rounds=5
    ),
}
