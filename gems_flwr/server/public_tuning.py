"""Fine-tuning at the server, for every strategy that can do it (Guha & Smith 2019, Section 3.3).

The paper's curves (Section 4.4, Figures 3 and 4) tune the nodes' own models and their average in
the same way as the GEMS model. So all of them go through the functions here: the first `tune`
public samples, in the same order, five epochs of Adam at one rate. What the paper leaves open, and
is decided here: the last layer is tuned on what the model's own layers below it make of the sample.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid
from torch import Tensor, nn

from gems_flwr.errors import OptionError
from gems_flwr.intersect.tuning import fine_tune_linear, fine_tune_network
from gems_flwr.networks.inputs import LayerReader
from gems_flwr.networks.surgery import resize_model
from gems_flwr.runtime.seeding import derive_seed
from gems_flwr.server.log import log_warning
from gems_flwr.server.loop import RoundLoop
from gems_flwr.server.state import RoundOutcome, ServerState
from gems_flwr.spaces.output_layer import flatten_linear
from gems_flwr.typing import ArrayPair, Arrays
from gems_flwr.wire.records import to_numpy

BuildModel = Callable[[], nn.Module]
TuneLayers = Literal["last", "all"]


def check_tuning(tune: int, rate: float, public: ArrayPair | None) -> None:
    """Refuse a schedule that is out of range, or has too few samples.

    Raises
    ------
    OptionError
        Names the option and what to do.
    """
    if tune < 0:
        raise OptionError(f"tune must be at least 0, got {tune}")
    if not rate > 0:
        raise OptionError(f"tune_rate must be above 0, got {rate}")
    have = 0 if public is None else len(public[1])
    if tune > have:
        raise OptionError(
            f"tune={tune} needs as many public samples, there are {have}: lower tune, or give more"
        )


def first_samples(public: ArrayPair, count: int) -> tuple[Tensor, Tensor]:
    """Return the first samples as tensors: inputs (float32) and classes (int64)."""
    inputs, labels = public
    return (
        torch.as_tensor(np.asarray(inputs[:count], dtype=np.float32)),
        torch.as_tensor(np.asarray(labels[:count], dtype=np.int64)),
    )


def tune_network(
    arrays: Arrays,
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    *,
    rate: float,
    seed: int,
    device: str = "cpu",
) -> Arrays:
    """Return a model after all of its weights were tuned; `seed` is the run's."""
    resize_model(model, arrays)
    fine_tune_network(model, *data, rate=rate, seed=derive_seed(seed, "tune"), device=device)
    return to_numpy(ArrayRecord(model.state_dict()))


def tune_last_layer(
    arrays: Arrays,
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    *,
    rate: float,
    seed: int,
    device: str = "cpu",
) -> Arrays:
    """Return a model after its linear output layer was tuned; `seed` is the run's.

    Raises
    ------
    OptionError
        If the output layer has no bias, or a single output.
    """
    reader = LayerReader(arrays, model, device=device)
    layer = reader.output_layer(data)
    if layer.bias is None or layer.outputs < 2:
        raise OptionError(
            f"tune_layers='last' needs an output layer with a bias and one output per class, "
            f"'{layer.weight}' is none: tune_layers='all' takes any"
        )
    seen = reader.read(data, layer)
    start = flatten_linear(arrays[layer.weight], arrays[layer.bias])
    point = fine_tune_linear(
        start, seen.inputs, seen.labels, layer.num_classes, rate=rate, seed=seed, device=device
    )
    return layer.replace_in(arrays, point)


@dataclass(kw_only=True, eq=False)
class TunesOnPublicData(RoundLoop):
    """Base of strategies whose server fine-tunes what it made of the nodes' models.

    Parameters
    ----------
    tune : int, default 0
        How many public samples to fine-tune on; 0 for none.
    tune_layers : {"last", "all"}
        What to fine-tune.
    tune_rate : float, default 0.001
        Adam's rate, above 0; the released code has 0.01 for some methods.
    public_data : pair of arrays, optional
        Public inputs of the network, and their classes; needed for `tune`.
    build_model : callable, optional
        Returns the torch module; needed for `tune`.
    **loop
        See `RoundLoop`.
    """

    tune: int = 0
    tune_layers: TuneLayers = "last"
    tune_rate: float = 1e-3
    public_data: ArrayPair | None = None
    build_model: BuildModel | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tune_layers not in get_args(TuneLayers):
            raise OptionError(f"tune_layers must be 'last' or 'all', got {self.tune_layers!r}")
        check_tuning(self.tune, self.tune_rate, self.public_data)
        if self.tune and self.build_model is None:
            raise OptionError(f"tune={self.tune} needs build_model, which returns the torch module")

    def play_round(
        self,
        server_round: int,
        state: ServerState,
        grid: Grid,
        train_config: ConfigRecord,
        evaluate_config: ConfigRecord,
    ) -> RoundOutcome:
        """Play one round, and tell how many public samples there were in it."""
        outcome = super().play_round(server_round, state, grid, train_config, evaluate_config)
        if not self.tune:
            return outcome
        return dataclasses.replace(outcome, details={**outcome.details, "tuned_on": self.tune})

    def tuned(self, arrays: Arrays) -> Arrays:
        """Return a model after fine-tuning; as it was, if there is none, or it diverges."""
        if not self.tune:
            return arrays
        assert self.build_model is not None
        tune_layers = tune_network if self.tune_layers == "all" else tune_last_layer
        tuned = tune_layers(
            arrays,
            self.build_model(),
            self.public_sample(),
            rate=self.tune_rate,
            seed=self.seed,
            device=self.device,
        )
        # A node may send weights that are finite and from which no training leads anywhere.
        if all(np.isfinite(array).all() for array in tuned.values()):
            return tuned
        log_warning("tuning_diverged", reason="the model stays as it was before fine-tuning")
        return arrays

    def public_sample(self) -> tuple[Tensor, Tensor]:
        """Return the samples to tune on."""
        assert self.public_data is not None
        return first_samples(self.public_data, self.tune)
