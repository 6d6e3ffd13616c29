"""Aggregation by files, for nodes that are never online together, or that join late or leave.

Files pass the same checks as messages: a bad one is named and left out. The spaces are kept beside
the model, or where a run of Gems keeps those of its nodes (``checkpoint_dir/spaces``). Without a
node that leaves, the model is to the last bit as if the node had never been there; spaces count in
the order of their nodes' names.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from gems_flwr.core.disk import hold_folder, replacing
from gems_flwr.errors import Failure, OfflineError, SpaceError
from gems_flwr.spaces import (
    SUFFIX,
    Aggregate,
    OnEmpty,
    Space,
    SpaceFolder,
    aggregate_spaces,
    file_stem,
    flatten_linear,
    load_space,
    unflatten_linear,
)
from gems_flwr.spaces.cone import ClassMomentCone, ConeOptions

_VERDICTS = {
    "feasible": "good enough for every node",
    "empty": "no model is good enough for every node (proved); this one violates least",
    "undecided": "not shown to be good enough for every node",
}


@dataclasses.dataclass(frozen=True, eq=False)
class OfflineResult:
    """What came of aggregating files: the layer, whose spaces it has, and which were left out."""

    aggregate: Aggregate
    nodes: tuple[str, ...]
    rejected: tuple[Failure, ...]


def aggregate_files(
    files: Sequence[Path],
    output: Path,
    *,
    add: bool = False,
    remove: Sequence[str] = (),
    spaces: Path | None = None,
    classes: int | None = None,
    keys: tuple[str, str] = ("weight", "bias"),
    on_empty: OnEmpty = "least",
    ridge: float | None = None,
) -> OfflineResult:
    """Aggregate space files into a model file.

    Parameters
    ----------
    files : sequence of Path
        One space file per node; its name is the node's. None are needed with `remove`.
    output : Path
        Where to write the layer, as safetensors. With `add` or `remove` its other arrays stay.
    add : bool
        Whether to go on from the spaces that are kept instead of starting afresh.
    remove : sequence of str
        Nodes that leave: their kept spaces are deleted, and those of the others aggregated as if
        from scratch.
    spaces : Path, optional
        Where spaces are kept; by default beside `output`, in a folder of the same name that ends
        in ``.spaces``. The spaces of a run are in ``checkpoint_dir/spaces``.
    classes : int, optional
        Classes of the task. Cones have it; balls and ellipsoids are flat and do not.
    keys : pair of str
        Names of weight and bias in the output, such as those of a torch state dict.
    on_empty, ridge
        As in `aggregate_spaces` and `ConeOptions`.

    Examples
    --------
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> import torch
    >>> from gems_flwr import aggregate_files
    >>> from gems_flwr.spaces import save_space
    >>> from gems_flwr.spaces.cone import build_cone
    >>> cone = build_cone(torch.randn(200, 3), torch.arange(200) % 2, num_classes=2)
    >>> with TemporaryDirectory() as folder:
    ...     files = [Path(folder, f"{name}.safetensors") for name in ("north", "south")]
    ...     sizes = [save_space(file, cone) for file in files]
    ...     result = aggregate_files(files, Path(folder, "model.safetensors"))
    >>> result.nodes, result.aggregate.intersection.status
    (('north', 'south'), 'feasible')
    """
    _check_arguments(files, output, keys, remove)
    kept = output.with_suffix(".spaces") if spaces is None else spaces
    with hold_folder(kept):
        folder, goes_on = SpaceFolder(kept), add or bool(remove)
        held: dict[str, Space] = folder.load() if goes_on else {}
        before = load_arrays(output, keys) if goes_on and output.exists() else {}
        if unknown := [node for node in remove if node not in held]:
            raise OfflineError(f"no space of {unknown} is kept in {kept}: it has {sorted(held)}")
        for node in set(remove):
            del held[node]
        if remove and not held and not files:
            raise OfflineError("no node would be left: delete the model and its spaces instead")
        rejected: list[Failure] = []
        for path in files:
            node = path.name.removesuffix(SUFFIX).removesuffix(".safetensors")
            try:
                space = load_space(path)
                _check_like(space, next(iter(held.values()), None))
                held[node] = space
            except (SpaceError, OSError) as error:
                rejected.append(Failure(node, str(error)))
        if not held:
            reasons = "".join(f"\n  {failure}" for failure in rejected)
            raise OfflineError(f"none of {len(files)} files holds a usable space{reasons}")
        held = {node: held[node] for node in sorted(held, key=file_stem)}
        found = aggregate_spaces(
            list(held.values()),
            on_empty=on_empty,
            cone_options=ConeOptions(ridge=ridge),
            # Without those who leave, the model is to be what it were from scratch, to the bit.
            start=flatten_linear(*(before[key] for key in keys)) if before and not remove else None,
        )
        layer = _as_layer(found.point, next(iter(held.values())), classes)
        folder.save(held)
        with replacing(output) as temporary:
            save_file({**before, **dict(zip(keys, layer, strict=True))}, temporary)
        # Last: a disk that fails before has cost nothing.
        folder.clear(but=held)
        return OfflineResult(found, tuple(held), tuple(rejected))


def _check_arguments(
    files: Sequence[Path], output: Path, keys: tuple[str, str], remove: Sequence[str]
) -> None:
    if not output.name or output.is_dir():
        raise OfflineError(f"{output} is a folder; name the file to write")
    if not files and not remove:
        raise OfflineError("name at least one space file, or a node to remove")
    if output.resolve() in [path.resolve() for path in files]:
        raise OfflineError(f"{output} is one of the space files; name another one to write")
    if keys[0] == keys[1]:
        raise OfflineError(f"weight and bias need different names, got '{keys[0]}' for both")


def _check_like(space: Space, first: Space | None) -> None:
    """Refuse a space that the others cannot be intersected with."""
    if first is None:
        return
    if isinstance(space, ClassMomentCone) != isinstance(first, ClassMomentCone):
        raise SpaceError("kind", f"{first.kind}, as the others", space.kind)
    if space.dimension != first.dimension:
        raise SpaceError("dimension", f"{first.dimension}, as the others", space.dimension)
    # As many weights may be three classes of nine features or two of fourteen.
    if isinstance(space, ClassMomentCone) and isinstance(first, ClassMomentCone):
        mine, theirs = space.num_classes, first.num_classes
        if mine != theirs:
            raise SpaceError("num_classes", f"{theirs}, as the others", mine)


def _as_layer(
    point: NDArray[np.float64], like: Space, classes: int | None
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    if isinstance(like, ClassMomentCone):
        classes = like.num_classes
    if classes is None:
        raise OfflineError(f"a {like.kind} is flat: say how many classes the task has")
    if classes < 1:
        raise OfflineError(f"a task has at least 1 class, got {classes}")
    features, rest = divmod(point.size, classes)
    if rest or features < 2:
        raise OfflineError(f"{point.size} weights do not make a layer of {classes} classes")
    weight, bias = unflatten_linear(point, classes, features - 1)
    return weight.astype(np.float32), bias.astype(np.float32)


def load_arrays(path: Path, keys: tuple[str, str]) -> dict[str, NDArray]:
    """Return the arrays of a model file with a linear layer of finite weights by these names."""
    try:
        arrays = load_file(path)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise OfflineError(f"{path} cannot be read ({error}); remove it") from error
    if not set(keys) <= arrays.keys():
        raise OfflineError(f"{path} has no {list(keys)}; it has {sorted(arrays)}")
    weight, bias = (arrays[key] for key in keys)
    fits = weight.ndim == 2 and bias.shape == (len(weight),)
    if not fits or not (np.isfinite(weight).all() and np.isfinite(bias).all()):
        raise OfflineError(f"{path} holds no linear layer of finite weights; remove it")
    return arrays


def describe(space: Space) -> list[tuple[str, str]]:
    """Return what a space reveals, as pairs of a name and a text."""
    size = sum(np.asarray(array).nbytes for array in space.to_arrays()[0].values())
    rows = [("kind", space.kind), ("bytes", f"{size:,}")]
    if isinstance(space, ClassMomentCone):
        counts: dict[int, int] = {}
        for label, count in zip(space.labels.tolist(), space.counts.tolist(), strict=True):
            counts[label] = counts.get(label, 0) + count
        form = space.covariance.form.replace("_", " ")
        means = sorted(set(space.labels[space.lacking].tolist()))
        noise = "none: means and covariances are those of the data"
        if space.privacy:
            noise = f"epsilon {space.privacy[0]:g}, delta {space.privacy[1]:g}"
        entries = f"{len(space.labels)} entries of {space.num_features} features"
        return [
            *rows,
            ("moments", f"{form}, {entries}"),
            ("samples per class", ", ".join(f"{c}: {n}" for c, n in counts.items())),
            ("means alone", ", ".join(map(str, means)) or "none"),
            ("withheld classes", ", ".join(map(str, space.withheld)) or "none"),
            ("differential privacy", noise),
        ]
    balls: Sequence[Any] = getattr(space, "balls", (space,))
    for radius in [ball.radius for ball in balls if hasattr(ball, "radius")]:
        text = f"{radius.value:.4g}, {radius.method}, for epsilon {radius.epsilon:g}"
        rows.append(("radius", text))
    return [*rows, ("weights", f"{space.dimension:,} of the node's own model")]


# --- gems-flwr aggregate, show ----------------------------------------------------------------

_HOW = """\
Each file is called as its node. A space that comes later, and a node that leaves:

    gems-flwr aggregate north.safetensors south.safetensors -o model.safetensors
    gems-flwr aggregate --add harbour.safetensors -o model.safetensors
    gems-flwr aggregate --remove north -o model.safetensors

The same for the output layer of a run of Gems with checkpoint_dir=runs/wards:

    gems-flwr aggregate --spaces runs/wards/spaces --remove north \\
        -o model.safetensors --keys fc.weight fc.bias

Status: 0 if it was written, 2 for bad input, 3 if --on-empty fail finds no model."""


def add_aggregate(commands: Any) -> None:
    """Add ``aggregate`` and ``show`` to the parser of ``gems-flwr``."""
    aggregate = commands.add_parser(
        "aggregate",
        help="aggregate space files into a model file; add a late one, remove a node",
        epilog=_HOW,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = aggregate.add_argument
    add("files", nargs="*", type=Path, help="space files, one per node")
    add("-o", "--output", type=Path, required=True, help="the model file")
    add("--add", action="store_true", help="go on from the spaces that are kept")
    add(
        "--remove", action="append", default=[], metavar="NODE",
        help="a node that leaves: its space is deleted, the model made from the others' as if "
        "from scratch; may be given several times",
    )  # fmt: skip
    add(
        "--spaces", type=Path, metavar="FOLDER",
        help="where spaces are kept, such as checkpoint_dir/spaces of a run; beside the output",
    )  # fmt: skip
    add("--classes", type=int, help="classes of the task (balls, ellipsoids)")
    add(
        "--keys", nargs=2, default=("weight", "bias"), metavar=("WEIGHT", "BIAS"),
        help="names of the layer in the model file; weight bias",
    )  # fmt: skip
    add(
        "--on-empty", choices=["least", "fail"], default="least",
        help="if no model is good enough for all: the one that violates least, or status 3",
    )  # fmt: skip
    add("--ridge", type=float, help="of the cone objective")
    aggregate.set_defaults(run=_aggregate)
    show = commands.add_parser("show", help="say what a space file holds and reveals")
    show.add_argument("files", nargs="+", type=Path, help="space files")
    show.set_defaults(run=_show)


def _aggregate(options: argparse.Namespace) -> int:
    given = {name: value for name, value in vars(options).items() if name != "run"}
    result = aggregate_files(**{**given, "keys": tuple(options.keys)})
    found = result.aggregate.intersection
    for failure in result.rejected:
        print(f"left out: {failure}", file=sys.stderr)
    verdict = _VERDICTS[found.status]
    print(f"{options.output}: {len(result.nodes)} nodes, {verdict} ({found.seconds:.2f} s)")
    if found.is_average:
        print("it is the plain average of the nodes' models")
    for node, margin in zip(result.nodes, found.margins, strict=True):
        print(f"  {node}: margin {margin:+.4g}")
    return 0


def _show(options: argparse.Namespace) -> int:
    for path in options.files:
        print(path)
        for name, text in describe(load_space(path)):
            print(f"  {name}: {text}")
    return 0
