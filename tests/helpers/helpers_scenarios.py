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
from torch import nn

from gems_flwr.client.dynamic_averaging_mod import dynamic_averaging_mod
from gems_flwr.client.fault_reply_mod import fault_reply_mod, node_name
from gems_flwr.client.good_enough_mod import good_enough_mod
from gems_flwr.client.limits import UNLIMITED
from gems_flwr.client.multi_model_mod import multi_model_mod
from gems_flwr.client.statistics_mod import statistics_mod
from gems_flwr.server.members import join_models
from gems_flwr.strategies.dynamic_averaging import DynamicAveraging
from gems_flwr.strategies.ensemble import Ensemble
from gems_flwr.strategies.fedavg import FedAvg
from gems_flwr.strategies.gems import Gems
from gems_flwr.strategies.layerwise_gems import LayerwiseGems
from gems_flwr.strategies.local_models import LocalModels
from gems_flwr.strategies.merged_models import MergedModels
from gems_flwr.strategies.multi_model.multi_model import MultiModel
from gems_flwr.strategies.nosync import NoSync
from gems_flwr.strategies.one_shot_average import OneShotAverage
from gems_flwr.strategies.periodic_averaging import PeriodicAveraging
from gems_flwr.strategies.pooled import Pooled
from gems_flwr.strategies.serial import Serial
from gems_flwr.wire.asking import frozen_layers, requested_space
from gems_flwr.wire.model_replies import pack_examples_reply, pack_metrics_reply, pack_name
from gems_flwr.wire.multi_model_replies import put_gradient
from gems_flwr.wire.multi_model_requests import gradient_correction
from gems_flwr.wire.records import to_numpy, to_record
from gems_flwr.wire.requests import Neurons
from gems_flwr.wire.space_requests import Ball, Cone, Ellipsoid

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
        return self.make(min_nodes=2, wait_seconds=0, checkpoint_dir=folder, **options)


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


def handler(message: Message, context: Context) -> Message:
    node = number(context)
    trained = nudged(message, context, frozen_layers(message.content))
    if requested_space(message.content) is not None:
        trained = fitted(trained, context)
    metrics = {"num-examples": 20 + node, "loss": 1.0, "loss-sum": 2.0, "batches": 2}
    content = pack_name(node_name(context))
    content["arrays"] = to_record(trained)
    content["metrics"] = MetricRecord({**metrics, "correct-share-sum": 1.0})
    return Message(content, reply_to=message)


def app_of(*mods) -> ClientApp:
    """Return an app with the common handlers, and mods around training."""
    app = ClientApp()
    app.train(mods=[fault_reply_mod, *mods])(handler)

    @app.evaluate(mods=[fault_reply_mod])
    def evaluate(message: Message, context: Context) -> Message:
        total = sum(float(a.numpy().sum()) for a in message.content["arrays"].values())
        content = pack_metrics_reply(
            {"sum": total}, num_examples=number(context) + 1, name=node_name(context)
        )
        return Message(content, reply_to=message)

    @app.query("share_examples", mods=[fault_reply_mod])
    def share(message: Message, context: Context) -> Message:
        x, y = data(context)
        content = pack_examples_reply(x.numpy(), y.numpy(), name=node_name(context))
        return Message(content, reply_to=message)

    return app


MODELS = {"a": (3,), "b": (2, 2)}


def several_models():
    models = {n: {"w": np.zeros(s, np.float32), "n": np.array(0)} for n, s in MODELS.items()}
    return to_record(join_models(models))


def several_app():
    """Nodes with two models each; for SCAFFOLD the handler reports a gradient, and is corrected."""

    def train(message: Message, context: Context) -> Message:
        node = number(context)
        arrays = to_numpy(message.content["arrays"])
        pull = (arrays["w"] - node - 1).astype(np.float32) / 4
        correction = gradient_correction(message.content)
        if correction is not None:
            pull = pull + 0.25 * correction.reshape(pull.shape)
        trained = {"w": (arrays["w"] - pull).astype(np.float32), "n": arrays["n"] + 1}
        metrics = MetricRecord({"num-examples": node + 1, "loss": 1.0})
        content = RecordDict({"m": to_record(trained), "metrics": metrics})
        if correction is not None:
            put_gradient(content, pull.ravel())
        return Message(content, reply_to=message)

    app = ClientApp(
        mods=[
            multi_model_mod(
                holdings=lambda context: dict.fromkeys(MODELS, 10 + number(context)),
                capacity=lambda _: 2,
                loss=lambda context, name, arrays: 1.0 + number(context),
            )
        ]
    )
    app.train()(train)

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
plain = partial(Scenario, app=app_of, initial=partial(arrays_of, layer))
net = partial(Scenario, app=app_of, initial=partial(arrays_of, network))
space = partial(
    Scenario,
    app=lambda: app_of(good_enough_mod(both_parts(data), limits=UNLIMITED)),
    initial=partial(arrays_of, layer),
    rounds=1,
)
deep = partial(
    Scenario,
    app=lambda: app_of(good_enough_mod(both_parts(data), model=network, limits=UNLIMITED)),
    initial=partial(arrays_of, network),
)
merged = partial(
    Scenario,
    app=lambda: app_of(statistics_mod(both_parts(data), model=network, limits=UNLIMITED)),
    initial=partial(arrays_of, network),
    rounds=1,
)
local = partial(
    Scenario, app=lambda: app_of(dynamic_averaging_mod()), initial=partial(arrays_of, layer)
)
several = partial(Scenario, app=several_app, initial=several_models, rounds=3)
small = partial(Cone, min_count=4)
Layers = partial(
    LayerwiseGems, neurons=Neurons(directions=5), clusters=4, max_hidden=None, head=small()
)
TUNED = {"tune": 12, "public_data": PUBLIC}

SCENARIOS = {
    "FedAvg": plain(partial(FedAvg, fraction_evaluate=1.0)),
    "FedAvg, capped": net(partial(FedAvg, max_examples=20)),
    "FedAvg, trimmed": plain(partial(FedAvg, robust="trimmed_mean")),
    "FedAvg, Multi-Krum": net(partial(FedAvg, robust="multi_krum", liars=1)),
    "OneShotAverage, tuned": net(partial(OneShotAverage, build_model=network, **TUNED)),
    "MergedModels, regmean": merged(partial(MergedModels, method="regmean")),
    "MergedModels, fisher": merged(partial(MergedModels, method="fisher")),
    "MergedModels, kfac": merged(partial(MergedModels, method="kfac")),
    "MergedModels, matching": merged(partial(MergedModels, method="matching")),
    "MergedModels, FedFisher": merged(
        partial(
            MergedModels,
            method="fedfisher_diagonal",
            steps=20,
            choose=12,
            public_data=PUBLIC,
            build_model=network,
        )
    ),
    "MergedModels, compressed": merged(
        partial(MergedModels, method="fedfisher_kfac", steps=20, statistics_share=2.0)
    ),
    "LocalModels, tuned": net(partial(LocalModels, build_model=network, **TUNED)),
    "Ensemble": net(Ensemble),
    "PeriodicAveraging": local(partial(PeriodicAveraging, weighted=True)),
    "PeriodicAveraging, median": local(
        partial(PeriodicAveraging, weighted=True, robust="geometric_median"), rounds=3
    ),
    "DynamicAveraging, local": local(partial(DynamicAveraging, delta=0.02), rounds=3),
    "DynamicAveraging, total": local(
        partial(DynamicAveraging, delta=0.02, condition="total", order="farthest"), rounds=3
    ),
    "DynamicAveraging, following": local(
        partial(DynamicAveraging, delta=0.05, follow_loss=0.5, max_examples=20), rounds=3
    ),
    "DynamicAveraging, steered": local(
        partial(DynamicAveraging, condition="total", delta=0.02, target_rate=0.5), rounds=3
    ),
    "DynamicAveraging, robust": local(
        partial(DynamicAveraging, delta=0.02, robust="median"), rounds=3
    ),
    "NoSync": local(NoSync),
    "Serial": plain(partial(Serial, learn=learn)),
    "Pooled": plain(partial(Pooled, fit=fit, input_shape=(FEATURES,))),
    **{
        f"MultiModel, {sampling}": several(partial(MultiModel, budget=4, sampling=sampling))
        for sampling in ("random", "full", "lvr", "gvr", "stale", "fedvarp", "mifa", "scaffold")
    },
    "MultiModel, capped": several(partial(MultiModel, budget=4, sampling="lvr", max_examples=9)),
    "Gems, ball": space(partial(Gems, space=Ball(directions=10), verify=True)),
    "Gems, ball, robust": space(
        partial(Gems, space=Ball(directions=10), robust=True, on_empty="subset")
    ),
    "Gems, ball, retrained": space(
        partial(
            Gems,
            space=Ball(epsilon=0.9, radius="certified"),
            on_empty="retrain",
            retrains=2,
            initialise=lambda _: to_numpy(arrays_of(layer)),
        )
    ),
    "Gems, ellipsoid": space(partial(Gems, space=Ellipsoid(directions=10), robust=True)),
    "Gems, ellipsoid, auto": space(partial(Gems, space=Ellipsoid(directions=10), epsilon="auto")),
    "Gems, ball, relaxed": space(partial(Gems, space=Ball(directions=10), on_empty="relax")),
    "Gems, cone": space(partial(Gems, space=small(rank="full"), verify=True)),
    "Gems, cone, automatic": space(partial(Gems, verify=True)),
    "Gems, cone, private": space(
        partial(Gems, space=Cone(dp_epsilon=20.0, dp_clip=9.0, dp_seeded=True))
    ),
    "Gems, cone, capped": space(
        partial(Gems, space=small(), max_examples=20, class_weight="balanced")
    ),
    "Gems, cone, robust": space(partial(Gems, space=small(rank=2), robust=True)),
    "Gems, cone, audit": space(partial(Gems, space=small(rank=1, clusters=2), audit=True)),
    "Gems, sums": space(partial(Gems, space=small(sums=True))),
    "Gems, sums, capped": space(partial(Gems, space=small(sums=True), max_examples=20)),
    "LayerwiseGems, kmeans": deep(partial(Layers, verify=True)),
    "LayerwiseGems, robust": deep(partial(Layers, merge="concat", robust=True)),
    "LayerwiseGems, verified": deep(
        partial(Layers, merge="verified", neurons=Neurons(directions=5, outgoing=True))
    ),
    "LayerwiseGems, concat": deep(partial(Layers, merge="concat", max_hidden=4)),
    "LayerwiseGems, balls": deep(
        partial(
            LayerwiseGems,
            neurons=Neurons(directions=5),
            max_hidden=None,
            head=Ball(epsilon=0.05, directions=5),
        )
    ),
    "LayerwiseGems, same widths": deep(partial(Layers, max_hidden="same", robust=True)),
}
