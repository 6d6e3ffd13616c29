"""CONTRIBUTING.md is tried: the files that it shows are put where it says, and its commands run."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
TITLES = re.findall(r"\n### (… .+)\n", TEXT)
MOST_FILES = 3


def section(title):
    """Return the part of the text below a heading."""
    start = TEXT.index(f"\n### {title}\n")
    return TEXT[start:].partition(f"### {title}\n")[2].partition("\n### ")[0]


def blocks_in(text):
    """Return kind, path and content of the files that a section shows."""
    return re.findall(r'```(\w+) title="([^"]+)"\n(.*?)```', text, flags=re.DOTALL)


def write(kind, path, content):
    """Write a new file, or add the lines marked by + to an old one."""
    if kind != "diff":
        assert not path.exists(), f"{path} is there already"
        path.write_text(content)
        return
    lines = content.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if line[0] == " ")
    after = "".join(line[1:] for line in lines)
    old = path.read_text()
    assert old.count(before) == 1, f"{path} does not have, once:\n{before}"
    path.write_text(old.replace(before, after))


@pytest.fixture
def try_out(tmp_path):
    """Return a function that does what a section says in a copy of the project, and its output."""

    def try_out(title):
        for name in ("gems_flwr", "simulations", "conf"):
            ignored = shutil.ignore_patterns("__pycache__", "measured")
            shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
        text = section(title)
        for kind, path, content in blocks_in(text):
            write(kind, tmp_path / path, content)
        (commands,) = re.findall(r"```sh\n(.*?)\n```", text, flags=re.DOTALL)
        said = ""
        for command in commands.splitlines():
            program, *arguments = shlex.split(command)
            assert program == "python"
            done = subprocess.run(
                [sys.executable, *arguments],
                cwd=tmp_path,
                env=os.environ | {"PYTHONPATH": str(tmp_path), "COLUMNS": "200"},
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, done.stderr
            said += done.stdout
        return said

    return try_out


@pytest.fixture
def result(tmp_path):
    """Return a function that reads the result of the run that was tried, and its folder."""

    def result():
        (path,) = tmp_path.glob("runs/**/result.json")
        return json.loads(path.read_text()), path.parent

    return result


def test_each_addition_takes_three_files_at_most():
    assert {"… a strategy", "… a data set", "… a partition", "… a stop rule"} <= set(TITLES)
    for title in TITLES:
        files = {path for _, path, _ in blocks_in(section(title))}
        assert 1 <= len(files) <= MOST_FILES, title


def test_what_is_shown_is_written_as_the_project_is(tmp_path):
    for kind, path, content in blocks_in(TEXT):
        if kind == "python":
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(content)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    # What is imported is not there, so the linter has to be told that it is our own.
    own = 'lint.isort.known-first-party = ["gems_flwr", "simulations"]'
    for command in (["check", "--config", own], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--no-cache", "."],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_a_strategy_is_added_as_described(try_out, result):
    try_out("… a strategy")
    found, folder = result()
    assert found["rounds"] == 3
    # Chance is .1; the median of nodes that hold the same kind of data learns.
    assert found["accuracy"] > 0.5
    assert folder.name.startswith("middle_model-")


@pytest.mark.slow
def test_a_data_set_is_added_as_described(try_out, result):
    try_out("… a data set")
    found, folder = result()
    assert folder.parent.name.startswith("wine-iid-3-")
    # Three classes; the moments of wines of three cultivars tell most of them apart.
    assert found["accuracy"] > 0.7


@pytest.mark.slow
def test_a_partition_is_added_as_described(try_out, result):
    try_out("… a partition")
    _, folder = result()
    nodes = json.loads((folder / "partition.json").read_text())["nodes"]
    assert len(nodes) == 4
    for node in nodes:
        # Dealt out in turn, so every node has its share of every label.
        assert all(
            train + held > 0 for train, held in zip(node["train"], node["validation"], strict=True)
        )


@pytest.mark.slow
def test_a_stop_rule_is_added_as_described(try_out, result):
    try_out("… a stop rule")
    found, _ = result()
    assert found["rounds"] < 50
    assert found["bytes_up"] >= 40_000
    # The round before had not spent it.
    assert found["bytes_up"] * (found["rounds"] - 1) / found["rounds"] < 40_000


@pytest.mark.slow
def test_a_space_is_added_as_described(try_out, result):
    try_out("… a space")
    found, _ = result()
    # Boxes of that width around layers that began alike have points in common.
    assert found["details"]["status"] == "feasible"
    assert found["accuracy"] > 0.5


@pytest.mark.slow
def test_a_sampling_rule_is_added_as_described(try_out, result):
    try_out("… a sampling rule")
    found, _ = result()
    assert found["rounds"] == 3
    assert found["details"]["sampling"] == "data"


@pytest.mark.slow
def test_an_experiment_is_added_as_described(try_out, tmp_path):
    said = try_out("… an experiment")
    (path,) = tmp_path.glob("runs/**/node-sizes.json")
    sizes = json.loads(path.read_text())
    # Node k gets a share in proportion to 1 / (k + 1).
    assert sizes == sorted(sizes, reverse=True)
    assert str(sizes) in said


@pytest.mark.slow
def test_a_report_column_is_added_as_described(try_out):
    said = try_out("… a report column")
    # Two rounds, five nodes, a message and an answer each.
    assert "messages" in said
    assert "20" in said
