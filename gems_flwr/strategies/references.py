"""What federated learning is compared with: references and baselines of the GEMS papers.

- `LocalModels`, "local": every node trains alone.
- `Ensemble`: the same models vote.
- `OneShotAverage`, the naive average: every node trains to the end, then models are averaged once.
- `PublicOnly`, "raw": a model trained on the server's public sample alone.
- `Pooled`, "global": all data in one place, which is what federated learning avoids.

The first four can be fine-tuned on the same public samples in the same way (Guha & Smith 2019,
Section 3.3): five epochs of Adam at one rate, the last layer on what the layers below make of them.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import numpy as np
from flwr.app import ArrayRecord, RecordDict
from numpy.typing import NDArray

from gems_flwr import scoring
from gems_flwr.bounds import MAX_CLASSES
from gems_flwr.core.log import log_warning
from gems_flwr.core.question import Disclosure, Question
from gems_flwr.core.records import ModelReply, checked_array, to_numpy, to_record
from gems_flwr.core.round import Round
from gems_flwr.core.run import RoundOutcome, ServerState, derive_seed, generator
from gems_flwr.devices import check_device
from gems_flwr.errors import BadReplyError, ModelError, OptionError
from gems_flwr.networks import LayerReader, resize_model
from gems_flwr.spaces import find_output_layer, flatten_linear
from gems_flwr.stages.tune import Tune, fine_tune_linear, fine_tune_network
from gems_flwr.strategies.averaging import AveragesReplies
from gems_flwr.strategies.loop import RoundLoop
from gems_flwr.strategies.members import join_models
from gems_flwr.typing import Arrays

if TYPE_CHECKING:
    from gems_flwr.node import Node

TuneLayers = Literal["last", "all"]
Vote = Literal["majority", "softmax_mean"]


@dataclass(kw_only=True, eq=False)
class TunesModels(RoundLoop):
    """Base of strategies whose server fine-tunes models on public samples.

    Parameters
    ----------
    tune : Tune, optional
        Public inputs of the network, their classes, and the `model` that they go into.
    tune_layers : {"last", "all"}
        What to fine-tune.
    device : str, default "cpu"
        Where to tune; see `gems_flwr.good_enough_mod`.
    **loop
        See `RoundLoop`.
    """

    rounds_needed: ClassVar[int | None] = 1

    tune: Tune | None = None
    tune_layers: TuneLayers = "last"
    device: str = "cpu"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_device(self.device)
        if self.tune_layers not in get_args(TuneLayers):
            raise OptionError(f"tune_layers must be 'last' or 'all', got {self.tune_layers!r}")
        if self.tune is not None and self.tune.model is None:
            raise OptionError("models are tuned as a whole: write Tune(inputs, labels, model=Net)")

    def play_round(self, round: Round, state: ServerState) -> RoundOutcome:
        """Play one round, and report how many public samples there were in it."""
        outcome = super().play_round(round, state)
        if self.tune is None:
            return outcome
        details = {**outcome.details, "tuned_on": len(self.tune.samples())}
        return dataclasses.replace(outcome, details=details)

    def tuned(self, arrays: Arrays) -> Arrays:
        """Return a model after fine-tuning; as it was, if there is none, or it diverges."""
        if (tune := self.tune) is None or tune.model is None:
            return arrays
        public, module, device = tune.samples(), tune.model(), self.device
        if self.tune_layers == "all":
            module, seed = resize_model(module, arrays), derive_seed(self.seed, "tune")
            fine_tune_network(
                module, public.inputs, public.labels, rate=tune.rate, seed=seed, device=device
            )
            tuned: Arrays = to_numpy(ArrayRecord(module.state_dict()))
        else:
            tuned = self._tuned_layer(arrays, LayerReader(arrays, module, device=device), tune)
        # A node may send weights that are finite and from which no training leads anywhere.
        if all(np.isfinite(array).all() for array in tuned.values()):
            return tuned
        log_warning("tuning_diverged", reason="the model stays as it was before fine-tuning")
        return arrays

    def _tuned_layer(self, arrays: Arrays, reader: LayerReader, tune: Tune) -> Arrays:
        data = (tune.samples().inputs, tune.samples().labels)
        layer = reader.output_layer(data)
        if layer.bias is None or layer.outputs < 2:
            raise OptionError(
                f"tune_layers='last' needs an output layer with a bias and one output per class, "
                f"'{layer.weight}' is none: tune_layers='all' takes any"
            )
        seen = reader.read(data, layer)
        point = fine_tune_linear(
            flatten_linear(arrays[layer.weight], arrays[layer.bias]),
            seen.inputs,
            seen.labels,
            layer.num_classes,
            rate=tune.rate,
            seed=self.seed,
            device=self.device,
        )
        return layer.replace_in(arrays, point)


@dataclass(kw_only=True, eq=False)
class LocalModels(TunesModels):
    """The reference "local": every node trains alone.

    The result has the arrays of all models; `gems_flwr.strategies.members.split_models` takes them
    apart. The server tunes each by itself.

    Examples
    --------
    >>> from gems_flwr import LocalModels
    >>> strategy = LocalModels(min_nodes=5)
    """

    def aggregate(self, replies: Mapping[str, ModelReply]) -> Arrays:
        """Return all models, each fine-tuned, side by side."""
        return join_models({node: self.tuned(reply.arrays) for node, reply in replies.items()})


@dataclass(kw_only=True, eq=False)
class Ensemble(LocalModels):
    """Every node trains alone, once; the models vote on each sample (the papers' ensemble).

    Parameters
    ----------
    vote : {"majority", "softmax_mean"}
        Most predicted class, ties broken at random by `seed` (the papers' ensemble); or the
        class with the highest mean probability.

    Examples
    --------
    >>> from gems_flwr import Ensemble
    >>> strategy = Ensemble(vote="softmax_mean")
    """

    needs_classes: ClassVar[bool] = True

    vote: Vote = "majority"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vote not in get_args(Vote):
            raise OptionError(f"vote must be one of {list(get_args(Vote))}, got '{self.vote}'")

    def score(
        self, members: Sequence[NDArray], labels: NDArray, one: scoring.Score = scoring.score
    ) -> dict[str, float]:
        """Score the vote. A majority has no probabilities, and so no loss."""
        if self.vote == "softmax_mean":
            return one(scoring.softmax_mean(members), labels)
        predicted = scoring.majority_vote(members, generator(self.seed, "ties"))
        return {
            "accuracy": scoring.accuracy(predicted, labels),
            "balanced_accuracy": scoring.balanced_accuracy(predicted, labels),
        }


@dataclass(kw_only=True, eq=False)
class OneShotAverage(TunesModels, AveragesReplies):
    """Let every node train to the end, average once, and fine-tune the average if asked to.

    Parameters
    ----------
    weighted : bool, default True
        Whether a node counts by its number of examples, or all count the same.
    **options
        See `TunesModels` and `AveragesModels`.

    Examples
    --------
    >>> from gems_flwr import OneShotAverage
    >>> OneShotAverage(weighted=False).rounds_needed  # and otherwise as FedAvg
    1
    """

    weighted: bool = True  # type: ignore[misc]

    def finished(self, mean: Arrays) -> Arrays:
        """Return the mean of the nodes' models, fine-tuned."""
        return self.tuned(mean)


@dataclass(kw_only=True, eq=False)
class PublicOnly(TunesModels):
    """Train the initial model on the server's public sample (GEMS 2019, Section 4.4).

    No node is asked for anything: what the nodes add is the distance to this. Options are those of
    `TunesModels`; `tune` is needed, `tune_layers` is ``"all"``.

    Examples
    --------
    >>> from torch import nn
    >>> from gems_flwr import PublicOnly, Tune
    >>> public = Tune([[0.0, 1.0], [1.0, 0.0]], [0, 1], model=lambda: nn.Linear(2, 2))
    >>> PublicOnly(tune=public).rounds_needed
    1
    """

    needs_classes: ClassVar[bool] = True

    tune_layers: TuneLayers = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tune is None:
            raise OptionError("there are no public samples to train on: give tune=Tune(…)")

    def play_round(self, round: Round, state: ServerState) -> RoundOutcome:
        """Train at the server, without a message."""
        assert self.tune is not None
        details = {"tuned_on": len(self.tune.samples())}
        return RoundOutcome(arrays=self.tuned(state.arrays), details=details)


# --- all data in one place ------------------------------------------------------------------

Fit = Callable[[Arrays, NDArray, NDArray, int], Arrays]
Optimum = Callable[[Arrays, NDArray, NDArray, int], tuple[Arrays, Mapping[str, Any]] | None]
Pairs = tuple[NDArray, NDArray]
EXAMPLES, FEATURES, LABELS = "examples", "features", "labels"


@dataclass(frozen=True)
class Examples(Question[Pairs]):
    """What are your training data? Labels are integers below `classes`, or `numbers`."""

    kind: ClassVar[str] = EXAMPLES
    carries_model: ClassVar[bool] = False

    input_shape: tuple[int, ...]
    classes: int = MAX_CLASSES
    numbers: bool = False

    def discloses(self, node: Node) -> Disclosure:
        """Return that it is raw data."""
        return Disclosure("examples")

    def answer(self, node: Node) -> RecordDict:
        """Return the training data as they are stored."""
        if node.options.examples is None:
            raise ModelError("this app shares no raw data; build it with task_client_app")
        features, labels = node.options.examples(node.context)
        return RecordDict({EXAMPLES: to_record({FEATURES: features, LABELS: labels})})

    def read(self, content: RecordDict) -> Pairs:
        """Return rows of `input_shape` with one label each."""
        record = content.get(EXAMPLES)
        if not isinstance(record, ArrayRecord) or record.keys() != {FEATURES, LABELS}:
            raise BadReplyError(
                f"expected an ArrayRecord '{EXAMPLES}' with '{FEATURES}' and '{LABELS}'"
            )
        features = checked_array(record[FEATURES], FEATURES)
        labels = checked_array(record[LABELS], LABELS)
        kinds = "f" if self.numbers else "iu"
        if labels.ndim != 1 or labels.dtype.kind not in kinds:
            wanted = "floats" if self.numbers else "integers"
            raise BadReplyError(
                f"labels must be one row of {wanted}, got {labels.dtype} {labels.shape}"
            )
        inside = self.numbers or ((labels >= 0) & (labels < self.classes)).all()
        if not inside:
            raise BadReplyError(
                f"labels must be from 0 to {self.classes - 1}, got {labels.min()} to {labels.max()}"
            )
        shape = (len(labels), *self.input_shape)
        if features.shape != shape:
            raise BadReplyError(f"features have shape {features.shape}, expected {shape}")
        return features, labels


@dataclass(kw_only=True, eq=False)
class Pooled(RoundLoop):
    """The reference "global": train one model at the server on the data of all nodes.

    The nodes send their raw data, once: an upper mark for accuracy, and an honest count of the
    bytes that it costs. A linear layer on fixed features has one best setting, which `optimum`
    finds; networks with hidden layers are trained by `fit`.

    Parameters
    ----------
    fit : callable
        Gets the initial arrays, all inputs, all labels and a seed; returns trained arrays.
    input_shape : tuple of int
        Shape of one input, against which the nodes' data is checked.
    optimum : callable, optional
        Gets the same as `fit`; returns the arrays of the best model and what to report of it in the
        result's details, or None where the model's best is not to be found.
    converged : bool, default True
        Whether `optimum` is called at all; without it every model is trained by `fit`.
    numbers : bool, default False
        Whether labels are numbers, not classes.
    **loop
        See `RoundLoop`.

    Examples
    --------
    Nodes share their data only where ``NodeLimits(share_examples=True)`` allows it.

    >>> from gems_flwr import Pooled
    >>> def fit(arrays, inputs, labels, seed):
    ...     return arrays  # or train on all of them
    >>> strategy = Pooled(fit=fit, input_shape=(28, 28))
    """

    rounds_needed: ClassVar[int | None] = 1

    fit: Fit
    input_shape: tuple[int, ...]
    optimum: Optimum | None = None
    converged: bool = True
    numbers: bool = False

    def play_round(self, round: Round, state: ServerState) -> RoundOutcome:
        """Collect the data and train on it."""
        try:
            classes = find_output_layer(state.arrays).num_classes
        except ValueError:
            classes = MAX_CLASSES  # the arrays do not show how many
        question = Examples(tuple(self.input_shape), classes, self.numbers)
        shared = round.ask(question, round.sample(self.fraction_train))
        # Inputs of another type than most would change all of them in one array.
        types = Counter(features.dtype for features, _ in shared.values())
        usual = types.most_common(1)[0][0] if types else None
        others = {
            node: f"features are {features.dtype}, those of most nodes {usual}"
            for node, (features, _) in shared.items()
            if features.dtype != usual
        }
        shared = round.leave_out(shared, others, at_least=self.min_nodes)
        features = np.concatenate([inputs for inputs, _ in shared.values()])
        labels = np.concatenate([labels for _, labels in shared.values()])
        data = (features, labels, derive_seed(self.seed, "pooled"))
        best = self.optimum(state.arrays, *data) if self.converged and self.optimum else None
        arrays, details = best or (self.fit(state.arrays, *data), {})
        return RoundOutcome(arrays=arrays, details={"pooled_examples": len(labels), **details})
