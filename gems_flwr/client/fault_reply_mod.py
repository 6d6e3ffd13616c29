"""Faults on a node become error replies that name them.

Flower loses a reply that is None until the timeout, and a handler that returns something else
can kill the worker. `fault_reply_mod` sits around any handler and turns every fault into an
error reply at once::

    app = ClientApp(mods=[fault_reply_mod])

All mods of this library go through it, so this is also where a node says its name, to a server that
has to know who is who before it asks for anything else (see `gems_flwr.server.nodes`), and by which
it leaves a run (`gems_flwr.client.withdrawal`).
"""

from __future__ import annotations

from flwr.app import Context, Error, Message

from gems_flwr.client.withdrawal import is_withdrawing
from gems_flwr.errors import GemsError, OptionError, describe_fault
from gems_flwr.runtime.flower_internals import HANDLER_RAISED, ClientAppCallable
from gems_flwr.wire.asking import wants_name
from gems_flwr.wire.fault_reasons import fault_reason
from gems_flwr.wire.keys import COMPRESSION
from gems_flwr.wire.model_replies import pack_name
from gems_flwr.wire.secure_messages import stage_word
from gems_flwr.wire.withdrawals import pack_withdrawal


def node_name(context: Context) -> str:
    """Return what a node calls itself.

    The ``name`` in its ``--node-config``, else its partition, as in a simulation, else its id.
    """
    config = context.node_config
    return str(config.get("name", config.get("partition-id", context.node_id)))


def fault_reply_mod(
    message: Message, context: Context, call_next: ClientAppCallable, *, secure: bool = False
) -> Message:
    """Run the handler; reply with an error that names the node and the fault if it fails.

    Where the server asks for nothing but the node's name, it is told without the handler. A node
    that leaves says so instead of anything else. What is asked of a secure sum is refused, unless
    the mod that answers it is the one around (`secure`).

    Examples
    --------
    >>> import numpy as np
    >>> from flwr.app import ArrayRecord
    >>> from flwr.clientapp import ClientApp
    >>> from gems_flwr import FedAvg, InProcessGrid, RoundFailedError, fault_reply_mod
    >>> app = ClientApp(mods=[fault_reply_mod])
    >>> @app.train()
    ... def train(message, context):
    ...     return None  # Flower alone would wait for the timeout
    >>> try:
    ...     FedAvg().start(InProcessGrid(app, nodes=2), ArrayRecord([np.zeros(2)]))
    ... except RoundFailedError as error:
    ...     print(error.failures[0].reason)
    train failed on node 0: the handler returned NoneType, expected a Message
    """
    try:
        if wants_name(message.content):
            return Message(pack_name(node_name(context)), reply_to=message)
        if is_withdrawing(context.node_config):
            return Message(pack_withdrawal(node_name(context)), reply_to=message)
        if not secure and stage_word(message.content) is not None:
            raise OptionError(
                "write ClientApp(mods=[secure_sum_mod(), ...]), first of all mods: the server asks "
                "for a secure sum, and nothing here would put masks on the answer"
            )
        reply = call_next(message, context)
        if isinstance(reply, Message):
            return reply
        fault = f"the handler returned {type(reply).__name__}, expected a Message"
    except Exception as error:
        # Errors of ours say what to do; for others the place may help.
        fault = str(error) if isinstance(error, GemsError) else describe_fault(error)
        if COMPRESSION in message.content:
            # Nobody took it out: the handler saw bytes where it expected a model.
            fault = (
                f"write ClientApp(mods=[compression_mod(), ...]): the server sends packed models, "
                f"and no mod here reads them; {fault}"
            )
    reason = fault_reason(message.metadata.message_type, node_name(context), fault)
    return Message(Error(code=HANDLER_RAISED, reason=reason), reply_to=message)
