"""NaN and Inf: first step, layer and direction that made them, and samples, however the step is compiled."""

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from keras_gradwatch import GradWatch


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


X, Y = floats(40, 4), floats(40, 1, seed=1)


@pytest.fixture(autouse=True)
def _clean_start() -> None:
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(5)


class Root(layers.Layer):
    """√|x|: the slope at 0 is infinite, and NaN comes back."""

    def call(self, x: Any) -> Any:
        return keras.ops.sqrt(keras.ops.abs(x))


class Logarithm(layers.Layer):
    """log(x + 100) of what is usually far above −100."""

    def call(self, x: Any) -> Any:
        return keras.ops.log(x + 100.0)


def network(middle: layers.Layer, *, policy: str = "float32", **settings: Any) -> keras.Model:
    dtype = keras.DTypePolicy(policy)
    inputs = keras.Input((4,))
    flow = layers.Dense(3, use_bias=False, dtype=dtype, name="before")(inputs)
    model = keras.Model(inputs, layers.Dense(1, dtype="float32", name="after")(middle(flow)))
    optimizer: Any = keras.optimizers.SGD(0.01)
    if policy == "mixed_float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=16.0)
    model.compile(optimizer, "mse", **settings)
    return model


def fit(model: keras.Model, watch: GradWatch, *, x: np.ndarray, y: np.ndarray = Y) -> None:
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[watch])


WAYS = {
    "graph": {"jit_compile": False},
    "xla": {"jit_compile": True},
    "float16": {"jit_compile": False, "policy": "mixed_float16"},
}
in_each_way = pytest.mark.parametrize("way", list(WAYS))


@in_each_way
def test_a_forward_fault_is_named_with_its_sample(way: str) -> None:
    """The logarithm of a negative number in row 5 of the third batch."""
    data = X.copy()
    data[21] = [3e4, 0, 0, 0]
    model = network(Logarithm(name="log", dtype=WAYS[way].get("policy", "float32")), **WAYS[way])
    model.get_layer("before").set_weights([np.full((4, 3), -0.5, "float32")])
    watch = GradWatch(check_freq=None, verbose=0)
    fit(model, watch, x=data)
    finding = watch._run.findings[0]
    assert (finding.finding, finding.layer, finding.first_step) == ("nonfinite", "log", 3)
    assert finding.samples == (5,)
    assert "log (Logarithm): its output holds NaN or Inf" in finding.message
    assert "it comes from row 5 of the batch" in finding.message


@pytest.mark.parametrize("way", ["graph", "xla"])
def test_a_backward_fault_is_named_with_its_samples(way: str) -> None:
    """The root at zero in rows 1 and 6: the loss is finite, its gradient is not."""
    data = X.copy()
    data[[17, 22]] = 0.0
    watch = GradWatch(check_freq=None, verbose=0)
    fit(network(Root(name="root"), **WAYS[way]), watch, x=data)
    finding = watch._run.findings[0]
    assert (finding.finding, finding.layer, finding.first_step, finding.samples) == ("nonfinite", "root", 3, (1, 6))
    assert "its backward gives NaN or Inf" in finding.message
    assert "though the loss is still finite" in finding.message
    assert "it comes from rows 1, 6 of the batch" in finding.message


@in_each_way
def test_a_bad_label_is_named(way: str) -> None:
    """NaN among the targets is the fault of the labels, by row."""
    targets = Y.copy()
    targets[12] = np.nan
    watch = GradWatch(check_freq=None, verbose=0)
    fit(network(layers.Identity(dtype=WAYS[way].get("policy")), **WAYS[way]), watch, x=X, y=targets)
    finding = watch._run.findings[0]
    assert (finding.layer, finding.first_step, finding.samples) == ("labels", 2, (4,))
    assert "row 4 of the batch" in finding.message


def test_a_nan_weight_with_a_finite_loss_is_seen() -> None:
    """A weight that does not reach the loss any more goes NaN: the loss stays finite, the finding names the weight."""
    model = network(layers.Identity())

    class Breaking(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 1:
                self.model.get_layer("unused").kernel.assign(np.full((4, 2), np.nan))

    inputs = keras.Input((4,))
    unused = layers.Dense(2, name="unused")(inputs)
    outputs = layers.Dense(1, name="used")(layers.Concatenate()([inputs, keras.ops.where(False, unused, 0.0)]))
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    watch = GradWatch(check_freq=None, verbose=0)
    model.fit(X, Y, batch_size=8, verbose=0, callbacks=[watch, Breaking()])
    (finding,) = (f for f in watch._run.findings if f.finding == "nonfinite")
    assert finding.first_step == 3
    assert "unused/kernel" in finding.message
    assert np.isfinite(watch.history["loss"]).all()


def test_a_healthy_run_names_nothing() -> None:
    """No NaN, no finding."""
    watch = GradWatch(check_freq=None, verbose=0)
    fit(network(Root(name="root")), watch, x=X)
    assert watch.findings.empty


def test_the_sample_behind_an_explosion_is_named() -> None:
    """One target that is a million times too large: gradients explode, and the finding names its row."""
    targets = Y.copy()
    targets[9] = 1e7
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(1, name="only")(inputs))
    model.compile(keras.optimizers.SGD(1e-3), "mse")
    watch = GradWatch(check_freq=None, verbose=0)
    model.fit(X, targets, batch_size=40, epochs=30, verbose=0, shuffle=False, callbacks=[watch])
    (finding,) = (f for f in watch._run.findings if f.finding == "exploding")
    assert finding.samples == (9,)
    assert "row 9 of the batch makes 100% of the gradient" in finding.message
