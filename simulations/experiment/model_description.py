"""What ``model.json`` says of a run's models, so that they can be used without the run's data."""

from __future__ import annotations

from gems_flwr.exporting.description import (
    ModelDescription,
    RunDescription,
    Together,
    versions,
)
from gems_flwr.server.members import ONLY_MODEL, split_models
from gems_flwr.typing import Arrays
from simulations.config import RunConfig
from simulations.experiment.experiment import Experiment
from simulations.experiment.multi_model_experiment import MultiModelExperiment


def describe_models(experiment: Experiment, arrays: Arrays) -> RunDescription:
    """Return the description of a finished run's models.

    Parameters
    ----------
    experiment : Experiment
        The run.
    arrays : mapping from str to ndarray
        What came of it.
    """
    config = experiment.config
    if isinstance(experiment, MultiModelExperiment):
        models = {name: _described(task) for name, task in experiment.tasks.items()}
        return RunDescription(models, None, source_of(config))
    together: Together | None = None
    if list(split_models(arrays)) != [ONLY_MODEL]:
        # The others keep a model for each node.
        together = config.strategy.get("vote", "each")
    return RunDescription({ONLY_MODEL: _described(experiment)}, together, source_of(config))


def _described(experiment: Experiment) -> ModelDescription:
    data = experiment.dataset
    # Not what only Hydra reads.
    network = {
        k: v for k, v in experiment.config.model.items() if k not in ("_convert_", "_partial_")
    }
    return ModelDescription(data.input_shape, data.classes, data.scale, network)


def source_of(config: RunConfig) -> dict[str, str]:
    """Return where a model comes from, in a few words."""
    names = {group: config.names[group] for group in ("strategy", "dataset", "partition", "model")}
    numbers = {"nodes": str(config.nodes), "seed": str(config.seed)}
    made = {f"trained with {name}": text for name, text in versions().items()}
    return {"run": config.run_name(), **names, **numbers, **made}
