"""A model of a kept total, and the model without those who leave it; by files.

For servers that keep nothing but the total of a secure sum: `gems_flwr.secure.kept_total` is what
they have, `gems_flwr.secure.signed_difference` what a node that leaves brings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from torch import Tensor

from gems_flwr.disk.files import replacing
from gems_flwr.disk.lock import hold_folder
from gems_flwr.errors import OfflineError
from gems_flwr.intersect.aggregate import Aggregate, aggregate_spaces
from gems_flwr.intersect.cone_objective import ConeOptions
from gems_flwr.moments.class_sums import in_chunks, sum_classes
from gems_flwr.moments.cone_building import MIN_COUNT, cone_from_sums
from gems_flwr.moments.small_means import MeanRule
from gems_flwr.moments.total_sums import class_sums_of, class_sums_words
from gems_flwr.offline import load_layer
from gems_flwr.receipts import Receipt, model_digest, save_receipt, utc_now
from gems_flwr.secure.kept_total import KeptTotal, TotalNote, load_total, save_total
from gems_flwr.secure.signatures import Signer, TrustedKeys
from gems_flwr.secure.signed_difference import (
    Difference,
    difference_from,
    load_difference,
    save_difference,
    without,
)
from gems_flwr.spaces.output_layer import unflatten_linear

_SHOWN = (
    "whoever kept the total before and has the one after has what the leaver had added; {nodes} "
    "nodes left together"
)


def write_difference(
    note: str,
    inputs: Tensor,
    labels: Tensor,
    *,
    node: str,
    key: str | Path,
    output: str | Path,
    min_count: int = 1,
) -> Difference:
    """Write the file by which a node leaves a total of class sums; on the node.

    Parameters
    ----------
    note : str
        What the server tells of its total (``python -m gems_flwr show total.safetensors``).
    inputs : tensor of shape (n, D)
        What the node had added up.
    labels : int tensor of shape (n,)
        Their classes.
    node : str
        The node's name in the total.
    key : path
        Its private key, Ed25519 or ECDSA, without a password.
    output : path
        Where the difference goes.
    min_count : int, default 1
        Fewest samples of a class that the node had added.

    Raises
    ------
    SecureSumError
        If the node is not in the total, or the key cannot be used.
    SpaceError
        If the data do not fit the total.

    Examples
    --------
    The note is the server's; one of nothing is refused before the key is read:

    >>> import torch
    >>> from gems_flwr import SecureSumError, write_difference
    >>> data = torch.randn(40, 3), torch.arange(40) % 2
    >>> try:
    ...     write_difference("{}", *data, node="north", key="north.pem", output="north.safetensors")
    ... except SecureSumError as error:
    ...     print(error)
    the note of a total cannot be read: 'layout'
    """
    told = TotalNote.from_json(note)
    classes = told.layout.sections[0].shape[0]
    sums = sum_classes(in_chunks(inputs, labels), classes)
    words = class_sums_words(told.layout, sums, min_count)
    left = difference_from(told, (node,), words).signed(node, Signer.load(key))
    save_difference(output, left)
    return left


@dataclasses.dataclass(frozen=True, eq=False)
class TotalResult:
    """A model of a total."""

    aggregate: Aggregate
    nodes: tuple[str, ...]
    receipt: Receipt | None = None


def aggregate_total(
    path: Path,
    output: Path,
    *,
    remove: Sequence[str] = (),
    difference: Path | None = None,
    keys: Sequence[Path] = (),
    layer_keys: tuple[str, str] = ("weight", "bias"),
    ridge: float | None = None,
    min_count: int = MIN_COUNT,
) -> TotalResult:
    """Make a model of a kept total, without those who leave it.

    Parameters
    ----------
    path : Path
        The total; replaced by the one without them.
    output : Path
        The model file; the receipt goes beside it.
    remove : sequence of str
        Who leaves: those of the difference.
    difference : Path, optional
        What they take out, signed by each.
    keys : sequence of Path
        Their public keys, each in a file that is called like its node (``north.pub``).
    layer_keys : pair of str
        Names of weight and bias in the output.
    ridge : float, optional
        Of the cone objective.
    min_count : int
        Fewest samples of a class in all.

    Raises
    ------
    OfflineError
        If nodes, difference and keys do not belong together.
    SecureSumError
        If the difference must not be believed; see `gems_flwr.secure.signed_difference.without`.
    SpaceError
        If what would be left is no total that samples can have.
    """
    if bool(remove) != (difference is not None):
        raise OfflineError("who leaves a total brings a difference: give --remove and --difference")
    with hold_folder(path.resolve().parent):
        total = load_total(path)
        before = load_layer(output, layer_keys) if output.exists() else None
        left = None
        if difference is not None:
            left = load_difference(difference)
            if set(left.nodes) != set(remove):
                raise OfflineError(f"{difference} is of {list(left.nodes)}, not of {list(remove)}")
            total = without(total, left, {key.stem: TrustedKeys.load(key) for key in keys})
        # Checks that the rest is a total that samples can have, before anything is written.
        cone = cone_from_sums(
            class_sums_of(total), min_count=min_count, mean_rule=MeanRule(1, True)
        )
        found = aggregate_spaces([cone], cone_options=ConeOptions(ridge=ridge))
        parts = unflatten_linear(found.point, cone.num_classes, cone.num_features)
        layer = {k: part.astype(np.float32) for k, part in zip(layer_keys, parts, strict=True)}
        with replacing(output) as temporary:
            save_file(layer, temporary)
        receipt = None
        if left is not None:
            save_total(path, total)
            receipt = _receipt(left, total, before, layer)
            save_receipt(output.with_suffix(".receipts.json"), receipt)
        return TotalResult(found, total.nodes, receipt)


def _receipt(
    left: Difference,
    total: KeptTotal,
    before: Mapping[str, NDArray] | None,
    after: Mapping[str, NDArray],
) -> Receipt:
    return Receipt(
        removed=dict.fromkeys(left.nodes, left.digest),
        remaining=dict.fromkeys(total.nodes),
        at=utc_now(),
        model_before=None if before is None else model_digest(before),
        model_after=model_digest(after),
        note=f"total {left.total} became {total.note.digest}; "
        + _SHOWN.format(nodes=len(left.nodes)),
    )
