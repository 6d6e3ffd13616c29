"""What messages carry: Flower's records, arrays in and out, and the replies of ordinary handlers.

What is asked by a `gems_flwr.core.question.Question` is checked there; here is what any Flower app
sends, and what all replies have in common.

`numpy.save` and `numpy.load` spend some 30 microseconds on a header that is the same in every
message of a run, so headers are remembered here.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from io import BytesIO
from typing import Any, TypeVar

import numpy as np
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from numpy.lib import format as npy
from numpy.typing import NDArray

from gems_flwr.bounds import (
    MAX_EXAMPLES,
    MAX_JSON_CHARACTERS,
    MAX_LISTED_METRICS,
    MAX_METRIC,
    MAX_NAME_CHARACTERS,
    MAX_NPY_HEADER_BYTES,
    MAX_STEP,
    MAX_VALUE,
    MIN_EXAMPLES,
)
from gems_flwr.core.flower import (
    LOST,
    SUPERLINK_NODE_ID,
    ProtoRecordDict,
    recorddict_from_proto,
    recorddict_to_proto,
)
from gems_flwr.errors import BadReplyError, shown
from gems_flwr.typing import Arrays, Metrics

# Names of the records in a message that every room knows; a question names its own in its file.
ARRAYS, CONFIG, METRICS, NODE, QUESTION = "arrays", "config", "metrics", "node", "question"
SERVER_ROUND, RUN_SEED, NUM_EXAMPLES, NAME = "server-round", "run-seed", "num-examples", "name"
TRAIN, EVALUATE = "train", "evaluate"

RecordKind = TypeVar("RecordKind", ArrayRecord, ConfigRecord, MetricRecord)


def records_of(content: RecordDict, kind: type[RecordKind]) -> dict[str, RecordKind]:
    """Return the records of one kind by their keys; the dict is not written back."""
    return {key: record for key, record in content.items() if isinstance(record, kind)}


def records_to_bytes(content: RecordDict) -> bytes:
    """Return records as Flower puts them on the wire."""
    return bytes(recorddict_to_proto(content).SerializeToString())


def records_from_bytes(data: bytes) -> RecordDict:
    """Return the records that `records_to_bytes` wrote."""
    return recorddict_from_proto(ProtoRecordDict.FromString(data))


# --- arrays ---------------------------------------------------------------------------------

NUMPY = "numpy.ndarray"  # what Flower calls arrays in numpy's format
# The first ten bytes of version 1.0: magic, version, length of the header.
_PREFIX_BYTES = 10
_VERSION_1 = b"\x93NUMPY\x01\x00"
_LONGEST_HEADER_BYTES = 1024
_NUMBERS = "fiub"  # kinds of dtypes: floating point, integers with and without a sign, truth values


def to_array(value: NDArray[Any]) -> Array:
    """Return a numpy array as an array of Flower."""
    ordinary = type(value) is np.ndarray and value.dtype.kind in _NUMBERS
    if not ordinary or not value.flags.c_contiguous:
        return Array(value)
    header, name = _written_header(value.dtype, value.shape)
    return Array(name, value.shape, NUMPY, b"".join((header, value.data)))


@lru_cache(maxsize=1024)
def _written_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[bytes, str]:
    """Return what `numpy.save` writes before the data, and what the dtype is called."""
    stream = BytesIO()
    npy.write_array_header_1_0(
        stream, {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    )
    return stream.getvalue(), str(dtype)


def to_ndarray(array: Array) -> NDArray[Any]:
    """Return an array of Flower as a numpy array of the caller's own, as ``array.numpy()`` does."""
    known = _known_header(array.data) if array.stype == NUMPY else None
    if known is not None:
        start, dtype, shape, size = known
        if len(array.data) == start + size:
            return np.frombuffer(array.data, dtype, offset=start).reshape(shape).copy()
    return array.numpy()


def _known_header(data: object) -> tuple[int, np.dtype[Any], tuple[int, ...], int] | None:
    """Return where the data of an ordinary array start, and what `_read_header` returns."""
    if type(data) is not bytes or not data.startswith(_VERSION_1):
        return None
    start = _PREFIX_BYTES + int.from_bytes(data[8:10], "little")
    known = _read_header(data[:start]) if start <= _LONGEST_HEADER_BYTES else None
    return None if known is None else (start, *known)


@lru_cache(maxsize=1024)
def _read_header(header: bytes) -> tuple[np.dtype[Any], tuple[int, ...], int] | None:
    """Return dtype, shape and bytes of the data; None for what is left to numpy."""
    stream = BytesIO(header)
    try:
        npy.read_magic(stream)
        shape, fortran_order, dtype = npy.read_array_header_1_0(stream)
    except Exception:  # numpy says what is wrong with it, when it is asked to read the array
        return None
    if fortran_order or dtype.kind not in _NUMBERS or not all(side > 0 for side in shape):
        return None
    return dtype, shape, math.prod(shape) * dtype.itemsize


def promised_bytes(data: bytes) -> int:
    """Return how many bytes the header of an array promises; numpy would allocate them first."""
    if (known := _known_header(data)) is not None:
        return known[3]
    stream = BytesIO(data)
    version = npy.read_magic(stream)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read(stream)
    return math.prod(shape) * dtype.itemsize


# --- records --------------------------------------------------------------------------------


def read_json(text: object, key: str) -> dict[str, Any]:
    """Return the JSON object in a text of a reply; `key` is blamed if it is none."""
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
    return ArrayRecord({name: to_array(np.asarray(array)) for name, array in arrays.items()})


def put_instead(content: RecordDict, key: str, record: ArrayRecord | ConfigRecord) -> None:
    """Put a record in place of one of another type, without Flower's warning in every message."""
    content.pop(key, None)
    content[key] = record


def only_model(content: RecordDict) -> ArrayRecord:
    """Return the arrays of a message that carries one model, and no others."""
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


def _checked(
    array: Array, key: str, shape: tuple[int, ...] | None, dtype: np.dtype | None
) -> tuple[NDArray, float]:
    """Return a checked array, and its largest absolute value."""
    if shape is not None and dtype is not None:
        limit = math.prod(shape) * dtype.itemsize + MAX_NPY_HEADER_BYTES
        if len(array.data) > limit:
            raise BadReplyError(f"array '{key}' has {len(array.data)} bytes, expected <= {limit}")
    try:
        promised = promised_bytes(array.data)
        if promised > len(array.data):  # numpy would allocate it first
            raise ValueError(f"its header promises {promised} bytes, {len(array.data)} came")
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


def largest(value: NDArray) -> float:
    """Return the largest absolute value, NaN if there is any; 0 where the numbers are no floats."""
    if value.dtype.kind != "f":
        return 0.0
    # Two passes that allocate nothing; both hand on a NaN.
    low, high = float(value.min(initial=0)), float(value.max(initial=0))
    return low if math.isnan(low) else max(-low, high)


def payload_bytes(content: RecordDict) -> int:
    """Return the payload of a message in bytes, as Flower's `count_bytes` counts it.

    Unlike that it accepts empty strings and lists, and counts text by its UTF-8 length.
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


# --- instructions, and replies of ordinary handlers ------------------------------------------

# What Flower's secure aggregation puts into messages and replies.
SECAGG_CONFIGS = "secaggplus_configs"


@dataclass(frozen=True)
class RecordKeys:
    """What the records of a message are called, and the metric by which a reply is weighted."""

    arrays: str = ARRAYS
    config: str = CONFIG
    weight: str = NUM_EXAMPLES


USUAL_KEYS = RecordKeys()


@dataclass(frozen=True)
class ModelReply:
    """A validated reply to a train message: all numbers finite, the arrays like those sent out.

    `num_examples`, above 0, is how many samples the node trained on, or what else it is weighted
    by; `content` is the reply as it came.
    """

    arrays: Arrays
    num_examples: float
    metrics: Metrics
    content: RecordDict | None = field(default=None, kw_only=True, repr=False, compare=False)


@dataclass(frozen=True)
class MetricsReply:
    """A validated reply to an evaluate message; see `ModelReply`."""

    num_examples: float
    metrics: Metrics
    content: RecordDict | None = field(default=None, kw_only=True, repr=False, compare=False)


def pack_instruction(
    arrays: ArrayRecord | None,
    config: ConfigRecord,
    *,
    server_round: int,
    seed: int,
    keys: RecordKeys = USUAL_KEYS,
) -> RecordDict:
    """Return the content of one message to one node."""
    # A copy: Flower hands one config to all nodes and changes it in place.
    own = ConfigRecord({**config, SERVER_ROUND: server_round, RUN_SEED: seed})
    model = {} if arrays is None else {keys.arrays: arrays}
    return RecordDict({keys.config: own, **model})


def pack_reply(
    metrics: Mapping[str, float], *, num_examples: int, name: str, arrays: ArrayRecord | None = None
) -> RecordDict:
    """Return the content of a reply to a train message; without arrays to an evaluate message."""
    numbers = {key: float(value) for key, value in metrics.items()}
    record = MetricRecord({**numbers, NUM_EXAMPLES: int(num_examples)})
    model = {} if arrays is None else {ARRAYS: arrays}
    return RecordDict({METRICS: record, **pack_name(name), **model})


def pack_name(name: str) -> RecordDict:
    """Return the record by which a node says who it is."""
    return RecordDict({NODE: ConfigRecord({NAME: name})})


def unpack_name(content: RecordDict) -> str | None:
    """Return the name that a node gave itself, or None where it gave none that is usable."""
    record = content.get(NODE)
    name = record.get(NAME) if isinstance(record, ConfigRecord) else None
    if isinstance(name, str) and 0 < len(name) <= MAX_NAME_CHARACTERS and name.isprintable():
        return name
    return None


def unpack_model_reply(
    content: RecordDict, expected: Arrays, weight_key: str = NUM_EXAMPLES
) -> ModelReply:
    """Validate a reply to a train message, whose arrays must be like the `expected` ones.

    The metric `weight_key` says how much it counts.
    """
    record = only_model(content)
    missing = sorted(expected.keys() - record.keys())
    surplus = sorted(record.keys() - expected.keys())
    if missing or surplus:
        raise BadReplyError(
            f"the model's arrays do not fit: missing {missing or 'none'}, "
            f"not expected {surplus or 'none'}"
        )
    arrays = {}
    for key, sent in expected.items():  # the sender's order of keys does not matter
        value, size = _checked(record[key], key, sent.shape, sent.dtype)
        # Only what is large itself can be far, unless the model that was sent is absurd already.
        if size > MAX_STEP and largest(value.astype(np.float64) - sent) > MAX_STEP:
            raise BadReplyError(f"array '{key}' is more than {MAX_STEP:g} from what was sent")
        arrays[key] = value
    metrics = unpack_metrics_reply(content, weight_key)
    return ModelReply(arrays, metrics.num_examples, metrics.metrics, content=content)


def unpack_metrics_reply(content: RecordDict, weight_key: str = NUM_EXAMPLES) -> MetricsReply:
    """Validate the metrics of a reply; see `unpack_model_reply`."""
    records = list(records_of(content, MetricRecord).values())
    if len(records) != 1:
        raise BadReplyError(f"expected one MetricRecord, got {len(records)}")
    metrics: dict[str, float | list[int] | list[float]] = {}
    listed = 0
    for key, value in records[0].items():
        if isinstance(value, list):
            listed += len(value)
            if listed > MAX_LISTED_METRICS:
                raise BadReplyError(
                    f"metric '{key}': the lists have {listed:,} numbers or more, expected at most "
                    f"{MAX_LISTED_METRICS:,} in all"
                )
        for number in value if isinstance(value, list) else [value]:
            # Compared before anything else: an integer of 400 digits has no float.
            if not -MAX_METRIC <= number <= MAX_METRIC:
                unlimited = isinstance(number, float) and not math.isfinite(number)
                wanted = "a finite number" if unlimited else f"at most {MAX_METRIC:g}"
                raise BadReplyError(f"metric '{key}' is {shown(number)}, expected {wanted}")
        metrics[key] = value
    num_examples = metrics.pop(weight_key, None)
    if num_examples is None or isinstance(num_examples, list):
        raise BadReplyError(f"metric '{weight_key}' is missing or not a single number")
    if num_examples < MIN_EXAMPLES:
        raise BadReplyError(f"metric '{weight_key}' is {num_examples}, expected more than 0")
    if num_examples > MAX_EXAMPLES:
        raise BadReplyError(
            f"metric '{weight_key}' is {num_examples:g}, expected at most {MAX_EXAMPLES:g}"
        )
    return MetricsReply(num_examples, metrics, content=content)


def single_numbers(metrics: Metrics) -> dict[str, float]:
    """Return the metrics but the lists."""
    return {key: value for key, value in metrics.items() if not isinstance(value, list)}


# --- which message a reply answers ----------------------------------------------------------


def answered_node(reply: Message, waiting: Mapping[int, Message]) -> int | None:
    """Return the node whose message a reply answers; None for an answer to nothing that was asked.

    A reply counts for a node only if it comes from that node and answers the very message that the
    node was sent; `waiting` has the messages without an answer so far, by node id. What the
    SuperLink reports of a node that it has lost comes under the SuperLink's own id.
    """
    source, answered = reply.metadata.src_node_id, reply.metadata.reply_to_message_id
    if source in waiting:
        # Grids that number no messages have no ids to compare.
        expected = waiting[source].metadata.message_id
        return source if not expected or answered == expected else None
    # Only the SuperLink may speak for a node, and only to report that it gives no answer.
    if source != SUPERLINK_NODE_ID or not reply.has_error() or not answered:
        return None
    return next((n for n, asked in waiting.items() if asked.metadata.message_id == answered), None)


def is_lost(reply: Message | None) -> bool:
    """Return whether a reply reports that the message or its answer was lost on the way."""
    return reply is not None and reply.has_error() and reply.error.code in LOST


def as_the_nodes(reply: Message, question: Message, seconds: float) -> Message:
    """Return a reply as the asked node's own, with the time if it reports that the node is lost."""
    lost = is_lost(reply)
    if not lost and reply.metadata.src_node_id == question.metadata.dst_node_id:
        return reply
    reason = reply.error.reason or f"error {reply.error.code}"
    reason = f"lost {seconds:.0f} s after it was asked: {reason}" if lost else reason
    return Message(Error(code=reply.error.code, reason=reason), reply_to=question)


def once_more(message: Message, content: RecordDict | None = None, why: str = "") -> Message:
    """Return a message to be sent again, with other records if given; Flower sends each once."""
    head = message.metadata
    return Message(
        message.content if content is None else content,
        dst_node_id=head.dst_node_id,
        message_type=head.message_type,
        group_id=f"{head.group_id}-{why}" if why else head.group_id,
    )


def add_reason(reply: Message, more: str) -> None:
    """Add to the reason of an error reply."""
    reason = reply.error.reason or f"error {reply.error.code}"
    reply.error = Error(code=reply.error.code, reason=f"{reason}; {more}")


# --- the reason in an error reply -----------------------------------------------------------

_PREFIX = re.compile(r"[\w.-]+ (failed )?on node [^\n]*?: ")
# How Flower, or a handler, reports an exception.
_RAISED = re.compile(r"<class|\w+(Error|Exception)\b")
_NUMBER = re.compile(r"[-+]?(?<![\w.])\d[\d_,.]*(e[-+]?\d+)?")
# The place in the code, which is said of faults that are none of this library's own.
_PLACE = re.compile(r"\(in [^()]*, [^()]* line \d+\)$")


def fault_reason(kind: str, node: str, fault: str) -> str:
    """Return the reason of an error reply: which message failed, on which node, and why."""
    failed = "" if fault.startswith("refused by this node's limit") else "failed "
    return f"{kind} {failed}on node {node}: {fault}"


def fault_in(reason: str) -> str:
    """Return what went wrong, without the words that differ from node to node."""
    return _PREFIX.sub("", reason, count=1) if _PREFIX.match(reason) else reason


def is_without_mod(reason: str) -> bool:
    """Return whether an app without our mod took a question for an ordinary message.

    Its handler raised an error, which no mod put into words, or answered with a model.
    """
    ran_into = bool(_RAISED.match(reason) or _PLACE.search(reason))
    something_else = ("expected an ArrayRecord", "expected a ConfigRecord")
    ours = _PREFIX.match(reason) or SECAGG_CONFIGS in reason  # another mod's fault, not a lack
    return not ours and (ran_into or reason.startswith(something_else))


def without_numbers(reason: str, node: str) -> str:
    """Return a reason without its numbers, which may be those of the data: its own log has them."""
    prefix = _PREFIX.match(reason)
    start = prefix.end() if prefix else 0
    shortened = reason[:start] + _NUMBER.sub("…", reason[start:])
    if shortened != reason:
        logging.getLogger("gems_flwr").warning("node %s: %s", node, reason)
    return shortened


def put_handler_metrics(content: RecordDict, trained: RecordDict) -> None:
    """Add a handler's finite metrics, and their weight, to a reply that goes out instead."""
    finite = MetricRecord()
    for record in records_of(trained, MetricRecord).values():
        for key, value in record.items():
            numbers = value if isinstance(value, list) else [value]
            if all(isinstance(number, int) or math.isfinite(number) for number in numbers):
                finite[key] = value
    if isinstance(finite.get(NUM_EXAMPLES), int | float):
        content[METRICS] = finite
