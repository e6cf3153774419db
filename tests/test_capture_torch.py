"""Capture on PyTorch: what the optimizer was handed, whatever it looks like, and training as it is unwatched."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

keras = pytest.importorskip("keras")
if keras.backend.backend() != "torch":
    pytest.skip("capture on the PyTorch backend", allow_module_level=True)
import torch  # noqa: E402
from per_backend import array  # noqa: E402

from keras_gradwatch.backends.torch_step import TrackedStep  # noqa: E402
from keras_gradwatch.capture import Capture, CapturedStep, Request  # noqa: E402
from keras_gradwatch.records import STATISTICS  # noqa: E402
from keras_gradwatch.stats import statistics_of  # noqa: E402

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

    def wants(self, step: int) -> Request:
        return Request(track=True)

    def before_step(self, step: int, batch: Any) -> None:
        raise AssertionError("nobody asked")

    def after_step(self, step: int, captured: CapturedStep | None) -> None:
        assert captured is not None
        self.captured.append(captured)

    def on_train_begin(self, logs: Any = None) -> None:
        self.capture = Capture.attach(self.model, self)

    def on_train_end(self, logs: Any = None) -> None:
        self.capture.detach()


def dense_model(**settings: Any) -> Any:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((5,)), layers.Dense(4, activation="tanh"), layers.Dense(3)])
    return compiled(model, **settings)


def compiled(model: Any, optimizer: Any = None, loss: Any = "mse", **settings: Any) -> Any:
    model.compile(optimizer or optimizers.SGD(0.1), loss, **settings)
    return model


def fit(model: Any, *callbacks: Any, x: Any = X, y: Any = Y, **settings: Any) -> Any:
    own = {"batch_size": 8, "epochs": 1, "shuffle": False, "verbose": 0} | settings
    return model.fit(x, y, **own, callbacks=[*callbacks])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile, of itself
@pytest.mark.parametrize("jit_compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_all_statistics_agree_with_numpy(jit_compile: bool) -> None:
    """Every column agrees with plain NumPy, also where torch.compile makes the step; batch and weights come along."""
    model, recorder = dense_model(jit_compile=jit_compile), Recorder()
    fit(model, recorder)
    for k, captured in enumerate(recorder.captured):
        x, y = map(array, captured.batch)
        np.testing.assert_array_equal(x, X[8 * k : 8 * k + 8])
        assert captured.previous_weights is not None
        w1, b1, w2, b2 = (array(weight).astype(np.float64) for weight in captured.previous_weights)
        hidden = np.tanh(x @ w1 + b1)
        error = (hidden @ w2 + b2 - y) * 2 / np.size(y)
        inner = (error @ w2.T) * (1 - hidden**2)
        gradients = [x.T @ inner, inner.sum(0), hidden.T @ error, error.sum(0)]
        for row, gradient, weight in zip(captured.statistics, gradients, (w1, b1, w2, b2), strict=True):
            np.testing.assert_allclose(row, statistics_of(gradient, weight, -0.1 * gradient), rtol=1e-4)
        assert captured.loss == pytest.approx(float(np.mean((hidden @ w2 + b2 - y) ** 2)), rel=1e-6)


Step = Callable[[Any, Any], Any]


def one_step(step: Step, *weights: Any, dtype: str = "float32", optimizer: Any = None) -> CapturedStep:
    """A step of a model with these weights: ``step(model, weights)`` hands gradients to the optimizer."""

    class Given(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            zero = keras.initializers.Constant(0)
            self.given = [self.add_weight(shape=np.shape(w), initializer=zero, dtype=dtype) for w in weights]

        def call(self, inputs: Any) -> Any:
            return inputs

        def train_step(self, data: Any) -> Any:
            with torch.no_grad():
                step(self, self.given)
            return {}

    model, recorder = Given(), Recorder()
    compiled(model, optimizer or optimizers.SGD(1.0), None)
    for variable, value in zip(model.given, weights, strict=True):
        variable.assign(value)
    fit(model, recorder, x=X[:8], y=None)
    return recorder.captured[0]


ORDINARY = [[3.0, 0.0, 4.0, 0.0], [0.0, 0.0], [1e-7, -2e-6], [1.0]]
EXTREME = [[1e-30, 2e-30], [1e30, 0.0, 1e30], [6e4, 6e4], [np.nan, 0.0], [np.inf, -np.inf, 0.0], [np.nan, np.inf, 1e30]]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("values", [ORDINARY, ORDINARY + EXTREME], ids=["ordinary", "extreme"])
def test_any_values(values: list[list[float]], dtype: str) -> None:
    """Zeros, tiny and huge values, NaN and Inf have the statistics that NumPy finds, in every dtype."""
    gradients = [torch.tensor(value).to(getattr(torch, dtype)) for value in values]
    captured = one_step(
        lambda model, weights: model.optimizer.apply(gradients, weights),
        *(np.ones(len(v)) for v in values),
        dtype=dtype,
    )
    wide = [gradient.double().numpy() for gradient in gradients]
    expected = [statistics_of(gradient, np.ones_like(gradient), -gradient) for gradient in wide]
    columns = [NORM, RMS, ABSMAX, ZEROS, NONFINITE, WEIGHT]
    np.testing.assert_allclose(captured.statistics[:, columns], np.array(expected)[:, columns], rtol=1e-6)


def test_sparse_gradients_are_summed() -> None:
    """Repeated rows of a sparse gradient count once, summed; rows it leaves out are zeros."""
    rows, values = torch.tensor([[5, 1, 5, 1, 5]]), torch.arange(20.0).reshape(5, 4)
    sparse = torch.sparse_coo_tensor(rows, values, (7, 4), check_invariants=True)
    captured = one_step(lambda model, weights: model.optimizer.apply([sparse], weights), np.ones((7, 4)))
    dense = sparse.to_dense().numpy()
    np.testing.assert_allclose(captured.statistics[0], statistics_of(dense, np.ones((7, 4)), -dense), rtol=2e-6)


def test_odd_variables() -> None:
    """A scalar and an empty weight are told."""

    def step(model: Any, weights: Any) -> None:
        model.optimizer.apply([torch.tensor(-2.0), torch.zeros((0, 3)), torch.full((2, 5), 3.0)], weights)

    captured = one_step(step, 4.0, np.zeros((0, 3)), np.ones((2, 5)), optimizer=optimizers.Adam(0.5))
    np.testing.assert_allclose(captured.statistics[:, NORM], [2.0, 0.0, np.sqrt(10 * 9)], rtol=1e-6)
    # The first step of Adam moves every element by the learning rate.
    np.testing.assert_allclose(captured.statistics[:, RATIO], [0.5 / 4, 0.0, 0.5], rtol=1e-5)


def test_updated_twice_is_listed_once() -> None:
    """A variable applied twice in a step is one row: the later gradient, and the update of both."""

    def step(model: Any, weights: Any) -> None:
        gradient = torch.tensor([3.0, 4.0])
        model.optimizer.apply([gradient], weights)
        gradient.copy_(torch.tensor([0.0, 1.0]))  # torch reuses its gradients
        model.optimizer.apply([gradient], weights)

    captured = one_step(step, np.array([10.0, 0.0]))
    assert captured.statistics[0, NORM] == 1.0
    assert captured.statistics[0, RATIO] == pytest.approx(np.hypot(3, 5) / 10)


def test_a_failure_of_ours_is_told_and_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """When gradients cannot be read, the model trains as unwatched; steps have no rows, and a warning says so."""

    def fail(gradients: Any) -> Any:
        raise ValueError("on purpose")

    monkeypatch.setattr("keras_gradwatch.backends.torch_step.Gradients", fail)
    plain, watched, recorder = dense_model(), dense_model(), Recorder()
    with pytest.warns(RuntimeWarning, match="could not read the gradients .*ValueError: on purpose.* Training goes on"):
        fit(watched, recorder)
    fit(plain)
    for mine, other in zip(watched.variables, plain.variables, strict=True):
        np.testing.assert_array_equal(array(mine), array(other))
    assert [captured.variables for captured in recorder.captured] == [()] * 3


class Own(keras.Model):
    """Two backward passes and two optimizers in a step of its own, with a weight that no loss reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic, self.unused = layers.Dense(5), layers.Dense(1), layers.Dense(2)
        self.parts = {"critic": optimizers.SGD(0.1)}
        self.generator_optimizer = optimizers.Adam(0.01)

    def call(self, inputs: Any) -> Any:
        self.unused(inputs)
        return self.critic(self.generator(inputs))

    def train_step(self, data: Any) -> Any:
        x, _ = data
        for optimizer, sign, parts in (
            (self.parts["critic"], 1.0, [self.critic]),
            (self.generator_optimizer, -1.0, [self.generator, self.unused]),
        ):
            self.zero_grad()
            (sign * self(x).mean()).backward()
            weights = [weight for part in parts for weight in part.trainable_weights]
            with torch.no_grad():
                optimizer.apply([weight.value.grad for weight in weights], weights)
        return {}


def test_two_optimizers_and_a_missing_gradient() -> None:
    """Rows follow in the order of the calls; what the loss does not reach is told from zero."""
    keras.utils.set_random_seed(1)
    model, recorder = compiled(Own()), Recorder()
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        fit(model, recorder)
    captured = recorder.captured[-1]
    parts = (model.critic, model.generator, model.unused)
    expected = [weight.path for part in parts for weight in part.trainable_weights]
    assert [variable.path for variable in captured.variables] == expected
    assert captured.connected == (True,) * 4 + (False,) * 2
    assert captured.loss is None
    assert np.isfinite(captured.statistics[4:, WEIGHT]).all()
    assert np.isnan(np.delete(captured.statistics[4:], WEIGHT, axis=1)).all()


def loader() -> Any:
    data = torch.utils.data.TensorDataset(torch.as_tensor(X), torch.as_tensor(Y))
    return torch.utils.data.DataLoader(data, batch_size=8)


def pairs() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    yield from ((X[k : k + 8], Y[k : k + 8]) for k in (0, 8, 16))


@pytest.mark.parametrize("data", [loader, pairs])
def test_every_batch_is_seen_once(data: Callable[[], Any]) -> None:
    """From a DataLoader and from a generator: all samples, in order, none twice."""
    recorder = Recorder()
    fit(dense_model(), recorder, x=data(), y=None, batch_size=None, steps_per_epoch=3)
    np.testing.assert_array_equal(np.concatenate([array(captured.batch[0]) for captured in recorder.captured]), X)


@pytest.mark.parametrize("shares", ["nothing", "wrapper inside", "hooks"])
def test_processes_that_train_apart_are_told(monkeypatch: pytest.MonkeyPatch, shares: str) -> None:
    """With several processes and nothing that shares their gradients there is a warning that says what to do."""
    model = dense_model()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    if shares == "wrapper inside":
        wrapper = torch.nn.parallel.DistributedDataParallel
        model.layers[0].__dict__["parallel"] = wrapper.__new__(wrapper)
    elif shares == "hooks":
        model.layers[0].kernel.value.register_hook(lambda gradient: gradient)
    if shares != "nothing":
        TrackedStep(model, model.train_function)
        return
    with pytest.warns(
        RuntimeWarning, match=r"2 processes train model 'sequential.*DistributedDataParallel.*all-reduce"
    ):
        TrackedStep(model, model.train_function)
