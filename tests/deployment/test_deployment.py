"""Real processes: a SuperLink with TLS, authenticated SuperNodes, and what if one of them dies."""

import json
import re
import shutil
from pathlib import Path
from urllib.parse import unquote

import pytest
from helpers_examples import observe
from helpers_patience import HANG_SECONDS
from helpers_sizes import NIGHTLY
from rich.console import Console

from gems_flwr.__main__ import main as command_line
from gems_flwr.tools import COMPLETED
from simulations.config import compose_config
from simulations.deployment.federation import Federation, wait_until
from simulations.run import run

# One federation for all of them, so one worker.
pytestmark = [pytest.mark.deep, pytest.mark.xdist_group("deployment")]

ROOT = Path(__file__).resolve().parents[2]
NODES = ("0", "1", "2")
GEMS = "strategy=gems nodes=3 partition=iid"
LOST = r"lost \d+ s after it was asked: Error: Node Unavailable"
# Every message to a node is a process that imports torch: what others show too waits for the night.
nightly = pytest.mark.skipif(not NIGHTLY, reason="set GEMS_FLWR_NIGHTLY=1 for all deployments")


def until(condition, complaint):
    return wait_until(condition, HANG_SECONDS, complaint)


def start_node(federation, name):
    keys = federation.folder / "credentials"
    federation.start_node(
        name,
        f"partition-id={name} num-partitions={len(NODES)} signing-key='{keys / name}' "
        f"trusted-keys='{federation.folder / 'trusted'}'",
    )


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """A SuperLink and three nodes; a test that breaks something mends it again."""
    with Federation(tmp_path_factory.mktemp("federation")) as federation:
        (federation.folder / "trusted").mkdir()
        for name in NODES:
            federation.register(name)
            public = federation.folder / "credentials" / f"{name}.pub"
            shutil.copy(public, federation.folder / "trusted")
        for name in NODES:
            start_node(federation, name)
        until(lambda: len(connected(federation)) == 3, "three nodes are not connected")
        yield federation


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    """What runs give on the in-process backend."""

    def simulate(overrides):
        config = compose_config([*overrides.split(), "progress=false"])
        return run(config, tmp_path_factory.mktemp("simulated"), Console(quiet=True))

    return simulate


def submit(federation, overrides, output):
    return federation.submit(ROOT, overrides=overrides, output=str(output))


def result_of(federation, run_id, output):
    status = federation.flwr.wait(run_id, HANG_SECONDS)
    assert status == COMPLETED, federation.flwr.log(run_id)[-3000:]
    return json.loads((output / "result.json").read_text())


def connected(federation):
    listed = json.loads(federation.flwr.call("supernode", "list", "--format", "json"))
    return [node for node in listed["nodes"] if node["status"] == "online"]


def rounds_done(output):
    path = output / "rounds.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# What a request says in a simulation alone: that private noise, if any, comes from the run's seed.
SEEDED_BYTES = len(',"dp_seeded":true')


@pytest.mark.parametrize(
    ("overrides", "seeded"),
    [
        pytest.param("strategy=fedavg rounds=1", 0, marks=nightly),
        pytest.param("strategy=dynamic strategy.delta=0.01 rounds=1", 0, marks=nightly),
        # Each message is a new process, and each builds on what the node kept of the last one.
        ("strategy=fedavg strategy.compress=int8 rounds=2", 0),
        pytest.param("strategy=gems_layerwise model=mlp train.epochs=2", 1, marks=nightly),
        # The question of a space says it, and that of a score.
        ("strategy=gems strategy.verify=true", 2),
    ],
)
def test_every_kind_of_strategy_gives_the_numbers_of_the_simulation(
    overrides, seeded, federation, simulated, tmp_path
):
    overrides += " nodes=3 partition=iid"
    run_id = submit(federation, overrides, tmp_path)
    deployed, expected = result_of(federation, run_id, tmp_path), simulated(overrides)
    for key in ("accuracy", "loss", "bytes_up", "rounds", "nodes_failed"):
        assert deployed[key] == expected[key], key
    assert deployed["bytes_down"] == expected["bytes_down"] - seeded * len(NODES) * SEEDED_BYTES


def test_models_of_nodes_that_sign_are_summed_under_masks(federation, simulated, tmp_path):
    """Every message is a new process: what nodes keep between the stages is in their state."""
    overrides = "strategy=fedavg rounds=1 nodes=3 partition=iid"
    run_id = submit(federation, f"{overrides} secure=sum", tmp_path)
    deployed, expected = result_of(federation, run_id, tmp_path), simulated(overrides)
    assert deployed["nodes_failed"] == 0
    assert deployed["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    log = federation.flwr.log(run_id)
    stages = re.findall(r"event=usable round=1 what=([\w-]+) nodes=3 of=3", log)
    assert stages == ["secure-keys", "model-sum", "secure-opening"]
    assert not list(tmp_path.rglob("inbox/*"))


@pytest.mark.parametrize(("app", "least"), [("sklearn", 0.9), ("pytorch", 0.75)])
def test_somebody_elses_app_runs_with_its_two_lines_changed(app, least, federation, tmp_path):
    seen = observe(app, federation.flwr, tmp_path, seconds=HANG_SECONDS)
    assert seen.completed, seen.log[-3000:]
    assert seen.rounds == 1
    assert seen.accuracy > least
    assert seen.tracebacks == 0
    assert all(federation.log(name).count("Traceback") == 0 for name in NODES)


def test_a_node_whose_key_is_not_registered_is_refused(federation):
    federation.start_node("stranger", "partition-id=0", registered=False)
    until(lambda: federation.process("stranger").poll() is not None, "the stranger lives on")
    assert federation.process("stranger").returncode != 0
    assert "stranger" not in federation.flwr.call("supernode", "list", "--format", "json")


def test_a_killed_node_costs_its_own_part_and_comes_back_without_its_state(federation, tmp_path):
    """Round 2 goes on without node 2; it returns, says that it lost its model, and goes on."""
    output = tmp_path / "out"
    learn = (
        "strategy=dynamic strategy.delta=100 strategy.final_sync=false rounds=6 evaluate_every=6"
    )
    learn += " nodes=3 partition=iid"
    run_id = submit(federation, learn, output)
    until(lambda: len(rounds_done(output)) > 1, "round 1 has not ended")
    federation.kill("2")
    until(lambda: any(each["failures"] for each in rounds_done(output)), "nobody missed node 2")
    start_node(federation, "2")
    result = result_of(federation, run_id, output)
    assert {each["node"] for each in result["details"]["failures"]} == {"2"}
    history = rounds_done(output)[1:]
    assert all({"0", "1"} <= set(each["nodes_answered"]) for each in history)
    assert history[-1]["nodes_answered"] == ["0", "1", "2"]
    assert [node for _, node in result["details"]["lost_states"]] == ["2"]
    assert all(re.match(LOST, each["reason"]) for each in result["details"]["failures"])
    assert "uncalled_for_reply" not in federation.flwr.log(run_id)


@pytest.mark.parametrize("how", ["end", pytest.param("kill", marks=nightly)])
def test_a_node_that_is_lost_in_a_round_and_comes_back_is_asked_once_more(
    how, federation, simulated, tmp_path
):
    """Ended politely it is missed within seconds, killed within two heartbeats."""
    output = tmp_path / "out"
    federation.pause("2")
    run_id = submit(federation, f"{GEMS} return_seconds={HANG_SECONDS}", output)
    until(lambda: len(list(output.glob("inbox/*.reply"))) == 2, "two spaces are not there")
    getattr(federation, how)("2")
    lost = r"event=lost round=1 node=2 seconds=\S+"
    until(lambda: re.search(lost, federation.flwr.log(run_id)), "nobody missed node 2")
    start_node(federation, "2")
    result, expected = result_of(federation, run_id, output), simulated(GEMS)
    log = federation.flwr.log(run_id)
    assert "event=ask_again round=1 nodes=1" in log
    assert "uncalled_for_reply" not in log
    assert result["details"]["failures"] == []
    for key in ("accuracy", "loss", "nodes_failed"):
        assert result[key] == expected[key], key


def test_nodes_of_one_name_are_told_apart_and_reported(federation, tmp_path):
    """One is registered under the name of node 1, one just calls itself node 0."""
    output = tmp_path / "out"
    federation.start_node("twin", "partition-id=1", known_as="1")
    federation.start_node("liar", "partition-id=2 name='0'")
    until(lambda: len(connected(federation)) == 5, "five nodes are not connected")
    try:
        run_id = submit(federation, GEMS, output)
        result_of(federation, run_id, output)
    finally:
        federation.end("twin")
        federation.end("liar")
    spaces = {path.name.split(".")[0] for path in (output / "spaces").iterdir()}
    assert {name.partition("%23")[0] for name in spaces} == {"0", "1", "2", "liar"}
    assert len(spaces) == 5
    log = federation.flwr.log(run_id)
    disputed = set(re.findall(r"event=name_disputed node=(\S+) holder=\S+ claimed=(\S+)", log))
    told_apart = {(unquote(name), "1") for name in spaces if name.startswith("1")}
    assert disputed == told_apart | {("liar", "0")}


def test_a_killed_server_resumes_and_asks_only_for_what_it_did_not_have(
    federation, simulated, tmp_path
):
    """Over TLS, with three authenticated nodes; the result is that of an unbroken simulation."""
    output = tmp_path / "out"
    federation.pause("2")
    submit(federation, GEMS, output)
    until(lambda: len(list(output.glob("inbox/*.reply"))) == 2, "two spaces are not there")
    federation.kill("superlink")
    federation.wake("2")
    assert not (output / "result.json").exists()
    federation.start_superlink()
    again = submit(federation, GEMS, output)
    result, expected = result_of(federation, again, output), simulated(GEMS)
    log = federation.flwr.log(again)
    assert log.count("event=reply_kept") == 2
    assert re.findall(r"event=reply round=1 node=(\d)", log) == ["2"]
    assert "event=end strategy=Gems rounds=1" in log
    for key in ("accuracy", "loss", "rounds", "nodes_failed"):
        assert result[key] == expected[key], key


def test_a_run_that_fails_ends_with_another_status(federation, tmp_path, monkeypatch, capfd):
    """``flwr run`` would say 0."""
    for name, value in federation.flwr.environment.items():
        monkeypatch.setenv(name, value)
    arguments = ["submit", str(ROOT), federation.flwr.superlink, "-c"]
    bad = f"overrides='{GEMS} nodes=9 strategy.min_nodes=9 wait_seconds=1' output='{tmp_path}'"
    assert command_line([*arguments, bad]) == 1
    said = capfd.readouterr().out
    assert "finished:failed" in said
    assert "3 nodes are connected after 1 s, min_nodes is 9" in said
    assert command_line(["submit", str(tmp_path), federation.flwr.superlink]) == 2


def test_real_nodes_hand_out_no_examples_and_draw_no_noise_from_a_known_seed(federation, tmp_path):
    """Both were given away once; whoever asks is refused by every node, by the limit's name."""
    for number, (asked, limit) in enumerate(
        (
            ("strategy=global nodes=3 partition=iid", "share_examples"),
            (f"{GEMS} strategy.space.dp_epsilon=1 strategy.space.dp_seeded=true", "seeded_noise"),
        )
    ):
        run_id = submit(federation, asked, tmp_path / str(number))
        assert federation.flwr.wait(run_id, HANG_SECONDS) != COMPLETED
        log = federation.flwr.log(run_id)
        refused = rf'event=left_out round=1 node=(\d) reason=".*this node\'s limit {limit}:'
        assert sorted(set(re.findall(refused, log))) == sorted(NODES), log[-3000:]
