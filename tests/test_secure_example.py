"""Somebody else's app with the lines of secure sums: the model that it learns without them."""

import shutil

import helpers_examples
import pytest
import torch
from helpers_examples import EXAMPLES, play

CHANGES = {
    "client_app.py": {
        "from flwr.clientapp import ClientApp\n": (
            "from flwr.clientapp import ClientApp\nfrom gems_flwr import secure_sum_mod\n"
        ),
        "app = ClientApp()": "app = ClientApp(mods=[secure_sum_mod(only_sums=True)])",
    },
    "server_app.py": {
        "from flwr.serverapp.strategy import FedAvg": "from gems_flwr import FedAvg, SecureSum",
        "FedAvg(fraction_evaluate=0.5)": "FedAvg(fraction_evaluate=0.5, secure=SecureSum())",
    },
}


@pytest.mark.slow
def test_flowers_quickstart_learns_the_same_model_under_masks(tmp_path, monkeypatch):
    """Its own handlers, with batch sizes, a learning rate in the config, and metrics of both kinds.

    Nodes answer with masked sums alone, so whatever else was asked for would fail the round.
    """
    for name in ("pytorch", "pytorch_import_only"):
        shutil.copytree(EXAMPLES / name, tmp_path / "apps" / name)
    monkeypatch.setattr(helpers_examples, "EXAMPLES", tmp_path / "apps")
    plain = play("pytorch_import_only", tmp_path / "plain", **{"num-server-rounds": 1})
    for module, changes in CHANGES.items():
        path = tmp_path / "apps" / "pytorch" / "quickstart" / module
        text = path.read_text()
        for before, after in changes.items():
            assert before in text
            text = text.replace(before, after)
        path.write_text(text)
    secure = play("pytorch", tmp_path / "secure", **{"num-server-rounds": 1})
    one, other = (
        torch.load(tmp_path / name / "final_model.pt", weights_only=True)
        for name in ("plain", "secure")
    )
    # After one round: training on would make more of the rounding to the grid.
    assert max(float((one[key] - other[key]).abs().max()) for key in one) < 1e-5
    assert secure.accuracy == pytest.approx(plain.accuracy, abs=0.01)
    assert secure.traffic.bytes_up < 2 * plain.traffic.bytes_up
