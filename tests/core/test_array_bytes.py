"""Arrays as bytes: byte for byte what numpy writes, number for number what it reads."""

from io import BytesIO

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord

from gems_flwr.core.records import promised_bytes, to_array, to_ndarray, to_numpy, to_record

ARRAYS = [
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.arange(6, dtype=np.float64).reshape(2, 3).T,
    np.arange(10, dtype=np.float32)[::2],
    np.array(3.5, np.float16),
    np.array(7),
    np.zeros((0, 3), np.float32),
    np.array([True, False]),
    np.arange(3, dtype=">f4"),
    np.arange(3, dtype=np.complex64),
    np.array(["a", "bc"]),
]


@pytest.mark.parametrize("value", ARRAYS, ids=lambda v: f"{v.dtype}{v.shape}")
def test_the_bytes_are_flowers_and_the_numbers_come_back_as_the_readers_own(value):
    ours, flowers = to_array(value), Array(value)
    assert ours == flowers
    assert type(ours.shape) is tuple
    before, back, expected = ours.data, to_ndarray(ours), flowers.numpy()
    np.testing.assert_array_equal(back, expected, strict=True)
    assert back.flags.f_contiguous == expected.flags.f_contiguous
    back[...] = back.dtype.type()
    assert ours.data == before


def npy(value, **options):
    stream = BytesIO()
    np.lib.format.write_array(stream, value, **options)
    return stream.getvalue()


WHOLE = npy(np.arange(4, dtype=np.float32))


def outcome(read, data):
    try:
        value = read(Array("float32", (4,), "numpy.ndarray", data))
    except Exception as error:
        return type(error), str(error)
    return value.dtype, value.shape, value.tolist()


def test_bytes_that_are_no_ordinary_array_are_read_or_refused_as_by_numpy():
    swaps = [(b"(4,)", b"(5,)"), (b"(4,)", b"(3,)"), (b"'<f4'", b"'|O4'"), (b"'<f4'", b"'nono'")]
    odd = [WHOLE.replace(*swap) for swap in [*swaps, (b"False", b"True ")]]
    odd += [b"", b"\x93NUMPY", WHOLE[:-1], WHOLE[:100], WHOLE + b"more", b"\x80\x04K\x01."]
    odd += [npy(np.arange(4.0), version=version) for version in ((2, 0), (3, 0))]
    for data in [*odd, WHOLE[:8] + b"\xff\xff" + WHOLE[10:]]:
        assert outcome(to_ndarray, data) == outcome(Array.numpy, data), data


def test_what_a_header_promises_is_known_without_reading_on():
    assert promised_bytes(WHOLE) == 16
    assert promised_bytes(WHOLE.replace(b"(4,)", b"(9,)")) == 36
    assert promised_bytes(npy(np.zeros((0, 3)))) == 0


def test_records_hold_what_flowers_own_hold():
    arrays = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros(2)}
    record = to_record(arrays)
    assert record == ArrayRecord({name: Array(each) for name, each in arrays.items()})
    record["c"] = Array(np.ones(1))
    with pytest.raises(TypeError):
        record["d"] = 3
    assert list(to_numpy(record)) == ["w", "b", "c"]
    with pytest.raises(TypeError):
        to_record({3: np.zeros(1)})
