"""False alarms: twenty healthy runs of kinds that look suspicious, none of which may raise a warning or an error.

    python benchmarks/healthy_runs.py [--seeds 0,1] [--only gru,vae]

Every model learns (its loss is shown), and each has something that a careless rule would call a fault: huge raw
gradients that are clipped or normalised away, parts without a gradient by design, a noisy or rising loss, weights that
hardly move. All data are made up here; a case takes seconds on one core. Those of ``faultbench.py`` are other models.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from keras import layers, ops

from keras_gradwatch import GradWatch

Rng = np.random.Generator
#: A compiled model, what ``fit`` gets, and settings of the callback.
Case = tuple[keras.Model, dict[str, Any], dict[str, Any]]


def normal(rng: Rng, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype("float32")


def table(rng: Rng, n: int = 512, features: int = 8) -> tuple[np.ndarray, np.ndarray]:
    x = normal(rng, n, features)
    return x, (np.sin(2 * x[:, :1]) + x[:, 1:2] * x[:, 2:3] + 0.1 * normal(rng, n, 1)).astype("float32")


def images(rng: Rng, n: int = 384) -> tuple[np.ndarray, np.ndarray]:
    """Bars, horizontal or vertical, on a blank 12 × 12 ground."""
    x, y = np.zeros((n, 12, 12, 1), "float32"), rng.integers(0, 2, n)
    for image, kind, place in zip(x, y, rng.integers(1, 11, n), strict=True):
        image[(place, slice(2, 10)) if kind else (slice(2, 10), place)] = 1.0
    return x, y.astype("int32")


def echoes(rng: Rng, n: int = 384, length: int = 24) -> tuple[np.ndarray, np.ndarray]:
    """The sum of the last three of a sequence."""
    x = normal(rng, n, length, 2)
    return x, x[:, -3:, 0].sum(axis=1, keepdims=True)


def model_of(shape: tuple[int, ...], *parts: Any, loss: Any, optimizer: Any, **settings: Any) -> keras.Model:
    model = keras.Sequential([keras.Input(shape), *parts])
    model.compile(optimizer, loss, **settings)
    return model


def adam(rate: float = 3e-3, **settings: Any) -> Any:
    return keras.optimizers.Adam(rate, **settings)


def fit(x: Any, y: Any = None, *, epochs: int = 8, batch_size: int = 32) -> dict[str, Any]:
    return {"x": x, "y": y, "epochs": epochs, "batch_size": batch_size}


def gru_clipped(rng: Rng) -> Case:
    x, y = echoes(rng)
    model = model_of((24, 2), layers.GRU(16), layers.Dense(1), loss="mse", optimizer=adam(clipnorm=0.1))
    return model, fit(x, y), {}


def bidirectional_masked(rng: Rng) -> Case:
    x, y = echoes(rng)
    x[:, :12] = 0.0
    parts = [layers.Masking(), layers.Bidirectional(layers.LSTM(8)), layers.Dense(1)]
    return model_of((24, 2), *parts, loss="mae", optimizer=adam()), fit(x, y), {}


@keras.saving.register_keras_serializable("healthy_runs")
class FakeQuantised(layers.Layer):
    """Rounds to sixteenths; the gradient passes as if it did not."""

    def call(self, x: Any) -> Any:
        import tensorflow as tf

        @tf.custom_gradient
        def rounded(x: Any) -> Any:
            return tf.round(16 * x) / 16, lambda upstream: upstream

        return rounded(x)


def quantised(rng: Rng) -> Case:
    x, y = table(rng)
    parts = [layers.Dense(32, "relu"), FakeQuantised(name="quantise"), layers.Dense(1)]
    return model_of((8,), *parts, loss="mse", optimizer=adam()), fit(x, y), {"surrogates": ("quantise",)}


def batch_of_two(rng: Rng) -> Case:
    x, y = table(rng, 128)
    model = model_of((8,), layers.Dense(16, "tanh"), layers.Dense(1), loss="mse", optimizer=adam(1e-3))
    return model, fit(x, y, batch_size=2, epochs=4), {}


def whole_batch(rng: Rng) -> Case:
    x, y = table(rng, 1_024)
    model = model_of((8,), layers.Dense(32, "relu"), layers.Dense(1), loss="mse", optimizer=adam(1e-2))
    return model, fit(x, y, batch_size=1_024, epochs=80), {}


def deep_plain(rng: Rng) -> Case:
    """Thirty relu layers without normalisation or shortcuts, and He's initialiser."""
    x, y = table(rng)
    parts = [layers.Dense(48, "relu", kernel_initializer="he_normal") for _ in range(30)]
    return model_of((8,), *parts, layers.Dense(1), loss="mse", optimizer=adam(3e-4)), fit(x, y, epochs=12), {}


def selu_deep(rng: Rng) -> Case:
    x, y = table(rng)
    parts = [layers.Dense(24, "selu", kernel_initializer="lecun_normal") for _ in range(16)]
    return model_of((8,), *parts, layers.Dense(1), loss="mse", optimizer=adam(1e-3)), fit(x, y, epochs=10), {}


def patches(rng: Rng) -> Case:
    """A vision transformer of two blocks."""
    x, y = images(rng)
    inputs = keras.Input((12, 12, 1))
    flow = layers.Reshape((16, 24))(layers.Conv2D(24, 3, strides=3)(inputs))
    for _ in range(2):
        flow = flow + layers.MultiHeadAttention(2, 12)(*[layers.LayerNormalization()(flow)] * 2)
        flow = flow + layers.Dense(24)(layers.Dense(48, "gelu")(layers.LayerNormalization()(flow)))
    outputs = layers.Dense(2)(layers.GlobalAveragePooling1D()(flow))
    model = keras.Model(inputs, outputs)
    model.compile(adam(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model, fit(x, y, epochs=6), {}


class Sampling(layers.Layer):
    """Draws from a normal distribution, and adds its divergence from the standard one to the loss."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.seed_generator = keras.random.SeedGenerator(7)

    def call(self, inputs: Any) -> Any:
        mean, spread = inputs
        self.add_loss(-0.005 * ops.mean(1 + spread - ops.square(mean) - ops.exp(spread)))
        return mean + ops.exp(0.5 * spread) * keras.random.normal(ops.shape(mean), seed=self.seed_generator)


def variational(rng: Rng) -> Case:
    x = images(rng)[0].reshape(-1, 144)
    inputs = keras.Input((144,))
    flow = layers.Dense(32, "relu")(inputs)
    code = Sampling()([layers.Dense(4)(flow), layers.Dense(4, kernel_initializer="zeros")(flow)])
    model = keras.Model(inputs, layers.Dense(144, "sigmoid")(layers.Dense(32, "relu")(code)))
    model.compile(adam(), "binary_crossentropy")
    return model, fit(x, x, epochs=10), {}


def denoiser(rng: Rng) -> Case:
    """Predicts the noise in an image, at a level of noise that is told."""
    clean = images(rng)[0]
    noise, level = normal(rng, *clean.shape), rng.uniform(0, 1, (len(clean), 1)).astype("float32")
    noisy = np.sqrt(1 - level[:, :, None, None]) * clean + np.sqrt(level[:, :, None, None]) * noise
    image, told = keras.Input((12, 12, 1)), keras.Input((1,))
    flow = layers.Conv2D(12, 3, padding="same", activation="swish")(image)
    flow = flow * layers.Reshape((1, 1, 12))(layers.Dense(12)(told))
    outputs = layers.Conv2D(1, 3, padding="same")(layers.Conv2D(12, 3, padding="same", activation="swish")(flow))
    model = keras.Model([image, told], outputs)
    model.compile(adam(), "mse")
    return model, fit([noisy, level], noise, epochs=5), {}


def contrastive(rng: Rng) -> Case:
    """Two views of each sample attract, those of others repel: the labels are the places in the batch."""
    x = normal(rng, 384, 8)
    first, second = keras.Input((8,)), keras.Input((8,))
    tower = keras.Sequential([layers.Dense(32, "relu"), layers.Dense(8), layers.UnitNormalization()])
    similar = ops.matmul(tower(first), ops.transpose(tower(second))) * 10.0
    model = keras.Model([first, second], similar)

    def places(_: Any, scores: Any) -> Any:
        wanted = ops.arange(ops.shape(scores)[0])
        return ops.mean(keras.losses.sparse_categorical_crossentropy(wanted, scores, from_logits=True))

    model.compile(adam(1e-3), places)
    return model, fit([x, x + 0.1 * normal(rng, *x.shape)], np.zeros(len(x)), epochs=6), {}


def embeddings_sparse(rng: Rng) -> Case:
    """Ten thousand words, of which a batch touches thirty."""
    words = rng.zipf(1.4, (512, 6)).clip(1, 9_999).astype("int32")
    y = (words < 5).mean(axis=1, keepdims=True).astype("float32")
    parts = [layers.Embedding(10_000, 8), layers.GlobalAveragePooling1D(), layers.Dense(1)]
    return model_of((6,), *parts, loss="mse", optimizer=adam(1e-2)), fit(words, y), {}


def float16(rng: Rng) -> Case:
    x, y = table(rng)
    policy = keras.DTypePolicy("mixed_float16")
    parts = [layers.Dense(32, "relu", dtype=policy), layers.Dense(32, "relu", dtype=policy), layers.Dense(1)]
    optimizer = keras.optimizers.LossScaleOptimizer(adam(1e-3))
    return model_of((8,), *parts, loss="mse", optimizer=optimizer), fit(x, y, epochs=12), {}


def huge_loss(rng: Rng) -> Case:
    """Targets in the millions: raw gradients are huge, and Adam does not care."""
    x, y = table(rng)
    model = model_of((8,), layers.Dense(32, "relu"), layers.Dense(1), loss="mse", optimizer=adam(100.0))
    return model, fit(x, 1e6 * (y + 3.0), epochs=15), {}


def tiny_loss(rng: Rng) -> Case:
    x, y = table(rng)
    model = model_of((8,), layers.Dense(32, "relu"), layers.Dense(1), loss="mse", optimizer=adam(), loss_weights=[1e-7])
    return model, fit(x, y), {}


def low_rank(rng: Rng) -> Case:
    """A frozen net, fine-tuned through a low-rank side path that begins at zero."""
    x, y = table(rng)
    inputs = keras.Input((8,))
    base = layers.Dense(32, "tanh", trainable=False)(inputs)
    side = layers.Dense(32, use_bias=False, kernel_initializer="zeros")(layers.Dense(2, use_bias=False)(inputs))
    model = keras.Model(inputs, layers.Dense(1)(base + side))
    model.compile(adam(), "mse")
    return model, fit(x, y), {}


def warm_up(rng: Rng) -> Case:
    x, y = table(rng)
    schedule = keras.optimizers.schedules.CosineDecay(0.0, 128, warmup_target=5e-3, warmup_steps=64)
    model = model_of(
        (8,), layers.Dense(32, "gelu"), layers.Dense(1), loss="mse", optimizer=keras.optimizers.AdamW(schedule)
    )
    return model, fit(x, y, epochs=12), {}


def restarts(rng: Rng) -> Case:
    """A rate that jumps back up now and then: so does the loss."""
    x, y = table(rng)
    schedule = keras.optimizers.schedules.CosineDecayRestarts(0.02, 64)
    model = model_of((8,), layers.Dense(32, "tanh"), layers.Dense(1), loss="mse", optimizer=adam(schedule))
    return model, fit(x, y, epochs=14), {}


def experts(rng: Rng) -> Case:
    """Four experts behind a gate that picks the best one: the others get no gradient from a sample."""
    x, y = table(rng)
    inputs = keras.Input((8,))
    scores = layers.Dense(4)(inputs)
    best = ops.one_hot(ops.argmax(scores, axis=-1), 4) * ops.softmax(scores)
    answers = layers.Concatenate()([layers.Dense(1)(layers.Dense(12, "relu")(inputs)) for _ in range(4)])
    model = keras.Model(inputs, ops.sum(best * answers, axis=-1, keepdims=True))
    model.compile(adam(5e-3), "mse")
    return model, fit(x, y, epochs=12), {}


def accumulated(rng: Rng) -> Case:
    """Weights move at every fourth step only, and are averaged besides."""
    x, y = table(rng)
    optimizer = adam(5e-3, gradient_accumulation_steps=4, use_ema=True)
    return model_of((8,), layers.Dense(32, "relu"), layers.Dense(1), loss="mse", optimizer=optimizer), fit(x, y), {}


def noisy_labels(rng: Rng) -> Case:
    """A fifth of the labels is wrong, and dropout is heavy: the loss stays high and swings from batch to batch."""
    x, y = images(rng)
    y = np.where(rng.uniform(size=len(y)) < 0.2, 1 - y, y)
    parts = [layers.Conv2D(12, 3, activation="relu"), layers.BatchNormalization(), layers.MaxPooling2D()]
    parts += [layers.Flatten(), layers.Dropout(0.6), layers.Dense(2, "softmax")]
    optimizer = keras.optimizers.SGD(0.02, momentum=0.9)
    model = model_of((12, 12, 1), *parts, loss="sparse_categorical_crossentropy", optimizer=optimizer)
    return model, fit(x, y, batch_size=16), {}


CASES: tuple[Callable[[Rng], Case], ...] = (
    gru_clipped, bidirectional_masked, quantised, batch_of_two, whole_batch, deep_plain, selu_deep, patches,
    variational, denoiser, contrastive, embeddings_sparse, float16, huge_loss, tiny_loss, low_rank, warm_up,
    restarts, experts, accumulated, noisy_labels,
)  # fmt: skip


def run(case: Callable[[Rng], Case], seed: int) -> list[str]:
    """Findings of a case that are not mere remarks; prints a line."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    start = time.perf_counter()
    model, data, settings = case(np.random.default_rng(seed))
    watch = GradWatch(verbose=0, **settings)
    losses = model.fit(**data, verbose=0, callbacks=[watch]).history["loss"]
    found = watch.findings[watch.findings["severity"] != "info"]
    alarms = [f"{f.finding} in {f.layer} (step {f.first_step}): {f.message}" for f in found.itertuples()]
    name, seconds = case.__name__, time.perf_counter() - start
    print(
        f"{name:22} seed {seed}  loss {losses[0]:.3g} → {losses[-1]:.3g}  {len(alarms)} alarms  {seconds:.0f} s",
        flush=True,
    )
    for alarm in alarms:
        print(f"    {alarm[:300]}", flush=True)
    return alarms


def main() -> None:
    """Run the cases asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    wanted = [case for case in CASES if not options.only or any(n in case.__name__ for n in options.only.split(","))]
    runs = [(case, int(seed)) for seed in options.seeds.split(",") for case in wanted]
    alarmed = sum(bool(run(case, seed)) for case, seed in runs)
    print(f"{len(runs)} healthy runs, {alarmed} with an alarm")


if __name__ == "__main__":
    main()
