"""What a node adds to a sum that is private as a whole: its numbers, and its share of the noise.

The one place where noise is added: after the node's numbers are whole, before they are packed
and masked. What the release spends is in the ledger by then.

Decided here: the node counts the shares of noise that it believes in, not those that the server
promises. Its own is always there; `NodeLimits.honest_nodes` says how many it is sure of.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from flwr.app import Context, RecordDict
from numpy.typing import NDArray

from gems_flwr.client.limits import NodeLimits
from gems_flwr.client.masking import masked_with
from gems_flwr.client.privacy_ledger import spend
from gems_flwr.errors import ModelError, RefusedError
from gems_flwr.moments.class_sums import check_batch
from gems_flwr.moments.private_release import spent_epsilon
from gems_flwr.moments.whole_sums import gradient_sums, mean_sums, spread_sums
from gems_flwr.samples import Samples
from gems_flwr.secure.discrete_gaussian import discrete_gaussian
from gems_flwr.secure.fixed_point import Layout, Words
from gems_flwr.secure.shared_noise import EPSILON_PART, SMALLEST_SHARE, epsilon_cost, squared_mu_of
from gems_flwr.spaces.output_layer import OutputLayer
from gems_flwr.typing import Arrays, Float
from gems_flwr.wire.private_sum_requests import PrivateSum
from gems_flwr.wire.summands import summand_reply


def answer_private_sum(
    request: PrivateSum,
    center: Float | None,
    layout: Layout,
    arrays: Arrays,
    output: OutputLayer,
    samples: Samples,
    bounds: NodeLimits,
    context: Context,
    *,
    name: str,
    seed: int,
) -> RecordDict:
    """Return the reply with a noisy summand.

    Parameters
    ----------
    request : PrivateSum
        What is asked for.
    center : array of shape (D,), optional
        What is taken from inputs; nothing for means.
    layout : Layout
        How the summand is to be written.
    arrays : mapping from str to ndarray
        The model.
    output : OutputLayer
        Its output layer.
    samples : Samples
        What that layer sees of the node's training data.
    bounds : NodeLimits
        What the node gives away at most.
    context : Context
        Whose state keeps the ledger.
    name : str
        The node's.
    seed : int
        Of the noise, where the request wants it to be known.

    Raises
    ------
    RefusedError
        If the node gives away no such thing, or its budget is spent.
    """
    honest = bounds.check_private_sum(request, masked_with())
    shapes = request.shapes(output.num_classes, output.features)
    asked = {section.name: section.shape for section in layout.sections}
    if asked != shapes:
        raise ModelError(f"the server wants {asked} for a sum of {shapes}")
    values = _summed(request, center, arrays, output, samples)
    squared_mu = squared_mu_of(request.noise, honest)
    _refuse_coarse(request, layout.size, honest, squared_mu, bounds)
    spend(squared_mu, bounds, context)
    noise_seed = seed if request.dp_seeded else None
    words = layout.add([_words(values, layout), noise_words(request, layout, noise_seed)])
    return summand_reply(layout.pack(words), name=name)


def noise_words(request: PrivateSum, layout: Layout, seed: int | None = None) -> Words:
    """Return a node's share of the noise, as elements of the rings.

    Parameters
    ----------
    request : PrivateSum
        How much.
    layout : Layout
        For what.
    seed : int, optional
        For simulations: whoever knows it can subtract the noise.
    """
    sections = layout.sections
    seeds: list[int | None] = [None] * len(sections)
    if seed is not None:
        seeds = np.random.SeedSequence(seed).generate_state(len(sections), np.uint64).tolist()
    parts = [
        discrete_gaussian(section.size, request.deviation(section.name), own)
        for section, own in zip(sections, seeds, strict=True)
    ]
    return layout.reduced(np.concatenate(parts).view(np.uint64))


def _summed(
    request: PrivateSum,
    center: Float | None,
    arrays: Arrays,
    output: OutputLayer,
    samples: Samples,
) -> dict[str, NDArray[np.int64]]:
    classes = output.num_classes
    check_batch(samples.inputs, samples.labels, classes)
    inputs = samples.inputs.detach().cpu().double().numpy()
    labels = samples.labels.long().cpu().numpy()
    if request.stage == "means":
        return mean_sums(inputs, labels, classes, request.clip)
    if center is None or len(center) != output.features:
        raise ModelError(f"the server wants inputs centred, and sent no {output.features} numbers")
    if request.stage == "spread":
        return spread_sums(inputs, center, request.clip)
    layer = output.scaled_in(arrays, np.ones(output.features))
    weight, bias = layer[:, :-1], layer[:, -1]
    about = (weight, bias, center, request.clip, request.longest)
    return gradient_sums(inputs, labels, *about)


def _words(values: Mapping[str, NDArray[np.int64]], layout: Layout) -> Words:
    """Return whole numbers as elements of the rings; what is too large wraps."""
    flat = np.concatenate([values[section.name].ravel() for section in layout.sections])
    return layout.reduced(flat.view(np.uint64))


def _refuse_coarse(
    request: PrivateSum, numbers: int, honest: int, squared_mu: float, bounds: NodeLimits
) -> None:
    """Refuse noise that is too small on its grid to be what the ledger takes it for."""
    share = request.deviation("corner" if request.stage == "spread" else "")
    if share >= SMALLEST_SHARE:
        epsilon = spent_epsilon(squared_mu, bounds.dp_delta)
        if epsilon_cost(numbers, share, honest) <= EPSILON_PART * max(epsilon, EPSILON_PART):
            return
    raise RefusedError("dp_budget", f"noise of {share:.3g} steps of the grid counts for none")
