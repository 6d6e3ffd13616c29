"""The best pooled model, where there is one: a linear output layer on fixed features.

That is logistic regression, and every network whose only weights are those of its output layer,
such as one on a seeded lift. The ridge is chosen by cross-validation within the pooled training
data; then the layer is solved on all of it. The nodes' own validation parts are not sent and play
no role.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from gems_flwr.errors import ModelError
from gems_flwr.networks.inputs import LayerReader
from gems_flwr.spaces.output_layer import flatten_linear
from gems_flwr.typing import Arrays
from simulations.experiment.softmax_regression import (
    TOLERANCE,
    choose_ridge,
    solve,
    stratified_folds,
)

FOLDS = 5


def linear_optimum(
    model: nn.Module, data: tuple[Tensor, Tensor], seed: int, device: str = "cpu"
) -> tuple[Arrays, Mapping[str, Any]] | None:
    """Return the best arrays of a model and how they were found; None if it has more to learn.

    Parameters
    ----------
    model : torch.nn.Module
        Maps a batch to logits.
    data : pair of tensors
        All inputs as the model sees them, and all labels.
    seed : int
        Decides what is held out when; at least 0.
    device : str
        Where the model computes what its output layer sees; the layer itself is solved for on the
        CPU.

    Returns
    -------
    tuple or None
        Arrays by name, and for a result's details ``ridge``, ``objective`` (the mean loss with its
        ridge), ``gradient_norm`` (at most ``gradient_tolerance`` if it has ``converged``),
        ``steps`` of the solver, and from cross-validation ``validation_accuracy`` and
        ``validation_loss``.
    """
    arrays = {name: each.detach().cpu().numpy() for name, each in model.state_dict().items()}
    reader = LayerReader(arrays, model, device=device)
    try:
        layer = reader.output_layer(data)
    except ModelError:
        return None
    if layer.bias is None or layer.outputs < 2 or arrays.keys() != set(layer.keys):
        return None
    seen = reader.read(data, layer)
    choice = choose_ridge(
        seen.inputs,
        seen.labels,
        classes=layer.outputs,
        folds=stratified_folds(seen.labels, FOLDS, seed),
    )
    best = solve(
        seen.inputs,
        seen.labels,
        classes=layer.outputs,
        ridge=choice.ridge,
        start=choice.start,
    )
    weight, bias = best.layer[:, :-1].numpy(), best.layer[:, -1].numpy()
    told = {
        "converged": best.gradient_norm <= TOLERANCE,
        "ridge": best.ridge,
        "gradient_norm": best.gradient_norm,
        "gradient_tolerance": TOLERANCE,
        "objective": best.loss,
        "steps": best.steps,
        "validation_accuracy": choice.accuracy,
        "validation_loss": choice.loss,
    }
    return layer.replace_in(arrays, flatten_linear(weight, bias)), told
