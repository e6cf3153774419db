"""Capture on TensorFlow: the gradients are the true ones, and training does not notice that it is watched."""

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

keras = pytest.importorskip("keras")
if keras.backend.backend() != "tensorflow":
    pytest.skip("capture on the TensorFlow backend", allow_module_level=True)
import tensorflow as tf  # noqa: E402

from keras_gradwatch.capture import Capture, CapturedStep, Request  # noqa: E402
from keras_gradwatch.records import STATISTICS  # noqa: E402
from keras_gradwatch.stats import statistics_of  # noqa: E402

layers, optimizers = keras.layers, keras.optimizers
with contextlib.suppress(RuntimeError):  # TensorFlow is running already: the test on two replicas is skipped
    processor = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(processor, [tf.config.LogicalDeviceConfiguration()] * 2)
NORM, RMS, ABSMAX, ZEROS, NONFINITE, WEIGHT, RATIO = range(len(STATISTICS))

generator = np.random.default_rng(0)
X = generator.normal(size=(20, 5)).astype("float32")
Y = generator.normal(size=(20, 3)).astype("float32")
BATCHES_IN_TWO_EPOCHS = 6  # 20 samples in batches of 8: the last one is short


class Recorder(keras.callbacks.Callback):
    """Follows every step; as a callback it attaches in ``on_train_begin`` as GradWatch does."""

    def __init__(self, track: Callable[[int], bool] = lambda step: True, batch: bool = False) -> None:
        super().__init__()
        self.track, self.with_batch = track, batch
        self.steps: list[int] = []
        self.captured: list[CapturedStep] = []
        self.batches: list[Any] = []
        self.before: list[list[np.ndarray]] = []

    def wants(self, step: int) -> Request:
        return Request(track=self.track(step), batch=self.with_batch)

    def before_step(self, step: int, batch: Any) -> None:
        self.batches.append(batch)
        self.before.append(self.model.get_weights())

    def after_step(self, step: int, captured: CapturedStep | None) -> None:
        self.steps.append(step)
        if captured is not None:
            self.captured.append(captured)

    def on_train_begin(self, logs: Any = None) -> None:
        self.capture = Capture.attach(self.model, self)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.capture.begin_batch()

    def on_train_end(self, logs: Any = None) -> None:
        self.capture.detach()

    def column(self, statistic: int) -> np.ndarray:
        return np.array([captured.statistics[:, statistic] for captured in self.captured])


def dense_model(**compile_arguments: Any) -> Any:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((5,)), layers.Dense(4, activation="tanh"), layers.Dense(3)])
    return compiled(model, **compile_arguments)


def compiled(model: Any, optimizer: Any = None, loss: Any = "mse", **arguments: Any) -> Any:
    model.compile(optimizer or optimizers.SGD(0.1), loss, **arguments)
    return model


def fit(model: Any, *callbacks: Any, x: Any = X, y: Any = Y, **arguments: Any) -> Any:
    return model.fit(
        x, y, **{"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0} | arguments, callbacks=[*callbacks]
    )


def weights_of(model: Any) -> list[np.ndarray]:
    return [np.asarray(variable) for variable in [*model.variables, *model.optimizer.variables]]


def assert_same(model: Any, other: Any) -> None:
    for mine, theirs in zip(weights_of(model), weights_of(other), strict=True):
        np.testing.assert_array_equal(mine, theirs)


# -- models and inputs of the table in keras-hooks


class Disconnected(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = layers.Dense(3), layers.Dense(2)

    def call(self, inputs: Any) -> Any:
        self.unused(inputs)
        return self.used(inputs)


class Regularized(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.out = layers.Dense(4, kernel_regularizer="l2", kernel_constraint="max_norm"), layers.Dense(3)

    def call(self, inputs: Any) -> Any:
        hidden = self.dense(inputs)
        self.add_loss(0.1 * keras.ops.mean(hidden**2))
        return self.out(hidden)


class Adversarial(keras.Model):
    """Two optimizers and a train_step of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = layers.Dense(5), layers.Dense(1)
        self.parts = {"critic": optimizers.SGD(0.1)}
        self.generator_optimizer = optimizers.Adam(0.01)

    def call(self, inputs: Any) -> Any:
        return self.critic(self.generator(inputs))

    def train_step(self, data: Any) -> Any:
        x, _ = data
        with tf.GradientTape() as tape:
            critic_loss = keras.ops.mean(self(x)) - keras.ops.mean(self.critic(x))
        weights = self.critic.trainable_weights
        self.parts["critic"].apply_gradients(zip(tape.gradient(critic_loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            loss = -keras.ops.mean(self(x))
        weights = self.generator.trainable_weights
        self.generator_optimizer.apply(tape.gradient(loss, weights), weights)
        return {"critic": critic_loss, "generator": loss}


class WithoutOptimizer(keras.Model):
    """Descends by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(3)
        self.dense.build((None, 5))

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x))
        for weight, gradient in zip(self.trainable_weights, tape.gradient(loss, self.trainable_weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return {"loss": loss}


def seeded(build: Callable[[], Any]) -> Callable[[], Any]:
    def build_seeded() -> Any:
        keras.utils.set_random_seed(1)
        return build()

    return build_seeded


def normalized() -> Any:
    model = [keras.Input((5,)), layers.Dense(4), layers.BatchNormalization(), layers.Dropout(0.5), layers.Dense(3)]
    return compiled(keras.Sequential(model))


def half_precision(scale: float = 2.0**15) -> Any:
    hidden = layers.Dense(4, activation="tanh", dtype="mixed_float16")
    model = keras.Sequential([keras.Input((5,)), hidden, layers.Dense(3, dtype="mixed_float16")])
    return compiled(model, optimizers.LossScaleOptimizer(optimizers.SGD(0.1), initial_scale=scale))


def frozen_and_lora() -> Any:
    model = keras.Sequential([keras.Input((5,)), layers.Dense(4, trainable=False), layers.Dense(6), layers.Dense(3)])
    model.layers[1].enable_lora(2)
    return compiled(model)


def adversarial() -> Any:
    return compiled(Adversarial(), None, None)


SCENARIOS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: dense_model(),
    "adam": lambda: dense_model(optimizer="adam"),
    "jit": lambda: dense_model(optimizer="adam", jit_compile=True),
    "eager": lambda: dense_model(run_eagerly=True),
    "steps per execution": lambda: dense_model(steps_per_execution=2),
    "steps per execution, jit": lambda: dense_model(steps_per_execution=2, jit_compile=True),
    "mixed precision": half_precision,
    "loss scale factor": lambda: dense_model(optimizer=optimizers.SGD(0.1, loss_scale_factor=128.0)),
    "clipped": lambda: dense_model(optimizer=optimizers.SGD(0.1, global_clipnorm=0.1)),
    "accumulated": lambda: dense_model(optimizer=optimizers.SGD(0.1, gradient_accumulation_steps=2)),
    "averaged, decayed": lambda: dense_model(
        optimizer=optimizers.AdamW(0.01, use_ema=True, ema_overwrite_frequency=2, weight_decay=0.1)
    ),
    "regularised, constrained": lambda: compiled(Regularized()),
    "frozen, lora": frozen_and_lora,
    "two optimizers": adversarial,
    "no optimizer": lambda: compiled(WithoutOptimizer()),
    "dropout, batch norm": normalized,
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_training_does_not_notice(name: str) -> None:
    """Watched and unwatched runs end with the same model and optimizer state, bit for bit, whatever is asked for."""
    build = seeded(SCENARIOS[name])
    plain, watched = build(), build()
    mixed = Recorder(track=lambda step: step % 3 != 0)
    expected = fit(plain).history
    assert fit(watched, mixed, Recorder(track=lambda step: step == 2, batch=True)).history == expected
    assert_same(plain, watched)
    assert mixed.steps == list(range(1, BATCHES_IN_TWO_EPOCHS + 1))
    assert watched.__dict__.keys() == plain.__dict__.keys()
    assert watched.optimizer.__dict__.keys() == plain.optimizer.__dict__.keys()
    assert watched._loss_tracker is None or "update_state" not in watched._loss_tracker.__dict__


def embedded() -> Any:
    """Repeated ids, masked: the gradient of the embedding is sparse."""
    model = [keras.Input((6,), dtype="int32"), layers.Embedding(9, 4, mask_zero=True), layers.LSTM(4), layers.Dense(3)]
    return compiled(keras.Sequential(model))


def convolutional() -> Any:
    model = [keras.Input((5, 1)), layers.Conv1D(2, 3), layers.Flatten(), layers.Dense(3)]
    return compiled(keras.Sequential(model))


TRUE_GRADIENTS = {
    "sgd": (SCENARIOS["sgd"], X, 1e-5),
    "jit": (lambda: dense_model(jit_compile=True), X, 1e-5),
    "eager": (SCENARIOS["eager"], X, 1e-5),
    "steps per execution": (SCENARIOS["steps per execution"], X, 1e-5),
    "mixed precision": (half_precision, X, 1e-5),
    "loss scale factor": (SCENARIOS["loss scale factor"], X, 1e-5),
    "add_loss": (
        lambda: compiled(keras.Sequential([layers.Dense(4, activity_regularizer="l2"), layers.Dense(3)])),
        X,
        1e-5,
    ),
    "convolution": (convolutional, X[..., None], 1e-5),
    "frozen, lora": (frozen_and_lora, X, 1e-5),
    "dropout, batch norm": (normalized, X, 2e-5),
    "embedding": (embedded, generator.integers(0, 9, size=(20, 6)), 1e-4),  # rows that hardly move: the delta is rough
}


@pytest.mark.parametrize("name", TRUE_GRADIENTS)
def test_gradients_are_the_true_ones(name: str) -> None:
    """The captured norms are those of (weights before − weights after) / learning rate of an unwatched run of SGD."""
    build, x, tolerance = TRUE_GRADIENTS[name]
    plain, watched = seeded(build)(), seeded(build)()
    if not plain.built:
        plain.build(x.shape), watched.build(x.shape)
    recorder = Recorder()
    fit(watched, recorder, x=x, epochs=1)
    for step, captured in enumerate(recorder.captured):
        rows = slice(8 * step, 8 * step + 8)
        before = [np.asarray(v, np.float64) for v in plain.trainable_variables]
        plain.fit(x[rows], Y[rows], batch_size=8, shuffle=False, verbose=0)
        after = [np.asarray(v, np.float64) for v in plain.trainable_variables]
        deltas = [np.linalg.norm((old - new) / 0.1) for old, new in zip(before, after, strict=True)]
        # A bias in front of BatchNormalization has a true gradient of zero: what is left is rounding.
        np.testing.assert_allclose(captured.statistics[:, NORM], deltas, rtol=tolerance, atol=2e-6)
        assert [v.path for v in captured.variables] == [v.path for v in watched.trainable_variables]


def test_all_statistics_agree_with_numpy() -> None:
    """Every column agrees with plain NumPy, and the batch and the weights from before the step are handed over."""
    model, recorder = dense_model(), Recorder()
    model.layers[1].kernel.assign(np.eye(4, 3))
    fit(model, recorder, x=np.maximum(X, 0.0), epochs=1)
    for k, captured in enumerate(recorder.captured):
        x, y = map(np.asarray, captured.batch)
        np.testing.assert_array_equal(x, np.maximum(X, 0.0)[8 * k : 8 * k + 8])
        w1, b1, w2, b2 = (np.asarray(weight, np.float64) for weight in captured.previous_weights)
        hidden = np.tanh(x @ w1 + b1)
        error = (hidden @ w2 + b2 - y) * 2 / np.size(y)
        inner = (error @ w2.T) * (1 - hidden**2)
        gradients = [x.T @ inner, inner.sum(0), hidden.T @ error, error.sum(0)]
        for row, gradient, weight in zip(captured.statistics, gradients, (w1, b1, w2, b2), strict=True):
            np.testing.assert_allclose(row, statistics_of(gradient, weight, -0.1 * gradient), rtol=2e-5)
        assert captured.loss == pytest.approx(float(np.mean((hidden @ w2 + b2 - y) ** 2)), rel=1e-6)


# -- what a gradient can look like


Step = Callable[[Any, Any, Any], Any]


def one_step(
    step: Step, *weights: Any, dtype: str = "float32", optimizer: Any = None, **arguments: Any
) -> CapturedStep:
    """A step of a model with these weights: ``step(model, weights, data)`` hands gradients to the optimizer."""

    class Given(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.given = [
                self.add_weight(
                    shape=np.shape(w), initializer=keras.initializers.Constant(0), name=f"w{k}", dtype=dtype
                )
                for k, w in enumerate(weights)
            ]

        def call(self, inputs: Any) -> Any:
            return inputs

        def train_step(self, data: Any) -> Any:
            step(self, self.given, data)
            return {}

    model, recorder = Given(), Recorder()
    compiled(model, optimizer or optimizers.SGD(1.0), None, **arguments)
    for variable, value in zip(model.given, weights, strict=True):
        variable.assign(value)
    fit(model, recorder, x=X[:8], y=None, epochs=1)
    return recorder.captured[0]


ORDINARY = [[3.0, 0.0, 4.0, 0.0], [0.0, 0.0], [1e-7, -2e-6], [1.0]]
EXTREME = [
    [1e-30, 2e-30],
    [1e30, 0.0, 1e30],
    [6e4, 6e4],
    [np.nan, 0.0, 1.0],
    [np.inf, -np.inf, 0.0],
    [np.nan, np.inf, 1e30],
]


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("values", [ORDINARY, ORDINARY + EXTREME])
def test_any_values(values: list[list[float]], dtype: str, jit_compile: bool) -> None:
    """Zeros, tiny and huge values, NaN and Inf have the statistics that NumPy finds, in every dtype and under XLA."""
    with np.errstate(over="ignore"):
        gradients = [np.asarray(value).astype(dtype) for value in values]

    def step(model: Any, weights: Any, data: Any) -> None:
        model.optimizer.apply([tf.constant(gradient) for gradient in gradients], weights)

    captured = one_step(step, *(np.ones(len(value)) for value in values), dtype=dtype, jit_compile=jit_compile)
    expected = [statistics_of(gradient, np.ones_like(gradient), -gradient) for gradient in gradients]
    columns = [NORM, RMS, ABSMAX, ZEROS, NONFINITE, WEIGHT]
    np.testing.assert_allclose(captured.statistics[:, columns], np.array(expected)[:, columns], rtol=1e-6)


@pytest.mark.parametrize("rows", [7, 300_000])
@pytest.mark.parametrize("jit_compile", [False, True])
def test_sparse_gradients_are_summed(rows: int, jit_compile: bool) -> None:
    """Repeated rows of a sparse gradient count once, summed; rows it leaves out are zeros; large ones stay sparse."""
    indices, values = np.array([5, 1, 5, 1, 5]), np.arange(20.0, dtype="float32").reshape(5, 4)

    def step(model: Any, weights: Any, data: Any) -> None:
        gradient = tf.IndexedSlices(tf.constant(values), tf.constant(indices), tf.constant([rows, 4]))
        model.optimizer.apply([gradient], weights)

    captured = one_step(step, np.ones((rows, 4)), jit_compile=jit_compile)
    dense = np.zeros((rows, 4))
    np.add.at(dense, indices, values)
    np.testing.assert_allclose(captured.statistics[0], statistics_of(dense, np.ones((rows, 4)), -dense), rtol=2e-6)


def test_odd_variables() -> None:
    """A scalar, an empty weight and a gradient that the optimizer broadcasts are all told."""

    def step(model: Any, weights: Any, data: Any) -> None:
        model.optimizer.apply([tf.constant(-2.0), tf.zeros((0, 3)), tf.constant([[3.0], [4.0]])], weights)

    captured = one_step(step, 4.0, np.zeros((0, 3)), np.ones((2, 5)), optimizer=optimizers.Adam(0.5))
    np.testing.assert_allclose(captured.statistics[:, NORM], [2.0, 0.0, np.sqrt(5 * 25)], rtol=1e-6)
    # The first step of Adam moves every element by the learning rate.
    np.testing.assert_allclose(captured.statistics[:, RATIO], [0.5 / 4, 0.0, 0.5], rtol=1e-5)


def test_updated_twice_is_listed_once() -> None:
    """A variable applied twice in a step is one row: the later gradient, and the update of both."""

    def step(model: Any, weights: Any, data: Any) -> None:
        model.optimizer.apply([tf.constant([3.0, 4.0])], weights)
        model.optimizer.apply([tf.constant([0.0, 1.0])], weights)

    captured = one_step(step, np.array([10.0, 0.0]))
    assert captured.statistics[0, NORM] == 1.0
    assert captured.statistics[0, RATIO] == pytest.approx(np.hypot(3, 5) / 10)


def test_an_optimizer_inside_a_branch_is_not_seen() -> None:
    """Gradients that live inside a tf.cond cannot leave it: the step has no rows, and trains."""

    def step(model: Any, weights: Any, data: Any) -> None:
        tf.cond(tf.reduce_sum(data) < np.inf, lambda: model.optimizer.apply([tf.ones(2)], weights), lambda: None)

    captured = one_step(step, np.zeros(2))
    assert captured.variables == ()
    assert captured.statistics.shape == (0, len(STATISTICS))


def test_a_failure_of_ours_is_told_and_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """When gradients cannot be read, the model trains as unwatched; steps have no rows, and a warning says so."""

    def fail(gradients: Any) -> Any:
        raise ValueError("on purpose")

    monkeypatch.setattr("keras_gradwatch.backends.tensorflow_step.gradient_reductions", fail)
    plain, watched, recorder = dense_model(), dense_model(), Recorder()
    with pytest.warns(RuntimeWarning, match="could not read the gradients .*ValueError: on purpose.* Training goes on"):
        fit(watched, recorder)
    fit(plain)
    assert_same(plain, watched)
    assert [captured.variables for captured in recorder.captured] == [()] * BATCHES_IN_TWO_EPOCHS


def test_disconnected() -> None:
    """A variable that the loss does not reach has no gradient: not connected, NaN but for its weight norm."""
    keras.utils.set_random_seed(1)
    model, recorder = compiled(Disconnected()), Recorder()
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        fit(model, recorder, epochs=1)
    captured = recorder.captured[0]
    connected = dict(zip([variable.path for variable in captured.variables], captured.connected, strict=True))
    used = {variable.path for variable in model.used.trainable_variables}
    assert connected == {variable.path: variable.path in used for variable in model.trainable_variables}
    lost = captured.statistics[~np.array(captured.connected)]
    assert np.isfinite(lost[:, WEIGHT]).all()
    assert np.isnan(np.delete(lost, WEIGHT, axis=1)).all()


def test_clipping_comes_after() -> None:
    """Norms are those before clipping, while the update is the clipped one."""
    recorder = Recorder()
    fit(dense_model(optimizer=optimizers.SGD(1.0, global_clipnorm=1e-3)), recorder, epochs=1)
    first = recorder.captured[0].statistics
    assert np.linalg.norm(first[:, NORM]) > 0.1
    kernels = first[:, WEIGHT] > 0
    assert np.linalg.norm((first[:, RATIO] * first[:, WEIGHT])[kernels]) < 1.001e-3


def test_accumulation_shows_each_micro_batch() -> None:
    """Under gradient accumulation every micro-batch has its gradient, and every second one an update."""
    recorder = Recorder()
    fit(SCENARIOS["accumulated"](), recorder)
    assert (recorder.column(NORM) > 0).all()
    np.testing.assert_array_equal((recorder.column(RATIO) > 0).all(axis=1), [False, True] * 3)


def test_skipped_steps_of_loss_scaling() -> None:
    """A step skipped by loss scaling has non-finite gradients and an update ratio of 0; others have unscaled norms."""
    recorder = Recorder()
    fit(half_precision(scale=2.0**22), recorder, epochs=6)
    skipped = recorder.column(NONFINITE).sum(axis=1) > 0
    assert 0 < skipped.sum() < len(skipped)
    assert (recorder.column(RATIO)[skipped] == 0.0).all()
    assert (recorder.column(RATIO)[~skipped] > 0.0).all()
    reference = Recorder()  # the same data and another start: of the same size, not a loss scale of 2**15 apart
    fit(dense_model(), reference, epochs=6)
    ratios = recorder.column(NORM)[~skipped] / reference.column(NORM)[~skipped]
    assert 0.1 < np.median(ratios) < 10.0


def test_two_optimizers() -> None:
    """Rows of several optimizers follow each other in the order of the calls, also for one kept in a dict."""
    model, recorder = seeded(adversarial)(), Recorder()
    fit(model, recorder, epochs=1)
    expected = [*model.critic.trainable_weights, *model.generator.trainable_weights]
    assert [v.path for v in recorder.captured[-1].variables] == [v.path for v in expected]
    assert recorder.captured[-1].loss is None


def test_no_optimizer_no_rows() -> None:
    """A train_step that calls no Keras optimizer yields no rows, but the loss it computed."""
    model, recorder = compiled(WithoutOptimizer()), Recorder(batch=True)
    fit(model, recorder, epochs=1)
    assert [captured.variables for captured in recorder.captured] == [()] * 3
    kernel, bias = recorder.before[1]
    assert recorder.captured[1].loss == pytest.approx(np.mean((X[8:16] @ kernel + bias - Y[8:16]) ** 2))


# -- the batch


def pairs() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    while True:
        yield from ((X[k : k + 8], Y[k : k + 8]) for k in (0, 8, 16))


class Sequence(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return X[8 * index : 8 * index + 8], Y[8 * index : 8 * index + 8]


INPUTS: dict[str, Callable[[], dict[str, Any]]] = {
    "arrays": lambda: {},
    "dataset": lambda: {"x": tf.data.Dataset.from_tensor_slices((X, Y)).batch(8), "y": None, "batch_size": None},
    "generator": lambda: {"x": pairs(), "y": None, "batch_size": None, "steps_per_epoch": 3},
    "py dataset": lambda: {"x": Sequence(), "y": None, "batch_size": None},
}


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_every_batch_is_seen_once(name: str, steps_per_execution: int) -> None:
    """The batches handed over are those of the data, in order, before and after the step, and none is lost."""
    plain, watched, recorder = (
        *(dense_model(steps_per_execution=steps_per_execution) for _ in "12"),
        Recorder(batch=True),
    )
    fit(plain, **INPUTS[name]())
    fit(watched, recorder, **INPUTS[name]())
    assert_same(plain, watched)
    expected = np.concatenate([X, X])
    assert recorder.steps == list(range(1, len(recorder.steps) + 1))
    for batches in (recorder.batches, [captured.batch for captured in recorder.captured]):
        np.testing.assert_array_equal(np.concatenate([batch[0] for batch in batches])[:40], expected)


def test_before_step_comes_before() -> None:
    """When before_step is called, the weights are still those the step starts from."""
    recorder = Recorder(batch=True)
    fit(dense_model(), recorder)
    for before, captured in zip(recorder.before, recorder.captured, strict=True):
        for mine, theirs in zip(before, captured.previous_weights, strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_weights_of_samples_and_classes_are_in_the_batch() -> None:
    """The third element of a batch is the final sample weight, class weights folded in; dict inputs stay dicts."""
    inputs = {"a": keras.Input((5,), name="a"), "b": keras.Input((5,), name="b")}
    output = layers.Dense(2, activation="softmax")(layers.Concatenate()([inputs["a"], inputs["b"]]))
    model = compiled(keras.Model(inputs, output), loss="sparse_categorical_crossentropy")
    recorder, labels = Recorder(), np.arange(8) % 2
    fit(model, recorder, x={"a": X[:8], "b": X[8:16]}, y=labels, epochs=1, class_weight={0: 1.0, 1: 3.0})
    x, y, sample_weight = recorder.captured[0].batch
    np.testing.assert_array_equal(x["b"], X[8:16])
    np.testing.assert_array_equal(np.ravel(y), labels)
    np.testing.assert_array_equal(sample_weight, np.where(labels, 3.0, 1.0))


def test_train_on_batch() -> None:
    """A loop of train_on_batch is followed between attach and detach, without any announcement of batches."""
    plain, watched, recorder = dense_model(), dense_model(), Recorder()
    recorder.set_model(watched)
    recorder.on_train_begin()
    for k in (0, 8, 16):
        assert watched.train_on_batch(X[k : k + 8], Y[k : k + 8]) == plain.train_on_batch(X[k : k + 8], Y[k : k + 8])
    recorder.on_train_end()
    watched.train_on_batch(X, Y), plain.train_on_batch(X, Y)
    assert_same(plain, watched)
    assert recorder.capture.steps_seen == len(recorder.captured) == 3
    np.testing.assert_array_equal(recorder.captured[1].batch[0], X[8:16])


# -- who is in place, and when


def test_unsampled_blocks_are_left_to_keras() -> None:
    """With nothing wanted in a block the user's function takes the iterator; steps of a short block are counted too."""
    model, recorder, calls = dense_model(steps_per_execution=2), Recorder(track=lambda step: step == 4), []
    model.make_train_function()
    original = model.train_function
    model.train_function = lambda iterator: (calls.append(type(iterator)), original(iterator))[1]
    fit(model, recorder)
    assert recorder.steps == [1, 2, 3, 4, 5, 6]
    assert len(recorder.captured) == 1
    # Blocks of steps 1–2 | 3 | 4–5 | 6. Step 4 could be in the second or the third: both are run step by step.
    assert [issubclass(kind, list) for kind in calls] == [False, True, True, False]


def test_stop_training_inside_a_block() -> None:
    """A listener that stops training stops it after that very step, also inside a steps_per_execution block."""

    class Stopper(Recorder):
        def after_step(self, step: int, captured: CapturedStep | None) -> None:
            super().after_step(step, captured)
            self.model.stop_training = step == 2

    recorder = Stopper()
    fit(dense_model(steps_per_execution=3), recorder)
    assert recorder.steps == [1, 2]


def test_second_fit_reuses_the_traced_step() -> None:
    """A second fit, by the same or another callback, traces nothing anew; compile starts afresh; counting restarts."""
    traces = []

    class Counting(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            traces.append(1)
            return super().train_step(data)

    model, recorder = compiled(Counting([keras.Input((5,)), layers.Dense(3)])), Recorder()
    fit(model, recorder)
    first = len(traces)
    fit(model, recorder)
    fit(model, Recorder())
    assert len(traces) == first
    assert recorder.steps == [*range(1, 7), *range(1, 7)]
    compiled(model)
    fit(model, recorder)
    assert len(traces) == 2 * first
    assert len(recorder.captured) == 18


def test_two_watchers_share_one_step() -> None:
    """Two watchers see the same numbers, each what it asked for, and the last one to leave restores the function."""
    plain, watched, every, second = dense_model(), dense_model(), Recorder(), Recorder(track=lambda step: step % 2 == 0)
    fit(plain), fit(watched, every, second)
    assert_same(plain, watched)
    assert (len(every.captured), len(second.captured)) == (6, 3)
    np.testing.assert_array_equal(every.captured[1].statistics, second.captured[0].statistics)
    assert "Dispatcher" not in type(watched.train_function).__name__


@pytest.mark.parametrize("raised_in", ["wants", "before_step", "after_step", "on_train_batch_begin"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_run_that_died_is_not_followed(raised_in: str, error: type[BaseException]) -> None:
    """After an exception the next plain fit is not recorded and gets Keras' own function; a new one is followed."""
    model, plain, recorder = dense_model(), dense_model(), Recorder(batch=True)

    def fail(*_: Any, **__: Any) -> Any:
        raise error("on purpose")

    setattr(recorder, raised_in, fail)
    with pytest.raises(error, match="on purpose"):
        fit(model, recorder)
    assert not {"apply", "update_state", "train_step"} & {
        *vars(model),
        *vars(model.optimizer),
        *vars(model._loss_tracker),
    }
    seen = len(recorder.steps)
    delattr(recorder, raised_in)
    fit(model)
    assert len(recorder.steps) == seen
    assert "Dispatcher" not in type(model.train_function).__name__
    fit(model, recorder, epochs=1)
    assert len(recorder.steps) == seen + 3
    assert plain.__dict__.keys() <= model.__dict__.keys()


def test_detaching_after_compile_leaves_the_new_function() -> None:
    """A detach that comes late does not put an old function back."""
    model = dense_model()
    capture = Capture.attach(model, Recorder())
    compiled(model)
    capture.detach()
    capture.detach()
    assert model.train_function is None


def test_nothing_is_kept_alive() -> None:
    """A watched model that is let go is collected, its data and the watcher with it."""
    model, recorder = dense_model(), Recorder()
    fit(model, recorder, epochs=1)
    references = [weakref.ref(model), weakref.ref(recorder)]
    del model, recorder
    keras.utils.clear_session(free_memory=False)
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_validation_and_prediction_are_left_alone() -> None:
    """Evaluation, alone or inside fit, and prediction are no steps."""
    model, recorder = dense_model(), Recorder()
    fit(model, recorder, validation_data=(X, Y), epochs=1)
    model.evaluate(X, Y, verbose=0, callbacks=[recorder])
    assert recorder.steps == [1, 2, 3]


def test_saved_model_has_nothing_of_ours(tmp_path: Any) -> None:
    """A model saved while it is watched loads without us and holds the same weights."""
    model = dense_model()
    fit(model, Recorder(), keras.callbacks.ModelCheckpoint(str(tmp_path / "model.keras"), verbose=0), epochs=1)
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert_same(model, loaded)
    assert "gradwatch" not in loaded.to_json()


def test_mirrored_strategy() -> None:
    """On two replicas training ends as unwatched, and norms are those of the whole batch."""
    devices = tf.config.list_logical_devices("CPU")
    if len(devices) < 2:
        pytest.skip("needs two logical CPU devices")
    strategy = tf.distribute.MirroredStrategy([device.name for device in devices[:2]])
    x, y = X[:16], Y[:16]
    with strategy.scope():
        plain, watched = dense_model(optimizer="adam"), dense_model(optimizer="adam")
    single, recorder, reference = dense_model(optimizer="adam"), Recorder(), Recorder()
    fit(plain, x=x, y=y), fit(watched, recorder, x=x, y=y), fit(single, reference, x=x, y=y)
    assert_same(plain, watched)
    np.testing.assert_allclose(recorder.column(NORM), reference.column(NORM), rtol=2e-5)
    np.testing.assert_allclose(recorder.column(RATIO), reference.column(RATIO), rtol=2e-5)
    assert recorder.captured[0].loss == pytest.approx(reference.captured[0].loss, rel=1e-6)


def test_another_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a backend that is not supported the error names it and the way out."""
    monkeypatch.setattr(keras.backend, "backend", lambda: "openvino")
    with pytest.raises(RuntimeError, match=r"'openvino'.*KERAS_BACKEND=tensorflow"):
        Capture.attach(dense_model(), Recorder())
