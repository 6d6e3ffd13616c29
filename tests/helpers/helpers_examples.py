"""The example apps: how they differ, and what they do, here or under ``flwr run``."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from flwr.app import Context, RecordDict

from gems_flwr import InProcessGrid, MeteredGrid
from gems_flwr.core import Traffic
from gems_flwr.tools.submit import COMPLETED, FlowerCli

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PACKAGE = "quickstart"
MODULES = ("client_app.py", "server_app.py", "task.py", "__init__.py")
# Ordinary apps, with how many nodes each is run.
ORDINARY = {"pytorch": 5, "sklearn": 3, "resnet": 5, "tabular": 5}
# The same apps with a strategy of this library, and which app each was.
TWINS = {
    "pytorch_import_only": "pytorch",
    "pytorch_gems": "pytorch",
    "pytorch_layerwise": "pytorch",
    "pytorch_dynamic_averaging": "pytorch",
    "sklearn_gems": "sklearn",
    "resnet_gems": "resnet",
    "tabular_gems": "tabular",
}
APPS = [app for base in ORDINARY for app in (base, *(t for t, b in TWINS.items() if b == base))]


def nodes_of(app: str) -> int:
    """Return with how many nodes an example is run."""
    return ORDINARY[TWINS.get(app, app)]


def lines(app: str, module: str) -> list[str]:
    """Return the lines of a module of an example."""
    return (EXAMPLES / app / PACKAGE / module).read_text().splitlines()


def added_lines(app: str) -> dict[str, list[str]]:
    """Return what each module of a twin has that its ordinary app has not."""
    added = {}
    for module in MODULES:
        changes = difflib.ndiff(lines(TWINS[app], module), lines(app, module))
        added[module] = [line[2:].strip() for line in changes if line.startswith("+ ")]
    return added


def project(app: str) -> dict[str, Any]:
    """Return the project file of an example."""
    return tomllib.loads((EXAMPLES / app / "pyproject.toml").read_text())


@contextlib.contextmanager
def loaded(app: str) -> Iterator[SimpleNamespace]:
    """Yield the modules of an example; they are forgotten after, since all are called alike."""
    sys.path.insert(0, str(EXAMPLES / app))
    try:
        names = ("client_app", "server_app", "task")
        yield SimpleNamespace(**{n: importlib.import_module(f"{PACKAGE}.{n}") for n in names})
    finally:
        sys.path.remove(str(EXAMPLES / app))
        for module in [name for name in sys.modules if name.split(".")[0] == PACKAGE]:
            del sys.modules[module]


@dataclass
class Played:
    """What an example did in this process."""

    traffic: Traffic
    accuracy: float
    accuracies: list[float]


def play(app: str, folder: Path, **changed: Any) -> Played:
    """Run an example in this process, and test the model that it keeps.

    `accuracies` are those of its own evaluation at the server after each round, if it has one.
    """
    config = {**project(app)["tool"]["flwr"]["app"]["config"], "output": str(folder), **changed}
    accuracies: list[float] = []
    with loaded(app) as modules:
        load_data = modules.client_app.load_data

        def seeded(partition_id, *more):
            # Batches are drawn as they would be on a machine of the node's own, whoever was before;
            # scikit-learn's solvers draw from numpy's global generator.
            torch.manual_seed(partition_id)
            np.random.seed(partition_id)
            return load_data(partition_id, *more)

        modules.client_app.load_data = seeded
        if hasattr(modules.server_app, "global_evaluate"):
            evaluate = modules.server_app.global_evaluate

            def listening(server_round, arrays):
                metrics = evaluate(server_round, arrays)
                accuracies.append(metrics["accuracy"])
                return metrics

            modules.server_app.global_evaluate = listening
        grid = MeteredGrid(InProcessGrid(modules.client_app.app, nodes_of(app), config))
        context = Context(1, 0, {}, RecordDict(), config)
        modules.server_app.app(grid, context)
    return Played(grid.total, accuracy_of(app, folder), accuracies)


def accuracy_of(app: str, folder: Path) -> float:
    """Return the accuracy of the model that an example has kept.

    On what no node has, where the app has such data, and else on the test data of all nodes.
    """
    with loaded(app) as modules:
        task = modules.task
        if hasattr(task, "create_model") and not hasattr(task, "load_centralized_dataset"):
            return _linear_accuracy(task, np.load(folder / "final_model.npz"), nodes_of(app))
        state = torch.load(folder / "final_model.pt", weights_only=True)
        build = getattr(task, "create_model", None) or getattr(task, "Net", None)
        net = (build or task.Classifier)()
        net.load_state_dict(state)
        if hasattr(task, "load_centralized_dataset"):
            device = () if hasattr(task, "create_model") else (torch.device("cpu"),)
            return float(task.test(net, task.load_centralized_dataset(), *device)[1])
        nodes = nodes_of(app)
        tests = [task.load_data(node, nodes)[1] for node in range(nodes)]
        right = sum(task.evaluator(net, test)[1] * len(test.dataset) for test in tests)
        return float(right / sum(len(test.dataset) for test in tests))


def _linear_accuracy(task: Any, model: Mapping[str, Any], nodes: int) -> float:
    tests = [task.load_data(node, nodes)[2:] for node in range(nodes)]
    features, labels = (np.concatenate(each) for each in zip(*tests, strict=True))
    scores = features @ model["coef"].T + model["intercept"]
    return float(np.mean(scores.argmax(axis=1) == labels))


@dataclass
class Observed:
    """What an example did under ``flwr run``."""

    status: str
    log: str
    rounds: int
    accuracy: float | None

    @property
    def completed(self) -> bool:
        """Whether Flower says that the run completed."""
        return self.status == COMPLETED

    @property
    def tracebacks(self) -> int:
        """How many tracebacks the log has."""
        return self.log.count("Traceback (most recent call last)")

    @property
    def logged_bytes(self) -> tuple[int, int] | None:
        """What the library's own last line says of bytes up and down; None for other apps."""
        found = re.findall(r"event=end .*?bytes_up=(\d+) bytes_down=(\d+)", self.log)
        return (int(found[-1][0]), int(found[-1][1])) if found else None


def observe(
    app: str, flwr: FlowerCli, folder: Path, *options: str, seconds: float | None = None
) -> Observed:
    """Run an example on a SuperLink and wait for its end."""
    output = folder / app
    run = flwr.submit(EXAMPLES / app, "-c", f'output="{output}"', *options)
    status = flwr.wait(run, seconds)
    log = flwr.log(run)
    # As Flower says it, and as this library does.
    rounds = [int(n) for n in re.findall(r"(?:\[ROUND |event=round_end round=)(\d+)", log)]
    accuracy = accuracy_of(app, output) if status == COMPLETED else None
    return Observed(status, log, max(rounds, default=0), accuracy)


def in_simulation(app: str) -> tuple[str, str]:
    """Return the option of ``flwr run`` for an example's number of nodes, one processor each."""
    return ("--federation-config", f"num-supernodes={nodes_of(app)} client-resources-num-cpus=1")
