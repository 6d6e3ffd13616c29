"""Flower's simulation engine on a Ray cluster that is there already."""

import numpy as np
import pytest
from helpers_cluster import free_ports, two_machines
from rich.console import Console
from safetensors.numpy import load_file

from simulations.backends import launch
from simulations.backends.cluster import ClusterError, _check_room, connect
from simulations.config import BackendConfig, ConfigError, compose_config
from simulations.run import run

SETTING = ("strategy=fedavg", "nodes=4", "rounds=2", "progress=false")


@pytest.fixture(scope="module")
def cluster():
    with two_machines() as (address, folder):
        yield address, folder


def machines_of(address):
    """Return the machines that live, asked of the cluster itself."""
    import ray

    ray.init(address=address, logging_level="ERROR", log_to_driver=False)
    try:
        return {each["NodeID"] for each in ray.nodes() if each["Alive"]}
    finally:
        ray.shutdown()


def noting(app, folder):
    """Return an app that leaves a note of the machine whenever it is called."""

    def call(message, context):
        import ray

        (folder / ray.get_runtime_context().get_node_id()).touch()
        return app(message, context)

    return call


@pytest.mark.deep
def test_a_run_on_a_cluster_has_the_same_numbers_uses_every_machine_and_leaves_it_running(
    cluster, tmp_path, monkeypatch
):
    address, _ = cluster
    made, notes = launch.simulated_client_app, tmp_path / "notes"
    notes.mkdir()
    monkeypatch.setattr(launch, "simulated_client_app", lambda c: noting(made(c), notes))
    results = {}
    for name, options in (
        ("ray", ("backend=ray", f"backend.address={address}")),
        ("inprocess", ()),
    ):
        if name == "inprocess":
            monkeypatch.undo()
        config = compose_config([*SETTING, *options])
        results[name] = run(config, tmp_path / name, Console(quiet=True))
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in results)
    assert all(np.array_equal(a[key], b[key]) for key in b)
    assert results["ray"]["accuracy"] == results["inprocess"]["accuracy"]
    machines = machines_of(address)
    assert len(machines) == 2
    assert {each.name for each in notes.iterdir()} == machines


@pytest.mark.deep
def test_a_machine_that_lacks_the_code_is_named(cluster, monkeypatch):
    """The cluster knows nothing of this folder: what is not sent cannot be found."""
    address, _ = cluster
    monkeypatch.setattr("simulations.backends.cluster._NEEDED", ("flwr", "no_such_module"))
    with pytest.raises(ClusterError, match=r"the machine 127\.0\.0\.2 .* has no no_such_module"):
        connect(BackendConfig(kind="ray", address=address))
    assert len(machines_of(address)) == 2


@pytest.mark.deep
def test_without_an_address_a_run_has_a_ray_of_its_own_though_a_cluster_is_there(
    cluster, tmp_path, monkeypatch
):
    address, _ = cluster
    monkeypatch.setenv("RAY_ADDRESS", address)
    made, notes = launch.simulated_client_app, tmp_path / "notes"
    notes.mkdir()
    monkeypatch.setattr(launch, "simulated_client_app", lambda c: noting(made(c), notes))
    config = compose_config(["strategy=fedavg", "nodes=2", "rounds=1", "backend=ray"])
    run(config, tmp_path / "run", Console(quiet=True))
    assert not {each.name for each in notes.iterdir()} & machines_of(address)


def test_an_address_where_nobody_listens_is_named():
    (port,) = free_ports(1)
    backend = BackendConfig(kind="ray", address=f"127.0.0.2:{port}")
    with pytest.raises(ClusterError, match=f"127.0.0.2:{port}: nobody listens there"):
        connect(backend)


def test_a_cluster_without_room_for_one_node_is_refused():
    """Six processors in all, but no machine with four."""
    machines = [{"CPU": 3.0}, {"CPU": 3.0, "GPU": 1.0}, {}]
    three, four = (BackendConfig(kind="ray", address="auto", client_cpus=n) for n in (3, 4))
    _check_room(three, machines)
    with pytest.raises(ClusterError, match=r"client_cpus=4 .* 3 CPUs and 0 GPUs, 3 CPUs and 1 "):
        _check_room(four, machines)
    # The one with a whole GPU has too few processors, the other none.
    both = BackendConfig(kind="ray", address="auto", client_cpus=3, client_gpus=2.0)
    with pytest.raises(ClusterError, match="client_gpus=2"):
        _check_room(both, machines)


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["backend=ray", "backend.address=nowhere"], "auto or host:port, or null"),
        (["backend=ray", "backend.address='ray://a:1'"], "auto or host:port, or null"),
        (["backend.address=auto"], "is for backend=ray, got backend.kind=inprocess"),
        (
            ["backend=ray", "backend.address=auto", "backend.total_cpus=8"],
            "backend.total_cpus=8 is for a Ray of this run's own",
        ),
    ],
)
def test_an_address_that_means_nothing_is_refused(overrides, complaint):
    with pytest.raises(ConfigError, match=complaint):
        compose_config(overrides)


def test_where_a_run_was_made_is_not_part_of_its_name():
    """The digest is that of commit 4b81937, which had no addresses."""
    plain = compose_config(["backend=ray"])
    assert plain.fingerprint() == "ba5856aa"
    assert compose_config(["backend=ray", "backend.address=auto"]).fingerprint() == "ba5856aa"
