"""Instructions, and replies that carry a model, metrics or raw examples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

from gems_flwr.bounds import (
    MAX_CLASSES,
    MAX_EXAMPLES,
    MAX_LISTED_METRICS,
    MAX_METRIC,
    MAX_NAME_CHARACTERS,
    MIN_EXAMPLES,
)
from gems_flwr.errors import BadReplyError
from gems_flwr.spaces.checks import shown
from gems_flwr.typing import Arrays, Metrics
from gems_flwr.wire.keys import (
    ARRAYS,
    CONFIG,
    EXAMPLES,
    FEATURES,
    LABELS,
    METRICS,
    NAME,
    NODE,
    NUM_EXAMPLES,
    RUN_SEED,
    SECAGG_CONFIGS,
    SERVER_ROUND,
)
from gems_flwr.wire.quick_records import make_config, make_content, make_metrics, records_of
from gems_flwr.wire.records import checked_array, checked_model_array, only_model


@dataclass(frozen=True)
class RecordKeys:
    """What the records of a message are called, and the metric by which a reply is weighted.

    Replies may have their records under any key.
    """

    arrays: str = ARRAYS
    config: str = CONFIG
    weight: str = NUM_EXAMPLES


USUAL_KEYS = RecordKeys()


@dataclass(frozen=True)
class ModelReply:
    """A validated reply to a train message.

    Parameters
    ----------
    arrays : mapping from str to ndarray
        The trained model: names, shapes and dtypes as sent out, all values finite.
    num_examples : float
        How many samples the node trained on, or what else it is weighted by; greater than 0.
    metrics : mapping from str to float or list of float
        The node's other metrics, all finite.
    content : RecordDict, optional
        The reply as it came, for functions that want to see all of it.

    Examples
    --------
    >>> import numpy as np
    >>> from gems_flwr import ModelReply
    >>> ModelReply({"w": np.zeros(2)}, num_examples=120, metrics={"loss": 0.3}).metrics["loss"]
    0.3
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


@dataclass(frozen=True)
class ExamplesReply:
    """Raw data that a node was willing to share (the pooled reference run only)."""

    features: NDArray
    labels: NDArray


def pack_instruction(
    arrays: ArrayRecord | None,
    config: ConfigRecord,
    *,
    server_round: int,
    seed: int,
    keys: RecordKeys = USUAL_KEYS,
) -> RecordDict:
    """Return the content of one message to one node.

    The config is copied: Flower hands one record to all nodes and changes it in place, which
    shows every node the last one's values.
    """
    own = make_config({**config, SERVER_ROUND: server_round, RUN_SEED: seed})
    records: dict[str, ConfigRecord | ArrayRecord] = {keys.config: own}
    if arrays is not None:
        records[keys.arrays] = arrays
    return make_content(records)


def instruction_config(content: RecordDict) -> dict[str, object]:
    """Return the instruction's config as a plain dict (empty where there is none)."""
    record = content.get(CONFIG)
    return dict(record) if isinstance(record, ConfigRecord) else {}


def pack_model_reply(
    arrays: ArrayRecord, metrics: Mapping[str, float], *, num_examples: int, name: str
) -> RecordDict:
    """Return the content of a reply to a train message."""
    content = pack_metrics_reply(metrics, num_examples=num_examples, name=name)
    content[ARRAYS] = arrays
    return content


def pack_metrics_reply(metrics: Mapping[str, float], *, num_examples: int, name: str) -> RecordDict:
    """Return the content of a reply to an evaluate message."""
    numbers = {key: float(value) for key, value in metrics.items()}
    record = make_metrics({**numbers, NUM_EXAMPLES: int(num_examples)})
    return make_content({METRICS: record, **pack_name(name)})


def pack_examples_reply(features: NDArray, labels: NDArray, *, name: str) -> RecordDict:
    """Return the content of a reply that shares raw data."""
    record = ArrayRecord({FEATURES: Array(features), LABELS: Array(labels)})
    return RecordDict({EXAMPLES: record, **pack_name(name)})


def pack_name(name: str) -> RecordDict:
    """Return the record by which a node says who it is."""
    return make_content({NODE: make_config({NAME: name})})


def unpack_name(content: RecordDict) -> str | None:
    """Return the name that a node gave itself, or None where it gave none that is usable."""
    record = content.get(NODE)
    name = record.get(NAME) if isinstance(record, ConfigRecord) else None
    if isinstance(name, str) and 0 < len(name) <= MAX_NAME_CHARACTERS and name.isprintable():
        return name
    return None


def is_masked(content: RecordDict) -> bool:
    """Return whether Flower's SecAgg+ mod made a reply: its arrays are masks, not a model."""
    return SECAGG_CONFIGS in content


def unpack_model_reply(
    content: RecordDict, expected: Arrays, weight_key: str = NUM_EXAMPLES
) -> ModelReply:
    """Validate a reply to a train message.

    Parameters
    ----------
    content : RecordDict
        What the node sent.
    expected : mapping from str to ndarray
        Arrays with the names, shapes and dtypes that the reply must have.
    weight_key : str, default "num-examples"
        Which metric says how much the reply counts.

    Raises
    ------
    BadReplyError
        Names the key at fault, what was expected and what came.
    """
    record = only_model(content)
    missing = sorted(expected.keys() - record.keys())
    surplus = sorted(record.keys() - expected.keys())
    if missing or surplus:
        raise BadReplyError(
            f"the model's arrays do not fit: missing {missing or 'none'}, "
            f"not expected {surplus or 'none'}"
        )
    # The sender's order of keys does not matter; ours does.
    arrays = {
        key: checked_model_array(record[key], key, template) for key, template in expected.items()
    }
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
            _check_metric(key, number)
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


def _check_metric(key: str, value: float) -> None:
    # Compared before anything else: an integer of 400 digits has no float.
    if not -MAX_METRIC <= value <= MAX_METRIC:
        unlimited = isinstance(value, float) and not math.isfinite(value)
        wanted = "a finite number" if unlimited else f"at most {MAX_METRIC:g}"
        raise BadReplyError(f"metric '{key}' is {shown(value)}, expected {wanted}")


def single_numbers(metrics: Metrics) -> dict[str, float]:
    """Return the metrics but the lists."""
    return {key: value for key, value in metrics.items() if not isinstance(value, list)}


def unpack_examples_reply(
    content: RecordDict,
    input_shape: tuple[int, ...],
    classes: int = MAX_CLASSES,
    numbers: bool = False,
) -> ExamplesReply:
    """Validate shared raw data: rows of `input_shape` with one label each, below `classes`.

    With `numbers` labels are floats instead.
    """
    record = content.get(EXAMPLES)
    if not isinstance(record, ArrayRecord) or record.keys() != {FEATURES, LABELS}:
        raise BadReplyError(
            f"expected an ArrayRecord '{EXAMPLES}' with '{FEATURES}' and '{LABELS}'"
        )
    features = checked_array(record[FEATURES], FEATURES)
    labels = checked_array(record[LABELS], LABELS)
    if labels.ndim != 1 or labels.dtype.kind not in ("f" if numbers else "iu"):
        kind = "floats" if numbers else "integers"
        raise BadReplyError(f"labels must be one row of {kind}, got {labels.dtype} {labels.shape}")
    if labels.size and not numbers and not (labels.min() >= 0 and labels.max() < classes):
        raise BadReplyError(
            f"labels must be from 0 to {classes - 1}, got {labels.min()} to {labels.max()}"
        )
    if features.shape != (len(labels), *input_shape):
        raise BadReplyError(
            f"features have shape {features.shape}, expected {(len(labels), *input_shape)}"
        )
    return ExamplesReply(features, labels)
