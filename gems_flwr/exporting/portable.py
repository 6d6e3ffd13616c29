"""A model with all that belongs to it: raw values in, predictions out.

Weights alone predict nothing: the run multiplied stored values by a scale first, and made logits
into probabilities, or the votes of several models into one, afterwards. `Portable` is all of it as
one torch module, which is what the exporters take.

Decided here: a class is predicted by the largest output, also where one output stands for two
classes (then it is the logit of the second). Votes that tie, which a run breaks at random, go to
the first class of those that tie.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gems_flwr.errors import ModelError, OptionError

Vote = Literal["softmax_mean", "majority"]


class Portable(nn.Module):
    """One or several models, with what stands before and behind them.

    Parameters
    ----------
    models : sequence of torch.nn.Module
        Each maps a batch shaped ``(n, *input_shape)`` to outputs ``(n, k)``.
    input_shape : sequence of int
        Shape of one example.
    scale : float
        What raw values are multiplied with, not 0.
    classes : int
        How many classes there are, at least 2; 0: the output is a number.
    vote : str, optional
        How several models make one: ``"softmax_mean"``, the mean of their probabilities, or
        ``"majority"``.

    Raises
    ------
    ModelError
        If a model does not take such a batch, or its outputs do not fit.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        *,
        input_shape: Sequence[int],
        scale: float = 1.0,
        classes: int,
        vote: Vote | None = None,
    ) -> None:
        super().__init__()
        if len(models) > 1 and vote is None:
            raise OptionError(f"vote: one of {list(get_args(Vote))}, or choose one model of them")
        self.models = nn.ModuleList(models)
        self.input_shape, self.scale = tuple(input_shape), float(scale)
        self.classes, self.vote = classes, vote if len(models) > 1 else None
        self.eval()
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        for model in models:
            self._try(model)

    def _try(self, model: nn.Module) -> None:
        """Refuse a model that does not take the inputs, or has other outputs."""
        shape = ", ".join(map(str, self.input_shape))
        try:
            with torch.no_grad():
                outputs = model(torch.zeros(2, *self.input_shape))
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise ModelError(
                f"the model does not take inputs shaped (n, {shape}): {type(error).__name__}: "
                f"{reason}; give the shape of one example, input_shape (--input-shape 1,28,28)"
            ) from error
        if not isinstance(outputs, Tensor) or outputs.ndim != 2 or len(outputs) != 2:
            what = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
            raise ModelError(
                f"the model maps inputs shaped (2, {shape}) to {what}, expected a tensor of shape "
                "(2, outputs)"
            )
        count = outputs.shape[1]
        if self.classes == 0 and count != 1:
            raise ModelError(f"a number has one output, the model has {count}")
        if self.classes and count != self.classes and (self.classes, count) != (2, 1):
            raise ModelError(f"the model has {count} outputs for {self.classes} classes")

    @property
    def output_names(self) -> tuple[str, ...]:
        """What `forward` returns, in order."""
        if not self.classes:
            return ("prediction",)
        if self.vote == "majority":
            return ("votes", "label")
        if self.vote == "softmax_mean":
            return ("probabilities", "label")
        return ("logits", "probabilities", "label")

    @property
    def weights(self) -> int:
        """How many numbers of the models were learned."""
        return sum(parameter.numel() for parameter in self.parameters())

    def example(self, count: int, seed: int = 0) -> Tensor:
        """Return random inputs that the scale maps to 0 … 1."""
        source = torch.Generator().manual_seed(seed)
        return torch.rand(count, *self.input_shape, generator=source) / self.scale

    def forward(self, input: Tensor) -> tuple[Tensor, ...]:
        """Return what `output_names` says for raw values of shape ``(n, *input_shape)``."""
        scaled = input * self.scale
        outputs = [model(scaled) for model in self.models]
        if not self.classes:
            return (outputs[0].flatten(),)
        if self.vote is None:
            probabilities = self._probabilities(outputs[0])
            return outputs[0], probabilities, self._label(outputs[0])
        if self.vote == "softmax_mean":
            mean = torch.stack([self._probabilities(each) for each in outputs]).mean(0)
            return mean, mean.argmax(1)
        labels = [F.one_hot(self._label(each), self.classes) for each in outputs]
        votes = torch.stack(labels).sum(0)
        return votes / len(outputs), votes.argmax(1)

    def _label(self, outputs: Tensor) -> Tensor:
        if outputs.shape[1] == 1:
            return (outputs[:, 0] > 0).long()
        return outputs.argmax(1)

    def _probabilities(self, outputs: Tensor) -> Tensor:
        if outputs.shape[1] == 1:
            return torch.cat([torch.sigmoid(-outputs), torch.sigmoid(outputs)], dim=1)
        return torch.softmax(outputs, dim=1)
