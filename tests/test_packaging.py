"""What is published: an sdist, the wheel made from it, and that it works for a user."""

import json
import os
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
# What is ready to run, and lies below the package in a wheel.
READY = ("simulations", "conf")
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


def test_the_sdist_holds_what_the_wheel_is_made_from_and_no_more(published):
    """Tests need data and apps of the repository; without those they had better not be."""
    (path,) = published.glob("gems_flwr-*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tops = {name.split("/")[0] for name in names if name}
    files = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md"}
    files |= {"pyproject.toml", "setup.cfg", "setup.py"}
    assert tops == files | {"conf", "gems_flwr", "gems_flwr.egg-info", "simulations"}
    kinds = (".py", "py.typed", ".yaml", ".csv", ".json", ".gz")
    here = {"setup.py"} | files_in("gems_flwr", *READY)
    assert here == {name for name in names if name.endswith(kinds)}


def files_in(*folders):
    """Return the files of some folders of the checkout, as a package names them."""
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    return {p.relative_to(ROOT).as_posix() for p in paths if "__pycache__" not in p.parts}


def test_the_wheel_holds_the_library_and_below_it_the_simulations(wheel):
    """No top-level ``simulations`` or ``conf`` in the environments of users."""
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"gems_flwr"}
    bundle = "gems_flwr/bundled/"
    library = [n for n in names if n.startswith("gems_flwr/") and not n.startswith(bundle)]
    assert all(name.endswith((".py", "/py.typed")) for name in library)
    assert {"gems_flwr/py.typed", "gems_flwr/strategies/fedavg.py"} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert files_in(*READY) == {n.removeprefix(bundle) for n in names if n.startswith(bundle)}


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


def test_the_readme_links_to_files_that_exist():
    """Relative, so that they open in a checkout and wherever the repository is kept."""
    targets = re.findall(r"\]\(([^)\s]+)\)", (ROOT / "README.md").read_text())
    files = [each.partition("#")[0] for each in targets if not each.startswith("https://")]
    assert len(files) > 10
    assert [name for name in files if not (ROOT / name).exists()] == []
    assert [each for each in targets if "gems-flwr/gems-flwr" in each] == []


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """Return the folder of an environment with the wheel and lent dependencies.

    They are lent by this environment through a path file; the library is not.
    """
    folder = tmp_path_factory.mktemp("env")
    venv.create(folder, with_pip=False)
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--python", folder / "bin" / "python"),
            *("install", "--quiet", "--no-deps", "--no-index", wheel),
        ],
        check=True,
        timeout=HANG_SECONDS,
    )
    site = site_of(folder)
    assert {p.name.split("-")[0] for p in site.iterdir()} == {"gems_flwr"}
    # The names of an editable installation are not on this path.
    (site / "lent.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder


def site_of(environment):
    name = f"python{sysconfig.get_python_version()}"
    return environment / "lib" / name / "site-packages"


def call(environment, folder, *command):
    """Run a program of the environment in a folder; nothing of this one is on its path."""
    program, *arguments = command
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "GEMS_FLWR"))}
    return subprocess.run(
        [environment / "bin" / program, *arguments],
        cwd=folder,
        env={**kept, "COLUMNS": "200", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )


# An ordinary app, of which the README shows the lines that change.
APP = """
import gems_flwr
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset
from gems_flwr import InProcessGrid

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.output = torch.nn.Linear(64, 200), torch.nn.Linear(200, 10)
    def forward(self, x):
        return self.output(torch.relu(self.hidden(x)))

def load_data(partition_id, num_partitions):
    X, y = load_digits(return_X_y=True)
    X, y = torch.tensor(X / 16, dtype=torch.float32), torch.tensor(y)
    rows = torch.argsort(y, stable=True).tensor_split(num_partitions)[partition_id]
    train, test = rows[rows % 5 > 0], rows[rows % 5 == 0]
    parts = [TensorDataset(X[part], y[part]) for part in (train, test)]
    return tuple(DataLoader(part, batch_size=32) for part in parts)

{client}

@app.train()
def train(msg, context):
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    loader, _ = data(context)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, labels in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    metrics = MetricRecord({{"num-examples": len(loader.dataset)}})
    content = RecordDict({{"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}})
    return Message(content, reply_to=msg)

@app.evaluate()
def evaluate(msg, context):
    metrics = MetricRecord({{"num-examples": 1, "accuracy": 0.5}})
    return Message(RecordDict({{"metrics": metrics}}), reply_to=msg)

torch.manual_seed(0)
grid, arrays = InProcessGrid(app, 5), ArrayRecord(Net().state_dict())

{server}

scores = result.details["node_scores"].values()
print(gems_flwr.__file__, len(scores), min(scores), result.traffic.bytes_up)
"""


def test_the_readmes_snippets_run_from_the_wheel(environment, tmp_path):
    """Five nodes with two digits each; the model of one round is good for every one of them."""
    text = (ROOT / "README.md").read_text()
    server, client = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    (tmp_path / "app.py").write_text(APP.format(server=server, client=client))
    done = call(environment, tmp_path, "python", "-I", "app.py")
    assert done.returncode == 0, done.stderr
    place, nodes, worst, bytes_up = done.stdout.split()
    assert Path(place).parent == site_of(environment) / "gems_flwr"
    assert int(nodes) == 5
    assert float(worst) > 0.75
    assert int(bytes_up) > 0


def finished(folder):
    (path,) = folder.glob("runs/**/result.json")
    return json.loads(path.read_text())


def test_the_installed_command_runs_simulations_from_an_empty_folder(environment, tmp_path):
    done = call(environment, tmp_path, "gems-flwr", "run", "strategy=gems", "nodes=3")
    assert done.returncode == 0, done.stderr
    assert finished(tmp_path)["rounds"] == 1
    done = call(environment, tmp_path, "gems-flwr", "report", "runs")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "report.html").is_file()


def test_the_installed_command_knows_the_papers_and_what_needs_a_checkout(environment, tmp_path):
    done = call(environment, tmp_path, "gems-flwr", "reproduce")
    assert done.returncode == 0, done.stderr
    assert "gems2019_convex" in done.stdout
    assert "gems-flwr reproduce NAME" in done.stdout
    done = call(environment, tmp_path, "gems-flwr", "reproduce", "gems2019_convex", "--show")
    assert done.returncode == 0, done.stderr
    done = call(environment, tmp_path, "gems-flwr", "reproduce", "--page")
    assert done.returncode == 2
    assert "need a checkout" in done.stderr


def test_without_what_the_extra_brings_the_installed_command_says_so(wheel, tmp_path):
    """The library's own dependencies are not needed either to say it."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = f"import sys; sys.path.append({str(tmp_path)!r}); "
    code += "from gems_flwr.tools import start_simulations as start; "
    code += "start('run', [])"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert "NotInstalledError: pip install 'gems-flwr[simulations]'" in done.stderr


@pytest.mark.deep
def test_the_installed_command_runs_on_ray(environment, tmp_path):
    """Ray's workers find the bundled simulations, too; the numbers are the in-process ones."""
    options = ("strategy=fedavg", "nodes=3", "rounds=2")
    done = call(environment, tmp_path, "gems-flwr", "run", *options)
    assert done.returncode == 0, done.stderr
    (tmp_path / "ray").mkdir()
    done = call(environment, tmp_path / "ray", "gems-flwr", "run", *options, "backend=ray")
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "runs").glob("**/result.json")
    embedded, on_ray = json.loads(path.read_text()), finished(tmp_path / "ray")
    for key in ("accuracy", "loss", "bytes_up", "bytes_down"):
        assert embedded[key] == on_ray[key], key
