"""Aggregation by files, as a user types it."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from gems_flwr.__main__ import main
from gems_flwr.spaces import SpaceFolder, load_space, save_space
from gems_flwr.spaces.ball import BallSpace, Radius
from gems_flwr.spaces.cone import build_cone

CENTERS = np.array([[4.0, 0.0, 0.0], [0.0, 4.0, 0.0], [0.0, 0.0, 4.0]])
OUT = ("-o", "model.safetensors")


def data(labels, seed, count=80):
    rng = np.random.default_rng(seed)
    y = np.repeat(labels, count)
    inputs = CENTERS[y] + rng.normal(size=(len(y), 3))
    return torch.from_numpy(inputs).float(), torch.from_numpy(y)


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """Three nodes with two classes of three each, as cones; a ball; and what is no space."""
    folder = tmp_path_factory.mktemp("spaces")
    for node, labels in enumerate([[0, 1], [1, 2], [0, 2]]):
        save_space(folder / f"node-{node}.safetensors", build_cone(*data(labels, node), 3))
    save_space(folder / "ball-0.safetensors", BallSpace(np.zeros(12), Radius(1.0, "sampled", 0.5)))
    (folder / "bad.safetensors").write_text("no space")
    (folder / "full.safetensors").mkdir()
    return folder


@pytest.fixture(autouse=True)
def files(template, tmp_path, monkeypatch):
    """A copy of the template to work in; the names of the cones."""
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return [f"node-{node}.safetensors" for node in range(3)]


def accuracy():
    arrays = load_file("model.safetensors")
    x, y = data([0, 1, 2], 50)
    scores = x.numpy() @ arrays["weight"].T + arrays["bias"]
    return float((scores.argmax(1) == y.numpy()).mean())


def aggregate(*arguments):
    try:
        return main(["aggregate", *map(str, arguments)])
    except SystemExit as left:  # argparse
        return left.code


def test_files_become_a_model_that_knows_all_classes(files, capsys):
    assert aggregate(*files, *OUT) == 0
    assert accuracy() > 0.95
    printed = capsys.readouterr().out
    assert "3 nodes, good enough for every node" in printed
    assert "node-2: margin +" in printed


def test_a_file_that_comes_later_is_added_to_what_was_there(files, capsys):
    assert aggregate(files[0], *OUT) == 0
    before = accuracy()
    assert aggregate("--add", *files[1:], *OUT) == 0
    assert accuracy() > before
    aggregate(*files, "-o", "once.safetensors")
    assert Path("model.safetensors").read_bytes() == Path("once.safetensors").read_bytes()
    assert "3 nodes" in capsys.readouterr().out
    # Without --add the earlier files are forgotten.
    aggregate(files[0], *OUT)
    aggregate("--add", files[1], *OUT)
    assert "2 nodes" in capsys.readouterr().out.splitlines()[-3]


def test_without_a_node_the_model_is_to_the_bit_as_if_it_had_never_been_there(files, capsys):
    aggregate(*files, *OUT)
    kept = Path("model.spaces")
    assert aggregate("--remove", "node-1", *OUT) == 0
    assert sorted(SpaceFolder(kept).load()) == ["node-0", "node-2"]
    aggregate(files[2], files[0], "-o", "never.safetensors")
    assert Path("model.safetensors").read_bytes() == Path("never.safetensors").read_bytes()
    assert aggregate("--remove", "node-1", *OUT) == 2
    assert "no space of ['node-1'] is kept in model.spaces" in capsys.readouterr().err
    assert aggregate("--remove", "node-0", "--remove", "node-2", *OUT) == 2
    assert "no usable space is left" in capsys.readouterr().err
    assert sorted(SpaceFolder(kept).load()) == ["node-0", "node-2"]


def test_a_node_leaves_the_spaces_of_a_run_and_the_other_layers_stay(files):
    spaces = {name: load_space(f"{name}.safetensors") for name in ("node-0", "node-1", "node-2")}
    SpaceFolder(Path("run/spaces")).save(spaces)
    layers = {"body": np.ones(5, np.float32), "head.weight": np.zeros((3, 3), np.float32)}
    save_file({**layers, "head.bias": np.zeros(3, np.float32)}, "model.safetensors")
    keys = ("--keys", "head.weight", "head.bias")
    assert aggregate("--spaces", "run/spaces", "--remove", "node-2", *OUT, *keys) == 0
    found = load_file("model.safetensors")
    assert found["body"].tolist() == [1] * 5
    aggregate(*files[:2], "-o", "never.safetensors")
    assert np.array_equal(found["head.weight"], load_file("never.safetensors")["weight"])
    assert sorted(SpaceFolder(Path("run/spaces")).load()) == ["node-0", "node-1"]


def test_a_bad_file_is_named_and_the_others_are_aggregated(files, capsys):
    x, y = data([0, 1], 3)
    save_space("other.safetensors", build_cone(x[:, :2], y, 3))
    more = ("bad.safetensors", "none.safetensors", "ball-0.safetensors", "other.safetensors")
    assert aggregate(*files, *more, *OUT) == 0
    printed = capsys.readouterr()
    assert "left out: node bad" in printed.err
    assert "left out: node none" in printed.err
    assert "left out: node ball-0: kind: expected cone" in printed.err
    assert "left out: node other: dimension: expected 12" in printed.err
    assert "3 nodes" in printed.out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("node-0.safetensors",), "required: -o"),
        (("gone.safetensors", *OUT), "no usable space is left"),
        (("bad.safetensors", *OUT), "bad"),
        (OUT, "name at least one space file"),
        (("node-0.safetensors", "-o", "full.safetensors"), "a folder is in the way"),
        (("node-0.safetensors", "-o", "node-0.safetensors"), "one of the space files"),
        (("node-0.safetensors", "-o", "/proc/no/m.safetensors"), "/proc/no"),
        (("ball-0.safetensors", *OUT), "the only kind that files are aggregated of, got ball"),
    ],
)
def test_a_mistake_is_named_and_no_file_is_changed(arguments, reason, capsys):
    before = Path("node-0.safetensors").read_bytes()
    assert aggregate(*arguments) == 2
    printed = capsys.readouterr().err
    assert reason in printed
    assert "Traceback" not in printed
    assert not Path("model.safetensors").exists()
    assert Path("node-0.safetensors").read_bytes() == before


# --- the command line itself ------------------------------------------------------------------


def test_every_command_says_what_its_options_are(capsys):
    for command in ("aggregate", "inspect", "submit"):
        with pytest.raises(SystemExit) as left:
            main([command, "--help"])
        assert left.value.code == 0
        assert f"usage: gems-flwr {command}" in capsys.readouterr().out
    for words, reason in (((), "arguments are required"), (("agregate",), "invalid choice")):
        with pytest.raises(SystemExit) as left:
            main(words)
        assert left.value.code == 2
        assert reason in capsys.readouterr().err


def test_an_interrupt_is_no_traceback(capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("gems_flwr.tools.leaks.command.load_space", interrupted)
    assert main(["inspect", "node-0.safetensors"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(
    ("arguments", "instead"),
    [
        ((".",), "gems-flwr submit ."),
        (("my-app", "my-superlink"), "gems-flwr submit my-app"),
        (("-c", "rounds=3"), "gems-flwr submit APP"),
    ],
)
def test_whoever_submits_an_app_by_the_simulations_command_is_sent_to_the_other(
    capsys, arguments, instead
):
    assert main(["run", *arguments]) == 2
    assert capsys.readouterr().err.startswith(instead)


@pytest.mark.parametrize("command", ["run", "report"])
def test_without_the_extra_a_command_says_what_to_install(capsys, monkeypatch, command):
    from importlib.util import find_spec

    gone = ("hydra", "ray")
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name in gone else find_spec(name)
    )
    assert main([command]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("pip install 'gems-flwr[simulations]'")
    assert "hydra, ray" in printed


@pytest.mark.parametrize(
    ("status", "expected"), [("finished:completed", 0), ("finished:failed", 1)]
)
def test_a_submitted_run_ends_with_a_status_that_says_how_it_ended(monkeypatch, status, expected):
    asked = []

    def flwr(command, **options):
        asked.append(command[1:])
        text = {
            "run": '{"success": true, "run-id": 7}',
            "list": f'{{"runs": [{{"status": "{status}"}}]}}',
        }
        return subprocess.CompletedProcess(command, 0, f"hello {text.get(command[1], '')}", "")

    monkeypatch.setattr(subprocess, "run", flwr)
    assert main(["submit", "app", "link", "-c", "rounds=3"]) == expected
    assert asked[0] == ["run", "app", "link", "-c", "rounds=3", "--format", "json"]
    assert asked[1] == ["log", "7", "link", "--stream"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [(("no-app", "gone"), "no-app"), ((".", "nowhere"), "'nowhere' not found")],
)
def test_what_flower_refuses_is_said_in_one_line(tmp_path, monkeypatch, capsys, arguments, reason):
    home = tmp_path / "flower"
    home.mkdir()
    address = 'address = "127.0.0.1:1"\ninsecure = true\n'
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "gone"\n\n[superlink.gone]\n{address}'
    )
    monkeypatch.setenv("FLWR_HOME", str(home))
    monkeypatch.chdir(Path(__file__).parents[2])
    assert main(["submit", *arguments]) == 2
    printed = capsys.readouterr().err
    assert reason in printed
    assert printed.count("\n") == 1


def test_the_command_line_starts_without_torch():
    code = "import sys, gems_flwr.__main__; print({'torch', 'sklearn'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
