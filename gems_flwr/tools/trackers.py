"""Trackers: a run in TensorBoard, MLflow or Weights & Biases.

A tracker is a callback that turns each round into flat names and numbers. It never ends or changes
a run: if its library fails, that is reported once, and the tracker is off for the rest of the run.
A run that is resumed from its `checkpoint_dir` is resumed in the tracker; the id is kept in a file
``tracking-…`` beside the checkpoint.

A tracker may be a cloud service, so it receives totals and counts only: no name of a node, and no
text that a node wrote.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from gems_flwr.core import Callback, RoundRecord, RunResult, Traffic
from gems_flwr.core.disk import write_atomically
from gems_flwr.core.log import log_warning, short
from gems_flwr.errors import NotInstalledError, OptionError

Plain = str | int | float | bool
ID_FILES = "tracking-"
# MLflow accepts 250 characters; a node cannot fill a tracker with names of metrics.
_MOST_CHARACTERS, _MOST_METRICS = 200, 200
# Names below which a metric of a node or of the app must not stand by itself.
_GROUPS = ("round", "total", "evaluate", "train")
# Texts among a strategy's details that describe the whole run, and no node.
_TEXTS = ("status", "space", "method", "head", "sampling")


def round_numbers(record: RoundRecord, total: Traffic) -> dict[str, float]:
    """Return what a tracker receives of a round; `total` is the traffic up to its end.

    The server's own metrics keep their names, those of the nodes are below ``evaluate/`` and
    ``train/``, the cost of the round is below ``round/``.
    """
    numbers = {}
    sources = {"server": record.server_metrics, "evaluate": record.evaluate_metrics}
    for group, metrics in {**sources, "train": record.train_metrics}.items():
        for name, value in sorted(_numbers(metrics).items())[:_MOST_METRICS]:
            tidy = tidy_name(name)
            own = group == "server" and tidy.split("/")[0] not in _GROUPS
            numbers[tidy if own else tidy_name(f"{group}/{tidy}")] = value
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
    for name, value in result.details.items():
        if isinstance(value, bool | int | float) or (isinstance(value, str) and name in _TEXTS):
            values.setdefault(tidy_name(name), value)
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


def setting_values(settings: Mapping[str, object], prefix: str = "") -> dict[str, Plain]:
    """Return a strategy's options that are numbers, words or groups of such.

    Lists and mappings are left out: their entries are nodes or data.
    """
    values: dict[str, Plain] = {}
    for name, value in settings.items():
        if name in ("checkpoint_dir", "callbacks") or name.startswith("_"):
            continue
        if isinstance(value, str | bool | int | float):
            values[f"{prefix}{name}"] = value
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            values[f"{prefix}{name}"] = type(value).__name__
            values |= setting_values(vars(value), f"{prefix}{name}.")
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

    # Under which its id is kept, and the extra that brings its library.
    kind: str = "tracker"

    def __init__(self, name: str | None, config: Mapping[str, object] | None) -> None:
        self.name, self.config = name, config or {}
        # Where trouble is reported; `gems-flwr run` puts its console here.
        self.say: Callable[[str], None] = lambda text: log_warning("tracking", reason=text)
        self._settings: Mapping[str, object] = {}
        self._history: Sequence[RoundRecord] = ()
        self._total, self._is_on = Traffic(), False
        self._folder: Path | None = None

    @abstractmethod
    def open_run(self, name: str, parameters: Mapping[str, Plain], finished: int) -> int:
        """Start a run, or resume the one with `known_id`; return the last round that it has.

        `finished` counts the rounds that are done; without any the run is new. -1: it has none.
        """

    @abstractmethod
    def log_round(self, number: int, numbers: Mapping[str, float]) -> None:
        """Add one round."""

    @abstractmethod
    def close_run(self, values: Mapping[str, Plain], error: BaseException | None) -> None:
        """Add what is known of the whole run, and end it."""

    def known_id(self) -> str | None:
        """Return the id that an earlier process has kept, if there is one."""
        path = self._id_file
        return path.read_text().strip() if path is not None and path.is_file() else None

    def keep_id(self, run_id: str) -> None:
        """Keep the id for whoever resumes the run."""
        if self._id_file is not None:
            write_atomically(self._id_file, run_id.encode())

    @property
    def _id_file(self) -> Path | None:
        return None if self._folder is None else self._folder / f"{ID_FILES}{self.kind}"

    def on_setup(self, settings: Mapping[str, object], history: Sequence[RoundRecord]) -> None:
        """Note the settings and the rounds that are there already."""
        self._settings, self._history, self._total = settings, history, Traffic()

    def on_start(self, strategy: str, num_rounds: int, finished_rounds: int) -> None:
        """Start a run, or resume the one of this folder."""
        given = self._settings.get("checkpoint_dir")
        self._folder = None if given is None else Path(str(given)).resolve()
        name = self.name or (self._folder.name if self._folder else strategy)
        parameters = {"strategy": strategy, "num_rounds": num_rounds, **flat_values(self.config)}
        # What the strategy really has, whatever a config says.
        parameters |= setting_values(self._settings, "strategy.")
        self._is_on, known = True, [-1]
        self._try(lambda: known.append(self.open_run(name, parameters, finished_rounds)))
        for record in self._history:
            self._log(record, after=known[-1])

    def on_round_end(self, record: RoundRecord) -> None:
        """Add the round."""
        self._log(record)

    def on_end(self, result: RunResult) -> None:
        """Add what came of the run, and close it."""
        self._try(lambda: self.close_run(result_values(result), None))
        self._is_on = False

    def on_error(self, error: BaseException) -> None:
        """Close the run as failed or interrupted."""
        self._try(lambda: self.close_run({}, error))
        self._is_on = False

    def _log(self, record: RoundRecord, after: int = -1) -> None:
        self._total += record.traffic
        numbers = round_numbers(record, self._total)
        if numbers and record.round > after:
            self._try(lambda: self.log_round(record.round, numbers))

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
            raise NotInstalledError(
                f"pip install 'gems-flwr[{self.kind}]' (in a checkout '.[{self.kind}]'): this "
                f"tracker needs {module.partition('.')[0]}, which cannot be imported ({error})"
            ) from error


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

    def __init__(
        self,
        log_dir: str | Path = "runs",
        *,
        name: str | None = None,
        config: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(name, config)
        self.log_dir, self._writer = Path(log_dir), None
        self._module = self._needed("torch.utils.tensorboard")

    def open_run(self, name: str, parameters: Mapping[str, Plain], finished: int) -> int:
        """Open an event file; a resumed run takes back what an interrupted round has left."""
        folder = self.log_dir / name
        earlier = folder.is_dir() and any(folder.glob("events.out.tfevents.*"))
        # The last round that was played may not have been written: it is written again.
        first = finished if earlier else 0
        purge = {"purge_step": first} if earlier else {}
        self._writer = self._module.SummaryWriter(str(folder), **purge)
        self._write("parameters", parameters, first)
        return first - 1

    def log_round(self, number: int, numbers: Mapping[str, float]) -> None:
        """Write one number for each name."""
        writer: Any = self._writer
        for name, value in numbers.items():
            writer.add_scalar(name, value, number)
        writer.flush()

    def close_run(self, values: Mapping[str, Plain], error: BaseException | None) -> None:
        """Write the outcome as a table, and close the file."""
        writer: Any = self._writer
        self._write("result", values or {"error": type(error).__name__})
        writer.close()

    def _write(self, name: str, values: Mapping[str, Plain], step: int = 0) -> None:
        writer: Any = self._writer
        rows = (f"| {key} | {str(value).replace('|', '¦')} |" for key, value in values.items())
        writer.add_text(name, "\n".join(["| name | value |", "|---|---|", *rows]), step)
        writer.flush()


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
    # The tag that says how far the run is, and how long a value may be.
    _last_round, _most = "gems_flwr.last_round", 500

    def __init__(
        self,
        experiment: str = "gems-flwr",
        *,
        uri: str | None = None,
        name: str | None = None,
        config: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(name, config)
        self.experiment, self.uri, self._run_id = experiment, uri, ""
        self._tracking = self._needed("mlflow.tracking")
        self._entities = self._needed("mlflow.entities")
        self._client: Any = None

    def open_run(self, name: str, parameters: Mapping[str, Plain], finished: int) -> int:
        """Start a run, or resume the one whose id is known; parameters are written once."""
        self._client = self._tracking.MlflowClient(tracking_uri=self.uri)
        if finished and (known := self.known_id()):
            self._run_id = known
            run = self._client.get_run(known)
            self._client.update_run(known, status="RUNNING")
            return int(run.data.tags.get(self._last_round, -1))
        found = self._client.get_experiment_by_name(self.experiment)
        id_ = found.experiment_id if found else self._client.create_experiment(self.experiment)
        # A name must be given: MLflow would draw one from Python's global generator.
        self._run_id = self._client.create_run(id_, run_name=name).info.run_id
        self.keep_id(self._run_id)
        each = [self._entities.Param(k, str(v)[: self._most]) for k, v in parameters.items()]
        for first in range(0, len(each), 100):  # what MLflow takes in one request
            self._client.log_batch(self._run_id, params=each[first : first + 100])
        return -1

    def log_round(self, number: int, numbers: Mapping[str, float]) -> None:
        """Add metrics whose step is the round."""
        self._log_batch(numbers, number, {self._last_round: str(number)})

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


class WandB(Tracker):
    """Track a run with Weights & Biases; needs the extra ``wandb``.

    By itself W&B also sends the console, the machine's name and load, installed packages, the
    command and the state of a git repository. None of that is sent from here. Offline each process
    leaves a folder of its own with the run's id, and ``wandb sync`` puts them together.

    Parameters
    ----------
    project : str, default "gems-flwr"
        The project of the run.
    mode : {"online", "offline", "disabled"}, optional
        By default the value of ``WANDB_MODE``, else online.
    folder : path, optional
        Where W&B makes its folder ``wandb``; by default the value of ``WANDB_DIR``, else here.
    init : mapping, optional
        Further arguments of ``wandb.init``, such as ``{"entity": "ward-7", "tags": ["cone"]}``.
    name, config
        See `Tracker`.

    Examples
    --------
    >>> from gems_flwr import Gems
    >>> from gems_flwr.tools import WandB
    >>> strategy = Gems(callbacks=[WandB(project="wards", mode="offline")])
    """

    kind = "wandb"
    # What W&B finds out by itself, and what it prints.
    _off = ("disable_code", "disable_git", "silent")
    _off_too = ("x_disable_machine_info", "x_disable_meta", "x_disable_stats")

    def __init__(
        self,
        project: str = "gems-flwr",
        *,
        mode: Literal["online", "offline", "disabled"] | None = None,
        folder: str | Path | None = None,
        init: Mapping[str, Any] | None = None,
        name: str | None = None,
        config: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(name, config)
        self._library = self._needed("wandb")
        self.project, self.folder, self.init = project, folder, dict(init or {})
        self.mode = mode or os.environ.get("WANDB_MODE") or "online"
        # At a terminal W&B would ask for an account, in the middle of the run.
        if self.mode not in ("offline", "disabled", "dryrun") and not self._library.login(
            prompt=False, verify=False
        ):
            raise OptionError(
                "Weights & Biases has no account here: run `wandb login`, set WANDB_API_KEY, or "
                "keep the run on this machine with mode=offline"
            )
        self._run: Any = None

    def open_run(self, name: str, parameters: Mapping[str, Plain], finished: int) -> int:
        """Start a run, or resume the one whose id is known."""
        earlier = self.known_id() if finished else None
        run_id = earlier or secrets.token_hex(4)
        self.keep_id(run_id)
        off = dict.fromkeys((*self._off, *self._off_too), True)
        no = {"console": "off", "host": "", "save_code": False, "x_save_requirements": False}
        how: dict[str, Any] = {
            "project": self.project,
            "name": name,
            "id": run_id,
            "resume": "allow",
            "mode": self.mode,
            "dir": None if self.folder is None else str(self.folder),
            "config": dict(parameters),
            "allow_val_change": True,
            # A run that the app itself may have started is left alone.
            "reinit": "create_new",
            "settings": self._library.Settings(**off, **no),
        }
        self._run = self._library.init(**{**how, **self.init})
        if earlier is None:
            return -1
        # Offline W&B does not know what the earlier process wrote: all that it received.
        return int(self._run.starting_step) - 1 if self._run.resumed else finished

    def log_round(self, number: int, numbers: Mapping[str, float]) -> None:
        """Add one row whose step is the round."""
        self._run.log(dict(numbers), step=number, commit=True)

    def close_run(self, values: Mapping[str, Plain], error: BaseException | None) -> None:
        """Add the outcome to the summary, below ``result/``; one that failed has status 1."""
        self._run.summary.update({f"result/{name}": value for name, value in values.items()})
        self._run.finish(exit_code=0 if error is None else 1)
