"""The trackers of a run's config.

A run may have several trackers (``+tracking=mlflow``). Each job of a multirun is a run of its own,
named as its folder. Parameters are the config itself by flat names (``strategy.space.rank``), with
the chosen files as ``strategy``, ``dataset`` and so on: runs can be compared by whatever differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from hydra.utils import get_class

from gems_flwr.tools.trackers import Tracker
from simulations.config import NOT_IN_NAME, RunConfig


def trackers_of(config: RunConfig, say: Callable[[str], None] | None = None) -> list[Tracker]:
    """Return a run's trackers; `say` gets a text, once, if one is in trouble."""
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


def _without(values: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in keys}


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested options without what is Hydra's: the chosen file says which class it is."""
    return {
        key: _plain(value) if isinstance(value, Mapping) else value
        for key, value in values.items()
        if key not in ("_target_", "_convert_")
    }
