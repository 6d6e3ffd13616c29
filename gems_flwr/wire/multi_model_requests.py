"""Messages of multi-model learning: one message carries exactly the models that its node needs.

==============  =================================================================
instruction     ``config`` with ``multi-model`` (JSON of a `ModelsRequest`); an
                ArrayRecord ``model/<name>`` for each model that the node lacks,
                ``control/<name>`` for SCAFFOLD
reply           a MetricRecord ``metrics/<name>`` for each model, an ArrayRecord
                ``model/<name>`` if models were asked for, ``control/<name>``
                likewise; ``multi-model`` (ConfigRecord with JSON) names models
                that the node lacks and models whose training failed
introduction    ``multi-model`` (ConfigRecord with JSON): examples by model, and
                ``capacity``
==============  =================================================================

A handler for one model sees an ordinary instruction: ``arrays``, and ``config`` with ``model``.
"""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray

from gems_flwr.wire.keys import ARRAYS, CONFIG, CONTROL, CORRECTION, MODEL, MULTI_MODEL
from gems_flwr.wire.quick_records import records_of


def sent_weights(content: RecordDict) -> dict[str, ArrayRecord]:
    """Return the models in an instruction, by name."""
    return _named(content, MODEL)


def sent_controls(content: RecordDict) -> dict[str, NDArray]:
    """Return SCAFFOLD's control variates in an instruction, by model."""
    return {name: vector_of(record) for name, record in _named(content, CONTROL).items()}


def single_instruction(
    content: RecordDict, name: str, weights: ArrayRecord, correction: NDArray | None
) -> RecordDict:
    """Return what a handler for one model expects, taken out of an instruction for several."""
    config = content[CONFIG]
    assert isinstance(config, ConfigRecord)
    own = ConfigRecord({key: value for key, value in config.items() if key != MULTI_MODEL})
    own[MODEL] = name
    single = RecordDict({CONFIG: own, ARRAYS: weights})
    if correction is not None:
        single[CORRECTION] = vector_record(correction)
    return single


def named_model(content: RecordDict) -> str | None:
    """Return the name of the one model that an instruction is about; None if it has no name."""
    config = content.get(CONFIG)
    name = config.get(MODEL) if isinstance(config, ConfigRecord) else None
    return name if isinstance(name, str) else None


def gradient_correction(content: RecordDict) -> NDArray | None:
    """Return what SCAFFOLD adds to every gradient, or None."""
    record = content.get(CORRECTION)
    return vector_of(record) if isinstance(record, ArrayRecord) else None


def vector_record(vector: NDArray) -> ArrayRecord:
    """Return a vector as a record of its own."""
    return ArrayRecord({CONTROL: Array(vector)})


def vector_of(record: ArrayRecord) -> NDArray:
    """Return the vector in a record."""
    return record[CONTROL].numpy()


def _named(content: RecordDict, prefix: str) -> dict[str, ArrayRecord]:
    return {
        key.removeprefix(f"{prefix}/"): record
        for key, record in records_of(content, ArrayRecord).items()
        if key.startswith(f"{prefix}/")
    }
