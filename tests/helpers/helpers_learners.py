"""A tiny node for the protocols of local learners: an ordinary train handler and the mod."""

from __future__ import annotations

import numpy as np
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from gems_flwr.client.dynamic_averaging_mod import dynamic_averaging_mod
from gems_flwr.wire.model_replies import pack_name
from gems_flwr.wire.records import to_numpy, to_record


def start_model(size=3, dtype=np.float64):
    return {"w": np.zeros(size, dtype), "steps": np.array(0, dtype=np.int64)}


def initial(size=3, dtype=np.float64):
    return to_record(start_model(size, dtype))


def walk(node, server_round, size):
    """The step of a node in a round: a fixed pseudo-random direction."""
    rng = np.random.default_rng([node, server_round])
    return rng.normal(size=size) * 0.1


def walking_app(behaviours=None, size=3, calls=None):
    """Return an app of a user who knows nothing of averaging: node k adds its step and counts it.

    `behaviours` maps (node, round) to what happens instead of training.
    """
    app = ClientApp(mods=[dynamic_averaging_mod()])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        node = int(context.node_config["partition-id"])
        server_round = message.content["config"]["server-round"]
        if calls is not None:
            calls.append((node, server_round))
        arrays = to_numpy(message.content["arrays"])
        trained = {
            "w": (arrays["w"] + walk(node, server_round, size)).astype(arrays["w"].dtype),
            "steps": arrays["steps"] + 1,
        }
        instead = (behaviours or {}).get((node, server_round))
        if instead is not None:
            trained = instead(trained)
        metrics = MetricRecord(
            {
                "num-examples": node + 1,
                "loss-sum": float(node + server_round),
                "batches": 1,
                "correct-share-sum": 0.5,
            }
        )
        content = RecordDict({"my-model": to_record(trained), "metrics": metrics})
        content["node"] = pack_name(str(node))["node"]
        return Message(content, reply_to=message)

    return app


def fail(trained):
    raise RuntimeError("the disk is full")
