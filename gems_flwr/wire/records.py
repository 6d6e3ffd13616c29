"""Flower's records: arrays in and out, JSON that somebody else wrote, how large a message is."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray

from gems_flwr.bounds import MAX_JSON_CHARACTERS, MAX_NPY_HEADER_BYTES, MAX_STEP, MAX_VALUE
from gems_flwr.errors import BadReplyError
from gems_flwr.spaces.checks import shown
from gems_flwr.typing import Arrays
from gems_flwr.wire.array_bytes import promised_bytes, to_array, to_ndarray
from gems_flwr.wire.keys import SERVER_ROUND
from gems_flwr.wire.quick_records import make_arrays, records_of


def read_json(text: object, key: str) -> dict[str, Any]:
    """Return the JSON object in a text of a reply.

    Parameters
    ----------
    text : object
        What the reply has under the key.
    key : str
        Name to blame in the error.

    Raises
    ------
    BadReplyError
        If it is no text, too long, no JSON, or no object.
    """
    if not isinstance(text, str) or len(text) > MAX_JSON_CHARACTERS:
        raise BadReplyError(f"'{key}' must hold a JSON text of at most {MAX_JSON_CHARACTERS:,}")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits is a ValueError
        raise BadReplyError(f"'{key}' holds no JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadReplyError(f"'{key}' must hold a JSON object, got {shown(value)}")
    return value


def to_numpy(record: ArrayRecord) -> dict[str, NDArray]:
    """Return an ArrayRecord's arrays as numpy arrays."""
    return {name: to_ndarray(array) for name, array in record.items()}


def to_record(arrays: Arrays) -> ArrayRecord:
    """Return numpy arrays as an ArrayRecord."""
    made = {name: to_array(np.asarray(array)) for name, array in arrays.items()}
    return make_arrays(made) if all(type(name) is str for name in made) else ArrayRecord(made)


def put_instead(content: RecordDict, key: str, record: ArrayRecord | ConfigRecord) -> None:
    """Put a record in the place of another one, of whatever type.

    Flower warns of a record that changes its type, in every message; of a new one it does not.
    """
    content.pop(key, None)
    content[key] = record


def only_model(content: RecordDict) -> ArrayRecord:
    """Return the arrays of a message that carries one model.

    Raises
    ------
    BadReplyError
        If it carries none, or several.
    """
    records = list(records_of(content, ArrayRecord).values())
    if len(records) != 1:
        raise BadReplyError(f"expected one ArrayRecord with the model, got {len(records)}")
    return records[0]


def checked_array(
    array: Array,
    key: str,
    shape: tuple[int, ...] | None = None,
    dtype: np.dtype | None = None,
) -> NDArray:
    """Return the numpy array if it is what it claims to be, what was asked for, and finite."""
    return _checked(array, key, shape, dtype)[0]


def checked_model_array(array: Array, key: str, sent: NDArray) -> NDArray:
    """Return a trained array if it is like the one that was sent, and not absurdly far from it."""
    value, size = _checked(array, key, sent.shape, sent.dtype)
    return checked_step(value, sent, key) if size > MAX_STEP else value


def _checked(
    array: Array, key: str, shape: tuple[int, ...] | None, dtype: np.dtype | None
) -> tuple[NDArray, float]:
    """Return a checked array, and its largest absolute value; see `checked_array`."""
    if shape is not None and dtype is not None:
        limit = math.prod(shape) * dtype.itemsize + MAX_NPY_HEADER_BYTES
        if len(array.data) > limit:
            raise BadReplyError(f"array '{key}' has {len(array.data)} bytes, expected <= {limit}")
    try:
        _check_header(array.data)
        value = to_ndarray(array)
    except Exception as error:  # numpy raises many kinds on bytes that are no array
        raise BadReplyError(f"array '{key}' cannot be read: {error}") from error
    if shape is not None and value.shape != shape:
        raise BadReplyError(f"array '{key}' has shape {value.shape}, expected {shape}")
    if dtype is not None and value.dtype != dtype:
        raise BadReplyError(f"array '{key}' has dtype {value.dtype}, expected {dtype}")
    if value.dtype.kind not in "fiub":
        raise BadReplyError(f"array '{key}' has dtype {value.dtype}, expected numbers")
    size = largest(value)
    if not math.isfinite(size):
        raise BadReplyError(f"array '{key}' holds NaN or infinity")
    if size > MAX_VALUE:
        raise BadReplyError(f"array '{key}' holds values above {MAX_VALUE:g}")
    return value, size


def checked_step(value: NDArray, sent: NDArray, key: str) -> NDArray:
    """Return a trained array if it is not absurdly far from the one that training began with."""
    # Only what is large itself can be far, unless the model that was sent is absurd already.
    if largest(value) > MAX_STEP and largest(value.astype(np.float64) - sent) > MAX_STEP:
        raise BadReplyError(f"array '{key}' is more than {MAX_STEP:g} from what was sent")
    return value


def largest(value: NDArray) -> float:
    """Return the largest absolute value of floating-point numbers; 0 for others, or for none.

    NaN if there is any among them.
    """
    if value.dtype.kind != "f":
        return 0.0
    # Two passes that allocate nothing; both hand on a NaN.
    low, high = float(value.min(initial=0)), float(value.max(initial=0))
    return low if math.isnan(low) else max(-low, high)


def _check_header(data: bytes) -> None:
    """Refuse bytes whose header promises more than follows: numpy would allocate it first."""
    promised = promised_bytes(data)
    if promised > len(data):
        raise ValueError(f"its header promises {promised} bytes, {len(data)} came")


def payload_bytes(content: RecordDict) -> int:
    """Return the payload of a message in bytes, as Flower's `count_bytes` counts it.

    Numbers count 8 bytes, booleans 1, arrays their serialised form with its header. Unlike
    `count_bytes` it accepts empty strings and lists, and counts text by its UTF-8 length.
    """
    total = 0
    for record in content.values():
        if isinstance(record, ArrayRecord):
            total += record.count_bytes()
        else:
            for key, value in record.items():
                is_number = type(value) is float or type(value) is int
                total += len(key) + (8 if is_number else _value_bytes(value))
    return total


def _value_bytes(value: object) -> int:
    if isinstance(value, list):
        return sum(_value_bytes(item) for item in value)
    if isinstance(value, bool):
        return 1
    if isinstance(value, str):
        return len(value.encode())
    if isinstance(value, bytes):
        return len(value)
    return 8


def instruction_round(content: RecordDict) -> int | None:
    """Return the round that a message belongs to, where it says so."""
    for record in records_of(content, ConfigRecord).values():
        server_round = record.get(SERVER_ROUND)
        if isinstance(server_round, int) and not isinstance(server_round, bool):
            return server_round
    return None
