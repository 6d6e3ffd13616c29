"""What it costs to pack a model, and how it grows with the model.

Beside it stands the obvious way (`zlib.compress` of the float32 bytes, or half precision as it is),
and what no way can do without: one pass over the data, a copy. Figures are milliseconds and ratios
within this one run. Nothing here asserts a time.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator

import numpy as np
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from gems_flwr.client.compression_mod import compression_mod
from gems_flwr.compression.difference_coding import Form, PackedModel, decode, encode
from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.runtime.seeding import generator
from gems_flwr.strategies.fedavg import FedAvg
from gems_flwr.wire.records import to_numpy, to_record
from simulations.bench.cost_tables import Column, CostTable, obvious, ours, ratio, size

# The logistic model on digits, a small network, the CNN: as matrices, and how often each is timed.
SIZES = {(10, 65): 200, (250, 200): 50, (1000, 1200): 5}
FORMS: tuple[Form, ...] = ("float16", "int8", "int4", "int2")
_ALL: tuple[Form, ...] = ("float32", *FORMS)
_ZLIB, _HALF, _COPY = "zlib of float32", "model in float16", "a copy"
NODES, ROUNDS = 4, 4


def models(shape: tuple[int, int]) -> tuple[NDArray, NDArray]:
    """Return what the receiver has, and a model one step away: Gaussian weights."""
    rng = generator(0, "compression-bench", *shape)
    base = rng.normal(scale=0.05, size=shape).astype(np.float32)
    return base, base + rng.normal(scale=0.001, size=shape).astype(np.float32)


def packed_row(
    shape: tuple[int, int], form: Form, count: int, copy: float
) -> dict[str, float | str]:
    """Return a row: encoding, decoding, both in copies, bytes a weight."""
    base, model = models(shape)
    has, wants = {"w": base}, {"w": model}
    encoded = encode(wants, has, form)
    there = _seconds(lambda: encode(wants, has, form, encoded.left_over), count)
    back = _seconds(lambda: decode(encoded.packed, has, form), count)
    return _row(form, model.size, there, back, copy, _size(encoded.packed) / model.size)


def obvious_rows(shape: tuple[int, int], count: int, copy: float) -> list[dict[str, float | str]]:
    """Return rows of what anybody would try first, on the model itself."""
    _, model = models(shape)
    data, half = model.tobytes(), model.astype(np.float16)
    short = zlib.compress(data)
    deflated = (
        _seconds(lambda: zlib.compress(model.tobytes()), max(2, count // 5)),
        _seconds(lambda: np.frombuffer(zlib.decompress(short), np.float32), max(2, count // 5)),
    )
    plain = (
        _seconds(lambda: model.astype(np.float16).tobytes(), count),
        _seconds(lambda: half.astype(np.float32), count),
    )
    return [
        _row(_ZLIB, model.size, *deflated, copy, len(short) / model.size),
        _row(_HALF, model.size, *plain, copy, half.nbytes / model.size),
        _row(_COPY, model.size, copy, copy, copy, 4.0),
    ]


def round_row(shape: tuple[int, int], form: Form) -> tuple[float, float]:
    """Return milliseconds a node and round of FedAvg on nodes that do next to nothing; bytes."""
    app = ClientApp(mods=[compression_mod()])
    step = models(shape)[1] - models(shape)[0]

    @app.train()
    def train(message: Message, context: Context) -> Message:
        (arrays,) = message.content.array_records.values()
        moved = to_record({"w": to_numpy(arrays)["w"] + step})
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": moved, "metrics": metrics}), reply_to=message)

    strategy = FedAvg(compress=form, fraction_evaluate=0.0)
    start = to_record({"w": models(shape)[0]})
    history = strategy.start(InProcessGrid(app, NODES), start, num_rounds=ROUNDS + 1).history
    # In the first round nobody has anything.
    later, messages = history[2:], NODES * ROUNDS
    traffic = sum(r.traffic.bytes_up + r.traffic.bytes_down for r in later)
    return sum(r.seconds for r in later) / messages * 1e3, traffic / messages


def measure(quick: bool) -> Iterator[CostTable]:
    """Measure packing by itself, and in rounds of FedAvg."""
    sizes = dict(list(SIZES.items())[: 2 if quick else 3])
    rows = []
    for shape, count in sizes.items():
        copy = _seconds(models(shape)[1].copy, max(20, count))
        rows += [packed_row(shape, form, count, copy) for form in FORMS]
        rows += obvious_rows(shape, count, copy)
    yield CostTable(
        "Packing a model",
        (
            *(size("how"), size("weights"), Column("encode", "ms"), Column("decode", "ms")),
            *(ours("both"), Column("copies"), Column("ns each"), Column("bytes each")),
        ),
        tuple(rows),
        "both: encoding and decoding. copies: the same in passes over the data, a copy of float32 "
        "each way. each: weight.",
        grows_with="weights",
        group="how",
        group_roles={_ZLIB: "obvious", _HALF: "obvious", _COPY: "limit"},
    )
    told = {shape: {form: round_row(shape, form) for form in _ALL} for shape in sizes}
    yield CostTable(
        "A round of FedAvg with packed models, for each node",
        (
            *(size("weights"), obvious("float32"), *(ours(form) for form in FORMS)),
            *(ratio(f"{form} ×", form, "float32") for form in FORMS),
        ),
        tuple(
            {"weights": shape[0] * shape[1], **{form: each[form][0] for form in _ALL}}
            for shape, each in told.items()
        ),
        grows_with="weights",
    )
    yield CostTable(
        "What that round sends, for each node",
        (
            *(size("weights"), obvious("float32", "bytes"), *(ours(f, "bytes") for f in FORMS)),
            *(ratio(f"{form} ×", form, "float32") for form in FORMS),
        ),
        tuple(
            {"weights": shape[0] * shape[1], **{form: each[form][1] for form in _ALL}}
            for shape, each in told.items()
        ),
    )


def _row(
    how: str, weights: int, there: float, back: float, copy: float, bytes_each: float
) -> dict[str, float | str]:
    return {
        "how": how,
        "weights": weights,
        "encode": there * 1e3,
        "decode": back * 1e3,
        "both": (there + back) * 1e3,
        "copies": (there + back) / (2 * copy),
        "ns each": (there + back) / weights * 1e9,
        "bytes each": bytes_each,
    }


def _size(packed: PackedModel) -> int:
    return len(packed.codes) + len(packed.scales) + len(packed.exact)


def _seconds(work: Callable[[], object], count: int) -> float:
    work()
    spent = []
    for _ in range(3):
        started = time.perf_counter()
        for _ in range(count):
            work()
        spent.append((time.perf_counter() - started) / count)
    # The others were disturbed.
    return min(spent)
