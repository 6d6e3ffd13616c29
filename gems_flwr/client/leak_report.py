"""What a node's replies give away, said in the node's own log: ``report_leaks=True``.

The server sees nothing of it, and the reply is the same to the last bit. A line for every class
that is given away, as a warning, and one for all of it::

    leaks: node 3, class 3: 33 samples of 784 features, 33 of 33 were rebuilt …: do not send
    leaks: node 3 answers with a cone: 1 of 10 classes given away

Decided here: a report never fails a reply; if it cannot be made, the log says why. What is random
in it comes from the request's seed. It is a quick look (`gems_flwr.leaks.quick_look`), some seconds
at most; ``gems-flwr inspect`` has the time for more.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from gems_flwr.errors import OptionError, describe_fault
from gems_flwr.moments.class_sums import ClassSums
from gems_flwr.moments.loss_sums import LossSums
from gems_flwr.samples import Samples
from gems_flwr.spaces.cone import ClassMomentCone

logger = logging.getLogger("flwr.gems.node")

NODE_KEY = "report-leaks"
# Rows of a gradient with fewer samples behind them are worth a warning.
FEW_IN_A_ROW = 8.0


def wants_report(asked: bool, node_config: Mapping[str, Any]) -> bool:
    """Return whether the mod's argument or the node's config asks for reports.

    Raises
    ------
    OptionError
        If the config has something else than true or false.
    """
    configured = node_config.get(NODE_KEY, False)
    if not isinstance(configured, bool):
        raise OptionError(f"node-config {NODE_KEY}: expected bool, got {configured!r}")
    return asked or configured


def report_space(space: Any, samples: Samples, *, node: str, seed: int) -> None:
    """Log what a space gives away.

    Parameters
    ----------
    space : ClassMomentCone, ClassSums or another space
        What is about to leave the node.
    samples : Samples
        What it was made of.
    node : str
        The node's name.
    seed : int
        Of everything that is random.
    """
    try:
        for level, line in _lines(space, samples, node, seed):
            logger.log(level, "leaks: %s", line)
    except Exception as error:
        logger.warning("leaks: no report on node %s: %s", node, describe_fault(error))


def _lines(space: Any, samples: Samples, node: str, seed: int) -> list[tuple[int, str]]:
    if not isinstance(space, ClassMomentCone | ClassSums):
        kind = getattr(space, "kind", type(space).__name__)
        told = f"node {node} answers with a {kind}: what its model tells is not looked at"
        return [(logging.INFO, told)]
    # Here, for scikit-learn takes a while to import and most nodes want no report.
    from gems_flwr.leaks.made_of import LayerSamples
    from gems_flwr.leaks.quick_look import quick_look
    from gems_flwr.leaks.report_text import summary, verdict

    inputs = samples.inputs.detach().cpu().double().numpy()
    data = LayerSamples(inputs, samples.labels.cpu().numpy().astype(np.int64))
    found = quick_look(space, data, seed)
    lines = [(logging.WARNING, f"node {node}, {verdict(finding)}") for finding in found.given_away]
    what = "sums" if isinstance(space, ClassSums) else f"a {space.kind}"
    return [*lines, (logging.INFO, f"node {node} answers with {what}: {summary(found)}")]


def report_gradient(sums: LossSums, *, node: str) -> None:
    """Log how many samples stand behind the rows of a gradient."""
    level = logging.WARNING if sums.fewest < FEW_IN_A_ROW else logging.INFO
    logger.log(
        level,
        "leaks: node %s answers with a gradient of %d samples: %.3g stand behind the row that the "
        "fewest do",
        node,
        sums.count,
        sums.fewest,
    )
