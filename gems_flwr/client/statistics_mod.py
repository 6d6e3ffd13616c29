"""The mod that lets any Flower client take part in merging by statistics.

It sits around the user's own train handler::

    app = ClientApp(mods=[statistics_mod(data, model=Net)])  # data(context) -> (train, validation)

and does nothing unless the server's `MergedModels` strategy asks for statistics. Then it lets the
handler train, measures the trained model on the node's data, and adds the statistics to the reply.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from flwr.app import Context, Message
from torch import nn

from gems_flwr.client.fault_reply_mod import fault_reply_mod, node_name
from gems_flwr.client.limits import NodeLimits, refuse_bypass
from gems_flwr.devices import check_device, home_device
from gems_flwr.keyword_hints import refuse_keywords
from gems_flwr.model_merging.layer_statistics import statistics_shapes
from gems_flwr.model_merging.measure import measure_statistics
from gems_flwr.networks.node_data import read_node_data
from gems_flwr.runtime.flower_internals import ClientAppCallable, Mod
from gems_flwr.runtime.seeding import derive_seed
from gems_flwr.wire.asking import requested_statistics
from gems_flwr.wire.keys import RUN_SEED
from gems_flwr.wire.model_replies import instruction_config, unpack_metrics_reply
from gems_flwr.wire.records import only_model, to_numpy
from gems_flwr.wire.statistics_replies import plan_of, put_statistics

_NOW = "statistics_mod(data, model=Net) with data(context) that returns (train, validation)"


@refuse_keywords({"train": _NOW, "validation": _NOW})
def statistics_mod(
    data: Callable[[Context], Any],
    *,
    model: Callable[[], nn.Module] | None = None,
    limits: NodeLimits | None = None,
    device: str | None = None,
) -> Mod:
    """Return a mod that adds statistics to the reply where the server asks for them.

    Parameters
    ----------
    data : callable
        Gets the node's context, returns ``(train, validation)`` as for `good_enough_mod`;
        statistics are measured on the training data.
    model : callable, optional
        Returns the torch module. Only a model that is a single linear layer can do without.
    limits : NodeLimits, optional
        What the node gives away at most, by default what its ``--node-config`` says. Second moments
        of a layer's inputs are full moments: they are refused where the samples are too few.
    device : str, optional
        Where statistics are measured; see `good_enough_mod`.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr.clientapp import ClientApp
    >>> from gems_flwr import statistics_mod
    >>> def data(context):
    ...     rng = np.random.default_rng(context.node_config["partition-id"])
    ...     train = rng.normal(size=(100, 2)).astype(np.float32), np.arange(100) % 2
    ...     return train, None
    >>> app = ClientApp(mods=[statistics_mod(data)])

    and a train handler; `MergedModels` has a whole run.
    """
    if device is not None:
        check_device(device)

    def measured(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        bounds = NodeLimits.of_node(context.node_config) if limits is None else limits
        bounds.check_message(message)
        request = requested_statistics(message.content)
        if request is None:
            return call_next(message, context)
        refuse_bypass(
            call_next,
            inside="statistics_mod",
            what="statistics of the node's data",
            instead="merge by matching, which needs none,",
        )
        config, name = instruction_config(message.content), node_name(context)
        reply = call_next(message, context)
        if reply.has_error():
            return reply
        arrays = to_numpy(only_model(reply.content))
        plan = plan_of(request, arrays)
        for shapes in statistics_shapes(request.method, arrays).values():
            if "inputs" in shapes:
                samples = int(unpack_metrics_reply(reply.content).num_examples)
                rank = None if plan is None else plan.rank_of(shapes["inputs"])
                bounds.check_second_moments(samples, shapes["inputs"][0], rank=rank)
        statistics = measure_statistics(
            request.method,
            request.labels,
            arrays,
            read_node_data(data(context)).part("train"),
            model=model() if model else None,
            seed=derive_seed(cast(int, config.get(RUN_SEED, 0)), "statistics", name),
            device=device or home_device(model),
        )
        put_statistics(reply.content, statistics, name=name, plan=plan)
        return reply

    def guarded(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        return fault_reply_mod(message, context, lambda m, c: measured(m, c, call_next))

    return guarded
