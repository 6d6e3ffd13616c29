"""The wire contract: every record key that crosses the network, packed, unpacked, validated.

The shapes are those of Flower's own strategies, so that an ordinary Flower client understands
our messages and an ordinary Flower strategy understands our ready client's replies:

==============  =================================================================
instruction     ``arrays`` (ArrayRecord), ``config`` (ConfigRecord with
                ``server-round`` and ``run-seed``)
reply to train  one ArrayRecord, one MetricRecord with ``num-examples``
reply to        one MetricRecord with ``num-examples``
evaluate
any reply       optionally ``node`` (ConfigRecord with ``name``), by which
                replies are ordered and failures are named
==============  =================================================================

Nothing that a node sends is used before it has passed through an ``unpack`` function here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

from gems_flwr.averaging import Arrays
from gems_flwr.errors import BadReplyError

ARRAYS = "arrays"
CONFIG = "config"
METRICS = "metrics"
NODE = "node"
EXAMPLES = "examples"

SERVER_ROUND = "server-round"
RUN_SEED = "run-seed"
NUM_EXAMPLES = "num-examples"
NAME = "name"
FEATURES = "features"
LABELS = "labels"

TRAIN = "train"
EVALUATE = "evaluate"
INTRODUCE = "query.introduce"
SHARE_EXAMPLES = "query.share_examples"

# numpy's .npy header is at most a few hundred bytes for the arrays that we accept.
_NPY_HEADER_BYTES = 4096
_MAX_NAME_LENGTH = 100


@dataclass(frozen=True)
class ModelReply:
    """A validated reply to a train message.

    Parameters
    ----------
    arrays : mapping from str to ndarray
        The trained model: names, shapes and dtypes as sent out, all values finite.
    num_examples : float
        How many samples the node trained on, greater than 0.
    metrics : mapping from str to float
        The node's other scalar metrics, all finite.
    """

    arrays: Arrays
    num_examples: float
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class MetricsReply:
    """A validated reply to an evaluate message."""

    num_examples: float
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class ExamplesReply:
    """Raw data that a node was willing to share (the pooled reference run only)."""

    features: NDArray
    labels: NDArray


def to_numpy(record: ArrayRecord) -> dict[str, NDArray]:
    """Return an ArrayRecord's arrays as numpy arrays."""
    return {name: array.numpy() for name, array in record.items()}


def to_record(arrays: Arrays) -> ArrayRecord:
    """Return numpy arrays as an ArrayRecord."""
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})


# --- server to node ---------------------------------------------------------------------------


def pack_instruction(
    arrays: ArrayRecord | None, config: ConfigRecord, *, server_round: int, seed: int
) -> RecordDict:
    """Return the content of one message to one node.

    The config is copied: Flower hands one record to all nodes and changes it in place, which
    shows every node the last one's values.
    """
    own = ConfigRecord(dict(config))
    own[SERVER_ROUND] = server_round
    own[RUN_SEED] = seed
    content = RecordDict({CONFIG: own})
    if arrays is not None:
        content[ARRAYS] = arrays
    return content


def instruction_config(content: RecordDict) -> dict[str, object]:
    """Return the instruction's config as a plain dict (empty where there is none)."""
    record = content.get(CONFIG)
    return dict(record) if isinstance(record, ConfigRecord) else {}


# --- node to server ---------------------------------------------------------------------------


def pack_model_reply(
    arrays: ArrayRecord, metrics: Mapping[str, float], *, num_examples: int, name: str
) -> RecordDict:
    """Return the content of a reply to a train message."""
    content = pack_metrics_reply(metrics, num_examples=num_examples, name=name)
    content[ARRAYS] = arrays
    return content


def pack_metrics_reply(metrics: Mapping[str, float], *, num_examples: int, name: str) -> RecordDict:
    """Return the content of a reply to an evaluate message."""
    record = MetricRecord({key: float(value) for key, value in metrics.items()})
    record[NUM_EXAMPLES] = int(num_examples)
    return RecordDict({METRICS: record, **pack_name(name)})


def pack_examples_reply(features: NDArray, labels: NDArray, *, name: str) -> RecordDict:
    """Return the content of a reply that shares raw data."""
    record = ArrayRecord({FEATURES: Array(features), LABELS: Array(labels)})
    return RecordDict({EXAMPLES: record, **pack_name(name)})


def pack_name(name: str) -> RecordDict:
    """Return the record by which a node says who it is."""
    return RecordDict({NODE: ConfigRecord({NAME: name})})


def unpack_name(content: RecordDict) -> str | None:
    """Return the name that a node gave itself, or None where it gave none that is usable."""
    record = content.get(NODE)
    name = record.get(NAME) if isinstance(record, ConfigRecord) else None
    if isinstance(name, str) and 0 < len(name) <= _MAX_NAME_LENGTH and name.isprintable():
        return name
    return None


def unpack_model_reply(content: RecordDict, expected: Arrays) -> ModelReply:
    """Validate a reply to a train message.

    Parameters
    ----------
    content : RecordDict
        What the node sent.
    expected : mapping from str to ndarray
        Arrays with the names, shapes and dtypes that the reply must have.

    Raises
    ------
    BadReplyError
        Names the key at fault, what was expected and what came.
    """
    record = _only_array_record(content)
    missing = sorted(expected.keys() - record.keys())
    surplus = sorted(record.keys() - expected.keys())
    if missing or surplus:
        raise BadReplyError(
            f"the model's arrays do not fit: missing {missing or 'none'}, "
            f"not expected {surplus or 'none'}"
        )
    # The sender's order of keys does not matter; ours does.
    arrays = {
        key: _checked_array(record[key], key, template.shape, template.dtype)
        for key, template in expected.items()
    }
    metrics = unpack_metrics_reply(content)
    return ModelReply(arrays, metrics.num_examples, metrics.metrics)


def unpack_metrics_reply(content: RecordDict) -> MetricsReply:
    """Validate the metrics of a reply; see `unpack_model_reply`."""
    records = list(content.metric_records.values())
    if len(records) != 1:
        raise BadReplyError(f"expected one MetricRecord, got {len(records)}")
    metrics: dict[str, float] = {}
    for key, value in records[0].items():
        if isinstance(value, list):
            continue  # no strategy here averages lists; the node may keep them for itself
        if not math.isfinite(value):
            raise BadReplyError(f"metric '{key}' is {value}, expected a finite number")
        metrics[key] = value
    num_examples = metrics.pop(NUM_EXAMPLES, None)
    if num_examples is None:
        raise BadReplyError(f"metric '{NUM_EXAMPLES}' is missing or not a single number")
    if num_examples <= 0:
        raise BadReplyError(f"metric '{NUM_EXAMPLES}' is {num_examples}, expected more than 0")
    return MetricsReply(num_examples, metrics)


def unpack_examples_reply(content: RecordDict, input_shape: tuple[int, ...]) -> ExamplesReply:
    """Validate shared raw data: rows of `input_shape` with one integer label each."""
    record = content.get(EXAMPLES)
    if not isinstance(record, ArrayRecord) or record.keys() != {FEATURES, LABELS}:
        raise BadReplyError(
            f"expected an ArrayRecord '{EXAMPLES}' with '{FEATURES}' and '{LABELS}'"
        )
    features = _checked_array(record[FEATURES], FEATURES)
    labels = _checked_array(record[LABELS], LABELS)
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise BadReplyError(
            f"labels must be one row of integers, got {labels.dtype} {labels.shape}"
        )
    if features.shape != (len(labels), *input_shape):
        raise BadReplyError(
            f"features have shape {features.shape}, expected {(len(labels), *input_shape)}"
        )
    return ExamplesReply(features, labels)


def _only_array_record(content: RecordDict) -> ArrayRecord:
    records = list(content.array_records.values())
    if len(records) != 1:
        raise BadReplyError(f"expected one ArrayRecord with the model, got {len(records)}")
    return records[0]


def _checked_array(
    array: Array,
    key: str,
    shape: tuple[int, ...] | None = None,
    dtype: np.dtype | None = None,
) -> NDArray:
    """Return the numpy array if it is what it claims to be, what was asked for, and finite."""
    if shape is not None and dtype is not None:
        limit = math.prod(shape) * dtype.itemsize + _NPY_HEADER_BYTES
        if len(array.data) > limit:
            raise BadReplyError(f"array '{key}' has {len(array.data)} bytes, expected <= {limit}")
    try:
        value = array.numpy()
    except Exception as error:  # numpy raises many kinds on bytes that are no array
        raise BadReplyError(f"array '{key}' cannot be read: {error}") from error
    if shape is not None and value.shape != shape:
        raise BadReplyError(f"array '{key}' has shape {value.shape}, expected {shape}")
    if dtype is not None and value.dtype != dtype:
        raise BadReplyError(f"array '{key}' has dtype {value.dtype}, expected {dtype}")
    if value.dtype.kind not in "fiub":
        raise BadReplyError(f"array '{key}' has dtype {value.dtype}, expected numbers")
    if value.dtype.kind == "f" and not np.isfinite(value).all():
        raise BadReplyError(f"array '{key}' holds NaN or infinity")
    return value


# --- sizes and rounds, for the meter ----------------------------------------------------------


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
            total += sum(len(key) + _value_bytes(value) for key, value in record.items())
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
    for record in content.config_records.values():
        server_round = record.get(SERVER_ROUND)
        if isinstance(server_round, int) and not isinstance(server_round, bool):
            return server_round
    return None
