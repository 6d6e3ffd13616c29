"""Somebody else's Flower app: one line on each side, an import each, and nothing else changes."""

import re
import shutil

import pytest
import torch
from flwr.cli.config_utils import load_and_validate
from helpers_examples import (
    APPS,
    BEFORE,
    EXAMPLE_NODES,
    EXAMPLES,
    MODULES,
    added_lines,
    in_simulation,
    lacking,
    lines,
    nodes_of,
    observe,
    play,
)
from helpers_flower_home import flower_of_its_own
from helpers_patience import HANG_SECONDS

from gems_flwr.tools.submit import FlowerCli

# A line on the server, one on the client, and what stands in a handler; imports come on top.
CHANGES = {
    "pytorch:import_only": [],
    "pytorch:layerwise": ["strategy = ", "app = ClientApp(", "freeze_layers(model, msg)"],
}
USUAL = ["strategy = ", "app = ClientApp("]
OURS = [app for app in APPS if not app.endswith(BEFORE)]


@pytest.fixture
def needs(app):
    """Skip an example whose weights are not installed."""
    if missing := lacking(app):
        pytest.skip(f"{app} needs packages that are not installed: {', '.join(missing)}")


def test_these_are_all_examples():
    assert {path.parent.name for path in EXAMPLES.glob("*/pyproject.toml")} == set(EXAMPLE_NODES)


@pytest.mark.parametrize("app", OURS)
def test_what_changes_in_an_app_is_a_line_on_each_side_and_an_import_each(app):
    added = added_lines(app)
    assert not added["task.py"]
    assert not added["__init__.py"]
    changed = [line for each in added.values() for line in each if "import" not in line]
    expected = CHANGES.get(app, USUAL)
    assert len(changed) == len(expected)
    assert all(any(line.startswith(start) for line in changed) for start in expected)
    for module in ("server_app.py", "client_app.py"):
        imports = [line for line in added[module] if "import" in line]
        uses = any("import" not in line for line in added[module])
        assert len(imports) == (1 if uses or module == "server_app.py" else 0)
        assert all(line.startswith("from gems_flwr import ") for line in imports)


@pytest.mark.parametrize("app", EXAMPLE_NODES)
def test_flower_takes_an_examples_project_file(app):
    """Of a name it wants letters, digits and hyphens, at most 32; the rest it says itself."""
    config, warnings = load_and_validate(EXAMPLES / app / "pyproject.toml", check_module=False)
    assert not warnings
    assert re.fullmatch(r"[a-z][a-z0-9-]{0,31}", config["project"]["name"])
    assert "gems-flwr" in config["project"]["dependencies"]


def test_nobody_elses_app_needs_this_library():
    for app in EXAMPLE_NODES:
        text = [line for module in MODULES for line in lines(f"{app}:{BEFORE}", module)]
        assert not any("gems_flwr" in line for line in text)


def test_the_import_alone_changes_no_number(tmp_path):
    """One round: Flower sums in any order, and what that rounds differently, training enlarges."""
    apps = ("pytorch:fedavg", "pytorch:import_only")
    for app in apps:
        play(app, tmp_path / app, **{"num-server-rounds": 1})
    models = [torch.load(tmp_path / app / "final_model.pt", weights_only=True) for app in apps]
    for name, array in models[0].items():
        torch.testing.assert_close(models[1][name], array, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("app", "least"), [("pytorch", 0.7), ("sklearn", 0.9), ("tabular", 0.9)])
def test_gems_reaches_in_one_round_what_fedavg_does_or_more(app, least, tmp_path):
    """There are 30 flowers to test on: one random step can be as right as that."""
    first = play(f"{app}:{BEFORE}", tmp_path / "theirs", **{"num-server-rounds": 1})
    ours = play(app, tmp_path / "ours")
    assert ours.accuracy > least
    assert ours.accuracy >= first.accuracy
    # The spaces, and a score from every node.
    assert ours.traffic.messages_up == 2 * nodes_of(app)


def test_layer_by_layer_learns_at_the_apps_own_widths(tmp_path):
    """A round for each of five layers; the app's own `evaluate_fn` and fixed `view` still work."""
    theirs = play("pytorch:fedavg", tmp_path / "theirs", **{"num-server-rounds": 1})
    ours = play("pytorch:layerwise", tmp_path / "ours")
    assert ours.accuracy > max(0.8, theirs.accuracy)
    assert len(ours.accuracies) == 1 + 5


def test_dynamic_averaging_learns_and_keeps_the_models_on_the_nodes(tmp_path):
    theirs = play("pytorch:fedavg", tmp_path / "theirs")
    ours = play("pytorch:dynamic_averaging", tmp_path / "ours")
    assert ours.accuracy > 0.5
    assert ours.traffic.bytes_up < 0.8 * theirs.traffic.bytes_up


@pytest.mark.slow
@pytest.mark.parametrize(
    ("app", "least"), [("pretrained-images", 0.7), ("sentence-embeddings", 0.5)]
)
def test_the_head_of_a_frozen_network_takes_one_round(app, least, needs, tmp_path):
    """`least` is far above the share of the most frequent class, .11 and .13."""
    ours = play(app, tmp_path)
    assert ours.accuracy > least
    # All but the head is on the nodes: not even one of its layers travels.
    assert ours.traffic.total_bytes < 5e6


@pytest.fixture(scope="module")
def flower(tmp_path_factory):
    """Flower's command line, with a SuperLink of its own for all examples."""
    folder = tmp_path_factory.mktemp("flower")
    with flower_of_its_own(folder / "of-its-own") as (environment, neutral):
        yield FlowerCli(None, environment, neutral), folder


under_flower = [
    pytest.mark.deep,
    pytest.mark.xdist_group("examples"),
    pytest.mark.skipif(shutil.which("ps") is None, reason="needs ps to stop what it started"),
]


@pytest.mark.parametrize("app", [pytest.param(app, marks=under_flower) for app in APPS])
def test_every_example_runs_under_flwr_run_without_a_traceback(app, needs, flower):
    """``make examples`` prints what each reaches."""
    flwr, folder = flower
    seen = observe(app, flwr, folder, *in_simulation(app), seconds=HANG_SECONDS)
    assert seen.completed, seen.log[-3000:]
    assert seen.tracebacks == 0
    assert str(folder / app) in seen.log
    assert (seen.logged_bytes is None) == app.endswith(BEFORE)
