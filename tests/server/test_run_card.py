"""Every run that has a folder leaves a model card there, and nobody who has left is in it."""

import re

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from safetensors.numpy import load_file

from gems_flwr import (
    CardModel,
    Cone,
    FedAvg,
    Gems,
    InProcessGrid,
    SecureSum,
    fault_reply_mod,
    good_enough_mod,
    secure_sum_mod,
    write_model_card,
)
from gems_flwr.__main__ import main
from gems_flwr.disk.files import replacing
from gems_flwr.errors import DiskError, RoundFailedError

INITIAL = ArrayRecord({"weight": torch.zeros(3, 2), "bias": torch.zeros(3)})


def averaging_app(*mods, broken=()):
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message, context):
        node = context.node_config["partition-id"]
        if node in broken:
            raise ValueError("<b>no | data</b>")
        metrics = MetricRecord({"num-examples": 100 + node, "loss": 1.0})
        records = {"arrays": message.content["arrays"], "metrics": metrics}
        return Message(RecordDict(records), reply_to=message)

    return app


def data(context):
    rng = np.random.default_rng(context.node_config["partition-id"])
    labels = np.arange(120) % 3
    inputs = rng.normal(size=(120, 2)) + 3 * np.stack([labels == 1, labels == 2], axis=1)
    return (inputs[:90], labels[:90]), (inputs[90:], labels[90:])


def spaces_grid(nodes=3):
    app = ClientApp(mods=[good_enough_mod(data)])

    @app.train()
    def train(message, context):
        raise NotImplementedError

    return InProcessGrid(app, nodes=nodes)


def score(server_round, arrays):
    return MetricRecord({"accuracy": 0.125})


def test_the_card_says_what_the_run_was(tmp_path):
    """Figures come from the result: bytes, rounds, counts as told, who failed."""
    grid = InProcessGrid(averaging_app(broken=[2]), nodes=3)
    strategy = FedAvg(fraction_evaluate=0.0, checkpoint_dir=tmp_path, seed=7)
    result = strategy.start(grid, INITIAL, num_rounds=2, evaluate_fn=score)
    text = (tmp_path / "model_card.md").read_text()
    assert "`accuracy` 0.125" in text
    assert "| `0` | 100 |" in text
    assert "| `1` | 101 |" in text
    assert "2 nodes, 201 examples" in text
    assert f"| bytes up | {result.traffic.bytes_up:,}; " in text
    assert f"| bytes down | {result.traffic.bytes_down:,}; " in text
    assert "| rounds | 2 |" in text
    assert "| seed | 7 |" in text
    assert "| nodes were asked for | `train` × 2 |" in text
    assert re.search(r"\| `2` \| `2 times: .*<b>no ¦ data</b>.*` \|", text)
    assert "Secure sums: off" in text
    assert str(tmp_path) not in text


def test_a_verdict_and_scores_stand_in_the_card_of_spaces(tmp_path):
    strategy = Gems(space=Cone(rank=2), verify=True, checkpoint_dir=tmp_path)
    result = strategy.start(spaces_grid(), INITIAL)
    text = (tmp_path / "model_card.md").read_text()
    assert result.details["status"] == "feasible"
    assert "good enough for every node" in text
    for node, value in result.details["node_scores"].items():
        assert f"| `{node}` | {value:.4f} |" in text
        assert f"| `{node}` | 90 |" in text
    assert "What a space reveals" in text
    assert "none of this library's was asked for" in text


def test_noise_that_nodes_were_asked_for_is_told(tmp_path):
    space = Cone(rank="full", dp_epsilon=5.0, dp_delta=1e-4)
    strategy = Gems(space=space, checkpoint_dir=tmp_path)
    strategy.start(spaces_grid(), INITIAL)
    text = (tmp_path / "model_card.md").read_text()
    assert "epsilon 5, delta 0.0001" in text
    assert "from the run's seed" not in text


def test_secure_sums_leave_no_number_of_a_single_node(tmp_path):
    grid = InProcessGrid(averaging_app(secure_sum_mod()), nodes=3)
    strategy = FedAvg(fraction_evaluate=0.0, checkpoint_dir=tmp_path, secure=SecureSum())
    strategy.start(grid, INITIAL, num_rounds=1)
    text = (tmp_path / "model_card.md").read_text()
    assert "Secure sums: on" in text
    assert "sums alone were seen" in text
    assert not re.search(r"\b10[0-2]\b", text)


def test_an_app_adds_what_only_it_knows(tmp_path):
    strategy = FedAvg(fraction_evaluate=0.0)
    grid = InProcessGrid(averaging_app(), nodes=2)
    result = strategy.start(grid, INITIAL, num_rounds=1)
    model = CardModel({"weight": (3, 2)}, input_shape=(2,), classes=3)
    card = write_model_card(
        result,
        tmp_path,
        strategy=strategy,
        title="triage",
        data="wards",
        models={"model": model},
        command="flwr run . hospital",
    )
    text = (tmp_path / "model_card.md").read_text()
    assert text == card.to_markdown()
    assert text.count("# `triage`") == 1
    assert "| shape of one example | (2,) |" in text
    assert "flwr run . hospital" in text
    # Without the strategy nobody knows how nodes were protected, and the card does not guess.
    unknown = write_model_card(result, tmp_path / "other.md").to_markdown()
    assert "not known here" in unknown
    assert "none of this library's" not in unknown


def test_an_old_card_does_not_outlive_the_beginning_of_a_new_run(tmp_path):
    (tmp_path / "model_card.md").write_text("of another model")
    strategy = FedAvg(fraction_evaluate=0.0, checkpoint_dir=tmp_path)
    grid = InProcessGrid(averaging_app(broken=[0, 1]), nodes=2)
    with pytest.raises(RoundFailedError):
        strategy.start(grid, INITIAL, num_rounds=1)
    assert not (tmp_path / "model_card.md").exists()


def test_a_disk_that_takes_no_card_does_not_take_the_result(tmp_path, monkeypatch):
    def full(path, *arguments, **options):
        if path.name == "model_card.md":
            raise DiskError("the disk is full")
        return replacing(path, *arguments, **options)

    monkeypatch.setattr("gems_flwr.disk.files.replacing", full)
    strategy = FedAvg(fraction_evaluate=0.0, checkpoint_dir=tmp_path)
    grid = InProcessGrid(averaging_app(), nodes=2)
    assert strategy.start(grid, INITIAL, num_rounds=1).stopped_because == "all rounds are done"
    assert not (tmp_path / "model_card.md").exists()


def test_after_a_node_has_left_the_card_is_of_the_others_model(tmp_path):
    """Its name stands where it says that it left, and nowhere else; old scores are gone."""
    folder, output = tmp_path / "run", tmp_path / "m.safetensors"
    strategy = Gems(space=Cone(rank=2), verify=True, checkpoint_dir=folder)
    strategy.start(spaces_grid(), INITIAL, evaluate_fn=score)
    before = (folder / "model_card.md").read_text()
    assert "| `1` | 90 |" in before
    assert "0.125" in before
    assert main(["aggregate", "--run", str(folder), "--remove", "1", "-o", str(output)]) == 0
    after = (folder / "model_card.md").read_text()
    assert "| `0` | 90 |" in after
    assert "2 nodes, 180 examples" in after
    [line] = [line for line in after.splitlines() if "`1`" in line]
    assert "nothing of it is in the model" in line
    assert "0.125" not in after
    assert "On the server's test data: not measured" in after
    assert "On single nodes' own data: not measured" in after
    assert load_file(output)["weight"].shape == (3, 2)


def test_a_node_that_leaves_while_the_run_is_under_way_is_named_as_such_alone(tmp_path):
    """It has trained in round 1 and told its 101 examples before it leaves in round 2."""
    flag = tmp_path / "leave"
    app = averaging_app(fault_reply_mod)

    def leaving(message, context):
        reply = app(message, context)
        if context.node_config["partition-id"] == 1:
            flag.touch()
        return reply

    configs = [{"partition-id": node} for node in range(3)]
    configs[1]["withdraw"] = str(flag)
    strategy = FedAvg(fraction_evaluate=0.0, checkpoint_dir=tmp_path / "run")
    strategy.start(InProcessGrid(leaving, configs), INITIAL, num_rounds=2)
    text = (tmp_path / "run" / "model_card.md").read_text()
    [line] = [line for line in text.splitlines() if "`1`" in line]
    assert "what it has sent so far is in the model" in line
    assert "2 nodes, 202 examples" in text
    assert "101" not in text
