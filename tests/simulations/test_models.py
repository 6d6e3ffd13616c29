"""Models: sizes, shapes, the output layer at the end, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import nn

from simulations.models import cnn, lenet, logistic, mcmahan_cnn, mlp

CONF = Path(__file__).parents[2] / "conf" / "model"
MNIST = {"input_shape": (1, 28, 28), "classes": 10}


def weights(model: nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (logistic(**MNIST), 784 * 10 + 10),
        (mlp(**MNIST), 784 * 50 + 50 + 50 * 10 + 10),
        (mlp(**MNIST, hidden=[20, 30]), 784 * 20 + 20 + 20 * 30 + 30 + 30 * 10 + 10),
        (cnn(**MNIST), 1_199_882),
        (lenet(**MNIST), 61_706),
        (mcmahan_cnn(**MNIST), 1_663_370),
        (mlp(**MNIST, hidden=[200, 200]), 199_210),
    ],
    ids=["logistic", "mlp", "deep mlp", "cnn", "lenet", "McMahan's CNN", "McMahan's 2NN"],
)
def test_models_for_mnist_have_the_published_number_of_weights(
    model: nn.Module, expected: int
) -> None:
    """Figures of the papers, or by hand.

    1,199,882 is the dynamic-averaging paper's, 61,706 that of LeNet-5, 1,663,370 and 199,210 are
    McMahan et al.'s.
    """
    assert weights(model) == expected


@pytest.mark.parametrize("build", [logistic, mlp, cnn, lenet, mcmahan_cnn])
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (3, 28, 28), (1, 12, 17)])
def test_image_batches_become_logits_and_the_last_module_is_linear(
    build: Callable[..., nn.Sequential], shape: tuple[int, ...]
) -> None:
    model = build(input_shape=shape, classes=7)
    assert model(torch.zeros(4, *shape)).shape == (4, 7)
    assert isinstance(list(model.modules())[-1], nn.Linear)


@pytest.mark.parametrize("build", [logistic, mlp])
def test_dense_models_take_feature_vectors(build: Callable[..., nn.Sequential]) -> None:
    assert build(input_shape=(320,), classes=2)(torch.zeros(3, 320)).shape == (3, 2)


def test_cnn_takes_the_small_digits() -> None:
    assert cnn(input_shape=(1, 8, 8), classes=10)(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


@pytest.mark.parametrize(
    ("build", "shape"),
    [(cnn, (320,)), (lenet, (320,)), (cnn, (1, 5, 28)), (lenet, (1, 8, 8))],
)
def test_image_models_refuse_vectors_and_small_images(
    build: Callable[..., nn.Sequential], shape: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=r"needs images .* of at least \d+×\d+ pixels"):
        build(input_shape=shape, classes=10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden": [0]}, "at least 1"),
        ({"hidden": [2.5]}, "whole numbers"),
        ({"dropout": 1.0}, r"\[0, 1\)"),
        ({"dropout": -0.1}, r"\[0, 1\)"),
        ({"classes": 1}, "at least 2"),
        ({"input_shape": ()}, "input_shape"),
        ({"input_shape": (1, 0, 3)}, "input_shape"),
    ],
)
def test_impossible_options_are_refused_with_the_allowed_values(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        mlp(**{**MNIST, **options})  # type: ignore[arg-type]


def test_names_of_weights_do_not_depend_on_dropout() -> None:
    assert list(mlp(**MNIST, dropout=0.0).state_dict()) == list(mlp(**MNIST).state_dict())


@pytest.mark.parametrize("path", sorted(CONF.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_model_config_instantiates(path: Path) -> None:
    # Networks that steer want larger images than digits are.
    shape = (1, 64, 64) if path.stem.startswith("pilotnet") else MNIST["input_shape"]
    model = instantiate(OmegaConf.load(path), input_shape=shape, classes=10)
    assert model(torch.zeros(2, *shape)).shape == (2, 10)


def test_hidden_layers_can_be_given_in_the_config() -> None:
    config = OmegaConf.merge(OmegaConf.load(CONF / "mlp.yaml"), {"hidden": [7, 5]})
    model = instantiate(config, input_shape=(4,), classes=3)
    assert [m.out_features for m in model if isinstance(m, nn.Linear)] == [7, 5, 3]
