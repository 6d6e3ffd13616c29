"""The privacy that a node has spent, kept where neither a message nor a restart can undo it.

Written before a release leaves the node: a crash in between spends too much, never too little. What
is kept is the sum of squared mu of all Gaussian releases, from which any (epsilon, delta) follows
(see `gems_flwr.moments.private_release`). It lies in the node's state in Flower and in a file:
the state is that of one run, and gone when a SuperNode restarts. The larger of the two counts.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path

from flwr.app import ConfigRecord, Context

from gems_flwr.client.fault_reply_mod import node_name
from gems_flwr.client.limits import NodeLimits
from gems_flwr.disk.files import write_atomically
from gems_flwr.errors import CheckpointError, RefusedError
from gems_flwr.moments.private_release import spent_epsilon
from gems_flwr.wire.keys import PRIVACY_SPENT, SQUARED_MU

try:
    import fcntl
except ImportError:  # Windows: one process per node, as Flower starts them
    fcntl = None  # type: ignore[assignment]


def spend(squared_mu: float, limits: NodeLimits, context: Context) -> float:
    """Note a release that is about to be made, and return the epsilon spent with it.

    Parameters
    ----------
    squared_mu : float
        Of the release.
    limits : NodeLimits
        The node's budget and ledger.
    context : Context
        Whose state keeps the sum.

    Raises
    ------
    RefusedError
        If the release would exceed the budget; nothing is noted then.
    CheckpointError
        If the ledger cannot be read: what was spent is not known.
    """
    path = limits.ledger_of(node_name(context))
    with _locked(path):
        before = max(_in_state(context), 0.0 if path is None else _in_file(path))
        total = before + squared_mu
        epsilon = spent_epsilon(total, limits.dp_delta)
        if limits.dp_budget is not None and epsilon > limits.dp_budget * (1 + 1e-9) + 1e-6:
            spent = spent_epsilon(before, limits.dp_delta)
            raise RefusedError(
                "dp_budget",
                f"epsilon {spent:.4g} of {limits.dp_budget:g} is spent at delta "
                f"{limits.dp_delta:g}, and this release would make it {epsilon:.4g}"
                " (in a simulation, give the mod limits=UNLIMITED)",
            )
        if path is not None:
            write_atomically(path, json.dumps({"squared_mu": total}).encode())
        context.state[PRIVACY_SPENT] = ConfigRecord({SQUARED_MU: total})
    return epsilon


def _in_state(context: Context) -> float:
    record = context.state.get(PRIVACY_SPENT)
    value = record.get(SQUARED_MU) if isinstance(record, ConfigRecord) else 0.0
    return float(value) if isinstance(value, int | float) else 0.0


def _in_file(path: Path) -> float:
    if not path.exists():
        return 0.0
    try:
        value = float(json.loads(path.read_text())["squared_mu"])
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"squared_mu is {value}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"the privacy ledger {path} cannot be read ({error}), so what was spent is not known: "
            "put a copy back, or remove it if nothing was ever released"
        ) from error
    return value


@contextlib.contextmanager
def _locked(path: Path | None) -> Iterator[None]:
    """Let one process of a node at a time read and write its ledger."""
    if path is None or fcntl is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
