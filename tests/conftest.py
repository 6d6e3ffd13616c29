"""What the tests share: a tiny node that needs no data, and ways to make it misbehave."""

from __future__ import annotations

import os

# Before torch or Flower are imported anywhere: no telemetry, no update check.
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"

import logging
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import settings

from gems_flwr import InProcessGrid, good_enough_mod
from gems_flwr.core.records import pack_name, pack_reply, to_numpy, to_record

Arrays = dict[str, np.ndarray]

# How long an example takes is the machine's affair, not the code's. The same examples every time:
# a red run must be the change's doing. New ones are looked for at night.
settings.register_profile(
    "untimed", deadline=None, derandomize=os.environ.get("GEMS_FLWR_NIGHTLY") != "1"
)
settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def own_ledgers(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory):
    """Let nodes note the privacy that they spend where no other test, and no user, has any."""
    folder = tmp_path_factory.getbasetemp() / f"ledgers-{uuid.uuid4().hex}"
    monkeypatch.setenv("GEMS_FLWR_HOME", str(folder))


@pytest.fixture(scope="session")
def device() -> str:
    """The device that ``tests/device`` runs on, which is there and started.

    It is the CPU, unless ``GEMS_FLWR_TEST_DEVICE`` names another. On the CPU these tests check the
    plumbing (the option arrives everywhere, nothing changes by it); they mean something on xla
    (``make test-device``) or on a GPU.
    """
    from helpers_device_cases import start_device

    name = os.environ.get("GEMS_FLWR_TEST_DEVICE", "cpu")
    start_device(name)
    return name


@pytest.fixture
def strict_device(device: str):
    """A device that is not the CPU, or the test is skipped."""
    from helpers_device_cases import start_device

    if device == "cpu":
        pytest.skip("needs another device than the CPU: make test-device")
    return start_device(device)


@pytest.fixture(autouse=True)
def quiet_flower(caplog: pytest.LogCaptureFixture):
    """Let caplog see our lines and keep them off the screen."""
    logger = logging.getLogger("flwr")
    before = logger.propagate, logger.handlers[:], logger.level
    logger.propagate, logger.handlers[:] = True, []
    logger.setLevel(logging.INFO)
    yield
    logger.propagate, logger.handlers[:] = before[:2]
    logger.setLevel(before[2])


def small_model() -> Arrays:
    """A model with a matrix, a vector, a counter and a scalar."""
    return {
        "weight": np.arange(6, dtype=np.float32).reshape(2, 3),
        "bias": np.zeros(2, dtype=np.float64),
        "steps": np.array(7, dtype=np.int64),
    }


def initial_arrays() -> ArrayRecord:
    """The small model as Flower sends it."""
    return to_record(small_model())


Behaviour = Callable[[Message, Context], Message | None]


def toy_app(behaviours: Mapping[int, Behaviour] | None = None, guarded: bool = True) -> ClientApp:
    """Return an app whose node k adds k + 1 to every weight and counts k + 1 examples.

    Parameters
    ----------
    behaviours : mapping from int to callable, optional
        What a partition does instead when it is asked to train.
    guarded : bool
        Whether faults are turned into error replies on the node.
    """
    app = ClientApp()
    mods = [good_enough_mod()] if guarded else []

    @app.train(mods=mods)
    def train(message: Message, context: Context) -> Message:
        node = int(context.node_config["partition-id"])
        if behaviours and node in behaviours:
            return behaviours[node](message, context)
        return train_reply(message, context)

    @app.evaluate(mods=mods)
    def evaluate(message: Message, context: Context) -> Message:
        node = int(context.node_config["partition-id"])
        weight = message.content["arrays"]["weight"].numpy()
        metrics = {"mean_weight": float(weight.mean())}
        content = pack_reply(metrics, num_examples=node + 1, name=str(node))
        return Message(content, reply_to=message)

    return app


def train_reply(message: Message, context: Context, **changed: Any) -> Message:
    """Return the honest reply of a toy node, with some of its parts changed."""
    node = int(context.node_config["partition-id"])
    arrays = to_numpy(message.content["arrays"])
    trained = {
        key: array + array.dtype.type(node + 1) if array.dtype.kind == "f" else array
        for key, array in arrays.items()
    }
    trained.update(changed.pop("arrays", {}))
    metrics = {"num-examples": node + 1, "loss": 1.0 / (node + 1), **changed.pop("metrics", {})}
    content = RecordDict(
        {"arrays": to_record(trained), "metrics": MetricRecord(metrics), **changed}
    )
    content["node"] = pack_name(str(node))["node"]
    return Message(content, reply_to=message)


@pytest.fixture
def grid() -> InProcessGrid:
    """Five well-behaved toy nodes."""
    return InProcessGrid(toy_app(), 5)


def record_equal(left: ArrayRecord, right: ArrayRecord) -> bool:
    """Whether two records hold the same bits."""
    a, b = to_numpy(left), to_numpy(right)
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and a[k].tobytes() == b[k].tobytes() for k in a
    )


def refuse_writing(monkeypatch: pytest.MonkeyPatch, code: int, where: str) -> None:
    """Let writing fail for files whose path contains `where`, as the system would."""
    real = os.open

    def refuse(path: Any, *arguments: Any, **options: Any) -> int:
        if where in str(path):
            raise OSError(code, os.strerror(code), str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
