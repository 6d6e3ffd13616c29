"""A model card: what a model is, what it was made of, and what it cost, for whoever gets it.

Markdown with the front matter of Hugging Face's model cards. It says what is known and nothing
else; what nobody measured is called so. Of data it has counts alone, and where the server saw
nothing but sums, nothing about a single node.

Names of nodes, reasons of failures and names of metrics are what somebody else sent. They stand in
code spans alone, on one line and without the characters that end a span or a cell, so a renderer
shows them and does nothing else with them. The front matter has words of ours alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

FILE = "model_card.md"
_DOCS = "https://gems-flwr.github.io/gems-flwr"
# Rows of a table; a federation of thousands has other files.
_MOST_ROWS = 50
_MOST_NAMES = 10
_LONGEST = 200
_TO_FILL = "*to be filled in by whoever publishes the model*"
# Metrics that Hugging Face knows by the same name.
_METRICS = ("accuracy",)
_UNKNOWN = "not known"


@dataclass(frozen=True)
class CardModel:
    """One model of a card.

    Parameters
    ----------
    shapes : mapping from str to tuple of int
        Its arrays.
    input_shape : tuple of int, optional
        Shape of one example.
    scale : float, optional
        What raw values are multiplied with first.
    classes : int, optional
        Number of classes; 0: it predicts a number.
    network : str, optional
        What builds the network.
    score : float, optional
        Its own accuracy on test data, where there are several models.

    Examples
    --------
    >>> from gems_flwr import CardModel
    >>> CardModel({"weight": (10, 784), "bias": (10,)}, input_shape=(1, 28, 28), classes=10).weights
    7850
    """

    shapes: Mapping[str, tuple[int, ...]]
    input_shape: tuple[int, ...] | None = None
    scale: float | None = None
    classes: int | None = None
    network: str | None = None
    score: float | None = None

    @property
    def weights(self) -> int:
        """How many numbers it has."""
        return sum(math.prod(shape) for shape in self.shapes.values())


@dataclass(frozen=True)
class NodeData:
    """What is known of one node's data: counts.

    Parameters
    ----------
    examples : int, optional
        How many there are for training; None if the node did not say.
    by_class : sequence of int, optional
        How many of each class, which only a simulation knows.
    """

    examples: int | None = None
    by_class: Sequence[int] | None = None


@dataclass(frozen=True)
class ModelCard:
    """What a card says; see the module's docstring.

    Parameters
    ----------
    title : str
        What the model is called.
    strategy : str
        The strategy that made it.
    models : mapping from str to CardModel
        The model, or all of them by name.
    data, partition : str, optional
        The data set and how it was divided, where that is known.
    nodes : mapping from str to NodeData
        The nodes whose data are in the model.
    ranges : sequence of float, optional
        Edges of the ranges that stand in the place of classes where numbers are predicted.
    hidden : bool
        Whether the server saw sums alone, and so nothing about a single node.
    simulated : bool
        Whether the nodes were simulated.
    rounds, stopped_because, exchanges
        What was played, why it ended, and how often nodes were asked for what.
    bytes_up, bytes_down, messages, seconds
        What it cost in all; `asked` nodes.
    verdict : sequence of str
        What the intersection of spaces showed, in sentences.
    test, nodes_mean : mapping from str to float
        Scores on the server's own test data, and means of what nodes measured.
    node_scores : mapping from str to float
        Each node's score of the model.
    privacy : sequence of str
        What was done for it, in sentences.
    left_out : mapping from str to str
        Who is not in the model, or not in all rounds, and why.
    withdrawn : sequence of (str, str)
        Who left, and what was done about it.
    settings, versions : mapping from str to str
        Options of the strategy; what it ran with.
    seed, command, date
        How to make it again, and when it was made.

    Examples
    --------
    >>> from gems_flwr import CardModel, ModelCard
    >>> card = ModelCard("wards", "Gems", {"model": CardModel({"weight": (2, 3)})}, rounds=1)
    >>> "## Privacy" in card.to_markdown()
    True
    """

    title: str
    strategy: str
    models: Mapping[str, CardModel]
    data: str | None = None
    partition: str | None = None
    nodes: Mapping[str, NodeData] = field(default_factory=dict)
    ranges: Sequence[float] | None = None
    hidden: bool = False
    simulated: bool = False
    rounds: int = 0
    stopped_because: str = ""
    exchanges: Mapping[str, int] = field(default_factory=dict)
    asked: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    messages: int = 0
    seconds: float | None = None
    verdict: Sequence[str] = ()
    test: Mapping[str, float] = field(default_factory=dict)
    nodes_mean: Mapping[str, float] = field(default_factory=dict)
    node_scores: Mapping[str, float] = field(default_factory=dict)
    privacy: Sequence[str] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    withdrawn: Sequence[tuple[str, str]] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    seed: int | None = None
    command: str | None = None
    date: str = ""

    def to_markdown(self) -> str:
        """Return the text of the card."""
        sections = {
            "Model": _models(self),
            "Results": _results(self),
            "Data": _data(self),
            "Training and communication": _training(self),
            "Privacy": [f"- {each}" for each in self.privacy] or ["Nothing is known about it."],
            "Who is not in it": _missing(self),
            "How to make it again": _again(self),
            "Use and licence": [
                f"- Intended use: {_TO_FILL}",
                f"- Limits, and for whom it works less well: {_TO_FILL}",
                f"- Licence: {_TO_FILL}; also as `license:` at the top",
            ],
        }
        lines = [*_front_matter(self), f"# {shown(self.title)}", "", _summary(self)]
        for heading, body in sections.items():
            lines += ["", f"## {heading}", "", *body]
        return "\n".join(lines) + "\n"


def shown(text: object) -> str:
    """Return somebody else's text as a code span that nothing in it can end.

    Examples
    --------
    >>> from gems_flwr.model_card import shown
    >>> print(shown("<b>`north`|south"))
    `<b>'north'¦south`
    """
    plain = "".join(c if c.isprintable() else " " for c in str(text)[: 4 * _LONGEST])
    plain = " ".join(plain.split()).replace("`", "'").replace("|", "¦").replace("\\", "⧵")
    if len(plain) > _LONGEST:
        plain = f"{plain[: _LONGEST - 1]}…"
    return f"`{plain}`" if plain else "(empty)"


def _front_matter(card: ModelCard) -> list[str]:
    tags = ["federated-learning", "flower", "gems-flwr"]
    metrics = [name for name in _METRICS if name in card.test]
    lines = ["---", "# license: the owner's choice, see the end", "tags:"]
    lines += [f"- {tag}" for tag in tags]
    if metrics:
        lines += ["metrics:", *(f"- {name}" for name in metrics)]
    return [*lines, "---", ""]


def _summary(card: ModelCard) -> str:
    count = len(card.models)
    what = "A model" if count == 1 else f"{count} models"
    nodes = f" of {card.asked} nodes" if card.asked else ""
    where = " in a simulation" if card.simulated else ""
    rounds = _plural(card.rounds, "round")
    data = f" on {shown(card.data)}" if card.data else ""
    return (
        f"{what} trained{where} by federated learning{nodes}{data}: strategy "
        f"{shown(card.strategy)}, {rounds}, {_bytes(card.bytes_up)} up and "
        f"{_bytes(card.bytes_down)} down in all."
    )


def _models(card: ModelCard) -> list[str]:
    # Models of one kind, such as the members of an ensemble, are described once.
    kinds: list[tuple[CardModel, list[str]]] = []
    for name, model in card.models.items():
        alike = next((names for other, names in kinds if other == model), None)
        if alike is None:
            kinds.append((model, [name]))
        else:
            alike.append(name)
    lines: list[str] = []
    for model, names in kinds[:_MOST_ROWS]:
        if len(card.models) > 1:
            some = ", ".join(shown(name) for name in names[:_MOST_NAMES])
            more = len(names) - _MOST_NAMES
            some += f" and {more} more" if more > 0 else ""
            each = ", each" if len(names) > 1 else ""
            lines += [*([""] if lines else []), f"### {some}{each}", ""]
        lines += _model(model)
    if (more := len(kinds) - _MOST_ROWS) > 0:
        lines += ["", f"… and {more} more kinds."]
    return lines


def _model(model: CardModel) -> list[str]:
    predicts = {None: _UNKNOWN, 0: "a number"}.get(model.classes, f"one of {model.classes} classes")
    shape = _UNKNOWN if model.input_shape is None else str(model.input_shape)
    if model.scale is not None and model.scale != 1:
        shape += f", raw values times {model.scale:g}"
    rows = [
        ("predicts", predicts),
        ("shape of one example", shape),
        ("network", shown(model.network) if model.network else _UNKNOWN),
        ("weights", f"{model.weights:,}"),
    ]
    if model.score is not None:
        rows.append(("accuracy on test data", f"{model.score:.4f}"))
    layers = [(shown(name), str(shape), f"{math.prod(shape):,}") for name, shape in _few(model)]
    more = len(model.shapes) - len(layers)
    lines = [*_table(("", ""), rows), "", *_table(("array", "shape", "numbers"), layers)]
    return [*lines, "", f"… and {more} more arrays."] if more else lines


def _few(model: CardModel) -> list[tuple[str, tuple[int, ...]]]:
    return list(model.shapes.items())[:_MOST_ROWS]


def _results(card: ModelCard) -> list[str]:
    lines = [f"- {each}" for each in card.verdict]
    lines.append(f"- On the server's test data: {_numbers(card.test) or 'not measured'}")
    if card.nodes_mean:
        lines.append(f"- On the nodes' own data, weighted mean: {_numbers(card.nodes_mean)}")
    if card.hidden:
        lines.append("- On single nodes' own data: not told, the server saw sums alone")
    elif card.node_scores:
        values = list(card.node_scores.values())
        mean = sum(values) / len(values)
        lines.append(
            f"- Accuracy on single nodes' own data, as they told it: mean {mean:.4f}, lowest "
            f"{min(values):.4f}, highest {max(values):.4f}"
        )
        rows = [(shown(node), f"{score:.4f}") for node, score in card.node_scores.items()]
        lines += ["", *_table(("node", "accuracy"), rows)]
    else:
        lines.append("- On single nodes' own data: not measured")
    return lines


def _data(card: ModelCard) -> list[str]:
    lines = []
    if card.data:
        divided = f", divided by {shown(card.partition)}" if card.partition else ""
        lines.append(f"Data set {shown(card.data)}{divided}. Counts of training examples alone:")
    else:
        lines.append("Counts of training examples alone, as the nodes told them:")
    known = [node.examples for node in card.nodes.values() if node.examples is not None]
    total = f"{len(card.nodes) or card.asked:,} nodes"
    if known and len(known) == len(card.nodes):
        total += f", {sum(known):,} examples"
    elif known:
        total += f"; {sum(known):,} examples of the {len(known):,} that told"
    if card.hidden:
        return [*lines, "", f"{total}; of single ones nothing: sums alone were seen."]
    if not card.nodes:
        return [*lines, "", "not told."]
    by_class = any(node.by_class is not None for node in card.nodes.values())
    what = "by class, from 0" if card.ranges is None else "by range of the number"
    headings = ("node", "examples", *([what] if by_class else []))
    rows = [
        (
            shown(name),
            "not told" if node.examples is None else f"{node.examples:,}",
            *([" · ".join(map(str, node.by_class or ()))] if by_class else []),
        )
        for name, node in card.nodes.items()
    ]
    lines += ["", *_table(headings, rows), "", f"{total}."]
    if card.ranges is not None:
        lines.append(f"The ranges meet at {', '.join(f'{edge:g}' for edge in card.ranges)}.")
    return lines


def _training(card: ModelCard) -> list[str]:
    asked = ", ".join(f"{shown(what)} × {count}" for what, count in card.exchanges.items())
    rows = [
        ("rounds", f"{card.rounds}"),
        ("ended because", shown(card.stopped_because) if card.stopped_because else _UNKNOWN),
        ("nodes were asked for", asked or _UNKNOWN),
        ("bytes up", _traffic(card.bytes_up, card.asked)),
        ("bytes down", _traffic(card.bytes_down, card.asked)),
        ("messages, both ways", f"{card.messages:,}"),
        ("seconds", _UNKNOWN if card.seconds is None else f"{card.seconds:.1f}"),
    ]
    lines = _table(("", ""), rows)
    if card.settings:
        options = [(shown(name), shown(value)) for name, value in card.settings.items()]
        lines += ["", *_table(("option", "value"), options)]
    return lines


def _missing(card: ModelCard) -> list[str]:
    lines = _table(
        ("left out", "why"), [(shown(n), shown(why)) for n, why in card.left_out.items()]
    )
    if card.withdrawn:
        rows = [(shown(node), shown(note)) for node, note in card.withdrawn]
        lines += ["", *_table(("withdrew", "what was done"), rows)]
    return lines if card.left_out or card.withdrawn else ["Nobody was left out, and nobody left."]


def _again(card: ModelCard) -> list[str]:
    lines = []
    if card.command:
        # On one line of a block that no line of it can end.
        lines += [*_block(" ".join(card.command.split()), "sh"), ""]
    rows = [
        ("seed", _UNKNOWN if card.seed is None else str(card.seed)),
        *((shown(name), shown(text)) for name, text in card.versions.items()),
        ("made", card.date or _UNKNOWN),
    ]
    return [*lines, *_table(("", ""), rows)]


def _block(text: str, language: str) -> list[str]:
    plain = "".join(c if c.isprintable() else " " for c in text)[: 10 * _LONGEST]
    fence = "`" * 3
    return [f"{fence}{language}", plain.replace(fence, "'''"), fence]


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    rows = list(rows)
    lines = [f"| {' | '.join(headings)} |", f"|{'---|' * len(headings)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows[:_MOST_ROWS]]
    if (more := len(rows) - _MOST_ROWS) > 0:
        lines.append(f"| … and {more} more |{' |' * (len(headings) - 1)}")
    return lines


def _numbers(values: Mapping[str, float]) -> str:
    return ", ".join(f"{shown(name)} {value:.4g}" for name, value in values.items())


def _traffic(count: int, nodes: int) -> str:
    mean = f"; {count / nodes:,.0f} for each node, in the mean" if nodes else ""
    return f"{count:,}{mean}"


def _bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def spaces_reveal() -> str:
    """Return where it stands what a space says about data."""
    return f"[What a space reveals]({_DOCS}/gems/#what-a-space-reveals)"


def secure_sums_hide() -> str:
    """Return where it stands what secure sums hide."""
    return f"[What the server sees]({_DOCS}/secure-sums/#what-the-server-sees)"
