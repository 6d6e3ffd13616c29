"""``gems-flwr inspect``: what a space gives away, before it is sent.

The command's options; what is found, and how it is written down, stands in `gems_flwr.leaks`. Text
for a person who decides whether a file leaves the house, and a status that a script can wait for:
0 if nothing is alarming, 4 if a class is given away.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gems_flwr.errors import OptionError
from gems_flwr.offline import describe
from gems_flwr.spaces.cone import ClassMomentCone
from gems_flwr.spaces.space_files import load_space

if TYPE_CHECKING:
    from gems_flwr.leaks.made_of import LayerSamples
    from gems_flwr.leaks.what_if import Outcome

GIVEN_AWAY_STATUS = 4

_DATA = """\
The data are inputs of the layer that the space is for, and classes: .npz or
.safetensors with arrays 'inputs' and 'labels', .csv or .npy with the class in
the last column. For a plain logistic model these are the training data; for a
network, features:

    from gems_flwr import save_features
    save_features("data.npz", train_loader, model)  # as the server sent it

Nothing leaves this machine. Status: 0 if nothing is alarming, 4 if a class is
given away, 2 for bad input."""


def add_inspect(commands: Any) -> None:
    """Add the command to the parser of ``gems-flwr``."""
    inspect = commands.add_parser(
        "inspect",
        help="say what a space gives away before it is sent (status 4: do not send)",
        description="Attack a space with the data that it was made of, as its owner.",
        epilog=_DATA,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    inspect.add_argument("file", type=Path, help="a space file")
    inspect.add_argument("--data", type=Path, help="what the space was made of")
    inspect.add_argument(
        "--held-out", type=Path, help="more samples of the same kind that it was not made of"
    )
    inspect.add_argument(
        "--classes",
        type=int,
        help="attack at most so many classes, those that show most first; 12",
    )
    inspect.add_argument(
        "--no-options", action="store_true", help="do not try what other options would change"
    )
    inspect.add_argument("--seed", type=int, default=0, help="of all that is random; 0")
    inspect.add_argument("--json", action="store_true", help="print JSON instead of tables")
    inspect.set_defaults(run=run_inspect)


def run_inspect(options: argparse.Namespace) -> int:
    """Inspect a file and print what was found; return the status."""
    if options.held_out is not None and options.data is None:
        raise OptionError("--held-out needs --data: the samples that the space was made of")
    if options.seed < 0 or (options.classes is not None and options.classes < 0):
        raise OptionError("--seed and --classes must be at least 0")
    space = load_space(options.file)
    if not isinstance(space, ClassMomentCone):
        _print_model(options, [("file", str(options.file)), *describe(space)])
        return 0
    # Only now: scikit-learn takes a while to import.
    from gems_flwr.leaks.feature_files import read_features
    from gems_flwr.leaks.gradient_rows import row_samples
    from gems_flwr.leaks.inspection import MOST_CLASSES, inspect_cone
    from gems_flwr.leaks.report_json import as_json
    from gems_flwr.leaks.report_text import as_text
    from gems_flwr.leaks.what_if import own_layer, what_if

    data = None if options.data is None else read_features(options.data)
    held_out = None if options.held_out is None else read_features(options.held_out)
    _check_held_out(space, held_out)
    most = MOST_CLASSES if options.classes is None else options.classes
    said = _say if sys.stderr.isatty() else None
    found = inspect_cone(space, data, held_out, most_classes=most, seed=options.seed, progress=said)
    outcomes: list[Outcome] = []
    rows = None
    if data is not None:
        if not options.no_options:
            outcomes = what_if(space, found, data, held_out, seed=options.seed, progress=said)
        rows = row_samples(data.inputs, data.labels, *own_layer(space)).tolist()
    if said is not None:
        _say("")
    if options.json:
        print(json.dumps(as_json(options.file, space, found, outcomes, rows), indent=2))
    else:
        print("\n".join(as_text(options.file, space, found, outcomes, rows, held_out is not None)))
    return GIVEN_AWAY_STATUS if found.given_away else 0


def _say(what: str) -> None:
    print(f"\r{what:<79}", end="" if what else "\r", file=sys.stderr, flush=True)


def _check_held_out(space: ClassMomentCone, held_out: LayerSamples | None) -> None:
    if held_out is None:
        return
    features, top = held_out.inputs.shape[1], space.num_classes - 1
    if features != space.num_features:
        raise OptionError(
            f"held-out data: expected {space.num_features} features, as in the file, got {features}"
        )
    if held_out.labels.min() < 0 or held_out.labels.max() > top:
        raise OptionError(f"held-out data: expected classes 0 to {top}")


def _print_model(options: argparse.Namespace, rows: Sequence[tuple[str, str]]) -> None:
    note = (
        "a ball or an ellipsoid reveals the node's own model, as averaging does; what a model "
        "tells of its samples is not tried here"
    )
    if options.json:
        fields = {name.replace(" ", "_"): text for name, text in rows}
        print(json.dumps({**fields, "note": note}, indent=2))
        return
    for name, text in rows:
        print(f"{name}: {text}")
    print("\n".join(textwrap.wrap(note, 80)))
