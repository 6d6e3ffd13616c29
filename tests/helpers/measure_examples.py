"""Run every example under ``flwr run`` and print what it needed and reached, as a table.

``make examples`` calls it: a Flower of its own, one run of each app, about ten minutes. Bytes are
what the run's log says. Flower's own strategy says nothing of them: there they are what
`MeteredGrid` counts when the same app runs in this process. Names on the command line choose apps.
"""

import logging
import sys
import tempfile
from pathlib import Path

from helpers_examples import APPS, TWINS, added_lines, in_simulation, observe, play
from helpers_flower_home import flower_of_its_own
from helpers_patience import HANG_SECONDS

from gems_flwr.runtime.flower_cli import FlowerCli

HEADINGS = ("app", "lines changed", "rounds", "accuracy", "up", "down", "tracebacks")


def changed(app):
    """Return how many lines differ: of code, and imports."""
    if app not in TWINS:
        return ""
    added = [line for lines in added_lines(app).values() for line in lines]
    imports = sum("import" in line for line in added)
    return f"{len(added) - imports} + {imports} imports"


def size(count):
    """Return a number of bytes as the table shows it."""
    return f"{count / 1e6:.3g} MB" if count >= 1e6 else f"{count / 1e3:.3g} KB"


def counted(app, folder):
    """Return the bytes up and down of an app that runs in this process."""
    traffic = play(app, folder).traffic
    return traffic.bytes_up, traffic.bytes_down


def row(app, flwr, folder):
    """Return the row of an app, and whether all is as it should be."""
    try:
        seen = observe(app, flwr, folder, *in_simulation(app), seconds=HANG_SECONDS)
        up, down = seen.logged_bytes or counted(app, folder / "here" / app)
    except Exception as error:
        return f"| `{app}` | {changed(app)} | | | | | {type(error).__name__}: {error} |", False
    cells = [f"`{app}`", changed(app), str(seen.rounds)]
    cells += [f"{seen.accuracy:.3f}" if seen.completed else seen.status, size(up), size(down)]
    cells += [str(seen.tracebacks)]
    (folder / f"{app}.log").write_text(seen.log)
    return f"| {' | '.join(cells)} |", seen.completed and not seen.tracebacks


def main(names):
    """Measure some apps, or all; return the exit status."""
    folder = Path(tempfile.mkdtemp(prefix="examples-"))
    good = True
    print(f"logs in {folder}", file=sys.stderr)
    print(f"| {' | '.join(HEADINGS)} |\n|{'---|' * len(HEADINGS)}", flush=True)
    with flower_of_its_own(folder / "flower") as (environment, neutral):
        flwr = FlowerCli(None, environment, neutral)
        logging.getLogger("flwr").setLevel(logging.ERROR)
        for app in names or APPS:
            text, fine = row(app, flwr, folder)
            good &= fine
            print(text, flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
