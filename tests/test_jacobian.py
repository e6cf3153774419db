"""Jacobians of plain functions, against algebra and against what each backend offers of its own."""

from typing import Any

import keras
import numpy as np
import pytest
from keras import ops
from per_backend import nested, only, planted

from keras_gradwatch import compute_gradient, compute_gradient_error

# A float32 gradient against a float64 slope: float32 keeps 7 digits, a few of which a sum of tens of terms costs.
FLOAT32 = 2e-6


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """Standard normal float32 numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def test_sigmoid_neuron() -> None:
    """The gradient of (σ(x·w) − t)² w.r.t. x is 2 (σ − t) σ (1 − σ) w."""
    x, w = normal(1, 3), normal(3, 1, seed=1)
    analytic, numeric = compute_gradient(lambda x: ops.sum((ops.sigmoid(ops.matmul(x, w)) - 0.3) ** 2), [x])
    s = 1 / (1 + np.exp(-(x.astype(float) @ w)))
    exact = (2 * (s - 0.3) * s * (1 - s) * w.T).reshape(1, 3)
    np.testing.assert_allclose(analytic[0], exact, atol=FLOAT32)
    np.testing.assert_allclose(numeric[0], exact, atol=1e-9)  # truncation 1e-12, rounding 1e-10


def test_linear_regression() -> None:
    """The gradients of mean((xw + b − y)²) w.r.t. inputs, weights and bias come out exactly (the loss is quadratic)."""
    x, w, b, y = normal(8, 3), normal(3, 1, seed=1), normal(1, seed=2), normal(8, 1, seed=3)
    analytic, numeric = compute_gradient(
        lambda x, w, b: ops.mean((x @ w + b - ops.convert_to_tensor(y)) ** 2), [x, w, b]
    )
    r = 2 / 8 * (x.astype(float) @ w + b - y)
    exact = [(r @ w.T).reshape(1, -1), (x.T @ r).reshape(1, -1), r.sum().reshape(1, 1)]
    for found, slope, truth in zip(analytic, numeric, exact, strict=True):
        np.testing.assert_allclose(found, truth, atol=FLOAT32)
        np.testing.assert_allclose(slope, truth, atol=1e-8)


def test_wide_relu_network() -> None:
    """All 12,001 weights of a 10-1000-1 ReLU network agree, where float32 differences would be off by per cents."""
    x = normal(4, 10)
    weights = [normal(10, 1000, seed=1), normal(1000, seed=2), normal(1000, 1, seed=3) / 30, normal(1, seed=4)]

    def loss(w1: Any, b1: Any, w2: Any, b2: Any) -> Any:
        return ops.mean((ops.relu(ops.matmul(x, w1) + b1) @ w2 + b2) ** 2)

    analytic, numeric = compute_gradient(loss, weights)
    h = np.maximum(x.astype(float) @ weights[0] + weights[1], 0)
    r = 2 / 4 * (h @ weights[2] + weights[3])
    inner = (r @ weights[2].T) * (h > 0)
    exact = [x.T @ inner, inner.sum(0), h.T @ r, r.sum(0)]
    for found, slope, truth in zip(analytic, numeric, exact, strict=True):
        scale = np.abs(truth).max()
        np.testing.assert_allclose(found.ravel(), truth.ravel(), atol=FLOAT32 * max(1.0, scale))
        np.testing.assert_allclose(slope.ravel(), truth.ravel(), atol=1e-7 * max(1.0, scale))


FUNCTIONS = {
    "elementwise": (lambda x: ops.exp(x) * x, [normal(2, 3)]),
    "two arguments": (lambda x, y: ops.sin(x) @ y, [normal(2, 3), normal(3, 2, seed=1)]),
    "float64": (lambda x: x**3, [normal(4).astype("float64")]),
    "gather": (lambda t: ops.take(t, [0, 0, 2], axis=0), [normal(4, 2)]),
    "complex": (lambda z: z * z * (1 + 2j), [np.array([1 + 2j, 3 - 1j], "complex64")]),
    "real of complex": (lambda z: abs(z), [np.array([1 + 2j, 3 - 1j], "complex64")]),
    "scalar": (lambda x: x * x, [3.0]),
    "empty": (lambda x: x * 2, [np.zeros((0, 3), "float32")]),
    "matrix inverse": (ops.inv, [normal(3, 3) + 3 * np.eye(3, dtype="float32")]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_both_sides_agree(name: str) -> None:
    """Of every kind of function, with the shapes promised: one row per real number of the result."""
    f, x = FUNCTIONS[name]
    analytic, numeric = compute_gradient(f, x)
    for mine, slope, argument in zip(analytic, numeric, x, strict=True):
        assert mine.shape == slope.shape
        assert mine.shape[1] == np.size(argument) * (2 if np.iscomplexobj(argument) else 1)
        if mine.size:
            digits = 5e-6 if name == "matrix inverse" else FLOAT32  # it is a product of three rounded inverses
            assert np.abs(mine - slope).max() <= digits * max(1.0, np.abs(mine).max())


@only("torch", reason="asks torch.autograd.functional.jacobian")
@pytest.mark.parametrize("name", [n for n in FUNCTIONS if "complex" not in n and n != "empty"])
def test_parity_with_torch(name: str) -> None:
    """The analytic values are those of torch.autograd.functional.jacobian."""
    import torch

    f, x = FUNCTIONS[name]
    analytic, _ = compute_gradient(f, x)
    arguments = tuple(torch.tensor(np.float32(value) if np.isscalar(value) else value) for value in x)
    theirs = torch.autograd.functional.jacobian(f, arguments)
    for mine, other, argument in zip(analytic, theirs, arguments, strict=True):
        np.testing.assert_allclose(mine, other.numpy().reshape(-1, argument.numel()), rtol=1e-6, atol=1e-6)


@only("tensorflow", reason="asks tf.test.compute_gradient")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_parity_with_tensorflow(name: str) -> None:
    """Shapes and analytic values are those of tf.test.compute_gradient; the numeric side is at least as close."""
    import tensorflow as tf

    f, x = FUNCTIONS[name]
    analytic, numeric = compute_gradient(f, x)
    theirs, differences = tf.test.compute_gradient(f, x)
    assert [a.shape for a in analytic] == [t.shape for t in theirs]
    assert [n.shape for n in numeric] == [t.shape for t in differences]
    for mine, other, slope, difference in zip(analytic, theirs, numeric, differences, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-6, atol=1e-6)  # both float32 backpropagation
        if mine.size:
            assert np.abs(mine - slope).max() <= np.abs(other - difference).max() + FLOAT32 * np.abs(mine).max()


def test_variables_and_constants_inside_are_widened() -> None:
    """A function that reads a float32 variable and constant is still differenced in float64."""
    w, factor = keras.Variable(normal(3, 2, seed=1)), ops.convert_to_tensor(np.float32(0.7))
    analytic, numeric = compute_gradient(lambda x: ops.tanh(x @ w.value) * factor, [normal(4, 3)])
    assert np.abs(analytic[0] - numeric[0]).max() < 3e-7  # float32 differences: 1e-4


def test_loops_are_followed() -> None:
    """A function with a loop in a function compiled by itself is differenced in float64, too."""

    @nested
    def cubic(x: Any) -> Any:
        return ops.fori_loop(0, 3, lambda i, total: total + x ** ops.cast(i + 1, x.dtype), ops.zeros_like(x))

    x = normal(3)
    analytic, numeric = compute_gradient(cubic, [x])
    exact = np.diag(1 + 2 * x.astype(float) + 3 * x.astype(float) ** 2)
    np.testing.assert_allclose(analytic[0], exact, atol=1e-5)  # pow in float32
    np.testing.assert_allclose(numeric[0], exact, atol=1e-7)


def test_half_precision_is_checked_through_float64() -> None:
    """A float16 gradient is right to its own precision, not to that of float16 differences (9e-2)."""
    assert compute_gradient_error(ops.exp, [np.array([0.5, -1.0, 1.5], "float16")]) < 4e-3  # 4.5 · 2^-10


def test_delta_is_honoured() -> None:
    """With delta = 0.5 the central difference of x³ at 1 is 3 + 0.25, no better."""
    _, numeric = compute_gradient(lambda x: x**3, [np.float32([1.0])], delta=0.5)
    np.testing.assert_allclose(numeric[0], [[3.25]], atol=1e-12)


def test_keras_weights_as_arguments() -> None:
    """A model's weights, passed as values to stateless_call, agree in every entry."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
    x = normal(4, 5)
    error = compute_gradient_error(
        lambda *w: ops.mean(model.stateless_call(list(w), [], x)[0] ** 2), list(model.trainable_variables)
    )
    assert error < FLOAT32


def test_pytrees_of_arguments() -> None:
    """Dicts and lists of arrays come back in their own form; a nested list of plain numbers is one array."""
    tree = {"w": normal(3, 4), "more": [normal(4, seed=1)]}
    analytic, numeric = compute_gradient(
        lambda tree, x: ops.matmul(ops.matmul(x, tree["w"]), tree["more"][0]), [tree, [[1.0, 2.0, 3.0]]]
    )
    x = np.array([[1.0, 2.0, 3.0]])
    exact = [
        {"w": np.outer(x, tree["more"][0]).reshape(1, -1), "more": [(x @ tree["w"]).reshape(1, -1)]},
        (tree["w"] @ tree["more"][0]).reshape(1, -1),
    ]
    keras.tree.assert_same_structure(analytic, exact)
    for found in (analytic, numeric):
        for one, truth in zip(keras.tree.flatten(found), keras.tree.flatten(exact), strict=True):
            np.testing.assert_allclose(one, truth, atol=1e-5)


def test_error_bars_hold() -> None:
    """The distance of either side to the exact derivative is within the bar, which at a kink spans both slopes."""
    x = np.array([0.0, 0.7, -1.3, 20.0], "float32")
    exact = [np.cos(x.astype(float)) * np.exp(x / 10.0) + np.sin(x.astype(float)) * np.exp(x / 10.0) / 10]
    analytic, numeric, bars = compute_gradient(lambda x: ops.sin(x) * ops.exp(x / 10), [x], error_bars=True)
    for found in (analytic[0], numeric[0]):
        assert (np.abs(np.diag(found) - exact[0]) <= np.diag(bars[0])).all()
    assert bars[0].max() < 1e-4
    analytic, numeric, bars = compute_gradient(ops.relu, [x], error_bars=True)
    assert numeric[0][0, 0] == pytest.approx(0.5)
    assert bars[0][0, 0] == pytest.approx(0.5, abs=1e-4)
    assert bars[0][1, 1] < 1e-4


def test_second_order() -> None:
    """order=2 gives the Hessian of Σ x³y on both sides, and a wrong second derivative shows."""
    x, y = np.float32([1.0, 2.0]), np.float32([3.0, 4.0])
    exact = np.array([[18, 0, 3, 0], [0, 48, 0, 12], [3, 0, 0, 0], [0, 12, 0, 0]], float)
    for found in compute_gradient(lambda x, y: ops.sum(x**3 * y), [x, y], order=2):
        np.testing.assert_allclose(np.concatenate(found, axis=1), exact, atol=2e-5)
    half = planted(lambda x: x**2, lambda upstream, x: [upstream * (x + ops.stop_gradient(x))])
    analytic, numeric = compute_gradient(lambda x: ops.sum(half(x)), [x], order=2)
    np.testing.assert_allclose(analytic[0], np.eye(2), atol=1e-6)
    np.testing.assert_allclose(numeric[0], 2 * np.eye(2), atol=1e-6)


@pytest.mark.parametrize("order", [1, 2])
def test_projections_see_a_fault_among_a_million(order: int) -> None:
    """A million weights cost a few calls: right within the bars, and 10 % too much seen as that."""
    x = normal(1_000_000)
    right = lambda x: ops.sum(ops.tanh(x) * x)  # noqa: E731
    analytic, numeric, bars = compute_gradient(right, [x], projections=3, order=order, error_bars=True)
    assert analytic[0].shape == (1 if order == 1 else 3, 3)
    assert (np.abs(analytic[0] - numeric[0]) <= bars[0]).all()
    assert bars[0].max() < 1e-2 * np.abs(numeric[0]).max()
    wrong = planted(lambda x: ops.tanh(x) * x, lambda up, x: [1.1 * up * (ops.tanh(x) + x * (1 - ops.tanh(x) ** 2))])
    analytic, numeric = compute_gradient(lambda x: ops.sum(wrong(x)), [x], projections=3)
    np.testing.assert_allclose(analytic[0] / numeric[0], 1.1, rtol=1e-3)


def test_projections_of_complex_numbers() -> None:
    """Directions through a complex array move its real and imaginary parts."""
    z = np.array([1 + 2j, 3 - 1j, -2 + 0.5j], "complex64")
    analytic, numeric = compute_gradient(lambda z: ops.sum(abs(z * z)), [z], projections=4)
    assert analytic[0].shape == (1, 4)
    np.testing.assert_allclose(analytic[0], numeric[0], rtol=1e-5)


@only("tensorflow", reason="asks tf.test.compute_gradient")
@pytest.mark.parametrize("dtype", ["complex64", "complex128", "float32", "float64", "float16"])
def test_parity_of_dtypes_with_tensorflow(dtype: str) -> None:
    """Complex to complex, complex to real and real to complex come out as tf.test.compute_gradient gives them."""
    import tensorflow as tf

    x = np.array([0.5 + 0.25j, -1.5 + 1j] if "complex" in dtype else [0.5, -1.5]).astype(dtype)
    real = {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)
    functions = [tf.square, tf.exp, tf.abs]
    if "complex" in dtype:
        functions += [tf.math.real, tf.math.imag, tf.math.conj, tf.math.angle, lambda z: z * tf.math.conj(z)]
    elif dtype in ("float32", "float64"):
        functions += [lambda v: tf.complex(v, v * v), lambda v: tf.signal.fft(tf.complex(v, v))]
    # The peer differences in the dtype itself, ours not.
    peer = {"float16": 0.05, "float32": 2e-3, "float64": 1e-5}[real]
    for f in functions:
        analytic, numeric = compute_gradient(f, [x])
        theirs, differences = tf.test.compute_gradient(f, [x], delta=1 / 64 if dtype == "float16" else None)
        np.testing.assert_allclose(analytic[0], theirs[0], rtol=1e-3 if dtype == "float16" else 1e-5, atol=1e-6)
        np.testing.assert_allclose(numeric[0], differences[0], rtol=peer, atol=peer)


def test_planted_fault_is_seen() -> None:
    """A custom gradient that is 10 % too large shows as exactly that."""
    squared = planted(lambda x: x * x, lambda upstream, x: [upstream * 2.2 * x])
    analytic, numeric = compute_gradient(squared, [np.float32([1.0, 2.0])])
    np.testing.assert_allclose(np.diag(analytic[0]) / np.diag(numeric[0]), [1.1, 1.1], atol=1e-6)


def test_stop_gradient_shows() -> None:
    """A gradient of zero where the function moves is a difference, not a pass."""
    assert compute_gradient_error(lambda x: x + ops.stop_gradient(x), [np.float32([1.0])]) == pytest.approx(
        1.0, abs=1e-6
    )


def test_an_ignored_argument_is_refused() -> None:
    """A function that does not use an argument is not passed as 0 = 0."""
    with pytest.raises(ValueError, match="does not depend on its argument 1"):
        compute_gradient(lambda x, y: x * 2, [np.float32([1.0]), np.float32([1.0])])


def test_a_closure_over_variables_is_refused() -> None:
    """A function that reads the variables from outside instead of taking them is told what to do."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    x = normal(4, 5)
    with pytest.raises(ValueError, match="pass their values as arguments"):
        compute_gradient(lambda *ignored: ops.sum(model(x)), model.trainable_variables)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: compute_gradient(ops.exp, np.ones(3)), ValueError, "list or tuple"),
        (lambda: compute_gradient(ops.exp, [np.ones(3, int)]), TypeError, "integers have no gradient"),
        (lambda: compute_gradient(ops.exp, [np.ones(3)], delta=-1.0), ValueError, "positive step"),
        (lambda: compute_gradient(lambda x: ops.argmax(x), [np.float32([1, 2])]), TypeError, "float or complex tensor"),
        (lambda: compute_gradient(ops.sum, [np.ones(300_000)]), ValueError, "Pass projections=8"),
        (lambda: compute_gradient(ops.exp, [np.ones(20_000)]), ValueError, "Pass projections=8"),
        (lambda: compute_gradient(ops.exp, [np.ones(3)], projections=0), ValueError, "number of directions"),
        (lambda: compute_gradient(ops.exp, [np.ones(3)], order=3), ValueError, "Expected 1 for the gradient or 2"),
        (lambda: compute_gradient(ops.exp, [np.ones(3)], order=2), ValueError, "Expected a single number"),
        (lambda: compute_gradient(ops.exp, [{"a": np.ones(3, int)}]), TypeError, r"Argument 0\['a'\] has dtype int"),
    ],
)
def test_bad_arguments(call, error, words) -> None:
    """Bad arguments say what came in and what to do."""
    with pytest.raises(error, match=words):
        call()
