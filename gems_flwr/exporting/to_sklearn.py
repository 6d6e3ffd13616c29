"""A model as an estimator of scikit-learn's own classes, with the weights put in.

Rows are examples, flattened: ``(n, features)``. A linear model becomes a `LogisticRegression`, a
chain of linear layers an `MLPClassifier` (for numbers `LinearRegression`, `MLPRegressor`), the
scale a `MaxAbsScaler` before it, random Fourier features a `Normalizer` and an `RBFSampler`,
several models that vote a `VotingClassifier`. What scikit-learn has no class for, such as
convolutions, is refused: an estimator of our own would not load without this library.

Decided here: two classes, which scikit-learn gives one output, get the difference of the two.
Files are written by ``skops``: pickles run whatever they hold when they are read.
"""

from __future__ import annotations

import importlib.util
import math
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from gems_flwr.errors import ModelError, NotInstalledError
from gems_flwr.exporting.portable import Portable
from gems_flwr.networks.random_fourier import RandomFourier

_ACTIVATIONS: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.Tanh: "tanh",
    nn.Sigmoid: "logistic",
}
# What changes nothing of a row when a model predicts.
_PLAIN = (nn.Flatten, nn.Identity, nn.Dropout)
_Layer = tuple[NDArray[np.float64], NDArray[np.float64]]


def to_sklearn(model: Portable, names: Sequence[str] | None = None) -> Any:
    """Return a model as an estimator or pipeline with `predict`, and `predict_proba` of classes.

    Parameters
    ----------
    model : Portable
        What to export.
    names : sequence of str, optional
        What the classes are called; their numbers, if not given.

    Raises
    ------
    ModelError
        Names the layer that scikit-learn has nothing for.
    """
    features = math.prod(model.input_shape)
    classes = np.array(names) if names else np.arange(model.classes)
    # Estimators have their classes, and so their outputs, in order.
    order = np.argsort(classes)
    if len(model.models) == 1:
        return _estimator(model.models[0], features, order, classes[order], model.scale)
    numbers = np.arange(len(classes))
    members = [_estimator(each, features, order, numbers, model.scale) for each in model.models]
    return _voting(members, classes[order], model.vote)


def sklearn_bytes(estimator: Any) -> bytes:
    """Return the ``.skops`` file of an estimator.

    Raises
    ------
    NotInstalledError
        If the extra ``export`` is not there.
    """
    if importlib.util.find_spec("skops") is None:
        raise NotInstalledError(
            "pip install 'gems-flwr[export]': a file for scikit-learn needs skops; or take the "
            "estimator that export_model(…, to='sklearn') returns"
        )
    from skops.io import dumps  # type: ignore[import-untyped]

    data: bytes = dumps(estimator, compression=zipfile.ZIP_DEFLATED)
    return data


def _estimator(
    model: nn.Module, features: int, order: NDArray, classes: NDArray, scale: float
) -> Any:
    from sklearn.pipeline import Pipeline

    modules = list(_chain(model))
    steps = [("scale", _scaler(features, scale))] if scale != 1 else []
    factors = np.ones(features)
    if modules and isinstance(modules[0], RandomFourier):
        lifting, factors = _lift(modules[0])
        steps += lifting
        del modules[0]
    weights, activation = _layers(modules)
    # What scikit-learn's classes leave out stands in the first layer.
    weights[0] = (weights[0][0] * factors, weights[0][1])
    weights[-1] = _ordered(*weights[-1], order)
    make = _linear if len(weights) == 1 else _perceptron
    step = ("model", make(weights, activation, classes))
    return Pipeline([*steps, step]) if steps else step[1]


def _ordered(weight: NDArray, bias: NDArray, order: NDArray) -> _Layer:
    """Return an output layer with its classes in order; of two classes, with one output."""
    if len(order) == 2 and len(weight) == 1:
        weight, bias = np.concatenate([0 * weight, weight]), np.concatenate([0 * bias, bias])
    if len(order):
        weight, bias = weight[order], bias[order]
    if len(order) == 2:
        weight, bias = weight[1:] - weight[:1], bias[1:] - bias[:1]
    return weight, bias


def _chain(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a chain that do something."""
    if isinstance(model, nn.Sequential):
        for each in model:
            yield from _chain(each)
    elif isinstance(model, (nn.Linear, RandomFourier, *_ACTIVATIONS)):
        yield model
    elif not isinstance(model, _PLAIN):
        raise ModelError(
            f"scikit-learn has nothing for {type(model).__name__}: it takes nn.Sequential chains "
            "of nn.Linear, one kind of activation (ReLU, Tanh, Sigmoid) and RandomFourier; export "
            "the model --to onnx or --to torch"
        )


def _layers(modules: Sequence[nn.Module]) -> tuple[list[_Layer], str]:
    """Return weights and biases of linear layers that alternate with one kind of activation."""
    weights: list[_Layer] = []
    kinds: list[str] = []
    for position, module in enumerate(modules):
        if isinstance(module, nn.Linear) != (position % 2 == 0):
            raise ModelError(
                f"scikit-learn has linear layers and activations by turns, the model has "
                f"{[type(each).__name__ for each in modules]}; export it --to onnx or --to torch"
            )
        if isinstance(module, nn.Linear):
            weight = module.weight.detach().double().numpy()
            bias = np.zeros(len(weight)) if module.bias is None else None
            weights.append(
                (weight, module.bias.detach().double().numpy() if bias is None else bias)
            )
        else:
            kinds.append(_ACTIVATIONS[type(module)])
    if not modules or len(kinds) != len(weights) - 1 or len(set(kinds)) > 1:
        raise ModelError(
            f"scikit-learn has one kind of activation between linear layers, the model has "
            f"{kinds or 'no layer'}; export it --to onnx or --to torch"
        )
    return weights, kinds[0] if kinds else "identity"


def _scaler(features: int, scale: float) -> Any:
    from sklearn.preprocessing import MaxAbsScaler

    scaler = MaxAbsScaler()
    scaler.scale_ = scaler.max_abs_ = np.full(features, 1 / scale)
    scaler.n_features_in_, scaler.n_samples_seen_ = features, 0
    return scaler


def _lift(lift: RandomFourier) -> tuple[list[tuple[str, Any]], NDArray[np.float64]]:
    """Return steps of the same lift, and what their outputs have to be multiplied with."""
    from sklearn.kernel_approximation import RBFSampler
    from sklearn.pipeline import FeatureUnion
    from sklearn.preprocessing import FunctionTransformer, Normalizer
    from sklearn.preprocessing import scale as standardised

    steps: list[tuple[str, Any]] = []
    if lift.normalize == "layer":
        options = {"axis": 1, "with_std": False}
        steps.append(("centre", FunctionTransformer(standardised, kw_args=options)))
    length = math.sqrt(lift.inputs)
    frequencies = lift.frequencies.double().numpy() * length
    sampler = RBFSampler(n_components=lift.outputs)
    sampler.random_weights_ = np.concatenate([frequencies, frequencies], axis=1)
    # A sine is a cosine that is a quarter behind.
    half = lift.outputs // 2
    sampler.random_offset_ = np.repeat([0.0, -np.pi / 2], half)
    sampler.n_features_in_, sampler._n_features_out = lift.inputs, lift.outputs
    factors = np.full(lift.outputs, math.sqrt(lift.outputs / 2))
    steps.append(("normalize", _fitted(Normalizer(), lift.inputs)))
    if not lift.keep_inputs:
        return [*steps, ("fourier", sampler)], factors
    union = FeatureUnion([("inputs", "passthrough"), ("fourier", sampler)])
    return [*steps, ("features", union)], np.concatenate([np.full(lift.inputs, length), factors])


def _fitted(step: Any, features: int) -> Any:
    step.n_features_in_ = features
    return step


def _linear(weights: Sequence[_Layer], activation: str, classes: NDArray) -> Any:
    from sklearn.linear_model import LinearRegression, LogisticRegression

    [(weight, bias)] = weights
    if not len(classes):
        model = _fitted(LinearRegression(), weight.shape[1])
        model.coef_, model.intercept_ = weight[0], float(bias[0])
        return model
    model = _fitted(LogisticRegression(), weight.shape[1])
    model.coef_, model.intercept_, model.classes_ = weight, bias, classes
    return model


def _perceptron(weights: Sequence[_Layer], activation: str, classes: NDArray) -> Any:
    """Return a perceptron: its own `fit` makes all that it has, on one row of zeros per class."""
    from sklearn.neural_network import MLPClassifier, MLPRegressor

    widths = [len(weight) for weight, _ in weights]
    kind = MLPClassifier if len(classes) else MLPRegressor
    model = kind(
        hidden_layer_sizes=tuple(widths[:-1]), activation=activation, solver="lbfgs", max_iter=1
    )
    rows = np.zeros((max(2, len(classes)), weights[0][0].shape[1]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(rows, classes if len(classes) else np.arange(len(rows)))
    shapes = [each.shape[::-1] for each in model.coefs_]
    assert shapes == [weight.shape for weight, _ in weights]
    model.coefs_ = [weight.T.copy() for weight, _ in weights]
    model.intercepts_ = [bias for _, bias in weights]
    for name in ("loss_", "best_loss_", "loss_curve_"):
        vars(model).pop(name, None)  # those of the zeros
    return model


def _voting(members: Sequence[Any], classes: NDArray, vote: str | None) -> Any:
    from sklearn.ensemble import VotingClassifier
    from sklearn.preprocessing import LabelEncoder

    named = [(str(number), each) for number, each in enumerate(members)]
    model = VotingClassifier(named, voting="soft" if vote == "softmax_mean" else "hard")
    model.estimators_, model.classes_ = list(members), classes
    model.le_ = LabelEncoder().fit(classes)
    return model
