"""Networks as chains of layers.

- `layers`: the layers of some arrays, their replacement, other widths, frozen layers.
- `inputs`: a node's data, in whatever form its loader returns them, and what the output layer sees.
- `hidden`: what a hidden layer's neurons see, and the activation behind them.
"""

# ruff: noqa: F403
from __future__ import annotations

from typing import TYPE_CHECKING

from gems_flwr.faces import lazy_face

_NAMES = {
    "hidden": (
        "CHUNK_VALUES Activation activation_of check_convolution image_chunks patches_of "
        "read_neuron_inputs"
    ),
    "inputs": (
        "Data LayerReader NodeData Part batches count_samples is_read_once linear_layer "
        "on_device_of read_node_data watch"
    ),
    "layers": (
        "WeightLayer freeze_lowest lowest_layers neuron_rows outgoing_rows replace_layer "
        "resize_model weight_layers"
    ),
}

if TYPE_CHECKING:
    from gems_flwr.networks.hidden import *
    from gems_flwr.networks.inputs import *
    from gems_flwr.networks.layers import *
else:
    __all__, __getattr__, __dir__ = lazy_face(__name__, _NAMES)
