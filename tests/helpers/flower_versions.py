"""Run the tests that touch Flower with every release of Flower that the project admits.

``make test-flower`` runs this file: in this environment for the release in use, for any other in an
environment of its own, which borrows everything but Flower from this one. It prints a table, and
ends with 1 if a test has failed. A release that cannot be installed is no failure.
"""

import os
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
# The four methods and the loop, grids and names, the mod, the wire.
TESTS = (
    *("tests/strategies/test_flower*.py", "tests/strategies/test_other_loops.py"),
    *("tests/core", "tests/carriers", "tests/node", "tests/test_architecture.py"),
)


def run(*command, **environment):
    environment = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)


def pip(*arguments):
    return run(sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments)


def admitted():
    """Return the releases on the index that the project's own requirement admits."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (flower,) = [r for r in map(Requirement, project["dependencies"]) if r.name == "flwr"]
    asked = pip("index", "versions", "flwr")
    listed = re.search(r"^Available versions: (.*)$", asked.stdout, re.MULTILINE)
    if listed is None:
        raise SystemExit(f"the package index lists no flwr:\n{asked.stderr}")
    return [each for each in reversed(listed[1].split(", ")) if each in flower.specifier]


def examine(release, folder):
    """Return whether a release is all right, and what the table says of it."""
    python = sys.executable
    if release != version("flwr"):
        venv.create(folder, with_pip=False, symlinks=True)
        python = folder / "bin" / "python"
        # Behind what is installed there: the new Flower wins.
        (there,) = folder.glob("lib/*/site-packages")
        here = [path for path in sys.path if path.endswith("site-packages")]
        (there / "borrowed.pth").write_text("\n".join(here) + "\n")
        done = pip("--python", str(python), "install", "--quiet", f"flwr=={release}")
        if done.returncode:
            return True, f"cannot be installed: {done.stderr.strip().splitlines()[-1]}"
    found = [str(path) for pattern in TESTS for path in sorted(ROOT.glob(pattern))]
    options = (
        "-q",
        "-m",
        "not deep",
        "-n",
        "auto",
        "--dist",
        "loadgroup",
        "-p",
        "no:cacheprovider",
    )
    done = run(
        *(python, "-m", "pytest", *options, *found), PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1"
    )
    if done.returncode:
        print(done.stdout[-6000:], done.stderr[-2000:], sep="\n", file=sys.stderr)
    return not done.returncode, (done.stdout.strip().splitlines() or ["no output"])[-1].strip("= ")


def main(releases):
    """Examine some releases, or every admitted one; return the exit status."""
    passed = True
    print("| flwr | outcome |", "|---|---|", sep="\n", flush=True)
    for release in releases or admitted():
        with tempfile.TemporaryDirectory() as folder:
            good, outcome = examine(release, Path(folder))
        passed &= good
        print(f"| {release} | {'' if good else 'FAILED: '}{outcome} |", flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
