"""Several unrelated models on the same nodes, under a budget (CMU 18-786 slides, April 2025).

A round trains about m client-model pairs. Who trains what is drawn by importance, so that the
aggregate, which is unbiased, varies as little as possible; the mathematics stands in
`client_sampling` and `averaging.steps`. `sampling` is one of `sampling_rules`, by its name or as a
value; the names are the rows of the slides' Table I:

==========  =============================  ==================================================
name        a pair's importance            what is applied
==========  =============================  ==================================================
random      the same for all               Σ (d/p) U over those drawn
full        all pairs, no budget           Σ d U
lvr         d × local loss                 Σ (d/p) U
gvr         ‖d U‖                          Σ (d/p) U
stale       ‖d (U − βh)‖, GVR*             Σ d β h over all + Σ (d/p) (U − βh)
fedvarp     the same for all               the same with β = 1
mifa        the same for all               Σ d × the last update known, over all
scaffold    the same for all               Σ (d/p) U, local steps corrected by c − c_i
==========  =============================  ==================================================

Decided where the slides are silent:

- m counts pairs, in expectation. `full` trains every pair, and gvr and stale compute every update
  (that is their price), whatever the nodes' capacities are; those count for what is *drawn*.
- Nodes say once, in round 1, which models they have how many examples for, and their capacity.
- gvr and stale: nodes report norms only and keep what they trained; those drawn are then asked for
  it, in a message without weights. lvr: losses are asked for with the current model, without
  weights where the node still has it; those drawn train what they were given then.
- A node with data has a loss of at least 1 % of the model's mean loss, so that lvr leaves nobody
  out for good. Without any importance, sampling is uniform; `details` says in which rounds.
- MIFA counts a client that was never drawn as zero; with `warm_start` there is none.
- What a node fails to deliver drops out, and nothing is scaled up for it: `details["lost"]` says
  which coefficient is missing.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from flwr.app import ConfigRecord
from flwr.serverapp import Grid

from gems_flwr.errors import OptionError
from gems_flwr.server.loop import RoundLoop
from gems_flwr.server.state import RoundOutcome, ServerState
from gems_flwr.strategies.multi_model.multi_model_round import MultiModelRound
from gems_flwr.strategies.multi_model.multi_model_state import MultiModelState
from gems_flwr.strategies.multi_model.sampling_base import SamplingRule
from gems_flwr.strategies.multi_model.sampling_rules import sampling_rule
from gems_flwr.typing import Arrays


@dataclass(kw_only=True, eq=False)
class MultiModel(RoundLoop):
    """Train several models at once; see the module's docstring.

    The arrays of `start` are those of all models, joined by `join_models`; those of one model may
    stay as they are. With one model, and a budget for all nodes, it is `FedAvg`, bit for bit.

    Parameters
    ----------
    budget : float, default 10
        m, expected client-model pairs per round, above 0 and at most what the nodes' capacities
        allow. ``full`` takes no notice of it.
    sampling : SamplingRule or str, default "lvr"
        How pairs are drawn and what is made of their updates: a rule, such as
        ``LossSampling(floor=0.1)``, or a name for one with its defaults: ``"random"``, ``"full"``,
        ``"lvr"``, ``"gvr"``, ``"stale"``, ``"fedvarp"``, ``"mifa"``, ``"scaffold"``.
    warm_start : bool, default False
        Whether round 1 trains every pair, whatever budget and capacities are, so that rules with a
        memory have something to remember of everybody. It costs as much as a round of ``full``.
    **loop
        See `RoundLoop`. `fraction_train` must stay 1, since the budget says who trains;
        `fraction_evaluate` 0: models are evaluated at the server. `min_nodes` is about
        introductions, not about those drawn, who may be few. `max_examples` holds for each model
        by itself.

    Attributes
    ----------
    rule : SamplingRule
        What `sampling` stands for.

    Examples
    --------
    Three nodes train two models of different shapes, about two pairs in a round; to train is to
    add 1 here.

    >>> import numpy as np
    >>> from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
    >>> from flwr.clientapp import ClientApp
    >>> from gems_flwr import InProcessGrid, MultiModel, join_models, multi_model_mod, split_models
    >>> mod = multi_model_mod(holdings=lambda context: {"faces": 60, "words": 5})
    >>> app = ClientApp(mods=[mod])
    >>> @app.train()
    ... def train(message, context):
    ...     weights = message.content["arrays"]["w"].numpy()
    ...     arrays = ArrayRecord({"w": Array(weights + 1)})
    ...     metrics = MetricRecord({"num-examples": 10})
    ...     return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
    >>> start = join_models({"faces": {"w": np.zeros(2)}, "words": {"w": np.zeros(3)}})
    >>> initial = ArrayRecord({name: Array(array) for name, array in start.items()})
    >>> strategy = MultiModel(budget=2, sampling="random", seed=1)
    >>> result = strategy.start(InProcessGrid(app, 3), initial, num_rounds=4)
    >>> models = split_models({name: array.numpy() for name, array in result.arrays.items()})
    >>> {name: arrays["w"].shape for name, arrays in models.items()}
    {'faces': (2,), 'words': (3,)}
    >>> [record.train_metrics["pairs"] for record in result.history[1:]]
    [2.0, 3.0, 2.0, 1.0]
    """

    mod_needed: ClassVar[str] = "multi_model_mod(data, model={…})"

    budget: float = 10.0
    sampling: SamplingRule | str = "lvr"
    warm_start: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.run_name = ""
        self.rule = sampling_rule(self.sampling)
        if not (np.isfinite(self.budget) and self.budget > 0):
            raise OptionError(f"budget must be a number above 0, got {self.budget}")
        if self.compress != "float32" and self.rule.corrects_gradients:
            raise OptionError(
                f"compress={self.compress!r} rounds models, and SCAFFOLD's control variates, as "
                "large as they, would travel as they are: take another sampling, or leave it out"
            )
        if self.fraction_train != 1:
            raise OptionError(
                f"fraction_train must be 1, since budget says who trains, got {self.fraction_train}"
            )
        if self.fraction_evaluate != 0:
            raise OptionError(
                "fraction_evaluate must be 0, since models are evaluated at the server "
                f"(evaluate_fn), got {self.fraction_evaluate}"
            )

    def prepare(self, initial: Arrays, num_rounds: int) -> None:
        """Give the run a name: what nodes keep from another one does not count."""
        self.run_name = secrets.token_hex(4)

    def rename_nodes(self, state: ServerState, names: Mapping[str, str]) -> ServerState:
        """Let nodes keep what the run knows of them under new names."""
        memory = MultiModelState.from_memory(state.memory, self.run_name).renamed(names).to_memory()
        return dataclasses.replace(state, memory=memory)

    def play_round(
        self,
        server_round: int,
        state: ServerState,
        grid: Grid,
        train_config: ConfigRecord,
        evaluate_config: ConfigRecord,
    ) -> RoundOutcome:
        """Ask for what sampling needs, draw, let those drawn train, and take a step per model."""
        current = MultiModelRound(self, server_round, state, grid, train_config)
        current.introduce()
        current.weigh()
        current.draw()
        current.train()
        current.step()
        return current.outcome()
