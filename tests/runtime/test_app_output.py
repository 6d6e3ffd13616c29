"""``gems-flwr submit`` tells an app where its results go, if the app can be told."""

import pytest
from flwr.cli.constant import DEFAULT_FLOWER_CONFIG_TOML
from flwr.common.config import parse_config_args

from gems_flwr.runtime.app_output import is_local, output_for

PROJECT = '[project]\nname = "app"\n[tool.flwr.app.config]\nrounds = 3\n'
CONFIG = """
[superlink]
default = "near"
[superlink.near]
address = "127.0.0.1:8000"
[superlink.six]
address = "[::1]:8000"
[superlink.named]
address = "localhost:8000"
[superlink.managed]
address = ":local:"
[superlink.memory]
address = ":local-in-memory:"
[superlink.old]
options.num-supernodes = 5
[superlink.far]
address = "superlink.example.org:8000"
[superlink.net]
address = "192.0.2.7:8000"
[superlink.bare]
address = "api.flower.ai"
"""


@pytest.fixture
def flower(tmp_path, monkeypatch):
    """A Flower home with connections of all kinds."""
    home = tmp_path / "flower"
    home.mkdir()
    (home / "config.toml").write_text(CONFIG)
    monkeypatch.setenv("FLWR_HOME", str(home))
    return home


@pytest.fixture
def app(tmp_path):
    """Return a function that writes an app with a value for output."""

    def app(line='output = ""\n', name="my app"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "pyproject.toml").write_text(PROJECT + line)
        return folder

    return app


@pytest.mark.parametrize(
    ("superlink", "local"),
    [
        (None, True),
        ("near", True),
        ("six", True),
        ("named", True),
        ("managed", True),
        ("memory", True),
        ("old", True),
        ("far", False),
        ("net", False),
        ("bare", False),
        ("missing", False),
    ],
)
def test_a_superlink_is_local_by_its_address(flower, superlink, local):
    assert is_local(superlink) is local


@pytest.mark.parametrize("written", [True, False])
def test_flowers_own_default_is_local(flower, written):
    """Flower writes its default config when it is first used; before, there is none."""
    (flower / "config.toml").unlink()
    if written:
        (flower / "config.toml").write_text(DEFAULT_FLOWER_CONFIG_TOML)
    assert is_local(None)
    assert is_local("local")
    assert not is_local("supergrid")


def test_an_empty_output_becomes_a_folder_of_the_app_that_flower_reads_back(flower, app):
    folder = app()
    output = output_for(str(folder), "near")
    assert output == f"{folder}/runs/"
    assert parse_config_args([f'output="{output}"']) == {"output": output}


def test_a_relative_app_is_where_the_user_is(flower, app, monkeypatch):
    folder = app()
    monkeypatch.chdir(folder)
    assert output_for(".", None) == f"{folder}/runs/"


@pytest.mark.parametrize("line", ["", 'output = "/srv/out"\n', "output = 3\n"])
def test_an_app_without_the_key_or_with_a_value_is_left_alone(flower, app, line):
    assert output_for(str(app(line)), "near") is None


def test_a_superlink_elsewhere_is_told_no_path_of_this_machine(flower, app):
    assert output_for(str(app()), "far") is None


@pytest.mark.parametrize("given", ["output='/srv/out'", "rounds=3 output=x", "config.toml"])
def test_what_the_user_sets_stays(flower, app, given):
    assert output_for(str(app()), "near", ["rounds=1", given]) is None


def test_a_value_that_mentions_output_does_not_set_it(flower, app):
    folder = app()
    assert output_for(str(folder), "near", ["overrides='a=b output=c'"]) == f"{folder}/runs/"


def test_a_folder_that_flowers_option_cannot_name_is_left_out(flower, app):
    assert output_for(str(app(name='a"b')), "near") is None


def test_no_app_is_flowers_to_complain_about(flower, tmp_path):
    assert output_for(str(tmp_path / "nothing"), "near") is None
    assert output_for("@somebody/app", "near") is None
