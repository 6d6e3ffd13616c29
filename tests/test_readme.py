"""The README is tried: its snippets run, and every command in it is run or checked somewhere.

Commands of simulations are composed here with all their options; those whose data comes with
scikit-learn are run by the deep suite. The rest stands in `ELSEWHERE` with the test that runs it,
or in `BY_HAND`, which ``make check-readme`` runs where there is a package index.
"""

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
from simulations.reproduce.__main__ import ALL
from simulations.reproduce.__main__ import _parser as reproduce_parser
from simulations.reproduce.catalogue import CATALOGUE

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
# What of a command line is enough to know it by, and the test that runs it.
ELSEWHERE = {
    "gems-flwr report runs": "tests/test_packaging.py::test_the_installed_command_runs_simulations",
    "gems-flwr reproduce": "tests/test_packaging.py::test_the_installed_command_knows_the_papers",
    "gems-flwr reproduce gems2019_convex --quick": "tests/simulations/test_reproduce_papers.py"
    "::test_a_reproduction_runs_resumes_and_writes_its_files",
    "gems-flwr reproduce all": "tests/simulations/test_reproduce_all.py"
    "::test_the_command_runs_all_that_is_missing",
    "gems-flwr reproduce leaks": "tests/simulations/test_reproduce_studies.py"
    "::test_full_moments_give_samples_away_and_automatic_ones_do_not",
    "flwr run .": "tests/simulations/test_flwr_run.py::test_flwr_run_gives_the_numbers",
    "gems-flwr submit .": "tests/deployment/test_deployment.py::test_a_run_that_fails_ends_with",
    "python -m build": "tests/test_packaging.py::published",
    "make demo": "tests/test_readme.py::test_the_demo_runs",
}
# Needs a package index, or is what runs these tests.
BY_HAND = ("pip install", "make test")


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


def test_there_are_commands_of_every_kind():
    assert len(RUNS) > 15
    for start in ("make ", "pip install", "gems-flwr reproduce ", "flwr run "):
        assert any(line.startswith(start) for line in COMMANDS), start


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_is_run_by_a_test_or_by_hand(line):
    if line.startswith("gems-flwr run "):
        return  # composed, and run if need be, below
    known = [start for start in (*ELSEWHERE, *BY_HAND) if line.startswith(start)]
    assert known, f"nobody runs {line}"
    for start in known:
        if start in ELSEWHERE:
            path, _, name = ELSEWHERE[start].partition("::")
            assert f"def {name}" in (ROOT / path).read_text(), f"{path} has no {name}"


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("make ")])
def test_every_target_is_in_the_makefile(line):
    assert re.search(rf"^{line.split()[1]}:", MAKEFILE, re.MULTILINE)


@pytest.mark.parametrize("line", RUNS)
def test_every_simulation_composes(line):
    """Groups, keys and values; what its strategy and space make of them, too."""
    for words in single_runs(line):
        config = compose_config(words)
        assert Experiment(config).config == config


@pytest.mark.parametrize("line", [each for each in COMMANDS if "gems-flwr reproduce" in each])
def test_every_reproduction_is_in_the_catalogue(line):
    asked = reproduce_parser().parse_intermixed_args(shlex.split(line)[2:])
    assert set(asked.words) <= {*CATALOGUE, ALL}


def without_files():
    """Return the commands that need no files, and no engine whose own test takes long."""
    for line in RUNS:
        configs = [compose_config(words) for words in single_runs(line)]
        bundled = all(config.names["dataset"] == "digits" for config in configs)
        if bundled and all(config.backend.kind == "inprocess" for config in configs):
            yield line


@pytest.mark.deep
@pytest.mark.parametrize("line", without_files())
def test_what_needs_no_files_runs(line, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "gems_flwr", *shlex.split(line)[1:]],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("runs/**/result.json"))) == len(single_runs(line))


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
    assert (tmp_path / "runs" / "report.html").is_file() or list(tmp_path.glob("runs/**/*.html"))


def test_the_first_page_of_the_documentation_has_the_same_snippet():
    assert snippets(README)[:2] == snippets((ROOT / "docs" / "index.md").read_text())


def snippets(text):
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
