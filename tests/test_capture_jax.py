"""Capture on JAX: what the optimizer was handed, whatever it looks like, and a state that stays where it is."""

import threading
from typing import Any

import numpy as np
import pytest

keras = pytest.importorskip("keras")
if keras.backend.backend() != "jax":
    pytest.skip("capture on the JAX backend", allow_module_level=True)
import jax  # noqa: E402
from jax import numpy as jnp  # noqa: E402
from per_backend import array, planted  # noqa: E402

from keras_gradwatch import GradWatch  # noqa: E402
from keras_gradwatch.backends.jax_reductions import gradient_reductions  # noqa: E402
from keras_gradwatch.capture import Capture, CapturedStep, Request  # noqa: E402
from keras_gradwatch.records import STATISTICS  # noqa: E402
from keras_gradwatch.stats import reductions_of, statistics_of  # noqa: E402

layers, optimizers = keras.layers, keras.optimizers
NORM, RMS, ABSMAX, ZEROS, NONFINITE, WEIGHT, RATIO = range(len(STATISTICS))

generator = np.random.default_rng(0)
X = generator.normal(size=(20, 5)).astype("float32")
Y = generator.normal(size=(20, 3)).astype("float32")


class Recorder(keras.callbacks.Callback):
    """Follows every step; as a callback it attaches in ``on_train_begin`` as GradWatch does."""

    def __init__(self) -> None:
        super().__init__()
        self.captured: list[CapturedStep] = []
        self.weights: list[list[np.ndarray]] = []

    def wants(self, step: int) -> Request:
        return Request(track=True, batch=True)

    def before_step(self, step: int, batch: Any) -> None:
        self.weights.append([array(weight) for weight in self._model.trainable_variables])

    def after_step(self, step: int, captured: CapturedStep | None) -> None:
        assert captured is not None
        self.captured.append(captured)

    def on_train_begin(self, logs: Any = None) -> None:
        self.capture = Capture.attach(self.model, self)

    def on_train_end(self, logs: Any = None) -> None:
        self.capture.detach()


def dense_model(optimizer: Any = None, *middle: Any, **settings: Any) -> Any:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((5,)), layers.Dense(4, activation="tanh"), *middle, layers.Dense(3)])
    model.compile(optimizer or optimizers.SGD(0.1), "mse", **settings)
    return model


def fit(model: Any, *callbacks: Any, x: Any = X, y: Any = Y, **settings: Any) -> Any:
    own = {"batch_size": 8, "epochs": 1, "shuffle": False, "verbose": 0} | settings
    return model.fit(x, y, **own, callbacks=[*callbacks])


@pytest.mark.parametrize("settings", [{}, {"jit_compile": False}, {"steps_per_execution": 2}], ids=str)
def test_all_statistics_agree_with_numpy(settings: dict[str, Any]) -> None:
    """Every column agrees with plain NumPy; batch and weights come along, and listeners see the weights of now."""
    model, recorder = dense_model(**settings), Recorder()
    fit(model, recorder)
    assert len(recorder.captured) == 3
    for k, captured in enumerate(recorder.captured):
        x, y = map(array, captured.batch)
        np.testing.assert_array_equal(x, X[8 * k : 8 * k + 8])
        assert captured.previous_weights is not None
        w1, b1, w2, b2 = (array(weight).astype(np.float64) for weight in captured.previous_weights)
        for seen, weight in zip(recorder.weights[k], (w1, b1, w2, b2), strict=True):
            np.testing.assert_array_equal(seen, weight)
        hidden = np.tanh(x @ w1 + b1)
        error = (hidden @ w2 + b2 - y) * 2 / np.size(y)
        inner = (error @ w2.T) * (1 - hidden**2)
        gradients = [x.T @ inner, inner.sum(0), hidden.T @ error, error.sum(0)]
        for row, gradient, weight in zip(captured.statistics, gradients, (w1, b1, w2, b2), strict=True):
            np.testing.assert_allclose(row, statistics_of(gradient, weight, -0.1 * gradient), rtol=1e-4)
        assert captured.loss == pytest.approx(float(np.mean((hidden @ w2 + b2 - y) ** 2)), rel=1e-6)


ORDINARY = [[3.0, 0.0, 4.0, 0.0], [0.0, 0.0], [1e-7, -2e-6], [1.0]]
EXTREME = [[1e-30, 2e-30], [1e30, 0.0, 1e30], [6e4, 6e4], [np.nan, 0.0], [np.inf, -np.inf, 0.0], [np.nan, np.inf, 1e30]]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("values", ORDINARY + EXTREME, ids=str)
def test_any_values(values: list[float], dtype: str) -> None:
    """Zeros, tiny and huge values, NaN and Inf are reduced to the numbers that NumPy finds, in every dtype."""
    gradient = jnp.asarray(values).astype(dtype)
    numbers = np.asarray(jax.jit(gradient_reductions)([gradient]), np.float64)[:, 0]
    expected = reductions_of(np.asarray(gradient, np.float64), np.zeros(len(values)), np.zeros(len(values)))[:4]
    found = np.array([numbers[0] ** 2 * numbers[1], *numbers[2:]])
    expected[1] = found[1] if np.isnan(expected[0]) else expected[1]  # a largest element among NaN is up to the device
    np.testing.assert_allclose(found, expected, rtol=1e-6)


class Spare(layers.Layer):
    """One weight that no loss reaches, one that is multiplied by zero, and one whose backward pass gives zero."""

    def build(self, shape: Any) -> None:
        self.unused, self.nothing, self.dropped = (
            self.add_weight(name=name, shape=(4,), initializer="ones") for name in ("unused", "nothing", "dropped")
        )

    def call(self, x: Any) -> Any:
        scaled = planted(lambda x, w: x * w, lambda upstream, x, w: (upstream * w, jnp.zeros_like(w)))
        return scaled(x, self.dropped.value) + 0.0 * self.nothing * x


@pytest.mark.parametrize("accumulate", [None, 2])
def test_none_is_told_from_zero(accumulate: int | None) -> None:
    """Only the weight that the loss does not reach has no gradient; the others have one, and it is zero."""
    recorder = Recorder()
    fit(dense_model(optimizers.Adam(0.01, gradient_accumulation_steps=accumulate), Spare(name="spare")), recorder)
    for captured in recorder.captured:
        found = {
            v.name: (known, row[NORM])
            for v, known, row in zip(captured.variables, captured.connected, captured.statistics, strict=True)
        }
        assert found["nothing"] == (True, 0.0)
        assert found["dropped"] == (True, 0.0)
        assert not found["unused"][0]
        assert np.isnan(found["unused"][1])


def test_the_loss_scale_is_divided_out() -> None:
    """Under loss scaling the norms are those of the gradient itself, and a skipped step moves no weight."""
    plain, scaled, overflowing = Recorder(), Recorder(), Recorder()
    fit(dense_model(), plain)
    fit(dense_model(optimizers.LossScaleOptimizer(optimizers.SGD(0.1), initial_scale=2.0**10)), scaled)
    for mine, other in zip(scaled.captured, plain.captured, strict=True):
        np.testing.assert_allclose(mine.statistics, other.statistics, rtol=1e-5)
    model = dense_model(optimizers.LossScaleOptimizer(optimizers.SGD(0.1), initial_scale=float(np.finfo("f4").max)))
    fit(model, overflowing, x=100 * X)
    first = overflowing.captured[0].statistics
    assert first[:, NONFINITE].sum() > 0
    np.testing.assert_array_equal(first[:, RATIO], 0.0)


class Asking(keras.callbacks.Callback):
    """Asks for the model in the middle of an epoch, as a callback that saves it does, and notes its thread."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: list[float] = []
        self.threads: set[int] = set()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.threads.add(threading.get_ident())
        self.sums.append(float(np.sum([array(weight).sum() for weight in self.model.trainable_variables])))


def test_callbacks_that_ask_for_the_model_see_the_same() -> None:
    """Keras' own synchronisation gives other callbacks the weights of an unwatched run."""
    plain, watched = Asking(), Asking()
    fit(dense_model(), plain, epochs=2)
    fit(dense_model(), GradWatch(check_freq=2, verbose=0), watched, epochs=2)
    assert watched.sums == plain.sums


def test_the_state_is_left_where_it_is() -> None:
    """Watching never has Keras put the state into the model, and does not stop it from running callbacks beside."""
    model, watch = dense_model(), GradWatch(verbose=0)
    synced: list[bool] = []
    own = type(model).jax_state_sync

    def counted(self: Any) -> None:
        synced.append(bool(getattr(self, "_jax_state", None)) and not self._jax_state_synced)
        own(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "jax_state_sync", counted)
        fit(model, watch)
    assert sum(synced) == 1  # at the end of the epoch, by Keras itself
    assert keras.callbacks.CallbackList([watch])._async_train


def test_what_a_listener_assigns_counts() -> None:
    """A weight that a listener sets to zero after a step is zero in the next one."""

    class Zeroing(Recorder):
        def after_step(self, step: int, captured: CapturedStep | None) -> None:
            self._model.trainable_variables[0].assign(np.zeros((5, 4)))

    model, recorder = dense_model(), Zeroing()
    fit(model, recorder)
    assert not np.any(recorder.weights[1][0])
    assert np.any(recorder.weights[1][2])
    assert not np.any(array(model.trainable_variables[0]))


def test_a_failure_of_ours_is_told_and_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """When gradients cannot be read, the model trains as unwatched; steps have no rows, and a warning says so."""

    def fail(gradients: Any) -> Any:
        raise ValueError("on purpose")

    monkeypatch.setattr("keras_gradwatch.backends.jax_step.gradient_reductions", fail)
    plain, watched, recorder = dense_model(), dense_model(), Recorder()
    with pytest.warns(RuntimeWarning, match="could not read the gradients .*ValueError: on purpose.* Training goes on"):
        fit(watched, recorder)
    fit(plain)
    for mine, other in zip(watched.variables, plain.variables, strict=True):
        np.testing.assert_array_equal(array(mine), array(other))
    assert [captured.variables for captured in recorder.captured] == [()] * 3
