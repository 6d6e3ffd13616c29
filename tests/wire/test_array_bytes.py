"""Arrays as bytes: byte for byte what numpy writes, number for number what it reads."""

from io import BytesIO

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord

from gems_flwr.wire.array_bytes import promised_bytes, to_array, to_ndarray
from gems_flwr.wire.records import to_numpy, to_record

ARRAYS = [
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.arange(6, dtype=np.float64).reshape(2, 3).T,
    np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
    np.arange(10, dtype=np.float32)[::2],
    np.array(3.5, np.float16),
    np.array(7),
    np.zeros((0, 3), np.float32),
    np.zeros(0, np.uint8),
    np.array([True, False]),
    np.arange(3, dtype=">f4"),
    np.arange(3, dtype=np.uint64),
    np.arange(3, dtype=np.complex64),
    np.array(["a", "bc"]),
    np.ones((1, 2, 3, 4), np.int8),
]


@pytest.mark.parametrize("value", ARRAYS, ids=lambda v: f"{v.dtype}{v.shape}")
def test_the_bytes_are_flowers_and_the_numbers_come_back(value):
    ours, flowers = to_array(value), Array(value)
    assert ours == flowers
    assert type(ours.shape) is tuple
    back, expected = to_ndarray(ours), flowers.numpy()
    np.testing.assert_array_equal(back, expected)
    assert (back.dtype, back.shape) == (expected.dtype, expected.shape)
    assert back.flags.f_contiguous == expected.flags.f_contiguous


@pytest.mark.parametrize("value", ARRAYS, ids=lambda v: f"{v.dtype}{v.shape}")
def test_what_was_read_is_the_readers_own(value):
    array = to_array(value)
    before = array.data
    read = to_ndarray(array)
    read[...] = read.dtype.type()
    assert array.data == before
    np.testing.assert_array_equal(to_ndarray(array), value)


def test_what_was_written_does_not_change_with_the_array():
    value = np.zeros(3, np.float32)
    array = to_array(value)
    value[:] = 5
    assert (array.numpy() == 0).all()


def npy(value, **options):
    stream = BytesIO()
    np.lib.format.write_array(stream, value, **options)
    return stream.getvalue()


WHOLE = npy(np.arange(4, dtype=np.float32))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x93NUMPY",
        WHOLE[:-1],
        WHOLE[:100],
        WHOLE + b"more",
        WHOLE.replace(b"(4,)", b"(5,)"),
        WHOLE.replace(b"(4,)", b"(3,)"),
        WHOLE.replace(b"'<f4'", b"'|O4'"),
        WHOLE.replace(b"'<f4'", b"'nono'"),
        WHOLE.replace(b"False", b"True "),
        WHOLE.replace(b"(4,)", b"(-4,)"[:4]),
        WHOLE[:8] + b"\xff\xff" + WHOLE[10:],
        npy(np.arange(4.0), version=(2, 0)),
        npy(np.arange(4.0), version=(3, 0)),
        b"\x80\x04K\x01.",
    ],
)
def test_bytes_that_are_no_ordinary_array_are_read_or_refused_as_by_numpy(data):
    def outcome(read):
        try:
            value = read(Array("float32", (4,), "numpy.ndarray", data))
        except Exception as error:
            return type(error), str(error)
        return value.dtype, value.shape, value.tolist()

    assert outcome(to_ndarray) == outcome(Array.numpy)


def test_another_kind_of_serialisation_is_refused_as_by_flower():
    with pytest.raises(TypeError, match="Unsupported serialization type"):
        to_ndarray(Array("float32", (4,), "other", WHOLE))


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
