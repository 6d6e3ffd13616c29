"""The reference "global": all data in one place, which is what federated learning avoids.

The nodes send their raw data, once, and the server trains on all of it: an upper mark for
accuracy, and an honest count of the bytes that it costs. A node takes part only if its app was
built to share (see `task_client_app`), which is for simulations.

A mark that depends on epochs and patience is too low: a linear layer on fixed features has one best
setting, and the reference is that (`optimum`). Networks with hidden layers have none that could be
found, and are trained (`fit`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
from flwr.app import ConfigRecord
from flwr.serverapp import Grid
from numpy.typing import NDArray

from gems_flwr.bounds import MAX_CLASSES
from gems_flwr.runtime.seeding import derive_seed
from gems_flwr.server.exchange import Answer
from gems_flwr.server.loop import RoundLoop
from gems_flwr.server.state import RoundOutcome, ServerState
from gems_flwr.spaces.output_layer import find_output_layer
from gems_flwr.typing import Arrays
from gems_flwr.wire.keys import SHARE_EXAMPLES, TRAIN
from gems_flwr.wire.model_replies import ExamplesReply, unpack_examples_reply

Fit = Callable[[Arrays, NDArray, NDArray, int], Arrays]
Optimum = Callable[[Arrays, NDArray, NDArray, int], tuple[Arrays, Mapping[str, Any]] | None]


@dataclass(kw_only=True, eq=False)
class Pooled(RoundLoop):
    """Train one model at the server on the data of all nodes.

    Parameters
    ----------
    fit : callable
        Gets the initial arrays, all inputs, all labels and a seed; returns trained arrays.
    input_shape : tuple of int
        Shape of one input, against which the nodes' data is checked.
    optimum : callable, optional
        Gets the same as `fit`; returns the arrays of the best model and what to tell of it in the
        result's details, or None where the model's best is not to be found.
    converged : bool, default True
        Whether `optimum` is asked at all; without it every model is trained by `fit`.
    numbers : bool, default False
        Whether labels are numbers, not classes.
    **loop
        See `RoundLoop`.

    Examples
    --------
    Nodes share their data only where their limits allow it:

    >>> import numpy as np
    >>> import torch
    >>> from flwr.app import ArrayRecord
    >>> from gems_flwr import InProcessGrid, NodeLimits, Pooled, Task, task_client_app
    >>> class Shares(Task):
    ...     def build_model(self): return torch.nn.Linear(2, 2)
    ...     def train(self, model, *, seed, config): ...
    ...     def evaluate(self, model, *, config): ...
    ...     def validation_data(self): ...
    ...     def shared_examples(self): return np.ones((5, 2), np.float32), np.zeros(5, np.int64)
    >>> app = task_client_app(lambda _: Shares(), limits=NodeLimits(share_examples=True))
    >>> def fit(arrays, inputs, labels, seed):
    ...     return arrays  # or train on all of them
    >>> strategy = Pooled(fit=fit, input_shape=(2,))
    >>> initial = ArrayRecord(torch.nn.Linear(2, 2).state_dict())
    >>> strategy.start(InProcessGrid(app, nodes=3), initial).details["pooled_examples"]
    15
    """

    fit: Fit
    input_shape: tuple[int, ...]
    optimum: Optimum | None = None
    converged: bool = True
    numbers: bool = False

    rounds_needed: ClassVar[int | None] = 1
    sends_models: ClassVar[bool] = False

    def play_round(
        self,
        server_round: int,
        state: ServerState,
        grid: Grid,
        train_config: ConfigRecord,
        evaluate_config: ConfigRecord,
    ) -> RoundOutcome:
        """Collect the data and train on it."""
        nodes = self.choose_nodes(server_round, grid, self.fraction_train, TRAIN)
        questions = self.messages(server_round, nodes, SHARE_EXAMPLES, None, train_config)
        answers = self.accept(
            self.collect(questions),
            partial(
                unpack_examples_reply,
                input_shape=self.input_shape,
                classes=_classes_of(state.arrays),
                numbers=self.numbers,
            ),
        )
        answers = self._exchange.without(answers, _of_other_types(answers), at_least=self.min_nodes)
        features = np.concatenate([answer.value.features for answer in answers])
        labels = np.concatenate([answer.value.labels for answer in answers])
        arrays, told = self._train(state.arrays, features, labels)
        return RoundOutcome(arrays=arrays, details={"pooled_examples": len(labels), **told})

    def _train(
        self, arrays: Arrays, features: NDArray, labels: NDArray
    ) -> tuple[Arrays, Mapping[str, Any]]:
        """Return the best model, or else a trained one, and what to tell of it."""
        seed = derive_seed(self.seed, "pooled")
        if self.converged and self.optimum is not None:
            best = self.optimum(arrays, features, labels, seed)
            if best is not None:
                return best
        return self.fit(arrays, features, labels, seed), {}


def _classes_of(arrays: Arrays) -> int:
    """Return how many classes a model tells apart, where its arrays show that."""
    try:
        return find_output_layer(arrays).num_classes
    except ValueError:
        return MAX_CLASSES


def _of_other_types(answers: Sequence[Answer[ExamplesReply]]) -> dict[str, str]:
    """Return who stores inputs as another type than most, where one array would change all."""
    types = Counter(answer.value.features.dtype for answer in answers)
    if not types:
        return {}
    usual = types.most_common(1)[0][0]
    return {
        answer.node: f"features are {answer.value.features.dtype}, those of most nodes {usual}"
        for answer in answers
        if answer.value.features.dtype != usual
    }
