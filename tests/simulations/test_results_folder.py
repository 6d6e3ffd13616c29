"""Under ``flwr run`` results land where the user is, as far as anybody can know where that is."""

from pathlib import Path

import pytest

from simulations.results_folder import results_folder

NAME = "digits/fedavg-s0"
PROJECT = '[project]\nname = "{}"\n[tool.flwr.app]\npublisher = "{}"\n'


def app(folder, name="my-app", publisher="me"):
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PROJECT.format(name, publisher))
    return folder


@pytest.fixture
def bundle(tmp_path):
    """Where Flower has unpacked the app."""
    return app(tmp_path / "home" / "apps" / "me.my-app")


@pytest.fixture
def start_in(monkeypatch):
    """Return a function that starts the SuperLink in a folder, as a shell there would."""

    def start_in(folder, word=None):
        folder.mkdir(parents=True, exist_ok=True)
        monkeypatch.chdir(folder)
        monkeypatch.setenv("PWD", str(word or folder))
        return folder

    return start_in


def test_an_absolute_folder_is_taken_as_it_is(bundle, tmp_path, start_in):
    start_in(app(tmp_path / "project"))
    assert results_folder("/srv/out", NAME, bundle=bundle) == Path("/srv/out")


def test_a_folder_with_a_slash_at_its_end_takes_many_runs(bundle, tmp_path, start_in):
    start_in(tmp_path)
    assert results_folder("/srv/out/", NAME, bundle=bundle) == Path("/srv/out", NAME)


def test_a_relative_folder_becomes_an_absolute_one(bundle, tmp_path, start_in):
    here = start_in(tmp_path / "here")
    assert results_folder("out", NAME, bundle=bundle) == here / "out"


@pytest.mark.parametrize("below", [".", "notebooks/first"])
def test_a_superlink_started_in_the_apps_folder_or_below_writes_there(
    below, bundle, tmp_path, start_in
):
    project = app(tmp_path / "project")
    start_in(project / below)
    assert results_folder("", NAME, bundle=bundle) == project / "runs" / NAME


def test_the_shells_word_for_the_folder_counts_too(bundle, tmp_path, start_in):
    """The app's folder has a link to another disk, and the shell went there by the link."""
    project, disk = app(tmp_path / "project"), tmp_path / "disk"
    disk.mkdir()
    (project / "big").symlink_to(disk)
    start_in(disk, word=project / "big")
    assert results_folder("", NAME, bundle=bundle) == project / "runs" / NAME


@pytest.mark.parametrize(
    ("name", "publisher"), [("other-app", "me"), ("my-app", "somebody"), (None, None)]
)
def test_anywhere_else_it_is_the_folder_where_the_superlink_was_started(
    name, publisher, bundle, tmp_path, start_in
):
    folder = tmp_path / "elsewhere" if name is None else app(tmp_path / "there", name, publisher)
    here = start_in(folder)
    assert results_folder("", NAME, bundle=bundle) == here / "runs" / NAME


def test_a_broken_project_file_on_the_way_is_passed_over(bundle, tmp_path, start_in):
    project = app(tmp_path / "project")
    (project / "broken").mkdir()
    (project / "broken" / "pyproject.toml").write_text("[project\n")
    start_in(project / "broken")
    assert results_folder("", NAME, bundle=bundle) == project / "runs" / NAME
