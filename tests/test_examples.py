"""Somebody else's Flower app: one line on each side, an import each, and nothing else changes."""

import difflib
import importlib
import sys
import tomllib
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict

from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.runtime.metered_grid import MeteredGrid

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
MODULES = ("client_app.py", "server_app.py", "task.py", "__init__.py")
TWINS = {
    "pytorch_gems": "pytorch_fedavg",
    "pytorch_dynamic_averaging": "pytorch_fedavg",
    "sklearn_gems": "sklearn_fedavg",
}


def lines(app, module):
    return (EXAMPLES / app / "quickstart" / module).read_text().splitlines()


@pytest.mark.parametrize("app", TWINS)
def test_the_change_is_one_line_on_the_server_and_one_on_the_client(app):
    added = {}
    for module in MODULES:
        changes = difflib.ndiff(lines(TWINS[app], module), lines(app, module))
        added[module] = [line[2:].strip() for line in changes if line.startswith("+ ")]
    assert not added["task.py"]
    assert not added["__init__.py"]
    for module, start in (("server_app.py", "strategy = "), ("client_app.py", "app = ClientApp(")):
        first, second = sorted(added[module], key=lambda line: "import" not in line)
        assert first.startswith("from gems_flwr")
        assert second.startswith(start)


def test_nobody_elses_app_needs_this_library():
    for app in set(TWINS.values()):
        assert not any("gems_flwr" in line for module in MODULES for line in lines(app, module))


@pytest.fixture
def play(monkeypatch):
    """Return a function that runs an example and returns its accuracies and what it cost."""

    def forget():
        for module in [name for name in sys.modules if name.split(".")[0] == "quickstart"]:
            del sys.modules[module]

    def play(app, nodes):
        forget()
        monkeypatch.syspath_prepend(EXAMPLES / app)
        client = importlib.import_module("quickstart.client_app")
        server = importlib.import_module("quickstart.server_app")
        project = tomllib.loads((EXAMPLES / app / "pyproject.toml").read_text())
        config = project["tool"]["flwr"]["app"]["config"]
        accuracies, evaluate = [], server.evaluate

        def listening(server_round, arrays):
            metrics = evaluate(server_round, arrays)
            accuracies.append(metrics["accuracy"])
            return metrics

        monkeypatch.setattr(server, "evaluate", listening)
        grid = MeteredGrid(InProcessGrid(client.app, nodes, config))
        context = Context(
            run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=config
        )
        server.app(grid, context)
        return accuracies, grid.total

    yield play
    forget()


@pytest.mark.parametrize(("kind", "nodes"), [("pytorch", 5), ("sklearn", 3)])
def test_gems_needs_one_round(kind, nodes, play):
    fedavg, _ = play(f"{kind}_fedavg", nodes)
    gems, traffic = play(f"{kind}_gems", nodes)
    assert len(fedavg) == 6
    assert len(gems) == 2
    # One round against one round: 43 samples of a class do not let everything be told.
    assert gems[-1] > max(0.85, fedavg[1])
    # The spaces, and a score from every node.
    assert traffic.messages_up == 2 * nodes


def test_dynamic_averaging_learns_and_keeps_the_models_on_the_nodes(play):
    _, whole = play("pytorch_fedavg", 5)
    accuracies, traffic = play("pytorch_dynamic_averaging", 5)
    assert accuracies[-1] > 0.5
    assert traffic.bytes_down < whole.bytes_down
