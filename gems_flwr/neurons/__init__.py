"""Hidden layers of GEMS: balls of neurons on a node, merged into one layer at the server.

- `balls`: the good-enough balls of a layer's neurons.
- `screen`: which nodes' neurons may be merged.
- `merge`: one layer with a neuron in every ball of every node.
"""

from gems_flwr.neurons.balls import NeuronBalls, NeuronData, neuron_balls
from gems_flwr.neurons.merge import MergedLayer, merge_neurons
from gems_flwr.neurons.screen import oversized_layers

__all__ = [
    "MergedLayer", "NeuronBalls", "NeuronData", "merge_neurons", "neuron_balls", "oversized_layers",
]  # fmt: skip
