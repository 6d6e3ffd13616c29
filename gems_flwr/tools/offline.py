"""Aggregation of cones by files: for nodes never online together, who join late, or leave.

Files pass the same checks as messages: a bad one is named and left out. The spaces are kept beside
the model, or where a run of Gems keeps those of its nodes (``checkpoint_dir/spaces``). The model is
always made from scratch, in the order of the nodes' names: without a node that leaves it is to the
last bit as if the node had never been there.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from gems_flwr.core.disk import hold_folder, replacing
from gems_flwr.errors import Failure, OfflineError, SpaceError
from gems_flwr.spaces import (
    SUFFIX,
    Aggregate,
    Space,
    SpaceFolder,
    aggregate_spaces,
    file_stem,
    load_space,
    unflatten_linear,
)
from gems_flwr.spaces.cone import ClassMomentCone

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
    keys: tuple[str, str] = ("weight", "bias"),
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
    keys : pair of str
        Names of weight and bias in the output, such as those of a torch state dict.

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
    if not files and not remove:
        raise OfflineError("name at least one space file, or a node to remove")
    if output.resolve() in [path.resolve() for path in files]:
        raise OfflineError(f"{output} is one of the space files; name another one to write")
    kept = output.with_suffix(".spaces") if spaces is None else spaces
    with hold_folder(kept):
        folder, goes_on = SpaceFolder(kept), add or bool(remove)
        held: dict[str, Space] = folder.load() if goes_on else {}
        before = _arrays(output) if goes_on and output.exists() else {}
        if unknown := [node for node in remove if node not in held]:
            raise OfflineError(f"no space of {unknown} is kept in {kept}: it has {sorted(held)}")
        held = {node: space for node, space in held.items() if node not in remove}
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
            raise OfflineError("no usable space is left" + "".join(f"\n  {x}" for x in rejected))
        held = {node: held[node] for node in sorted(held, key=file_stem)}
        first = next(iter(held.values()))
        if not isinstance(first, ClassMomentCone):
            raise OfflineError(f"{kept} has a {first.kind}; cones alone are aggregated by files")
        found = aggregate_spaces(list(held.values()))
        layer = unflatten_linear(found.point, first.num_classes, first.num_features)
        arrays = {key: x.astype(np.float32) for key, x in zip(keys, layer, strict=True)}
        folder.save(held)
        with replacing(output) as temporary:
            save_file({**before, **arrays}, temporary)
        # Last: a disk that fails before has cost nothing.
        folder.clear(but=held)
        return OfflineResult(found, tuple(held), tuple(rejected))


def _check_like(space: Space, first: Space | None) -> None:
    """Refuse a space that is no cone, or that the others cannot be intersected with."""
    if not isinstance(space, ClassMomentCone):
        raise SpaceError("kind", "cone, the only kind that files are aggregated of", space.kind)
    # As many weights may be three classes of nine features or two of fourteen.
    for name in ("dimension", "num_classes") if first else ():
        mine, theirs = getattr(space, name), getattr(first, name)
        if mine != theirs:
            raise SpaceError(name, f"{theirs}, as the others", mine)


def _arrays(path: Path) -> dict[str, Any]:
    try:
        return load_file(path)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise OfflineError(f"{path} cannot be read ({error}); remove it") from error


# --- gems-flwr aggregate ----------------------------------------------------------------------

_HOW = """\
Each file is called as its node. A space that comes later, and a node that leaves:

    gems-flwr aggregate north.safetensors south.safetensors -o model.safetensors
    gems-flwr aggregate --add harbour.safetensors -o model.safetensors
    gems-flwr aggregate --remove north -o model.safetensors

The same for the output layer of a run of Gems with checkpoint_dir=runs/wards:

    gems-flwr aggregate --spaces runs/wards/spaces --remove north \\
        -o model.safetensors --keys fc.weight fc.bias"""


def add_aggregate(commands: Any) -> None:
    """Add the command to the parser of ``gems-flwr``."""
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
    add(
        "--keys", nargs=2, default=("weight", "bias"), metavar=("WEIGHT", "BIAS"),
        help="names of the layer in the model file; weight bias",
    )  # fmt: skip
    aggregate.set_defaults(run=_aggregate)


def _aggregate(options: argparse.Namespace) -> int:
    given = {name: value for name, value in vars(options).items() if name != "run"}
    result = aggregate_files(**{**given, "keys": tuple(options.keys)})
    found = result.aggregate.intersection
    for failure in result.rejected:
        print(f"left out: {failure}", file=sys.stderr)
    verdict = _VERDICTS[found.status]
    print(f"{options.output}: {len(result.nodes)} nodes, {verdict} ({found.seconds:.2f} s)")
    for node, margin in zip(result.nodes, found.margins, strict=True):
        print(f"  {node}: margin {margin:+.4g}")
    return 0
