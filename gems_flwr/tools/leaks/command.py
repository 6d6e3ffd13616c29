"""``gems-flwr inspect``: what a space gives away, and the files of features that it takes.

What a cone is made of is what its layer sees: the data itself for a plain logistic model, features
of the network below it else. `save_features` writes those. Nothing is unpickled.
"""

from __future__ import annotations

import argparse
import copy
import textwrap
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gems_flwr.core.disk import replacing
from gems_flwr.errors import OfflineError, OptionError
from gems_flwr.spaces import load_space
from gems_flwr.spaces.cone import ClassMomentCone

if TYPE_CHECKING:
    from torch import nn

    from gems_flwr.networks import Data
    from gems_flwr.tools.leaks.inspection import Inspection
    from gems_flwr.tools.leaks.recipes import LayerSamples

GIVEN_AWAY_STATUS = 4
INPUTS, LABELS = "inputs", "labels"

_DATA = """\
The data are inputs of the layer that the space is for, and classes: .npz with
arrays 'inputs' and 'labels'. For a plain logistic model these are the training
data; for a network, features:

    from gems_flwr.tools.leaks import save_features
    save_features("data.npz", train_loader, model)  # as the server sent it

Nothing leaves this machine. Status: 0 if nothing is alarming, 4 if a class is
given away, 2 for bad input."""


def add_inspect(commands: Any) -> None:
    """Add the command to the parser of ``gems-flwr``."""
    inspect = commands.add_parser(
        "inspect",
        help="say what a space holds and gives away before it is sent (status 4: do not send)",
        description="Attack a space with the data that it was made of, as its owner.",
        epilog=_DATA,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = inspect.add_argument
    add("file", type=Path, help="a space file")
    add("--data", type=Path, help="what the space was made of")
    add("--held-out", type=Path, help="more samples of the same kind that it was not made of")
    inspect.set_defaults(run=_inspect)


def _inspect(options: argparse.Namespace) -> int:
    if options.held_out is not None and options.data is None:
        raise OptionError("--held-out needs --data: the samples that the space was made of")
    space = load_space(options.file)
    if not isinstance(space, ClassMomentCone):
        print(f"{options.file}: a {space.kind} reveals the node's own model, as averaging does;")
        print("what a model shows of its samples is not tried here")
        return 0
    # Only now: scikit-learn takes a while to import.
    from gems_flwr.tools.leaks.inspection import inspect_cone

    data, held_out = (path and read_features(path) for path in (options.data, options.held_out))
    if held_out and held_out.inputs.shape[1] != space.num_features:
        raise OptionError(
            f"held-out data: expected {space.num_features} features, as in the file, got "
            f"{held_out.inputs.shape[1]}"
        )
    found = inspect_cone(space, data, held_out)
    print("\n".join(_lines(options.file, space, found)))
    return GIVEN_AWAY_STATUS if found.given_away else 0


def _lines(file: Path, cone: ClassMomentCone, found: Inspection) -> list[str]:
    lines = [f"{file}: {cone.kind}, {cone.size_bytes:,} bytes, {cone.num_features} features"]
    if found.recipe is not None:
        how = "these very bytes" if found.is_reproduced else "its form"
        lines.append(f"rank {found.recipe.rank} of the data makes {how}")
    if cone.privacy is not None:
        promise = "noise was promised for epsilon {:g}, delta {:g}; no file can prove it"
        lines.append(promise.format(*cone.privacy))
    if cone.withheld:
        lines.append(f"withheld classes: {', '.join(map(str, cone.withheld))}")
    lines += [finding.verdict for finding in found.classes]
    tried = [each.membership for each in found.classes if each.membership is not None]
    if found.recipe is None:
        lines.append("Attacks need the data: --data.")
    elif not tried:
        lines.append("Too few samples to try membership: give --held-out.")
    elif not all(each.of_what_is_sent for each in tried):
        lines.append(
            "AUCs are of spaces of 3/4 of the samples, against the rest. An attacker who has more "
            "of them does better: give more --held-out."
        )
    gone = ", ".join(str(each.label) for each in found.given_away)
    lines.append(f"DO NOT SEND: class {gone}" if gone else "Nothing alarming.")
    return [part for line in lines for part in textwrap.wrap(line, 80, subsequent_indent="  ")]


# --- files of features ------------------------------------------------------------------------


def read_features(path: str | Path) -> LayerSamples:
    """Return inputs (n, ...) and classes (n) from an ``.npz`` file with these arrays."""
    from gems_flwr.tools.leaks.recipes import LayerSamples

    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                if entry.file_size > max(2**30, 100 * entry.compress_size):
                    raise OfflineError(f"{path}: {entry.filename} would fill the memory")
        with np.load(path) as stored:
            inputs, labels = stored[INPUTS], stored[LABELS].reshape(-1).astype(np.float64)
            rows = inputs.reshape(len(inputs), -1).astype(np.float64)
    except (ValueError, TypeError, KeyError, zipfile.BadZipFile, EOFError, AttributeError) as error:
        raise OfflineError(
            f"{path} is no npz of inputs (n x D) and labels (n), as "
            f"gems_flwr.tools.leaks.save_features writes: {' '.join(str(error).split())[:200]}"
        ) from error
    if len(rows) != len(labels):
        raise OfflineError(f"{path}: {len(rows)} inputs and {len(labels)} labels")
    if not np.isfinite(rows).all() or not np.array_equal(labels, np.rint(labels)):
        raise OfflineError(f"{path}: inputs must be finite, and labels class numbers 0, 1, …")
    return LayerSamples(rows, labels.astype(np.int64))


def save_features(
    path: str | Path, data: Data, model: nn.Module, *, layer: str | None = None
) -> int:
    """Write what a model's output layer sees of some data, for ``gems-flwr inspect --data``.

    Parameters
    ----------
    path : path
        An ``.npz`` file; for its owner alone.
    data : pair of arrays, or iterable of batches
        As in `good_enough_mod`: the data that the space was built on, or held-out data.
    model : torch.nn.Module
        With the weights that the server sent.
    layer : str, optional
        Name of the linear output layer, where it cannot be found.

    Returns
    -------
    int
        How many samples were written.

    Examples
    --------
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> import torch
    >>> from gems_flwr.tools.leaks import save_features
    >>> net = torch.nn.Sequential(torch.nn.Linear(8, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2))
    >>> with TemporaryDirectory() as folder:
    ...     save_features(Path(folder, "data.npz"), (torch.randn(40, 8), torch.arange(40) % 2), net)
    40
    """
    from gems_flwr.networks import LayerReader, is_read_once

    data = list(data) if is_read_once(data) else data
    arrays = {name: value.detach().cpu().numpy() for name, value in model.state_dict().items()}
    reader = LayerReader(arrays, copy.deepcopy(model), layer, call="save_features(path, data, Net)")
    samples = reader.read(data, reader.output_layer(data))
    inputs, labels = (each.detach().cpu().numpy() for each in (samples.inputs, samples.labels))
    with replacing(Path(path), private=True) as temporary, temporary.open("wb") as file:
        np.savez(file, inputs=inputs, labels=labels)
    return len(samples)
