"""What a hostile node sends: lies about models, neurons, balls and cones, and an app of liars.

=========  ==========================  =========================  ================================
attack     on a model                  on a ball, on neurons      on a cone
=========  ==========================  =========================  ================================
far        10,000 away, any direction  a centre so far away       inputs a thousand times as large
minus      its negative                that, radii of nothing     hardly any spread
flipped    rows of class c and 9 - c   rows exchanged; neurons    labels c called 9 - c
           of the output layer          stay
counts     that, a million times the   neurons: negatives that    a million times the samples
           samples                     claim all importance
garbage    a random one of the same    a random one of the same   random moments for every class
           length                      length
=========  ==========================  =========================  ================================
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from numpy.typing import NDArray

from gems_flwr.core import generator
from gems_flwr.core.records import ARRAYS, METRICS, NUM_EXAMPLES, QUESTION, to_numpy, to_record
from gems_flwr.networks import weight_layers
from gems_flwr.neurons.question import NEURONS
from gems_flwr.spaces import flatten_linear, space_from_arrays, unflatten_linear
from gems_flwr.spaces.cone import ClassMomentCone, LowRankCovariance, mean_values
from gems_flwr.spaces.question import META, SPACE

ATTACKS = ("none", "far", "minus", "flipped", "counts", "garbage")
# How far "far" is, and the largest number that a space may have.
FAR, LARGEST = 1e4, 1e6


class LyingApp:
    """An app whose first nodes work as honest ones do, and then change what they send.

    In dynamic averaging they claim a violation at every check.
    """

    def __init__(self, app: Any, attack: str, liars: int, seed: int) -> None:
        self.app, self.attack, self.liars, self.seed = app, attack, liars, seed

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message, truly or not."""
        node = int(context.node_config["partition-id"])
        if node >= self.liars:
            return self.app(message, context)  # type: ignore[no-any-return]
        record = message.content.get(QUESTION)
        if isinstance(record, ConfigRecord):
            asked = json.loads(str(record["text"]))
            if asked.get("send") == "violated":
                record["text"] = json.dumps(asked | {"send": "always", "measure": True})
        reply: Message = self.app(message, context)
        if reply.has_content():
            rng = generator(self.seed, "hostile", self.attack, node, message.metadata.group_id)
            lie(reply.content, self.attack, rng)
        return reply


def lie(content: RecordDict, attack: str, rng: np.random.Generator) -> None:
    """Change the model, the neurons or the space in a reply."""
    records: Any = content
    if ARRAYS in content:
        records[ARRAYS] = to_record(lie_of_model(to_numpy(records[ARRAYS]), attack, rng))
    if NEURONS in content:
        rows = to_numpy(records[NEURONS])[NEURONS]
        records[NEURONS] = to_record({NEURONS: lie_of_neurons(rows, attack, rng)})
    if SPACE in content:
        meta = json.loads(records[META]["text"])
        space: Any = space_from_arrays(to_numpy(records[SPACE]), meta)
        change = lie_of_cone if isinstance(space, ClassMomentCone) else lie_of_ball
        arrays, meta = change(space, attack, rng).to_arrays()
        records[SPACE] = to_record(arrays)
        records[META] = ConfigRecord({"text": json.dumps(meta)})
    metrics = records.get(METRICS)
    if attack == "counts" and metrics is not None and NUM_EXAMPLES in metrics:
        metrics[NUM_EXAMPLES] *= 10**6


def _moved(vector: NDArray, attack: str, rng: np.random.Generator) -> NDArray:
    """Return a vector far away in a random direction, or a random one of the same length."""
    direction = rng.normal(size=vector.size)
    direction /= np.linalg.norm(direction)
    if attack == "far":
        return np.asarray(vector + FAR * direction)
    return np.asarray(float(np.linalg.norm(vector)) * direction)


def lie_of_model(
    arrays: dict[str, NDArray], attack: str, rng: np.random.Generator
) -> dict[str, NDArray]:
    """Return what a liar sends instead of its model."""
    if attack == "minus":
        return {name: -array for name, array in arrays.items()}
    if attack in ("flipped", "counts"):
        last = weight_layers(arrays)[-1]
        return {k: a[::-1].copy() if k in last.keys else a for k, a in arrays.items()}
    flat = _moved(np.concatenate([a.ravel() for a in arrays.values()]).astype(float), attack, rng)
    parts = np.split(flat, np.cumsum([array.size for array in arrays.values()])[:-1])
    pairs = zip(arrays.items(), parts, strict=True)
    return {name: part.reshape(a.shape).astype(a.dtype) for (name, a), part in pairs}


def lie_of_neurons(rows: NDArray, attack: str, rng: np.random.Generator) -> NDArray:
    """Return what a liar sends instead of its neurons: centres, radii, importance by row."""
    rows = rows.copy()
    centers = rows[:, :-2]
    if attack in ("far", "garbage"):
        for row in centers:
            row[:] = _moved(row, attack, rng)
    if attack in ("minus", "counts"):
        centers *= -1
    if attack == "minus":
        rows[:, -2] = 1e-6
    if attack == "counts":
        rows[:, -1] = LARGEST
    return rows


def lie_of_ball(ball: Any, attack: str, rng: np.random.Generator) -> Any:
    """Return the ball that a liar sends instead of its own."""
    center, radius = ball.center, ball.radius
    if attack == "minus":
        center, radius = -center, dataclasses.replace(radius, value=1e-6)
    elif attack == "flipped":
        weight, bias = unflatten_linear(center, 10, len(center) // 10 - 1)
        center = flatten_linear(weight[::-1], bias[::-1])
    else:
        center = _moved(center, attack, rng)
    return dataclasses.replace(ball, center=np.asarray(center, np.float32), radius=radius)


def lie_of_cone(cone: Any, attack: str, rng: np.random.Generator) -> Any:
    """Return the cone of low rank that a liar sends instead of its own."""
    parts = [cone.covariance.factor(each) for each in range(len(cone.labels))]
    most = min(part.shape[1] for part in parts)
    factors = np.stack([part[:, -most:] for part in parts]).astype(np.float32)
    variances = [cone.covariance.variances(each) for each in range(len(parts))]
    deviations = np.sqrt(variances).astype(np.float32)
    means, changed = mean_values(cone), dict[str, Any]()
    if attack == "counts":
        return dataclasses.replace(cone, total_count=0, counts=cone.counts * 10**6)
    elif attack == "flipped":
        return dataclasses.replace(cone, total_count=0, labels=cone.num_classes - 1 - cone.labels)
    elif attack == "garbage":
        pick = rng.integers(len(means), size=cone.num_classes)
        changed = {
            "labels": np.arange(cone.num_classes),
            "counts": np.full(cone.num_classes, cone.counts.max()),
            "means": np.array([_moved(means[k], attack, rng) for k in pick], np.float32),
            "covariance": LowRankCovariance(factors[pick], deviations[pick]),
        }
    else:
        scale = np.float32(1e3 if attack == "far" else 1e-3)
        moved = np.clip(means * (scale if attack == "far" else 1), -LARGEST, LARGEST)
        changed = {"covariance": LowRankCovariance(scale * factors, scale * deviations)}
        changed |= {"means": moved.astype(np.float32)}
    return dataclasses.replace(cone, total_count=0, **changed)
