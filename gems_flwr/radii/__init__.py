"""Node side: how far around a layer, or a neuron, models stay good enough."""
