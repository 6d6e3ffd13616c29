"""What an app's loader returns, told apart: loaders, batches, pairs of arrays, four arrays."""

import numpy as np
import pytest
import torch
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, TensorDataset

from gems_flwr.errors import ModelError
from gems_flwr.networks import LayerReader, batches, count_samples, is_read_once, read_node_data

X, Y = np.arange(60.0).reshape(20, 3), np.arange(20) % 2


def joined(data):
    parts = list(batches(data))
    return tuple(np.concatenate([part[i].numpy() for part in parts]) for i in (0, 1))


def loader(x, y, **options):
    return DataLoader(TensorDataset(torch.tensor(x), torch.tensor(y)), 4, **options)


FORMS = {
    "loaders": lambda x, y: loader(x, y),
    "pairs": lambda x, y: (x, y),
    "tensors": lambda x, y: (torch.tensor(x), torch.tensor(y)),
    "a list for a pair": lambda x, y: [x, y],
    "batches": lambda x, y: [(x[:5], y[:5]), (x[5:], y[5:])],
    "dicts": lambda x, y: [{"img": x, "label": y}],
    "once": lambda x, y: iter([(x, y)]),
    "float labels": lambda x, y: (x, y.astype(np.float32)[:, None]),
}


@pytest.mark.parametrize("form", FORMS)
def test_training_comes_first_and_validation_second_in_every_form(form):
    found = read_node_data((FORMS[form](X[:12], Y[:12]), FORMS[form](X[12:], Y[12:])))
    for part, rows in (("train", slice(0, 12)), ("validation", slice(12, 20))):
        x, y = joined(found.part(part))
        assert np.array_equal(x, X[rows])
        assert np.array_equal(y.reshape(-1), Y[rows])


@pytest.mark.parametrize(("counts", "column"), [(12, False), (10, True)])
def test_four_arrays_are_told_apart_by_their_shapes(counts, column):
    """Flower's quickstart and scikit-learn's own function order them differently."""
    labels = Y[:, None].astype(np.float32) if column else Y
    theirs = train_test_split(X, labels, train_size=counts, random_state=0)
    quickstart = (theirs[0], theirs[2], theirs[1], theirs[3])
    for returned in (quickstart, tuple(theirs)):
        found = read_node_data(returned)
        for part, x, y in zip(("train", "validation"), theirs[:2], theirs[2:], strict=True):
            assert found.part(part)[0] is x
            assert found.part(part)[1] is y


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ((X, Y), r"^return \(train, validation\) from data\(context\), each of them a pair"),
        ([(X, Y), (X, Y)], r"^return \(train, validation\) .* it returned list$"),
        (({}, {}, {}), r"^return \(train, validation\) .* a tuple of 3: dict, dict, dict$"),
        ((X, None), r"^return \(train, validation\) .*ndarray of shape \(20, 3\), NoneType"),
        # One column of inputs, and as many rows everywhere: either order would do.
        ((X[:, :1],) * 4, r"^return \(\(X_train, y_train\), \(X_test, y_test\)\)"),
        # No order fits.
        ((X, Y[:3], X, Y), r"^return \(\(X_train, y_train\), \(X_test, y_test\)\)"),
    ],
)
def test_anything_else_is_refused_with_what_to_return(returned, words):
    with pytest.raises(ModelError, match=words):
        read_node_data(returned)


@pytest.mark.parametrize("nothing", [None, [], (X[:0], Y[:0])])
def test_a_part_that_is_missing_matters_only_to_who_reads_it(nothing):
    found = read_node_data(((X, Y), nothing))
    assert found.part("train")[1] is Y
    with pytest.raises(ModelError, match=r"^return \(train, validation\) .* with validation data"):
        found.part("validation")


def test_samples_are_counted_whatever_holds_them():
    data = [form(X, Y) for form in FORMS.values()]
    assert [count_samples(each) for each in data] == [20] * len(data)
    # 20 samples in batches of 4 are 5; of the first 18 the last two are dropped.
    assert count_samples(loader(X[:18], Y[:18], drop_last=True)) == 16


def test_only_iterators_are_gone_once_they_were_read():
    assert is_read_once(iter([(X, Y)]))
    assert not any(is_read_once(each) for each in ((X, Y), [(X, Y)], loader(X, Y)))


def test_single_samples_for_batches_are_refused_with_what_to_write():
    with pytest.raises(ModelError, match=r"^return loaders, for example DataLoader\(dataset"):
        list(batches(TensorDataset(torch.tensor(X), torch.tensor(Y))))


@pytest.mark.parametrize(
    ("labels", "words"),
    [(Y + 0.5, "got fractions: is it a regression"), (Y[:, None] * [1, 1], "one class number per")],
)
def test_labels_that_are_no_classes_are_refused(labels, words):
    reader = LayerReader({"weight": np.zeros((2, 3)), "bias": np.zeros(2)})
    layer = reader.output_layer((X, Y))
    assert reader.read((X, Y[:, None].astype(float)), layer).labels.tolist() == Y.tolist()
    with pytest.raises(ModelError, match=words):
        reader.read((X, labels), layer)
