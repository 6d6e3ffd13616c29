"""The models of a run behind the wheel.

A model gets the camera's image as training had it, shaped (1, height, width) with values in [0, 1],
and answers with one number, the angle. It is built by its run's ``config.yaml`` and filled from its
``model.safetensors``; the recorded data is not needed for that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from safetensors import SafetensorError
from safetensors.numpy import load_file
from torch import nn

from gems_flwr.strategies.members import split_models
from simulations.config import ConfigError
from simulations.driving.simulator import HEIGHT, WIDTH, Image

MODEL_FILE, CONFIG_FILE = "model.safetensors", "config.yaml"
PIXEL_SCALE = 1 / 255


def load_models(path: Path) -> dict[str, nn.Module]:
    """Return the models of a run's folder or file by the names of their nodes; one alone is ''.

    Raises
    ------
    ConfigError
        If there is none, or none that steers by our images.
    """
    file = path / MODEL_FILE if path.is_dir() else path
    config = file.with_name(CONFIG_FILE)
    for needed in (file, config):
        if not needed.is_file():
            raise ConfigError(f"{needed} is not there: a finished run has one")
    try:
        options = OmegaConf.select(OmegaConf.load(config), "model", throw_on_missing=True)
        build = instantiate(options, _partial_=True, _convert_="all")
        # No classes: the networks of `simulations` have one output then, a number.
        arguments = {"input_shape": (1, HEIGHT, WIDTH), "classes": 0, "outputs": 1}
        accepted = inspect.signature(build.func).parameters
        models = {}
        for node, arrays in split_models(load_file(file)).items():
            model = build(**{key: arguments[key] for key in arguments if key in accepted})
            model.load_state_dict({name: torch.from_numpy(a) for name, a in arrays.items()})
            models[node] = model
    except (
        *(OmegaConfBaseException, InstantiationException, SafetensorError, LookupError),
        *(TypeError, ValueError, RuntimeError),
    ) as error:
        # Torch goes on to list every weight that does not fit.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"{file} is no model that steers by images of {HEIGHT}×{WIDTH} pixels: {reason}"
        ) from error
    return models


def steering(model: nn.Module) -> Callable[[Image], float]:
    """Return how a model steers: from an image of bytes to an angle."""
    model.eval()

    def steer(image: Image) -> float:
        pixels = torch.from_numpy(image.astype(np.float32) * np.float32(PIXEL_SCALE))
        with torch.inference_mode():
            answer = model(pixels[None, None])
        if answer.numel() != 1:
            raise ConfigError(
                f"the model answers with {answer.numel()} numbers; a model that steers has one"
            )
        return float(answer)

    return steer
