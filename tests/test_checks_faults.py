"""Who is to blame: faults in places where the culprit is hard to see, and code that differs on purpose."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops
from per_backend import BACKEND, nested, planted, wrong_by

from keras_gradwatch import check_gradients, check_layer
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


class Wrong(layers.Layer):
    """A layer without weights whose backward gives 1.1 × the slope."""

    def call(self, x: Any) -> Any:
        return wrong_by(1.1)(x)


class WrongCell(layers.Layer):
    """A recurrent cell with a wrong backward."""

    state_size = 4

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(name="kernel", shape=(shape[-1], 4))

    def call(self, x: Any, states: Any, training: bool = False) -> Any:
        state = ops.tanh(wrong_by(1.1)(ops.matmul(x, self.kernel)) + states[0])
        return state, [state]


class Composite(layers.Layer):
    """Two right layers with a wrong operation of its own between them."""

    def __init__(self, factor: float = 1.1, **settings: Any) -> None:
        super().__init__(**settings)
        self.first, self.second, self.factor = layers.Dense(4, name="first"), layers.Dense(4, name="second"), factor

    def call(self, x: Any) -> Any:
        return self.second(wrong_by(self.factor)(self.first(x)))


class Penalty(layers.Layer):
    """Adds a loss whose backward is wrong, and passes its input on."""

    def call(self, x: Any) -> Any:
        self.add_loss(ops.mean(ops.square(wrong_by(1.5)(x))))
        return x


class WrongRegularizer(keras.regularizers.Regularizer):
    def __call__(self, weight: Any) -> Any:
        return 0.1 * ops.sum(ops.square(wrong_by(1.3)(ops.convert_to_tensor(weight))))


class OwnLoss(keras.Model):
    """A compute_loss of its own with a wrong backward."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):  # type: ignore[no-untyped-def]
        return ops.mean(ops.square(wrong_by(0.5)(y_pred) - y))


def functional(*parts: Callable[[Any], Any], cls: type[keras.Model] = keras.Model) -> keras.Model:
    inputs = outputs = keras.Input((5,))
    for part in parts:
        outputs = part(outputs)
    model = cls(inputs, outputs)
    model.compile("sgd", "mse")
    return model


def attention() -> keras.Model:
    inputs = keras.Input((6, 8))
    h = layers.LayerNormalization(name="norm")(inputs)
    h = layers.Add()([inputs, layers.MultiHeadAttention(2, 4, name="heads")(h, h)])
    outputs = layers.Dense(2, name="out")(layers.GlobalAveragePooling1D()(Wrong(name="faulty")(h)))
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    return model


def convolutional() -> keras.Model:
    parts = [layers.Conv2D(4, 3, name="before"), layers.BatchNormalization(name="norm"), Wrong(name="faulty")]
    return stack((8, 8, 2), *parts, layers.ReLU(), layers.MaxPooling2D(), layers.Flatten(), layers.Dense(2, name="out"))


PLACES: dict[str, tuple[Callable[[], keras.Model], tuple[int, ...], str, str]] = {
    # model, input shape, layer at fault, part of the names of right tensors
    "in an attention net": (attention, (6, 8), "faulty", "out/"),
    "in a convolutional net": (convolutional, (8, 8, 2), "faulty", "out"),
    "in a Lambda": (
        lambda: stack((5,), layers.Dense(4), layers.Lambda(wrong_by(1.1), name="faulty"), layers.Dense(1, name="out")),
        (5,),
        "faulty",
        "out",
    ),
    "between two layers of a layer": (
        lambda: stack((5,), layers.Dense(4), Composite(name="faulty"), layers.Dense(1, name="out")),
        (5,),
        "faulty",
        "second",
    ),
    "in a cell within a loop": (
        lambda: stack((6, 3), layers.RNN(WrongCell(name="cell"), name="faulty"), layers.Dense(1, name="out")),
        (6, 3),
        "faulty/cell" if BACKEND == "torch" else "faulty",  # torch runs its loops step by step
        "out",
    ),
    "in a cell of an unrolled loop": (
        lambda: stack(
            (6, 3), layers.RNN(WrongCell(name="cell"), unroll=True, name="faulty"), layers.Dense(1, name="out")
        ),
        (6, 3),
        "faulty/cell",
        "out",
    ),
    "in a wrapped layer": (
        lambda: stack(
            (6, 3),
            layers.TimeDistributed(Wrong(name="inner"), name="faulty"),
            layers.Flatten(),
            layers.Dense(1, name="out"),
        ),
        (6, 3),
        "faulty",
        "out",
    ),
    "in a penalty": (
        lambda: stack((5,), layers.Dense(4), Penalty(name="faulty"), layers.Dense(1, name="out")),
        (5,),
        "faulty",
        "out",
    ),
    "in a regulariser": (
        lambda: stack(
            (5,), layers.Dense(4, kernel_regularizer=WrongRegularizer(), name="first"), layers.Dense(1, name="out")
        ),
        (5,),
        "loss",
        "out",
    ),
    "in the loss": (
        lambda: stack((5,), layers.Dense(4), layers.Dense(1), loss=lambda y, p: ops.square(wrong_by(1.1)(p) - y)),
        (5,),
        "loss",
        "nothing",
    ),
    "in a compute_loss": (lambda: functional(layers.Dense(4), layers.Dense(1), cls=OwnLoss), (5,), "loss", "nothing"),
}


@pytest.mark.parametrize("place", PLACES)
def test_the_culprit_is_named(place: str) -> None:
    """One wrong operation, wherever it hides: exactly its layer (or the loss) is named, and what follows is right."""
    build, shape, culprit, right = PLACES[place]
    model = build()
    x = normal(6, *shape)
    report = check_gradients(model, x, normal(*model(x).shape, seed=1))
    assert report.verdict == "mismatch", str(report)
    assert [c.layer for c in report.result.culprits] == [culprit], str(report)
    wrong = report.frame[report.frame.check == "mismatch"].tensor
    assert not any(right in tensor for tensor in wrong), str(report)


def test_two_faults_are_both_named_nearest_the_loss_first() -> None:
    """The second fault does not hide behind the first."""
    parts = [layers.Dense(4), Wrong(name="lower"), layers.Dense(4, activation="tanh"), Wrong(name="upper")]
    report = check_gradients(stack((5,), *parts, layers.Dense(1)), normal(8, 5), normal(8, 1))
    assert [culprit.layer for culprit in report.result.culprits] == ["upper", "lower"]
    assert all(culprit.factor == pytest.approx(1.1, abs=1e-4) for culprit in report.result.culprits)


def test_a_shared_layer_is_named_once() -> None:
    """A faulty layer that is called three times is one culprit."""
    shared = Wrong(name="shared")
    model = functional(layers.Dense(4), shared, layers.Dense(4), shared, layers.Dense(1), shared)
    report = check_gradients(model, normal(8, 5), normal(8, 1))
    assert [culprit.layer for culprit in report.result.culprits] == ["shared"]


class Tied(layers.Layer):
    """Uses the kernel of another layer, and hands it a wrong gradient."""

    def __init__(self, other: layers.Layer, **settings: Any) -> None:
        super().__init__(**settings)
        self._other = [other]

    def call(self, x: Any) -> Any:
        return ops.matmul(x, ops.transpose(wrong_by(1.2)(ops.convert_to_tensor(self._other[0].kernel))))


def test_of_two_readers_of_a_weight_the_wrong_one_is_named() -> None:
    """With a tied weight the fault is in the layer that uses it wrongly, not in the one that owns it."""
    encoder = layers.Dense(4, name="encoder")
    model = functional(encoder, Tied(encoder, name="decoder"))
    report = check_gradients(model, normal(8, 5), normal(8, 5, seed=1))
    assert [culprit.layer for culprit in report.result.culprits] == ["decoder"], str(report)
    assert set(report.frame[report.frame.check == "mismatch"].tensor) == {"encoder/kernel"}


class Late(layers.Layer):
    """Right as long as its weight is positive."""

    def build(self, shape: Any) -> None:
        self.gain = self.add_weight(name="gain", shape=(), initializer="ones")

    def call(self, x: Any) -> Any:
        def backward(upstream: Any, x: Any, gain: Any) -> Any:
            factor = ops.where(gain > 0, ops.ones_like(gain), 1.01 * ops.ones_like(gain))
            return factor * upstream * gain, ops.sum(upstream * x)

        return planted(lambda x, gain: x * gain, backward)(x, ops.convert_to_tensor(self.gain))


def test_a_fault_that_comes_later_is_found_by_the_cheaper_check() -> None:
    """After a healthy first check a fault of one per cent that starts later is found and blamed."""
    model = stack((5,), layers.Dense(4), Late(name="late"), layers.Dense(1))
    checker, batch = Checker(model), arrays_of(Batch(normal(8, 5), normal(8, 1)))
    assert checker.check(batch).verdict == "ok"
    assert checker.check(batch, seed=1).verdict == "ok"
    model.get_layer("late").set_weights([np.array(-1.0)])
    result = checker.check(batch, seed=2)
    assert result.verdict == "mismatch"
    assert [culprit.layer for culprit in result.culprits] == ["late"]
    assert result.culprits[0].factor == pytest.approx(1.01, abs=1e-5)


class HiddenStop(layers.Layer):
    """Straight-through rounding inside a function compiled by itself."""

    def call(self, x: Any) -> Any:
        return nested(lambda x: x + ops.stop_gradient(ops.round(x) - x))(x)


class StoppedCell(WrongCell):
    """A stop_gradient inside a loop."""

    def call(self, x: Any, states: Any, training: bool = False) -> Any:
        state = ops.tanh(ops.matmul(x, self.kernel) + 0.5 * ops.stop_gradient(ops.matmul(x, self.kernel)) + states[0])
        return state, [state]


class Quantizer(layers.Layer):
    """Vector quantisation with a straight-through estimator and its two penalties (van den Oord et al., 2017)."""

    def build(self, shape: Any) -> None:
        self.codes = self.add_weight(name="codes", shape=(8, shape[-1]), initializer="glorot_uniform")

    def call(self, x: Any) -> Any:
        codes = ops.convert_to_tensor(self.codes)
        distances = ops.sum(ops.square(x[:, None, :] - codes[None]), axis=-1)
        nearest = ops.take(codes, ops.argmin(distances, axis=-1), axis=0)
        self.add_loss(ops.mean(ops.square(ops.stop_gradient(nearest) - x)))
        self.add_loss(ops.mean(ops.square(nearest - ops.stop_gradient(x))))
        return x + ops.stop_gradient(nearest - x)


@pytest.mark.parametrize("layer", [HiddenStop(name="own"), Quantizer(name="own")], ids=["nested function", "quantizer"])
def test_stop_gradient_is_honoured(layer: layers.Layer) -> None:
    """What the code holds constant is held constant in the numeric slope too: declared, with the layer's name."""
    model = stack((5,), layers.Dense(4, name="before"), layer, layers.Dense(1, name="after"))
    report = check_gradients(model, normal(8, 5) * 2, normal(8, 1))
    before = report.frame[report.frame.tensor.str.contains("before|input")]
    assert set(before.check) == {"declared"}, str(report)
    assert before.reason.str.contains("own").all()
    assert set(report.frame[report.frame.tensor.str.contains("after")].check) == {"ok"}
    assert report.ok


def test_a_stop_gradient_inside_a_loop_is_no_mismatch() -> None:
    """Held constant where the loop can be seen through; elsewhere it is not called wrong, and not right either."""
    model = stack((6, 3), layers.RNN(StoppedCell(), name="rnn"), layers.Dense(1, name="out"))
    report = check_gradients(model, normal(6, 6, 3), normal(6, 1))
    verdict, reason = ("inconclusive", "inside a loop") if BACKEND == "tensorflow" else ("declared", "stop_gradient")
    assert set(report.frame[report.frame.tensor.str.contains("rnn|input")].check) == {verdict}, str(report)
    assert report.frame.reason.str.contains(reason).sum() == 2
    assert not report.result.culprits


def test_a_wrong_layer_beside_a_right_stop_gradient_is_still_wrong() -> None:
    """A stop_gradient somewhere in the model is no excuse for a fault elsewhere."""
    model = stack(
        (5,), layers.Dense(4), HiddenStop(), layers.Dense(4), Wrong(name="faulty"), layers.Dense(1, name="out")
    )
    report = check_gradients(model, normal(8, 5), normal(8, 1))
    assert [culprit.layer for culprit in report.result.culprits] == ["faulty"]
    assert report.verdict == "mismatch"


def test_nan_of_a_backward_inside_a_nested_model_is_named() -> None:
    """0/0 in the backward of an inner layer: that layer, by its path."""
    root = layers.Lambda(lambda z: ops.sqrt(z * ops.cast(z > 0, z.dtype)), name="root")
    inner = keras.Sequential([keras.Input((4,)), layers.Dense(4), root], name="inner")
    report = check_gradients(stack((5,), layers.Dense(4), inner, layers.Dense(1)), normal(8, 5), normal(8, 1))
    assert report.verdict == "nonfinite"
    assert [(culprit.layer, culprit.kind) for culprit in report.result.culprits] == [("inner/root", "backward")]


def test_a_composite_layer_alone_is_told_from_its_parts() -> None:
    """check_layer blames the layer's own operation, not the right layers inside."""
    report = check_layer(Composite(1.3, name="both"), (6, 5))
    assert report.verdict == "mismatch"
    assert [culprit.layer for culprit in report.result.culprits] == ["both"]
    assert report.result.culprits[0].factor == pytest.approx(1.3, abs=1e-4)
