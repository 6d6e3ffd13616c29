"""What a run consists of: the types behind `conf/`, and the way from overrides to a config.

`conf/` holds the values and says what each means, this module has their types and ranges. Hydra
refuses a key or a group that does not exist; what it lets through is checked here against the
signature of whatever a group's ``_target_`` names, so that a new strategy or model needs no second
declaration.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, Optional

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gems_flwr import SecureSum
from gems_flwr.core.disk import file_fault
from gems_flwr.devices import check_device
from gems_flwr.errors import GemsError, OptionError
from simulations.experiment.training import TrainOptions

CONFIG_DIR = Path(__file__).resolve().parent.parent / "conf"
GROUPS = ("strategy", "dataset", "partition", "model", "backend")
# What is for the sake of the person or the machine, not of the result.
NOT_IN_NAME = (
    *("data_dir", "progress", "live", "tracking", "objective"),
    *("fresh", "label", "wait_seconds", "return_seconds"),
)
BACKENDS = ("inprocess", "lockstep", "ray")
# Options of several strategies that stand for a value made of the run's own data.
PUBLIC_OPTIONS = {"tune": int | None, "tune_rate": float}


_BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
# What to install for a launcher or sweeper that Hydra does not bring along.
_PLUGINS = {
    "launcher/joblib": "'gems-flwr[launchers]'",
    "launcher/slurm": "hydra-submitit-launcher",
    "launcher/submitit_slurm": "hydra-submitit-launcher",
    "launcher/submitit_local": "hydra-submitit-launcher",
    "launcher/ray": "hydra-ray-launcher",
    "launcher/ray_cluster": "hydra-ray-launcher",
    "sweeper/optuna": "'gems-flwr[search]'",
}
_MODULES = {
    "hydra_plugins.hydra_submitit_launcher": "launcher/slurm",
    "hydra_plugins.hydra_ray_launcher": "launcher/ray_cluster",
}


class ConfigError(GemsError, ValueError):
    """A config that cannot be run; the message names the key and the allowed values."""


def _require(key: str, value: Any, holds: bool, allowed: str) -> None:
    if not holds:
        raise ConfigError(f"{key} must be {allowed}, got {value!r}")


# --- types and ranges -------------------------------------------------------------------------


@dataclass
class StopConfig:
    """When to end before the last round."""

    target: Optional[float] = None  # noqa: UP045 - omegaconf reads Optional
    metric: str = "accuracy"
    goal: str = "max"

    def __post_init__(self) -> None:
        _require("stop.goal", self.goal, self.goal in ("max", "min"), "max or min")


@dataclass
class DriftConfig:
    """When and how the concept changes."""

    rounds: list[int] = field(default_factory=list)
    probability: float = 0.0
    kind: str = "labels"

    def __post_init__(self) -> None:
        drift, chance = "stream.drift", self.probability
        _require(f"{drift}.rounds", self.rounds, all(r >= 1 for r in self.rounds), "at least 1")
        _require(f"{drift}.probability", chance, 0 <= chance <= 1, "between 0 and 1")
        _require(f"{drift}.kind", self.kind, self.kind in ("labels", "pixels"), "labels or pixels")


@dataclass
class StreamConfig:
    """What nodes see of a stream, where there is one."""

    batches_per_round: Optional[int] = None  # noqa: UP045
    source: str = "share"
    initial_noise: float = 0.0
    drift: DriftConfig = field(default_factory=DriftConfig)

    def __post_init__(self) -> None:
        count, noise = self.batches_per_round, self.initial_noise
        least = count is None or count >= 1
        _require("stream.batches_per_round", count, least, "at least 1, or null")
        _require("stream.source", self.source, self.source in ("share", "pool"), "share or pool")
        _require("stream.initial_noise", noise, noise >= 0, "at least 0")

    @property
    def is_on(self) -> bool:
        """Whether nodes learn from a stream at all."""
        return self.batches_per_round is not None


@dataclass
class MultiModelConfig:
    """Which models are trained, and on what nodes."""

    tasks: list[dict[str, Any]] = field(default_factory=list)
    capacities: list[float] = field(default_factory=lambda: [0.25, 0.5, 0.25])
    lacking: float = 0.0

    def __post_init__(self) -> None:
        for number, task in enumerate(self.tasks):
            place, keys = f"multi_model.tasks[{number}]", ("name", "dataset", "model", "share")
            if unknown := sorted(set(task) - set(keys)):
                raise ConfigError(f"{place} has {unknown}, allowed are {list(keys)}")
            share = task.get("share", 1.0)
            fits = isinstance(share, int | float) and not isinstance(share, bool) and 0 < share <= 1
            _require(f"{place}.share", share, fits, "in (0, 1]")
        names = [self.name_of(number) for number in range(len(self.tasks))]
        if len(set(names)) < len(names):
            raise ConfigError(f"multi_model.tasks must have different names, got {names}")
        shares = self.capacities
        if not shares or min(shares) < 0 or not math.isclose(sum(shares), 1, abs_tol=1e-6):
            raise ConfigError(
                "multi_model.capacities must be shares of the nodes that sum to 1: of those that "
                f"train up to one model in a round, up to two, …; got {shares}"
            )
        _require("multi_model.lacking", self.lacking, 0 <= self.lacking <= 1, "between 0 and 1")

    def name_of(self, number: int) -> str:
        """Return what a task's model is called: ``task-1`` and so on unless it has a name."""
        return str(self.tasks[number].get("name") or f"task-{number + 1}")


@dataclass
class BackendConfig:
    """Where the nodes run."""

    kind: str = "inprocess"
    device: str = "cpu"
    threads: int = 1
    total_cpus: int = 2
    client_cpus: int = 1
    client_gpus: float = 0.0
    total_gpus: Optional[int] = None  # noqa: UP045
    address: Optional[str] = None  # noqa: UP045

    def __post_init__(self) -> None:
        _require("backend.kind", self.kind, self.kind in BACKENDS, f"one of {', '.join(BACKENDS)}")
        try:
            check_device(self.device)
        except OptionError as error:
            raise ConfigError(f"backend.{error}") from None
        for name in ("threads", "total_cpus", "client_cpus"):
            _require(f"backend.{name}", getattr(self, name), getattr(self, name) >= 1, "at least 1")
        _require("backend.client_gpus", self.client_gpus, self.client_gpus >= 0, "at least 0")
        least = self.total_gpus is None or self.total_gpus >= 0
        _require("backend.total_gpus", self.total_gpus, least, "at least 0, or null")
        if self.kind == "ray" and self.client_gpus > 0 and ":" in self.device:
            raise ConfigError(
                f"backend.device={self.device} with client_gpus={self.client_gpus:g}: Ray shows "
                "each node its own GPU alone, so write backend.device="
                f"{self.device.partition(':')[0]}"
            )
        if (address := self.address) is not None:
            known = address == "auto" or re.fullmatch(r"[^\s/]+:\d{1,5}", address) is not None
            _require("backend.address", address, known, "auto or host:port, or null")
            _require("backend.kind", self.kind, self.kind == "ray", "ray with backend.address")


@dataclass
class RunConfig:
    """One run. The meaning of each value stands in `conf/config.yaml`."""

    nodes: int = 5
    seed: int = 0
    rounds: int = 1
    data_dir: Optional[str] = None  # noqa: UP045
    validation: float = 0.1
    own_initial_weights: bool = False
    timeout: float = 3600.0
    wait_seconds: float = 60.0
    return_seconds: float = 0.0
    fresh: bool = False
    label: Optional[str] = None  # noqa: UP045
    progress: bool = True
    live: bool = False
    evaluate_every: int = 1
    evaluate_on: Optional[str] = None  # noqa: UP045
    objective: Optional[str] = None  # noqa: UP045
    stop: StopConfig = field(default_factory=StopConfig)
    stream: StreamConfig = field(default_factory=StreamConfig)
    multi_model: MultiModelConfig = field(default_factory=MultiModelConfig)
    train: dict[str, Any] = field(default_factory=dict)
    backend: BackendConfig = field(default_factory=BackendConfig)
    secure: dict[str, Any] = field(default_factory=dict)
    tracking: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    dataset: dict[str, Any] = field(default_factory=dict)
    partition: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("nodes", "rounds", "evaluate_every"):
            _require(name, getattr(self, name), getattr(self, name) >= 1, "at least 1")
        for name in ("wait_seconds", "return_seconds"):
            _require(name, getattr(self, name), getattr(self, name) >= 0, "at least 0")
        _require("seed", self.seed, 0 <= self.seed < 2**63, "at least 0")
        _require("validation", self.validation, 0 < self.validation < 1, "between 0 and 1")
        _require("timeout", self.timeout, self.timeout > 0, "above 0")
        parts = (None, "test", "validation")
        _require("evaluate_on", self.evaluate_on, self.evaluate_on in parts, "test or validation")
        _ = self.train_options
        if self.evaluate_on == "test":
            self.evaluate_on = None

    @property
    def train_options(self) -> TrainOptions:
        """How nodes train."""
        try:
            return TrainOptions(**self.train)
        except ValueError as error:
            raise ConfigError(f"train.{error}") from error

    def to_json(self) -> str:
        """Return the config as text: what a worker process gets."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> RunConfig:
        """Return the config that `to_json` wrote."""
        config = OmegaConf.merge(OmegaConf.structured(cls), json.loads(text))
        parsed = OmegaConf.to_object(config)
        assert isinstance(parsed, cls)
        return parsed

    def fingerprint(self) -> str:
        """Return a short digest of everything that can change the result."""
        values = {k: v for k, v in asdict(self).items() if k not in NOT_IN_NAME}
        # Which machines did it, and how many GPUs they have, changes no number.
        for name in ("address", "total_gpus"):
            del values["backend"][name]
        text = json.dumps(values, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()

    def run_name(self) -> str:
        """Return the folder of this run: the same config lands in the same place."""
        n = self.names
        setting = f"{n['dataset']}-{n['partition']}-{self.nodes}-{n['model']}"
        return f"{setting}/{n['strategy']}-s{self.seed}-{self.fingerprint()}"


# --- what differs from the files --------------------------------------------------------------


def variant_of(config: RunConfig) -> str:
    """Return what a run's options change, as in ``rank=20 clusters=8``; empty if nothing.

    Read off the files rather than composed, because a job of a multirun must not touch Hydra's
    own state. Groups other than the strategy are named with their keys.
    """
    main: Any = OmegaConf.to_container(OmegaConf.load(CONFIG_DIR / "config.yaml"))
    chosen = group_config("strategy", config.names["strategy"])
    defaults: dict[str, dict[str, Any]] = {
        "strategy": chosen["strategy"],
        "train": main["train"] | chosen.get("train", {}),
        "": {key: (main | chosen)[key] for key in ("rounds", "own_initial_weights")},
        "stream": main["stream"] | chosen.get("stream", {}),
        "multi_model": main["multi_model"] | chosen.get("multi_model", {}),
    }
    changed = []
    if config.evaluate_on == "validation":
        changed.append("evaluate_on=validation")
    if config.secure:
        defaults["secure"] = group_config("secure", "sum")
        changed.append("secure=sum")
    for group in ("dataset", "partition", "model"):
        defaults[group] = group_config(group, config.names[group])
    values = asdict(config)
    for section, options in defaults.items():
        prefix = "" if section in ("strategy", "") else f"{section}."
        changed += _changed(values[section] if section else values, options, prefix)
    return " ".join(changed)


def group_config(group: str, name: str) -> dict[str, Any]:
    """Return what a file of a group holds, with the groups in its defaults put in their places."""
    values: Any = OmegaConf.to_container(OmegaConf.load(CONFIG_DIR / group / f"{name}.yaml"))
    for entry in values.pop("defaults", []):
        for key, chosen in entry.items() if isinstance(entry, dict) else ():
            inner, _, package = key.lstrip("/").partition("@")
            *path, last = package.split(".")
            place = values
            for part in path:
                place = place.setdefault(part, {})
            place[last] = group_config(inner, chosen) | place.get(last, {})
    return dict(values)


def _changed(now: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str) -> list[str]:
    """Return what differs from nested defaults, as ``key=value`` with dotted keys."""
    changed = []
    if prefix and now.get("_target_") != defaults.get("_target_"):
        # Another space: what counts is what differs from its own file.
        name, group = str(now["_target_"]).rpartition(".")[2].lower(), prefix.split(".")[-2]
        changed.append(f"{prefix[:-1]}={name}")
        known = (CONFIG_DIR / "strategy" / group / f"{name}.yaml").exists()
        defaults = group_config(f"strategy/{group}", name) if known else {}
    for key in [*defaults, *(now.keys() - defaults.keys() if prefix.count(".") else ())]:
        value, default = now.get(key, defaults.get(key)), defaults.get(key)
        if isinstance(default, dict) and isinstance(value, Mapping):
            changed += _changed(value, default, f"{prefix}{key}.")
        elif value != default and key != "_target_":
            changed.append(f"{prefix}{key}={value}")
    return changed


# --- from overrides to a config ---------------------------------------------------------------


def compose_config(overrides: Sequence[str]) -> RunConfig:
    """Return the config for a list of Hydra overrides, as on the command line.

    Raises
    ------
    ConfigError, hydra.errors.HydraException
        If a key, a group or a value is not allowed.
    """
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONFIG_DIR), version_base=None):
        words = without_plus(overrides)
        return to_run_config(compose("config", words, return_hydra_config=True))


def without_plus(overrides: Sequence[str]) -> list[str]:
    """Return overrides as Hydra wants them: ``+tracking=mlflow`` is what ``tracking=mlflow`` is.

    Hydra insists on a plus for a group that has no default, and refuses it for one that has.
    """
    return [each.lstrip("+") if re.match(r"\+{1,2}tracking=", each) else each for each in overrides]


def to_run_config(config: DictConfig, choices: Mapping[str, Any] | None = None) -> RunConfig:
    """Return the validated config that Hydra composed.

    Parameters
    ----------
    config : DictConfig
        The composed config; without `choices` it must hold Hydra's own part too.
    choices : mapping, optional
        Which file was chosen in each group.
    """
    chosen = config.hydra.runtime.choices if choices is None else choices
    own = {key: config[key] for key in config if key != "hydra"}
    for group in ("strategy", "dataset", "partition", "model"):
        check_options(group, own[group], get_object(own[group]["_target_"]))
    check_options("train", own["train"], TrainOptions)
    if own.get("secure"):
        check_options("secure", own["secure"], SecureSum)
    trackers = {f"tracking.{name}": each for name, each in (own.get("tracking") or {}).items()}
    for section, node in trackers.items():
        is_one = isinstance(node, DictConfig) and "_target_" in node
        _require(section, node, is_one, "an object with a _target_, as in +tracking=mlflow")
        try:
            check_options(section, node, get_object(node["_target_"]))
        except ImportError as error:
            raise ConfigError(f"{section}: there is no {node['_target_']}") from error
    own["names"] = {group: str(chosen[group]) for group in GROUPS}
    if _in_search(config):
        if own["evaluate_on"] == "test":
            raise ConfigError(
                "a search goes by validation data: settings that are chosen by their test figures "
                "look better than they are; leave evaluate_on out"
            )
        own["evaluate_on"] = "validation"
    try:
        run = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RunConfig), own))
    except (OmegaConfBaseException, ValueError) as error:
        raise ConfigError(str(error)) from error
    assert isinstance(run, RunConfig)
    return run


def is_multirun(hydra: Any) -> bool:
    """Return whether Hydra's own config is that of a multirun."""
    return bool(hydra.get("mode") == RunMode.MULTIRUN)


def is_search(hydra: Any) -> bool:
    """Return whether which runs there are depends on what the runs before returned."""
    return is_multirun(hydra) and str(hydra.sweeper.get("_target_")) != _BASIC_SWEEPER


def _in_search(config: DictConfig) -> bool:
    """Return whether a config is that of one of a search's runs, which Hydra's own part says."""
    if "hydra" in config:
        return is_search(config.hydra)
    return HydraConfig.initialized() and is_search(HydraConfig.get())


def check_options(group: str, node: DictConfig, target: Callable[..., Any]) -> None:
    """Check keys, and the types of their values, against what `target` accepts.

    Raises
    ------
    ConfigError
        Names the key and what is allowed.
    """
    try:
        accepted = inspect.signature(target).parameters
    except ValueError as error:
        raise ConfigError(f"{group}._target_ says nothing of its options: {error}") from error
    hints = _hints_of(target)
    if accepted.keys() & {"tune", "score"}:
        hints |= PUBLIC_OPTIONS
    for key, value in node.items():
        name = str(key)
        if name in ("_target_", "_convert_"):
            continue
        if isinstance(value, str) and (CONFIG_DIR / group / name).is_dir():
            raise ConfigError(
                f"{group}.{name} has options of its own: write {group}/{name}={value}"
            )
        if isinstance(value, DictConfig) and "_target_" in value:
            check_options(f"{group}.{name}", value, get_object(value["_target_"]))
            continue
        if name not in accepted and name not in hints:
            named = sorted(str(k) for k in node if k in accepted) or sorted(accepted)
            allowed = ", ".join(named) or "none"
            raise ConfigError(f"there is no {group}.{name}; the options of {group} are: {allowed}")
        kinds = _plain_types(hints.get(name))
        if kinds and not _fits(value, kinds):
            wanted = " or ".join("null" if k is type(None) else k.__name__ for k in kinds)
            raise ConfigError(f"{group}.{name} must be {wanted}, got {value!r}")


def _hints_of(target: Callable[..., Any]) -> dict[str, Any]:
    """Return the types of a callable's arguments."""
    is_plain_class = isinstance(target, type) and not is_dataclass(target)
    annotated: Any = target.__init__ if is_plain_class else target  # type: ignore[misc]
    unknown: dict[str, Any] = {}
    while True:
        try:
            return typing.get_type_hints(annotated, localns=unknown)
        except NameError as error:  # imported for type checkers alone
            unknown[str(error.name)] = Any


def _plain_types(hint: Any) -> tuple[type, ...]:
    """Return the builtin types that a hint allows; nothing where it allows anything else."""
    if typing.get_origin(hint) is typing.Literal:
        return (str,)
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    parts = typing.get_args(hint) if is_union else (hint,)
    plain = (bool, int, float, str, type(None))
    return tuple(parts) if all(part in plain for part in parts) else ()


def _fits(value: Any, kinds: tuple[type, ...]) -> bool:
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, kinds) or (isinstance(value, int) and float in kinds)


def explain(error: Exception, overrides: Sequence[str] = ()) -> str:
    """Return a complaint of Hydra's, the disk's or ours in a few plain lines, with what to do.

    Parameters
    ----------
    error : Exception
        What composing a config, or running it, raised.
    overrides : sequence of str
        What it was composed from.
    """
    # To Hydra a group that does not exist is a file that cannot be read.
    if isinstance(error, OSError) and not isinstance(error, HydraException):
        return file_fault(error)
    text = f"{error}\n{error.__cause__ or error.__context__ or ''}"
    if isinstance(error, HydraException) and (plugin := missing_plugin(text)) is not None:
        return plugin
    full_key = re.search(r"full_key: (\S+)", text)
    if full_key is None:
        return str(error).split("Config search path")[0].strip()
    key = full_key.group(1)
    if "not in" not in text:
        return text.replace("Error merging override", "cannot set").split("    full_key")[0].strip()
    section, _, name = key.rpartition(".")
    where = f" in {section}" if section else ""
    return f"there is no key '{name}'{where}; the keys are: {_keys_beside(key, overrides)}"


def missing_plugin(complaint: str) -> str | None:
    """Return what to install, if Hydra complains that it does not know a launcher or sweeper."""
    found = re.search(r"hydra/(launcher|sweeper)[/=](\w+)", complaint)
    wanted = None if found is None else f"{found.group(1)}/{found.group(2)}"
    if wanted is None:
        wanted = next((name for key, name in _MODULES.items() if key in complaint), None)
    if wanted not in _PLUGINS:
        return None
    return f"hydra/{wanted.replace('/', '=')} is a plugin: pip install {_PLUGINS[wanted]}"


def _keys_beside(key: str, overrides: Sequence[str]) -> str:
    """Return the keys that exist where `key` does not."""
    others = [
        each
        for each in overrides
        # Neither the culprit, nor flags, nor sweeps, which cannot be composed.
        if "=" in each and "," not in each and not each.lstrip("+~").startswith((key, "-"))
    ]
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONFIG_DIR), version_base=None):
        node = compose("config", others)
    for part in key.split(".")[:-1]:
        node = node[part]
    return ", ".join(str(each) for each in node if str(each) not in ("_target_", "_convert_"))


def _run_name(*, _root_: DictConfig) -> str:
    return to_run_config(_root_).run_name()


OmegaConf.register_new_resolver("run_name", _run_name, replace=True)
ConfigStore.instance().store(name="run_schema", node=RunConfig)
