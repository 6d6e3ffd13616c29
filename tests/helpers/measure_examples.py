"""Run every example under ``flwr run`` and print what it needed and reached, as a table.

``make examples`` calls it: a Flower of its own, one run of each app, about ten minutes. Bytes are
what the run's log says. Flower's own strategy says nothing of them: there they are what
`MeteredGrid` counts when the same app runs in this process. Names on the command line choose apps.
"""

import logging
import sys
import tempfile
from pathlib import Path

from helpers_examples import APPS, BEFORE, added_lines, in_simulation, lacking, observe, play
from helpers_flower_home import flower_of_its_own
from helpers_patience import HANG_SECONDS

from gems_flwr.tools.submit import FlowerCli

HEADINGS = ("app", "lines changed", "rounds", "accuracy", "up", "down", "tracebacks")


def changed(app):
    """Return how many lines differ: of code, and imports."""
    if app.endswith(BEFORE):
        return ""
    added = [line for lines in added_lines(app).values() for line in lines]
    imports = sum("import" in line for line in added)
    return f"{len(added) - imports} + {imports} imports"


def size(count):
    """Return a number of bytes as the table shows it."""
    return f"{count / 1e6:.3g} MB" if count >= 1e6 else f"{count / 1e3:.3g} KB"


def row(app, flwr, folder):
    """Return the row of an app, and whether all is as it should be."""
    seen = observe(app, flwr, folder, *in_simulation(app), seconds=HANG_SECONDS)
    traffic = None if seen.logged_bytes else play(app, folder / "here" / app).traffic
    up, down = seen.logged_bytes or (traffic.bytes_up, traffic.bytes_down)
    accuracy = f"{seen.accuracy:.3f}" if seen.completed else seen.status
    cells = [f"`{app}`", changed(app), str(seen.rounds), accuracy, size(up), size(down)]
    (folder / f"{app}.log").write_text(seen.log)
    return f"| {' | '.join(cells)} | {seen.tracebacks} |", seen.completed and not seen.tracebacks


def main(names):
    """Measure some apps, or all; return the exit status."""
    folder = Path(tempfile.mkdtemp(prefix="examples-"))
    good = True
    print(f"logs in {folder}", file=sys.stderr)
    print(f"| {' | '.join(HEADINGS)} |\n|{'---|' * len(HEADINGS)}", flush=True)
    with flower_of_its_own(folder / "flower") as (environment, neutral):
        flwr = FlowerCli(None, environment, neutral)
        logging.getLogger("flwr").setLevel(logging.ERROR)
        for app in names or [app for app in APPS if not lacking(app)]:
            text, fine = row(app, flwr, folder)
            good &= fine
            print(text, flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
