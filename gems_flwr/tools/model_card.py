"""A model card: what a model is, what it was made of, and what it cost, for whoever gets it.

Markdown with the front matter of Hugging Face's model cards. Of data it has totals only. What
somebody else sent (names of nodes and metrics, reasons of failures) stands in code spans or in a
fenced block, on one line and without the characters that end a span.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gems_flwr.core.disk import write_atomically
from gems_flwr.core.log import result_lines
from gems_flwr.core.records import single_numbers, to_numpy
from gems_flwr.strategies.members import split_models

if TYPE_CHECKING:
    from gems_flwr.core.run import RunResult
    from gems_flwr.strategies.loop import RoundLoop

_LONGEST = 200  # characters of somebody else's text
_MOST_SCORES = 50
_TEMPLATE = """\
---
# license: the owner's choice, see the end
tags:
- federated-learning
- flower
- gems-flwr
---

# {title}

Trained by federated learning of {asked} nodes on {data}, {examples} training examples: strategy
{strategy}, {rounds} rounds, {up:,} bytes up and {down:,} down in all.

## Results

{models} models with {weights:,} weights.

- On the server's test data: {test}
- On the nodes' own data, weighted mean: {nodes}

```text
{report}
```

## Privacy

{privacy}

## How to make it again

```sh
{command}
```

{made}

## Use and licence

To be filled in by whoever publishes the model: intended use; for whom it works less well; the
licence, also as `license:` at the top.
"""


def write_model_card(
    result: RunResult,
    path: str | Path,
    *,
    strategy: RoundLoop | None = None,
    title: str = "model",
    data: str = "data of their own",
    examples: int | None = None,
    command: str | None = None,
) -> str:
    """Write the model card of a run, in Markdown, and return its text.

    Parameters
    ----------
    result : RunResult
        What `start` returned.
    path : path
        The file.
    strategy : RoundLoop, optional
        What made it; without it the card has nothing on privacy.
    title, data, command : str, optional
        What the model is called; the data set, and how it was divided; what makes it again.
    examples : int, optional
        How many training examples all nodes have together.

    Examples
    --------
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> import numpy as np
    >>> from gems_flwr.core import RunResult
    >>> from gems_flwr.core.records import to_record
    >>> from gems_flwr.tools import write_model_card
    >>> result = RunResult(arrays=to_record({"w": np.zeros(2)}))
    >>> with TemporaryDirectory() as folder:
    ...     text = write_model_card(result, Path(folder, "card.md"), title="wards")
    >>> "# `wards`" in text
    True
    """
    rounds = [record for record in result.history if record.round]
    last = result.history[-1] if result.history else None
    hidden = strategy is not None and strategy.secure is not None
    lines = [x for x in result_lines(result) if not (hidden and x.startswith("Node scores"))]
    models = split_models(to_numpy(result.arrays))
    made = {"seed": strategy.seed if strategy else "not known", **versions()}
    made["made"] = datetime.now(UTC).isoformat(timespec="seconds")
    text = _TEMPLATE.format(
        title=shown(title),
        asked=len({node for record in rounds for node in record.nodes_asked}),
        data=shown(data),
        examples="unknown" if examples is None else f"{examples:,}",
        strategy=shown(type(strategy).__name__ if strategy else "not known"),
        rounds=len(rounds),
        up=result.traffic.bytes_up,
        down=result.traffic.bytes_down,
        models=len(models),
        weights=sum(array.size for arrays in models.values() for array in arrays.values()),
        test=_scores(single_numbers(last.server_metrics) if last else {}),
        nodes=_scores(single_numbers(last.evaluate_metrics) if last else {}),
        report="\n".join(map(_line, lines)),
        privacy="\n".join(f"- {line}" for line in _privacy(result.details, strategy)),
        command=_line(command or "# not known", 2000),
        made="\n".join(f"- {name}: {shown(value)}" for name, value in made.items()),
    )
    write_atomically(Path(path), text.encode())
    return text


def shown(text: object) -> str:
    """Return somebody else's text as a code span that nothing in it can end.

    Examples
    --------
    >>> from gems_flwr.tools.model_card import shown
    >>> print(shown("<b>`north`|south"))
    `<b>'north'|south`
    """
    return f"`{_line(str(text)) or '?'}`"


def _line(text: str, most: int = _LONGEST) -> str:
    plain = "".join(c if c.isprintable() else " " for c in text[: 4 * most])
    return " ".join(plain.replace("`", "'").split())[:most]


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that make a model."""
    packages = ("gems-flwr", "flwr", "torch", "numpy")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def _scores(scores: Mapping[str, float]) -> str:
    some = list(scores.items())[:_MOST_SCORES]
    return ", ".join(f"{shown(name)} {value:.4g}" for name, value in some) or "not measured"


def _privacy(details: Mapping[str, Any], strategy: RoundLoop | None) -> list[str]:
    lines = []
    if promise := details.get("privacy"):
        lines.append(
            f"Differential privacy of the sum: epsilon {promise['epsilon']:g}, delta "
            f"{promise['delta']:g} for the run as a whole, with noise of {promise['nodes']} nodes, "
            f"of whom {promise['colluders']} may collude. It is about the totals: without secure "
            "sums the server sees more."
        )
    if strategy is None:
        return lines or ["Which options protected the nodes is not known here."]
    # Layer by layer the output layer has a strategy of its own.
    space = getattr(strategy, "space", None) or getattr(
        getattr(strategy, "head", None), "space", None
    )
    if (epsilon := getattr(space, "dp_epsilon", None)) is not None:
        lines.append(
            "Differential privacy of each node: every answer about the output layer had noise of "
            f"epsilon {epsilon:g}; what a node has spent in all stands in its own ledger."
        )
    if lines and (getattr(strategy, "dp_seeded", False) or getattr(space, "dp_seeded", False)):
        lines.append(
            "The noise came from the run's seed, as in simulations: whoever has the seed can "
            "subtract it, so this very model protects no data by it."
        )
    seen = "on, the server saw totals alone" if strategy.secure else "off"
    return [*(lines or ["Differential privacy: none was asked for."]), f"Secure sums: {seen}."]
