"""Where a node takes the layers below the output layer from.

Its own `model()` may have them: a trained backbone that everybody loads. Else they come from the
server, once, and are kept in the node's state as long as they are referred to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flwr.app import ArrayRecord, Context, Message
from torch import nn

from gems_flwr.errors import ModelError
from gems_flwr.networks.backbone import SplitModel, backbone_digest
from gems_flwr.spaces.output_layer import OutputLayer
from gems_flwr.typing import Arrays
from gems_flwr.wire.backbone_messages import (
    is_to_be_kept,
    named_backbone,
    put_whole_model,
    take_backbone,
)
from gems_flwr.wire.keys import LOCAL_BACKBONE
from gems_flwr.wire.records import only_model, to_numpy


@dataclass(frozen=True)
class ReceivedModel:
    """A whole model on a node.

    Parameters
    ----------
    arrays : mapping from str to ndarray
        All layers.
    head : frozenset of str
        What the server takes for the output layer; empty where it did not say.
    """

    arrays: Arrays
    head: frozenset[str] = frozenset()

    def check_output(self, layer: OutputLayer) -> None:
        """Refuse to work on another output layer than the server's."""
        if self.head and self.head != set(layer.keys):
            raise ModelError(
                f"write Gems(layer='{layer.weight.removesuffix('.weight')}'): the server takes "
                f"{sorted(self.head)} for the output layer, this node's model ends in "
                f"{sorted(layer.keys)}"
            )


def complete_model(
    message: Message, context: Context, model: Callable[[], nn.Module] | None
) -> ReceivedModel | None:
    """Return the whole model that a message is about, and put it into the message.

    Parameters
    ----------
    message : Message
        Carries a model, or an output layer and the digest of what is below it.
    context : Context
        The node's; what it had to be given is kept here if it will be needed again.
    model : callable, optional
        Returns the torch module.

    Returns
    -------
    ReceivedModel or None
        None if the node has not the layers that the digest names.

    Raises
    ------
    ModelError
        If the layers that came are not those that the digest names, or `model` is missing.
    """
    content = message.content
    digest, came = named_backbone(content), take_backbone(content)
    received = to_numpy(only_model(content))
    if digest is None:
        return ReceivedModel(received)
    if model is None:
        raise ModelError(
            "write good_enough_mod(data, model=Net): the model has arrays below its output layer, "
            "and only the torch module computes what that layer sees"
        )
    state = {key: value.detach().cpu().numpy() for key, value in model().state_dict().items()}
    backbone = _backbone(digest, came, SplitModel.of(state, received).backbone, context)
    if backbone is None:
        return None
    if came is not None and is_to_be_kept(content):
        context.state[LOCAL_BACKBONE] = came
    whole = {**backbone, **received}
    # In the order of the module's layers, where they are the module's.
    ordered = {key: whole[key] for key in (*(k for k in state if k in whole), *whole)}
    put_whole_model(content, ordered)
    return ReceivedModel(ordered, frozenset(received))


def _backbone(
    digest: str, came: ArrayRecord | None, own: Arrays, context: Context
) -> Arrays | None:
    """Return the layers that a digest names, wherever the node has them."""
    if came is not None:
        arrays = to_numpy(came)
        if (found := backbone_digest(arrays)) != digest:
            raise ModelError(
                f"the layers below the output layer that came (digest {found}) are not those that "
                f"the server means ({digest})"
            )
        return arrays
    if backbone_digest(own) == digest:
        return own
    kept = context.state.get(LOCAL_BACKBONE)
    if isinstance(kept, ArrayRecord) and backbone_digest(arrays := to_numpy(kept)) == digest:
        return arrays
    return None
