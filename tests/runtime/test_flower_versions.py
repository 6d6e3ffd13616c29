"""Which releases of Flower are tried, and what is said of those that cannot be."""

import subprocess
import sys
from importlib.metadata import version

import flower_versions
from packaging.version import Version


def test_all_releases_in_the_projects_range_are_tried_from_the_oldest_on(tmp_path):
    file = tmp_path / "pyproject.toml"
    file.write_text('[project]\ndependencies = ["numpy>=2", "flwr>=1.41,<1.43"]\n')
    listed = ["1.43.0", "1.42.1", "1.42.0", "1.41.0", "1.40.0"]
    found = flower_versions.admitted(listed, file)
    assert [str(release) for release in found] == ["1.41.0", "1.42.0", "1.42.1"]


def test_the_release_in_use_is_one_that_the_project_admits():
    assert flower_versions.admitted([version("flwr")]) == [Version(version("flwr"))]


def test_of_what_pip_says_the_last_error_is_told():
    said = "WARNING: x\nERROR: no certifi\nERROR: No matching distribution found for certifi>=9\n"
    assert flower_versions.reason(said) == "No matching distribution found for certifi>=9"
    assert flower_versions.reason("") == "pip says no reason"


def test_a_release_that_cannot_be_installed_is_said_to_be_so_and_is_no_failure(monkeypatch, capsys):
    def refuse(*arguments):
        return subprocess.CompletedProcess(arguments, 1, "", "ERROR: no such thing\n")

    monkeypatch.setattr(flower_versions, "pip", refuse)
    assert flower_versions.main(["1.99.0"]) == 0
    assert "| 1.99.0 | cannot be installed: no such thing |" in capsys.readouterr().out


def test_a_release_whose_tests_fail_ends_with_one(monkeypatch, capsys):
    monkeypatch.setattr(flower_versions, "run_tests", lambda python: (False, "1 failed"))
    assert flower_versions.main([version("flwr")]) == 1
    assert "FAILED: in use; 1 failed" in capsys.readouterr().out


def test_an_environment_borrows_all_but_flower(monkeypatch, tmp_path):
    """Without an index: the release is not installed here, only the environment around it."""
    done = subprocess.CompletedProcess((), 0, "", "")
    monkeypatch.setattr(flower_versions, "pip", lambda *arguments: done)
    release = Version("1.99.0")
    python = flower_versions.environment(release, tmp_path / "env", with_dependencies=True)
    told = subprocess.run(
        [python, "-c", "import numpy, sys; print(numpy.__version__, sys.prefix)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert told == [version("numpy"), str(tmp_path / "env")]
    assert sys.prefix != told[1]
