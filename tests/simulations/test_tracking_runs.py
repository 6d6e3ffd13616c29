"""``+tracking=mlflow`` and ``live=true``: one line on the command line, and no other run."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers_patience import HANG_SECONDS
from mlflow.tracking import MlflowClient
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gems_flwr.errors import NotInstalledError
from simulations.config import CONFIG_DIR, ConfigError, RunConfig, compose_config, without_plus
from simulations.experiment.run_trackers import run_parameters, trackers_of
from simulations.run import run

ROOT = Path(__file__).resolve().parents[2]
TRACKERS = sorted(path.stem for path in (CONFIG_DIR / "tracking").glob("*.yaml"))


def board(folder):
    return ["tracking=tensorboard", f"tracking.tensorboard.log_dir={folder}"]


@pytest.mark.parametrize("name", TRACKERS)
def test_every_tracker_composes_with_and_without_a_plus_and_changes_no_name(name):
    plain = compose_config([])
    for word in (f"tracking={name}", f"+tracking={name}", f"++tracking={name}"):
        config = compose_config([word])
        assert list(config.tracking) == [name]
        assert config.run_name() == plain.run_name()
        assert RunConfig.from_json(config.to_json()) == config
    assert compose_config(["live=true"]).run_name() == plain.run_name()
    # Options of a tracker may have a plus that means something.
    assert without_plus(["+tracking.wandb.init.group=a"]) == ["+tracking.wandb.init.group=a"]


@pytest.mark.parametrize("name", TRACKERS)
def test_every_tracker_is_built_from_its_config(name, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = compose_config([f"+tracking={name}", "seed=4"])
    [tracker] = trackers_of(config)
    assert tracker.name == config.run_name()
    assert tracker.nodes is False
    assert tracker.config["seed"] == 4


def test_several_trackers_at_once():
    config = compose_config(["+tracking=[mlflow,tensorboard]", "tracking.mlflow.experiment=wards"])
    assert [type(each).__name__ for each in trackers_of(config)] == ["MLflow", "TensorBoard"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tracking=mlflow", "+tracking.mlflow.ur=x"], r"no tracking\.mlflow\.ur.*experiment"),
        (["tracking=mlflow", "tracking.mlflow.nodes=3"], "nodes must be bool, got 3"),
        (["+tracking.other=3"], r"tracking\.other must be a tracker"),
    ],
)
def test_mistakes_are_refused_with_what_is_allowed(words, said):
    with pytest.raises(ConfigError, match=said):
        compose_config(words)


def test_parameters_are_the_config_by_flat_names_without_the_persons_own():
    config = compose_config(["strategy=gems", "strategy.space.rank=7", "data_dir=/home/me"])
    values = run_parameters(config)
    assert (values["strategy"], values["dataset"], values["nodes"]) == ("gems", "digits", 5)
    assert values["strategy.space"]["rank"] == 7
    assert "/home/me" not in repr(values)
    assert "_target_" not in repr(values)


def test_a_tracked_run_is_the_run_that_it_was_and_its_folder_says_where_it_is_tracked(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    console = Console(quiet=True)
    words = ["strategy=fedavg", "rounds=2", "nodes=3"]
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    mlflow = ["+tracking=mlflow", f"tracking.mlflow.uri={uri}"]
    alone = run(compose_config(words), tmp_path / "alone", console)
    config = compose_config([*words, *mlflow])
    tracked = run(config, tmp_path / "tracked", console)
    for result in (alone, tracked):
        del result["seconds"]
    assert tracked == alone
    # An address may hold a password, and the file goes to the tracker.
    assert "tracking" not in (tmp_path / "tracked" / "config.yaml").read_text()
    [run_id] = json.loads((tmp_path / "tracked" / "tracking.json").read_text()).values()
    client = MlflowClient(uri)
    kept = client.get_run(run_id)
    assert kept.info.run_name == config.run_name()
    assert kept.data.metrics["accuracy"] == alone["accuracy"]
    assert kept.data.metrics["total/bytes_up"] == alone["bytes_up"]
    assert kept.data.params["strategy"] == "fedavg"
    files = [each.path for each in client.list_artifacts(run_id)]
    assert files == ["config.yaml", "model.safetensors"]
    # Once more from the beginning is another run.
    fresh = compose_config([*words, *mlflow, "fresh=true"])
    run(fresh, tmp_path / "tracked", console)
    assert json.loads((tmp_path / "tracked" / "tracking.json").read_text())["mlflow"] != run_id


def test_a_tracker_in_trouble_is_said_on_the_console_and_the_run_ends_well(tmp_path):
    (tmp_path / "file").write_text("")
    file = io.StringIO()
    words = ["strategy=fedavg", "rounds=2", "nodes=3", *board(tmp_path / "file")]
    result = run(compose_config(words), tmp_path / "run", Console(file=file, width=200))
    assert result["rounds"] == 2
    assert file.getvalue().count("TensorBoard does not follow the run, which goes on") == 1


def test_a_missing_library_is_said_before_any_node_starts(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(NotInstalledError, match="tensorboard"):
        run(compose_config(board(tmp_path)), tmp_path / "run", Console(quiet=True))
    assert not (tmp_path / "run" / "rounds.jsonl").exists()


@pytest.mark.slow
def test_a_multirun_on_the_command_line_tracks_each_job_and_shows_lines(tmp_path):
    """As a user types it, with the plus; standard error is no terminal here."""
    words = [
        "strategy=fedavg",
        "nodes=3",
        "rounds=2",
        "seed=0,1",
        "live=true",
        "+tracking=tensorboard",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "simulations.run", "-m", *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=HANG_SECONDS,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    assert "\x1b" not in done.stderr
    assert "round 2 of 2: 3 of 3 answered" in done.stderr
    results = sorted(tmp_path.glob("runs/*/*/result.json"))
    assert len(results) == 2
    for path in results:
        name = path.parent.relative_to(tmp_path / "runs")
        events = EventAccumulator(str(tmp_path / "tensorboard" / name)).Reload()
        last = events.Scalars("accuracy")[-1]
        accuracy = json.loads(path.read_text())["accuracy"]
        assert (last.step, last.value) == (2, pytest.approx(accuracy, rel=1e-6))
