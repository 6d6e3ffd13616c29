"""Records without checking again what is checked already.

Flower's records check each entry as it is put in, which takes some microseconds apiece (they build
type expressions anew each time): for small models that was a good part of what a message cost.
Where entries are known to be right, because they come out of a record or are of types that this
library has chosen, the functions here put them in directly. Whatever crosses a grid is checked
there.

Flower has no public way, so this file knows where its records keep their entries, as
`gems_flwr.runtime.flower_internals` knows other things. If a new version keeps them elsewhere, that
is noticed below and the records' own constructors are used: slower, and otherwise the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

RecordKind = TypeVar("RecordKind", ArrayRecord, ConfigRecord, MetricRecord)

_EMPTY: dict[type, Any] = {
    kind: kind() for kind in (ArrayRecord, ConfigRecord, MetricRecord, RecordDict)
}
_ARRAY_FIELDS = ("dtype", "shape", "stype", "data")


def _keeps_entries_in_a_dict(kind: type) -> bool:
    inside = vars(_EMPTY[kind])
    return inside.get("_data") == {} and len(inside) == 3  # and the two functions that check


def _keeps_nothing_else() -> bool:
    array = Array("float32", (0,), "numpy.ndarray", b"")
    return set(vars(array)) - {"_is_dirty"} == set(_ARRAY_FIELDS)


RECORDS_ARE_KNOWN = all(map(_keeps_entries_in_a_dict, _EMPTY))
ARRAYS_ARE_KNOWN = _keeps_nothing_else()


def _filled(kind: type, entries: dict[str, Any]) -> Any:
    if not RECORDS_ARE_KNOWN:
        return kind(entries)
    record = _EMPTY[kind].copy()
    record.__dict__["_data"] = entries
    return record


def make_content(records: dict[str, Any]) -> RecordDict:
    """Return a RecordDict of records; it keeps the dict that it is given."""
    return cast(RecordDict, _filled(RecordDict, records))


def make_config(values: dict[str, Any]) -> ConfigRecord:
    """Return a ConfigRecord of values that it may have; it keeps the dict."""
    return cast(ConfigRecord, _filled(ConfigRecord, values))


def make_metrics(values: dict[str, Any]) -> MetricRecord:
    """Return a MetricRecord of numbers, or lists of them; it keeps the dict."""
    return cast(MetricRecord, _filled(MetricRecord, values))


def make_arrays(arrays: dict[str, Array]) -> ArrayRecord:
    """Return an ArrayRecord of these very arrays; it keeps the dict."""
    return cast(ArrayRecord, _filled(ArrayRecord, arrays))


def _quick_array(dtype: str, shape: tuple[int, ...], stype: str, data: bytes) -> Array:
    array = Array.__new__(Array)
    array.__dict__.update(dtype=dtype, shape=shape, stype=stype, data=data)
    return array


make_array: Callable[[str, tuple[int, ...], str, bytes], Array] = (
    _quick_array if ARRAYS_ARE_KNOWN else Array
)
"""Make an Array of the four things that it is."""


def records_of(content: RecordDict, kind: type[RecordKind]) -> dict[str, RecordKind]:
    """Return the records of one kind by their keys, in order.

    As ``content.metric_records`` and its like, but as a plain dict, which is not written back.
    """
    return {key: record for key, record in content.items() if isinstance(record, kind)}
