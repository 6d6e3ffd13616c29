"""The wheel: what it puts into a user's environment, and that it works there."""

import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from helpers_patience import HANG_SECONDS

ROOT = Path(__file__).resolve().parent.parent
# One worker builds the wheel for all.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("packaging")]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    # In a copy: setuptools leaves its work in the source tree, and trips over what it finds there.
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "gems_flwr", source / "gems_flwr", ignore=ignored)
    for other in ("simulations", "tests", "conf"):
        shutil.copytree(ROOT / other, source / other, ignore=ignored)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder, source],
        check=True,
        timeout=HANG_SECONDS,
    )
    (path,) = folder.glob("gems_flwr-*.whl")
    return path


def test_the_wheel_holds_nothing_but_the_library(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"gems_flwr"}
    assert "gems_flwr/py.typed" in names
    assert "gems_flwr/strategies/fedavg.py" in names
    metadata = next(name for name in names if name.endswith("METADATA"))
    text = zipfile.ZipFile(wheel).read(metadata).decode()
    assert "License-Expression: Apache-2.0" in text
    assert any(name.endswith("licenses/LICENSE") for name in names)


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
import gems_flwr, gems_flwr.client, numpy as np
from flwr.app import ArrayRecord, Array, Message
from flwr.clientapp import ClientApp
from gems_flwr.runtime import InProcessGrid
from gems_flwr.strategies import FedAvg
from gems_flwr import wire
app = ClientApp()
@app.train()
def train(message, context):
    content = wire.pack_model_reply(message.content["arrays"], {}, num_examples=1, name="0")
    return Message(content, reply_to=message)
result = FedAvg().start(InProcessGrid(app, 2), ArrayRecord({"a": Array(np.ones(2))}))
print(gems_flwr.__file__, result.arrays["a"].numpy().tolist())
"""
    done = subprocess.run(
        [python, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert done.returncode == 0, done.stderr
    assert str(site) in done.stdout
    assert "[1.0, 1.0]" in done.stdout
