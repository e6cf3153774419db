"""Watching leaves no trace: the same training with and without the callback gives the same model, bit for bit.

A tracked step runs an instrumented copy of the user's step, compiled on its own. On a CPU both copies give the same
bits, so every run here is compared exactly, except where a case says otherwise and why.
"""

import io
import json
import random
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pandas as pd
import pytest
from keras import layers, ops
from per_backend import BACKEND

from keras_gradwatch import GradWatch

LOGS = ("grad_norm", "grad_check_error", "grad_findings")


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


X, Y = floats(24, 4), floats(24, 1, seed=1)
LABELS = np.random.default_rng(2).integers(0, 3, 24)
TOKENS = np.random.default_rng(3).integers(0, 9, (24, 5))
WEIGHTS = np.random.default_rng(4).uniform(0.5, 2.0, 24).astype("float32")


# Every builder takes the optimizer: each case runs with Adam, which has a state to spoil, and once more with SGD, whose
# step shows the gradient.
Build = Callable[[keras.optimizers.Optimizer], keras.Model]
Trained = tuple[keras.Model, dict[str, list[float]]]
Fit = Callable[[keras.Model, list[keras.callbacks.Callback]], dict[str, list[float]]]


def sequential(*middle: keras.layers.Layer, **dtype: str) -> keras.Sequential:
    first, last = layers.Dense(6, activation="tanh", name="first", **dtype), layers.Dense(1, name="last", **dtype)
    return keras.Sequential([keras.Input((4,)), first, *middle, last], name="model")


def plain(optimizer: keras.optimizers.Optimizer, **settings: Any) -> keras.Model:
    model = sequential()
    model.compile(optimizer, "mse", metrics=["mae"], **settings)
    return model


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__(name="subclassed")
        self.first, self.last = layers.Dense(6, activation="tanh"), layers.Dense(1)
        self.drop = layers.Dropout(0.3)

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.last(self.drop(self.first(inputs), training=training))


def subclassed(optimizer: keras.optimizers.Optimizer) -> keras.Model:
    model = Subclassed()
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def two_by_two(optimizer: keras.optimizers.Optimizer) -> keras.Model:
    left, right = keras.Input((4,), name="left"), keras.Input((5,), dtype="int32", name="right")
    both = layers.Concatenate()([left, layers.Flatten()(layers.Embedding(9, 2)(right))])
    outputs = {"value": layers.Dense(1, name="value")(both), "kind": layers.Dense(3, "softmax", name="kind")(both)}
    model = keras.Model({"left": left, "right": right}, outputs, name="model")
    model.compile(
        optimizer, {"value": "mse", "kind": "sparse_categorical_crossentropy"},
        loss_weights={"value": 0.5, "kind": 2.0}, metrics={"value": ["mae"], "kind": ["accuracy"]},
    )  # fmt: skip
    return model


def classifier(optimizer: keras.optimizers.Optimizer) -> keras.Model:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3, "softmax", name="kinds")], name="model")
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"], weighted_metrics=["accuracy"])
    return model


def mixed_float16(optimizer: keras.optimizers.Optimizer) -> keras.Model:
    model = sequential(dtype="mixed_float16")
    model.compile(keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**10), "mse")
    return model


def embedding(optimizer: keras.optimizers.Optimizer) -> keras.Model:
    model = keras.Sequential(
        [keras.Input((5,), dtype="int32"), layers.Embedding(9, 3), layers.GlobalAveragePooling1D(), layers.Dense(1)],
        name="model",
    )
    model.compile(optimizer, "mse")
    return model


def masked_lstm(optimizer: keras.optimizers.Optimizer) -> keras.Model:
    model = keras.Sequential(
        [keras.Input((5,), dtype="int32"), layers.Embedding(9, 3, mask_zero=True), layers.LSTM(4), layers.Dense(1)],
        name="model",
    )
    model.compile(optimizer, "mse")
    return model


def normalized(optimizer: keras.optimizers.Optimizer) -> keras.Model:
    model = sequential(layers.BatchNormalization(name="norm"), layers.Dropout(0.4, name="drop"))
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def regularized(optimizer: keras.optimizers.Optimizer) -> keras.Model:
    model = sequential(
        layers.Dense(5, kernel_regularizer="l2", name="middle"), layers.ActivityRegularization(l2=0.1, name="activity")
    )
    model.compile(optimizer, "mse")
    return model


class Adversarial(keras.Model):
    """Two networks, two optimizers, one step: the generator's loss is the discriminator's."""

    def __init__(self) -> None:
        super().__init__(name="adversarial")
        self.generator = keras.Sequential([keras.Input((3,)), layers.Dense(4, name="made")], name="generator")
        self.discriminator = keras.Sequential([keras.Input((4,)), layers.Dense(1, name="judged")], name="discriminator")
        self.built = True

    def compile(self, optimizers: list[keras.optimizers.Optimizer]) -> None:  # type: ignore[override]
        super().compile()
        self.generator_optimizer, self.discriminator_optimizer = optimizers
        self.distance = keras.losses.BinaryCrossentropy(from_logits=True)

    def call(self, inputs: Any) -> Any:
        return self.discriminator(inputs)

    def train_step(self, data: Any) -> dict[str, Any]:
        import tensorflow as tf

        real = data[0] if isinstance(data, tuple) else data
        noise = tf.ones((tf.shape(real)[0], 3)) * real[:, :3]
        with tf.GradientTape(persistent=True) as tape:
            verdicts, made = self.discriminator(real), self.discriminator(self.generator(noise))
            judged = self.distance(tf.ones_like(verdicts), verdicts) + self.distance(tf.zeros_like(made), made)
            fooled = self.distance(tf.ones_like(made), made)
        for optimizer, loss, network in (
            (self.discriminator_optimizer, judged, self.discriminator),
            (self.generator_optimizer, fooled, self.generator),
        ):
            weights = network.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"judged": judged, "fooled": fooled}


class Absolute(keras.Model):
    """A training step of its own, in the manner of JAX: state in, state out."""

    def __init__(self) -> None:
        super().__init__(name="absolute")
        self.first, self.last = layers.Dense(6, activation="tanh"), layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        return self.last(self.first(inputs))

    def train_step(self, state: Any, data: Any) -> Any:
        import jax

        weights, others, slots, metrics = state
        x, y = data[:2]

        def loss(weights: Any) -> Any:
            predictions, after = self.stateless_call(weights, others, x)
            return ops.mean(ops.abs(predictions - y)), after

        (value, others), gradients = jax.value_and_grad(loss, has_aux=True)(weights)
        weights, slots = self.optimizer.stateless_apply(slots, gradients, weights)
        return {"loss": value}, (weights, others, slots, metrics)


def absolute(optimizer: keras.optimizers.Optimizer) -> keras.Model:
    model = Absolute()
    model.compile(optimizer, "mse")
    return model


def dataset() -> Any:
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(24).batch(7)


def adversarial(optimizer: keras.optimizers.Optimizer) -> keras.Model:
    model = Adversarial()
    model.compile([optimizer, optimizer.__class__.from_config(optimizer.get_config())])
    return model


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rows = slice(8 * index, 8 * index + 8)
        return X[rows], Y[rows]


def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for step in range(6):
        yield Batches()[step % 3]


def fit(x: Any, y: Any = None, **settings: Any) -> Fit:
    """How a case trains: two epochs of three steps of 8 samples, shuffled where Keras shuffles."""

    def run(model: keras.Model, callbacks: list[keras.callbacks.Callback]) -> dict[str, list[float]]:
        data = {"x": x()} if callable(x) else {"x": x, "y": y, "batch_size": 8, "shuffle": True}
        own = {"epochs": 2, "verbose": 0, "callbacks": callbacks} | data | settings
        history: dict[str, list[float]] = model.fit(**own).history
        return history

    return run


def two_fits(model: keras.Model, callbacks: list[keras.callbacks.Callback]) -> dict[str, list[float]]:
    fit(X, Y)(model, callbacks)
    return fit(X, Y, initial_epoch=1)(model, callbacks)


def recompiled(model: keras.Model, callbacks: list[keras.callbacks.Callback]) -> dict[str, list[float]]:
    fit(X, Y)(model, callbacks)
    model.compile(model.optimizer.__class__.from_config(model.optimizer.get_config()), "mae")
    return fit(X, Y)(model, callbacks)


@dataclass(frozen=True)
class Case:
    """One kind of training run.

    ``optimizer`` holds settings of the optimizer. ``shows_gradient`` is False where (before − after)/lr is not the
    gradient. ``tolerance`` is what two compiled copies of the same step may differ by.
    """

    build: Build
    fit: Fit
    optimizer: dict[str, Any]
    shows_gradient: bool = True
    tolerance: float = 0.0


def case(
    build: Build = plain, train: Fit | None = None, *, shows: bool = True, tolerance: float = 0.0, **optimizer: Any
) -> Case:
    return Case(build, train or fit(X, Y, validation_data=(X[:8], Y[:8])), optimizer, shows, tolerance)


TWO_BY_TWO = ({"left": X, "right": TOKENS}, {"value": Y, "kind": LABELS})
CASES = {
    "plain": case(),
    "subclassed": case(subclassed),
    "two_inputs_two_outputs": case(two_by_two, fit(*TWO_BY_TWO)),
    "sample_weight": case(classifier, fit(X, LABELS, sample_weight=WEIGHTS)),
    "class_weight": case(classifier, fit(X, LABELS, class_weight={0: 1.0, 1: 3.0, 2: 0.5})),
    "tf_data": case(plain, fit(dataset, shuffle=False)),
    "pydataset": case(plain, fit(Batches)),
    "generator": case(plain, fit(batches, steps_per_epoch=3, shuffle=False)),
    # Seven batches in blocks of three: the last block is short. Weights are seen only between blocks.
    "steps_per_execution": case(
        lambda optimizer: plain(optimizer, steps_per_execution=3), fit(X, Y, batch_size=4), shows=False
    ),
    # XLA fuses the copy, which has more results, in its own way: the same bits here, but nothing promises them.
    "jit_compile": case(lambda optimizer: plain(optimizer, jit_compile=True), tolerance=1e-6),
    "run_eagerly": case(lambda optimizer: plain(optimizer, run_eagerly=True)),
    "mixed_float16": case(mixed_float16),
    "clipnorm": case(shows=False, clipnorm=0.01),  # the gradient is the one before clipping
    "gradient_accumulation": case(shows=False, gradient_accumulation_steps=2),  # the weights move every second step
    "ema": case(use_ema=True, ema_momentum=0.9),
    "embedding": case(embedding, fit(TOKENS, Y)),
    "masked_lstm": case(masked_lstm, fit(TOKENS, Y)),
    "batchnorm_and_dropout": case(normalized),
    "regularizers": case(regularized),
    "two_optimizers": case(adversarial, fit(X)),
    "two_fits": case(plain, two_fits),
    "recompile_between_fits": case(plain, recompiled),
    "own_train_step": case(absolute),
}
#: Cases that need an engine, or a training step written for one.
ONLY = {
    "tf_data": ("tensorflow",), "two_optimizers": ("tensorflow",), "own_train_step": ("jax",),
    "steps_per_execution": ("tensorflow", "jax"),
}  # fmt: skip
CASES = {name: kind for name, kind in CASES.items() if BACKEND in ONLY.get(name, (BACKEND,))}


def train(
    name: str, kind: type[keras.optimizers.Optimizer], rate: float, *callbacks: keras.callbacks.Callback
) -> Trained:
    """One training run from a clean start; names, seeds and data are the same each time."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(5)
    one = CASES[name]
    model = one.build(kind(rate, **one.optimizer))
    return model, one.fit(model, list(callbacks))


def state_of(model: keras.Model) -> dict[str, np.ndarray]:
    """Everything that training moves: weights, averages, seeds, metrics, every optimizer's variables."""
    optimizers = [value for value in vars(model).values() if isinstance(value, keras.optimizers.Optimizer)]
    variables = [*model.variables, *model.metrics_variables, *(v for one in optimizers for v in one.variables)]
    return {f"{i} {variable.path}": np.asarray(variable) for i, variable in enumerate(variables)}


def saved_by(model: keras.Model, path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Configuration and arrays in the ``.keras`` file; object ids, which are addresses, and the date are masked."""
    model.save(path)
    with zipfile.ZipFile(path) as archive:
        settings = {name: _masked(json.loads(archive.read(name))) for name in archive.namelist() if "json" in name}
        return settings, _arrays(archive.read("model.weights.h5"))


def _masked(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _masked(v) for k, v in value.items() if k not in ("shared_object_id", "date_saved")}
    return [_masked(v) for v in value] if isinstance(value, list) else value


def _arrays(data: bytes) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    with h5py.File(io.BytesIO(data)) as file:
        file.visititems(lambda name, item: found.update({name: item[()]}) if isinstance(item, h5py.Dataset) else None)
    return found


def same(values: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert list(values) == list(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(values[name], value, rtol=tolerance, atol=tolerance, err_msg=name)


def draws() -> tuple[Any, ...]:
    """The next number of every global random stream."""
    legacy = np.random.random()  # noqa: NPY002  the global stream is what the callback must leave alone
    return random.random(), legacy, float(keras.random.uniform(())), *native_draws()


def native_draws() -> tuple[float, ...]:
    """The same of the backend's own stream; JAX has none."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return (float(tf.random.uniform(())),)
    if BACKEND == "torch":
        import torch

        return (float(torch.rand(())),)
    return ()


@pytest.mark.parametrize("name", CASES)
def test_training_is_the_same_with_and_without_the_callback(name: str, tmp_path: Path) -> None:
    """Weights, optimizer, averages, seeds, metrics, history, global random streams and saved file are the same."""
    unwatched, history = train(name, keras.optimizers.Adam, 0.01)
    streams = draws()
    model, watched_history = train(name, keras.optimizers.Adam, 0.01, GradWatch(verbose=0))
    assert draws() == streams

    tolerance = CASES[name].tolerance
    assert set(watched_history) == set(history) | set(LOGS)
    same({key: watched_history[key] for key in history}, history, tolerance)
    same(state_of(model), state_of(unwatched), tolerance)
    assert list(vars(model)) == list(vars(unwatched))
    assert list(vars(model.optimizer)) == list(vars(unwatched.optimizer))
    settings, arrays = saved_by(model, tmp_path / "watched.keras")
    unwatched_settings, unwatched_arrays = saved_by(unwatched, tmp_path / "unwatched.keras")
    assert settings == unwatched_settings
    same(arrays, unwatched_arrays, tolerance)


class Snapshots(keras.callbacks.Callback):
    """Weights in front of every step, and after the last one."""

    def on_train_begin(self, logs: Any = None) -> None:
        self.weights: list[dict[str, np.ndarray]] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.keep()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.keep()

    def keep(self) -> None:
        self.weights.append({v.path: np.asarray(v, dtype=np.float64) for v in self.model.trainable_variables})


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].shows_gradient])
def test_gradient_norms_are_those_of_the_weight_changes(name: str) -> None:
    """The norms in the history are ‖before − after‖ / learning rate of every SGD step, weight by weight."""
    watch, snapshots, rate = GradWatch(check_freq=None, verbose=0), Snapshots(), 0.5
    train(name, keras.optimizers.SGD, rate, watch, snapshots)
    history = watch.history
    assert set(history.step) == set(range(history.step.min(), history.step.min() + len(snapshots.weights) // 2))
    for _, row in history.iterrows():
        place = 2 * (row.step - history.step.min())
        before, after = snapshots.weights[place].get(row.tensor), snapshots.weights[place + 1][row.tensor]
        if before is None:  # the model was built inside its first step
            continue
        # 1e-5 is the promise; a float32 weight itself is known to half a unit, 6e-8 of its size, before and after.
        rounding = 1.2e-7 * np.linalg.norm(before) / rate
        expected = np.linalg.norm(before - after) / rate
        assert row.grad_norm == pytest.approx(expected, rel=1e-5, abs=rounding), (row.step, row.tensor)
        assert row.weight_norm == pytest.approx(np.linalg.norm(before), rel=1e-6)


def test_every_step_of_a_block_has_its_norms() -> None:
    """With steps_per_execution the history is that of the same run step by step."""
    frames = []
    for steps in (1, 3):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(5)
        watch = GradWatch(check_freq=2, verbose=0)
        fit(X, Y, batch_size=4)(plain(keras.optimizers.SGD(0.5), steps_per_execution=steps), [watch])
        frames.append(watch.history.drop(columns="rounding_error"))
    pd.testing.assert_frame_equal(*frames)
