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
MOST_FILES = 5


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


def test_each_addition_takes_a_few_files():
    assert {"… a strategy", "… a data set", "… a partition"} <= set(TITLES)
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
def test_a_stage_its_question_and_a_limit_are_added_as_described(try_out):
    """Of 20 held-out samples, 40 to 59 modulo 3: 6, 7 and 7; the other node's limit refuses."""
    said = try_out("… a stage with its question and a limit")
    assert "{'0': [6, 7, 7]}" in said
    assert "allow_scores" in said
