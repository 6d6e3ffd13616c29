"""What a search goes by: one score of each run, and whether more of it is better."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simulations.config import ConfigError, RunConfig
from simulations.experiment.execution import first_score
from simulations.experiment.experiment import experiment_of

_LARGER_IS_BETTER = ("accuracy", "balanced_accuracy")


def check_objective(config: RunConfig, direction: Any) -> None:
    """Refuse a search for something that there is not, or for the worst.

    Parameters
    ----------
    config : RunConfig
        One of the search's runs.
    direction : object
        What the sweeper was told: ``maximize`` or ``minimize``, as a word or as Optuna's own type;
        None for a sweeper without such an option, which is left to itself.

    Raises
    ------
    ConfigError
        Names the key and the allowed values.
    """
    scores = experiment_of(config.to_json()).dataset.target.metrics
    name = config.objective or scores[0]
    if name not in scores:
        raise ConfigError(f"objective must be {' or '.join(scores)}, got {name!r}")
    wanted = "maximize" if name in _LARGER_IS_BETTER else "minimize"
    given = getattr(direction, "name", direction)
    if given not in (None, wanted):
        raise ConfigError(
            f"a search by {name} needs hydra.sweeper.direction={wanted}, got {given}: it would "
            "look for the worst"
        )


def objective(config: RunConfig, result: Mapping[str, Any]) -> float | None:
    """Return the score of a finished run that a sweeper is told; None if there is none."""
    name = config.objective or first_score(result)[0]
    value = result.get(name, result["details"].get(name))
    return None if value is None else float(value)
