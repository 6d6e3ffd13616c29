"""From ``--model`` to a driver: a run's model, the controller, or nobody at all.

A model gets the camera's image as training had it, shaped (1, height, width) with values in [0, 1],
and answers with one number, the angle. It is built by its run's ``config.yaml`` and filled from its
``model.safetensors``; the recorded data is not needed for that.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
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

from gems_flwr.server.members import split_members
from simulations.config import ConfigError
from simulations.driving.closed_loop import Driver, Steer, by_image, expert, straight
from simulations.driving.simulator import HEIGHT, WIDTH, Image

REFERENCES: dict[str, Driver] = {"expert": expert, "straight": straight}
MODEL_FILE, CONFIG_FILE = "model.safetensors", "config.yaml"
PIXEL_SCALE = 1 / 255
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")


def named_drivers(words: Sequence[str]) -> dict[str, Driver]:
    """Return the drivers of a command line, by name.

    Parameters
    ----------
    words : sequence of str
        ``expert``, ``straight``, a path of a run's folder or model file, or ``name=path``. Without
        a name it is called as its folder.

    Raises
    ------
    ConfigError
        If a name is used twice or is no file name, or a model cannot be loaded.
    """
    drivers: dict[str, Driver] = {}
    for word in words:
        name, given, place = word.partition("=")
        path = Path(place if given else word).expanduser()
        if not given and word not in REFERENCES:
            name = (path.parent if path.suffix == ".safetensors" else path).resolve().name
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"--model {word}: '{name}' is to be part of file names; write name=path, the name "
                "of letters, digits and . _ + -"
            )
        if name in drivers:
            raise ConfigError(f"--model {word}: there are two called '{name}'; write name=path")
        reference = REFERENCES.get(place if given else word)
        drivers[name] = reference or by_image(steering(load_model(path)))
    return drivers


def load_model(path: Path) -> nn.Module:
    """Return the model of a run that has one.

    Parameters
    ----------
    path : Path
        The run's folder, or the model file in it.

    Raises
    ------
    ConfigError
        If there is none, or none that steers by our images, or one of every node.
    """
    models = load_models(path)
    if len(models) > 1:
        raise ConfigError(
            f"{path} holds the models of {len(models)} nodes, not averaged: --model takes the "
            "folder of a run with one model"
        )
    return next(iter(models.values()))


def load_models(path: Path) -> dict[str, nn.Module]:
    """Return the models of a run by the names of their nodes; one alone is called ''.

    Parameters
    ----------
    path : Path
        The run's folder, or the model file in it.

    Raises
    ------
    ConfigError
        If there is none, or none that steers by our images.
    """
    file = path / MODEL_FILE if path.is_dir() else path
    config = file.with_name(CONFIG_FILE)
    for needed in (file, config):
        if not needed.is_file():
            raise ConfigError(
                f"{needed} is not there: --model takes the folder of a finished run, or expert, or "
                "straight"
            )
    try:
        options = OmegaConf.select(OmegaConf.load(config), "model", throw_on_missing=True)
        build = instantiate(options, _partial_=True, _convert_="all")
        # No classes: the networks of `simulations` have one output then, a number.
        arguments = {"input_shape": (1, HEIGHT, WIDTH), "classes": 0, "outputs": 1}
        accepted = inspect.signature(build.func).parameters
        models = {}
        for node, arrays in split_members(load_file(file)).items():
            model = build(**{key: arguments[key] for key in arguments if key in accepted})
            model.load_state_dict({name: torch.from_numpy(a) for name, a in arrays.items()})
            models[node] = model
    except (
        OmegaConfBaseException,
        InstantiationException,
        SafetensorError,
        LookupError,
        TypeError,
        ValueError,
        RuntimeError,
    ) as error:
        # Torch goes on to list every weight that does not fit.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"{file} is no model that steers by images of {HEIGHT}×{WIDTH} pixels: {reason}"
        ) from error
    return models


def steering(model: nn.Module) -> Steer:
    """Return how a model steers: from an image of bytes to an angle.

    Raises
    ------
    ConfigError
        When it is used, if the model answers with more than one number.
    """
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
