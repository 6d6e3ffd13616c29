"""A fixed lift is computed once: training and scoring then see a linear layer on its outputs.

A network whose only weights are those of its output layer, above modules that never change (random
filters from a seed), gives every example the same features in every round. Two hundred rounds of
federated averaging would compute them two hundred times.
"""

from __future__ import annotations

import threading
import weakref

import numpy as np
from torch import nn

from gems_flwr.devices import chosen_device
from gems_flwr.networks import watch
from simulations.data.examples import Examples
from simulations.experiment.training import placed, tensors, torch_threads

# Of features that are kept; beyond it they are computed each time.
_LIMIT_BYTES = 1200 * 2**20
_CHUNK = 1024
# Modules that change nothing but the shape: what stands on them alone is no lift.
_PLAIN = (nn.Sequential, nn.Flatten, nn.Identity, nn.Linear, nn.Dropout)


def layer_on_lift(model: nn.Module) -> nn.Linear | None:
    """Return the linear layer that is all that a model learns, if it stands on a fixed lift."""
    modules = list(model.named_modules())
    if all(isinstance(module, _PLAIN) for _, module in modules):
        return None
    linear = [(name, module) for name, module in modules if isinstance(module, nn.Linear)]
    if len(linear) != 1 or any(isinstance(m, nn.modules.dropout._DropoutNd) for _, m in modules):
        return None
    name, layer = linear[0]
    prefix = f"{name}." if name else ""
    own = {f"{prefix}{key}" for key in layer.state_dict()}
    return layer if model.state_dict().keys() == own else None


class LiftMemory:
    """Features of examples, by the examples and the lift that they belong to."""

    def __init__(self) -> None:
        # Features are forgotten with the examples that they are of.
        self._known: weakref.WeakKeyDictionary[Examples, dict[str, Examples]]
        self._known = weakref.WeakKeyDictionary()
        # A node that overstays is left behind in its thread, where it may still train.
        self._lock = threading.Lock()

    def lifted(
        self,
        model: nn.Module,
        examples: Examples,
        *,
        architecture: str,
        scale: float,
        threads: int = 1,
        device: str = "cpu",
    ) -> tuple[nn.Linear, Examples] | None:
        """Return a model's output layer and what it sees of some examples.

        None if the model has more to learn than that layer, or nothing fixed below it. Two models
        of one ``architecture``, which is what they were built from, have the same lift.
        """
        layer = layer_on_lift(model)
        if layer is None or not len(examples):
            return None
        with self._lock:
            known = self._known.setdefault(examples, {})
            key = f"{architecture} on {device}"
            found = known.get(key)
            if found is None:
                features = _features(model, layer, examples, scale, threads, device)
                found = Examples(features, examples.labels)
                kept = [each for lifts in self._known.values() for each in lifts.values()]
                held = sum(each.features.nbytes for each in kept)
                if held + features.nbytes <= _LIMIT_BYTES:
                    known[key] = found
        return layer, found


def _features(
    model: nn.Module, layer: nn.Linear, examples: Examples, scale: float, threads: int, device: str
) -> np.ndarray:
    [name] = [name for name, module in model.named_modules() if module is layer]
    rows = []
    with torch_threads(threads), placed(model, chosen_device(device), training=False):
        for start in range(0, len(examples), _CHUNK):
            part = examples.take(np.arange(start, min(start + _CHUNK, len(examples))))
            inputs, _ = tensors(part, scale=scale)
            rows.append(watch(model, inputs, [name])[0].inputs.cpu().numpy())
    return np.concatenate(rows)


LIFTS = LiftMemory()
