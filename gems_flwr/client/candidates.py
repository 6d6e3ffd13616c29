"""How many of a node's held-out samples each of several output layers classifies correctly."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gems_flwr.networks.inputs import linear_layer
from gems_flwr.radii.layer_data import LayerData
from gems_flwr.radii.quality import class_margins
from gems_flwr.samples import Samples
from gems_flwr.spaces.output_layer import OutputLayer
from gems_flwr.typing import Arrays
from gems_flwr.wire.choice_messages import Counts


def judge_candidates(
    candidates: Sequence[Arrays],
    output: OutputLayer,
    samples: Samples,
    *,
    by_class: bool,
    device: str | torch.device = "cpu",
) -> Counts:
    """Return how good each candidate is.

    Parameters
    ----------
    candidates : sequence of arrays
        Output layers under the names of the model's own.
    output : OutputLayer
        Which arrays these are.
    samples : Samples
        Inputs of the layer, and classes, that were held out.
    by_class : bool
        Whether classes are counted apart.
    device : str or torch.device
        Where scores are computed.
    """
    groups = output.num_classes if by_class else 1
    group = samples.labels.long() if by_class else torch.zeros_like(samples.labels).long()
    seen = torch.bincount(group, minlength=groups)[:groups]
    right = []
    for candidate in candidates:
        layer = LayerData(*linear_layer(candidate, output, device), samples.inputs, samples.labels)
        hits = (class_margins(*layer.scores()).amin(dim=1) > 0).cpu()
        right.append(torch.bincount(group[hits], minlength=groups)[:groups])
    return Counts(seen.double().numpy(), torch.stack(right).double().numpy())
