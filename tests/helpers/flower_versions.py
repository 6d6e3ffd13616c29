"""What becomes of every release of Flower that the project admits.

``make test-flower`` runs this file. It asks the package index for the releases of flwr that the
range in ``pyproject.toml`` admits, lets pip say for each whether it can be installed, and runs the
tests of all that touches Flower: in this environment for the release in use, for any other in an
environment of its own, which borrows everything but Flower from this one. It prints a table, and
ends with 1 if a test has failed. A release that cannot be installed is no failure; the table says
why it cannot.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
# What touches Flower: the four methods and the loop, grids and names, mods, what is on the wire.
TESTS = (
    "tests/strategies/test_flowers_*.py",
    "tests/server",
    "tests/runtime",
    "tests/client",
    "tests/test_architecture.py",
)


def admitted(releases: Iterable[str], pyproject: Path = ROOT / "pyproject.toml") -> list[Version]:
    """Return the releases that the project's own requirement admits, oldest first."""
    project = tomllib.loads(pyproject.read_text())["project"]
    wanted = [Requirement(text) for text in project["dependencies"]]
    (flower,) = [each for each in wanted if each.name == "flwr"]
    return sorted(Version(release) for release in releases if release in flower.specifier)


def releases_on_the_index() -> list[str]:
    """Return all releases of flwr."""
    asked = pip("index", "versions", "flwr")
    listed = re.search(r"^Available versions: (.*)$", asked.stdout, re.MULTILINE)
    if listed is None:
        raise SystemExit(f"the package index lists no flwr:\n{asked.stderr}")
    return [release.strip() for release in listed[1].split(",")]


def obstacle(release: Version) -> str:
    """Return why a release cannot be installed; nothing if it can."""
    tried = pip("install", "--dry-run", "--ignore-installed", "--quiet", f"flwr=={release}")
    return "" if tried.returncode == 0 else reason(tried.stderr)


def reason(said: str) -> str:
    """Return the last error that pip names."""
    errors = [line.removeprefix("ERROR: ") for line in said.splitlines() if "ERROR" in line]
    return errors[-1] if errors else "pip says no reason"


def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pip, whatever comes of it."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def environment(release: Version, folder: Path, *, with_dependencies: bool) -> Path:
    """Make an environment with a release of Flower and all else of this one; return its Python."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    here = [path for path in sys.path if path.endswith("site-packages")]
    asked = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    there = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    # Behind what is installed there: the new Flower wins.
    (Path(there) / "borrowed.pth").write_text("\n".join(here) + "\n")
    options = () if with_dependencies else ("--no-deps",)
    done = pip("--python", str(python), "install", "--quiet", *options, f"flwr=={release}")
    if done.returncode:
        raise SystemExit(f"flwr {release} cannot be installed: {reason(done.stderr)}")
    return python


def run_tests(python: Path) -> tuple[bool, str]:
    """Run the tests; return whether all passed, and pytest's last line."""
    found = [str(path) for pattern in TESTS for path in sorted(ROOT.glob(pattern))]
    command = [python, "-m", "pytest", "-q", "-m", "not deep", "-n", "auto", *found]
    done = subprocess.run(
        [*command, "--dist", "loadgroup", "-p", "no:cacheprovider"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    if done.returncode:
        print(done.stdout[-6000:], done.stderr[-2000:], sep="\n", file=sys.stderr)
    lines = done.stdout.strip().splitlines()
    return done.returncode == 0, lines[-1].strip("= ") if lines else "pytest said nothing"


def examine(release: Version, *, with_dependencies: bool = True) -> tuple[bool, str]:
    """Return whether a release is all right, and what the table says of it."""
    if str(release) == version("flwr"):
        passed, said = run_tests(Path(sys.executable))
        return passed, f"in use; {said}"
    if with_dependencies and (why := obstacle(release)):
        return True, f"cannot be installed: {why}"
    with tempfile.TemporaryDirectory() as folder:
        python = environment(release, Path(folder), with_dependencies=with_dependencies)
        return run_tests(python)


def main(arguments: Sequence[str] | None = None) -> int:
    """Examine every admitted release, or some; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("releases", nargs="*", help="only these, by default all that are admitted")
    parser.add_argument(
        "--no-deps", action="store_true", help="install them without what they depend on"
    )
    options = parser.parse_args(arguments)
    releases = [Version(r) for r in options.releases] or admitted(releases_on_the_index())
    passed = True
    print("| flwr | outcome |", "|---|---|", sep="\n", flush=True)
    for release in releases:
        good, said = examine(release, with_dependencies=not options.no_deps)
        passed &= good
        print(f"| {release} | {'' if good else 'FAILED: '}{said} |", flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
