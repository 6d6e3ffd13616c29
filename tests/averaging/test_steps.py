"""Steps of a global model from some clients' updates, with and without memory of the others'."""

import numpy as np
import pytest

from gems_flwr.averaging import (
    aggregation_coefficients,
    best_beta,
    draw_assignment,
    flat,
    remembered,
    residual_norm,
    stepped,
    unflat,
    weighted_mean,
)


def model(seed, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return {
        "w": rng.normal(size=(3, 2)).astype(dtype),
        "count": np.array(seed, dtype=np.int64),
        "b": rng.normal(size=2),
    }


def test_coefficients_that_sum_to_one_give_the_weighted_mean_bit_for_bit():
    models, counts = [model(s) for s in range(1, 8)], [3, 1, 7, 7, 2, 11, 5]
    shares = [n / sum(counts) for n in counts]
    ours, theirs = stepped(model(0), models, shares), weighted_mean(models, counts)
    for name, array in theirs.items():
        assert ours[name].dtype == array.dtype
        assert ours[name].tobytes() == array.tobytes()


def test_a_plain_step_moves_against_the_weighted_updates():
    """By hand: w − Σ c (w − w_i), with coefficients that sum to 2.5; the counter is a mean."""
    w, trained, c = model(0), [model(3), model(6)], [2.0, 0.5]
    new = stepped(w, trained, c)
    for name in ("w", "b"):
        step = sum(f * (w[name] - t[name]) for f, t in zip(c, trained, strict=True))
        assert new[name] == pytest.approx(w[name] - step, abs=1e-5)
        assert new[name].dtype == w[name].dtype
    assert new["count"] == round((2 * 3 + 0.5 * 6) / 2.5)


def test_vectors_and_models_are_the_same_numbers():
    w = model(2)
    back = unflat(flat(w), w)
    assert back.keys() == {"w", "b"}
    assert all(np.array_equal(back[k], w[k]) for k in back)
    with pytest.raises(ValueError, match="has 9 numbers, the model has 8"):
        unflat(np.zeros(9), w)


def test_the_best_beta_leaves_what_is_orthogonal_to_the_old_update():
    rng = np.random.default_rng(0)
    update, old = rng.normal(size=9), rng.normal(size=9)
    beta = best_beta(update, old)
    assert np.dot(update - beta * old, old) == pytest.approx(0, abs=1e-12)
    smallest = residual_norm(update, old, beta)
    assert all(smallest <= residual_norm(update, old, beta + e) for e in (-0.1, 0.1))
    assert best_beta(update, None) == best_beta(update, np.zeros(9)) == 0
    assert residual_norm(update) == pytest.approx(np.linalg.norm(update))


@pytest.mark.parametrize("kind", ["fedvarp", "best"])
def test_control_variates_change_the_variance_and_not_the_mean(kind):
    """Monte Carlo: the step is unbiased, and varies as U − βh does, far less than U."""
    rng = np.random.default_rng(1)
    n = 6
    w = {"w": rng.normal(size=4)}
    old = {str(i): rng.normal(size=4) for i in range(n)}
    updates = {i: 0.8 * old[i] + 0.05 * rng.normal(size=4) for i in old}
    trained = {i: {"w": w["w"] - updates[i]} for i in old}
    shares = dict.fromkeys(old, 1 / n)
    betas = None if kind == "fedvarp" else {i: best_beta(updates[i], old[i]) for i in old}
    p, d = np.full((n, 1), 0.4), np.full((n, 1), 1 / n)
    steps = []
    for _ in range(4000):
        c = aggregation_coefficients(d, p, draw_assignment(p, rng))[:, 0]
        delivered = {str(i): float(c[i]) for i in range(n) if c[i] > 0}
        extra = remembered(shares, delivered, old, betas)
        new = stepped(w, [trained[i] for i in delivered], list(delivered.values()), extra)
        steps.append(w["w"] - new["w"])
    full = sum(updates[i] / n for i in old)
    error = np.std(steps, axis=0) / np.sqrt(len(steps))
    assert (np.abs(np.mean(steps, axis=0) - full) <= 5 * error).all()
    rest = [residual_norm(updates[i], old[i], 1.0 if betas is None else betas[i]) for i in old]
    expected = sum((r / n) ** 2 * (1 / 0.4 - 1) for r in rest)
    assert np.var(steps, axis=0).sum() == pytest.approx(expected, rel=0.1)
