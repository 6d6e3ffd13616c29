"""The wire contract: every record key that crosses the network, packed, unpacked, validated.

The shapes are those of Flower's own strategies, so that an ordinary Flower client understands
our messages and an ordinary Flower strategy understands our ready client's replies:

==============  =================================================================
instruction     ``arrays`` (ArrayRecord), ``config`` (ConfigRecord with
                ``server-round`` and ``run-seed``, and ``frozen-layers`` where
                the lowest layers must stay as they are)
reply to train  one ArrayRecord, one MetricRecord with ``num-examples``
reply to        one MetricRecord with ``num-examples``
evaluate
reply to train  with a space, or the balls of a layer's neurons, instead of a
                model where ``config`` asked for it
any reply       optionally ``node`` (ConfigRecord with ``name``), by which
                replies are ordered and failures are named
==============  =================================================================

Nothing that a node sends is used before it has passed through an ``unpack`` function here. The
keys stand in `keys`; no other module spells one out.
"""

from gems_flwr.wire.arrays import (
    to_numpy,
    to_record,
)
from gems_flwr.wire.keys import (
    ARRAYS,
    CONFIG,
    EVALUATE,
    INTRODUCE,
    NEURON_REQUEST,
    RUN_SEED,
    SERVER_ROUND,
    SHARE_EXAMPLES,
    TRAIN,
)
from gems_flwr.wire.neurons import (
    ask_for_neurons,
    freeze_below,
    frozen_layers,
    pack_neurons_reply,
    requested_neurons,
    unpack_neurons_reply,
)
from gems_flwr.wire.replies import (
    ExamplesReply,
    MetricsReply,
    ModelReply,
    instruction_config,
    pack_examples_reply,
    pack_instruction,
    pack_metrics_reply,
    pack_model_reply,
    pack_name,
    unpack_examples_reply,
    unpack_metrics_reply,
    unpack_model_reply,
    unpack_name,
)
from gems_flwr.wire.sizes import (
    instruction_round,
    payload_bytes,
)
from gems_flwr.wire.spaces import (
    NodeSpace,
    ask_for_score,
    ask_for_space,
    pack_score_reply,
    pack_space_reply,
    requested_space,
    unpack_score_reply,
    unpack_space_reply,
    wants_score,
)

__all__ = [
    "ARRAYS",
    "CONFIG",
    "EVALUATE",
    "INTRODUCE",
    "NEURON_REQUEST",
    "RUN_SEED",
    "SERVER_ROUND",
    "SHARE_EXAMPLES",
    "TRAIN",
    "ExamplesReply",
    "MetricsReply",
    "ModelReply",
    "NodeSpace",
    "ask_for_neurons",
    "ask_for_score",
    "ask_for_space",
    "freeze_below",
    "frozen_layers",
    "instruction_config",
    "instruction_round",
    "pack_examples_reply",
    "pack_instruction",
    "pack_metrics_reply",
    "pack_model_reply",
    "pack_name",
    "pack_neurons_reply",
    "pack_score_reply",
    "pack_space_reply",
    "payload_bytes",
    "requested_neurons",
    "requested_space",
    "to_numpy",
    "to_record",
    "unpack_examples_reply",
    "unpack_metrics_reply",
    "unpack_model_reply",
    "unpack_name",
    "unpack_neurons_reply",
    "unpack_score_reply",
    "unpack_space_reply",
    "wants_score",
]
