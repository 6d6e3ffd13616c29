"""What is published: an sdist, the wheel made from it, and that it works for a user."""

import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from helpers_patience import HANG_SECONDS

ROOT = Path(__file__).resolve().parent.parent
# One worker builds for all.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("packaging")]


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Return the folder with the sdist and the wheel that was built from it."""
    # In a copy: setuptools leaves its work in the source tree, and trips over what it finds there.
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy(path, source)
    for name in ("gems_flwr", "simulations", "tests", "conf", "examples"):
        shutil.copytree(
            ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "runs")
        )
    (source / "strategies").symlink_to("gems_flwr/strategies")
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", folder, source],
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=HANG_SECONDS,
    )
    return folder


@pytest.fixture(scope="module")
def wheel(published):
    (path,) = published.glob("gems_flwr-*.whl")
    return path


def test_the_sdist_holds_the_library_and_neither_tests_nor_experiments(published):
    """Tests need data, configs and apps of the repository; without those they had better not be."""
    (path,) = published.glob("gems_flwr-*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tops = {name.split("/")[0] for name in names if name}
    assert tops == {
        "CHANGELOG.md",
        "CITATION.cff",
        "LICENSE",
        "MANIFEST.in",
        "PKG-INFO",
        "README.md",
        "gems_flwr",
        "gems_flwr.egg-info",
        "pyproject.toml",
        "setup.cfg",
    }
    here = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "gems_flwr").rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }
    assert here == {name for name in names if name.endswith((".py", "py.typed"))}


def test_the_wheel_holds_nothing_but_the_library(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"gems_flwr"}
    assert all(
        name.endswith((".py", "/py.typed")) for name in names if name.startswith("gems_flwr/")
    )
    assert "gems_flwr/py.typed" in names
    assert "gems_flwr/strategies/fedavg.py" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_metadata_is_what_an_index_shows(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith("METADATA"))
    metadata = message_from_bytes(archive.read(name))
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Description-Content-Type"] == "text/markdown"
    classifiers = metadata.get_all("Classifier")
    # A licence classifier beside a licence expression is refused by the index.
    assert not any(each.startswith("License ::") for each in classifiers)
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)} <= set(
        classifiers
    )
    urls = dict(each.split(", ", 1) for each in metadata.get_all("Project-URL"))
    assert set(urls) == {"Homepage", "Documentation", "Changelog", "Issues"}


def test_there_is_one_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    package = (ROOT / "gems_flwr" / "__init__.py").read_text()
    assert re.search(r'^__version__ = "(.+)"$', package, re.MULTILINE)[1] == version
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^version: (.+)$", citation, re.MULTILINE)[1] == version
    # In the changelog it is the newest.
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(r"^## .*?(\d+\.\d+\.\d+)", changelog, re.MULTILINE)[1] == version


def test_the_readme_links_from_anywhere():
    """An index shows the README without the repository around it, so links must be whole."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    readme = (ROOT / "README.md").read_text()
    targets = re.findall(r"\]\(([^)\s]+)\)", readme)
    assert targets
    assert [each for each in targets if not each.startswith("https://")] == []
    prefix = project["urls"]["Homepage"] + "/blob/main/"
    files = [each.removeprefix(prefix).partition("#")[0] for each in targets if prefix in each]
    assert len(files) > 10
    assert [name for name in files if not (ROOT / name).is_file()] == []


def test_the_wheel_installs_into_an_empty_environment_and_runs(wheel, tmp_path):
    """The dependencies are lent by this environment through a path file; the library is not."""
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    site = tmp_path / "env" / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site, wheel],
        check=True,
        timeout=HANG_SECONDS,
    )
    assert {p.name.split("-")[0] for p in site.iterdir()} == {"gems_flwr"}
    (site / "lent.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    script = """
import gems_flwr, numpy as np
from flwr.app import ArrayRecord, Array, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from gems_flwr import FedAvg, InProcessGrid
app = ClientApp()
@app.train()
def train(message, context):
    metrics = MetricRecord({"num-examples": 1})
    content = RecordDict({"arrays": message.content["arrays"], "metrics": metrics})
    return Message(content, reply_to=message)
result = FedAvg().start(InProcessGrid(app, 2), ArrayRecord({"a": Array(np.ones(2))}))
print(gems_flwr.__file__, result.arrays["a"].numpy().tolist())
"""
    done = subprocess.run(
        [python, "-I", "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert str(site) in done.stdout
    assert "[1.0, 1.0]" in done.stdout
