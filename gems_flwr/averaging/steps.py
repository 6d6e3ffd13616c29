"""One step of a global model from models that some clients trained, with or without memory.

With w the global model, w_i what client i made of it, U_i = w − w_i its update, c_i its
coefficient, d_i its share of the data and h_i an old update of its that is still remembered::

    w − Σ_active c_i U_i                                       plain
    w − Σ_all d_i β_i h_i − Σ_active c_i (U_i − β_i h_i)       with control variates

The second estimates the full update Σ d_i U_i without bias if c_i = d_i / p_i, whatever β_i and h_i
are, as long as they are fixed before the draw; its variance is that of U_i − β_i h_i.

FedVARP (Jhunjhunwala et al. 2022) has β = 1; MIFA (Gu et al. 2021) c_i = d_i and β = 1, which is
biased, and does not vary much; GVR* of the CMU 18-786 slides the β that makes U_i − β_i h_i
smallest. SCAFFOLD (Karimireddy et al. 2020) corrects local steps by c − c_i instead, where the
server's c moves with the clients' c_i: `moved_control`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from gems_flwr.averaging.means import weighted_mean, weighted_sum
from gems_flwr.typing import Arrays

Vector = NDArray


def flat(arrays: Arrays) -> Vector:
    """Return the floating-point arrays of a model, in their order, as one vector."""
    parts = [np.ravel(array) for array in arrays.values() if array.dtype.kind == "f"]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.float32)


def unflat(vector: Vector, like: Arrays) -> dict[str, NDArray]:
    """Return a vector's values as the floating-point arrays of a model like `like`."""
    arrays, start = {}, 0
    for name, array in like.items():
        if array.dtype.kind != "f":
            continue
        values = vector[start : start + array.size]
        arrays[name] = values.reshape(array.shape).astype(array.dtype)
        start += array.size
    if start != len(vector):
        raise ValueError(f"the vector has {len(vector)} numbers, the model has {start}")
    return arrays


def update_of(model: Arrays, trained: Arrays) -> Vector:
    """Return U = w − w_i as one vector."""
    return np.asarray(flat(model) - flat(trained))


def best_beta(update: Vector, old: Vector | None) -> float:
    """Return the β for which ‖U − β h‖ is smallest; 0 where there is no old update, or it is 0."""
    if old is None:
        return 0.0
    squared = float(np.dot(old.astype(np.float64), old))
    return float(np.dot(update.astype(np.float64), old)) / squared if squared > 0 else 0.0


def residual_norm(update: Vector, old: Vector | None = None, beta: float = 0.0) -> float:
    """Return ‖U − β h‖."""
    rest = update.astype(np.float64)
    if old is not None and beta:
        rest = rest - beta * old
    return float(np.linalg.norm(rest))


def remembered(
    shares: Mapping[str, float],
    coefficients: Mapping[str, float],
    old: Mapping[str, Vector],
    betas: Mapping[str, float] | None = None,
) -> Vector | None:
    """Return Σ (d_i − c_i) β_i h_i, which control variates add to the plain step.

    By client: d_i of all, in the order of summation; c_i of those that delivered; h_i where there
    is one; β_i, 1 if left out, 0 for who is not in it.
    """
    total: Vector | None = None
    for client, share in shares.items():
        beta = 1.0 if betas is None else betas.get(client, 0.0)
        weight = (share - coefficients.get(client, 0.0)) * beta
        if client in old and weight:
            term = weight * old[client].astype(np.float64)
            total = term if total is None else total + term
    return total


def moved_control(
    control: Vector, changes: Mapping[str, Vector], shares: Mapping[str, float]
) -> Vector:
    """Return SCAFFOLD's c + Σ d_i (change of c_i): c stays Σ d_i c_i over all clients."""
    total = control.astype(np.float64)
    for client, change in changes.items():
        total += shares[client] * change.astype(np.float64)
    return total.astype(control.dtype)


def stepped(
    model: Arrays,
    trained: Sequence[Arrays],
    coefficients: Sequence[float],
    extra: Vector | None = None,
) -> dict[str, NDArray]:
    """Return w − Σ c_i (w − w_i) − extra: w is `model`, w_i `trained`, in the order of summation.

    Computed as (1 − Σ c_i) w + Σ c_i w_i: if the coefficients c_i ≥ 0 sum to 1 it is a weighted
    mean, bit for bit that of `weighted_mean`. Integer arrays become the weighted mean of the
    clients'. `extra` is what control variates add (see `remembered`).
    """
    used = [(a, c) for a, c in zip(trained, coefficients, strict=True) if c > 0]
    if not used:
        new = dict(model)
    else:
        arrays, factors = [a for a, _ in used], [c for _, c in used]
        left = 1 - math.fsum(factors)
        new = weighted_sum(arrays, factors)
        if abs(left) > 1e-12:
            whole = weighted_mean(arrays, factors)
            new = {
                name: new[name] + left * array if array.dtype.kind == "f" else whole[name]
                for name, array in model.items()
            }
    if extra is not None:
        moved = flat(new).astype(np.float64) - extra
        new = {**new, **unflat(moved, model)}
    return {name: np.asarray(array).astype(model[name].dtype) for name, array in new.items()}
