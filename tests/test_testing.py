"""``assert_gradients``: what is right passes, what is wrong fails with a table that names tensor and entry."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from per_backend import planted

from keras_gradwatch.testing import assert_gradients

HEADINGS = ["tensor", "along", "analytic", "numeric", "error", "bar", "delta", "dtype"]


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """Standard normal float32 numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


class Table(layers.Layer):
    """``x @ w`` with one entry of w's gradient doubled."""

    def __init__(self, factor: float, **settings):
        super().__init__(**settings)
        self._mask = np.ones((12, 16), "float32")
        self._mask[3, 5] = factor

    def build(self, shape):
        self.w = self.add_weight(name="w", shape=(shape[-1], 16))

    def call(self, inputs):
        def backward(upstream, x, w):
            to_w = ops.matmul(ops.transpose(x), upstream)
            return [ops.matmul(upstream, ops.transpose(w)), to_w * ops.cast(self._mask, to_w.dtype)]

        return planted(ops.matmul, backward)(inputs, ops.convert_to_tensor(self.w))


def rows(error: pytest.ExceptionInfo) -> list[list[str]]:
    """The cells of the table of slopes."""
    lines = str(error.value).splitlines()
    start = next(i for i, line in enumerate(lines) if line.split() == HEADINGS)
    return [line.split() for line in lines[start + 1 :]]


@pytest.mark.parametrize(
    "x", [normal(8, 12), (8, 12), keras.InputSpec(shape=(None, 12)), keras.KerasTensor((None, 12))]
)
def test_a_right_layer_passes(x) -> None:
    """From an array, a shape, a spec or a symbolic tensor."""
    assert_gradients(Table(1.0), x)


def test_a_wrong_entry_is_named() -> None:
    """The failure names the layer, the weight and the entry, with both slopes in aligned columns."""
    with pytest.raises(AssertionError, match=r"broken \(Table\)") as error:
        assert_gradients(Table(2.0, name="broken"), normal(8, 12))
    last = str(error.value).splitlines()[-1].replace("[3, 5]", "[3,5]").split()
    assert last[:2] == ["broken/w", "[3,5]"]
    assert float(last[2]) == pytest.approx(2 * float(last[3]), rel=1e-3)
    assert last[7] == "float64"
    lines = str(error.value).splitlines()
    assert len({len(line) for line in lines[-4:]}) <= 2  # aligned, but for the last column's blanks


def test_a_compiled_model_is_checked_by_its_loss() -> None:
    """With targets the loss counts: a wrong loss fails, a right one passes."""

    def broken(y, p):
        return planted(lambda a: ops.sum(a * a), lambda up, a: [up * 2.2 * a])(y - p)

    for loss, right in (("mse", True), (broken, False)):
        model = keras.Sequential([keras.Input((5,)), layers.Dense(3, "tanh"), layers.Dense(1)])
        model.compile("sgd", loss)
        if right:
            assert_gradients(model, normal(8, 5), normal(8, 1))
        else:
            with pytest.raises(AssertionError, match=r"loss: its backward gives 1\.10 × the true slope"):
                assert_gradients(model, normal(8, 5), normal(8, 1))
            assert_gradients(model, normal(8, 5))  # without targets its output is what is checked


FUNCTIONS = {
    "smooth": (ops.tanh, normal(3, 4)),
    "kink at zero": (ops.relu, np.float32([0.0, 1.0, -1.0])),
    "arguments": (lambda a, b: ops.matmul(a, b["w"]), (normal(2, 3), {"w": normal(3, 2)})),
    "float16": (ops.exp, np.float16([0.5, 1.0])),
    "large": (lambda x: ops.mean(ops.sin(x)), normal(250, 1000)),
    "large result": (ops.sin, normal(100, 1000)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_right_functions_pass(name: str) -> None:
    """Smooth ones, kinks, pytrees, small dtypes, and those too large for a full Jacobian."""
    assert_gradients(*FUNCTIONS[name])


@pytest.mark.parametrize("size", [3, 250_000])
def test_a_wrong_function_fails(size: int) -> None:
    """The table has a line per wrong entry, or per direction of a large argument."""
    squared = planted(lambda x: x * x, lambda upstream, x: [upstream * 2.2 * x])
    with pytest.raises(AssertionError, match="are wrong in") as error:
        assert_gradients(lambda x: ops.sum(squared(x)), normal(size))
    row = rows(error)[0]
    assert row[0] == "argument"
    assert float(row[4]) == pytest.approx(1.1 * float(row[5]), rel=1e-3)
    assert row[-1] == "float32"


def test_a_slope_outside_of_a_kink_fails() -> None:
    """At a kink the gradient must lie between the left and the right slope."""
    lost = planted(ops.relu, lambda upstream, x: [upstream * ops.where(x == 0, -0.5, ops.cast(x > 0, x.dtype))])
    with pytest.raises(AssertionError, match=r"wrong in 1 entries"):
        assert_gradients(lost, np.float32([0.0, 1.0, -1.0]))


def test_nan_fails() -> None:
    """A gradient that is NaN is named, not passed over."""
    with pytest.raises(AssertionError, match="nan"):
        assert_gradients(lambda x: ops.sqrt(0.0 * x), np.float32([-1.0, 1.0]))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: assert_gradients(3, normal(2)), TypeError, "type int. Expected a keras.Layer"),
        (lambda: assert_gradients(ops.tanh, normal(2), normal(2)), ValueError, "with a plain function"),
        (lambda: assert_gradients(layers.ReLU(), normal(2, 2), delta=0.1), ValueError, "steps of their own"),
        (lambda: assert_gradients(layers.ReLU(), normal(2, 2), normal(2, 2)), ValueError, "not a compiled model"),
    ],
)
def test_bad_arguments(call, error, words) -> None:
    """Bad arguments say what came in and what to do."""
    with pytest.raises(error, match=words):
        call()
