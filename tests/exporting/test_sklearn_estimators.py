"""What is exported for scikit-learn is made of its own classes and predicts as the run did."""

import numpy as np
import pytest
import skops.io
import torch
from torch import nn

from gems_flwr import ModelError, RandomFourier, export_model, join_models
from simulations import models
from simulations.data.examples import Examples
from simulations.data.images import digits
from simulations.experiment.training import predictions

SHAPE = {"input_shape": (1, 8, 8), "classes": 10}
NETWORKS = {
    "logistic": lambda: models.logistic(**SHAPE),
    "mlp": lambda: models.mlp(**SHAPE, hidden=[20, 15]),
    "random_fourier": lambda: models.random_fourier(**SHAPE, outputs=100),
    "keep_inputs": lambda: models.random_fourier(
        **SHAPE, outputs=40, keep_inputs=True, normalize="length"
    ),
}


@pytest.fixture(autouse=True)
def same_networks():
    """Networks with other weights may agree on so few samples that nothing can be compared."""
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def data():
    return digits(seed=0)


def arrays_of(model):
    return {name: each.numpy() for name, each in model.state_dict().items()}


def as_the_run(model, raw, scale):
    return predictions(model, Examples(raw, np.zeros(len(raw), np.int64)), scale=scale)


def rows(raw):
    return raw.reshape(len(raw), -1)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_file_of_trusted_types_predicts_what_the_run_predicts(name, data, tmp_path):
    model = NETWORKS[name]()
    path = tmp_path / "model.skops"
    export_model(
        arrays_of(model), NETWORKS[name], to="sklearn", path=path, scale=data.scale,
        input_shape=(1, 8, 8),
    )  # fmt: skip
    # All of it scikit-learn's own; its plain functions have to be named to skops.
    trusted = skops.io.get_untrusted_types(file=path)
    assert trusted == (["sklearn.preprocessing._data.scale"] if name == "random_fourier" else [])
    estimator = skops.io.load(path, trusted=trusted)
    for count in (1, 7):
        raw = data.test.features[:count]
        expected = as_the_run(model, raw, data.scale)
        assert np.abs(estimator.predict_proba(rows(raw)) - expected).max() < 1e-5
        assert estimator.predict(rows(raw)).tolist() == expected.argmax(1).tolist()


@pytest.mark.parametrize("hidden", [[], [9]], ids=["linear", "mlp"])
@pytest.mark.parametrize("classes", [["pear", "apple", "fig"], ["yes", "no"]])
def test_names_need_not_be_in_order_although_estimators_have_them_so(classes, hidden):
    net = models.mlp(input_shape=(4,), classes=len(classes), hidden=hidden)
    raw = np.random.default_rng(1).normal(size=(50, 4)).astype(np.float32)
    expected = as_the_run(net, raw, 1.0)
    made = export_model(arrays_of(net), net, to="sklearn", classes=classes).model
    assert made.classes_.tolist() == sorted(classes)
    assert made.predict(raw).tolist() == [classes[k] for k in expected.argmax(1)]
    assert len(set(made.predict(raw))) > 1
    columns = [classes.index(name) for name in made.classes_]
    assert np.abs(made.predict_proba(raw) - expected[:, columns]).max() < 1e-5


def test_one_output_that_is_the_second_class():
    layer = {"w": np.array([[1.0, -2.0]]), "b": np.array([0.3])}
    made = export_model(layer, to="sklearn", classes=["yes", "no"]).model
    chance = 1 / (1 + np.exp(-(1.0 * 2 + 0.3)))
    assert made.classes_.tolist() == ["no", "yes"]
    assert made.predict_proba([[2.0, 0.0]])[0] == pytest.approx([chance, 1 - chance])
    assert made.predict([[2.0, 0.0], [0.0, 2.0]]).tolist() == ["no", "yes"]


@pytest.mark.parametrize("hidden", [[], [9]], ids=["linear", "mlp"])
def test_numbers_are_predicted_by_regressors(hidden):
    net = models.mlp(input_shape=(4,), classes=0, hidden=hidden)
    raw = np.random.default_rng(1).normal(size=(7, 4))
    made = export_model(arrays_of(net), net, to="sklearn", classes=0, scale=0.5).model
    import torch

    expected = net.eval()(torch.tensor(raw * 0.5).float()).detach().numpy()[:, 0]
    assert made.predict(raw) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("vote", ["softmax_mean", "majority"])
def test_several_models_vote(vote, data, tmp_path):
    nets = [models.mlp(**SHAPE, hidden=[width]) for width in (5, 6, 7)]
    joined = join_models({str(k): arrays_of(net) for k, net in enumerate(nets)})
    build, path = lambda: models.mlp(**SHAPE), tmp_path / "model.skops"
    names = [f"digit {k}" for k in (9, 8, 7, 6, 5, 4, 3, 2, 1, 0)]
    export_model(
        joined, build, to="sklearn", vote=vote, input_shape=(1, 8, 8), scale=0.1, path=path,
        classes=names,
    )  # fmt: skip
    made, raw = skops.io.load(path), data.test.features[:40]
    members = np.stack([as_the_run(net, raw, 0.1) for net in nets])
    if vote == "softmax_mean":
        assert np.abs(made.predict_proba(rows(raw))[:, ::-1] - members.mean(0)).max() < 1e-5
        assert made.predict(rows(raw)).tolist() == [names[k] for k in members.mean(0).argmax(1)]
    else:
        votes = np.stack([np.bincount(v, minlength=10) for v in members.argmax(2).T])
        clear = votes.max(1) > 1
        expected = np.array(names)[votes.argmax(1)]
        assert clear.sum() > 10
        assert (made.predict(rows(raw)) == expected)[clear].all()


def chain(*layers):
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(5, 10))


@pytest.mark.parametrize(
    ("network", "culprit"),
    [
        (lambda: models.cnn(**SHAPE), "Conv2d"),
        (lambda: models.random_filters(**SHAPE, filters=4), "RandomFilters"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.Linear(5, 10)), "by turns"),
        (lambda: chain(nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, 5), nn.Tanh()), "one kind"),
        (lambda: chain(RandomFourier(64), nn.Linear(1000, 5), nn.GELU()), "GELU"),
    ],
    ids=["convolution", "filters", "two in a row", "two kinds", "gelu"],
)
def test_what_scikit_learn_has_no_class_for_is_refused_by_name(network, culprit):
    with pytest.raises(ModelError, match=culprit):
        export_model(arrays_of(network()), network, to="sklearn", input_shape=(1, 8, 8))
