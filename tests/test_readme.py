"""The README is tried: every command in it is run or composed; its snippets run in packaging."""

import itertools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from helpers_patience import HANG_SECONDS
from hydra.core.override_parser.overrides_parser import OverridesParser

from simulations.config import compose_config
from simulations.experiment.experiment import Experiment

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
# How a command begins, and the test that runs it.
ELSEWHERE = {
    "gems-flwr report runs": "tests/test_packaging.py::test_the_installed_command_runs_simulations",
    "make demo": "tests/test_readme.py::test_the_demo_runs",
}
# What runs these tests, or is a setting.
BY_HAND = ("make test", "export GEMS_FLWR_DATA=")


def commands():
    """Return every line of an indented block, without its comment."""
    blocks = re.findall(r"(?:^|\n\n)((?:    \S.*\n?)+)", README)
    lines = [line for block in blocks for line in block.splitlines()]
    return [re.sub(r"\s{2,}#.*", "", line.strip()) for line in lines]


COMMANDS = commands()
RUNS = [line for line in COMMANDS if line.startswith("gems-flwr run ")]


def single_runs(line):
    """Return the options of each run that a command stands for; ``-m`` sweeps over commas."""
    words = shlex.split(line)[2:]
    if words[0] != "-m":
        return [words]
    parsed = OverridesParser.create().parse_overrides(words[1:])
    choices = [
        [f"{each.get_key_element()}={value}" for value in each.sweep_string_iterator()]
        if each.is_sweep_override()
        else [each.input_line]
        for each in parsed
    ]
    return [list(run) for run in itertools.product(*choices)]


def test_every_command_is_run_by_a_test_or_composed():
    assert RUNS
    for line in COMMANDS:
        if line.startswith("make "):
            assert re.search(rf"^{line.split()[1]}:", MAKEFILE, re.MULTILINE), line
        if line in RUNS or line.startswith(BY_HAND):
            continue
        (test,) = (test for start, test in ELSEWHERE.items() if line.startswith(start))
        path, _, name = test.partition("::")
        assert f"def {name}" in (ROOT / path).read_text(), f"{path} has no {name}"


@pytest.mark.parametrize("line", RUNS)
def test_every_simulation_composes(line):
    """Groups, keys and values; what its strategy and space make of them, too."""
    for words in single_runs(line):
        config = compose_config(words)
        assert Experiment(config).config == config


@pytest.mark.deep
def test_the_demo_runs(tmp_path):
    """What ``make demo`` calls."""
    (recipe,) = re.findall(r"^demo: .*\n\t@\$\(BIN\)/python (.*)$", MAKEFILE, re.MULTILINE)
    done = subprocess.run(
        [sys.executable, *shlex.split(recipe)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("runs/**/*.html"))


def test_the_first_page_of_the_documentation_has_the_same_snippets():
    assert snippets(README) == snippets((ROOT / "docs" / "index.md").read_text())


def snippets(text):
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
