"""A receipt for a node that has left: what was removed, from what, when, and what came of it.

Leaving is as exact as joining: the model without a node is the model of the others, made anew from
what they have sent. The receipt is what the node's owner gets of it, and what an auditor holds
against the files: digests (sha256) of the model before and after, and of what was removed.

Decided here: the digest of a model is that of the safetensors file which holds its arrays and
nothing else, so ``sha256sum model.safetensors`` shows it. The digest of a space is that of what it
holds, not of a file, for the header of a space file may be written in several orders; ``python -m
gems_flwr show`` prints it. A receipt is no signature: whoever can write the folder can write one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from gems_flwr.disk.files import contents_digest, write_atomically
from gems_flwr.errors import OfflineError
from gems_flwr.moments.class_sums import ClassSums
from gems_flwr.spaces.cone import ClassMomentCone
from gems_flwr.spaces.curved_space import CurvedSpace, without_curve
from gems_flwr.spaces.space_files import Space
from gems_flwr.typing import Arrays

RECEIPTS = "receipts.json"
FORMAT = "gems-flwr-receipts-1"


@dataclasses.dataclass(frozen=True)
class Receipt:
    """What was done for a node that left.

    Parameters
    ----------
    removed : mapping from str to str or None
        Nodes that left, each with the sha256 of what it had sent; None if there was nothing.
    remaining : mapping from str to int or None
        Nodes whose contributions are in the model now, each with its samples, where those are
        known.
    at : str
        When, in UTC, as ISO 8601 to the second.
    model_before, model_after : str, optional
        sha256 of the models; None where there was none.
    forgotten : bool
        Whether nothing of the nodes is in the model any more.
    note : str
        What else there is to say, such as why something remains.
    round : int, optional
        The round of a run in which it happened.

    Examples
    --------
    >>> from gems_flwr import Receipt
    >>> receipt = Receipt({"north": "9f86…"}, {"south": 480}, "2026-05-04T12:00:00+00:00")
    >>> receipt.forgotten, list(receipt.remaining)
    (True, ['south'])
    """

    removed: Mapping[str, str | None]
    remaining: Mapping[str, int | None]
    at: str
    model_before: str | None = None
    model_after: str | None = None
    forgotten: bool = True
    note: str = ""
    round: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the receipt as plain values."""
        return {**dataclasses.asdict(self), "digests": "sha256"}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Receipt:
        """Return the receipt that `to_json` described."""
        return cls(**{field.name: values[field.name] for field in dataclasses.fields(cls)})


def utc_now() -> str:
    """Return the time, as receipts have it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def model_digest(arrays: Arrays) -> str:
    """Return the sha256 of the safetensors file that holds a model's arrays and nothing else."""
    plain = {key: np.ascontiguousarray(array) for key, array in arrays.items()}
    return hashlib.sha256(save(plain)).hexdigest()


def space_digest(space: Space | CurvedSpace | ClassSums) -> str:
    """Return the sha256 of what a node sent: the arrays and plain values of its space or sums."""
    if isinstance(space, ClassSums):
        arrays = {name: getattr(space, name) for name in ("labels", "counts", "sums", "outers")}
        return contents_digest(arrays, {"num_classes": str(space.num_classes)})
    arrays, meta = without_curve(space).to_arrays()
    return contents_digest(arrays, {"meta": json.dumps(meta, sort_keys=True)})


def samples_of(space: object) -> int | None:
    """Return how many samples are behind what a node sent, where it says so."""
    plain = without_curve(space)
    if isinstance(plain, ClassMomentCone):
        return int(plain.total_count)
    return int(plain.counts.sum()) if isinstance(plain, ClassSums) else None


def load_receipts(path: Path) -> list[Receipt]:
    """Return the receipts in a file, oldest first; none if there is no file.

    Raises
    ------
    OfflineError
        If the file holds something else.

    Examples
    --------
    >>> from pathlib import Path
    >>> from gems_flwr import load_receipts
    >>> load_receipts(Path("a-run-that-nobody-left", "receipts.json"))
    []
    """
    if not path.exists():
        return []
    try:
        kept = json.loads(path.read_bytes())
        if kept["format"] != FORMAT:
            raise ValueError(f"its format is {kept['format']!r}")
        return [Receipt.from_json(values) for values in kept["receipts"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise OfflineError(f"{path} holds no receipts ({error}); move it out of the way") from error


def save_receipt(path: Path, receipt: Receipt) -> None:
    """Add a receipt to those in a file, which is replaced at once.

    Raises
    ------
    OfflineError
        If the file holds something else.
    DiskError
        If it cannot be written.
    """
    receipts = [*load_receipts(path), receipt]
    kept = {"format": FORMAT, "receipts": [each.to_json() for each in receipts]}
    # Names and counts of single nodes: for the owner's eyes, who hands them on.
    write_atomically(path, json.dumps(kept, indent=1).encode() + b"\n", private=True)
