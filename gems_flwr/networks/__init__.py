"""Networks as chains of layers: what a layer sees, other neurons in it, frozen layers."""

from gems_flwr.networks.data import Data, batches
from gems_flwr.networks.hidden import NeuronInputs, read_neuron_inputs
from gems_flwr.networks.inputs import LayerReader
from gems_flwr.networks.layers import (
    WeightLayer,
    neuron_rows,
    outgoing_rows,
    replace_layer,
    weight_layers,
)
from gems_flwr.networks.subclasses import other_output_layer, split_classes
from gems_flwr.networks.surgery import freeze_layers, resize_model, start_afresh

__all__ = [
    "Data",
    "LayerReader",
    "NeuronInputs",
    "WeightLayer",
    "batches",
    "freeze_layers",
    "neuron_rows",
    "other_output_layer",
    "outgoing_rows",
    "read_neuron_inputs",
    "replace_layer",
    "resize_model",
    "split_classes",
    "start_afresh",
    "weight_layers",
]
