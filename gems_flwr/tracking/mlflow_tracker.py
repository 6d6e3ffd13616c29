"""A run in MLflow: parameters, metrics by round, the outcome as tags and metrics, files.

Everything goes through ``MlflowClient``, so nothing of MLflow's own global state (active run,
tracking address) is touched, and nothing is sent that MLflow finds out by itself, such as the
user's name. A resumed run goes on in the run whose id lies in its folder; rounds that MLflow lacks
are added. The small package ``mlflow-skinny`` suffices: for a store in a file (SQLite) it needs
alembic and SQLAlchemy besides, which Flower brings.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gems_flwr.tracking.round_numbers import Plain
from gems_flwr.tracking.run_ids import keep_id, known_id
from gems_flwr.tracking.tracker import Opening, Status, Tracker, needed

# What MLflow takes in one request, and in one value.
_MOST_PARAMETERS = 100
_MOST_METRICS = 1000
_MOST_CHARACTERS = 500
# Written with every round: how far the run is.
_LAST_ROUND = "gems_flwr.last_round"
_STATUS = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}


class MLflow(Tracker):
    """Track a run with MLflow; needs the extra ``mlflow``.

    Parameters
    ----------
    experiment : str, default "gems-flwr"
        The experiment that the run belongs to; it is made if it does not exist.
    name : str, optional
        What the run is called; by default the name of its checkpoint folder, else the strategy's.
    uri : str, optional
        Where runs are kept, such as ``sqlite:///mlflow.db`` or ``http://tracking:5000``; by default
        what MLflow itself takes (``MLFLOW_TRACKING_URI``, else ``mlflow.db`` in this folder).
    config : mapping, optional
        Further parameters, such as ``context.run_config``.
    nodes : bool, default False
        Whether there is a series for each node, by name. Otherwise there are totals alone.
    artifacts : bool, default False
        Whether `log_files` adds files: those that name no node, and with `nodes` all.
    wait_seconds : float, default 60
        How long the end of a run waits until MLflow has everything.

    Examples
    --------
    >>> from gems_flwr import Gems, MLflow
    >>> strategy = Gems(callbacks=[MLflow(experiment="wards")])
    """

    def __init__(
        self,
        experiment: str = "gems-flwr",
        *,
        name: str | None = None,
        uri: str | None = None,
        config: Mapping[str, object] | None = None,
        nodes: bool = False,
        artifacts: bool = False,
        wait_seconds: float = 60.0,
    ) -> None:
        super().__init__(
            name=name, config=config, nodes=nodes, artifacts=artifacts, wait_seconds=wait_seconds
        )
        self.experiment = experiment
        self.uri = uri
        self._tracking = needed("mlflow.tracking", "mlflow")
        self._entities = needed("mlflow.entities", "mlflow")
        self._failure: type[Exception] = needed("mlflow.exceptions", "mlflow").MlflowException
        self._client: Any = None
        self._run_id = ""

    def open_run(self, opening: Opening) -> int:
        """Begin a run, or go on with the one whose id is known; parameters are written once."""
        # Making a new database is told in lines that tear a progress bar.
        for chatty in ("mlflow.store.db.utils", "alembic.runtime.migration"):
            logging.getLogger(chatty).setLevel(logging.WARNING)
        self._client = self._tracking.MlflowClient(tracking_uri=self.uri)
        earlier = known_id(opening.folder, "mlflow") if opening.goes_on else None
        known, last_round = dict[str, str](), -1
        run = self._find(earlier) if earlier else None
        if run is None:
            # A name must be given: MLflow would draw one from Python's global generator.
            run = self._client.create_run(self._experiment_id(), run_name=opening.name)
            keep_id(opening.folder, "mlflow", run.info.run_id)
        else:
            known = run.data.params
            last_round = int(run.data.tags.get(_LAST_ROUND, -1))
            self._client.update_run(run.info.run_id, status="RUNNING")
        self._run_id = run.info.run_id
        new = [
            self._entities.Param(name, str(value)[:_MOST_CHARACTERS])
            for name, value in opening.parameters.items()
            if name not in known
        ]
        for first in range(0, len(new), _MOST_PARAMETERS):
            self._client.log_batch(self._run_id, params=new[first : first + _MOST_PARAMETERS])
        return last_round

    def log_round(self, number: int, numbers: Mapping[str, float]) -> None:
        """Add metrics whose step is the round."""
        self._log(numbers, number, {_LAST_ROUND: str(number)})

    def log_end(self, values: Mapping[str, Plain]) -> None:
        """Add the outcome below ``result/``: numbers as metrics, words as tags."""
        numbers, words = {}, {}
        for name, value in values.items():
            if isinstance(value, str | bool):
                words[f"result/{name}"] = str(value)[:_MOST_CHARACTERS]
            else:
                numbers[f"result/{name}"] = value
        self._log(numbers, int(values["rounds"]), words)

    def log_file(self, path: Path) -> None:
        """Add a file to the run's artifacts."""
        self._client.log_artifact(self._run_id, str(path))

    def close_run(self, status: Status) -> None:
        """End the run."""
        self._client.set_terminated(self._run_id, _STATUS[status])

    def _find(self, run_id: str) -> Any:
        """Return a run, or None if it is not in this store, or was thrown away."""
        try:
            run = self._client.get_run(run_id)
        except self._failure as error:
            if getattr(error, "error_code", "") != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        return run if run.info.lifecycle_stage == "active" else None

    def _experiment_id(self) -> str:
        found = self._client.get_experiment_by_name(self.experiment)
        if found is None:
            try:
                return str(self._client.create_experiment(self.experiment))
            except self._failure:
                # Another run of a parallel sweep may have been quicker.
                found = self._client.get_experiment_by_name(self.experiment)
                if found is None:
                    raise
        return str(found.experiment_id)

    def _log(self, numbers: Mapping[str, float], step: int, tags: Mapping[str, str]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._entities.Metric(name, float(v), now, step) for name, v in numbers.items()]
        labels = [self._entities.RunTag(name, value) for name, value in tags.items()]
        # What says how far the run is comes with the last part.
        *parts, last = [
            metrics[first : first + _MOST_METRICS]
            for first in range(0, max(len(metrics), 1), _MOST_METRICS)
        ]
        for part in parts:
            self._client.log_batch(self._run_id, metrics=part)
        self._client.log_batch(self._run_id, metrics=last, tags=labels)
