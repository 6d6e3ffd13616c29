"""What is exported predicts as the model did: ONNX by onnxruntime, torch without this library."""

import importlib.util
import json
import subprocess
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from safetensors.numpy import save_file
from torch import nn

from gems_flwr import RandomFilters, RandomFourier
from gems_flwr.__main__ import main
from gems_flwr.errors import ModelError, OptionError
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


def run_onnx(data, inputs):
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_outputs()]
    return dict(zip(names, session.run(None, {"input": inputs}), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_onnx_and_torch_predict_what_the_model_predicts_for_any_number_of_inputs(name):
    """Of raw features: the scale and the lift are in the files."""
    model, options = random_weights(NETWORKS[name]()), {"input_shape": SHAPE, "scale": SCALE}
    arrays = arrays_of(model)
    file = export_model(arrays, NETWORKS[name], to="onnx", **options).model.SerializeToString()
    program = export_model(arrays, NETWORKS[name], to="torch", **options).model.module()
    for count in (1, 7):
        got, expected = run_onnx(file, RAW[:count]), predicted(model, RAW[:count])
        assert np.abs(got["probabilities"] - expected).max() < 1e-5
        assert got["label"].tolist() == expected.argmax(1).tolist()
        logits, probabilities, label = program(torch.from_numpy(RAW[:count]))
        assert np.abs(probabilities.numpy() - expected).max() < 1e-5
        assert np.abs(got["logits"] - logits.numpy()).max() < 1e-4
        assert label.tolist() == got["label"].tolist()


def test_hidden_layers_may_have_other_widths_than_the_app_builds():
    """Layer by layer GEMS gives 63 neurons where the app has 20."""
    model = random_weights(mlp(63))
    made = export_model(arrays_of(model), mlp, to="torch", input_shape=SHAPE, scale=SCALE)
    _, got, _ = made.model.module()(torch.from_numpy(RAW))
    assert np.abs(got.numpy() - predicted(model)).max() < 1e-5


@pytest.mark.slow
def test_the_torch_file_loads_where_this_library_is_not(tmp_path):
    model = random_weights(NETWORKS["filters"]())
    path, options = tmp_path / "model.pt2", {"input_shape": SHAPE, "scale": SCALE}
    export_model(arrays_of(model), NETWORKS["filters"], to="torch", path=path, **options)
    np.save(tmp_path / "raw.npy", RAW)
    code = """
import json, sys
sys.modules["gems_flwr"] = None  # importing it fails
import numpy, torch
program = torch.export.load(sys.argv[1]).module()
print(json.dumps(program(torch.from_numpy(numpy.load(sys.argv[2])))[1].tolist()))
"""
    words = [sys.executable, "-P", "-c", code, path, tmp_path / "raw.npy"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert np.abs(json.loads(done.stdout) - predicted(model)).max() < 1e-5


def test_the_onnx_file_has_scale_and_classes_and_nothing_about_this_machine(tmp_path):
    layer = {"weight": np.eye(3, 4, dtype=np.float32), "bias": np.zeros(3, np.float32)}
    path = tmp_path / "model.onnx"
    export_model(layer, to="onnx", path=path, scale=2.0, classes=["a", "b", "c"])
    facts = {each.key: each.value for each in onnx.load(path).metadata_props}
    assert (facts["scale"], facts["classes"]) == ("2.0", "a, b, c")
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]  # no second file with weights
    assert b".py" not in path.read_bytes()
    got = run_onnx(path.read_bytes(), np.eye(4, dtype=np.float32)[:1])
    # softmax of (2, 0, 0)
    assert got["probabilities"][0, 0] == pytest.approx(np.exp(2) / (np.exp(2) + 2), abs=1e-6)


def test_of_several_models_one_is_chosen():
    joined = join_models({str(k): {"w": np.eye(2, 3), "b": np.array([0.0, k])} for k in range(3)})
    with pytest.raises(OptionError, match=r"3 models \(0, 1, 2\): choose one"):
        export_model(joined, to="torch")
    with pytest.raises(OptionError, match="no model 'x'"):
        export_model(joined, to="torch", member="x")
    one = export_model(joined, to="torch", member="2").model.module()(torch.zeros(1, 3))
    assert one[0].tolist() == [[0.0, 2.0]]


def test_one_output_is_a_number_or_two_classes_and_has_to_be_said():
    layer = {"0": np.array([[1.0, -1.0]]), "1": np.array([0.5])}
    with pytest.raises(OptionError, match="say what the output means"):
        export_model(layer, to="torch")
    inputs = torch.tensor([[2.0, 0.0], [0.0, 2.0]])
    [number] = export_model(layer, to="torch", classes=0).model.module()(inputs)
    assert number.tolist() == [2.5, -1.5]
    _, probabilities, label = export_model(layer, to="torch", classes=["no", "yes"]).model.module()(
        inputs
    )
    assert label.tolist() == [1, 0]
    assert probabilities[:, 1].numpy() == pytest.approx(1 / (1 + np.exp([-2.5, 1.5])), abs=1e-6)


# --- what does not fit ------------------------------------------------------------------------


def good():
    return {"weight": np.ones((2, 3), np.float32), "bias": np.zeros(2, np.float32)}


class Strange(nn.Linear):
    def forward(self, rows):
        return super().forward(rows) * len([r for r in rows if r.sum() > 0])


def test_what_does_not_fit_is_said_by_name():
    wrong = [
        (({"0.weight": good()["weight"]}, lambda: nn.Sequential(nn.Linear(3, 2))), {}, "0.bias"),
        (({**good(), "weight": np.ones((2, 3), int)}, lambda: nn.Linear(3, 2)), {}, "type int64"),
        ((good(),), {"input_shape": (5,)}, r"does not take inputs shaped \(n, 5\)"),
        ((good(),), {"classes": ["a", "b", "c"]}, "2 outputs for 3 classes"),
        ((good(),), {"classes": ["a", "a"]}, "two different names"),
        ((arrays_of(cnn()), cnn), {}, "say what shape"),
        ((good(),), {"scale": 0}, "scale: expected a finite number other than 0"),
        (
            (good(), lambda: Strange(3, 2)),
            {"input_shape": (3,)},
            r"torch\.export cannot trace the model",
        ),
        ((good(),), {"to": "pickle"}, "to: expected one of"),
    ]
    for arguments, options, message in wrong:
        with pytest.raises((ModelError, OptionError), match=message):
            export_model(*arguments, **{"to": "torch", **options})


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"no model at all", "is not a safetensors file"),
        (b"\xff" * 64, "is not a safetensors file"),
        ({"weight": np.array([[np.inf, 1.0], [0, 1]])}, "'weight' has 1 values that are not"),
        ({"weight": np.ones((2, 3), np.int64)}, "more than a linear layer"),
        ({"weight": np.ones((2, 3)), "bias": np.ones(5)}, "more than a linear layer"),
        ({}, "no arrays"),
    ],
    ids=["text", "bytes", "infinite", "integers", "sizes", "empty"],
)
def test_a_hostile_file_ends_in_one_line_and_status_2(contents, message, tmp_path, capsys):
    path = tmp_path / "model.safetensors"
    if isinstance(contents, bytes):
        path.write_bytes(contents)
    else:
        save_file(contents, path)
    assert main(["export", str(path), "--to", "torch"]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert len(printed.strip().splitlines()) == 1
    assert [each.name for each in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_missing_file_and_a_missing_package_say_what_to_do(tmp_path, capsys, monkeypatch):
    assert main(["export", str(tmp_path / "no.safetensors"), "--to", "torch"]) == 2
    assert "no.safetensors" in capsys.readouterr().err
    save_file(good(), tmp_path / "model.safetensors")
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda n: None if n == "onnxscript" else find(n)
    )
    assert main(["export", str(tmp_path), "--to", "onnx"]) == 2
    assert "pip install 'gems-flwr[export]'" in capsys.readouterr().err


def test_the_network_of_ones_own_app_is_named_by_module(tmp_path, capsys, monkeypatch):
    (tmp_path / "apptask.py").write_text(
        "from torch import nn\n"
        "def Net():\n    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))\n"
        "def Two(width):\n    return None\n"
        "number = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "apptask", raising=False)
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))
    save_file(arrays_of(net), "model.safetensors")
    words = ["export", "model.safetensors", "--to", "torch", "--input-shape", "1,4,4"]
    assert main([*words, "--model", "apptask:Net", "--scale", "0.5", "--classes", "a,b,c"]) == 0
    assert "outputs logits, probabilities, label" in capsys.readouterr().out
    raw = torch.rand(3, 1, 4, 4)
    logits = torch.export.load("model.pt2").module()(raw)[0]
    assert torch.allclose(logits, net(raw * 0.5), atol=1e-6)
    for name, message in (
        ("apptask", "expected module:name"),
        ("apptask:No", "has no attribute 'No'"),
        ("nowhere:Net", "No module named 'nowhere'"),
        ("apptask:Two", "expected a network, or a function"),
        ("apptask:number", "not callable"),
    ):
        assert main([*words, "--model", name]) == 2
        assert message in capsys.readouterr().err
