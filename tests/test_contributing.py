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
MOST_FILES = 3


def section(title):
    """Return the part of the text below a heading."""
    start = TEXT.index(f"\n### {title}\n")
    return TEXT[start:].partition(f"### {title}\n")[2].partition("\n### ")[0]


def files_in(text):
    return dict(re.findall(r'```\w+ title="([^"]+)"\n(.*?)```', text, flags=re.DOTALL))


def commands_in(text):
    return re.findall(r"```sh\n(.*?)\n```", text, flags=re.DOTALL)


@pytest.fixture(scope="module")
def try_out(tmp_path_factory):
    """Return a function that does what a section says, in a copy of the project."""

    def try_out(title):
        copy = tmp_path_factory.mktemp("project")
        for name in ("gems_flwr", "simulations", "conf"):
            shutil.copytree(
                ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "measured")
            )
        text = section(title)
        for path, content in files_in(text).items():
            assert not (copy / path).exists(), f"{path} is there already"
            (copy / path).write_text(content)
        (command,) = commands_in(text)
        program, *arguments = shlex.split(command)
        assert program == "python"
        done = subprocess.run(
            [sys.executable, *arguments, "progress=false"],
            cwd=copy,
            env=os.environ | {"PYTHONPATH": str(copy)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        (result,) = copy.glob("runs/**/result.json")
        return json.loads(result.read_text()), result.parent

    return try_out


def test_each_addition_takes_three_files_at_most():
    titles = re.findall(r"\n### (… .+)\n", TEXT)
    assert {"… a strategy", "… a data set", "… a partition", "… a stop rule"} <= set(titles)
    for title in titles:
        assert len(files_in(section(title))) <= MOST_FILES, title


@pytest.mark.slow
def test_a_strategy_is_added_as_described(try_out):
    result, folder = try_out("… a strategy")
    assert result["rounds"] == 3
    # Chance is .1; the median of nodes that hold the same kind of data learns.
    assert result["accuracy"] > 0.5
    assert folder.name.startswith("middle_model-")


@pytest.mark.slow
def test_a_data_set_is_added_as_described(try_out):
    result, folder = try_out("… a data set")
    assert folder.parent.name.startswith("wine-iid-3-")
    # Three classes; the moments of wines of three cultivars tell most of them apart.
    assert result["accuracy"] > 0.7


@pytest.mark.slow
def test_a_partition_is_added_as_described(try_out):
    _, folder = try_out("… a partition")
    nodes = json.loads((folder / "partition.json").read_text())["nodes"]
    assert len(nodes) == 4
    for node in nodes:
        # Dealt out in turn, so every node has its share of every label.
        assert all(
            train + held > 0 for train, held in zip(node["train"], node["validation"], strict=True)
        )


@pytest.mark.slow
def test_a_stop_rule_is_added_as_described(try_out):
    result, _ = try_out("… a stop rule")
    assert result["rounds"] < 50
    assert result["bytes_up"] >= 40_000
    # The round before had not spent it.
    assert result["bytes_up"] * (result["rounds"] - 1) / result["rounds"] < 40_000
