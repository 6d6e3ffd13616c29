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
                model where ``config`` asked for it; without a model where the
                local model may stay where it is; with parts for several models
                (`multi_model`); with ``statistics`` beside the model where it
                is to be merged by them
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
from gems_flwr.wire.dynamic import (
    AveragingReply,
    AveragingRequest,
    ask_for_averaging,
    pack_averaging_reply,
    pack_needs_model,
    put_local_model,
    requested_averaging,
    take_new_models,
    unpack_averaging_reply,
)
from gems_flwr.wire.keys import (
    ARRAYS,
    BATCHES,
    CONFIG,
    CORRECT_SHARE_SUM,
    EVALUATE,
    FROZEN_LAYERS,
    INTRODUCE,
    LOCAL_METRICS,
    LOCAL_MODEL,
    LOCAL_NOTES,
    LOCAL_REFERENCE,
    LOSS_SUM,
    MULTI_MODEL,
    NEURON_REQUEST,
    NUM_EXAMPLES,
    PRIVACY_SPENT,
    RUN_SEED,
    SECAGG_CONFIGS,
    SERVER_ROUND,
    SHARE_EXAMPLES,
    SQUARED_MU,
    TASK_MEMORY,
    TRAIN,
)
from gems_flwr.wire.multi_model import (
    Action,
    ModelsRequest,
    ReportKind,
    ask_for_models,
    gradient_correction,
    named_model,
    requested_models,
    sent_controls,
    sent_weights,
    single_instruction,
    vector_of,
    vector_record,
)
from gems_flwr.wire.multi_model_replies import (
    Holdings,
    ModelPart,
    ModelsReply,
    pack_holdings,
    pack_models_reply,
    pack_part,
    put_gradient,
    take_gradient,
    unpack_holdings,
    unpack_models_reply,
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
    is_masked,
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
    requested_score,
    requested_space,
    unpack_score_reply,
    unpack_space_reply,
    wants_score,
)
from gems_flwr.wire.statistics import (
    MergeReply,
    ask_for_statistics,
    put_statistics,
    requested_statistics,
    unpack_merge_reply,
)

__all__ = [
    "ARRAYS",
    "BATCHES",
    "CONFIG",
    "CORRECT_SHARE_SUM",
    "EVALUATE",
    "FROZEN_LAYERS",
    "INTRODUCE",
    "LOCAL_METRICS",
    "LOCAL_MODEL",
    "LOCAL_NOTES",
    "LOCAL_REFERENCE",
    "LOSS_SUM",
    "MULTI_MODEL",
    "NEURON_REQUEST",
    "NUM_EXAMPLES",
    "PRIVACY_SPENT",
    "RUN_SEED",
    "SECAGG_CONFIGS",
    "SERVER_ROUND",
    "SHARE_EXAMPLES",
    "SQUARED_MU",
    "TASK_MEMORY",
    "TRAIN",
    "Action",
    "AveragingReply",
    "AveragingRequest",
    "ExamplesReply",
    "Holdings",
    "MergeReply",
    "MetricsReply",
    "ModelPart",
    "ModelReply",
    "ModelsReply",
    "ModelsRequest",
    "NodeSpace",
    "ReportKind",
    "ask_for_averaging",
    "ask_for_models",
    "ask_for_neurons",
    "ask_for_score",
    "ask_for_space",
    "ask_for_statistics",
    "freeze_below",
    "frozen_layers",
    "gradient_correction",
    "instruction_config",
    "instruction_round",
    "is_masked",
    "named_model",
    "pack_averaging_reply",
    "pack_examples_reply",
    "pack_holdings",
    "pack_instruction",
    "pack_metrics_reply",
    "pack_model_reply",
    "pack_models_reply",
    "pack_name",
    "pack_needs_model",
    "pack_neurons_reply",
    "pack_part",
    "pack_score_reply",
    "pack_space_reply",
    "payload_bytes",
    "put_gradient",
    "put_local_model",
    "put_statistics",
    "requested_averaging",
    "requested_models",
    "requested_neurons",
    "requested_score",
    "requested_space",
    "requested_statistics",
    "sent_controls",
    "sent_weights",
    "single_instruction",
    "take_gradient",
    "take_new_models",
    "to_numpy",
    "to_record",
    "unpack_averaging_reply",
    "unpack_examples_reply",
    "unpack_holdings",
    "unpack_merge_reply",
    "unpack_metrics_reply",
    "unpack_model_reply",
    "unpack_models_reply",
    "unpack_name",
    "unpack_neurons_reply",
    "unpack_score_reply",
    "unpack_space_reply",
    "vector_of",
    "vector_record",
    "wants_score",
]
