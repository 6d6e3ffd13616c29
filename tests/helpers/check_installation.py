"""Run the README's ``pip install`` lines in an empty environment, and the command after each.

``make check-readme`` calls it; it needs a package index and some minutes, most of them for PyTorch.
The repository's address stands for this checkout, as it was committed. Nothing is lent: what works
here works for a user.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "git+https://github.com/gems-flwr/gems-flwr"
EXTRA = "pip install 'gems-flwr[simulations]'"


def install_lines():
    """Return the README's lines, in their order."""
    found = re.findall(
        r"^    (pip install .*?)(?:\s{2,}#.*)?$", (ROOT / "README.md").read_text(), re.M
    )
    return [shlex.split(line)[2:] for line in found]


def call(*command, folder):
    """Show a command and run it, without this process' own paths."""
    print("$", shlex.join(map(str, command)), flush=True)
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    return subprocess.run(command, cwd=folder, env=kept, stderr=subprocess.PIPE, text=True)


def main():
    """Check each line; return the exit status."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        call(sys.executable, "-m", "venv", folder / "env", folder=folder)
        call("git", "clone", "--quiet", ROOT, folder / "checkout", folder=folder)
        programs = folder / "env" / "bin"
        for words in install_lines():
            wanted = [word.replace(ADDRESS, f"git+file://localhost{ROOT}") for word in words]
            install = (programs / "python", "-m", "pip", "install", "--quiet", *wanted)
            done = call(*install, folder=folder / "checkout")
            if done.returncode:
                print(done.stderr, file=sys.stderr)
                return 1
            (folder / "empty").mkdir()
            done = call(programs / "gems-flwr", "run", "strategy=gems", folder=folder / "empty")
            print(done.stderr, flush=True)
            works = "simulations" in "".join(words)
            if works != (done.returncode == 0) or (not works and EXTRA not in done.stderr):
                return 1
            shutil.rmtree(folder / "empty")
    return 0


if __name__ == "__main__":
    sys.exit(main())
