"""The same models, weights and batches on any backend, and what the package says about them.

``KERAS_BACKEND=tensorflow python tests/backend_figures.py`` writes ``backend_figures.json``, which the tests of every
backend compare their own figures with.
"""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import layers, ops
from per_backend import wrong_by

from keras_gradwatch import GradWatch, check_gradients

FILE = Path(__file__).with_suffix(".json")


def numbers(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


class Faulty(layers.Layer):
    """A layer without weights whose backward gives 1.1 × the slope."""

    def call(self, x: Any) -> Any:
        return wrong_by(1.1)(x)


class Reversed(layers.Layer):
    """Straight-through: the sign forwards, the identity backwards."""

    def call(self, x: Any) -> Any:
        return x + ops.stop_gradient(ops.sign(x) - x)


def dense(*middle: layers.Layer) -> tuple[keras.Model, Any, Any]:
    parts = [layers.Dense(6, "tanh", name="first"), *middle, layers.Dense(1, name="last")]
    return keras.Sequential([keras.Input((5,)), *parts]), numbers(8, 5, seed=1), numbers(8, 1, seed=2)


def convolutional() -> tuple[keras.Model, Any, Any]:
    parts = [
        layers.Conv2D(4, 3, padding="same", name="conv"), layers.BatchNormalization(name="norm"), layers.ReLU(),
        layers.MaxPooling2D(), layers.Conv2D(3, 2, strides=2, activation="relu", name="conv_2"),
        layers.GlobalAveragePooling2D(), layers.Dense(3, "softmax", name="kinds"),
    ]  # fmt: skip
    return keras.Sequential([keras.Input((8, 8, 2)), *parts]), numbers(8, 8, 8, 2, seed=3), np.arange(8) % 3


def recurrent() -> tuple[keras.Model, Any, Any]:
    tokens = np.random.default_rng(4).integers(1, 9, (8, 6))
    tokens[:, 4:] = 0
    parts = [
        layers.Embedding(9, 4, mask_zero=True, name="words"), layers.LSTM(5, return_sequences=True, name="lstm"),
        layers.GRU(3, name="gru"), layers.Dense(1, name="last"),
    ]  # fmt: skip
    return keras.Sequential([keras.Input((6,)), *parts]), tokens, numbers(8, 1, seed=5)


def attention() -> tuple[keras.Model, Any, Any]:
    inputs = keras.Input((6, 4))
    h = layers.MultiHeadAttention(2, 3, name="heads")(inputs, inputs)
    h = layers.LayerNormalization(name="norm")(layers.Add()([inputs, h]))
    outputs = layers.Dense(2, name="last")(layers.GlobalAveragePooling1D()(layers.Dense(5, "gelu", name="wide")(h)))
    return keras.Model(inputs, outputs), numbers(8, 6, 4, seed=6), numbers(8, 2, seed=7)


def penalized() -> tuple[keras.Model, Any, Any]:
    return dense(layers.Dense(4, kernel_regularizer="l2", activity_regularizer="l2", name="middle"))


MODELS: dict[str, Callable[[], tuple[keras.Model, Any, Any]]] = {
    "dense": dense,
    "convolutional": convolutional,
    "recurrent": recurrent,
    "attention": attention,
    "penalised": penalized,
    "faulty": lambda: dense(Faulty(name="faulty")),
    "straight-through": lambda: dense(Reversed(name="sign")),
    "nan": lambda: dense(layers.Lambda(lambda z: ops.log(z - 1000.0), name="log")),
}


def figures(name: str) -> dict[str, Any]:
    """Verdicts and culprits of one check, and the loss and norms of one training step."""
    keras.utils.clear_session(free_memory=False)
    model, x, y = MODELS[name]()
    for weight in model.weights:
        if "float" in str(weight.dtype) and "variance" not in weight.path:
            place = "/".join(weight.path.split("/")[-2:])
            weight.assign(0.5 * numbers(*weight.shape, seed=zlib.crc32(place.encode())) + ("gamma" in place))
    loss = "sparse_categorical_crossentropy" if name == "convolutional" else "mse"
    model.compile(keras.optimizers.SGD(1e-3), loss)
    report = check_gradients(model, x, y)
    watch = GradWatch(check_freq=None, verbose=0)
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[watch])
    history = watch.history
    tensors = ["/".join(tensor.split("/")[-2:]) for tensor in history.tensor]
    return {
        "loss": float(history.loss.iloc[0]),
        "norms": dict(zip(tensors, history.grad_norm.astype(float), strict=True)),
        "weights": dict(zip(tensors, history.weight_norm.astype(float), strict=True)),
        "verdicts": {
            "/".join(t.split("/")[-2:]): v for t, v in zip(report.frame.tensor, report.frame.check, strict=True)
        },
        "culprits": [[culprit.layer, culprit.kind] for culprit in report.result.culprits],
        "findings": sorted(watch.findings.finding),
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps({name: figures(name) for name in MODELS}, indent=1) + "\n", encoding="utf-8")
