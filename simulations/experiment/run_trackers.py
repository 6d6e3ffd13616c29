"""The trackers of a run, made from its config: ``+tracking=mlflow``, or several at once.

Each job of a multirun is a run of its own, named as its folder. Parameters are the config itself by
flat names (``strategy.space.rank``), with the chosen files as ``strategy``, ``dataset`` and so on:
runs can be compared by whatever differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hydra.utils import get_class

from gems_flwr.runtime.checkpoint import CheckpointFolder
from gems_flwr.tracking.run_ids import forget_ids
from gems_flwr.tracking.tracker import Tracker
from simulations.config import NOT_IN_NAME, RunConfig

# Files of a finished run; whatever else stands in its folder is not the tracker's business.
_ENDINGS = (".json", ".jsonl", ".yaml", ".safetensors", ".md")


def trackers_of(config: RunConfig, say: Callable[[str], None] | None = None) -> list[Tracker]:
    """Return a run's trackers.

    Parameters
    ----------
    config : RunConfig
        The run.
    say : callable, optional
        Who is told, once, that a tracker is in trouble; by default Flower's log.

    Raises
    ------
    NotInstalledError
        If a tracker's library is missing; the message says which extra brings it.
    """
    trackers = []
    for options in config.tracking.values():
        target, given = get_class(options["_target_"]), _without(options, "_target_")
        tracker = target(**given, name=config.run_name(), config=run_parameters(config))
        assert isinstance(tracker, Tracker)
        if say is not None:
            tracker.say = say
        trackers.append(tracker)
    return trackers


def run_parameters(config: RunConfig) -> dict[str, Any]:
    """Return what runs are compared by: all that can change a result, and the label."""
    values = _plain(_without(asdict(config), *NOT_IN_NAME, "names"))
    groups = {group: each for group, each in values.items() if isinstance(each, dict)}
    # The chosen file stands beside its options.
    options = {f"{group}.{key}": v for group, each in groups.items() for key, v in each.items()}
    label = {} if config.label is None else {"label": config.label}
    return {**_without(values, *groups), **options, **config.names, **label}


def give_files(trackers: Sequence[Tracker], folder: Path) -> None:
    """Offer the files of a finished run to its trackers."""
    files = sorted(
        path
        for path in folder.iterdir()
        if path.suffix in _ENDINGS and not path.name.startswith((".", "tracking", "checkpoint"))
    )
    for tracker in trackers:
        tracker.log_files(files)


def start_again(folder: Path) -> None:
    """Forget what an interrupted run has left: the next one is new, for trackers as well."""
    CheckpointFolder(folder).clear()
    forget_ids(folder)


def _without(values: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in keys}


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested options without what is Hydra's: the chosen file says which class it is."""
    return {
        key: _plain(value) if isinstance(value, Mapping) else value
        for key, value in values.items()
        if key not in ("_target_", "_convert_")
    }
