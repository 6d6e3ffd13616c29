"""What a run consists of: the types behind `conf/`, and the way from overrides to a config.

`conf/` holds the values, this module their types and ranges. Hydra refuses a key or a group
that does not exist; what it lets through is checked here against the signature of whatever a
group's ``_target_`` names, so that a new strategy or model needs no second declaration.
"""

from __future__ import annotations

import hashlib
import inspect
import json
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
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gems_flwr.devices import check_device
from gems_flwr.disk.faults import file_fault
from gems_flwr.errors import GemsError, OptionError
from gems_flwr.secure.secure_sum import SecureSum
from simulations.experiment.training import TrainOptions
from simulations.flat_options import flat_strategy, new_form
from simulations.multirun import is_search, missing_plugin
from simulations.options import MultiModelConfig, StreamConfig

CONFIG_DIR = Path(__file__).resolve().parent.parent / "conf"
GROUPS = ("strategy", "dataset", "partition", "model", "backend")
# What a run is told for the sake of the person or the machine, not of the result.
NOT_IN_NAME = (
    *("data_dir", "progress", "live", "tracking", "objective"),
    *("fresh", "label", "wait_seconds", "return_seconds"),
)
# Classes that have moved go by the names that earlier runs know, so that these keep theirs.
_FORMER_TARGETS = {
    "simulations.partitions.Groups": "simulations.groups.Groups",
    "simulations.partitions.Skew": "simulations.multi_model.Skew",
}


class ConfigError(GemsError, ValueError):
    """A config that cannot be run; the message names the key and the allowed values."""


@dataclass
class StopConfig:
    """When to end before the last round."""

    target: Optional[float] = None  # noqa: UP045 - omegaconf reads Optional
    patience: Optional[int] = None  # noqa: UP045
    metric: str = "accuracy"
    goal: str = "max"
    rules: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        _require("stop.goal", self.goal, self.goal in ("max", "min"), "max or min")
        _require(
            "stop.patience",
            self.patience,
            self.patience is None or self.patience >= 1,
            "at least 1, or null",
        )


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
        kinds = ("inprocess", "ray", "lockstep", "silent")
        _require("backend.kind", self.kind, self.kind in kinds, " or ".join(kinds))
        try:
            check_device(self.device)
        except OptionError as error:
            raise ConfigError(f"backend.{error}") from None
        for name in ("threads", "total_cpus", "client_cpus"):
            value = getattr(self, name)
            _require(f"backend.{name}", value, value >= 1, "at least 1")
        _require("backend.client_gpus", self.client_gpus, self.client_gpus >= 0, "at least 0")
        least = self.total_gpus is None or self.total_gpus >= 0
        _require("backend.total_gpus", self.total_gpus, least, "at least 0, or null")
        if self.kind == "ray" and self.client_gpus > 0 and ":" in self.device:
            kind = self.device.partition(":")[0]
            raise ConfigError(
                f"backend.device={self.device} with client_gpus={self.client_gpus:g}: Ray shows "
                f"each node its own GPU alone, so write backend.device={kind}"
            )
        if self.address is not None:
            self._check_address(self.address)

    def _check_address(self, address: str) -> None:
        known = address == "auto" or re.fullmatch(r"[^\s/]+:\d{1,5}", address) is not None
        _require("backend.address", address, known, "auto or host:port, or null")
        if self.kind != "ray":
            raise ConfigError(f"backend.address is for backend=ray, got backend.kind={self.kind}")
        for name in ("total_cpus", "total_gpus"):
            if (total := getattr(self, name)) != getattr(BackendConfig, name):
                raise ConfigError(
                    f"backend.{name}={total} is for a Ray of this run's own; the cluster at "
                    f"backend.address={address} has what it was started with"
                )


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
        _require("nodes", self.nodes, self.nodes >= 1, "at least 1")
        _require("seed", self.seed, 0 <= self.seed < 2**63, "at least 0")
        _require("rounds", self.rounds, self.rounds >= 1, "at least 1")
        _require("validation", self.validation, 0 < self.validation < 1, "between 0 and 1")
        _require("timeout", self.timeout, self.timeout > 0, "above 0")
        for name in ("wait_seconds", "return_seconds"):
            _require(name, getattr(self, name), getattr(self, name) >= 0, "at least 0")
        _require("evaluate_every", self.evaluate_every, self.evaluate_every >= 1, "at least 1")
        parts = (None, "test", "validation")
        _require("evaluate_on", self.evaluate_on, self.evaluate_on in parts, "test or validation")
        _ = self.train_options

    @property
    def train_options(self) -> TrainOptions:
        """How nodes train."""
        try:
            return TrainOptions(**self.train)
        except ValueError as error:
            raise ConfigError(f"train.{error}") from error

    def to_json(self) -> str:
        """Return the config as text: what a worker process gets, and what `config_of` reads."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> RunConfig:
        """Return the config that `to_json` wrote."""
        values = json.loads(text)
        values["stop"] = StopConfig(**values["stop"])
        values["backend"] = BackendConfig(**values["backend"])
        values["stream"] = StreamConfig.from_dict(values["stream"])
        values["multi_model"] = MultiModelConfig.from_dict(values.get("multi_model", {}))
        return cls(**values)

    def fingerprint(self) -> str:
        """Return a short digest of everything that can change the result."""
        values = {k: v for k, v in asdict(self).items() if k not in NOT_IN_NAME}
        # Which machines did it makes no other run of it.
        del values["backend"]["address"]
        values["strategy"] = flat_strategy(self.strategy)
        # How many GPUs there are in all changes no number, as little as who asks for it.
        del values["backend"]["total_gpus"]
        if values["strategy"].get("converged") is False:
            # What strategy=global was before it had the option, and the papers' rows still are.
            del values["strategy"]["converged"]
        # Likewise: there was a time without these.
        if values["strategy"].get("budget_bytes", 0) is None:
            del values["strategy"]["budget_bytes"]
        if values["strategy"].get("compress") == "float32":
            del values["strategy"]["compress"]
        if values["train"].get("output_start") == "zero":
            values["train"] = {k: v for k, v in values["train"].items() if k != "output_start"}
        if self.evaluate_on != "validation":
            # Likewise.
            del values["evaluate_on"]
        if not self.secure:
            # Likewise: there was a time without.
            del values["secure"]
        if not self.multi_model.tasks:
            # Without tasks it means nothing, and runs made before it existed keep their names.
            del values["multi_model"]
        if not self.stop.rules:
            # Likewise.
            values["stop"] = {k: v for k, v in values["stop"].items() if k != "rules"}
        text = json.dumps(values, sort_keys=True)
        for target, former in _FORMER_TARGETS.items():
            text = text.replace(json.dumps(target), json.dumps(former))
        return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()

    def run_name(self) -> str:
        """Return the folder of this run: the same config lands in the same place."""
        n = self.names
        setting = f"{n['dataset']}-{n['partition']}-{self.nodes}-{n['model']}"
        return f"{setting}/{n['strategy']}-s{self.seed}-{self.fingerprint()}"


def variant_of(config: RunConfig) -> str:
    """Return what a run's options change, as in ``rank=20 clusters=8``; empty if nothing.

    Read off the files rather than composed, because a job of a multirun must not touch Hydra's
    own state. Groups other than the strategy are named with their keys.
    """
    main: Any = OmegaConf.to_container(OmegaConf.load(CONFIG_DIR / "config.yaml"))
    chosen = _load("strategy", config.names["strategy"])
    defaults: dict[str, dict[str, Any]] = {
        "strategy": flat_strategy(chosen["strategy"]),
        "train": main["train"] | chosen.get("train", {}),
        "": {key: (main | chosen)[key] for key in ("rounds", "own_initial_weights")},
        "stream": main["stream"] | chosen.get("stream", {}),
        "multi_model": main["multi_model"] | chosen.get("multi_model", {}),
    }
    changed = []
    if config.evaluate_on == "validation":
        changed.append("evaluate_on=validation")
    if config.secure:
        defaults["secure"] = _load("secure", "sum")
        changed.append("secure=sum")
    for group in ("dataset", "partition", "model"):
        path = CONFIG_DIR / group / f"{config.names[group]}.yaml"
        defaults[group] = OmegaConf.to_container(OmegaConf.load(path))  # type: ignore[assignment]
    values = asdict(config)
    values["strategy"] = flat_strategy(config.strategy)
    for section, options in defaults.items():
        prefix = "" if section in ("strategy", "") else f"{section}."
        now = values[section] if section else values
        if section == "strategy":
            # A space has options that stand in its own file alone.
            options = _with_keys_of(now, options)
        changed += _changed(now, options, prefix)
    return " ".join(changed)


def _load(group: str, name: str) -> dict[str, Any]:
    """Return what a file of a group holds, with the groups in its defaults put in their places."""
    values: Any = OmegaConf.to_container(OmegaConf.load(CONFIG_DIR / group / f"{name}.yaml"))
    for entry in values.pop("defaults", []):
        for key, chosen in entry.items() if isinstance(entry, dict) else ():
            inner, _, package = key.lstrip("/").partition("@")
            *path, last = package.split(".")
            place = values
            for part in path:
                place = place.setdefault(part, {})
            place[last] = _load(inner, chosen) | place.get(last, {})
    return dict(values)


def _with_keys_of(now: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested defaults with all keys that there are; null for those that they lack."""
    full = dict(defaults) | {key: None for key in now if key not in defaults}
    return {
        key: _with_keys_of(now[key], value) if isinstance(value, dict) else value
        for key, value in full.items()
    }


def _changed(now: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str) -> list[str]:
    """Return what differs from nested defaults, as ``key=value`` with dotted keys."""
    changed = []
    for key, default in defaults.items():
        if isinstance(default, dict):
            changed += _changed(now[key], default, f"{prefix}{key}.")
        elif now.get(key, default) != default:
            changed.append(f"{prefix}{key}={now[key]}")
    return changed


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
    for name, tracker in (own.get("tracking") or {}).items():
        section = f"tracking.{name}"
        is_one = isinstance(tracker, DictConfig) and "_target_" in tracker
        _require(section, tracker, is_one, "a tracker, as in +tracking=mlflow")
        check_options(section, tracker, get_object(tracker["_target_"]))
    for number, rule in enumerate(own["stop"].rules):
        section = f"stop.rules[{number}]"
        _require(section, rule, "_target_" in rule, "an object with a _target_")
        try:
            check_options(section, rule, get_object(rule["_target_"]))
        except ImportError as error:
            raise ConfigError(f"{section}: there is no {rule['_target_']}") from error
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
    is_plain_class = isinstance(target, type) and not is_dataclass(target)
    hints = typing.get_type_hints(target.__init__ if is_plain_class else target)  # type: ignore[misc]
    for key, value in node.items():
        name = str(key)
        if name in ("_target_", "_convert_"):
            continue
        # A word among a few is no group, though another strategy may have one of that name.
        is_word = typing.get_origin(hints.get(name)) is typing.Literal
        if isinstance(value, str) and (CONFIG_DIR / group / name).is_dir() and not is_word:
            raise ConfigError(
                f"{group}.{name} has options of its own: write {group}/{name}={value}"
            )
        if name == "epsilon" and "space" in node and isinstance(value, int | float):
            raise ConfigError(
                f"{group}.epsilon is auto or one for each node; for all: "
                f"{group}.space.epsilon={value}"
            )
        if isinstance(value, DictConfig) and "_target_" in value:
            check_options(f"{group}.{name}", value, get_object(value["_target_"]))
            continue
        if name not in accepted:
            named = sorted(str(k) for k in node if k in accepted) or sorted(accepted)
            allowed = ", ".join(named) or "none"
            raise ConfigError(f"there is no {group}.{name}; the options of {group} are: {allowed}")
        kinds = _plain_types(hints.get(name))
        if kinds and not _fits(value, kinds):
            wanted = " or ".join("null" if k is type(None) else k.__name__ for k in kinds)
            raise ConfigError(f"{group}.{name} must be {wanted}, got {value!r}")


def _plain_types(hint: Any) -> tuple[type, ...]:
    """Return the builtin types that a hint allows; nothing where it allows anything else."""
    if typing.get_origin(hint) is typing.Literal:
        return (str,)
    parts = (
        typing.get_args(hint)
        if typing.get_origin(hint) in (typing.Union, types.UnionType)
        else (hint,)
    )
    plain = (bool, int, float, str, type(None))
    return tuple(parts) if all(part in plain for part in parts) else ()


def _fits(value: Any, kinds: tuple[type, ...]) -> bool:
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, kinds) or (isinstance(value, int) and float in kinds)


def _require(key: str, value: Any, holds: bool, allowed: str) -> None:
    if not holds:
        raise ConfigError(f"{key} must be {allowed}, got {value!r}")


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
    now = new_form(key, overrides)
    if now is not None:
        return f"there is no key '{key}' any more; write {now}"
    section, _, name = key.rpartition(".")
    where = f" in {section}" if section else ""
    return f"there is no key '{name}'{where}; the keys are: {_keys_beside(key, overrides)}"


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
