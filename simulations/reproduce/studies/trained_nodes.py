"""What studies need of an experiment: every node's trained layer and data, without messages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from gems_flwr import scoring
from gems_flwr.radii.layer_data import LayerData
from gems_flwr.runtime.seeding import derive_seed
from gems_flwr.spaces.output_layer import find_output_layer, unflatten_linear
from gems_flwr.wire.records import to_numpy
from simulations.config import ConfigError
from simulations.experiment.experiment import Experiment, NodeTask


@dataclass(frozen=True)
class TrainedNode:
    """A node's own model with its validation data, and its training data."""

    layer: LayerData
    inputs: torch.Tensor
    labels: torch.Tensor


def trained_nodes(experiment: Experiment, console: Console) -> list[TrainedNode]:
    """Train every node of a linear experiment as the first round of a strategy would."""
    initial = to_numpy(experiment.initial_arrays())
    output = find_output_layer(initial)
    if set(initial) != {output.weight, output.bias}:
        raise ConfigError("this study is about models that are one linear layer: model=logistic")
    nodes = []
    for number in track(
        range(experiment.config.nodes),
        "training the nodes",
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ):
        task = experiment.task(number)
        assert isinstance(task, NodeTask)
        model = task.build_model()
        task.train(
            model, seed=derive_seed(experiment.config.seed, "train", 1, str(number)), config={}
        )
        state = {name: value.detach() for name, value in model.state_dict().items()}
        held_out, held_labels = task.validation_data()
        x, y = task.training_data()
        layer = LayerData(
            state[output.weight],
            state[output.bias or ""],
            held_out.reshape(len(held_out), -1),
            held_labels,
        )
        nodes.append(TrainedNode(layer, x.reshape(len(x), -1), y))
    return nodes


def accuracy(point: NDArray, inputs: torch.Tensor, labels: torch.Tensor, classes: int) -> float:
    """Return the accuracy of a flat linear layer."""
    weight, bias = unflatten_linear(point, classes, inputs.shape[1])
    scores = inputs.double().numpy() @ weight.T + bias
    return scoring.accuracy(scores.argmax(axis=1), labels.numpy())
