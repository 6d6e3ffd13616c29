"""Flower's simulation engine: the numbers of the in-process backend, also on a Ray cluster."""

import pytest
from helpers_cluster import free_ports, two_machines
from rich.console import Console

from simulations.backends import launch
from simulations.config import BackendConfig, compose_config
from simulations.run import run


@pytest.fixture(scope="module")
def cluster():
    with two_machines() as (address, _):
        yield address


def both(folder, *overrides, **options):
    """Return the result of a run on Ray and of the same one in this process."""
    results = []
    for backend in ([f"backend.{k}={v}" for k, v in options.items()] + ["backend=ray"], []):
        words = ["progress=false", "nodes=4", *overrides, *backend]
        results.append(run(compose_config(words), folder / str(len(results)), Console(quiet=True)))
    return results


@pytest.mark.deep
@pytest.mark.parametrize(
    "overrides",
    [
        ["model=mlp", "rounds=2", "strategy.fraction_train=0.6"],
        ["strategy=gems", "strategy/space=ball", "train.epochs=3", "strategy.verify=true"],
        ["strategy=gems", "strategy.space.rank=5", "strategy.refine=2"],
        ["strategy=fedavg", "rounds=3", "strategy.compress=int8"],
        ["strategy=dynamic", "strategy.delta=0.05", "rounds=6", "train.optimizer=adam"],
    ],
    ids=" ".join,
)
def test_ray_gives_the_same_digits_as_in_process(tmp_path, overrides):
    """Nodes live in processes that come and go, with their state kept in between.

    A grid of Ray's does not know its nodes' names: it asks them, once, for some bytes.
    """
    ray, here = both(tmp_path, *overrides)
    for key in ("accuracy", "loss", "rounds", "nodes_failed"):
        assert ray[key] == here[key], key
    for key in ("cumulative_loss", "synchronisations", "models_up"):
        assert ray["details"].get(key) == here["details"].get(key)
    assert here["bytes_up"] <= ray["bytes_up"] <= here["bytes_up"] + 200


@pytest.mark.deep
def test_an_error_in_the_server_on_ray_reaches_the_caller():
    config = compose_config(["backend=ray", "nodes=2"])

    def fail(grid):
        raise LookupError("nothing to serve")

    with pytest.raises(LookupError, match="nothing to serve"):
        launch.run_on_backend(config, fail)


def machines_of(address):
    """Return the machines that live, asked of the cluster itself."""
    import ray

    ray.init(address=address, logging_level="ERROR", log_to_driver=False)
    try:
        return {each["NodeID"] for each in ray.nodes() if each["Alive"]}
    finally:
        ray.shutdown()


@pytest.mark.deep
def test_a_run_on_a_cluster_has_the_same_numbers_and_leaves_it_running(cluster, tmp_path):
    ray, here = both(tmp_path, "rounds=2", address=cluster)
    assert (ray["accuracy"], ray["loss"]) == (here["accuracy"], here["loss"])
    assert len(machines_of(cluster)) == 2


@pytest.mark.deep
def test_an_address_where_nothing_listens_is_named():
    (port,) = free_ports(1)
    backend = BackendConfig(kind="ray", address=f"127.0.0.2:{port}")
    with pytest.raises(
        launch.ClusterError, match=f"127.0.0.2:{port}: no Ray cluster could be reached"
    ):
        launch.connect(backend)
