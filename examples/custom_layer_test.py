"""Check the backward pass of a layer of one's own in pytest: ``pytest examples/custom_layer_test.py``.

The layer has a backward pass written by hand: exactly what is easily got wrong. Change ``2 * x`` below to see what a
failure says.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import pytest
from keras import ops

from keras_gradwatch.testing import assert_gradients


@ops.custom_gradient
def energy(x, w):
    """Σ w x² over the last axis, with its backward pass by hand."""

    def backward(*arguments, upstream=None):
        upstream = (arguments[0] if upstream is None else upstream)[..., None]
        to_x = upstream * w * 2 * x
        to_w = ops.sum(upstream * ops.square(x), axis=tuple(range(len(x.shape) - 1)))
        return to_x, to_w

    return ops.sum(w * ops.square(x), axis=-1), backward


class Energy(keras.layers.Layer):
    """Weighted sum of squares of the features."""

    def build(self, shape):
        self.w = self.add_weight(name="w", shape=(shape[-1],), initializer="random_normal")

    def call(self, inputs):
        return energy(inputs, ops.convert_to_tensor(self.w))


class Forgetful(Energy):
    """The same with a fault: its weights learn nothing."""

    def call(self, inputs):
        return energy(inputs, ops.stop_gradient(ops.convert_to_tensor(self.w)))


@pytest.mark.parametrize("shape", [(8, 5), (4, 3, 6)])
def test_backward_is_right(shape):
    """One line: every weight and input, certified in float64."""
    assert_gradients(Energy(), shape)


def test_inside_a_model():
    """By the loss of a compiled model."""
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4, activation="tanh"), Energy()])
    model.compile("sgd", "mse")
    assert_gradients(model, keras.random.normal((8, 5), seed=0), keras.random.normal((8,), seed=1))


def test_what_a_failure_says():
    """It names the tensor and why."""
    with pytest.raises(AssertionError, match="cut by stop_gradient"):
        assert_gradients(Forgetful(), (8, 5))
