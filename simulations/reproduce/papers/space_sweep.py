"""Balls and ellipsoids around the nodes' models of one run, for every ε at once.

A run with balls keeps every node's own model. Around these, on the nodes' validation data, spaces
for other ε, other radii and other shapes are a matter of seconds, without training or messages.
Numbers are those of whole runs: directions and drawn samples have the same seeds.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import OmegaConf

from gems_flwr import scoring
from gems_flwr.errors import NotGoodEnoughError
from gems_flwr.intersect.intersect import intersect
from gems_flwr.intersect.result import Intersection
from gems_flwr.radii.fisher_axes import DAMPING, linear_fisher, relative_axes
from gems_flwr.radii.layer_data import LayerData
from gems_flwr.radii.layer_radius import build_ball, radius_curve
from gems_flwr.radii.quality import Quality
from gems_flwr.runtime.seeding import derive_seed
from gems_flwr.spaces.ball import BallSpace
from gems_flwr.spaces.ellipsoid import EllipsoidSpace
from gems_flwr.spaces.output_layer import unflatten_linear
from gems_flwr.spaces.radius import Radius
from gems_flwr.spaces.space_files import load_space
from simulations.config import RunConfig
from simulations.experiment.experiment import Experiment, NodeTask
from simulations.experiment.training import torch_threads
from simulations.reproduce.papers.findings import Finding

DIRECTIONS = 500
FISHER_SAMPLES = 200


@dataclasses.dataclass(frozen=True)
class SweptNode:
    """A node's layer with its validation data, and radii for every ε: of balls, of ellipsoids."""

    layer: LayerData
    seed: int
    ball: NDArray[np.float64]
    axes: NDArray[np.float64]
    ellipsoid: NDArray[np.float64]


def config_of(folder: Path) -> RunConfig:
    """Return the config of a finished run."""
    values: Any = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
    return RunConfig.from_json(json.dumps(values))


def sweep(folder: Path, epsilons: Sequence[float], radii: Sequence[float]) -> Iterator[Finding]:
    """Yield findings of one seed from a finished run with balls.

    Parameters
    ----------
    folder : Path
        Of the run.
    epsilons : sequence of float
        For which balls and ellipsoids are intersected, as in the paper.
    radii : sequence of float
        For which sampled and worst-direction balls are compared, node by node.
    """
    experiment = Experiment(config_of(folder))
    with torch_threads(experiment.config.backend.threads):
        nodes = list(_nodes(folder, experiment))
        for epsilon in epsilons:
            yield from _intersected(nodes, epsilon, experiment)
        for epsilon in radii:
            yield from _promised(nodes, epsilon, experiment)


def _setting(epsilon: float, experiment: Experiment) -> str:
    return f"MNIST, {experiment.config.nodes} nodes, ε = {epsilon:g}"


def _nodes(folder: Path, experiment: Experiment) -> Iterator[SweptNode]:
    classes, seed = experiment.dataset.classes, experiment.config.seed
    for number, path in enumerate(sorted((folder / "spaces").iterdir())):
        space = load_space(path)
        assert isinstance(space, BallSpace)
        task = experiment.task(number)
        assert isinstance(task, NodeTask)
        inputs, labels = task.validation_data()
        inputs = inputs.reshape(len(inputs), -1)
        weight, bias = unflatten_linear(space.center, classes, inputs.shape[1])
        layer = LayerData(
            torch.from_numpy(weight.astype(np.float32)),
            torch.from_numpy(bias.astype(np.float32)),
            inputs,
            labels,
        )
        own = derive_seed(seed, "space", 1, str(number)) % 2**63
        axes = relative_axes(linear_fisher(layer, "sampled", own, FISHER_SAMPLES), damping=DAMPING)
        shaped = dataclasses.replace(layer, axes=axes)
        curves = [
            radius_curve(each, "sampled", directions=DIRECTIONS, seed=own).radii
            for each in (layer, shaped)
        ]
        yield SweptNode(layer, own, curves[0], axes.double().numpy(), curves[1])


def _radius(radii: NDArray[np.float64], epsilon: float) -> Radius:
    from gems_flwr.radii.rays import RadiusCurve

    return Radius(RadiusCurve(radii).radius(epsilon), "sampled", epsilon, DIRECTIONS)


def _intersected(
    nodes: Sequence[SweptNode], epsilon: float, experiment: Experiment
) -> Iterator[Finding]:
    """Yield what the paper's two spaces give at one ε; nothing where a node is not that good."""
    test = experiment.dataset.test
    inputs = test.features.reshape(len(test), -1).astype(np.float64) * experiment.dataset.scale
    try:
        ball = [_radius(node.ball, epsilon) for node in nodes]
        long = [_radius(node.ellipsoid, epsilon) for node in nodes]
    except NotGoodEnoughError:
        return
    spaces: dict[str, Sequence[BallSpace | EllipsoidSpace]] = {
        "GEMS ball": [BallSpace(n.layer.center, r) for n, r in zip(nodes, ball, strict=True)],
        "GEMS ellipsoid": [
            EllipsoidSpace(n.layer.center, (n.axes * r.value).astype(np.float32), r)
            for n, r in zip(nodes, long, strict=True)
        ],
    }
    for method, each in spaces.items():
        found = intersect(each)
        values = {
            "accuracy": _accuracy(found, inputs, test.labels, experiment.dataset.classes),
            "is average": float(found.is_average),
            "empty": float(found.empty),
        }
        values |= {f"radius of node {k}": space.radius.value for k, space in enumerate(each)}
        for quantity, value in values.items():
            yield Finding(_setting(epsilon, experiment), method, quantity, [value], x=epsilon)


def _promised(
    nodes: Sequence[SweptNode], epsilon: float, experiment: Experiment
) -> Iterator[Finding]:
    """Yield radii of balls, and how good their common model is on each node's own data."""
    for method in ("sampled", "worst"):
        if method == "sampled":
            balls = [BallSpace(n.layer.center, _radius(n.ball, epsilon)) for n in nodes]
        else:
            balls = [build_ball(node.layer, Quality(epsilon), "worst") for node in nodes]
        found = intersect(balls)
        values = {"empty": float(found.empty)}
        for number, (node, ball) in enumerate(zip(nodes, balls, strict=True)):
            inputs, labels = node.layer.inputs.double().numpy(), node.layer.labels.numpy()
            score = _accuracy(found, inputs, labels, experiment.dataset.classes)
            values[f"radius of node {number}"] = ball.radius.value
            values[f"accuracy of node {number}"] = score
        for quantity, value in values.items():
            yield Finding(_setting(epsilon, experiment), f"radii {method}", quantity, [value])


def _accuracy(
    found: Intersection, inputs: NDArray[np.float64], labels: NDArray[Any], classes: int
) -> float:
    weight, bias = unflatten_linear(found.point, classes, inputs.shape[1])
    return scoring.accuracy((inputs @ weight.T + bias).argmax(axis=1), labels)
