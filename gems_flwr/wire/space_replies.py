"""Replies that carry a good-enough space, or the score of a model.

A reply to a train message with a ``space-request`` carries, instead of the model, the arrays of
the space and one JSON text with the rest, or the class sums of a node whose moments are only
ever to be added up.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

from gems_flwr.bounds import MAX_EXAMPLES
from gems_flwr.errors import BadReplyError, SpaceError
from gems_flwr.moments.class_sums import ClassSums
from gems_flwr.spaces.ball import BallSpace
from gems_flwr.spaces.checks import shown
from gems_flwr.spaces.cone import ClassMomentCone
from gems_flwr.spaces.covariance import FullCovariance, LowRankCovariance
from gems_flwr.spaces.curved_space import CurvedSpace
from gems_flwr.spaces.ellipsoid import EllipsoidSpace
from gems_flwr.spaces.output_layer import OutputLayer
from gems_flwr.spaces.partial_covariance import AND_MEANS, MEANS, PartialCovariance
from gems_flwr.spaces.space_files import Space, space_from_arrays, space_to_arrays
from gems_flwr.wire.keys import (
    CLASS_SUMS,
    CURVE,
    JSON,
    METRICS,
    SCORE,
    SPACE,
    SPACE_META,
)
from gems_flwr.wire.model_replies import pack_name
from gems_flwr.wire.records import checked_array, read_json
from gems_flwr.wire.space_requests import Cone, Means, SpaceRequest

NodeSpace = Space | CurvedSpace | ClassSums


def pack_space_reply(space: NodeSpace, *, name: str) -> RecordDict:
    """Return the content of a reply that carries a space."""
    if isinstance(space, ClassSums):
        return RecordDict({CLASS_SUMS: _pack_sums(space), **pack_name(name)})
    curve: dict[str, NDArray[Any]] = {}
    if isinstance(space, CurvedSpace):
        curve, space = {CURVE: space.curve}, space.space
    arrays, meta = space_to_arrays(space)
    record = ArrayRecord({key: Array(np.asarray(a)) for key, a in (arrays | curve).items()})
    text = ConfigRecord({JSON: json.dumps(meta, separators=(",", ":"))})
    return RecordDict({SPACE: record, SPACE_META: text, **pack_name(name)})


def unpack_space_reply(content: RecordDict, request: SpaceRequest, layer: OutputLayer) -> NodeSpace:
    """Validate a reply that carries a space.

    Parameters
    ----------
    content : RecordDict
        What the node sent.
    request : SpaceRequest
        What it was asked for.
    layer : OutputLayer
        The layer that the space is about.

    Raises
    ------
    BadReplyError
        Names the key at fault, what was expected and what came.
    """
    if request.is_summed:
        return _unpack_sums(content, layer)
    record, text = content.get(SPACE), content.get(SPACE_META)
    if not isinstance(record, ArrayRecord) or not isinstance(text, ConfigRecord):
        raise BadReplyError(f"expected an ArrayRecord '{SPACE}' and a ConfigRecord '{SPACE_META}'")
    arrays = {key: checked_array(array, key) for key, array in record.items()}
    curve = arrays.pop(CURVE, None)
    try:
        space = space_from_arrays(arrays, read_json(text.get(JSON), SPACE_META))
        _check_fit(space, request, layer)
        if not request.is_curved:
            return space
        if curve is None or not isinstance(space, BallSpace | EllipsoidSpace):
            raise SpaceError(CURVE, "the radius for every epsilon", "none")
        return CurvedSpace(space, curve)
    except SpaceError as error:
        raise BadReplyError(str(error)) from error


def pack_score_reply(score: float, *, name: str) -> RecordDict:
    """Return the content of a reply with one number."""
    return RecordDict({METRICS: MetricRecord({SCORE: float(score)}), **pack_name(name)})


def unpack_score_reply(content: RecordDict) -> float:
    """Validate a score: one number from 0 to 1."""
    record = content.get(METRICS)
    score = record.get(SCORE) if isinstance(record, MetricRecord) else None
    if not isinstance(score, int | float) or not 0 <= score <= 1:
        raise BadReplyError(f"'{SCORE}' must be a number from 0 to 1, got {shown(score)}")
    return float(score)


def _check_fit(space: Space, request: SpaceRequest, layer: OutputLayer) -> None:
    if space.kind != request.space_kind:
        raise SpaceError("kind", request.space_kind, space.kind)
    wanted: tuple[int, ...]
    got: tuple[int, ...]
    if isinstance(space, ClassMomentCone):
        wanted = (layer.num_classes, layer.features)
        got = (space.num_classes, space.num_features)
        if isinstance(request, Cone):
            _check_moments(space, request)
        if isinstance(request, Means):
            _check_means(space, request)
    else:
        wanted, got = (layer.dimension,), (space.dimension,)
    if wanted != got:
        raise SpaceError("shape", f"{wanted} as in the model", got)


def _check_moments(cone: ClassMomentCone, request: Cone) -> None:
    """Refuse moments of another form than asked for: they would weigh and cost more."""
    if cone.total_count > MAX_EXAMPLES:
        raise SpaceError("total_count", f"at most {MAX_EXAMPLES:g}", cone.total_count)
    forms = {"auto": (FullCovariance.form, LowRankCovariance.form), "full": (FullCovariance.form,)}
    allowed = forms.get(str(request.rank), (LowRankCovariance.form,))
    # Of small classes there are means alone, whatever the form of the others.
    allowed = (*allowed, *(form + AND_MEANS for form in allowed), MEANS)
    if cone.covariance.form not in allowed:
        raise SpaceError("form", " or ".join(allowed), cone.covariance.form)
    whole = cone.covariance
    own = whole.own if isinstance(whole, PartialCovariance) else whole
    if isinstance(own, LowRankCovariance) and isinstance(request.rank, int):
        rank = max(own.rank(entry) for entry in range(own.shape[0]))
        if rank > request.rank:
            raise SpaceError("rank", f"at most {request.rank}", rank)
    entries = np.bincount(cone.labels, minlength=cone.num_classes)
    if entries.max() > request.clusters:
        raise SpaceError("labels", f"at most {request.clusters} entries of a class", entries.max())


def _check_means(cone: ClassMomentCone, request: Means) -> None:
    """Refuse covariances that were not asked for, and more groups of a class than were."""
    if cone.total_count > MAX_EXAMPLES:
        raise SpaceError("total_count", f"at most {MAX_EXAMPLES:g}", cone.total_count)
    if not cone.lacking.all():
        raise SpaceError("form", "means", cone.covariance.form)
    entries = np.bincount(cone.labels, minlength=cone.num_classes)
    if entries.max() > request.groups:
        raise SpaceError("labels", f"at most {request.groups} entries of a class", entries.max())


def _pack_sums(sums: ClassSums) -> ArrayRecord:
    rows, columns = np.triu_indices(sums.sums.shape[1])
    parts = {
        "counts": sums.counts.astype(np.float32),
        "sums": sums.sums.astype(np.float32),
        # Symmetric: the upper half says it all.
        "outers": sums.outers[:, rows, columns].astype(np.float32),
    }
    return ArrayRecord({key: Array(array) for key, array in parts.items()})


def _unpack_sums(content: RecordDict, layer: OutputLayer) -> ClassSums:
    record = content.get(CLASS_SUMS)
    if not isinstance(record, ArrayRecord):
        raise BadReplyError(f"expected an ArrayRecord '{CLASS_SUMS}'")
    classes, width = layer.num_classes, layer.features
    half = width * (width + 1) // 2
    shapes = {"counts": (classes,), "sums": (classes, width), "outers": (classes, half)}
    if record.keys() != shapes.keys():
        raise BadReplyError(f"'{CLASS_SUMS}' must have {sorted(shapes)}, got {sorted(record)}")
    single = np.dtype(np.float32)
    counts, sums, upper = (
        checked_array(record[key], key, shape, single).astype(np.float64)
        for key, shape in shapes.items()
    )
    if counts.min() < 0 or counts.sum() > MAX_EXAMPLES:
        raise BadReplyError(
            f"'counts' must be at least 0 and sum to at most {MAX_EXAMPLES:g}, got "
            f"{counts.min():g} and {counts.sum():g}"
        )
    outers = np.zeros((classes, width, width))
    rows, columns = np.triu_indices(width)
    outers[:, rows, columns] = upper
    outers[:, columns, rows] = upper
    if outers[:, range(width), range(width)].min() < 0:
        raise BadReplyError("'outers' must have no negative squares")
    labels = np.arange(classes, dtype=np.int64)
    try:
        total = ClassSums(classes, labels, counts, sums, outers)
        total.check_moments()
        return total
    except SpaceError as error:
        raise BadReplyError(str(error)) from error
