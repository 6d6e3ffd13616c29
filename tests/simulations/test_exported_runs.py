"""A finished run has its card, and its model can be exported."""

import json
import re

from rich.console import Console

from simulations.config import compose_config
from simulations.run import run


def finished(folder, *overrides, **options):
    config = compose_config([*overrides, "progress=false", "nodes=3"])
    return run(config, folder, Console(quiet=True), **options)


def test_the_card_has_the_runs_own_figures_and_no_path(tmp_path):
    command = "gems-flwr run strategy=gems"
    result = finished(tmp_path, "strategy=gems", command=command)
    text = (tmp_path / "model_card.md").read_text()
    assert f"`accuracy` {result['accuracy']:.4g}" in text
    assert f"{result['bytes_up']:,} bytes up" in text
    assert command in text
    for node in json.loads((tmp_path / "partition.json").read_text())["nodes"]:
        counts = " · ".join(map(str, node["train"]))
        assert f"| `{node['name']}` | {sum(node['train'])} | {counts} |" in text
    assert str(tmp_path) not in text


def test_a_card_of_secure_sums_has_totals_alone(tmp_path):
    finished(tmp_path, "strategy=fedavg", "rounds=1", "secure=sum", "partition=quantity")
    text = (tmp_path / "model_card.md").read_text()
    nodes = json.loads((tmp_path / "partition.json").read_text())["nodes"]
    sizes = [sum(node["train"]) for node in nodes]
    assert f"3 nodes, {sum(sizes):,} examples" in text
    assert len(set(sizes)) > 1
    assert not any(re.search(rf"\| {size} \|", text) for size in sizes)


def test_noise_from_a_known_seed_is_not_sold_as_privacy(tmp_path):
    finished(tmp_path, "strategy=private_gems", "rounds=1")
    text = (tmp_path / "model_card.md").read_text()
    assert "Differential privacy of the sum: epsilon 1" in text
    assert "The noise came from the run's seed" in text
