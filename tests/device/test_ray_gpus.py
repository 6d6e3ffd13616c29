"""Ray divides the GPUs that it is told of: no GPU is needed to see who would get which."""

import os
import time

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

from simulations.backends.launch import run_on_ray
from simulations.config import ConfigError, compose_config

NODES = 4


def reporting_app() -> ClientApp:
    """Return an app whose nodes say which GPUs they see, and which Ray has given them."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        import ray

        # Long enough for the other actor to get its share of the messages.
        time.sleep(1)
        told = {
            "visible": os.environ.get("CUDA_VISIBLE_DEVICES", "unset"),
            "given": ",".join(map(str, ray.get_gpu_ids())),
            "share": float(ray.get_runtime_context().get_assigned_resources().get("GPU", 0)),
        }
        return Message(RecordDict({"told": ConfigRecord(told)}), reply_to=message)

    return app


def seen_by_nodes(*overrides):
    config = compose_config(["backend=ray_gpu", f"nodes={NODES}", *overrides])

    def server(grid):
        while len(nodes := list(grid.get_node_ids())) < NODES:
            time.sleep(0.2)
        messages = [
            Message(
                RecordDict({"ask": ConfigRecord({"x": 1})}), dst_node_id=n, message_type="train"
            )
            for n in nodes
        ]
        replies = list(grid.send_and_receive(messages, timeout=120))
        return {"told": [dict(reply.content["told"]) for reply in replies]}

    return run_on_ray(reporting_app(), NODES, config.backend, server)["told"]


@pytest.mark.deep
def test_nodes_get_the_shares_of_gpus_that_were_declared_and_see_no_other():
    """Two GPUs, a whole one for each of two actors: one sees the first, the other the second."""
    told = seen_by_nodes("backend.total_gpus=2", "backend.client_gpus=1")
    assert len(told) == NODES
    assert {each["share"] for each in told} == {1.0}
    assert all(each["visible"] == each["given"] for each in told)
    assert {each["visible"] for each in told} == {"0", "1"}


def test_a_numbered_gpu_does_not_go_with_shares_of_gpus():
    with pytest.raises(ConfigError, match=r"write backend\.device=cuda"):
        compose_config(["backend=ray_gpu", "backend.device=cuda:1"])
    assert compose_config(["backend=ray", "backend.device=cuda:1"]).backend.device == "cuda:1"


def test_how_many_gpus_there_are_does_not_change_a_runs_name():
    names = {
        compose_config(["backend=ray_gpu", f"backend.total_gpus={count}"]).run_name()
        for count in ("null", 1, 2)
    }
    assert len(names) == 1
