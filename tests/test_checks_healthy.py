"""Correct models of kinds where checkers raise false alarms: loops, wrappers, ties, random numbers, half precision."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops
from per_backend import BACKEND, array, native_normal, nested, only

from keras_gradwatch import check_gradients
from keras_gradwatch.checks import Checker
from keras_gradwatch.probe import Batch, arrays_of


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def stack(shape: tuple[int | None, ...], *parts: layers.Layer, loss: Any = "mse") -> keras.Model:
    model = keras.Sequential([keras.Input(shape), *parts])
    model.compile("sgd", loss)
    return model


@pytest.fixture(autouse=True)
def _seeded() -> None:
    keras.utils.set_random_seed(5)


class NativeNoise(layers.Layer):
    """Random numbers of the backend's own, past Keras' seeds."""

    def call(self, x: Any) -> Any:
        return x * (1 + 0.3 * native_normal(x))


class Compiled(layers.Layer):
    """A layer whose work is done in a function compiled by itself."""

    def build(self, shape: Any) -> None:
        self.gain = self.add_weight(name="gain", shape=(shape[-1],), initializer="ones")

    def call(self, x: Any) -> Any:
        return nested(lambda x, gain: ops.tanh(x) * gain)(x, ops.convert_to_tensor(self.gain) * 1)


def series(*parts: layers.Layer) -> Any:
    return stack((7, 4), *parts, layers.Dense(2)), normal(6, 7, 4), normal(6, 2)


def pictures(*parts: layers.Layer) -> Any:
    model = stack((8, 8, 2), *parts, layers.GlobalAveragePooling2D(), layers.Dense(2))
    return model, normal(4, 8, 8, 2), normal(4, 2)


def ties() -> Any:
    """Max-pooling over blank patches with zero biases: ties and kinks at every blank pixel."""
    x = np.zeros((6, 8, 8, 1), "float32")
    x[:, 2:5, 3:6] = np.abs(normal(6, 3, 3, 1))
    parts = [layers.Conv2D(6, 3, activation="relu"), layers.MaxPooling2D(), layers.Conv2D(4, 2, activation="relu")]
    return stack((8, 8, 1), *parts, layers.Flatten(), layers.Dense(3)), x, normal(6, 3)


def spatial() -> Any:
    parts = [layers.Conv3D(3, 2, activation="tanh"), layers.Flatten(), layers.Dense(2)]
    return stack((4, 4, 4, 1), *parts), normal(4, 4, 4, 4, 1), normal(4, 2)


def tokens() -> Any:
    parts = [layers.Embedding(9, 5), layers.GlobalAveragePooling1D(), layers.Dense(3, activation="softmax")]
    model = stack((6,), *parts, loss="sparse_categorical_crossentropy")
    return model, np.random.default_rng(0).integers(0, 4, (8, 6)), np.arange(8) % 3


def half() -> Any:
    dtype = "mixed_float16"
    model = stack((5,), layers.Dense(8, activation="relu", dtype=dtype), layers.Dense(1, dtype=dtype))
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1e-3)), "mse")
    x, y = normal(16, 5), normal(16, 1)
    model.fit(x, y, epochs=2, verbose=0)  # the loss scale exists from the first step on
    return model, x, y


MODELS: dict[str, Callable[[], Any]] = {
    "unrolled GRU": lambda: series(layers.GRU(5, unroll=True)),
    "bidirectional LSTM": lambda: series(layers.Bidirectional(layers.LSTM(4))),
    "time distributed": lambda: series(layers.TimeDistributed(layers.Dense(4, activation="gelu")), layers.Flatten()),
    "Conv1D and pooling": lambda: series(layers.Conv1D(6, 3, activation="silu"), layers.GlobalMaxPooling1D()),
    "convolutions of other kinds": lambda: pictures(
        layers.SeparableConv2D(4, 3), layers.LeakyReLU(), layers.Conv2DTranspose(3, 2, strides=2), layers.PReLU()
    ),
    "normalisations": lambda: pictures(
        layers.Conv2D(4, 3), layers.GroupNormalization(2), layers.UnitNormalization(), layers.LayerNormalization()
    ),
    "noise layers": lambda: pictures(
        layers.GaussianNoise(0.3), layers.Conv2D(4, 3), layers.SpatialDropout2D(0.4), layers.GaussianDropout(0.2)
    ),
    "Conv3D": spatial,
    "ties and blank pixels": ties,
    "repeated tokens": tokens,
    "native random numbers": lambda: (
        stack((5,), layers.Dense(6), NativeNoise(), layers.Dense(1)), normal(8, 5), normal(8, 1),
    ),
    "nested function": lambda: (
        stack((5,), layers.Dense(6), Compiled(), layers.Dense(1)), normal(8, 5), normal(8, 1),
    ),
    "half precision with loss scale": half,
}  # fmt: skip
if BACKEND == "jax":  # it draws nothing without a key
    del MODELS["native random numbers"]


@pytest.mark.parametrize("name", MODELS)
def test_a_correct_model_raises_no_alarm(name: str) -> None:
    """Every tensor is certified (or zero, or on a kink where ties are), and the model is as before, bit for bit."""
    model, x, y = MODELS[name]()
    before = [array(v) for v in model.variables]
    report = check_gradients(model, x, y)
    allowed = {"ok", "zero", "kink"} if name == "ties and blank pixels" else {"ok", "zero"}
    assert set(report.frame.check) <= allowed, str(report)
    assert report.ok
    assert report.frame[report.frame.check == "ok"].check_error.max() <= 1e-6
    for old, new in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(old, array(new))


def test_the_loss_scale_is_part_of_the_rounding_and_not_of_the_gradient() -> None:
    """A scaled float16 loss rounds the gradient by about 1e-3, and is not compared with an unscaled one."""
    model, x, y = half()
    assert float(model.optimizer.dynamic_scale) > 1.0
    report = check_gradients(model, x, y)
    assert 1e-6 < report.frame.rounding_error.max() < 0.05, str(report)


@only("tensorflow", "torch", reason="JAX draws nothing without a key")
def test_rounding_says_nothing_where_random_numbers_cannot_be_repeated() -> None:
    """The backend's own random numbers differ in float64: their rounding error is missing, not large."""
    model, x, y = MODELS["native random numbers"]()
    assert check_gradients(model, x, y).frame.rounding_error.isna().all()


def test_later_checks_are_cheaper_and_as_calm() -> None:
    """From the second check on a healthy model costs one loss, at any weights; the first costs two."""
    model, x, y = MODELS["Conv1D and pooling"]()
    checker, batch = Checker(model), arrays_of(Batch(x, y))
    generator = np.random.default_rng(1)
    spent = []
    for seed in range(30):
        weights = [generator.standard_normal(v.shape).astype("float32") * 0.4 for v in checker_weights(model)]
        result = checker.check(batch, seed=seed, weights=weights)
        assert {check.verdict for check in result.checks} == {"ok"}, result
        assert max(check.error for check in result.checks) <= 1e-6
        spent.append(result.evaluations)
    assert spent[0] == 2
    assert np.median(spent[1:]) == 1


@pytest.mark.parametrize(("policy", "measured"), [("float32", [True, False] * 2), ("mixed_bfloat16", [True] * 4)])
def test_rounding_far_below_its_limit_is_measured_every_second_time(policy: str, measured: list[bool]) -> None:
    """Float32 rounds a healthy model by 1e-7, so half of the later checks leave it out; bfloat16 is watched always."""
    hidden = layers.Dense(6, activation="tanh", dtype=policy)
    model = stack((5,), hidden, layers.Dense(1, dtype="float32"))
    checker, batch = Checker(model), arrays_of(Batch(normal(8, 5), normal(8, 1)))
    results = [checker.check(batch, seed=seed) for seed in range(4)]
    assert [bool(np.isfinite(result.checks[0].rounding_error)) for result in results] == measured


def checker_weights(model: keras.Model) -> list[Any]:
    return [variable for layer in model.layers for variable in layer.trainable_variables]


def test_class_weights_and_penalties_are_part_of_the_loss() -> None:
    """Sample weights, regularisers of weights and of activities, and a constraint: all right."""
    hidden = layers.Dense(
        6,
        activation="tanh",
        kernel_regularizer=keras.regularizers.L1L2(0.1, 0.1),
        activity_regularizer="l2",
        bias_constraint="unit_norm",
    )
    model = stack((5,), hidden, layers.Dense(1), loss="log_cosh")
    report = check_gradients(model, normal(8, 5), normal(8, 1), np.linspace(0.1, 3.0, 8))
    assert report.verdict == "ok", str(report)
