"""A question: whatever a server wants of nodes, both sides of the exchange in one class.

A question is a frozen dataclass. Its fields are what is asked; they cross the network as text, and
those listed in `array_fields` as arrays. The same class says what an answer gives away
(`discloses`), how a node answers (`answer`) and how the server checks and reads the reply (`read`).
Strategies ask with `Round.ask`; on the node `good_enough_mod` finds the class by its `kind`, holds
what the answer discloses against the node's limits, and lets the question answer itself.

Whatever a node sends is hostile until `read` has checked it, whatever a server sends until
`from_records` has built the value, whose ``__post_init__`` refuses what is out of range.
"""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Self, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray

from gems_flwr.bounds import MAX_JSON_CHARACTERS
from gems_flwr.core.records import QUESTION, TRAIN, checked_array, to_record
from gems_flwr.errors import OptionError, check_options, shown

if TYPE_CHECKING:
    from gems_flwr.node import Node
    from gems_flwr.spaces import OutputLayer
    from gems_flwr.typing import Float

T = TypeVar("T")

# Metadata of fields that the server keeps to itself: what a reply is checked against.
ON_SERVER = {"on_server": True}
_KIND, _TEXT = "kind", "text"
_REGISTRY: dict[str, type[Question[Any]]] = {}

DisclosureKind = Literal[
    "nothing",  # the node's name, or which layers it lacks
    "moments",  # means and directions of classes
    "radius",  # how far from its trained layer a node's models are good enough
    "score",  # how many held-out samples a model classifies correctly
    "loss",  # loss and gradient of a model on training data
    "model",  # a trained model, or what it is averaged by
    "second moments",  # of all inputs of a layer, by which models are merged
    "examples",  # raw data
]


@dataclass(frozen=True)
class Group:
    """Some samples of which an answer shows a mean, and perhaps directions of their covariance."""

    name: str  # for the message of a refusal, such as "class 3"
    samples: int  # under masks on all nodes, as far as the server reports them
    directions: int | None = 0  # as many as features for all of them, None for a mean alone
    has_mean: bool = False  # whether an exact mean is shown


@dataclass(frozen=True)
class Disclosure:
    """What an answer gives away; `NodeLimits.allow` judges it before anything is computed."""

    kind: DisclosureKind
    features: int = 0  # inputs of the layer that it is about
    groups: tuple[Group, ...] = ()
    least_asked: int | None = None  # fewest samples of a class that the server asks for
    # Privacy loss of noised answers, as squared mu of Gaussian differential privacy.
    squared_mu: float | None = None
    is_seeded: bool = False  # whether noise comes from the run's seed, which protects no one
    is_shared_noise: bool = False  # whether only the sum over nodes has enough noise
    masked_with: int = 0  # nodes in the secure sum that hides the answer; 0 without
    # Whether the server freely chooses what it is about (a layer, features, parts of classes), so
    # that answers which are harmless one by one may give a sample away together. Counted by
    # `Node.allow(…, leaves=True)`: how many answers it is.
    adaptive: int = 0
    planned: int = 0  # how many adaptive answers the server announces to ask for afterwards
    entries: int = 0  # numbers of all matrices that the node has to build at once


NOTHING = Disclosure("nothing")


@dataclass(frozen=True)
class Question(ABC, Generic[T]):
    """Base of all questions; see the module's docstring."""

    kind: ClassVar[str]  # the question's name on the wire; one class has it
    # Fields that travel as arrays: one array each, in double or single precision.
    array_fields: ClassVar[tuple[str, ...]] = ()
    # Of Flower's messages; every app has a handler for train messages, and mods around it.
    message_type: ClassVar[str] = TRAIN
    # Whether the model of the round travels along, and whether its output layer is enough for
    # nodes that know the layers below.
    carries_model: ClassVar[bool] = True
    is_about_output_layer: ClassVar[bool] = False
    # Whether nodes train before they answer; what their handlers report comes back as well.
    trains: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "kind" not in vars(cls):
            return
        known = _REGISTRY.setdefault(cls.kind, cls)
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise OptionError(f"kind '{cls.kind}' is that of {known.__module__}.{known.__name__}")
        _REGISTRY[cls.kind] = cls

    @abstractmethod
    def discloses(self, node: Node) -> Disclosure:
        """Return what the answer gives away, before it is computed."""

    @abstractmethod
    def answer(self, node: Node) -> RecordDict:
        """Return the answer; its name and what a handler reports are added by the mod."""

    @abstractmethod
    def read(self, content: RecordDict) -> T:
        """Check and read a reply; a BadReplyError or SpaceError names the key at fault."""

    def check(self, rules: Mapping[str, tuple[bool, str]]) -> None:
        """Raise an OptionError for the first field that breaks its rule.

        `rules` has for each field whether it holds, and what is allowed.
        """
        if not all(holds for holds, _ in rules.values()):
            check_options(self, rules)

    def about(self, layer: OutputLayer | None) -> Self:
        """Return the question about an output layer, where it depends on one."""
        return self

    # --- on the wire --------------------------------------------------------------------------

    def to_json(self) -> str:
        """Return the fields as text, without arrays and what is at its default."""
        values = {}
        for field in dataclasses.fields(self):
            if field.name not in self.array_fields and not field.metadata.get("on_server"):
                value = getattr(self, field.name)
                value = list(value) if isinstance(value, tuple) else value
                make = field.default_factory
                if value != (field.default if make is dataclasses.MISSING else make()):
                    values[field.name] = value
        return json.dumps(values)

    def to_records(self) -> dict[str, ConfigRecord | ArrayRecord]:
        """Return the records that ask the question."""
        given = {name: getattr(self, name) for name in self.array_fields}
        arrays = {name: np.asarray(value) for name, value in given.items() if value is not None}
        text = ConfigRecord({_KIND: self.kind, _TEXT: self.to_json()})
        return {QUESTION: text, **({f"{QUESTION}-arrays": to_record(arrays)} if arrays else {})}

    @classmethod
    def from_records(cls, text: str, arrays: Mapping[str, NDArray]) -> Self:
        """Return the question that `to_records` wrote; fields check themselves."""
        if len(text) > MAX_JSON_CHARACTERS:
            raise OptionError(f"a question has at most {MAX_JSON_CHARACTERS:,} characters")
        values = json.loads(text)
        fields = [f for f in dataclasses.fields(cls) if not f.metadata.get("on_server")]
        names = {field.name for field in fields} - {*cls.array_fields}
        unknown = sorted((values.keys() - names) | (arrays.keys() - {*cls.array_fields}))
        if unknown:
            raise OptionError(f"the server asks for {unknown}, which this version does not know")
        lists = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
        return cls(**lists, **arrays)


@dataclass(frozen=True)
class LayerQuestion(Question[T]):
    """A question about the linear output layer of the round's model (`Round.layer`)."""

    is_about_output_layer: ClassVar[bool] = True

    layer: OutputLayer | None = dataclasses.field(
        default=None, kw_only=True, repr=False, compare=False, metadata=ON_SERVER
    )

    def about(self, layer: OutputLayer | None) -> Self:
        """Return the question about an output layer."""
        return dataclasses.replace(self, layer=layer)

    @property
    def output_layer(self) -> OutputLayer:
        """The layer that replies are checked against."""
        assert self.layer is not None, "set Round.layer before asking about an output layer"
        return self.layer


@dataclass(frozen=True)
class SumQuestion(Question[None]):
    """A question whose answers are only ever added up; asked with `Round.total`."""

    @abstractmethod
    def summand(self, node: Node) -> Mapping[str, Float]:
        """Return what the node adds: an array for each section of the server's layout."""

    def answer(self, node: Node) -> RecordDict:
        """Return the summand, written as the server's layout says."""
        return node.packed_summand(self.summand(node))

    def check_summand(self, values: Mapping[str, Float], errors: Mapping[str, float]) -> None:
        """Refuse what no samples add up to, by section, where sums are not masked.

        `errors` has by how much rounding can have moved a number.
        """

    def note(self, content: RecordDict) -> Any:
        """Read what stands beside a summand, if anything; it goes into `Total.notes`."""
        return None

    def read(self, content: RecordDict) -> None:
        """Single summands are not looked at; `gems_flwr.core.sums` checks their form."""


def take_question(content: RecordDict) -> Question[Any] | None:
    """Take the question out of a message; None for an ordinary train or evaluate message.

    An `OptionError` if this version does not know the question, or an option of it.
    """
    record = content.get(QUESTION)
    if record is None:
        return None
    values = record if isinstance(record, ConfigRecord) else {}
    kind, text = question_kind(content), values.get(_TEXT)
    if not kind or not isinstance(text, str):
        raise OptionError(
            f"the server asks for {shown(values.get(_KIND))}, which this version does not know; "
            f"it knows {sorted(_REGISTRY)}"
        )
    # What is left is what an ordinary handler expects.
    del content[QUESTION]
    beside = content.pop(f"{QUESTION}-arrays", None)
    arrays = beside if isinstance(beside, ArrayRecord) else {}
    return _REGISTRY[kind].from_records(
        text, {name: checked_array(array, name) for name, array in arrays.items()}
    )


def question_kind(content: RecordDict) -> str:
    """Return the kind of question that a message asks, as far as it is known; else nothing."""
    record = content.get(QUESTION)
    kind = record.get(_KIND) if isinstance(record, ConfigRecord) else None
    return kind if isinstance(kind, str) and kind in _REGISTRY else ""


def registered_questions() -> dict[str, type[Question[Any]]]:
    """Return all questions that this process knows, by kind."""
    return dict(_REGISTRY)
