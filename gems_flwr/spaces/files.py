"""Spaces as plain arrays and as safetensors files.

For nodes that are never online together: a node writes its space, a server reads any number
of them. No pickle anywhere: a file is a safetensors file whose metadata hold one JSON text and a
checksum, and reading runs the same checks as building. Files without a checksum are of the time
before there were any.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from gems_flwr.disk import CHECKSUM, checksum, replacing, verify_checksum
from gems_flwr.spaces.ball import Ball
from gems_flwr.spaces.ball_set import BallSet
from gems_flwr.spaces.cone import ClassMomentCone
from gems_flwr.spaces.ellipsoid import Ellipsoid
from gems_flwr.spaces.errors import SpaceError, take

Space = Ball | Ellipsoid | BallSet | ClassMomentCone

FORMAT = "gems-space"
VERSION = 1


def space_to_arrays(space: Space) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Return a space as a dict of arrays and a dict of JSON values."""
    return space.to_arrays()


def space_from_arrays(arrays: Mapping[str, Any], meta: Mapping[str, Any]) -> Space:
    """Build the space that the arrays describe.

    Raises
    ------
    SpaceError
        If the kind is unknown or anything about the space is malformed.
    """
    kind = take(meta, "kind", "the space's meta")
    kinds: tuple[type[Space], ...] = (Ball, Ellipsoid, BallSet, ClassMomentCone)
    for space in kinds:
        if kind == space.kind:
            return space.from_arrays(arrays, meta)
    raise SpaceError("kind", f"one of {[space.kind for space in kinds]}", repr(kind))


def save_space(
    path: str | Path, space: Space, *, node: str | None = None, private: bool = False
) -> int:
    """Write a space to a safetensors file and return its size in bytes.

    Parameters
    ----------
    path : path
        Replaced at once: a reader sees the old file or the new one.
    space : Space
        What to write.
    node : str, optional
        Whose it is, where the file's name does not say so.
    private : bool
        Whether nobody but the owner may read the file.

    Raises
    ------
    DiskError
        If it cannot be written; what was there before is unchanged.
    """
    arrays, meta = space.to_arrays()
    contiguous = {key: np.ascontiguousarray(value) for key, value in arrays.items()}
    header = {"format": FORMAT, "version": str(VERSION), "meta": json.dumps(meta)}
    if node is not None:
        header["node"] = json.dumps(node)
    header[CHECKSUM] = checksum(contiguous, header)
    with replacing(Path(path), private=private) as temporary:
        save_file(contiguous, str(temporary), metadata=header)
    return Path(path).stat().st_size


def node_in_file(path: str | Path) -> str | None:
    """Return whose space a file holds, where it says so.

    Raises
    ------
    SpaceError
        If the file cannot be read.
    """
    try:
        with safe_open(str(path), framework="numpy") as file:
            node = json.loads((file.metadata() or {}).get("node", "null"))
    except (SafetensorError, ValueError, RecursionError) as error:
        raise SpaceError(Path(path).name, "a safetensors file with a space", error) from error
    return node if isinstance(node, str) else None


def load_space(path: str | Path) -> Space:
    """Read a space from a safetensors file.

    Raises
    ------
    SpaceError
        If the file is not one of ours or the space in it is malformed; the message
        begins with the file's name.
    """
    name = Path(path).name
    try:
        with safe_open(str(path), framework="numpy") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                raise SpaceError("format", FORMAT, repr(header.get("format")))
            if header.get("version") != str(VERSION):
                raise SpaceError("version", str(VERSION), repr(header.get("version")))
            meta = json.loads(take(header, "meta", "the file's header"))
            if not isinstance(meta, dict):
                raise SpaceError("meta", "a JSON object", repr(meta)[:80])
            arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            verify_checksum(header, arrays, {"format", "version", "meta", "node"})
        return space_from_arrays(arrays, meta)
    except SpaceError as error:
        raise SpaceError(f"{name}: {error.key}", error.expected, error.got) from error
    except (SafetensorError, ValueError, RecursionError) as error:
        raise SpaceError(name, "a safetensors file with a space", error) from error
