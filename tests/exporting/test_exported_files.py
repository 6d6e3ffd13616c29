"""What is exported predicts as the run did: ONNX by onnxruntime, torch without this library."""

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

from gems_flwr import ModelError, OptionError, export_model, join_models
from gems_flwr.__main__ import main
from gems_flwr.targets import Classes, Numbers
from simulations import driving_networks, models
from simulations.data.examples import Examples
from simulations.data.images import digits
from simulations.experiment.training import predictions

CLASSES = Classes()


@pytest.fixture(scope="module")
def data():
    return digits(seed=0)


def arrays_of(model):
    return {name: each.numpy() for name, each in model.state_dict().items()}


def random_weights(model, seed=0):
    """Weights large enough for predictions that differ from class to class."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.3)
    return model


SHAPE = {"input_shape": (1, 8, 8), "classes": 10}
NETWORKS = {
    "logistic": lambda: models.logistic(**SHAPE),
    "mlp": lambda: models.mlp(**SHAPE),
    "cnn": lambda: models.cnn(**SHAPE),
    "random_filters": lambda: models.random_filters(**SHAPE, filters=16),
    "random_fourier": lambda: models.random_fourier(**SHAPE, outputs=100, keep_inputs=True),
}


def run_onnx(data, inputs):
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_outputs()]
    return dict(zip(names, session.run(None, {"input": inputs}), strict=True))


def as_the_run(model, features, scale, target=CLASSES):
    labels = np.zeros(len(features), dtype=np.int64 if target is CLASSES else np.float32)
    return predictions(model, Examples(features, labels), scale=scale, target=target)


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_onnx_and_torch_predict_what_the_run_predicts_for_any_number_of_inputs(name, data):
    """The run's own predictions, of raw features: the scale and the lift are in the files."""
    model = random_weights(NETWORKS[name]())
    options = {"input_shape": (1, 8, 8), "scale": data.scale, "classes": 10}
    made = export_model(arrays_of(model), NETWORKS[name], to="onnx", **options)
    program = export_model(arrays_of(model), NETWORKS[name], to="torch", **options).model.module()
    file = made.model.SerializeToString()
    for count in (1, 7):
        raw = data.test.features[:count]
        expected = as_the_run(model, raw, data.scale)
        got = run_onnx(file, raw.astype(np.float32))
        assert np.abs(got["probabilities"] - expected).max() < 1e-5
        assert got["label"].tolist() == expected.argmax(1).tolist()
        logits, probabilities, label = program(torch.from_numpy(raw.astype(np.float32)))
        assert np.abs(probabilities.numpy() - expected).max() < 1e-5
        assert np.abs(got["logits"] - logits.numpy()).max() < 1e-4
        assert label.tolist() == got["label"].tolist()


@pytest.mark.slow
def test_a_number_comes_out_as_the_run_predicts_it():
    def net():
        return driving_networks.pilotnet(input_shape=(1, 64, 64), classes=0)

    model = net()
    made = export_model(arrays_of(model), net, to="onnx", input_shape=(1, 64, 64), classes=0)
    raw = np.random.default_rng(0).random((7, 1, 64, 64), dtype=np.float32)
    got = run_onnx(made.model.SerializeToString(), raw)
    assert list(got) == ["prediction"]
    expected = as_the_run(model, raw, 1.0, Numbers())
    assert got["prediction"].shape == (7,)
    assert np.ptp(expected) > 1e-4
    assert np.abs(got["prediction"] - expected).max() < 1e-5


def test_hidden_layers_may_have_other_widths_than_the_app_builds(data):
    """Layer by layer GEMS gives 63 neurons where the config says 50."""
    model = random_weights(models.mlp(**SHAPE, hidden=[63]))
    made = export_model(
        arrays_of(model), lambda: models.mlp(**SHAPE), to="torch", input_shape=(1, 8, 8), scale=0.1
    )
    raw = data.test.features[:7]
    _, got, _ = made.model.module()(torch.from_numpy(raw.astype(np.float32)))
    assert np.abs(got.numpy() - as_the_run(model, raw, 0.1)).max() < 1e-5


@pytest.mark.slow
def test_the_torch_file_loads_where_this_library_is_not(tmp_path, data):
    model = random_weights(NETWORKS["random_filters"]())
    path = tmp_path / "model.pt2"
    options = {"input_shape": (1, 8, 8), "scale": data.scale, "source": {"run": "mine"}}
    export_model(arrays_of(model), NETWORKS["random_filters"], to="torch", path=path, **options)
    raw = data.test.features[:7].astype(np.float32)
    np.save(tmp_path / "raw.npy", raw)
    code = """
import json, sys
sys.modules["gems_flwr"] = sys.modules["simulations"] = None  # importing them fails
import numpy, torch
extra = {"source.json": ""}
program = torch.export.load(sys.argv[1], extra_files=extra).module()
raw = torch.from_numpy(numpy.load(sys.argv[2]))
assert json.loads(extra["source.json"])["run"] == "mine"
assert not torch.allclose(program(raw)[1][:1], program(raw)[1][1:2])
print(json.dumps([program(raw[:n])[1].tolist() for n in (1, 7)]))
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, path, tmp_path / "raw.npy"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    one, seven = json.loads(done.stdout)
    expected = as_the_run(model, raw, data.scale)
    assert np.abs(seven - expected).max() < 1e-5
    assert np.abs(one - expected[:1]).max() < 1e-5


def test_the_onnx_file_says_where_it_comes_from_and_nothing_about_this_machine(tmp_path):
    layer = {"weight": np.eye(3, 4, dtype=np.float32), "bias": np.zeros(3, np.float32)}
    path = tmp_path / "model.onnx"
    source = {"run": "north", "strategy": "Gems"}
    export_model(layer, to="onnx", path=path, scale=2.0, classes=["a", "b", "c"], source=source)
    read = onnx.load(path)
    told = {each.key: each.value for each in read.metadata_props}
    assert told["run"] == "north"
    assert told["classes"] == "a, b, c"
    assert told["torch"] == torch.__version__.partition("+")[0]
    assert read.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]  # no second file with weights
    assert b".py" not in path.read_bytes()
    got = run_onnx(path.read_bytes(), np.eye(4, dtype=np.float32)[:1])
    # softmax of (2, 0, 0)
    assert got["probabilities"][0, 0] == pytest.approx(np.exp(2) / (np.exp(2) + 2), abs=1e-6)


def test_an_ensemble_votes_as_its_strategy_does(data):
    """The strategy's own arithmetic; of three members no vote of 40 examples may tie here."""
    from gems_flwr import scoring

    nets = [random_weights(models.mlp(**SHAPE, hidden=[width]), width) for width in (5, 6, 7)]
    joined = join_models({str(k): arrays_of(net) for k, net in enumerate(nets)})
    raw = data.test.features[:40]
    members = [as_the_run(net, raw, data.scale) for net in nets]
    options = {"input_shape": (1, 8, 8), "scale": data.scale}
    build = lambda: models.mlp(**SHAPE)  # noqa: E731
    inputs = torch.from_numpy(raw.astype(np.float32))
    soft = export_model(joined, build, to="torch", vote="softmax_mean", **options)
    mean, label = soft.model.module()(inputs)
    assert np.abs(mean.numpy() - scoring.softmax_mean(members)).max() < 1e-5
    hard = export_model(joined, build, to="torch", vote="majority", **options)
    votes, label = hard.model.module()(inputs)
    clear = votes.max(1).values.numpy() > 0.5
    expected = scoring.majority_vote(members, np.random.default_rng(0))
    assert clear.sum() > 10
    assert (label.numpy() == expected)[clear].all()
    with pytest.raises(OptionError, match=r"3 models \(0, 1, 2\): choose one"):
        export_model(joined, build, to="torch", **options)
    one = export_model(joined, build, to="torch", member="1", **options)
    assert np.abs(one.model.module()(inputs)[1].numpy() - members[1]).max() < 1e-5


def test_one_output_is_a_number_or_two_classes_and_has_to_be_told():
    layer = {"0": np.array([[1.0, -1.0]]), "1": np.array([0.5])}
    with pytest.raises(OptionError, match="say what the output means"):
        export_model(layer, to="torch")
    inputs = torch.tensor([[2.0, 0.0], [0.0, 2.0]])
    [number] = export_model(layer, to="torch", classes=0).model.module()(inputs)
    assert number.tolist() == [2.5, -1.5]
    made = export_model(layer, to="torch", classes=["no", "yes"])
    _, probabilities, label = made.model.module()(inputs)
    assert label.tolist() == [1, 0]
    assert probabilities[:, 1].numpy() == pytest.approx(1 / (1 + np.exp([-2.5, 1.5])), abs=1e-6)


# --- what does not fit ------------------------------------------------------------------------


def good():
    return {"weight": np.ones((2, 3), np.float32), "bias": np.zeros(2, np.float32)}


def test_what_does_not_fit_is_said_by_name():
    net = lambda: nn.Sequential(nn.Linear(3, 2))  # noqa: E731
    with pytest.raises(ModelError, match=r"missing \['0.bias'\]"):
        export_model({"0.weight": good()["weight"]}, net, to="torch")
    with pytest.raises(ModelError, match="'weight' has 1 values that are not finite"):
        export_model({**good(), "weight": np.array([[np.nan, 1.0]])}, to="torch")
    with pytest.raises(ModelError, match="'weight' is of type int64, the model's is"):
        export_model(
            {**good(), "weight": np.ones((2, 3), int)}, lambda: nn.Linear(3, 2), to="torch"
        )
    with pytest.raises(ModelError, match=r"does not take inputs shaped \(n, 5\)"):
        export_model(good(), to="torch", input_shape=(5,))
    with pytest.raises(ModelError, match="2 outputs for 3 classes"):
        export_model(good(), to="torch", classes=["a", "b", "c"])
    with pytest.raises(OptionError, match="two different names"):
        export_model(good(), to="torch", classes=["a", "a"])
    with pytest.raises(OptionError, match="more than a linear layer"):
        export_model({**good(), "more": np.ones((2, 2))}, to="torch")
    with pytest.raises(OptionError, match="say what shape"):
        export_model(arrays_of(nn.Conv2d(1, 2, 3)), lambda: nn.Conv2d(1, 2, 3), to="torch")
    with pytest.raises(ModelError, match="scale: expected a finite number other than 0"):
        export_model(good(), to="torch", scale=0)

    class Strange(nn.Linear):
        def forward(self, rows):
            return super().forward(rows) * len([r for r in rows if r.sum() > 0])

    with pytest.raises(ModelError, match=r"torch\.export cannot trace the model"):
        export_model(good(), lambda: Strange(3, 2), to="torch")


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"no model at all", "is not a safetensors file"),
        (b"\xff" * 64, "is not a safetensors file"),
        (
            {"weight": np.array([[np.inf, 1.0], [0, 1]])},
            "'weight' has 1 values that are not finite",
        ),
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
    said = capsys.readouterr().err
    assert message in said
    assert len(said.strip().splitlines()) == 1
    assert [each.name for each in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_missing_file_and_a_missing_package_say_what_to_do(tmp_path, capsys, monkeypatch):
    assert main(["export", str(tmp_path / "no.safetensors"), "--to", "torch"]) == 2
    assert "no.safetensors" in capsys.readouterr().err
    save_file(good(), tmp_path / "model.safetensors")
    for to, package in (("onnx", "onnxscript"), ("sklearn", "skops")):
        monkeypatch.setattr(
            "importlib.util.find_spec",
            lambda n, gone=package, find=importlib.util.find_spec: None if n == gone else find(n),
        )
        assert main(["export", str(tmp_path), "--to", to]) == 2
        assert "pip install 'gems-flwr[export]'" in capsys.readouterr().err
        monkeypatch.undo()


def test_a_folder_of_somebody_elses_names_no_code_of_its_own_choice(tmp_path, capsys):
    """``model.json`` is data: what it names must be a function that we define."""
    save_file(good(), tmp_path / "model.safetensors")
    model = {"input_shape": [3], "classes": 2, "scale": 1.0}
    for target, message in (
        ("os.system", "none of this project's functions"),
        ("simulations.run.os.system", "no network"),
        ("simulations.run.leave", "does not build a network"),
        ("simulations.models.nn", "no function of simulations.models"),
        ("simulations.nothing.here", "no network"),
    ):
        models = {"model": {**model, "network": {"_target_": target}}}
        text = json.dumps({"format": 1, "models": models, "together": None, "source": {}})
        (tmp_path / "model.json").write_text(text)
        assert main(["export", str(tmp_path), "--to", "torch"]) == 2
        assert message in capsys.readouterr().err
    for text in ("[]", "{", '{"format": 1, "models": {"model": {}}}', '{"format": 2}'):
        (tmp_path / "model.json").write_text(text)
        assert main(["export", str(tmp_path), "--to", "torch"]) == 2
        assert "is not what a run writes" in capsys.readouterr().err


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
        ("apptask:Two", "cannot be called without arguments"),
        ("apptask:number", "expected a network"),
    ):
        assert main([*words, "--model", name]) == 2
        assert message in capsys.readouterr().err
    assert main([*words[:-1], "1,x", "--model", "apptask:Net"]) == 2
    assert "expected numbers like 1,28,28" in capsys.readouterr().err
