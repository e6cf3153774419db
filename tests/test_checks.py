"""``check_gradients`` and ``check_layer`` on real models: healthy ones pass, planted faults are caught and named."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops
from per_backend import BACKEND, array, dtype_name, only, planted
from sklearn.datasets import load_digits

from keras_gradwatch import GradientCheckError, check_gradients, check_layer

SEED = 3


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """Standard normal float32 numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    keras.utils.set_random_seed(SEED)


def compiled(model: keras.Model, loss: Any = "mse", **settings: Any) -> keras.Model:
    model.compile("sgd", loss, **settings)
    return model


def stack(shape: tuple[int, ...], *parts: layers.Layer, loss: Any = "mse", **settings: Any) -> keras.Model:
    return compiled(keras.Sequential([keras.Input(shape), *parts]), loss, **settings)


# -- healthy models ----------------------------------------------------------------------------------------------------


def mlp(activation: str = "tanh", loss: Any = "mse", **dtype: Any) -> Any:
    middle = [layers.Dense(16, activation=activation, **dtype), layers.Dense(8, activation=activation, **dtype)]
    return stack((5,), *middle, layers.Dense(1, **dtype), loss=loss), normal(8, 5), normal(8, 1, seed=1)


def convolutional() -> Any:
    parts = [
        layers.Conv2D(8, 3, padding="same"), layers.BatchNormalization(), layers.ReLU(), layers.MaxPooling2D(),
        layers.DepthwiseConv2D(3), layers.Conv2D(6, 2, activation="relu"), layers.GlobalAveragePooling2D(),
        layers.Dropout(0.3), layers.Dense(4, activation="softmax"),
    ]  # fmt: skip
    model = stack((8, 8, 3), *parts, loss="sparse_categorical_crossentropy")
    return model, normal(8, 8, 8, 3), np.arange(8) % 4


def recurrent(cell: type[layers.Layer]) -> Any:
    parts = [layers.Embedding(12, 6, mask_zero=True), cell(7, dropout=0.2), layers.Dense(1, activation="sigmoid")]
    tokens = np.random.default_rng(0).integers(1, 12, (8, 6))
    tokens[:, 4:] = 0
    return stack((6,), *parts, loss="binary_crossentropy"), tokens, (np.arange(8) % 2).astype("float32")[:, None]


def attention() -> Any:
    inputs = keras.Input((6, 8))
    h = layers.LayerNormalization()(inputs)
    h = layers.Add()([inputs, layers.MultiHeadAttention(2, 4)(h, h)])
    h = layers.Add()([h, layers.Dense(8)(layers.Dense(16, activation="gelu")(layers.LayerNormalization()(h)))])
    model = compiled(keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling1D()(h))))
    return model, normal(8, 6, 8), normal(8, 2, seed=1)


def siamese() -> Any:
    encoder = keras.Sequential([keras.Input((5,)), layers.Dense(6, activation="tanh"), layers.Dense(4)], name="encoder")
    a, b = keras.Input((5,)), keras.Input((5,))
    model = compiled(keras.Model([a, b], layers.Dense(1)(layers.Subtract()([encoder(a), encoder(b)]))))
    return model, [normal(8, 5), normal(8, 5, seed=2)], normal(8, 1, seed=1)


class Subclassed(keras.Model):
    """No get_config, a loss of its own through add_loss, and a regulariser."""

    def __init__(self) -> None:
        super().__init__()
        self.first = layers.Dense(6, activation="elu", kernel_regularizer=keras.regularizers.L2(0.1))
        self.last = layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        hidden = self.first(inputs)
        self.add_loss(0.1 * ops.mean(ops.square(hidden)))
        return self.last(hidden)


def two_by_two() -> Any:
    a, b = keras.Input((4,), name="a"), keras.Input((3,), name="b")
    h = layers.Concatenate()([layers.Dense(4, activation="tanh")(a), b])
    outputs = {"value": layers.Dense(1, name="value")(h), "kind": layers.Dense(3, activation="softmax", name="kind")(h)}
    model = keras.Model({"a": a, "b": b}, outputs)
    compiled(
        model, {"value": "mae", "kind": "sparse_categorical_crossentropy"}, loss_weights={"value": 2.0, "kind": 0.5}
    )
    return model, {"a": normal(8, 4), "b": normal(8, 3)}, {"value": normal(8, 1, seed=4), "kind": np.arange(8) % 3}


def converged() -> Any:
    model = stack((2,), layers.Dense(1, name="out"))
    model.get_layer("out").set_weights([np.array([[1.5], [-2.0]]), np.array([0.5])])
    x = normal(16, 2)
    return model, x, (x @ np.array([[1.5], [-2.0]]) + 0.5).astype("float32")


HEALTHY: dict[str, Callable[[], Any]] = {
    "tanh": mlp,
    "relu": lambda: mlp("relu"),
    "leaky": lambda: mlp("leaky_relu"),
    "mean absolute error": lambda: mlp("tanh", "mae"),
    "hinge": lambda: mlp("tanh", "hinge"),
    "loss near 1e7": lambda: mlp("tanh", lambda y, p: ops.sum(ops.square(y - p)) + 1e7),
    "loss × 1e-8": lambda: mlp("tanh", lambda y, p: 1e-8 * ops.mean(ops.square(y - p))),
    "mixed_float16": lambda: mlp("tanh", dtype="mixed_float16"),
    "mixed_bfloat16": lambda: mlp("tanh", dtype="mixed_bfloat16"),
    "float64": lambda: mlp("tanh", dtype="float64"),
    "convolutional": convolutional,
    "LSTM with mask": lambda: recurrent(layers.LSTM),
    "GRU with mask": lambda: recurrent(layers.GRU),
    "attention": attention,
    "siamese": siamese,
    "subclassed, add_loss, regulariser": lambda: (compiled(Subclassed()), normal(8, 5), normal(8, 1, seed=1)),
    "two inputs, two outputs": two_by_two,
    "converged": converged,
}

#: Gradients that are zero by mathematics: of a bias before normalisation or a difference, of the key bias of attention;
#: of a bias behind which as many samples are too high as too low.
ZERO = {
    "convolutional": "/bias", "attention": "key/bias", "siamese": "/bias", "mean absolute error": "/bias",
    "two inputs, two outputs": "value/bias",
}  # fmt: skip
if BACKEND == "jax":
    del HEALTHY["float64"]  # JAX has no float64 unless all of the program is switched to it


def state_of(model: keras.Model) -> list[np.ndarray]:
    return [array(v) for v in model.variables]


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_model_is_certified_and_unchanged(name: str) -> None:
    """Every tensor and input of a correct model is ``ok`` to 1e-6, and nothing in the model moves."""
    model, x, y = HEALTHY[name]()
    model.build(None) if not model.built and isinstance(model, keras.Sequential) else None
    if not model.built:
        model(x)
    before, dtypes = state_of(model), [v.dtype for v in model.variables]
    report = check_gradients(model, x, y)
    frame = report.frame
    zero = frame[frame.check == "zero"].tensor.tolist()
    assert all(ZERO.get(name, "nothing") in tensor for tensor in zero)
    assert set(frame.check) <= {"ok", "zero"}, str(report)
    assert report.ok, str(report)
    assert frame[frame.check == "ok"].check_error.max() <= 1e-6
    assert frame[frame.check == "ok"].check_bar.max() <= 1e-2  # each could have shown an error of one per cent
    assert [v.dtype for v in model.variables] == dtypes
    for old, new in zip(before, state_of(model), strict=True):
        np.testing.assert_array_equal(old, new)
    assert keras.config.floatx() == "float32"


def test_blank_pixels_at_zero_biases_raise_no_alarm() -> None:
    """Blank patches put ReLU exactly at its kink: that is said, and is no fault."""
    x = load_digits().images[:8, ..., None].astype("float32") / 16
    parts = [layers.Conv2D(6, 3, activation="relu"), layers.MaxPooling2D(), layers.Flatten(), layers.Dense(10)]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    report = check_gradients(stack((8, 8, 1), *parts, loss=loss), x, load_digits().target[:8])
    assert report.ok, str(report)
    assert set(report.frame.check) <= {"ok", "kink"}


def test_sample_weights_are_part_of_the_loss() -> None:
    """With all sample weights zero every gradient is zero, as asked for."""
    model, x, y = mlp()
    assert check_gradients(model, x, y, np.zeros(8)).verdict == "zero"
    assert check_gradients(model, x, y, np.linspace(0, 2, 8)).verdict == "ok"


# -- planted faults ----------------------------------------------------------------------------------------------------


class Square(layers.Layer):
    """x² without weights; its backward is given a wrong factor."""

    def __init__(self, backward: Callable[..., Any], **settings: Any) -> None:
        super().__init__(**settings)
        self.operation = planted(ops.square, backward)

    def call(self, x: Any) -> Any:
        return self.operation(x)


class Product(layers.Layer):
    """x @ kernel + bias; the backward of all three is hand-written."""

    def __init__(self, units: int, backward: Callable[..., Any], **settings: Any) -> None:
        super().__init__(**settings)
        self.units = units
        self.operation = planted(lambda x, kernel, bias: ops.matmul(x, kernel) + bias, backward)

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(name="kernel", shape=(shape[-1], self.units))
        self.bias = self.add_weight(name="bias", shape=(self.units,), initializer="zeros")

    def call(self, x: Any) -> Any:
        return self.operation(x, ops.convert_to_tensor(self.kernel), ops.convert_to_tensor(self.bias))


def right(upstream: Any, x: Any, kernel: Any, bias: Any) -> list[Any]:
    dx = ops.matmul(upstream, ops.transpose(kernel))
    return [dx, ops.matmul(ops.transpose(x), upstream), ops.sum(upstream, axis=0)]


def spoiled(position: int, change: Callable[[Any], Any]) -> Callable[..., Any]:
    def backward(upstream: Any, *inputs: Any) -> list[Any]:
        found = right(upstream, *inputs)
        found[position] = change(found[position])
        return found

    return backward


def one_entry(gradient: Any) -> Any:
    mask = np.ones(gradient.shape)
    mask[3, 2] = 2.0
    return gradient * ops.cast(mask, gradient.dtype)


def one_per_cent_of_one(gradient: Any) -> Any:
    factors = np.ones(gradient.shape)
    factors[5] = 1.01
    return gradient * ops.cast(factors, gradient.dtype)


# What is wrong, in which of (input, kernel, bias), and the factor where one number describes it.
FAULTS: dict[str, tuple[Callable[..., Any], tuple[int, ...], float | None]] = {
    "input × 1.1": (spoiled(0, lambda g: 1.1 * g), (0,), 1.1),
    "input × 1.01": (spoiled(0, lambda g: 1.01 * g), (0,), 1.01),
    "sign of the input": (spoiled(0, lambda g: -g), (0,), -1.0),
    "zero input gradient": (spoiled(0, lambda g: 0.0 * g), (0,), 0.0),
    "kernel × 1.01": (spoiled(1, lambda g: 1.01 * g), (1,), 1.01),
    "rows of the kernel rolled": (spoiled(1, lambda g: ops.roll(g, 1, axis=0)), (1,), None),
    "one entry of the kernel doubled": (spoiled(1, one_entry), (1,), None),
    "bias: first sample only": (lambda u, *xs: [*right(u, *xs)[:2], u[0]], (2,), None),
    "bias: mean over the batch": (lambda u, *xs: [*right(u, *xs)[:2], ops.mean(u, axis=0)], (2,), 1 / 8),
    "one per cent in one bias": (spoiled(2, one_per_cent_of_one), (2,), None),
    "bias zero": (spoiled(2, lambda g: 0.0 * g), (2,), 0.0),
    "transposed kernel": (lambda u, x, k, b: [ops.matmul(u, k), *right(u, x, k, b)[1:]], (0,), None),
}


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_layer_is_blamed_on_it(fault: str, activation: str) -> None:
    """A wrong gradient in the middle of a net: the right tensors, the right layer, the right part, the right factor."""
    backward, places, factor = FAULTS[fault]
    parts = [layers.Dense(8, activation=activation, name="before"), Product(8, backward, name="faulty")]
    model = stack((5,), *parts, layers.Activation(activation), layers.Dense(1, name="after"))
    report = check_gradients(model, normal(8, 5), normal(8, 1, seed=1))
    checks = dict(zip(report.frame.tensor, report.frame.check, strict=True))
    wrong = {tensor for tensor, check in checks.items() if check == "mismatch"}
    expected = {t for t in checks if ("before" in t or t == "input") and 0 in places}
    expected |= {t for t in checks if ("faulty/kernel" in t and 1 in places) or ("faulty/bias" in t and 2 in places)}
    assert wrong == expected, str(report)
    assert all(check == "ok" for tensor, check in checks.items() if tensor not in wrong), str(report)
    (culprit,) = report.result.culprits
    assert (culprit.layer, culprit.layer_class) == ("faulty", "Product")
    names = ("input", "kernel", "bias")
    assert len(culprit.parts) == len(places)
    assert all(part.endswith(names[place]) for part, place in zip(culprit.parts, places, strict=True))
    if factor is not None:
        assert culprit.factor == pytest.approx(factor, abs=1e-5)
    with pytest.raises(GradientCheckError, match="faulty"):
        report.raise_if_failed()


def test_a_layer_without_weights_inside_a_nested_model_is_named() -> None:
    """The culprit may have no weights and sit inside a submodel: it is named by its path."""
    wrong = Square(lambda u, x: [2.2 * u * x], name="square")
    inner = keras.Sequential([keras.Input((4,)), layers.Dense(4, name="dense"), wrong], name="inner")
    model = stack((5,), layers.Dense(4, name="before"), inner, layers.Dense(1, name="after"))
    report = check_gradients(model, normal(8, 5), normal(8, 1, seed=1))
    (culprit,) = report.result.culprits
    assert culprit.layer == "inner/square"
    assert culprit.factor == pytest.approx(1.1, abs=1e-5)


def test_a_faulty_loss_is_named() -> None:
    """A wrong gradient of the loss makes every tensor wrong, and the loss is blamed, not a layer."""
    bce = planted(
        lambda y, z: ops.softplus(z) - y * z, lambda u, y, z: [ops.zeros_like(y), u * y * (ops.sigmoid(z) - 1.0)]
    )
    model = stack((3,), layers.Dense(1, name="logit"), loss=lambda y, p: ops.mean(bce(ops.cast(y, p.dtype), p)))
    x = normal(16, 3)
    report = check_gradients(model, x, (x[:, :1] > 0).astype("float32"))
    assert [culprit.layer for culprit in report.result.culprits] == ["loss"]
    assert set(report.frame.check) == {"mismatch"}


def test_a_named_surrogate_is_declared() -> None:
    """A gradient reversal named in ``surrogates`` is declared, by name or by path."""
    model = stack((5,), layers.Dense(4), Square(lambda u, x: [-0.7 * u * x], name="reversal"), layers.Dense(1))
    x, y = normal(8, 5), normal(8, 1, seed=1)
    assert check_gradients(model, x, y).verdict == "mismatch"
    report = check_gradients(model, x, y, surrogates=("reversal",))
    assert report.ok
    assert report.verdict == "declared"


# -- stop_gradient, float32, disconnected, non-finite ------------------------------------------------------------------


def test_straight_through_is_declared() -> None:
    """Rounding with z + stop_gradient(round(z) − z) differs on purpose, and the layer that says so is named."""
    rounding = layers.Lambda(lambda z: z + ops.stop_gradient(ops.round(z) - z), name="rounding")
    report = check_gradients(stack((3,), layers.Dense(3), rounding, layers.Dense(1)), normal(8, 3), normal(8, 1))
    assert report.ok
    declared = report.frame[report.frame.check == "declared"]
    assert len(declared) == 3  # kernel, bias, input
    assert declared.reason.str.contains("rounding").all()


def test_a_stopped_branch_is_disconnected_not_wrong() -> None:
    """What stop_gradient cuts off is told as such, with the place."""
    inputs = keras.Input((3,))
    target = layers.Lambda(ops.stop_gradient, name="stop")(layers.Dense(2, name="target")(inputs))
    model = compiled(keras.Model(inputs, layers.Subtract()([layers.Dense(2, name="online")(inputs), target])))
    frame = check_gradients(model, normal(8, 3), np.zeros((8, 2), "float32")).frame
    cut = frame[frame.check == "disconnected"]
    assert cut.tensor.str.contains("target").all()
    assert len(cut) == 2
    assert cut.reason.str.contains("stop_gradient in layer stop").all()


def test_spectral_normalisation_is_no_mismatch() -> None:
    """SpectralNormalization stops the gradient through its estimate, inside a loop: never called wrong."""
    model = stack((4,), layers.SpectralNormalization(layers.Dense(4)), layers.Dense(1))
    report = check_gradients(model, normal(8, 4), normal(8, 1))
    assert set(report.frame.check) <= {"ok", "declared", "inconclusive"}, str(report)


def test_a_float32_cast_is_found_and_named() -> None:
    """A hard cast to float32 makes the tensors before it inconclusive, with operation and layer, never ok."""
    leak = layers.Lambda(lambda z: ops.cast(ops.cast(z, "float32"), z.dtype), name="leak")
    model = stack((4,), layers.Dense(4, name="before"), leak, layers.Dense(1, name="after"))
    frame = check_gradients(model, normal(8, 4), normal(8, 1)).frame
    before = frame[(frame.layer == "before") | (frame.role == "input")]
    assert set(before.check) == {"inconclusive"}
    assert before.reason.str.contains("cast", case=False).all()
    assert before.reason.str.contains("leak").all()
    assert set(frame[frame.layer == "after"].check) == {"ok"}


@only("tensorflow", "torch", reason="JAX multiplies matrices of any dtypes")
def test_a_model_that_cannot_run_in_float64_says_why() -> None:
    """A float32 constant that float64 cannot meet gives a reason and no verdict."""
    constant = ops.convert_to_tensor(normal(4, 4))
    model = stack((4,), layers.Dense(4), layers.Lambda(lambda z: z @ constant), layers.Dense(1))
    report = check_gradients(model, normal(8, 4), normal(8, 1))
    assert report.verdict == "inconclusive"
    assert not report.ok
    assert report.frame.reason.str.contains("float64").all()


def test_nan_data_are_told_from_nan_of_a_layer() -> None:
    """A NaN in the data names the row; a NaN that a layer makes names the layer."""
    model, x, y = mlp()
    x = x.copy()
    x[5, 1] = np.nan
    (culprit,) = check_gradients(model, x, y).result.culprits
    assert (culprit.layer, culprit.parts) == ("data", ("input",))
    assert "row 5" in culprit.detail
    log = layers.Lambda(lambda z: ops.log(ops.relu(z)), name="log")
    report = check_gradients(stack((5,), layers.Dense(4), log, layers.Dense(1)), normal(8, 5), normal(8, 1))
    assert report.verdict == "nonfinite"
    assert report.result.culprits[0].layer == "log"
    assert report.result.culprits[0].kind == "forward"


def test_a_backward_pass_that_makes_nan_is_named() -> None:
    """sqrt at exactly zero has a finite value and an infinite slope: the layer is named, what follows it is ok."""
    root = layers.Lambda(lambda z: ops.sqrt(ops.square(z - z)), name="root")
    model = stack((5,), layers.Dense(6, name="before"), root, layers.Dense(1, name="after"))
    report = check_gradients(model, normal(8, 5), normal(8, 1))
    assert report.result.culprits[0].layer == "root"
    assert report.result.culprits[0].kind == "backward"
    assert set(report.frame[report.frame.layer == "after"].check) == {"ok", "zero"}  # its kernel is fed zeros


@only("tensorflow", reason="XLA is a choice there")
@pytest.mark.parametrize("jit_compile", [False, True])
def test_eager_against_xla_is_told(jit_compile: bool) -> None:
    """The gradient of sqrt(relu(x)) is NaN in graph mode and finite under XLA: the reason says so, and what trains."""
    root = layers.Lambda(lambda x: ops.sqrt(ops.relu(x)), name="root")
    model = stack((5,), layers.Dense(6), root, layers.Dense(1), jit_compile=jit_compile)
    report = check_gradients(model, normal(8, 5), normal(8, 1, seed=1))
    assert report.verdict == "nonfinite"
    words = f"NaN or Inf without jit_compile.*with it; this model trains {'with' if jit_compile else 'without'}$"
    assert report.frame.reason.str.contains(words).sum() == 3  # what lies before the root
    assert report.result.culprits[0].layer == "root"


def test_overflow_has_its_figures() -> None:
    """A float16 gradient beyond 65,504 overflows, and the reason says in how many entries."""
    model = stack((5,), layers.Dense(1, dtype="float16"), loss=lambda y, p: 1e6 * ops.mean(p - y))
    report = check_gradients(model, normal(8, 5), normal(8, 1))
    assert report.frame.reason.str.contains("overflow: .* entries are NaN or Inf in float16 training").any()


def test_unused_weights_name_the_layer_and_why() -> None:
    """A weight that the loss does not reach has a culprit: its layer, not called, unused, or reading a constant."""

    class Frozen(layers.Layer):
        def build(self, shape: Any) -> None:
            self.w = self.add_weight(name="w", shape=(shape[-1], 2))
            self.kernel = array(self.w)

        def call(self, x: Any) -> Any:
            return ops.matmul(x, ops.cast(self.kernel, x.dtype))

        def compute_output_shape(self, shape: Any) -> Any:
            return (shape[0], 2)

    class Pooled(layers.Layer):
        def __init__(self) -> None:
            super().__init__(name="pooled")
            self.spare = layers.Dense(2, name="spare")

        def call(self, x: Any) -> Any:
            self.spare(x)
            return x * 1

    for layer, place, why in (
        (Frozen(name="frozen"), "frozen", "reads none of them"),
        (Pooled(), "spare", "is unused"),
    ):
        report = check_gradients(stack((5,), layer, layers.Dense(1)), normal(8, 5), normal(8, 1))
        (culprit,) = report.result.culprits
        assert (culprit.kind, culprit.layer.split("/")[-1]) == ("cut", place)
        assert why in culprit.detail


def test_float16_underflow_is_imprecise() -> None:
    """A loss × 1e-9 in pure float16 has a right formula and a gradient flushed to zero."""
    report = check_gradients(*mlp("tanh", lambda y, p: 1e-9 * ops.mean(ops.square(y - p)), dtype="float16"))
    assert report.verdict == "imprecise"
    assert report.frame.reason.str.contains("underflow").any()


@only("tensorflow", reason="the others have the right gradient")
def test_a_library_gradient_wrong_at_one_point_is_caught() -> None:
    """cumprod's gradient at a factor of exactly zero is wrong in TensorFlow 2.21: closed form 2·(1 + 3 + 12) = 32."""

    import tensorflow as tf

    class Gates(layers.Layer):
        def build(self, shape: Any) -> None:
            values = np.array([2.0, 0.0, 3.0, 4.0], "float32")
            self.w = self.add_weight(name="w", shape=(4,), initializer=keras.initializers.Constant(values))

        def call(self, x: Any) -> Any:
            return x * tf.math.cumprod(ops.convert_to_tensor(self.w))

    model = stack((4,), Gates(name="gates"), layers.Dense(1))
    report = check_gradients(model, normal(8, 4), normal(8, 1))
    assert [c.layer for c in report.result.culprits] == ["gates"]


# -- arguments ---------------------------------------------------------------------------------------------------------


def test_wrt_chooses_the_rows() -> None:
    """``wrt`` keeps weights or inputs alone."""
    model, x, y = mlp()
    assert set(check_gradients(model, x, y, wrt=("weights",)).frame.role) == {"weight"}
    assert set(check_gradients(model, x, y, wrt=("inputs",)).frame.role) == {"input"}


def test_nothing_moves_when_the_model_raises() -> None:
    """An error in the middle of the model leaves dtypes, floatx and weights as they were."""
    armed: list[bool] = []

    def broken(z: Any) -> Any:
        if armed and dtype_name(z) == "float64":
            raise ZeroDivisionError("in the middle")
        return z

    model = stack((4,), layers.Dense(4), layers.Lambda(broken), layers.Dense(1))
    before = state_of(model)
    armed.append(True)
    report = check_gradients(model, normal(8, 4), normal(8, 1))
    assert report.verdict == "inconclusive"
    assert report.frame.reason.str.contains("in the middle").all()
    assert keras.config.floatx() == "float32"
    assert {layer.compute_dtype for layer in model.layers} == {"float32"}
    for old, new in zip(before, state_of(model), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize(
    "x", [normal(4, 5), (4, 5), (None, 5), keras.KerasTensor((None, 5)), keras.layers.InputSpec(shape=(None, 5))]
)
def test_check_layer_takes_data_shapes_and_specs(x: Any) -> None:
    """One layer alone is checked from an array, a shape or a spec."""
    report = check_layer(layers.Dense(3, activation="tanh"), x)
    assert report.ok, str(report)
    assert len(report.frame) == 3


def test_check_layer_catches_a_wrong_layer() -> None:
    """The one call for a test of a custom layer."""
    report = check_layer(Product(4, FAULTS["kernel × 1.01"][0], name="faulty"), (8, 5))
    assert dict(zip(report.frame.tensor, report.frame.check, strict=True))["faulty/kernel"] == "mismatch"
    assert check_layer(Product(4, right, name="right"), (8, 5)).ok


def test_check_layer_takes_several_inputs() -> None:
    """A tuple of arrays is several positional arguments, a list is one."""
    assert check_layer(layers.Add(), [normal(4, 3), normal(4, 3, seed=1)]).ok
    assert check_layer(layers.MultiHeadAttention(2, 3), (normal(2, 4, 6), normal(2, 5, 6, seed=1))).ok


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: check_gradients(object(), normal(4, 2)), TypeError, "Expected a compiled keras.Model"),
        (lambda: check_gradients(keras.Sequential([layers.Dense(1)]), normal(4, 2)), ValueError, "not compiled"),
        (lambda: check_gradients(mlp()[0], normal(0, 5), normal(0, 1)), ValueError, "without samples"),
        (lambda: check_gradients(*mlp(), wrt="weights"), ValueError, "wrt"),
        (lambda: check_layer(object(), (4, 5)), TypeError, "keras.Layer"),
    ],
)
def test_bad_arguments(call: Callable[[], Any], error: type[Exception], words: str) -> None:
    """Bad arguments say what came in and what was expected."""
    with pytest.raises(error, match=words):
        call()
