"""Checks of what only PyTorch has: wrapped modules, constants past ``stop_gradient``, generators, autograd.Function."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

if keras.backend.backend() != "torch":
    pytest.skip("checks on the PyTorch backend", allow_module_level=True)
import torch

from keras_gradwatch import GradWatch, check_gradients


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def stack(shape: tuple[int, ...], *parts: layers.Layer, loss: Any = "mse") -> keras.Model:
    model = keras.Sequential([keras.Input(shape), *parts])
    model.compile("sgd", loss)
    return model


@pytest.fixture(autouse=True)
def _seeded() -> None:
    keras.utils.set_random_seed(5)


class Wrong(torch.autograd.Function):
    """x², its backward 10 % too large; written the old way, with a detach in it."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x.detach() * x

    @staticmethod
    def backward(ctx: Any, upstream: Any) -> Any:
        return 2.2 * ctx.saved_tensors[0] * upstream


class Square(torch.nn.Module):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


def wrapped(function: Callable[[Any], Any]) -> keras.Model:
    module = torch.nn.Sequential(
        torch.nn.Linear(5, 8), torch.nn.BatchNorm1d(8), Square(function), torch.nn.Dropout(0.3), torch.nn.Linear(8, 4)
    )
    return stack((5,), layers.TorchModuleWrapper(module, name="wrapped"), layers.Dense(1, name="last"))


def test_a_wrapped_module_is_certified_and_unchanged() -> None:
    """A torch module inside a Keras model: every parameter is checked, its buffers and the random state stay."""
    model = wrapped(torch.square)
    state = {name: value.clone() for name, value in model.layers[0].module.state_dict().items()}
    stream = torch.get_rng_state()
    report = check_gradients(model, normal(8, 5), normal(8, 1))
    assert set(report.frame.check) == {"ok", "zero"}, str(report)  # zero: the bias in front of the normalisation
    assert (report.frame.check == "zero").sum() == 1
    assert torch.equal(torch.get_rng_state(), stream)
    for name, value in model.layers[0].module.state_dict().items():
        assert torch.equal(value, state[name]), name


def test_watching_a_wrapped_module_leaves_no_trace() -> None:
    """Trained with and without the callback it ends the same, buffers included."""
    states = []
    for callbacks in ([], [GradWatch(verbose=0)]):
        keras.utils.set_random_seed(5)
        model = wrapped(torch.square)
        model.fit(normal(32, 5), normal(32, 1), batch_size=8, epochs=2, verbose=0, callbacks=callbacks)
        states.append(model.layers[0].module.state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_a_fault_in_a_wrapped_module_is_blamed_on_it() -> None:
    """A wrong autograd.Function inside a torch module; a detach in its forward excuses nothing."""
    report = check_gradients(wrapped(Wrong.apply), normal(8, 5), normal(8, 1))
    assert [culprit.layer for culprit in report.result.culprits] == ["wrapped"], str(report)
    assert set(report.frame[report.frame.layer == "last"].check) == {"ok"}


def under_no_grad(x: Any) -> Any:
    with torch.no_grad():
        return torch.sin(x)


@pytest.mark.parametrize(
    "constant",
    [lambda x: torch.sin(x).detach(), lambda x: torch.sin(x).data, under_no_grad],
    ids=["detach", "data", "no_grad"],
)
def test_what_autograd_holds_constant_is_declared(constant: Callable[[Any], Any]) -> None:
    """However it is said: held constant on the numeric side, told, and the layer named."""
    layer = layers.Lambda(lambda x: x * constant(x), name="held")
    report = check_gradients(
        stack((5,), layers.Dense(4), layer, layers.Dense(1, name="last")), normal(8, 5), normal(8, 1)
    )
    assert report.ok, str(report)
    declared = report.frame[report.frame.check == "declared"]
    assert len(declared) == 3
    assert declared.reason.str.contains("held").all()


class Noise(layers.Layer):
    """Random numbers from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = [torch.Generator().manual_seed(3)]

    def call(self, x: Any) -> Any:
        return x * (1 + 0.3 * torch.randn(x.shape, generator=self.generator[0]))


def test_a_generator_of_ones_own_is_put_back() -> None:
    """Its draws repeat within a check, and the next step draws what it would have drawn."""
    noise = Noise()
    model = stack((5,), layers.Dense(4), noise, layers.Dense(1))
    assert check_gradients(model, normal(8, 5), normal(8, 1)).ok  # builds the loss, as fit would: Keras calls the layer
    state = noise.generator[0].get_state()
    report = check_gradients(model, normal(8, 5), normal(8, 1))
    assert report.ok, str(report)
    assert torch.equal(noise.generator[0].get_state(), state)


def test_a_gradient_inside_the_loss() -> None:
    """A penalty on the slope of the outputs, taken with torch.autograd.grad, is part of the loss."""

    class Penalized(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):  # type: ignore[no-untyped-def]
            x = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self(x).sum(), x, create_graph=True)
            return ops.mean(ops.square(y_pred - y)) + ops.mean(ops.square(slope))

    inputs = keras.Input((5,))
    model = Penalized(inputs, layers.Dense(1)(layers.Dense(6, "tanh")(inputs)))
    model.compile("sgd")
    frame = check_gradients(model, normal(8, 5), normal(8, 1), wrt=("weights",)).frame
    assert set(frame.check) == {"ok"}, frame


@pytest.mark.parametrize("seed", [None, 3])
def test_dropout_behind_a_convolution_has_the_same_mask_in_float64(seed: int | None) -> None:
    """Whatever the layout in memory: the rounding error is that of rounding, not of another mask."""
    parts = [layers.Conv2D(4, 3), layers.Dropout(0.4, seed=seed), layers.Flatten(), layers.Dense(1)]
    report = check_gradients(stack((8, 8, 2), *parts), normal(4, 8, 8, 2), normal(4, 1))
    assert report.verdict == "ok"
    assert report.frame.rounding_error.max() < 1e-5
