"""What a run of the simulations adds to its model card: data by node and class, the networks."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from gems_flwr.exporting.description import ModelDescription, RunDescription
from gems_flwr.model_card import CardModel, NodeData
from gems_flwr.server.members import ONLY_MODEL, split_models
from gems_flwr.server.state import RunResult
from gems_flwr.wire.model_replies import single_numbers
from gems_flwr.wire.records import to_numpy
from simulations.config import NOT_IN_NAME
from simulations.experiment.experiment import Experiment

# What a command holds for the sake of the machine that it ran on.
_NOT_TOLD = ("hydra", *NOT_IN_NAME)


def what_is_known(
    experiment: Experiment,
    result: RunResult,
    described: RunDescription,
    counts: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return fields of the card that the result itself does not have.

    Parameters
    ----------
    experiment, result, described
        The run, what came of it, and what its models are.
    counts : mapping, optional
        What ``partition.json`` holds, if the nodes are simulated; real ones have said what they
        wanted to.
    """
    config = experiment.config
    known: dict[str, Any] = {
        "title": config.run_name(),
        "data": config.names["dataset"],
        "models": _models(result, described),
        "simulated": counts is not None,
    }
    if counts is not None:
        known["partition"] = config.names["partition"]
        known["nodes"] = {
            str(node["name"]): NodeData(sum(node["train"]), node["train"])
            for node in counts["nodes"]
        }
        known["ranges"] = counts.get("edges")
    return known


def _models(result: RunResult, described: RunDescription) -> dict[str, CardModel]:
    scores = single_numbers(result.history[-1].server_metrics)
    models = {}
    for name, arrays in split_models(to_numpy(result.arrays)).items():
        shapes = {key: tuple(array.shape) for key, array in arrays.items()}
        one = described.models.get(name) or described.models[ONLY_MODEL]
        models[name] = dataclasses.replace(
            _card_model(one, shapes), score=scores.get(f"accuracy/{name}")
        )
    return models


def _card_model(one: ModelDescription, shapes: Mapping[str, tuple[int, ...]]) -> CardModel:
    options = {key: value for key, value in one.network.items() if key != "_target_"}
    arguments = ", ".join(f"{key}={value!r}" for key, value in sorted(options.items()))
    return CardModel(
        shapes,
        input_shape=tuple(one.input_shape),
        scale=one.scale,
        classes=one.classes,
        network=f"{one.network.get('_target_')}({arguments})",
    )


def told_overrides(overrides: list[str]) -> list[str]:
    """Return the overrides of a command that change its result.

    No paths of the machine, no addresses of trackers or clusters.
    """
    keys = [each.lstrip("+~").partition("=")[0] for each in overrides]
    return [
        override
        for override, key in zip(overrides, keys, strict=True)
        if re.split("[./@]", key)[0] not in _NOT_TOLD and key != "backend.address"
    ]
