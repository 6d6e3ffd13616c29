"""A linear layer under differential privacy of the sum (see `gems_flwr.secure.shared_noise`).

Nodes add their shares of the noise to secure sums, so the federation pays for privacy once, and
not every node for itself. With that little noise it is worth asking more than once: in the first
round for class counts, class sums and one common second moment, which make a first layer, then in
every round for one clipped gradient, along which the layer moves. Nothing else is asked: no losses,
no class covariances, whose noise would be ten times as large. The steps are those of
`gems_flwr.intersect.private_steps`.

Decided here: what may be spent is divided beforehand, `MEANS_PART` and `SPREAD_PART` for the two
sums of the first round, the rest evenly over the gradients.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from gems_flwr.errors import OptionError, RoundFailedError
from gems_flwr.intersect.private_steps import LONGEST, NoisyMeans, Spread, Stepping, plain_layer
from gems_flwr.networks.backbone import SplitModel
from gems_flwr.secure.neighbourhoods import shares_needed
from gems_flwr.secure.shared_noise import SharedNoise, epsilon_cost
from gems_flwr.server.backbone_sending import BackboneMode, BackboneSender
from gems_flwr.server.log import log_event
from gems_flwr.server.loop import RoundLoop
from gems_flwr.server.private_memory import PrivateMemory
from gems_flwr.server.state import RoundOutcome, ServerState
from gems_flwr.server.summing import Total
from gems_flwr.spaces.output_layer import OutputLayer, find_output_layer, flatten_linear
from gems_flwr.typing import Arrays, Float
from gems_flwr.wire.keys import TRAIN
from gems_flwr.wire.private_sum_requests import PrivateSum, ask_for_private_sum

MEANS_PART, SPREAD_PART = 0.03, 0.1


@dataclass(kw_only=True, eq=False)
class PrivateGems(RoundLoop):
    """Learn a linear output layer from sums that are private as a whole.

    Parameters
    ----------
    epsilon : float, default 1.0
        Privacy loss of the whole run for one sample more or less on any node, above 0.
    delta : float, default 1e-5
        Chance of a larger loss, in (0, 1).
    steps : int, default 16
        Rounds after the first, with a gradient each; at least 1.
    clip : float, default 10.0
        Length that inputs of the output layer rarely exceed, above 0; longer ones are shortened. It
        must not be taken from the data. Of centred inputs, which make up most of the noise, the
        run finds the clip itself.
    colluders : int, default 0
        Nodes that may tell the server their share of the noise, or add none, without harm to the
        others; at least 0.
    fewest : int, optional
        Nodes that must be in every sum, which the noise is made for. By default as many as the
        threshold of `secure` demands, and without it all that are asked.
    examples : int, default 131072
        Most samples that all nodes have together, at least 1: how large sums can become.
    dp_seeded : bool, default False
        Whether noise comes from the run's seed, which protects nobody. For simulations.
    layer : str, optional
        Name of the linear output layer, where it is not the last matrix of the model.
    backbone : {"auto", "send", "local"}
        Who is sent the layers below it; see `Gems`.
    **loop
        See `RoundLoop`. Nodes answer with `secure=SecureSum()` alone: a share of the noise
        protects nobody whose summand can be seen. (Simulations may do without.)

    Examples
    --------
    >>> from gems_flwr import PrivateGems, SecureSum
    >>> PrivateGems(epsilon=1.0, steps=8, colluders=2, secure=SecureSum()).noise(10).honest
    5
    """

    needs_classes: ClassVar[bool] = True
    mod_needed: ClassVar[str] = "good_enough_mod(data, model=Net)"
    sends_models: ClassVar[bool] = False
    sums_replies: ClassVar[bool] = True

    epsilon: float = 1.0
    delta: float = 1e-5
    steps: int = 16
    clip: float = 10.0
    colluders: int = 0
    fewest: int | None = None
    examples: int = 2**17
    dp_seeded: bool = False
    layer: str | None = None
    backbone: BackboneMode = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        # Of sums nothing but the total is anybody's business: single ones are never written.
        self.keep_replies = False
        rules = {
            "steps": (self.steps >= 1, "at least 1"),
            "clip": (0 < self.clip < float("inf"), "above 0"),
            "examples": (1 <= self.examples <= 2**30, "from 1 to 2^30"),
            "colluders": (self.colluders >= 0, "at least 0"),
            "fewest": (self.fewest is None or self.fewest > self.colluders, "above colluders"),
        }
        for name, (holds, allowed) in rules.items():
            if not holds:
                raise OptionError(f"{name} must be {allowed}, got {getattr(self, name)!r}")
        SharedNoise(self.epsilon, self.delta, nodes=1)
        self._backbones = BackboneSender(self.backbone, keep=True)

    @property
    def rounds_needed(self) -> int:  # type: ignore[override]
        """One for the moments, and one for each gradient."""
        return 1 + self.steps

    def noise(self, nodes: int) -> SharedNoise:
        """Return the noise of sums over so many nodes.

        Raises
        ------
        OptionError
            If too few are left whose noise counts.
        """
        fewest = self.fewest
        if fewest is None:
            fewest = nodes if self.secure is None else shares_needed(self.secure.threshold, nodes)
        return SharedNoise(self.epsilon, self.delta, nodes, self.colluders, min(fewest, nodes))

    def play_round(
        self,
        server_round: int,
        state: ServerState,
        grid: Grid,
        train_config: ConfigRecord,
        evaluate_config: ConfigRecord,
    ) -> RoundOutcome:
        """Ask for moments in the first round, for a gradient in every other."""
        layer = find_output_layer(state.arrays, self.layer)
        nodes = self.choose_nodes(server_round, grid, self.fraction_train, TRAIN)
        noise = self.noise(len(nodes))
        if self.fewest is not None and len(nodes) < self.fewest:
            reason = f"{len(nodes)} nodes are there, and the noise is made for {self.fewest}"
            raise RoundFailedError(f"round {server_round} failed: {reason}", nodes, ())
        ask = partial(self._total, server_round, nodes, noise, train_config, layer)
        if server_round == 1:
            memory, total = self._moments(ask, noise, state.arrays)
        else:
            memory, total = self._step(ask, PrivateMemory.of(state.memory), state.arrays, layer)
        arrays = _with_layer(state.arrays, layer, memory, memory.stepping.layer)
        details = {"privacy": self._promise(noise), "nodes": list(total.nodes)}
        return RoundOutcome(arrays=arrays, details=details, memory=memory.to_arrays())

    def _moments(
        self, ask: Callable[..., Total], noise: SharedNoise, arrays: Arrays
    ) -> tuple[PrivateMemory, Total]:
        """Ask for means, then for the spread around them; return the first layer."""
        told = ask(PrivateSum("means", clip=self.clip), MEANS_PART, arrays).values
        means = NoisyMeans.of(told["sums"], told["counts"], float(told["squares"][0]), self.clip)
        if means.total > self.examples:
            raise OptionError(
                f"examples must be above {means.total:.0f}, as many as the nodes seem to have: "
                f"sums of more than {self.examples} would wrap"
            )
        center, clip = means.center, means.clip
        log_event("private_means", examples=round(means.total), clip=clip)
        total = ask(PrivateSum("spread", clip=clip), SPREAD_PART, arrays, center)
        spread = Spread.of(
            total.values["diagonal"], total.values["corner"], means.total, self.device
        )
        # That of the gradients to come, if as many nodes take part in them.
        deviation = noise.share(self._gradient_part) * math.sqrt(len(total.nodes))
        first = Stepping.first(means, spread, deviation / means.total)
        return PrivateMemory(center, clip, means.total, spread, first), total

    def _step(
        self,
        ask: Callable[..., Total],
        memory: PrivateMemory,
        arrays: Arrays,
        layer: OutputLayer,
    ) -> tuple[PrivateMemory, Total]:
        """Ask for the gradient where the momentum leads, and step."""
        ahead = _with_layer(arrays, layer, memory, memory.stepping.ahead)
        request = PrivateSum("gradient", clip=memory.clip, longest=LONGEST)
        total = ask(request, self._gradient_part, ahead, memory.center)
        stepping = memory.stepping.stepped(total.values["gradient"], memory.spread, memory.samples)
        return dataclasses.replace(memory, stepping=stepping), total

    @property
    def _gradient_part(self) -> float:
        return (1 - MEANS_PART - SPREAD_PART) / self.steps

    def _total(
        self,
        server_round: int,
        nodes: Sequence[int],
        noise: SharedNoise,
        config: ConfigRecord,
        layer: OutputLayer,
        request: PrivateSum,
        part: float,
        arrays: Arrays,
        center: Float | None = None,
    ) -> Total:
        """Return a total with the noise of a release that gets a part of what may be spent."""
        share = noise.share(part)
        request = dataclasses.replace(request, noise=share, dp_seeded=self.dp_seeded)
        sections = request.sections(layer.num_classes, layer.features, noise.nodes, self.examples)
        numbers = sum(section.size for section in sections)
        least = min(request.deviation(section.name) for section in sections)
        noise.check_cost((2 + self.steps) * epsilon_cost(numbers, least, noise.honest))
        model = SplitModel.of(arrays, layer.keys)

        def send(receivers: Sequence[int], put: Callable[[Message], None]) -> list[Message]:
            def ask(message: Message) -> None:
                ask_for_private_sum(message.content, request, center)
                put(message)

            return self._backbones.collect(
                self, server_round, receivers, model, config, ask, request.stage
            )

        def check(content: RecordDict) -> None:
            self._backbones.refuse_lacking(content, layer.weight)

        return self.sums.total(
            self,
            server_round,
            nodes,
            sections,
            send,
            check=check,
            at_least=max(self.min_nodes, noise.least_in_sum),
            step=request.stage,
        )

    def _promise(self, noise: SharedNoise) -> dict[str, Any]:
        """Return what holds for the run as a whole, and what more colluders would leave of it."""
        others = range(max(1, noise.honest - 2), noise.honest)
        left = {str(noise.least_in_sum - h): noise.epsilon_left(h) for h in reversed(others)}
        return {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "nodes": noise.nodes,
            "fewest": noise.least_in_sum,
            "colluders": self.colluders,
            "epsilon_with_colluders": left,
        }


def _with_layer(
    arrays: Arrays, layer: OutputLayer, memory: PrivateMemory, values: Float
) -> dict[str, NDArray[Any]]:
    point = flatten_linear(*plain_layer(values, memory.center, memory.clip))
    return layer.replace_in(arrays, np.asarray(point))
