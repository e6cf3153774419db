"""Looks at the activations of real models, against the same numbers taken from the layers' own outputs."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops
from per_backend import array

from keras_gradwatch import GradWatch
from keras_gradwatch.activations import SAMPLES, ActivationReader, Looks, SamplePool
from keras_gradwatch.probe import Batch
from keras_gradwatch.records import ActivationRecord

CUT = keras.initializers.Constant(-50.0)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)


class Inside(layers.Layer):
    """A custom layer that calls an activation somewhere inside."""

    def __init__(self, function: Callable[[Any], Any], **settings: Any) -> None:
        super().__init__(**settings)
        self._dense, self._function = layers.Dense(6), function
        self._after = layers.Dense(6)

    def call(self, x: Any) -> Any:
        return self._after(self._function(self._dense(x)))


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype("float32")


def look(model: keras.Model, x: Any, y: Any = None) -> ActivationRecord:
    """One look at a model compiled with a loss on its first output."""
    if not model.compiled:
        model.compile("sgd", "mse")
    y = np.zeros((len(keras.tree.flatten(x)[0]), *model.output_shape[1:]), "float32") if y is None else y
    record = ActivationReader(model).read([Batch(keras.tree.map_structure(ops.convert_to_tensor, x), y)], step=3)
    assert record is not None
    return record


def stack(shape: tuple[int, ...], *parts: Any) -> keras.Sequential:
    return keras.Sequential([keras.Input(shape), *parts])


def dead_bias(units: int, dead: int) -> Callable[..., Any]:
    return lambda shape, dtype=None: np.where(np.arange(units) < dead, -50.0, 0.0).astype("float32")


def dense(function: Any) -> layers.Dense:
    return layers.Dense(6, function, bias_initializer=dead_bias(6, 2), name="d")


# ---------------------------------------------------------------- where activations are found


@pytest.mark.parametrize(
    ("parts", "layer", "owner"),
    [
        ([lambda: dense("relu")], "d", "d"),
        ([lambda: dense(None), lambda: layers.ReLU(name="r")], "r", "d"),
        ([lambda: dense(None), lambda: layers.Activation("relu", name="a")], "a", "d"),
        ([lambda: dense(ops.relu6)], "d", "d"),
    ],
)  # fmt: skip
def test_silent_units_wherever_the_relu_is(parts: list[Callable[[], Any]], layer: str, owner: str) -> None:
    """Inside a layer or in a layer of its own: the dead units, their biases, and whose weights made them."""
    record = look(stack((4,), *(part() for part in parts), layers.Dense(1)), numbers(128, 4))
    (found,) = record.activations
    assert (found.layer, found.owner, found.kind, found.units) == (layer, owner, "relu", 6)
    assert found.silent.tolist() == [True, True, False, False, False, False]
    assert found.bias.tolist()[:3] == [-50.0, -50.0, 0.0]
    assert (found.ceiling[:2] < 0).all()
    assert (found.ceiling[2:] > 0).all()
    assert [name.split("/")[-1] for name in found.own] == ["kernel", "bias"]
    assert not found.output


@pytest.mark.parametrize("function", [ops.relu, lambda x: ops.maximum(x, 0.0), lambda x: ops.maximum(0.0, x)])
def test_a_relu_inside_a_custom_layer(function: Callable[[Any], Any]) -> None:
    """Also one that is written out as a maximum."""
    model = stack((4,), Inside(function, name="block"), layers.Dense(1))
    model.get_layer("block")._dense.bias.assign(dead_bias(6, 3)((6,)))
    (found,) = look(model, numbers(128, 4)).activations
    assert (found.layer, found.kind, int(found.silent.sum())) == ("block", "relu", 3)


@pytest.mark.parametrize("kind", ["sigmoid", "tanh", "softsign", "hard_sigmoid", "hard_tanh"])
def test_shares_at_the_limits_are_those_of_the_outputs(kind: str) -> None:
    """Counted by hand on the layer's own output, for every squashing function."""
    wide = keras.initializers.RandomNormal(stddev=4.0)
    model = stack((4,), layers.Dense(8, kind, kernel_initializer=wide, name="d"), layers.Dense(1))
    x = numbers(64, 4)
    outputs = array(model.get_layer("d")(x))
    low, high = (0.0, 1.0) if "sigmoid" in kind else (-1.0, 1.0)
    margin = 0.01 * (high - low)
    (found,) = look(model, x).activations
    assert found.at_limit == pytest.approx(np.mean((outputs < low + margin) | (outputs > high - margin)), abs=1e-6)
    assert (found.kind, found.silent.any()) == (kind, np.False_)


@pytest.mark.parametrize("name", ["gelu", "silu", "elu", "leaky_relu", "softmax", "linear", "mish"])
def test_functions_without_limits_are_left_out(name: str) -> None:
    """Even if they are made of a sigmoid or a tanh, in a layer of Keras' own or a custom one."""
    function = keras.activations.get(name)
    model = stack((4,), layers.Dense(6, name), layers.Activation(name), Inside(function), layers.Dense(1))
    assert look(model, numbers(16, 4)).activations == ()
    assert (
        look(stack((4,), Inside(lambda x: ops.gelu(x, approximate=True)), layers.Dense(1)), numbers(9, 4)).activations
        == ()
    )


def test_channels_are_the_units_of_a_convolution() -> None:
    """Ten by ten positions and all samples count for one unit each."""
    conv = layers.Conv2D(5, 3, activation="relu", bias_initializer=dead_bias(5, 4))
    (found,) = look(stack((12, 12, 2), conv, layers.Flatten(), layers.Dense(1)), numbers(16, 12, 12, 2)).activations
    assert found.silent.tolist() == [True] * 4 + [False]


def test_recurrent_layers_are_seen_by_their_output_and_not_by_their_gates() -> None:
    """An unrolled LSTM calls five activations a step; its output is what counts. The gradient over time comes along."""
    parts = [layers.LSTM(6, return_sequences=True, unroll=True), layers.Bidirectional(layers.GRU(3)), layers.Dense(1)]
    record = look(stack((7, 2), *parts), numbers(32, 7, 2), numbers(32, 1))
    assert [(a.kind, a.units) for a in record.activations] == [("tanh", 6), ("tanh", 3), ("tanh", 3)]
    assert [len(s.norms) for s in record.sequences] == [7, 7]
    assert all((s.norms > 0).all() and not s.masked for s in record.sequences)
    assert [len(s.weights) for s in record.sequences] == [3, 6]


def test_the_gradient_over_time_is_that_of_the_loss() -> None:
    """A linear recurrence h ← h/2 + x, read at the end: the gradient falls by half per step back."""
    ones = {"kernel_initializer": "ones", "use_bias": False}
    half = keras.initializers.Constant(0.5)
    rnn = layers.SimpleRNN(1, activation="linear", recurrent_initializer=half, **ones)
    (sequence,) = look(stack((6, 1), rnn), numbers(8, 6, 1)).sequences
    assert sequence.norms[1:] / sequence.norms[:-1] == pytest.approx([2.0] * 5, rel=1e-5)


def test_a_layer_called_twice_is_one() -> None:
    """A unit of a shared layer is silent if it is in both calls."""
    shared = layers.Dense(4, "relu", kernel_initializer="identity", name="shared")
    a, b = keras.Input((4,)), keras.Input((4,))
    model = keras.Model([a, b], layers.Dense(1)(layers.Concatenate()([shared(a), shared(b)])))
    signs = np.array([[1, -1, 1, -1]], "float32").repeat(8, 0)
    record = look(model, [signs, signs * [1, 1, -1, -1]])
    (found,) = record.activations
    assert found.silent.tolist() == [False, True, False, False]


def test_outputs_are_told_apart() -> None:
    """What the model gives, in another shape or dtype perhaps, is an output; a hidden sigmoid is not."""
    parts = [layers.Dense(4, "sigmoid"), layers.Dense(6, "sigmoid"), layers.Reshape((2, 3))]
    assert [a.output for a in look(stack((4,), *parts), numbers(8, 4)).activations] == [False, True]


def test_nested_models_are_named_by_path() -> None:
    """As everywhere else."""
    inner = keras.Sequential([keras.Input((4,)), layers.Dense(3, "relu", name="d")], name="inner")
    (found,) = look(stack((4,), inner, layers.Dense(1)), numbers(8, 4)).activations
    assert (found.layer, found.owner) == ("inner/d", "inner/d")


# ---------------------------------------------------------------- losses and inputs


def test_predictions_given_to_other_samples_lose_what_they_know() -> None:
    """A model that gives exactly the targets has loss 0, and the shuffled loss of the targets themselves."""
    x = numbers(64, 1)
    model = stack((1,), layers.Dense(1, kernel_initializer="ones"))
    record = look(model, x, x)
    assert record.loss == 0.0
    assert record.shuffled_loss == pytest.approx(np.mean((x - x[::-1]) ** 2), rel=1e-5)


def test_the_scale_of_the_inputs() -> None:
    """Mean, deviation and largest value of every float input."""
    x = 3 * numbers(32, 5) - 7
    (scale,) = look(stack((5,), layers.Dense(1)), x).inputs
    assert (scale.mean, scale.std) == pytest.approx((x.mean(), x.std()), rel=1e-5)
    assert scale.largest == pytest.approx(np.abs(x).max())


def test_no_loss_is_no_obstacle() -> None:
    """A model trained by its own step is looked at all the same."""

    class Own(keras.Model):
        def train_step(self, data: Any) -> dict[str, Any]:
            return {}

    x = keras.Input((4,))
    model = Own(x, layers.Dense(3, "relu")(x))
    model.compile("sgd")
    record = look(model, numbers(16, 4))
    assert len(record.activations) == 1
    assert np.isnan([record.loss, record.shuffled_loss]).all()


# ---------------------------------------------------------------- when, and how many samples


def test_small_batches_are_gathered() -> None:
    """The newest batches that give 128 samples are held, and passed in groups of 16 samples at least."""
    pool = SamplePool()
    assert pool.batches() == []
    for k in range(100):
        pool.add(Batch(np.full((3, 2), k, "float32"), np.full((3, 1), k, "float32")))
    batches = pool.batches()
    assert [np.shape(batch.x)[0] for batch in batches] == [18] * 7 + [3]
    assert np.asarray(batches[0].x)[0, 0] == 100 - 43
    pool.add(Batch(np.ones((300, 2), "float32"), np.ones((300, 1), "float32")))
    assert [np.shape(batch.x) for batch in pool.batches()] == [(SAMPLES, 2)]


def test_batches_of_another_form_are_not_mixed() -> None:
    """Sequences padded to different lengths cannot be joined: the newest form counts."""
    pool = SamplePool()
    pool.add(Batch({"ids": np.ones((4, 9), "int32")}))
    pool.add(Batch({"ids": np.ones((4, 7), "int32")}))
    assert [np.shape(batch.x["ids"]) for batch in pool.batches()] == [(4, 7)]


def test_large_samples_are_held_in_small_numbers() -> None:
    """A sample of 4 million numbers is 16 MB: four of them are the most."""
    pool = SamplePool()
    pool.add(Batch(np.zeros((8, 4_000_000), "float32")))
    (batch,) = pool.batches()
    assert np.shape(batch.x)[0] == 4


def test_batches_are_seen_as_one() -> None:
    """Without batch statistics, the look at four batches is the look at all samples together."""
    x, y = 2 * numbers(64, 5, 3) + 1, numbers(64, 1)
    parts = [layers.Dense(6, "relu", bias_initializer=dead_bias(6, 2)), layers.Dense(4, "tanh"), layers.GRU(3)]
    model = stack((5, 3), *parts, layers.Dense(1))
    model.compile("sgd", "mse")
    reader = ActivationReader(model)
    whole = reader.read([Batch(x, y)], step=1)
    split = reader.read([Batch(x[i : i + 16], y[i : i + 16]) for i in range(0, 64, 16)], step=1)
    assert whole is not None
    assert split is not None
    assert split.samples == 64
    for one, other in zip(whole.activations, split.activations, strict=True):
        assert (one.silent == other.silent).all()
        assert one.at_limit == pytest.approx(other.at_limit)
        assert one.ceiling == pytest.approx(other.ceiling, rel=1e-5, nan_ok=True)
    (one,), (other,) = whole.inputs, split.inputs
    assert (one.mean, one.std, one.largest) == pytest.approx((other.mean, other.std, other.largest), rel=1e-5)
    assert split.loss == pytest.approx(whole.loss, rel=1e-5)


def test_looks_thin_out_and_the_first_is_kept() -> None:
    """Before the first step, after steps 2, 4, 8 …, when due, and after each epoch; not twice for the same weights."""
    model = stack((2,), layers.Dense(2, "relu"), layers.Dense(1))
    model.compile("sgd", "mse")
    looks, batch = Looks(model, offset=100), Batch(ops.ones((2, 2)), ops.ones((2, 1)))
    for step in range(1, 41):
        if step in (1, 30):
            looks.before_step(step, batch, due=step == 30)
        looks.after_step(step, batch)
    looks.end_epoch(40)
    assert [record.step - 100 for record in looks.records] == [1, 2, 4, 8, 16, 30, 40]
    assert [record.samples for record in looks.records] == [2, 4, 8, 16, 32, 60, 80]
    looks.before_step(41, batch, due=True)  # the weights are those after step 40
    assert len(looks.records) == 7
    for step in range(42, 82):
        looks.end_epoch(step)
    assert (looks.records[0].step, len(looks.records)) == (101, 32)


def test_a_model_that_cannot_be_called_is_a_remark() -> None:
    """No warning, no finding: the reason is kept for the notes."""

    class Nothing(keras.Model):
        def train_step(self, data: Any) -> dict[str, Any]:
            return {"loss": ops.zeros(())}

    model = Nothing()
    model.compile()
    looks = Looks(model)
    looks.before_step(1, Batch(ops.ones((2, 2))), due=False)
    assert looks.records == []
    assert "NotImplementedError" in looks.failure


# ---------------------------------------------------------------- in training


@pytest.mark.parametrize("settings", [{}, {"check_freq": None}, {"check_freq": None, "track_freq": None}])
def test_a_dead_layer_is_found_in_training(settings: dict[str, Any]) -> None:
    """With checks or without, even without tracking: dead units, and nothing else."""
    dead = layers.Dense(16, "relu", bias_initializer=CUT, name="dead")
    model = stack((4,), layers.Dense(16, "relu", name="first"), dead, layers.Dense(1))
    model.compile("sgd", "mse")
    watch = GradWatch(verbose=0, **settings)
    model.fit(numbers(320, 4), numbers(320, 1), batch_size=16, epochs=4, verbose=0, callbacks=[watch])
    assert watch.findings[["finding", "layer"]].to_numpy().tolist() == [["dead_units", "dead"]]
    assert "16 of 16 units (100%) of dead" in watch.findings.message[0]
    assert watch.cost["activations_seconds"] > 0


def test_looking_leaves_no_trace() -> None:
    """Weights, averages, seeds and metrics are those of a run that nobody watched."""
    x, y = numbers(96, 6), numbers(96, 1)

    def trained(callbacks: list[Any]) -> tuple[list[np.ndarray], dict[str, Any]]:
        keras.utils.set_random_seed(3)
        parts = [layers.Dense(8), layers.BatchNormalization(), layers.ReLU(), layers.Dropout(0.5), layers.Dense(1)]
        model = stack((6,), *parts)
        model.compile("adam", "mse", metrics=["mae"])
        history = model.fit(x, y, batch_size=16, epochs=3, verbose=0, shuffle=False, callbacks=callbacks).history
        return [np.asarray(v) for v in model.variables], {k: v for k, v in history.items() if not k.startswith("grad_")}

    plain, plain_history = trained([])
    watched, watched_history = trained([GradWatch(check_freq=None, verbose=0)])
    assert all(np.array_equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert plain_history == watched_history
