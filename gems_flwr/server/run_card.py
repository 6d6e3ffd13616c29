"""The model card of a run: what the result, and the strategy that made it, say for it.

`RoundLoop` writes one into `checkpoint_dir` when a run ends; `write_model_card` is for apps that
want it elsewhere, or know more. Whoever has left is named as such and nowhere else.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gems_flwr.disk.files import write_atomically
from gems_flwr.exporting.description import versions
from gems_flwr.model_card import (
    FILE,
    CardModel,
    ModelCard,
    NodeData,
    secure_sums_hide,
    spaces_reveal,
)
from gems_flwr.receipts import utc_now
from gems_flwr.server.members import split_models
from gems_flwr.server.run_summary import is_unset, shown_option, who_was_left_out
from gems_flwr.server.settings import LoopSettings
from gems_flwr.server.state import RunResult
from gems_flwr.server.withdrawing import WITHDRAWALS, who_left
from gems_flwr.typing import Metrics
from gems_flwr.wire.model_replies import single_numbers
from gems_flwr.wire.records import to_numpy

if TYPE_CHECKING:
    from gems_flwr.server.loop import RoundLoop

_VERDICTS = {
    "feasible": "The model is in every node's good-enough space: good enough for every node, as "
    "each of them defines it.",
    "incomplete": "The model is in every good-enough space that was sent, but for some classes no "
    "node sent anything.",
    "empty": "No model is good enough for every node, which is proved; this one violates the "
    "spaces least.",
    "undecided": "Whether a model is good enough for every node was not decided; this one violates "
    "the spaces least of those that were found.",
}


def write_model_card(
    result: RunResult,
    path: str | Path,
    *,
    strategy: RoundLoop | None = None,
    **known: Any,
) -> ModelCard:
    """Write the model card of a run, in Markdown.

    Parameters
    ----------
    result : RunResult
        What `start` returned.
    path : path
        The file, or a folder, in which it is called ``model_card.md``.
    strategy : RoundLoop, optional
        What made it; without it the card does not tell its options, nor what nodes said of their
        data.
    **known
        What only the app knows: `title`, `data` (name of the data set), `command`, `seconds`,
        `models` (with shapes of examples and classes), and any other field of the card.

    Returns
    -------
    ModelCard
        What it says.

    Raises
    ------
    DiskError
        If the file cannot be written.

    Examples
    --------
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> import numpy as np
    >>> from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    >>> from flwr.clientapp import ClientApp
    >>> from gems_flwr import FedAvg, InProcessGrid, write_model_card
    >>> app = ClientApp()
    >>> @app.train()
    ... def train(message, context):
    ...     metrics = MetricRecord({"num-examples": 120})
    ...     records = {"arrays": message.content["arrays"], "metrics": metrics}
    ...     return Message(RecordDict(records), reply_to=message)
    >>> strategy = FedAvg(fraction_evaluate=0.0)
    >>> grid = InProcessGrid(app, nodes=2)
    >>> result = strategy.start(grid, ArrayRecord([np.zeros(2)]), num_rounds=1)
    >>> with TemporaryDirectory() as folder:
    ...     card = write_model_card(result, folder, strategy=strategy, title="wards")
    ...     "| `1` | 120 |" in Path(folder, "model_card.md").read_text()
    True
    """
    card = dataclasses.replace(card_of(result, strategy), **known)
    path = Path(path)
    target = path / FILE if path.is_dir() else path
    write_atomically(target, card.to_markdown().encode())
    return card


def card_of(
    result: RunResult,
    strategy: RoundLoop | None = None,
    *,
    name: str | None = None,
    seed: int | None = None,
    examples: Mapping[str, int | None] | None = None,
) -> ModelCard:
    """Return the card of a run.

    Parameters
    ----------
    result : RunResult
        What came of it.
    strategy : RoundLoop, optional
        What made it.
    name, seed
        Those of the strategy, where it is not there itself.
    examples : mapping from str to int or None, optional
        What nodes said of their data; by default what the strategy has heard.
    """
    details, gone = result.details, set(who_left(result.details))
    rounds = [record for record in result.history if record.round]
    answered = dict.fromkeys(node for record in rounds for node in record.nodes_answered)
    if strategy is not None:
        name, seed = type(strategy).__name__, strategy.seed
        examples = strategy.told_examples() if examples is None else examples
    told = dict.fromkeys(answered, None) | dict(examples or {}) | _of_models(details)
    asked = {node for record in rounds for node in record.nodes_asked}
    scores = {n: s for n, s in (details.get("node_scores") or {}).items() if n not in gone}
    last = result.history[-1] if result.history else None
    return ModelCard(
        title="model",
        strategy=name or "not known",
        models={
            model: CardModel({key: tuple(array.shape) for key, array in arrays.items()})
            for model, arrays in split_models(to_numpy(result.arrays)).items()
        },
        nodes={node: NodeData(count) for node, count in told.items() if node not in gone},
        hidden=strategy is not None and strategy.secure is not None,
        rounds=len(rounds),
        stopped_because=result.stopped_because,
        exchanges=Counter(what for record in rounds for what in record.exchanges),
        asked=len(asked),
        bytes_up=result.traffic.bytes_up,
        bytes_down=result.traffic.bytes_down,
        messages=result.traffic.messages_up + result.traffic.messages_down,
        seconds=sum(record.seconds for record in rounds),
        verdict=_verdict(details),
        test=_plain(last.server_metrics if last else {}),
        nodes_mean=_plain(last.evaluate_metrics if last else {}),
        node_scores=scores,
        privacy=_privacy(details, strategy),
        left_out={n: why for n, why in who_was_left_out(result).items() if n not in gone},
        withdrawn=_withdrawn(details),
        settings=_own_settings(strategy) if strategy is not None else {},
        versions=versions(),
        seed=seed,
        date=utc_now(),
    )


def _own_settings(strategy: LoopSettings) -> dict[str, str]:
    """Return the options of a strategy that are its own and were chosen."""
    shared = {each.name for each in dataclasses.fields(LoopSettings)}
    own = {f.name: f.default for f in dataclasses.fields(strategy) if f.name not in shared}
    values = {name: getattr(strategy, name) for name in own}
    return {
        name: shown_option(value)
        for name, value in values.items()
        if not is_unset(value)
        and not callable(value)
        # What an option is by default stands in the documentation; what nodes were asked for, here.
        and (name == "space" or not _is(value, own[name]))
    }


def _is(value: Any, default: Any) -> bool:
    plain = str | int | float | bool
    return type(value) is type(default) and (not isinstance(value, plain) or value == default)


def _plain(metrics: Metrics) -> dict[str, float]:
    return dict(single_numbers(metrics))


def _of_models(details: Mapping[str, Any]) -> dict[str, int | None]:
    """Return what nodes said of their data for several models, in all."""
    held = details.get("examples")
    if not isinstance(held, Mapping):
        return {}
    return {node: int(sum(by_model.values())) for node, by_model in held.items()}


def _verdict(details: Mapping[str, Any]) -> list[str]:
    lines = []
    if sentence := _VERDICTS.get(str(details.get("status"))):
        lines.append(f"{sentence} (space: {details.get('space')})")
    if missing := details.get("missing_classes"):
        lines.append(f"Classes that no node sent anything for: {', '.join(map(str, missing))}.")
    if details.get("is_average"):
        lines.append("It is the plain average of the nodes' models.")
    if (bound := details.get("loss_bound")) is not None:
        lines.append(
            f"Its loss on the nodes' data is {details['loss']:.6g}, at most {bound:.3g} above that "
            "of the best model on all data together."
        )
    return lines


def _privacy(details: Mapping[str, Any], strategy: RoundLoop | None) -> list[str]:
    if strategy is None and "privacy" not in details:
        return ["Which options protected the nodes is not known here."]
    lines = []
    if promise := details.get("privacy"):
        lines.append(
            f"Differential privacy of the sum: epsilon {promise['epsilon']:g}, delta "
            f"{promise['delta']:g} for the run as a whole, with noise of {promise['nodes']} nodes; "
            f"reckoned with {promise['colluders']} nodes that collude. It is about the totals: "
            "without secure sums the server sees more."
        )
    if strategy is None:
        return lines
    # Layer by layer the output layer has a strategy of its own.
    space = getattr(strategy, "space", None) or getattr(
        getattr(strategy, "head", None), "space", None
    )
    if (epsilon := getattr(space, "dp_epsilon", None)) is not None:
        delta = getattr(space, "dp_delta", None)
        lines.append(
            f"Differential privacy of each node: every answer about the output layer had noise of "
            f"epsilon {epsilon:g}, delta {delta:g}; what a node has spent in all stands in its own "
            "ledger."
        )
    if lines and (getattr(strategy, "dp_seeded", False) or getattr(space, "dp_seeded", False)):
        lines.append(
            "The noise came from the run's seed, as in simulations: whoever knows the seed can "
            "take it off, so this very model protects nobody's data by it."
        )
    if not lines:
        lines.append("Differential privacy: none of this library's was asked for.")
    if strategy.secure is not None:
        lines.append(f"Secure sums: on, the server saw totals alone. {secure_sums_hide()}.")
    else:
        lines.append("Secure sums: off, the server saw what each node sent.")
    if space is not None:
        lines.append(f"{spaces_reveal()} about a node's data, with attacks on it.")
    return lines


def _withdrawn(details: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
    rows = []
    for receipt in details.get(WITHDRAWALS, ()):
        done = "nothing of it is in the model" if receipt["forgotten"] else str(receipt["note"])
        rows += [(node, f"{receipt['at']}: {done}") for node in receipt["removed"]]
    return rows
