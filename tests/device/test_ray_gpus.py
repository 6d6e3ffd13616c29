"""Ray divides the GPUs that are declared: no GPU is needed to see which node would get which."""

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
        seen = {
            "visible": os.environ.get("CUDA_VISIBLE_DEVICES", "unset"),
            "given": ",".join(map(str, ray.get_gpu_ids())),
            "share": float(ray.get_runtime_context().get_assigned_resources().get("GPU", 0)),
        }
        return Message(RecordDict({"seen": ConfigRecord(seen)}), reply_to=message)

    return app


@pytest.mark.deep
def test_nodes_get_the_shares_of_gpus_that_were_declared_and_see_no_other():
    """Two GPUs, a whole one for each of two actors: one sees the first, the other the second."""
    overrides = ["backend=ray", "backend.total_gpus=2", "backend.client_gpus=1", f"nodes={NODES}"]

    def server(grid):
        while len(nodes := list(grid.get_node_ids())) < NODES:
            time.sleep(0.2)
        ask = RecordDict({"ask": ConfigRecord({"x": 1})})
        messages = [Message(ask, dst_node_id=node, message_type="train") for node in nodes]
        replies = list(grid.send_and_receive(messages, timeout=120))
        return {"seen": [dict(reply.content["seen"]) for reply in replies]}

    backend = compose_config(overrides).backend
    seen = run_on_ray(reporting_app(), NODES, backend, server)["seen"]
    assert len(seen) == NODES
    assert {each["share"] for each in seen} == {1.0}
    assert all(each["visible"] == each["given"] for each in seen)
    assert {each["visible"] for each in seen} == {"0", "1"}


def test_a_numbered_gpu_does_not_go_with_shares_of_gpus():
    with pytest.raises(ConfigError, match=r"write backend\.device=cuda"):
        compose_config(["backend=ray", "backend.device=cuda:1", "backend.client_gpus=0.5"])
    assert compose_config(["backend=ray", "backend.device=cuda:1"]).backend.device == "cuda:1"
