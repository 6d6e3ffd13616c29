"""Requests as text: byte for byte what servers always sent, and what nodes always read."""

import subprocess
import sys

import pytest
from flwr.app import ConfigRecord, RecordDict

from gems_flwr.strategies.gems import Gems
from gems_flwr.strategies.layerwise_gems import LayerwiseGems
from gems_flwr.wire import asking
from gems_flwr.wire.requests import (
    AveragingRequest,
    ModelsRequest,
    NeuronRequest,
    Neurons,
    ScoreRequest,
    StatisticsRequest,
)
from gems_flwr.wire.space_requests import Ball, Cone, Ellipsoid, SpaceRequest

PRIVATE = Cone(dp_epsilon=10, dp_delta=0.001, dp_clip=3, dp_classes=[0, 1, 2])
BALL, AXES = '{"kind": "ball"', '{"kind": "ellipsoid"'

# Written by the code of commit 8e2c036, where options did not nest.
TEXTS = [
    (Gems(), "{}"),
    (Gems(space=Cone(rank=20, clusters=8)), '{"rank": 20, "clusters": 8}'),
    (Gems(space=Cone(rank="full", epsilon=0.8)), '{"epsilon": 0.8, "rank": "full"}'),
    (
        Gems(space=Cone(epsilon=0.9, min_count=24, int8=False)),
        '{"epsilon": 0.9, "int8": false, "min_count": 24}',
    ),
    (Gems(space=Cone(sums=True, min_count=2)), '{"min_count": 2, "sums": true}'),
    (
        Gems(space=PRIVATE),
        '{"dp_epsilon": 10, "dp_delta": 0.001, "dp_clip": 3, "dp_classes": [0, 1, 2]}',
    ),
    (
        Gems(space=Cone(dp_epsilon=1.5, dp_clip=5.0, dp_seeded=True)),
        '{"dp_epsilon": 1.5, "dp_clip": 5.0, "dp_seeded": true}',
    ),
    (Gems(space=Cone(dp_seeded=True)), '{"dp_seeded": true}'),
    (Gems(on_empty="relax"), "{}"),
    (Gems(space="ball"), f'{BALL}, "epsilon": 0.4}}'),
    (Gems(space=Ball(epsilon=0.5)), f"{BALL}}}"),
    (Gems(space=Ball(epsilon=1)), f'{BALL}, "epsilon": 1.0}}'),
    (Gems(space=Ball(dp_seeded=True)), f'{BALL}, "epsilon": 0.4, "dp_seeded": true}}'),
    (
        Gems(space=Ball(epsilon=0.7, radius="worst", directions=50)),
        f'{BALL}, "epsilon": 0.7, "radius": "worst", "directions": 50}}',
    ),
    (
        Gems(space=Ball(measure="loss", epsilon=1.25, radius="growing")),
        f'{BALL}, "epsilon": 1.25, "measure": "loss", "radius": "growing"}}',
    ),
    (Gems(space="ball", epsilon="auto"), f'{BALL}, "epsilon": 1e-06, "curve": true}}'),
    (
        Gems(space=Ball(radius="certified", epsilon=0.8, dp_seeded=True), on_empty="relax"),
        f'{BALL}, "epsilon": 0.8, "radius": "certified", "curve": true, "dp_seeded": true}}',
    ),
    (Gems(space="ball", epsilon={"0": 0.3, "1": 1}), f'{BALL}, "epsilon": 1.0}}'),
    (Gems(space="ball", epsilon={"0": 0.3}), f'{BALL}, "epsilon": 0.4}}'),
    (Gems(space=Ellipsoid(damping=0)), f'{AXES}, "epsilon": 0.4}}'),
    (
        Gems(space=Ellipsoid(epsilon=0.7, floor=0.3, damping=0)),
        f'{AXES}, "epsilon": 0.7, "floor": 0.3}}',
    ),
    # Since then ellipsoids are damped, and say so.
    (Gems(space="ellipsoid"), f'{AXES}, "epsilon": 0.4, "damping": 1e-05}}'),
    (
        Gems(space=Ellipsoid(floor=0.2, radius="worst", damping=0), epsilon="auto"),
        f'{AXES}, "epsilon": 1e-06, "radius": "worst", "floor": 0.2, "curve": true}}',
    ),
    (
        Gems(
            space=Ellipsoid(epsilon=0.5, floor=0.5, damping=0, directions=20, dp_seeded=True),
            on_empty="relax",
        ),
        f'{AXES}, "directions": 20, "floor": 0.5, "curve": true, "dp_seeded": true}}',
    ),
]
HEADS = [
    ("cone", "{}"),
    ("ball", f'{BALL}, "epsilon": 0.7}}'),
    (Ellipsoid(epsilon=0.7, floor=0.2, damping=0), f'{AXES}, "epsilon": 0.7, "floor": 0.2}}'),
    (Gems(space=Cone(rank=20, clusters=2)), '{"rank": 20, "clusters": 2}'),
    (Ball(epsilon=0.3, directions=50), f'{BALL}, "epsilon": 0.3, "directions": 50}}'),
]
NEURONS = [
    (Neurons(), '{"layer": 1, "epsilon": 0.02}'),
    (
        Neurons(epsilon=[0.4, 0.6], directions=50, radius="worst"),
        '{"layer": 1, "epsilon": 0.6, "radius": "worst", "directions": 50}',
    ),
    (
        Neurons(epsilon=1, measure="relative", outgoing=True, max_rows=200),
        '{"layer": 1, "epsilon": 1.0, "measure": "relative", "outgoing": true, "max_rows": 200}',
    ),
]
OTHERS = [
    (AveragingRequest("r", 3, 2), '{"run":"r","model":3,"reference":2}'),
    (
        AveragingRequest("r", 3, 2, 0, "violated", 0.5, True, True, ("a", "b")),
        '{"run":"r","model":3,"reference":2,"steps":0,"send":"violated","delta":0.5,'
        '"measure":true,"adopt":true,"ignore":["a","b"]}',
    ),
    (ModelsRequest("r", "introduce"), '{"run":"r","action":"introduce"}'),
    (
        ModelsRequest("r", "train", {"a": 3, "b": 0}, "residual", {"a": 2}, keep=True),
        '{"run":"r","action":"train","versions":{"a":3,"b":0},"report":"residual",'
        '"settled":{"a":2},"keep":true}',
    ),
    (ScoreRequest(2.0, dp_seeded=True), '{"dp_epsilon": 2.0, "dp_seeded": true}'),
    (StatisticsRequest("kfac", "sampled"), '{"method": "kfac", "labels": "sampled"}'),
]


@pytest.mark.parametrize(("strategy", "text"), TEXTS, ids=[text for _, text in TEXTS])
def test_a_space_is_asked_for_in_the_same_bytes_as_ever(strategy, text):
    request = strategy.request("1")
    assert request.to_json() == text
    assert SpaceRequest.from_json(text) == request


@pytest.mark.parametrize(("head", "text"), HEADS, ids=[text for _, text in HEADS])
def test_so_is_the_space_of_an_output_layer(head, text):
    assert LayerwiseGems(head=head)._head().request().to_json() == text


@pytest.mark.parametrize(("neurons", "text"), NEURONS, ids=[text for _, text in NEURONS])
def test_so_are_neurons(neurons, text):
    request = LayerwiseGems(neurons=neurons).request(1)
    assert request.to_json() == text
    assert NeuronRequest.from_json(text) == request


@pytest.mark.parametrize(("request_", "text"), OTHERS, ids=[text for _, text in OTHERS])
def test_so_are_models_and_statistics(request_, text):
    assert request_.to_json() == text
    assert type(request_).from_json(text) == request_


def test_options_of_other_spaces_that_old_servers_sent_along_mean_nothing():
    assert SpaceRequest.from_json('{"radius": "worst", "floor": 0.3}') == Cone()
    text = '{"kind": "ball", "epsilon": 0.4, "rank": 20, "dp_clip": 2.0, "floor": 0.3}'
    assert SpaceRequest.from_json(text) == Ball()


def test_noise_that_a_ball_has_none_of_is_refused():
    """The old code sent the ball as it was, and called it private."""
    with pytest.raises(ValueError, match=r"\['dp_epsilon'\], which this version does not know"):
        SpaceRequest.from_json('{"kind": "ball", "dp_epsilon": 1.0}')


def test_a_kind_that_a_node_does_not_know_is_refused():
    with pytest.raises(ValueError, match=r"kind must be one of \['cone', 'ball', 'ellipsoid'"):
        SpaceRequest.from_json('{"kind": "star"}')


ASKED = [
    (asking.ask_for_space, asking.requested_space, Ball(epsilon=0.7)),
    (asking.ask_for_score, asking.requested_score, ScoreRequest(1.0)),
    (asking.ask_for_neurons, asking.requested_neurons, Neurons().in_layer(0)),
    (asking.ask_for_statistics, asking.requested_statistics, StatisticsRequest("fisher")),
    (asking.ask_for_averaging, asking.requested_averaging, AveragingRequest("r", 1, 1)),
    (asking.ask_for_models, asking.requested_models, ModelsRequest("r", "send", {"a": 1})),
]


@pytest.mark.parametrize(("ask", "requested", "request_"), ASKED)
def test_what_is_put_into_an_instruction_is_read_there(ask, requested, request_):
    content = RecordDict({"config": ConfigRecord({"server-round": 1})})
    ask(content, request_)
    assert requested(content) == request_
    assert content["config"]["server-round"] == 1


@pytest.mark.parametrize(("ask", "requested", "request_"), ASKED)
def test_without_a_config_nothing_is_lost_in_silence(ask, requested, request_):
    content = RecordDict()
    with pytest.raises(ValueError, match="the instruction has no ConfigRecord 'config'"):
        ask(content, request_)
    assert not requested(content) or requested(content) == ScoreRequest()


def test_values_to_ask_with_are_there_without_torch():
    code = (
        "import sys; from gems_flwr.wire.requests import Neurons; "
        "from gems_flwr.wire.space_requests import Ball, Cone, Ellipsoid; "
        "Cone(rank=20), Ball(), Ellipsoid(), Neurons(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
