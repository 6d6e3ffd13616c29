"""Networks known by their arrays: layers, neurons, other widths."""

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from torch import nn

from gems_flwr.core.records import to_numpy
from gems_flwr.networks import (
    freeze_lowest,
    lowest_layers,
    neuron_rows,
    outgoing_rows,
    replace_layer,
    resize_model,
    weight_layers,
)


def chain():
    """A convolution on a convolution on a linear layer, behind a flattening, on a linear one."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.ReLU(),
        nn.Conv2d(3, 4, 3, bias=False),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * 2 * 2, 5),
        nn.ReLU(),
        nn.Linear(5, 2),
    )


def arrays_of(model):
    return to_numpy(ArrayRecord(model.state_dict()))


def predictions(model, arrays, x):
    with torch.no_grad():
        return resize_model(model, arrays).eval()(x)


def test_layers_are_found_with_their_biases_widths_and_kernels():
    arrays = arrays_of(chain())
    layers = weight_layers(arrays)
    assert [layer.name for layer in layers] == ["0", "2", "6", "8"]
    assert [layer.width for layer in layers] == [3, 4, 5, 2]
    assert [layer.bias for layer in layers] == ["0.bias", None, "6.bias", "8.bias"]
    assert [layer.dimension for layer in layers] == [10, 27, 17, 6]
    for index, layer in enumerate(layers[:-1]):
        again = replace_layer(arrays, index, neuron_rows(arrays, layer), seed=0)
        assert all(np.array_equal(again[key], arrays[key]) for key in layer.keys)


def test_what_is_no_chain_of_layers_is_refused():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"1\.running_mean.*normalisation"):
        weight_layers(arrays_of(model))
    arrays = {"a.weight": np.zeros((3, 4)), "b.weight": np.zeros((2, 5))}
    with pytest.raises(ValueError, match=r"'b.weight' has 5 inputs.*3 neurons of 'a.weight'"):
        weight_layers(arrays)
    with pytest.raises(ValueError, match="no layers"):
        weight_layers({"a": np.zeros(3)})


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_neuron_without_outgoing_weights_does_nothing(index):
    """Outgoing weights are a column, a kernel or, behind a flattening, a block of pixels."""
    arrays, x = arrays_of(chain()), torch.randn(6, 1, 8, 8)
    layer, above = weight_layers(arrays)[index : index + 2]
    arrays[above.weight].reshape(above.width, layer.width, -1)[:, 1] = 0
    alive = np.abs(outgoing_rows(arrays, layer, above)).max(axis=1) > 0
    assert alive.tolist() == [neuron != 1 for neuron in range(layer.width)]
    before = predictions(chain(), arrays, x)
    arrays[layer.weight][1] += 1
    torch.testing.assert_close(predictions(chain(), arrays, x), before)
    arrays[layer.weight][0] += 1
    assert not torch.allclose(predictions(chain(), arrays, x), before)


def test_the_lowest_layers_are_counted_up_to_the_first_that_is_missing():
    arrays = arrays_of(chain())
    keys = ["0.weight", "0.bias", "2.weight", "8.weight", "8.bias"]
    assert [lowest_layers(arrays, keys[:count]) for count in (0, 1, 2, 3, 5)] == [0, 0, 1, 2, 2]
    assert lowest_layers({"a": np.zeros(3)}, ["a"]) == 0


def test_a_hidden_layer_above_starts_from_seeded_random_weights_of_torchs_scale():
    arrays = arrays_of(chain())
    rows = np.ones((7, 27))
    one, same, other = (replace_layer(arrays, 1, rows, seed=seed) for seed in (3, 3, 4))
    assert one["6.weight"].shape == (5, 28)
    assert one["6.weight"].dtype == np.float32
    np.testing.assert_array_equal(one["6.weight"], same["6.weight"])
    assert not np.array_equal(one["6.weight"], other["6.weight"])
    assert 0.5 / np.sqrt(28) < np.abs(one["6.weight"]).max() <= 1 / np.sqrt(28)
    np.testing.assert_array_equal(one["2.weight"], np.ones((7, 3, 3, 3)))
    np.testing.assert_array_equal(one["0.weight"], arrays["0.weight"])


def test_the_output_layer_above_starts_from_zero_and_modules_know_their_sizes():
    arrays = arrays_of(chain())
    one = replace_layer(arrays, 2, np.ones((7, 17)), seed=3)
    model = resize_model(chain(), one)
    assert (model[6].out_features, model[8].in_features) == (7, 7)
    model = resize_model(model, replace_layer(arrays_of(model), 0, np.ones((9, 10)), seed=0))
    assert (model[0].out_channels, model[2].in_channels) == (9, 9)
    with pytest.raises(ValueError, match=r"expected shape \(neurons, 17\), got \(7, 16\)"):
        replace_layer(arrays, 2, np.ones((7, 16)), seed=0)
    np.testing.assert_array_equal(one["8.weight"], np.zeros((2, 7)))
    np.testing.assert_array_equal(one["8.bias"], np.zeros(2))
    np.testing.assert_array_equal(one["6.bias"], np.ones(7))


def test_resizing_says_what_does_not_fit():
    arrays = arrays_of(chain())
    with pytest.raises(ValueError, match=r"missing \['0.bias'\]"):
        resize_model(chain(), {k: v for k, v in arrays.items() if k != "0.bias"})
    inputs = {**arrays, "0.weight": np.zeros((3, 2, 3, 3), np.float32)}
    with pytest.raises(ValueError, match=r"size mismatch: '0.weight' has 2 inputs.* has 1"):
        resize_model(chain(), inputs)
    outputs = {**arrays, "8.weight": np.zeros((9, 5), np.float32)}
    with pytest.raises(ValueError, match=r"size mismatch: '8.weight' has 9 outputs.* has 2"):
        resize_model(chain(), outputs)
    kernel = {**arrays, "0.weight": np.zeros((3, 1, 5, 5), np.float32)}
    with pytest.raises(ValueError, match=r"'0.weight' has shape \(3, 1, 5, 5\)"):
        resize_model(chain(), kernel)
    grouped = nn.Sequential(nn.Conv2d(2, 2, 1, groups=2), nn.Conv2d(2, 2, 1))
    wider = arrays_of(nn.Sequential(nn.Conv2d(2, 4, 1, groups=2), nn.Conv2d(4, 2, 1)))
    with pytest.raises(ValueError, match="without groups"):
        resize_model(grouped, wider)


def test_frozen_layers_get_no_gradients_and_the_others_do():
    model = chain()
    freeze_lowest(model, 2)
    model(torch.randn(2, 1, 8, 8)).sum().backward()
    trained = [name for name, weight in model.named_parameters() if weight.grad is not None]
    assert trained == ["6.weight", "6.bias", "8.weight", "8.bias"]
    with pytest.raises(ValueError, match="expected 0 to 3 frozen layers, got 4"):
        freeze_lowest(model, 4)
