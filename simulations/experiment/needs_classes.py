"""What a run asks for that only classes have, refused where labels are numbers.

Partitions say for themselves what they go by. All the rest is here, so that it is said before the
first message and not after the last round.
"""

from __future__ import annotations

from hydra.utils import get_class

from gems_flwr.targets import Classes, Numbers
from simulations.config import ConfigError, RunConfig

_INSTEAD = "fedavg, one_shot_average, local, global, dynamic, periodic, nosync or serial"


def refuse_without_classes(config: RunConfig) -> None:
    """Refuse what cannot be done with numbers.

    Parameters
    ----------
    config : RunConfig
        Of a run whose data set has numbers for labels.

    Raises
    ------
    ConfigError
        Names the key, and what to take instead.
    """
    names, stop = config.names, config.stop
    why = f"dataset={names['dataset']} has numbers for labels"
    strategy = get_class(config.strategy["_target_"])
    if config.multi_model.tasks:
        raise ConfigError(
            f"{why}, and multi_model.tasks compares accuracies: train it alone, with "
            f"multi_model.tasks=[] and strategy={_INSTEAD}"
        )
    if getattr(strategy, "needs_classes", False):
        raise ConfigError(f"{why}, and strategy={names['strategy']} needs classes: take {_INSTEAD}")
    if config.strategy.get("tune"):
        raise ConfigError(f"{why}, and tuning is for classes: set strategy.tune=0")
    if config.train_options.subclasses > 1:
        raise ConfigError(f"{why}, and no classes to be cut: set train.subclasses=1")
    drift = config.stream.drift
    if (drift.rounds or drift.probability) and drift.kind == "labels":
        raise ConfigError(f"{why}, which cannot be permuted: set stream.drift.kind=pixels")
    watched = stop.target is not None or stop.patience is not None
    if watched and stop.metric in set(Classes.metrics) - set(Numbers.metrics):
        raise ConfigError(
            f"{why} and no {stop.metric}: set stop.metric={Numbers.metrics[0]} stop.goal=min"
        )
