"""What a node adds to sums of which only the total is looked at, within its limits.

The values are computed as for any other server; what is special is how they leave: rounded to the
grid that the instruction says, as elements of rings (see `gems_flwr.wire.summands`). A mod around
this one may add masks to them.
"""

from __future__ import annotations

import numpy as np
import torch
from flwr.app import RecordDict

from gems_flwr.client.limits import NodeLimits
from gems_flwr.client.loss_answers import losses_at, scaled_layer
from gems_flwr.errors import ModelError
from gems_flwr.moments.class_sums import ClassSums, in_chunks, sum_classes
from gems_flwr.moments.loss_sums import loss_sums
from gems_flwr.moments.moment_sums import (
    asked_for,
    covariance_sums,
    large_enough,
    mean_sums,
    random_columns,
    scale_sums,
    sketch_sums,
)
from gems_flwr.moments.refine_sections import gradient_summand
from gems_flwr.moments.total_sums import class_sums_values
from gems_flwr.samples import Samples
from gems_flwr.secure.fixed_point import Layout
from gems_flwr.spaces.output_layer import OutputLayer
from gems_flwr.typing import Arrays, Float
from gems_flwr.wire.choice_messages import Counts
from gems_flwr.wire.gradient_requests import Beside, GradientRequest, LossesRequest
from gems_flwr.wire.keys import RIGHT, SEEN
from gems_flwr.wire.moment_requests import Directions, MomentSums
from gems_flwr.wire.summands import pack_summand


def answer_moment_sums(
    request: MomentSums,
    directions: Directions | None,
    layout: Layout,
    samples: Samples,
    classes: int,
    bounds: NodeLimits,
    *,
    name: str,
    masked: bool = False,
    device: str | torch.device = "cpu",
) -> RecordDict:
    """Return the reply with a summand of class moments.

    Parameters
    ----------
    request : MomentSums
        Which sum.
    directions : Directions, optional
        What came beside it.
    layout : Layout
        How the summand is written.
    samples : Samples
        Inputs of the output layer on the node's training data.
    classes : int
        Of the task.
    bounds : NodeLimits
        What the node gives away at most.
    name : str
        The node's.
    masked : bool
        Whether nobody will see the summand itself.
    device : str or torch.device
        Where to compute.

    Raises
    ------
    RefusedError
        If the limits do not allow it.
    """
    least = bounds.least_for_sums(request.min_count, masked=masked)
    samples = large_enough(samples, least, request.totals)
    features = samples.inputs.shape[1]
    if directions is not None and directions.rows.shape[1] != features:
        raise ModelError(f"directions of {directions.rows.shape[1]} inputs, there are {features}")
    counts = torch.bincount(samples.labels.long(), minlength=classes).numpy()
    told = 0 if directions is None else len(directions.rows) + request.random
    if request.stage == "full":
        told = features
    asked = {section.name for section in layout.sections}
    if request.stage == "covariances":
        shown = np.array([f"second-{label}" in asked for label in range(classes)])
        counts = np.where(shown, counts, 0)
    totals = np.array(request.totals) if masked and request.totals else None
    bounds.check_summand(request.stage, counts, features, told, masked=masked, totals=totals)
    values: dict[str, Float]
    if request.stage == "scale":
        values = scale_sums(samples, classes, guarded=bounds.largest_rank != "full")
    elif request.stage == "means":
        values = mean_sums(samples, classes, device)
    elif request.stage == "full":
        values = class_sums_values(_class_sums(samples, classes, device))
    else:
        assert directions is not None
        standard = (directions.center, directions.scale)
        if request.stage == "sketch":
            random = random_columns(features, request.random, request.seed)
            columns = np.concatenate([directions.rows.T, random], axis=1)
            values = sketch_sums(samples, *standard, columns, device)
        else:
            values = covariance_sums(samples, classes, *standard, directions.rows, device)
    sections = {section.name: section for section in layout.sections}
    return pack_summand(asked_for(values, sections), layout, name=name)


def _class_sums(samples: Samples, classes: int, device: str | torch.device) -> ClassSums:
    if len(samples):
        return sum_classes(in_chunks(samples.inputs, samples.labels, device=device), classes)
    width = samples.inputs.shape[1]
    return ClassSums(
        classes,
        np.zeros(0, dtype=np.int64),
        np.zeros(0),
        np.zeros((0, width)),
        np.zeros((0, width, width)),
    )


def answer_summed_loss(
    request: GradientRequest | LossesRequest,
    beside: Beside,
    arrays: Arrays,
    output: OutputLayer,
    samples: Samples,
    bounds: NodeLimits,
    layout: Layout,
    *,
    name: str,
    masked: bool = False,
    device: str | torch.device = "cpu",
) -> RecordDict:
    """Return the reply with a summand of loss, gradient and curvature, or of losses at points.

    Raises
    ------
    RefusedError
        If too few samples stand behind the gradient.
    """
    # The same samples as in the moments, whose totals bound these sums.
    samples = large_enough(samples, bounds.least_for_sums(request.min_count, masked=masked))
    layer = scaled_layer(arrays, output, beside.scale)
    weights = request.weights_of(len(layer))
    labels = samples.labels.long().cpu()
    by_class = weights * torch.bincount(labels, minlength=len(layer)).numpy()
    if not isinstance(request, GradientRequest):
        losses = losses_at(request, beside, layer, samples, device)
        return pack_summand({"losses": losses, "weights": by_class}, layout, name=name)
    about = (samples, layer, beside.scale, weights)
    sums = loss_sums(*about, by_class=request.by_class, device=device)
    bounds.check_gradient(sums.count, sums.fewest, output.features, masked=masked)
    values = gradient_summand(sums, by_class, beside.center / beside.scale)
    return pack_summand(values, layout, name=name)


def answer_summed_counts(counts: Counts, layout: Layout, *, name: str) -> RecordDict:
    """Return the reply with how many held-out samples there are, and how many are right."""
    return pack_summand({SEEN: counts.seen, RIGHT: counts.right}, layout, name=name)
