"""Data and models of the benchmark in faultbench.py: all made up here, small enough to train in seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import initializers, layers, ops

Data = tuple[Any, Any]


# ---------------------------------------------------------------- data


def glyphs(rng: np.random.Generator, n: int = 600, *, classes: int = 6, size: int = 10) -> Data:
    """Pictures ``[n, size, size, 1]`` in 0…1: a class's own strokes on black, moved by a pixel, with noise."""
    pattern = np.maximum(0, rng.uniform(-1.5, 1, (classes, size // 2, size // 2))).repeat(2, 1).repeat(2, 2)
    label = rng.integers(0, classes, n)
    moved = np.stack(
        [np.roll(pattern[k], shift, (0, 1)) for k, shift in zip(label, rng.integers(-1, 2, (n, 2)), strict=True)]
    )
    return _f32(np.clip(0.8 * moved + rng.normal(0, 0.1, moved.shape), 0, 1)[..., None]), label


def table(rng: np.random.Generator, n: int = 500, *, features: int = 8, noise: float = 0.1) -> Data:
    """A smooth function of standard normal features, scaled to deviation 1."""
    x = rng.normal(size=(n, features))
    y = np.tanh(x @ rng.normal(size=(features, 4))) @ rng.normal(size=(4, 1))
    return _f32(x), _f32(y / y.std() + noise * rng.normal(size=y.shape))


def clusters(rng: np.random.Generator, n: int = 600, *, classes: int = 4) -> Data:
    """Overlapping clouds in five dimensions, standardised."""
    label = rng.integers(0, classes, n)
    x = rng.normal(0, 2, (classes, 5))[label] + rng.normal(size=(n, 5))
    return _f32((x - x.mean(0)) / x.std(0)), label


def sequences(rng: np.random.Generator, n: int = 320, *, length: int = 20, first: bool = False) -> Data:
    """Noise in two channels; the label is the sign of the last four steps' sum, or of the very first step."""
    x = rng.normal(0, 0.5, (n, length, 2))
    if first:
        x[:, 0, 0] = rng.choice([-1.0, 1.0], n)
    return _f32(x), _f32((x[:, 0, 0] if first else x[:, -4:, 0].sum(1)) > 0)[:, None]


def words(rng: np.random.Generator, n: int = 500, *, used: int = 200, length: int = 24) -> Data:
    """Word ids; each of four classes prefers its own."""
    label = rng.integers(0, 4, n)
    own = label[:, None] * used // 4 + rng.integers(0, used // 4, (n, length))
    return np.where(rng.random((n, length)) < 0.5, own, rng.integers(0, used, (n, length))).astype("int32"), label


def quadrants(rng: np.random.Generator, n: int = 400) -> Data:
    """Two features; the label says whether their signs agree: no single feature tells anything."""
    x = rng.uniform(-1, 1, (n, 2))
    return _f32(x), _f32(x[:, :1] * x[:, 1:] > 0)


def _f32(*arrays: Any) -> Any:
    found = tuple(np.asarray(array, dtype="float32") for array in arrays)
    return found[0] if len(found) == 1 else found


# ---------------------------------------------------------------- models


def compiled(model: keras.Model, loss: Any, optimizer: Any, **settings: Any) -> keras.Model:
    model.compile(optimizer, loss, **settings)
    return model


def stack(shape: tuple[int, ...], *parts: Any) -> keras.Sequential:
    return keras.Sequential([keras.Input(shape), *parts])


def dense(widths: list[int], activation: Any, *, split: bool = False, **settings: Any) -> list[Any]:
    """Dense layers with this activation inside, or in a layer of its own."""
    if not split:
        return [layers.Dense(width, activation=activation, **settings) for width in widths]
    pairs = [(layers.Dense(width, **settings), layers.Activation(activation)) for width in widths]
    return [layer for pair in pairs for layer in pair]


def softmax(classes: int) -> Any:
    return layers.Dense(classes, activation="softmax")


def normal(stddev: float) -> Any:
    return initializers.RandomNormal(0.0, stddev)


sgd, adam = keras.optimizers.SGD, keras.optimizers.Adam
CROSS_ENTROPY, BINARY = "sparse_categorical_crossentropy", "binary_crossentropy"


@keras.saving.register_keras_serializable("benchmark")
class Op(layers.Layer):
    """Any function of the input as a layer."""

    def __init__(self, function: Callable[[Any], Any], **settings: Any) -> None:
        super().__init__(**settings)
        self._function = function

    def call(self, x: Any) -> Any:
        return self._function(x)


@keras.saving.register_keras_serializable("benchmark")
class Block(layers.Layer):
    """A custom layer with an activation inside: ``dense_out(relu(dense_in(x)))``."""

    def __init__(self, width: int, bias: float, **settings: Any) -> None:
        super().__init__(**settings)
        self._first = layers.Dense(width, bias_initializer=initializers.Constant(bias))
        self._second = layers.Dense(width)

    def call(self, x: Any) -> Any:
        return self._second(ops.relu(self._first(x)))


def glyph_model(rng: np.random.Generator, *parts: Any, optimizer: Any, scale: float = 1.0, shift: float = 0.0) -> Any:
    x, y = glyphs(rng)
    return compiled(stack((10, 10, 1), *parts, softmax(6)), CROSS_ENTROPY, optimizer), (x * scale + shift, y)


def flat_model(rng: np.random.Generator, *parts: Any, **settings: Any) -> Any:
    return glyph_model(rng, layers.Flatten(), *parts, **settings)


def table_model(
    rng: np.random.Generator, *parts: Any, optimizer: Any, scale: float = 1.0, target: float = 1.0, loss: Any = "mse"
) -> Any:
    x, y = table(rng)
    return compiled(stack((8,), *parts, layers.Dense(1)), loss, optimizer), (x * scale, y * target)


def sequence_model(rng: np.random.Generator, *parts: Any, optimizer: Any, **settings: Any) -> Any:
    x, y = sequences(rng, **settings)
    return compiled(stack(x.shape[1:], *parts, layers.Dense(1, activation="sigmoid")), BINARY, optimizer), (x, y)


def residual(x: Any, branch: list[Any]) -> Any:
    y = x
    for layer in branch:
        y = layer(y)
    return layers.Add()([x, y])


def residual_conv(rng: np.random.Generator, blocks: int = 8) -> Any:
    """No normalisation: each branch begins at a small share of its input (as in Fixup, Zhang et al. 2019)."""
    inputs = keras.Input((10, 10, 1))
    x = layers.Conv2D(8, 3, padding="same", activation="relu", kernel_initializer="he_normal")(inputs)
    last = initializers.VarianceScaling(0.05)
    for _ in range(blocks):
        branch = [layers.Conv2D(8, 3, padding="same", activation="relu", kernel_initializer="he_normal")]
        x = residual(x, [*branch, layers.Conv2D(8, 3, padding="same", kernel_initializer=last)])
    outputs = softmax(6)(layers.GlobalAveragePooling2D()(layers.ReLU()(x)))
    return compiled(keras.Model(inputs, outputs), CROSS_ENTROPY, adam(3e-3)), glyphs(rng)


def residual_dense(rng: np.random.Generator, gain: float) -> Any:
    inputs = keras.Input((8,))
    x = layers.Dense(24)(inputs)
    for _ in range(12):
        wide = initializers.VarianceScaling(gain)
        x = residual(
            x, [layers.Dense(24, activation="relu", kernel_initializer=wide), layers.Dense(24, kernel_initializer=wide)]
        )
    return compiled(keras.Model(inputs, layers.Dense(1)(x)), "mse", sgd(0.01)), table(rng)


def transformer(rng: np.random.Generator) -> Any:
    """Patches of a picture through two attention blocks."""
    inputs = keras.Input((10, 10, 1))
    x = layers.Reshape((25, 24))(layers.Conv2D(24, 2, strides=2)(inputs))
    x = x + layers.Embedding(25, 24)(ops.arange(25))
    for _ in range(2):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(2, 12)(y, y)
        x = residual(x, [layers.LayerNormalization(), layers.Dense(48, activation="gelu"), layers.Dense(24)])
    outputs = softmax(6)(layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x)))
    return compiled(keras.Model(inputs, outputs), CROSS_ENTROPY, adam(2e-3)), glyphs(rng)


def u_net(rng: np.random.Generator) -> Any:
    x, _ = glyphs(rng, 300)
    conv = lambda width: layers.Conv2D(width, 3, padding="same", activation="relu")  # noqa: E731
    inputs = keras.Input((10, 10, 1))
    top = conv(8)(inputs)
    bottom = layers.UpSampling2D()(conv(16)(layers.MaxPooling2D()(top)))
    outputs = layers.Conv2D(1, 1, activation="sigmoid")(conv(8)(layers.Concatenate()([top, bottom])))
    return compiled(keras.Model(inputs, outputs), BINARY, adam(3e-3)), (x, _f32(x > 0.5))


def autoencoder(rng: np.random.Generator) -> Any:
    x = glyphs(rng)[0].reshape(-1, 100)
    parts = [*dense([48], "relu"), layers.Dense(6, activation="tanh"), *dense([48], "relu")]
    return compiled(stack((100,), *parts, layers.Dense(100, activation="sigmoid")), "mse", adam(3e-3)), (x, x)


def word_vectors(rng: np.random.Generator) -> Any:
    """Skip-gram with negative samples: two tables of 5,000 vectors, of which a batch touches a few."""
    pairs = rng.integers(0, 40, (2000, 2)) + 40 * rng.integers(0, 10, (2000, 1))
    wrong = np.concatenate([pairs[:, :1], rng.integers(0, 400, (2000, 1))], axis=1)
    x, y = np.concatenate([pairs, wrong]).astype("int32"), np.repeat([1.0, 0.0], 2000).astype("float32")[:, None]
    word, context = keras.Input((1,), dtype="int32"), keras.Input((1,), dtype="int32")
    vectors = [layers.Flatten()(layers.Embedding(5000, 12)(part)) for part in (word, context)]
    outputs = layers.Activation("sigmoid")(layers.Dot(1)(vectors))
    return compiled(keras.Model([word, context], outputs), BINARY, adam(0.01)), ([x[:, :1], x[:, 1:]], y)


def siamese(rng: np.random.Generator) -> Any:
    x, y = glyphs(rng)
    other = rng.permutation(len(x))
    other[::2] = [rng.choice(np.flatnonzero(y == y[i])) for i in range(0, len(x), 2)]
    encoder = stack((10, 10, 1), layers.Flatten(), *dense([48, 16], "relu"))
    a, b = keras.Input((10, 10, 1)), keras.Input((10, 10, 1))
    distance = Op(lambda pair: ops.abs(pair[0] - pair[1]))([encoder(a), encoder(b)])
    model = keras.Model([a, b], layers.Dense(1, activation="sigmoid")(distance))
    return compiled(model, BINARY, adam(3e-3)), ([x, x[other]], _f32(y == y[other])[:, None])


class Adversarial(keras.Model):  # type: ignore[misc]  # Keras ships no types
    """A generator against a critic, on points of a ring."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = stack((4,), *dense([24], "relu"), layers.Dense(2))
        self.critic = stack((2,), *dense([24], "leaky_relu"), layers.Dense(1))
        self.entropy = keras.losses.BinaryCrossentropy(from_logits=True)

    def compile(self, *, rate: float) -> None:
        super().compile()
        self.optimizers = [adam(rate), adam(rate)]

    def train_step(self, data: Any) -> dict[str, Any]:
        import tensorflow as tf

        real = data[0] if isinstance(data, tuple) else data
        losses = []
        for part, optimizer, truth in (
            (self.critic, self.optimizers[0], 0.0),
            (self.generator, self.optimizers[1], 1.0),
        ):
            with tf.GradientTape() as tape:
                fake = self.critic(self.generator(tf.random.normal((tf.shape(real)[0], 4))))
                loss = self.entropy(truth * tf.ones_like(fake), fake)
                if part is self.critic:
                    loss += self.entropy(tf.ones_like(fake), self.critic(real))
            weights = part.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)
            losses.append(loss)
        return {"critic": losses[0], "generator": losses[1]}


def adversarial(rng: np.random.Generator) -> Any:
    model, angle = Adversarial(), rng.uniform(0, 2 * np.pi, 512)
    model.compile(rate=1e-3)
    return model, (_f32(np.stack([np.cos(angle), np.sin(angle)], 1)), None)


def mixed_float16(rng: np.random.Generator) -> Any:
    before = keras.mixed_precision.dtype_policy()
    keras.mixed_precision.set_dtype_policy("mixed_float16")
    try:
        parts = [
            layers.Flatten(),
            *dense([48, 32], "relu"),
            layers.Dense(6),
            layers.Activation("softmax", dtype="float32"),
        ]
        return compiled(stack((10, 10, 1), *parts), CROSS_ENTROPY, adam(2e-3)), glyphs(rng)
    finally:
        keras.mixed_precision.set_dtype_policy(before)


def squeeze_excite(rng: np.random.Generator) -> Any:
    """Channels scaled by what is seen of them: a relu bottleneck of four units fed by averages."""
    inputs = keras.Input((10, 10, 1))
    x = layers.Conv2D(16, 3, activation="relu")(inputs)
    gate = layers.Dense(16, activation="sigmoid")(
        layers.Dense(4, activation="relu")(layers.GlobalAveragePooling2D()(x))
    )
    x = layers.GlobalAveragePooling2D()(layers.Conv2D(16, 3, activation="relu")(x * ops.reshape(gate, (-1, 1, 1, 16))))
    return compiled(keras.Model(inputs, softmax(6)(x)), CROSS_ENTROPY, adam(5e-3)), glyphs(rng)


def converged(rng: np.random.Generator) -> Any:
    """Trained already: another fit has nothing left to learn."""
    model, (x, y) = flat_model(rng, *dense([48], "relu"), optimizer=adam(3e-3))
    model.fit(x, y, epochs=40, verbose=0)
    model.compile(adam(1e-4), CROSS_ENTROPY)
    return model, (x, y)


def with_hole(data: Data, row: int, *, label: bool) -> Data:
    x, y = data
    (y if label else x)[row] = np.nan
    return x, y


def one_unit(rng: np.random.Generator) -> Any:
    x, y = clusters(rng, classes=2)
    return compiled(stack((5,), *dense([16], "tanh"), softmax(1)), "mse", adam(1e-3)), (x, _f32(y)[:, None])


def root_of_zero(rng: np.random.Generator) -> Any:
    """Half of the targets are hit exactly by a model that begins at zero: the slope of the root there is 0/0."""
    x, y = table(rng)
    y[::2] = 0.0
    loss = lambda target, output: ops.sqrt(ops.mean(ops.square(target - output), axis=-1))  # noqa: E731
    return compiled(stack((8,), *dense([16], "tanh"), layers.Dense(1, kernel_initializer="zeros")), loss, adam(1e-3)), (
        x,
        y,
    )


def quadrant_model(rng: np.random.Generator, *, loss: str, optimizer: Any, width: int = 8) -> Any:
    parts = dense([width], "tanh", kernel_initializer=normal(0.3))
    return compiled(stack((2,), *parts, layers.Dense(1, activation="sigmoid")), loss, optimizer), quadrants(rng)


def part_bias(share: float, value: float) -> Any:
    return lambda shape, dtype=None: ops.where(ops.arange(shape[-1]) < int(share * shape[-1]), value, 0.0)


def table_hole(rng: np.random.Generator, *, label: bool) -> Any:
    model, data = table_model(rng, *dense([16], "relu"), optimizer=adam(1e-3))
    return model, with_hole(data, 130, label=label)


def word_model(rng: np.random.Generator) -> Any:
    parts = [layers.Embedding(20_000, 8), layers.GlobalAveragePooling1D(), *dense([16], "relu"), softmax(4)]
    return compiled(stack((24,), *parts), CROSS_ENTROPY, adam(0.01)), words(rng)
