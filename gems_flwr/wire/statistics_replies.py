"""Replies that carry statistics beside the model.

Symmetric matrices travel as their upper halves, all in single precision, in one ArrayRecord
``statistics`` with one array ``<weight>/<kind>`` each. Where the request names a share of the
model's bytes they travel as codes, in three arrays ``columns``, ``roots`` and ``scales``; see
`gems_flwr.model_merging.compressed_statistics`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from flwr.app import Array, ArrayRecord, RecordDict
from numpy.typing import NDArray

from gems_flwr.bounds import MAX_MOMENT, MAX_WEIGHT
from gems_flwr.errors import BadReplyError
from gems_flwr.model_merging.compressed_statistics import (
    CompressionPlan,
    PackedStatistics,
    compression_plan,
    pack_statistics,
    unpack_statistics,
)
from gems_flwr.model_merging.layer_statistics import (
    SYMMETRIC,
    Kind,
    Statistics,
    check_statistics,
    statistics_shapes,
)
from gems_flwr.typing import Arrays
from gems_flwr.wire.keys import NODE, STATISTICS
from gems_flwr.wire.model_replies import (
    ModelReply,
    pack_name,
    unpack_model_reply,
)
from gems_flwr.wire.records import checked_array, largest
from gems_flwr.wire.requests import StatisticsRequest

_CODES = ("columns", "roots", "scales")


@dataclass(frozen=True)
class MergeReply(ModelReply):
    """A validated model, and the statistics by which it is merged with others.

    Parameters
    ----------
    statistics : mapping
        By weight and kind; see `gems_flwr.model_merging.layer_statistics`.
    """

    statistics: Statistics = field(default_factory=dict)


def put_statistics(
    content: RecordDict,
    statistics: Statistics,
    *,
    name: str,
    plan: CompressionPlan | None = None,
) -> None:
    """Put statistics into a reply that carries a model, and the node's name if it has none."""
    if plan is None:
        packed = {
            f"{weight}/{kind}": Array(_packed(kind, array))
            for weight, kinds in statistics.items()
            for kind, array in kinds.items()
        }
    else:
        codes = pack_statistics(statistics, plan)
        packed = {key: Array(getattr(codes, key)) for key in _CODES}
    content[STATISTICS] = ArrayRecord(packed)
    if NODE not in content:
        content.update(pack_name(name))


def unpack_merge_reply(
    content: RecordDict, request: StatisticsRequest, expected: Arrays
) -> MergeReply:
    """Validate a reply that carries a model and statistics.

    Parameters
    ----------
    content : RecordDict
        What the node sent.
    request : StatisticsRequest
        What it was asked for.
    expected : mapping from str to ndarray
        Arrays with the names, shapes and dtypes that the model must have.

    Raises
    ------
    BadReplyError
        Names the key at fault, what was expected and what came.
    """
    rest = RecordDict({key: record for key, record in content.items() if key != STATISTICS})
    model = unpack_model_reply(rest, expected)
    statistics = _unpacked(content.get(STATISTICS), request, expected) if request.kinds else {}
    return MergeReply(model.arrays, model.num_examples, model.metrics, statistics)


def _unpacked(record: object, request: StatisticsRequest, expected: Arrays) -> Statistics:
    shapes = statistics_shapes(request.method, expected)
    plan = plan_of(request, expected)
    names = (
        {f"{weight}/{kind}" for weight, kinds in shapes.items() for kind in kinds}
        if plan is None
        else set(_CODES)
    )
    if not isinstance(record, ArrayRecord):
        raise BadReplyError(
            f"no ArrayRecord '{STATISTICS}' beside the model; merging by {request.method} needs "
            "statistics_mod in the node's ClientApp"
        )
    if record.keys() != names:
        raise BadReplyError(f"'{STATISTICS}' must have {sorted(names)}, got {sorted(record)}")
    statistics: Statistics
    if plan is None:
        statistics = {
            weight: {
                kind: _read(record[f"{weight}/{kind}"], f"{weight}/{kind}", kind, shape)
                for kind, shape in kinds.items()
            }
            for weight, kinds in shapes.items()
        }
    else:
        statistics = _decoded(record, plan)
    try:
        check_statistics(statistics, request.method, expected)
    except ValueError as error:
        raise BadReplyError(str(error)) from error
    return statistics


def plan_of(request: StatisticsRequest, arrays: Arrays) -> CompressionPlan | None:
    """Return how statistics of a network travel in codes; None where they travel as they are."""
    return compression_plan(request.method, arrays, request.share) if request.share else None


def _decoded(record: ArrayRecord, plan: CompressionPlan) -> Statistics:
    columns, roots, scales = plan.sizes
    packed = PackedStatistics(
        checked_array(record["columns"], "columns", (columns,), np.dtype(np.int8)),
        checked_array(record["roots"], "roots", (roots,), np.dtype(f"uint{plan.bits}")),
        checked_array(record["scales"], "scales", (scales,), np.dtype(np.float32)),
    )
    if packed.scales.min(initial=0.0) < 0:
        raise BadReplyError("array 'scales' holds numbers below 0")
    # Before anything is multiplied: the largest code is below 2**bits.
    if largest(packed.scales) > MAX_WEIGHT:
        raise BadReplyError(f"array 'scales' holds numbers above {MAX_WEIGHT:g}")
    statistics = unpack_statistics(packed, plan)
    for weight, kinds in statistics.items():
        for kind, array in kinds.items():
            if largest(array) > MAX_MOMENT:
                raise BadReplyError(
                    f"'{kind}' of '{weight}' holds mean squares above {MAX_MOMENT:g}"
                )
    return statistics


def _packed(kind: Kind, array: NDArray) -> NDArray[np.float32]:
    values = array[np.triu_indices(len(array))] if kind in SYMMETRIC else array
    return values.astype(np.float32)


def _read(array: Array, key: str, kind: Kind, shape: tuple[int, int]) -> NDArray[np.float32]:
    size = shape[0]
    sent = (size * (size + 1) // 2,) if kind in SYMMETRIC else shape
    upper = checked_array(array, key, sent, np.dtype(np.float32))
    if largest(upper) > MAX_MOMENT:
        raise BadReplyError(f"array '{key}' holds mean squares above {MAX_MOMENT:g}")
    if kind not in SYMMETRIC:
        return upper
    full = np.zeros(shape, np.float32)
    rows, columns = np.triu_indices(size)
    full[rows, columns] = upper
    full[columns, rows] = upper
    return full
