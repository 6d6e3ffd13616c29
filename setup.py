"""Puts the ready simulations into the wheel, below the one package that it has.

Everything else about the project stands in `pyproject.toml`. In a checkout `simulations/` and
`conf/` lie beside the library and are found there; a wheel carries a copy in
`gems_flwr/bundled/`, because top-level packages called `simulations` and `conf` in the environments
of users would be in the way of their own. ``gems-flwr run`` looks in both places
(`gems_flwr/tools/ready.py`).
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
FOLDERS = ("simulations", "conf")
BUNDLE = Path("gems_flwr", "bundled")
KINDS = {".py", ".yaml", ".csv", ".json", ".gz"}


class BuildWithSimulations(build_py):
    """Copies the simulations and their configs, except where the checkout itself is installed."""

    def run(self) -> None:
        """Build the package."""
        super().run()
        if self.editable_mode:
            return
        # What an earlier build left in place may no longer be there.
        shutil.rmtree(Path(self.build_lib, BUNDLE), ignore_errors=True)
        for name in self._bundled():
            target = Path(self.build_lib, BUNDLE, name)
            self.mkpath(str(target.parent))
            self.copy_file(str(ROOT / name), str(target))

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """Return what a build writes."""
        bundled = [] if self.editable_mode else self._bundled()
        ours = [str(Path(self.build_lib, BUNDLE, name)) for name in bundled]
        return super().get_outputs(include_bytecode) + ours

    def _bundled(self) -> list[Path]:
        """Return the files to copy, relative to the project."""
        files = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))
        return sorted(path.relative_to(ROOT) for path in files if path.suffix in KINDS)


setup(cmdclass={"build_py": BuildWithSimulations})
