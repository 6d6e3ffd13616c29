"""Aggregation by files, for nodes that are never online together.

A node writes its space to a file (`spaces.space_files.save_space`) and brings it by whatever way
there is; the server aggregates the files it has and adds others as they come. Files pass the same
checks as messages: a bad one is named and left out. A node that leaves takes its file with it: the
model is made anew from the others', to the last bit as if it had never been there, and a receipt
says so (`gems_flwr.receipts`).

Decided here: spaces count in the order of their nodes' names, in whatever order the files were
named or came, so that one set of nodes makes one model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from gems_flwr.disk.files import replacing
from gems_flwr.disk.lock import hold_folder
from gems_flwr.errors import Failure, OfflineError, SpaceError
from gems_flwr.intersect.aggregate import Aggregate, OnEmpty, aggregate_spaces
from gems_flwr.intersect.cone_objective import ConeOptions
from gems_flwr.intersect.result import Select
from gems_flwr.receipts import (
    Receipt,
    model_digest,
    samples_of,
    save_receipt,
    space_digest,
    utc_now,
)
from gems_flwr.spaces.ball import BallSet, BallSpace
from gems_flwr.spaces.cone import ClassMomentCone
from gems_flwr.spaces.covariance import LowRankCovariance
from gems_flwr.spaces.ellipsoid import EllipsoidSpace
from gems_flwr.spaces.output_layer import flatten_linear, unflatten_linear
from gems_flwr.spaces.partial_covariance import PartialCovariance
from gems_flwr.spaces.space_files import SUFFIX, Space, SpaceFolder, file_stem, load_space
from gems_flwr.typing import Arrays


@dataclasses.dataclass(frozen=True, eq=False)
class OfflineResult:
    """What came of aggregating files.

    Examples
    --------
    What `aggregate_files` returns:

    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> import torch
    >>> from gems_flwr import build_cone, aggregate_files, save_space
    >>> cone = build_cone(torch.randn(200, 3), torch.arange(200) % 2, num_classes=2)
    >>> with TemporaryDirectory() as folder:
    ...     files = [Path(folder, f"{name}.safetensors") for name in ("north", "south")]
    ...     sizes = [save_space(file, cone) for file in files]
    ...     result = aggregate_files(files, Path(folder, "model.safetensors"))
    >>> result.rejected, result.aggregate.intersection.status
    ((), 'feasible')
    """

    aggregate: Aggregate
    nodes: tuple[str, ...]
    rejected: tuple[Failure, ...]
    receipt: Receipt | None = None


def aggregate_files(
    files: Sequence[Path],
    output: Path,
    *,
    add: bool = False,
    remove: Sequence[str] = (),
    classes: int | None = None,
    keys: tuple[str, str] = ("weight", "bias"),
    select: Select | None = None,
    on_empty: OnEmpty = "least",
    ridge: float | None = None,
) -> OfflineResult:
    """Aggregate space files into a model file.

    Parameters
    ----------
    files : sequence of Path
        One space file per node; its name is the node's. None are needed with `remove`.
    output : Path
        Where to write the layer, as safetensors. The spaces are kept beside it, in a folder of
        the same name that ends in ``.spaces``.
    add : bool
        Whether to go on from what is kept beside `output` instead of starting afresh.
    remove : sequence of str
        Nodes that leave. The others' spaces beside `output` are aggregated as if from scratch; the
        spaces of these are deleted, and the receipt goes to a file beside `output` whose name ends
        in ``.receipts.json``.
    classes : int, optional
        Classes of the task. Cones know it; balls and ellipsoids are flat and do not.
    keys : pair of str
        Names of weight and bias in the output, e.g. those of a torch state dict.
    select, on_empty, ridge
        As in the `Gems` strategy.

    Raises
    ------
    OfflineError
        If no file is usable, the spaces do not fit together, or the layer cannot be written as
        asked for.
    FolderInUseError
        If another process adds to the same spaces.
    DiskError
        If spaces or layer cannot be written.

    Examples
    --------
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> import torch
    >>> from gems_flwr import build_cone, aggregate_files, save_space
    >>> cone = build_cone(torch.randn(200, 3), torch.arange(200) % 2, num_classes=2)
    >>> with TemporaryDirectory() as folder:
    ...     files = [Path(folder, f"{name}.safetensors") for name in ("north", "south")]
    ...     sizes = [save_space(file, cone) for file in files]
    ...     result = aggregate_files(files, Path(folder, "model.safetensors"))
    >>> result.nodes
    ('north', 'south')
    """
    _check_arguments(files, output, keys, remove)
    kept = output.with_suffix(".spaces")
    with hold_folder(kept):
        folder = SpaceFolder(kept)
        spaces: dict[str, Space] = folder.load() if add or remove else {}
        before = load_layer(output, keys) if (add or remove) and output.exists() else None
        leaving = taken(spaces, remove)
        rejected: list[Failure] = []
        for path in files:
            node = path.name.removesuffix(SUFFIX).removesuffix(".safetensors")
            try:
                space = load_space(path)
                _check_like(space, next(iter(spaces.values()), None))
                spaces[node] = space
            except (SpaceError, OSError) as error:
                rejected.append(Failure(node, str(error)))
        if not spaces:
            reasons = "".join(f"\n  {failure}" for failure in rejected)
            raise OfflineError(f"none of {len(files)} files holds a usable space{reasons}")
        spaces = in_order(spaces)
        found = aggregate_spaces(
            list(spaces.values()),
            select=select,
            on_empty=on_empty,
            cone_options=ConeOptions(ridge=ridge),
            # Without those who leave, the model is to be what it were from scratch, to the bit.
            start=None if remove or before is None else flatten_linear(*before.values()),
        )
        weight, bias = _as_layer(found.point, next(iter(spaces.values())), classes)
        layer = {keys[0]: weight, keys[1]: bias}
        folder.save(spaces)
        with replacing(output) as temporary:
            save_file(layer, temporary)
        # Last: a disk that fails before has cost nothing.
        folder.clear(but=spaces)
        receipt = None
        if leaving:
            receipt = receipt_for(leaving, spaces, before, layer)
            save_receipt(output.with_suffix(".receipts.json"), receipt)
        return OfflineResult(found, tuple(spaces), tuple(rejected), receipt)


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


def in_order(spaces: Mapping[str, Space]) -> dict[str, Space]:
    """Return spaces in the order in which a folder has them."""
    return {node: spaces[node] for node in sorted(spaces, key=file_stem)}


def taken(spaces: dict[str, Space], remove: Sequence[str]) -> dict[str, Space]:
    """Take the spaces of nodes that leave out of all, and return them.

    Raises
    ------
    OfflineError
        If a node is not there, or nobody would be left.
    """
    unknown = [node for node in remove if node not in spaces]
    if unknown:
        raise OfflineError(f"no space of {unknown} is kept; there are {sorted(spaces)}")
    if remove and len(set(remove)) == len(spaces):
        raise OfflineError("nobody would be left: delete the model and its spaces instead")
    return {node: spaces.pop(node) for node in dict.fromkeys(remove)}


def receipt_for(
    leaving: Mapping[str, Space],
    staying: Mapping[str, Space],
    before: Arrays | None,
    after: Arrays,
) -> Receipt:
    """Return the receipt for nodes whose spaces are in no model any more."""
    return Receipt(
        removed={node: space_digest(space) for node, space in leaving.items()},
        remaining={node: samples_of(space) for node, space in staying.items()},
        at=utc_now(),
        model_before=None if before is None else model_digest(before),
        model_after=model_digest(after),
    )


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


def load_layer(output: Path, keys: tuple[str, str]) -> dict[str, NDArray]:
    """Return weight and bias of a layer that was written before.

    Raises
    ------
    OfflineError
        If the file holds none.
    """
    try:
        arrays = load_file(output)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise OfflineError(f"{output} cannot be read ({error}); remove it") from error
    if not set(keys) <= arrays.keys():
        raise OfflineError(f"{output} has no {list(keys)}; it has {sorted(arrays)}")
    weight, bias = (arrays[key] for key in keys)
    fits = weight.ndim == 2 and bias.shape == (len(weight),)
    if not fits or not (np.isfinite(weight).all() and np.isfinite(bias).all()):
        raise OfflineError(f"{output} holds no linear layer of finite weights; remove it")
    return {key: arrays[key] for key in keys}


def describe(space: Space) -> list[tuple[str, str]]:
    """Return what a space reveals, as pairs of a name and a text."""
    rows = [("kind", space.kind), ("bytes", f"{space.size_bytes:,}")]
    rows.append(("sha256", space_digest(space)))
    if isinstance(space, ClassMomentCone):
        form, shape = space.covariance.form.replace("_", " "), space.covariance
        shape = shape.own if isinstance(shape, PartialCovariance) and shape.own else shape
        if isinstance(shape, LowRankCovariance):
            ranks = [str(shape.rank(entry)) for entry in range(shape.shape[0])]
            form += f" ({', '.join(ranks)} directions)"
        counts: dict[int, int] = {}
        for label, count in zip(space.labels.tolist(), space.counts.tolist(), strict=True):
            counts[label] = counts.get(label, 0) + count
        rows += [
            ("moments", f"{form}, {len(space.labels)} entries of {space.num_features} features"),
            ("samples per class", ", ".join(f"{c}: {n}" for c, n in counts.items())),
            (
                "means alone",
                ", ".join(map(str, sorted(set(space.labels[space.lacking].tolist())))) or "none",
            ),
            ("withheld classes", ", ".join(map(str, space.withheld)) or "none"),
            (
                "differential privacy",
                f"epsilon {space.privacy[0]:g}, delta {space.privacy[1]:g}"
                if space.privacy
                else "none: means and covariances are those of the data",
            ),
        ]
        return rows
    balls = space.balls if isinstance(space, BallSet) else (space,)
    for ball in balls:
        if not isinstance(ball, BallSpace | EllipsoidSpace):
            continue
        r = ball.radius
        rows.append(("radius", f"{r.value:.4g}, {r.method}, for epsilon {r.epsilon:g}"))
    return [*rows, ("weights", f"{space.dimension:,} of the node's own model")]
