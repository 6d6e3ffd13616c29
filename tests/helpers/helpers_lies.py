"""What a hostile node can make of an honest reply before it sends it.

A lie gets the reply's records and a generator, and returns other records. Everything that it makes
passes Flower's own serialisation afterwards, so nothing is tried that could not arrive.
"""

from __future__ import annotations

import contextlib
import json
import math

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from helpers_fuzz import mutated

from gems_flwr.core.records import records_from_bytes, records_to_bytes

WILD = (math.nan, math.inf, -math.inf, 0.0, -1.0, -0.0, 1.0, 1e3, 1e6, 1e12, 1e20, 1e30, 3e38)
WILD += (-1e6, -1e20, -1e30, 1e-40, 1e-20, 5e-324, 1e100, 1e308, -1e100)
WHOLE = (0, -1, 1, 2**31, 2**53, 2**63 - 1, -(2**63), 10**15, 10**12)
HUGE = (10**400, -(10**400), 10**4299, 2**64, *WHOLE)
DTYPES = ("float64", "float32", "float16", "int64", "int32", "int8", "uint8", "bool", "complex64")
# Names that metrics must not have in the log, in a call, or in a file.
FIELDS = ("event", "round", "asked", "answered", "bytes_up", "seconds", "self", "fields", "method")
ODD_KEYS = ("", " ", "a b=c", "new\nline", "x" * 5000, "/", "../..", "\u202e", "\U0001f600" * 60)
NAMES = ("/" * 100, "漢" * 90, "\U0001f600" * 100, "..", ".", "../../x", "%2F" * 33, "a" * 100)
NAMES += ("0", "2", "4", "0#1", "", " ", "\n", "-1", "٣", "1" * 100, "all nodes", "con", "\\" * 99)
TEXTS = ("", "null", "[]", "{}", "[" * 10**5, "9" * 5000, '{"a":' * 1000 + "1", '"\\ud800"', "{'")
TEXTS += ('{"kind": ' + "9" * 5000 + "}", '{"a": ' + "9" * 4299 + "}", "NaN", "\0", "\U0001f600")
SWAPS = ("metrics", "arrays", "space", "node", "config", "examples", "statistics", "learner")


def pick(rng, options):
    return options[int(rng.integers(len(options)))]


def anything(rng, depth=0):
    """Return any JSON value."""
    kind = int(rng.integers(8 if depth < 3 else 5))
    if kind < 2:
        return pick(rng, HUGE)
    if kind == 2:
        return pick(rng, WILD)
    if kind == 3:
        return pick(rng, (None, True, False, "", "x" * 3000, "\ud800", "certified", "cone"))
    if kind == 4:
        return float(rng.normal())
    several = [anything(rng, depth + 1) for _ in range(int(rng.integers(4)))]
    if kind == 5:
        return {pick(rng, ("", "needs", "failed", "a", "value", "method")): v for v in several}
    return several * pick(rng, (1, 1, 1, 50))


# --- arrays -----------------------------------------------------------------------------------


class AlreadySpoiledError(Exception):
    """An earlier lie has left nothing that this one could change."""


def numpy_array(array):
    try:
        return np.array(array.numpy())
    except Exception as error:  # numpy and Flower raise many kinds on bytes that are no array
        raise AlreadySpoiledError from error


def other_values(array, rng):
    """Return an array of the same kind with other numbers in it."""
    values = array.astype(np.float64)
    kind = int(rng.integers(8))
    with np.errstate(all="ignore"):
        if kind == 0:
            values = np.full(array.shape, pick(rng, WILD))
        elif kind == 1 and values.size:
            values.reshape(-1)[int(rng.integers(values.size))] = pick(rng, WILD)
        elif kind == 2:
            values = values * pick(rng, (1e3, 1e6, 1e12, 1e20, 1e-6, 1e-30, -1.0, 99.0))
        elif kind == 3:
            values = values + pick(rng, (1e3, 1e6, 1e15, -1e6, 1.0))
        elif kind == 4:
            values = -np.abs(values)
        elif kind == 5:
            values = rng.permutation(values.reshape(-1)).reshape(array.shape)
        elif kind == 6:
            values = np.zeros(array.shape)
        else:
            values = rng.normal(size=array.shape) * 10.0 ** rng.integers(-30, 30)
        return np.asarray(values, array.dtype)


def other_shape(array, rng):
    if not array.ndim:
        return np.stack([array])
    doubled = np.concatenate([array, array])
    empty = [np.zeros(shape, array.dtype) for shape in ((0,), (), (1,) * 30)]
    return pick(rng, (array[:0], array[None], array.reshape(-1), array.T, doubled, *empty))


def other_bytes(array, rng):
    """Return an Array whose bytes are not what its fields, or its header, say."""
    data, (dtype, shape, kind) = array.data, (array.dtype, array.shape, array.stype)
    options = (
        Array(dtype, shape, kind, data[: int(rng.integers(len(data) + 1))]),
        Array(dtype, shape, kind, b""),
        Array("float32", (10**9,), "numpy.ndarray", data),
        Array(dtype, shape, "pickle", data),
        Array(dtype, shape, kind, data.replace(b"(", b"(9", 1)),
        Array(dtype, shape, kind, data.replace(b"'<f4'", b"'|O8'", 1)),
        Array(dtype, shape, kind, data + b"\0" * 64),
        Array("", (-1,), "", rng.bytes(64)),
    )
    return pick(rng, options)


def spoil_array(content, rng):
    """Change one array of one record: values, shape, dtype, bytes."""
    records = [key for key, record in content.array_records.items() if record]
    if not records:
        return spoil_metric(content, rng)
    key = pick(rng, records)
    arrays = dict(content[key])
    name = pick(rng, list(arrays))
    kind = int(rng.integers(10))
    honest = numpy_array(arrays[name])
    if kind < 5:
        arrays[name] = Array(other_values(honest, rng))
    elif kind < 7:
        arrays[name] = Array(np.ascontiguousarray(other_shape(honest, rng)))
    elif kind == 7:
        arrays[name] = Array(honest.astype(pick(rng, DTYPES)))
    else:
        arrays[name] = other_bytes(arrays[name], rng)
    return with_record(content, key, ArrayRecord(arrays))


def spoil_all_arrays(content, rng):
    """Change the numbers of all arrays in the same way: a model that is consistent, and absurd."""
    kind = int(rng.integers(2**31))
    for key, record in list(content.array_records.items()):
        if record:
            same = {
                name: Array(other_values(numpy_array(array), np.random.default_rng(kind)))
                for name, array in record.items()
            }
            content = with_record(content, key, ArrayRecord(same))
    return content


def spoil_names_of_arrays(content, rng):
    """Leave an array out, add one, or call one something else."""
    records = [key for key, record in content.array_records.items() if record]
    if not records:
        return spoil_records(content, rng)
    key = pick(rng, records)
    arrays = dict(content[key])
    name = pick(rng, list(arrays))
    kind = int(rng.integers(4))
    if kind == 0:
        del arrays[name]
    elif kind == 1:
        arrays[pick(rng, ODD_KEYS)] = arrays[name]
    elif kind == 2:
        arrays[pick(rng, ODD_KEYS)] = arrays.pop(name)
    else:
        arrays = {}
    return with_record(content, key, ArrayRecord(arrays))


# --- numbers and texts ------------------------------------------------------------------------


def spoil_metric(content, rng):
    """Change a metric, leave it out, or add one with a name that is taken elsewhere."""
    keys = list(content.metric_records)
    if not keys:
        return spoil_text(content, rng)
    key = pick(rng, keys)
    metrics = dict(content[key])
    value = pick(rng, (*WILD, *WHOLE, [], [1, 2], [math.nan]))
    kind = int(rng.integers(5))
    if kind < 3 and metrics:
        metrics[pick(rng, list(metrics))] = value
    elif kind == 3 and metrics:
        del metrics[pick(rng, list(metrics))]
    else:
        metrics[pick(rng, (*FIELDS, *ODD_KEYS, "num-examples", "squared-distance"))] = value
    return with_record(content, key, MetricRecord(metrics))


def spoil_text(content, rng):
    """Change a text or number of a config: a leaf of JSON in it, all of it, or a value beside."""
    keys = [key for key, record in content.config_records.items() if key != "node" and record]
    if not keys:
        return spoil_name(content, rng)
    key = pick(rng, keys)
    config = dict(content[key])
    field = pick(rng, list(config))
    value = config[field]
    kind = int(rng.integers(6))
    if isinstance(value, str) and value.startswith("{") and value not in TEXTS and kind < 4:
        try:
            honest = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise AlreadySpoiledError from error
        config[field] = json.dumps(spoiled_json(honest, rng))
    elif isinstance(value, str) and kind == 4:
        config[field] = pick(rng, TEXTS)
    else:
        config[field] = pick(rng, (*WHOLE, *WILD[:3], "", "x", b"\xff", True, [], [1, 2], ["a"]))
    return with_record(content, key, ConfigRecord(config))


def spoiled_json(value, rng):
    if not isinstance(value, dict) or not value or rng.random() < 0.05:
        return anything(rng)
    key = pick(rng, list(value))
    inner = value[key]
    if isinstance(inner, dict) and inner and rng.random() < 0.8:
        return value | {key: spoiled_json(inner, rng)}
    kind = int(rng.integers(6))
    if kind == 0:
        return {k: v for k, v in value.items() if k != key}
    if kind == 1:
        return value | {"needs": anything(rng), "failed": anything(rng)}
    return value | {key: anything(rng)}


def spoil_name(content, rng):
    """Answer under an odd name, or under another node's."""
    names = ConfigRecord({"name": pick(rng, NAMES)})
    if rng.random() < 0.2:
        names = pick(rng, (ConfigRecord({"name": 7}), ConfigRecord(), MetricRecord({"name": 1})))
    return with_record(content, "node", names)


# --- records ----------------------------------------------------------------------------------


def with_record(content, key, record):
    changed = RecordDict(dict(content))
    changed[key] = record
    return changed


def spoil_records(content, rng):
    """Leave a record out, add one, call one something else, or send nothing at all."""
    records = dict(content)
    key = pick(rng, list(records)) if records else "x"
    kind = int(rng.integers(7))
    if kind == 0:
        records.pop(key, None)
    elif kind == 1 and records:
        records[pick(rng, (*SWAPS, *ODD_KEYS))] = records.pop(key)
    elif kind == 2:
        records[pick(rng, SWAPS)] = ConfigRecord({"json": pick(rng, TEXTS)})
    elif kind == 3:
        records[pick(rng, SWAPS)] = MetricRecord({"num-examples": 3, "score": 0.5})
    elif kind == 4:
        records[pick(rng, SWAPS)] = ArrayRecord({"weight": Array(np.zeros(3))})
    elif kind == 5:
        records["secaggplus_configs"] = ConfigRecord()
    else:
        records = {}
    return RecordDict(records)


def needs_model(content, rng):
    """Say that the state is lost, whatever was asked."""
    note = ConfigRecord({"needs-model": True, "json": '{"needs": ["a", "b"], "failed": {}}'})
    return with_record(with_record(content, "learner", note), "several-models", note)


def spoil_bytes(content, rng):
    """Wound the serialised reply; what Flower cannot read again is never sent."""
    original = records_to_bytes(content)
    for _ in range(20 if original else 0):
        try:
            return records_from_bytes(mutated(original, rng))
        except Exception:  # Flower would not have delivered it either
            continue
    return content


LIES = (
    *(spoil_array, spoil_array, spoil_all_arrays, spoil_names_of_arrays, spoil_metric),
    *(spoil_metric, spoil_text, spoil_text, spoil_name, spoil_records, needs_model, spoil_bytes),
)


def some_lie(content, rng):
    """Tell one to three lies."""
    for _ in range(int(rng.choice([1, 1, 1, 2, 3]))):
        with contextlib.suppress(AlreadySpoiledError):
            content = pick(rng, LIES)(content, rng)
    return content
