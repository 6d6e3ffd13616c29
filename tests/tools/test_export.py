"""What is exported predicts as the model did, in onnxruntime."""

import sys

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from gems_flwr import RandomFilters, RandomFourier
from gems_flwr.errors import ModelError, NotInstalledError, OptionError
from gems_flwr.strategies.members import join_models
from gems_flwr.tools import export_model

SHAPE, SCALE = (1, 8, 8), 1 / 16
RAW = np.random.default_rng(0).integers(0, 17, size=(7, *SHAPE)).astype(np.float32)


def arrays_of(model):
    return {name: each.numpy() for name, each in model.state_dict().items()}


def random_weights(model, seed=0):
    """Weights large enough for predictions that differ from class to class."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.3)
    return model


def mlp(width=20):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def cnn():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))


NETWORKS = {
    "cnn": cnn,
    "filters": lambda: nn.Sequential(
        lift := RandomFilters(SHAPE, filters=16, seed=0), nn.Linear(lift.features, 10)
    ),
    "fourier": lambda: nn.Sequential(
        nn.Flatten(), lift := RandomFourier(64, 100, seed=0), nn.Linear(lift.features, 10)
    ),
}


def predicted(model, raw=RAW):
    with torch.no_grad():
        return torch.softmax(model(torch.from_numpy(raw) * SCALE), 1).numpy()


def run_onnx(path, inputs):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_outputs()]
    return dict(zip(names, session.run(None, {"input": inputs}), strict=True))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.onnx"


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_it_predicts_what_the_model_predicts_for_any_number_of_inputs(name, path):
    """Of raw features: the scale and the lift are in the file."""
    model, options = random_weights(NETWORKS[name]()), {"input_shape": SHAPE, "scale": SCALE}
    export_model(arrays_of(model), NETWORKS[name], path=path, **options)
    for count in (1, 7):
        got, expected = run_onnx(path, RAW[:count]), predicted(model, RAW[:count])
        assert np.abs(got["probabilities"] - expected).max() < 1e-5
        assert got["label"].tolist() == expected.argmax(1).tolist()


def test_hidden_layers_may_have_other_widths_than_the_app_builds(path):
    """Layer by layer GEMS gives 63 neurons where the app has 20."""
    model = random_weights(mlp(63))
    export_model(arrays_of(model), mlp, path=path, input_shape=SHAPE, scale=SCALE)
    assert np.abs(run_onnx(path, RAW)["probabilities"] - predicted(model)).max() < 1e-5


def test_the_file_has_the_scale_and_nothing_about_this_machine(path):
    layer = {"weight": np.eye(3, 4, dtype=np.float32), "bias": np.zeros(3, np.float32)}
    export_model(layer, path=path, scale=2.0)
    assert {each.key: each.value for each in onnx.load(path).metadata_props}["scale"] == "2.0"
    assert [p.name for p in path.parent.iterdir()] == ["model.onnx"]  # no second file with weights
    assert b".py" not in path.read_bytes()
    got = run_onnx(path, np.eye(4, dtype=np.float32)[:1])
    # softmax of (2, 0, 0)
    assert got["probabilities"][0, 0] == pytest.approx(np.exp(2) / (np.exp(2) + 2), abs=1e-6)


def test_of_several_models_one_is_chosen(path):
    joined = join_models({str(k): {"w": np.eye(2, 3), "b": np.array([0.0, k])} for k in range(3)})
    with pytest.raises(OptionError, match=r"no model 'model': .*\['0', '1', '2'\]"):
        export_model(joined, path=path)
    export_model(joined, path=path, member="2")
    assert run_onnx(path, np.zeros((1, 3), np.float32))["logits"].tolist() == [[0.0, 2.0]]


def test_one_output_is_a_number(path):
    layer = {"0": np.array([[1.0, -1.0]]), "1": np.array([0.5])}
    assert export_model(layer, path=path) == ("prediction",)
    inputs = np.array([[2.0, 0.0], [0.0, 2.0]], np.float32)
    assert run_onnx(path, inputs)["prediction"].tolist() == [2.5, -1.5]


# --- what does not fit ------------------------------------------------------------------------


def good():
    return {"weight": np.ones((2, 3), np.float32), "bias": np.zeros(2, np.float32)}


class Strange(nn.Linear):
    def forward(self, rows):
        return super().forward(rows) * len([r for r in rows if r.sum() > 0])


def test_what_does_not_fit_is_said_by_name(path):
    wrong = [
        (({"0.weight": good()["weight"]}, lambda: nn.Sequential(nn.Linear(3, 2))), {}, "0.bias"),
        (({"weight": np.array([[np.inf, 1]])},), {}, "'weight' has values that are not finite"),
        (({**good(), "bias": np.ones(5)},), {}, "more than a linear layer"),
        (({},), {}, "no model 'model'"),
        ((good(),), {"input_shape": (5,)}, r"does not map inputs shaped \(n, 5\)"),
        ((arrays_of(cnn()), cnn), {}, "say what shape"),
        ((good(), lambda: Strange(3, 2)), {"input_shape": (3,)}, "cannot be written as ONNX"),
    ]
    for arguments, options, message in wrong:
        with pytest.raises((ModelError, OptionError), match=message):
            export_model(*arguments, path=path, **options)
    assert not path.exists()


def test_a_missing_package_says_what_to_do(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx.reference", None)
    with pytest.raises(NotInstalledError, match=r"pip install 'gems-flwr\[export\]'"):
        export_model(good(), path=path)
