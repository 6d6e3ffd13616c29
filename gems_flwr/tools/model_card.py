"""A model card: what a model is, what it was made of, and what it cost, for whoever gets it.

Markdown with the front matter of Hugging Face's model cards. Of data it has counts only, and where
the server saw only sums, nothing about a single node. Names of nodes, reasons of failures and names
of metrics are what somebody else sent: they stand in code spans alone, on one line and without the
characters that end a span or a cell.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gems_flwr.core.disk import write_atomically
from gems_flwr.core.log import result_lines
from gems_flwr.core.records import single_numbers, to_numpy
from gems_flwr.strategies.members import split_models

if TYPE_CHECKING:
    from gems_flwr.core.run import RunResult
    from gems_flwr.strategies.loop import RoundLoop

FILE = "model_card.md"
# Rows of a table, and characters of a cell; a federation of thousands has other files.
_MOST_ROWS, _LONGEST = 50, 200
_UNKNOWN = "not known"
_TEMPLATE = """\
---
# license: the owner's choice, see the end
tags:
- federated-learning
- flower
- gems-flwr{metrics}
---

# {title}

Trained{simulated} by federated learning of {asked} nodes{data}: strategy {strategy}, {rounds} \
rounds, {up:,} bytes up and {down:,} down in all.

## Model and results

{models}

- On the server's test data: {test}
- On the nodes' own data, weighted mean: {nodes}

```text
{report}
```

## Data

Counts of training examples only:

{examples}

## Privacy

{privacy}

## How to make it again

{command}{made}

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
    data: str | None = None,
    examples: Mapping[str, int | Sequence[int]] | None = None,
    command: str | None = None,
    simulated: bool = False,
) -> str:
    """Write the model card of a run, in Markdown, and return its text.

    Parameters
    ----------
    result : RunResult
        What `start` returned.
    path : path
        The file, or a folder, in which it is called ``model_card.md``.
    strategy : RoundLoop, optional
        What made it; without it the card has nothing on privacy.
    title, data, command : str, optional
        What the model is called; the data set, and how it was divided; what makes it again.
    examples : mapping from str to int or sequence of int, optional
        How many training examples each node has, or how many of each class.
    simulated : bool, default False
        Whether the nodes are those of a simulation.

    Raises
    ------
    DiskError
        If the file cannot be written.

    Examples
    --------
    >>> from tempfile import TemporaryDirectory
    >>> import numpy as np
    >>> from gems_flwr.core import RunResult
    >>> from gems_flwr.core.records import to_record
    >>> from gems_flwr.tools import write_model_card
    >>> result = RunResult(arrays=to_record({"w": np.zeros(2)}))
    >>> with TemporaryDirectory() as folder:
    ...     text = write_model_card(result, folder, title="wards")
    >>> "# `wards`" in text
    True
    """
    rounds = [record for record in result.history if record.round]
    last = result.history[-1] if result.history else None
    test = single_numbers(last.server_metrics) if last else {}
    hidden = strategy is not None and strategy.secure is not None
    made = {"seed": strategy.seed if strategy else _UNKNOWN, **versions()}
    made["made"] = datetime.now(UTC).isoformat(timespec="seconds")
    text = _TEMPLATE.format(
        metrics="\nmetrics:\n- accuracy" if "accuracy" in test else "",
        title=shown(title),
        simulated=" in a simulation" if simulated else "",
        asked=len({node for record in rounds for node in record.nodes_asked}),
        data=f" on {shown(data)}" if data else "",
        strategy=shown(type(strategy).__name__) if strategy else _UNKNOWN,
        rounds=len(rounds),
        up=result.traffic.bytes_up,
        down=result.traffic.bytes_down,
        models=_models(result, test),
        test=_scores(test),
        nodes=_scores(single_numbers(last.evaluate_metrics) if last else {}),
        report=_block(
            line for line in result_lines(result) if not (hidden and line.startswith("Node scores"))
        ),
        examples=_examples(examples or {}, hidden),
        privacy="\n".join(f"- {line}" for line in _privacy(result.details, strategy)),
        command=f"```sh\n{_block([command])}\n```\n\n" if command else "",
        made=_table(("", ""), ((shown(name), shown(value)) for name, value in made.items())),
    )
    target = Path(path) / FILE if Path(path).is_dir() else Path(path)
    write_atomically(target, text.encode())
    return text


def shown(text: object) -> str:
    """Return somebody else's text as a code span that nothing in it can end.

    Examples
    --------
    >>> from gems_flwr.tools.model_card import shown
    >>> print(shown("<b>`north`|south"))
    `<b>'north'¦south`
    """
    plain = _one_line(str(text))
    plain = plain.replace("`", "'").replace("|", "¦").replace("\\", "⧵")
    if len(plain) > _LONGEST:
        plain = f"{plain[: _LONGEST - 1]}…"
    return f"`{plain}`" if plain else "(empty)"


def _one_line(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * _LONGEST]).split())


def _block(lines: Iterable[str]) -> str:
    """Return lines of a fenced block, none of which can end it."""
    return "\n".join(_one_line(x).replace("```", '"').replace("~~~", "---") for x in lines)


def _table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    rows = list(rows)
    lines = [f"| {' | '.join(headings)} |", f"|{'---|' * len(headings)}"]
    lines += [f"| {' | '.join(map(str, row))} |" for row in rows[:_MOST_ROWS]]
    if (more := len(rows) - _MOST_ROWS) > 0:
        lines.append(f"| … and {more} more |{' |' * (len(headings) - 1)}")
    return "\n".join(lines)


def _scores(scores: Mapping[str, float]) -> str:
    return ", ".join(f"{shown(k)} {value:.4g}" for k, value in scores.items()) or "not measured"


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that make a model."""
    found = {"python": platform.python_version()}
    for package in ("gems-flwr", "flwr", "torch", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # run from a folder that was never installed
            found[package] = "not installed"
    return found


def _models(result: RunResult, test: Mapping[str, float]) -> str:
    rows = []
    for name, arrays in split_models(to_numpy(result.arrays)).items():
        weights = sum(math.prod(array.shape) for array in arrays.values())
        score = test.get(f"accuracy/{name}")
        rows.append((shown(name), f"{weights:,}", "" if score is None else f"{score:.4f}"))
    return _table(("model", "weights", "accuracy"), rows)


def _examples(examples: Mapping[str, int | Sequence[int]], hidden: bool) -> str:
    classes = {node: [each] if isinstance(each, int) else each for node, each in examples.items()}
    if not classes:
        return "Not known."
    total = f"{len(classes):,} nodes, {sum(map(sum, classes.values())):,} examples"
    if hidden:
        return f"{total}; of single nodes nothing: the server saw sums alone."
    rows = (
        (shown(node), sum(each), " · ".join(map(str, each)) if len(each) > 1 else "")
        for node, each in classes.items()
    )
    return f"{_table(('node', 'examples', 'by class, from 0'), rows)}\n\n{total}."


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
    space = getattr(getattr(strategy, "head", None) or strategy, "space", None)
    space = space or getattr(strategy, "space", None)
    if (epsilon := getattr(space, "dp_epsilon", None)) is not None:
        lines.append(
            "Differential privacy of each node: every answer about the output layer had noise of "
            f"epsilon {epsilon:g}, delta {getattr(space, 'dp_delta', 0):g}; what a node has spent "
            "in all stands in its own ledger."
        )
    if lines and (getattr(strategy, "dp_seeded", False) or getattr(space, "dp_seeded", False)):
        lines.append(
            "The noise came from the run's seed, as in simulations: whoever has the seed can "
            "subtract it, so this very model protects no data by it."
        )
    if not lines:
        lines.append("Differential privacy: none of this library's was asked for.")
    seen = "on, the server saw totals alone" if strategy.secure else "off, the server saw what "
    return [*lines, f"Secure sums: {seen}{'' if strategy.secure else 'each node sent'}."]
