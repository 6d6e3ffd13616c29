"""Whole runs whose models travel packed: other backends, and Flower's own quickstart."""

import pytest
import torch
from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp
from helpers_examples import loaded, nodes_of, project
from rich.console import Console

from gems_flwr.client.compression_mod import compression_mod
from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.runtime.metered_grid import MeteredGrid
from gems_flwr.strategies.fedavg import FedAvg
from simulations.config import compose_config
from simulations.run import run


def result(folder, *overrides):
    common = ["partition=iid", "nodes=4", "train.batch_size=5", "progress=false"]
    config = compose_config([*common, "evaluate_every=100", *overrides])
    return run(config, folder / str(len(list(folder.iterdir()))), Console(quiet=True))


@pytest.mark.parametrize("form", ["float16", "int8", "int4"])
@pytest.mark.parametrize(
    "protocol",
    [
        ["strategy=dynamic", "strategy.delta=0.05"],
        ["strategy=periodic", "strategy.b=2"],
        ["strategy=periodic", "strategy.b=2", "strategy.fraction=0.5"],
    ],
    ids=["dynamic", "periodic", "fraction"],
)
def test_lockstep_is_the_same_run_as_with_messages(protocol, form, tmp_path):
    """Same decisions and losses up to rounding of sums; deflated, a few codes may differ."""
    common = [*protocol, "rounds=12", f"strategy.compress={form}"]
    slow = result(tmp_path, *common)
    quick = result(tmp_path, *common, "backend=lockstep")
    for key in ("cumulative_loss", "correct", "models_up", "models_down", "queries", "violations"):
        assert quick["details"][key] == pytest.approx(slow["details"][key], rel=1e-3), key
    assert quick["details"]["synchronisations"] == slow["details"]["synchronisations"]
    assert quick["bytes_up"] == pytest.approx(slow["bytes_up"], rel=2e-3)
    assert quick["bytes_down"] == pytest.approx(slow["bytes_down"], rel=2e-3)
    assert quick["accuracy"] == pytest.approx(slow["accuracy"], abs=0.01)


@pytest.mark.deep
@pytest.mark.parametrize("strategy", ["fedavg", "dynamic"])
def test_ray_gives_the_same_digits_as_in_process(strategy, tmp_path):
    """Nodes are told their models by processes that come and go, with their state in between.

    A grid of Ray's does not know its nodes' names: each tells it, ``name`` and a digit.
    """
    common = [f"strategy={strategy}", "rounds=4", "strategy.compress=int8"]
    one, other = result(tmp_path, *common), result(tmp_path, *common, "backend=ray")
    for key in ("accuracy", "loss", "rounds", "nodes_failed"):
        assert one[key] == other[key], key
    assert other["bytes_up"] == one["bytes_up"] + 4 * len("name0")


def quickstart(compress, folder, rounds=5):
    """Run the example as it is but for two lines: the mod, and where FedAvg comes from."""
    options = {"output": str(folder), "num-server-rounds": rounds}
    config = {**project("pytorch")["tool"]["flwr"]["app"]["config"], **options}
    accuracies = []
    with loaded("pytorch") as modules:
        client, server = modules.client_app, modules.server_app
        load_data, evaluate = client.load_data, server.global_evaluate

        def seeded(partition_id, *more):
            torch.manual_seed(partition_id)
            return load_data(partition_id, *more)

        def listening(server_round, arrays):
            metrics = evaluate(server_round, arrays)
            accuracies.append(metrics["accuracy"])
            return metrics

        client.load_data, server.global_evaluate = seeded, listening
        app = ClientApp(mods=[compression_mod()])
        app.train()(client.train)
        app.evaluate()(client.evaluate)
        server.FedAvg = lambda **made: FedAvg(compress=compress, **made)
        grid = MeteredGrid(InProcessGrid(app, nodes_of("pytorch"), config))
        server.app(grid, Context(1, 0, {}, RecordDict(), config))
    return accuracies, grid.total


def test_flowers_quickstart_learns_as_much_with_a_fraction_of_the_bytes(tmp_path):
    """Its handlers know nothing of it. 5 rounds; the first model goes down in half precision."""
    plain, whole = quickstart("float32", tmp_path / "plain")
    for form, most in (("int8", 0.35), ("int4", 0.25)):
        packed, traffic = quickstart(form, tmp_path / form)
        assert packed[-1] == pytest.approx(plain[-1], abs=0.03)
        assert traffic.bytes_up < most * whole.bytes_up
        assert traffic.bytes_down < most * whole.bytes_down
    assert plain[-1] > plain[0] + 0.2
