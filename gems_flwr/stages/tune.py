"""Fine-tuning at the server on a small public sample (2019, Section 3.3; 2018, Section 3.4).

The released code tunes GEMS and the average with Adam at 1e-2 but local and raw models at 1e-3,
which flatters GEMS. Decided here: one rate (1e-3) for everything that is compared, five epochs,
batches of 32. A layer from class-moment cones hardly gains from that: `tune_cones` instead adds the
public sample's loss to the cone objective.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gems_flwr.devices import chosen_device, end_step, moved
from gems_flwr.errors import OptionError
from gems_flwr.networks import LayerReader
from gems_flwr.samples import Samples
from gems_flwr.spaces import Intersection, flatten_linear, unflatten_linear
from gems_flwr.spaces.cone import ClassMomentCone, ConeOptions, solve_cones
from gems_flwr.stages.stage import Play, Stage
from gems_flwr.typing import Arrays, Float

EPOCHS, BATCH = 5, 32


@dataclass(frozen=True, eq=False)
class Tune(Stage):
    """Fine-tune the output layer on public samples.

    With class moments the sample joins the objective; balls and ellipsoids are left by Adam.

    Parameters
    ----------
    inputs : array
        Public inputs of the output layer; with `model`, of the network.
    labels : array of int
        Their classes.
    count : int, optional
        How many of them to use, the first ones; all by default.
    rate : float, default 0.001
        Adam's rate, above 0; the released code has 0.01.
    model : callable, optional
        Returns the torch module, which computes what the output layer sees of the inputs.

    Examples
    --------
    >>> import numpy as np
    >>> from gems_flwr import Ball, Gems, Tune
    >>> strategy = Gems(space=Ball(), tune=Tune(np.zeros((10, 4)), np.zeros(10), count=5))
    """

    option: ClassVar[str] = "tune"
    needs: ClassVar[frozenset[str]] = frozenset({"cone head"})

    inputs: ArrayLike
    labels: ArrayLike
    count: int | None = None
    rate: float = 1e-3
    model: Callable[[], nn.Module] | None = None

    def __post_init__(self) -> None:
        have, count = len(np.asarray(self.labels)), self.count
        if not have:
            raise OptionError("there are no public samples to tune on: give inputs and labels")
        if count is not None and not 1 <= count <= have:
            raise OptionError(f"count must be from 1 to the {have} public samples, got {count}")
        if not self.rate > 0:
            raise OptionError(f"rate must be above 0, got {self.rate}")

    def samples(self, arrays: Arrays | None = None, device: str = "cpu") -> Samples:
        """Return the samples to tune on; of a model, if given, as its output layer sees them."""
        inputs, labels = np.asarray(self.inputs), np.asarray(self.labels)
        count = len(labels) if self.count is None else self.count
        public = Samples(
            torch.as_tensor(inputs[:count].astype(np.float32)),
            torch.as_tensor(labels[:count].astype(np.int64)),
        )
        if arrays is None or self.model is None:
            return public
        data = (public.inputs, public.labels)
        reader = LayerReader(arrays, self.model(), device=device)
        return reader.read(data, reader.output_layer(data))

    def play(self, play: Play) -> None:
        """Move the layer that was found."""
        public, found = self.samples(play.start, play.device), play.aggregate
        inputs, labels = public.inputs, public.labels
        spaces = list(play.spaces.values())
        cones: list[Any] = [space for space in spaces if isinstance(space, ClassMomentCone)]
        if len(cones) == len(spaces):
            options = play.head.cone_options(play.device)
            point = tune_cones(cones, inputs, labels, options, start=found.point).point
        else:
            about = found.point, inputs, labels, play.layer.num_classes
            seed, device = play.round.seed, play.device
            point = fine_tune_linear(*about, rate=self.rate, seed=seed, device=device)
        play.found = dataclasses.replace(found, point=point, tuned_on=len(public))


# --- on arrays and tensors ----------------------------------------------------------------------


def fine_tune_linear(
    point: Float,
    inputs: Tensor,
    labels: Tensor,
    num_classes: int,
    *,
    rate: float = 1e-3,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> Float:
    """Return a flat linear layer after a few epochs of Adam on a public sample."""
    where = chosen_device(device)
    weight, bias = (
        torch.tensor(part, dtype=torch.float32).to(where).requires_grad_()
        for part in unflatten_linear(point, num_classes, inputs.shape[1])
    )
    data = (inputs.to(where), labels.to(where))
    _descend(lambda x: x @ weight.T + bias, [weight, bias], *data, rate, seed)
    return flatten_linear(weight.detach().cpu().numpy(), bias.detach().cpu().numpy())


def fine_tune_network(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    *,
    rate: float = 1e-3,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> None:
    """Train all weights of a network for a few epochs of Adam on a public sample, in place.

    The model stays in evaluation mode, without dropout.
    """
    where = chosen_device(device)
    with moved(model, where):
        data = (inputs.to(where), labels.to(where))
        _descend(lambda x: model.eval()(x), list(model.parameters()), *data, rate, seed)


def _descend(
    predict: Callable[[Tensor], Tensor],
    parameters: Sequence[Tensor],
    inputs: Tensor,
    labels: Tensor,
    rate: float,
    seed: int,
) -> None:
    optimizer = torch.optim.Adam(parameters, lr=rate)
    generator = torch.Generator().manual_seed(seed % 2**63)
    x, y = inputs.float(), labels.long()
    for _ in range(EPOCHS):
        order = torch.randperm(len(x), generator=generator)
        for start in range(0, len(x), BATCH):
            rows = order[start : start + BATCH].to(x.device)
            optimizer.zero_grad()
            loss = cross_entropy(predict(x[rows]), y[rows])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            end_step(x.device)


def public_weight(count: int, factor: float = 0.2) -> float:
    """Return a public sample's weight in the objective; `factor` is that of a thousand samples."""
    return factor * count / 1000


def tune_cones(
    cones: Sequence[ClassMomentCone],
    inputs: Tensor,
    labels: Tensor,
    options: ConeOptions | None = None,
    factor: float = 0.2,
    start: Float | None = None,
) -> Intersection:
    """Return the layer that serves the nodes' moments and a public sample together."""
    weight = public_weight(len(inputs), factor)
    return solve_cones(cones, options, Samples(inputs, labels), start, weight)
