"""Trackers: a run in TensorBoard or MLflow.

A tracker is a callback that turns each round into flat names and numbers. It never ends or changes
a run: if its library fails, that is reported once, and the tracker is off for the rest of the run.
A run that is resumed is written once more, from its first round on.

A tracker may be a cloud service, so it receives totals and counts only: no name of a node, and no
text that a node wrote.
"""

from __future__ import annotations

import importlib
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from gems_flwr.core import Callback, RoundRecord, RunResult, Traffic
from gems_flwr.core.log import log_warning, short
from gems_flwr.errors import NotInstalledError

Plain = str | int | float | bool
# MLflow accepts 250 characters; a node cannot fill a tracker with names of metrics.
_MOST_CHARACTERS, _MOST_METRICS = 200, 200


def round_numbers(record: RoundRecord, total: Traffic) -> dict[str, float]:
    """Return what a tracker receives of a round; `total` is the traffic up to its end."""
    numbers = {}
    for prefix, group in (("", "server"), ("evaluate/", "evaluate"), ("train/", "train")):
        metrics = _numbers(getattr(record, f"{group}_metrics"))
        for name, value in sorted(metrics.items())[:_MOST_METRICS]:
            numbers[tidy_name(f"{prefix}{name}")] = value
    if not record.round:
        return numbers
    return {
        **numbers,
        "round/seconds": record.seconds,
        "round/nodes_asked": len(record.nodes_asked),
        "round/nodes_answered": len(record.nodes_answered),
        "round/failures": len(record.failures),
        "round/bytes_up": record.traffic.bytes_up,
        "round/bytes_down": record.traffic.bytes_down,
        "total/bytes_up": total.bytes_up,
        "total/bytes_down": total.bytes_down,
    }


def result_values(result: RunResult) -> dict[str, Plain]:
    """Return what a tracker receives of a whole run."""
    values: dict[str, Plain] = {
        "stopped_because": result.stopped_because,
        "rounds": result.history[-1].round if result.history else 0,
        "bytes_up": result.traffic.bytes_up,
        "bytes_down": result.traffic.bytes_down,
        "failures": len(result.failures),
    }
    # Of the texts, the others may name nodes.
    values |= {tidy_name(name): value for name, value in _numbers(result.details).items()}
    if status := result.details.get("status"):
        values["status"] = status
    if scores := list(_numbers(result.details.get("node_scores") or {}).values()):
        values["node_scores/mean"] = sum(scores) / len(scores)
        values["node_scores/lowest"] = min(scores)
    return values


def flat_values(options: Mapping[str, object], prefix: str = "") -> dict[str, Plain]:
    """Return nested options as one level with dotted names; lists become text, None is left out."""
    values: dict[str, Plain] = {}
    for key, value in options.items():
        if isinstance(value, Mapping):
            values |= flat_values(value, f"{prefix}{key}.")
        elif value is not None:
            plain = value if isinstance(value, str | bool | int | float) else str(value)
            values[tidy_name(f"{prefix}{key}")] = plain
    return values


def setting_values(settings: Mapping[str, object]) -> dict[str, Plain]:
    """Return a strategy's numbers, words and groups of such: other entries are nodes or data."""
    values: dict[str, Plain] = {}
    for name, value in settings.items():
        if name.rpartition(".")[2].startswith("_"):
            continue
        if is_dataclass(value) and not isinstance(value, type):
            inner = {f"{name}.{key}": each for key, each in vars(value).items()}
            values |= {name: type(value).__name__, **setting_values(inner)}
        elif isinstance(value, str | bool | int | float) and name != "checkpoint_dir":
            values[name] = value
    return values


def tidy_name(name: str) -> str:
    """Return a name that every tracker accepts: letters, digits, ``_ - . /``, not too long."""
    plain = re.sub(r"[^A-Za-z0-9_\-./]", "_", name)
    parts = [part for part in plain.split("/") if part.strip(".")]
    return "/".join(parts)[:_MOST_CHARACTERS].rstrip("/") or "_"


def _numbers(values: Mapping[str, object]) -> dict[str, float]:
    return {
        str(name): float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


class Tracker(Callback, ABC):
    """Base of all trackers; a subclass talks to one library.

    Parameters
    ----------
    name : str, optional
        Name of the run; by default that of its checkpoint folder, else the strategy's.
    config : mapping, optional
        Further parameters of the run, such as ``context.run_config``; may be nested.
    """

    # The extra that brings its library.
    kind: str = "tracker"
    _settings: Mapping[str, object] = {}
    _history: Sequence[RoundRecord] = ()

    def __init__(
        self, *, name: str | None = None, config: Mapping[str, object] | None = None
    ) -> None:
        self.name, self.config = name, config or {}
        # Where trouble is reported; `gems-flwr run` puts its console here.
        self.say: Callable[[str], None] = lambda text: log_warning("tracking", reason=text)
        self._total, self._is_on = Traffic(), False

    @abstractmethod
    def open_run(self, name: str, parameters: Mapping[str, Plain]) -> None:
        """Start a run."""

    @abstractmethod
    def log_round(self, number: int, numbers: Mapping[str, float]) -> None:
        """Add one round."""

    @abstractmethod
    def close_run(self, values: Mapping[str, Plain], error: BaseException | None) -> None:
        """Add what is known of the whole run, and end it."""

    def on_setup(self, settings: Mapping[str, object], history: Sequence[RoundRecord]) -> None:
        """Note the settings and the rounds that are there already."""
        self._settings, self._history, self._total = settings, history, Traffic()

    def on_start(self, strategy: str, num_rounds: int, finished_rounds: int) -> None:
        """Start a run, or resume the one of this folder."""
        folder = self._settings.get("checkpoint_dir")
        name = self.name or (Path(str(folder)).resolve().name if folder else strategy)
        parameters = {"strategy": strategy, "num_rounds": num_rounds, **flat_values(self.config)}
        # What the strategy really has, whatever a config says.
        own = {f"strategy.{name}": value for name, value in setting_values(self._settings).items()}
        parameters |= own
        self._is_on = True
        self._try(lambda: self.open_run(name, parameters))
        for record in self._history:
            self.on_round_end(record)

    def on_round_end(self, record: RoundRecord) -> None:
        """Add the round."""
        self._total += record.traffic
        if numbers := round_numbers(record, self._total):
            self._try(lambda: self.log_round(record.round, numbers))

    def on_end(self, result: RunResult) -> None:
        """Add what came of the run, and close it."""
        self._try(lambda: self.close_run(result_values(result), None))
        self._is_on = False

    def on_error(self, error: BaseException) -> None:
        """Close the run as failed or interrupted."""
        self._try(lambda: self.close_run({}, error))
        self._is_on = False

    def _try(self, step: Callable[[], object]) -> None:
        if not self._is_on:
            return
        try:
            step()
        except (Exception, SystemExit) as error:
            self._is_on = False
            reason = f"{type(error).__name__}: {short(str(error))}"
            self.say(f"{type(self).__name__} does not follow the run, which goes on: {reason}")

    def _needed(self, module: str) -> Any:
        """Return a module of a tracker; raise a `NotInstalledError` that names the extra."""
        try:
            return importlib.import_module(module)
        except ImportError as error:
            raise NotInstalledError(f"pip install 'gems-flwr[{self.kind}]': {error}") from error


class TensorBoard(Tracker):
    """Write a run for TensorBoard; needs the extra ``tensorboard``.

    Parameters
    ----------
    log_dir : path, default "runs"
        As in ``tensorboard --logdir runs``; the run gets a folder of its own in it.
    name, config
        See `Tracker`.

    Examples
    --------
    >>> from gems_flwr import FedAvg
    >>> from gems_flwr.tools import TensorBoard
    >>> strategy = FedAvg(callbacks=[TensorBoard("runs", name="first try")])
    """

    kind = "tensorboard"

    def __init__(self, log_dir: str | Path = "runs", **options: Any) -> None:
        super().__init__(**options)
        self.log_dir, self._module = Path(log_dir), self._needed("torch.utils.tensorboard")

    def open_run(self, name: str, parameters: Mapping[str, Plain]) -> None:
        """Open an event file; what an interrupted run has left in the folder is taken back."""
        self._writer = self._module.SummaryWriter(str(self.log_dir / name), purge_step=0)
        self._write("parameters", parameters)

    def log_round(self, number: int, numbers: Mapping[str, float]) -> None:
        """Write one number for each name."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, number)
        self._writer.flush()

    def close_run(self, values: Mapping[str, Plain], error: BaseException | None) -> None:
        """Write the outcome as a table, and close the file."""
        self._write("result", values or {"error": type(error).__name__})
        self._writer.close()

    def _write(self, name: str, values: Mapping[str, Plain]) -> None:
        rows = (f"| {key} | {str(value).replace('|', '¦')} |" for key, value in values.items())
        self._writer.add_text(name, "\n".join(["| name | value |", "|---|---|", *rows]))


class MLflow(Tracker):
    """Track a run with MLflow; needs the extra ``mlflow``.

    Everything goes through ``MlflowClient``, so MLflow's own global state stays as it is.

    Parameters
    ----------
    experiment : str, default "gems-flwr"
        The experiment of the run; it is made if it does not exist.
    uri : str, optional
        Where runs are kept, such as ``sqlite:///mlflow.db`` or ``http://tracking:5000``; by default
        what MLflow itself uses.
    name, config
        See `Tracker`.

    Examples
    --------
    >>> from gems_flwr import Gems
    >>> from gems_flwr.tools import MLflow
    >>> strategy = Gems(callbacks=[MLflow(experiment="wards")])
    """

    kind = "mlflow"
    _most = 500  # characters of a value

    def __init__(
        self, experiment: str = "gems-flwr", *, uri: str | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self.experiment, self.uri = experiment, uri
        self._tracking = self._needed("mlflow.tracking")
        self._entities = self._needed("mlflow.entities")

    def open_run(self, name: str, parameters: Mapping[str, Plain]) -> None:
        """Start a run."""
        self._client = self._tracking.MlflowClient(tracking_uri=self.uri)
        found = self._client.get_experiment_by_name(self.experiment)
        id_ = found.experiment_id if found else self._client.create_experiment(self.experiment)
        # A name must be given: MLflow would draw one from Python's global generator.
        self._run_id = self._client.create_run(id_, run_name=name).info.run_id
        each = [self._entities.Param(k, str(v)[: self._most]) for k, v in parameters.items()]
        for first in range(0, len(each), 100):  # what MLflow takes in one request
            self._client.log_batch(self._run_id, params=each[first : first + 100])

    def log_round(self, number: int, numbers: Mapping[str, float]) -> None:
        """Add metrics whose step is the round."""
        self._log_batch(numbers, number, {})

    def close_run(self, values: Mapping[str, Plain], error: BaseException | None) -> None:
        """Add the outcome below ``result/``, numbers as metrics, words as tags; end the run."""
        words = {f"result/{k}": str(v) for k, v in values.items() if isinstance(v, str | bool)}
        numbers = {f"result/{k}": v for k, v in _numbers(values).items()}
        self._log_batch(numbers, int(values.get("rounds", 0)), words)
        status = "FAILED" if isinstance(error, Exception) else "KILLED" if error else "FINISHED"
        self._client.set_terminated(self._run_id, status)

    def _log_batch(self, numbers: Mapping[str, float], step: int, tags: Mapping[str, str]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._entities.Metric(name, float(v), now, step) for name, v in numbers.items()]
        labels = [self._entities.RunTag(k, v[: self._most]) for k, v in tags.items()]
        self._client.log_batch(self._run_id, metrics=metrics, tags=labels)
