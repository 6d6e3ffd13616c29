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
