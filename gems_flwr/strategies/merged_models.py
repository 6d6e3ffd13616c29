"""One round of merging trained models by something better than their average.

The peers of one-round GEMS, under its conditions: one message to every node and one back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from gems_flwr.devices import chosen_device
from gems_flwr.errors import OptionError
from gems_flwr.model_merging.fedfisher import STEPS
from gems_flwr.model_merging.layer_statistics import Method, check_layers
from gems_flwr.model_merging.merge_models import merge_models
from gems_flwr.networks.inputs import on_device_of
from gems_flwr.networks.layers import weight_layers
from gems_flwr.networks.surgery import resize_model
from gems_flwr.radii.fisher_axes import Labels
from gems_flwr.radii.quality import two_sided
from gems_flwr.server.exchange import Answer
from gems_flwr.server.log import log_event
from gems_flwr.server.loop import RoundLoop
from gems_flwr.server.public_tuning import BuildModel, first_samples
from gems_flwr.server.state import RoundOutcome, ServerState
from gems_flwr.typing import ArrayPair, Arrays
from gems_flwr.wire.asking import ask_for_statistics
from gems_flwr.wire.model_replies import ModelReply
from gems_flwr.wire.requests import StatisticsRequest
from gems_flwr.wire.statistics_replies import MergeReply, plan_of, unpack_merge_reply


@dataclass(kw_only=True, eq=False)
class MergedModels(RoundLoop):
    """Let every node train to the end, then merge the models once.

    All methods but matching need statistics from the nodes, which `statistics_mod` adds to the
    replies of any client.

    Parameters
    ----------
    method : {"regmean", "fisher", "kfac", "matching", "fedfisher_diagonal", "fedfisher_kfac"}
        See `model_merging`. All take chains of linear and convolutional layers; matching needs
        nothing but the models.
    shrink : float, optional
        Of regmean: factor of the off-diagonal entries of Gram matrices, in [0, 1]; by default 0.9.
    damping : float, optional
        The ridge of regmean, the floor of fisher, the damping of kfac, above 0; by default 1e-6,
        1e-6 and 1e-3.
    steps : int, default 2000
        Of FedFisher, at most; at least 1.
    choose : int, default 0
        How many public samples there are to choose by what a method leaves open: the steps of
        FedFisher, the shrink of regmean (0.9 or 0.1) and the damping of kfac (1 to 1e-3), where
        they are not given. FedFisher's authors have 500.
    labels : {"exact", "sampled"}
        Of Fisher matrices: gradients in expectation over predicted labels, or for drawn ones.
    statistics_share : float, default 0
        Bytes of the statistics, relative to those of the model in single precision; 0: as they
        are. FedFisher sends 0.5, and the model in half precision (``compress="float16"``).
    weighted : bool, default True
        Whether a node counts by its number of examples, or all count the same.
    public_data : pair of arrays, optional
        Public inputs of the network, and their classes; needed for `choose`.
    build_model : callable, optional
        Returns the torch module; needed for `choose`.
    **loop
        See `RoundLoop`.

    Examples
    --------
    >>> import numpy as np
    >>> import torch
    >>> from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    >>> from flwr.clientapp import ClientApp
    >>> from gems_flwr import InProcessGrid, MergedModels, statistics_mod
    >>> def data(context):
    ...     rng = np.random.default_rng(context.node_config["partition-id"])
    ...     train = rng.normal(size=(100, 2)).astype(np.float32), np.arange(100) % 2
    ...     return train, None
    >>> app = ClientApp(mods=[statistics_mod(data)])
    >>> @app.train()
    ... def train(message, context):  # a real one trains
    ...     metrics = MetricRecord({"num-examples": 100})
    ...     content = RecordDict({"arrays": message.content["arrays"], "metrics": metrics})
    ...     return Message(content, reply_to=message)
    >>> initial = ArrayRecord(torch.nn.Linear(2, 2).state_dict())
    >>> result = MergedModels(method="regmean").start(InProcessGrid(app, nodes=2), initial)
    >>> list(result.arrays), result.details["method"]
    (['weight', 'bias'], 'regmean')
    """

    method: Method = "regmean"
    shrink: float | None = None
    damping: float | None = None
    steps: int = STEPS
    choose: int = 0
    labels: Labels = "exact"
    statistics_share: float = 0.0
    weighted: bool = True
    public_data: ArrayPair | None = None
    build_model: BuildModel | None = None

    needs_classes: ClassVar[bool] = True
    rounds_needed: ClassVar[int | None] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.statistics_share <= 10:
            raise OptionError(f"statistics_share must be from 0 to 10, got {self.statistics_share}")
        self._request = StatisticsRequest(self.method, self.labels, self.statistics_share)
        if self.statistics_share and not self._request.kinds:
            raise OptionError(f"{self.method} needs no statistics: leave statistics_share at 0")
        if self.shrink is not None and not 0 <= self.shrink <= 1:
            raise OptionError(f"shrink must be in [0, 1], got {self.shrink}")
        if self.damping is not None and not self.damping > 0:
            raise OptionError(f"damping must be above 0 or none, got {self.damping}")
        if self.steps < 1:
            raise OptionError(f"steps must be at least 1, got {self.steps}")
        self._check_choice()
        self._told: Mapping[str, Any] = {}

    def _check_choice(self) -> None:
        have = 0 if self.public_data is None else len(self.public_data[1])
        if not 0 <= self.choose <= have:
            raise OptionError(
                f"choose must be from 0 to the number of public samples, {have}, got {self.choose}"
            )
        if self.choose and self.build_model is None:
            raise OptionError(
                f"choose={self.choose} needs build_model, which returns the torch module"
            )

    def prepare(self, initial: Arrays, num_rounds: int) -> None:
        """Refuse a model that the method cannot merge before anybody trains it."""
        if self._request.kinds:
            check_layers(initial)
            plan_of(self._request, initial)
        else:
            weight_layers(initial)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return one train message for each node, with the request for statistics, if any."""
        messages = list(super().configure_train(server_round, arrays, config, grid))
        if self._request.kinds:
            for message in messages:
                ask_for_statistics(message.content, self._request)
        return messages

    def aggregate(self, answers: Sequence[Answer[ModelReply]]) -> Arrays:
        """Return the merged model."""
        replies = [answer.value for answer in answers]
        merged = merge_models(
            self.method,
            [reply.arrays for reply in replies],
            [r.statistics if isinstance(r, MergeReply) else {} for r in replies],
            [reply.num_examples if self.weighted else 1.0 for reply in replies],
            shrink=self.shrink,
            damping=self.damping,
            steps=self.steps,
            device=self.device,
            score=self._public_accuracy if self.choose else None,
        )
        self._told = dict(merged.details)
        if "reference" in merged.details:
            self._told = {**merged.details, "reference": answers[merged.details["reference"]].node}
        log_event("merged", method=self.method, **self._told)
        return merged.arrays

    def _public_accuracy(self, arrays: Arrays) -> float:
        """Return how many public samples a model gets right."""
        assert self.public_data is not None
        assert self.build_model is not None
        inputs, labels = first_samples(self.public_data, self.choose)
        model = resize_model(self.build_model(), arrays).eval().to(chosen_device(self.device))
        with torch.no_grad():
            scores = two_sided(model(on_device_of(model, inputs))).cpu()
        return float((scores.argmax(dim=1) == labels).double().mean())

    def play_round(
        self,
        server_round: int,
        state: ServerState,
        grid: Grid,
        train_config: ConfigRecord,
        evaluate_config: ConfigRecord,
    ) -> RoundOutcome:
        """Play the round, and tell how the models were merged."""
        outcome = super().play_round(server_round, state, grid, train_config, evaluate_config)
        return dataclasses.replace(outcome, details={"method": self.method, **self._told})

    def _unpack_model(self, content: RecordDict) -> ModelReply:
        if not self._request.kinds or self._template is None:
            return super()._unpack_model(content)
        return unpack_merge_reply(content, self._request, self._template)
