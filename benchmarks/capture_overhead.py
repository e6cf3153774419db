"""What tracking costs: one call of a model's train function, watched against not watched.

    python benchmarks/capture_overhead.py [model …] [--jit] [--calls N] [--rounds N]

In each round every variant gets a new copy of the model, and all copies take turns on the same batch in random order,
so that a busy machine slows all of them. Printed are the medians and 10th percentiles of all calls and their ratio to
``plain``; ``plain again`` is a second plain copy, the noise. Data pipeline, progress bar and callbacks are left out:
the share of a whole ``fit`` is smaller. Figures: ``RESULTS.md``, section "Capture". ``KERAS_BACKEND``
chooses the backend.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import os
import platform
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

from keras_gradwatch.capture import Capture, Request

layers = keras.layers
generator = np.random.default_rng(0)


class Listener:
    """Asks for what a variant wants, and does nothing with it."""

    def __init__(self, request: Request) -> None:
        self.request = request

    def wants(self, step: int) -> Request:
        return self.request

    def before_step(self, step: int, batch: Any) -> None:
        pass

    def after_step(self, step: int, captured: Any) -> None:
        pass


def mlp(inputs: int, widths: list[int], outputs: int) -> tuple[Any, ...]:
    hidden = [layers.Dense(width, activation="relu") for width in widths]
    model = keras.Sequential([keras.Input((inputs,)), *hidden, layers.Dense(outputs)])
    return model, generator.normal(size=(32, inputs)), generator.normal(size=(32, outputs)), "mse"


def convolution(x: Any, filters: int, strides: int = 1) -> Any:
    x = layers.Conv2D(filters, 3, strides, padding="same", use_bias=False)(x)
    return layers.ReLU()(layers.BatchNormalization()(x))


def cnn() -> tuple[Any, ...]:
    """Three residual blocks on 32×32 pictures, batch 32: 29 weights."""
    inputs = keras.Input((32, 32, 3))
    x = convolution(inputs, 16)
    for filters, strides in ((16, 1), (32, 2), (64, 2)):
        shortcut = layers.Conv2D(filters, 1, strides, padding="same")(x)
        x = layers.Add()([convolution(convolution(x, filters, strides), filters), shortcut])
    model = keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))
    return model, generator.normal(size=(32, 32, 32, 3)), generator.integers(0, 10, 32), from_logits()


def transformer() -> tuple[Any, ...]:
    """Two blocks of width 64 on 64 tokens, batch 16: 35 weights, the embedding's gradient sparse."""
    inputs = keras.Input((64,), dtype="int32")
    x = layers.Embedding(1000, 64)(inputs)
    for _ in range(2):
        x = layers.LayerNormalization()(layers.Add()([x, layers.MultiHeadAttention(4, 16)(x, x)]))
        x = layers.LayerNormalization()(layers.Add()([x, layers.Dense(64)(layers.Dense(128, activation="gelu")(x))]))
    model = keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))
    return model, generator.integers(0, 1000, (16, 64)), generator.integers(0, 10, 16), from_logits()


def from_logits() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


#: Model and calls per round.
MODELS: dict[str, tuple[Callable[[], tuple[Any, ...]], int]] = {
    "mlp 16-32-32-3": (lambda: mlp(16, [32, 32], 3), 1000),
    "mlp 4 x Dense(64)": (lambda: mlp(64, [64] * 4, 1), 1000),
    "transformer": (transformer, 150),
    "cnn": (cnn, 80),
}

VARIANTS = {
    "plain": None,
    "plain again": None,
    "watched, off step": Request(),
    "tracked": Request(track=True),
    "tracked, batch before": Request(track=True, batch=True),
}


def train_call(build: Callable[[], tuple[Any, ...]], request: Request | None, *, jit: bool) -> Callable[[], Any]:
    """One call of the train function, its loss fetched."""
    model, x, y, loss = build()
    model.compile("adam", loss, jit_compile="auto" if keras.backend.backend() == "jax" else jit)
    data = x.astype("float32") if x.dtype == np.float64 else x, y.astype("float32") if y.dtype == np.float64 else y
    model._symbolic_build(data_batch=data)
    model.make_train_function()
    if request is not None:
        Capture.attach(model, Listener(request))
    return STEPS[keras.backend.backend()](model, data)


def tensorflow_step(model: Any, data: Any) -> Callable[[], Any]:
    import tensorflow as tf

    iterator = iter(tf.data.Dataset.from_tensors(data).repeat())
    return lambda: float(model.train_function(iterator)["loss"])


def jax_step(model: Any, data: Any) -> Callable[[], Any]:
    """The state goes from call to call, as in ``fit``."""
    groups = (model.trainable_variables, model.non_trainable_variables, model.optimizer.variables)
    state = [tuple([v.value for v in group] for group in (*groups, model.metrics_variables))]
    batches = itertools.repeat(data)

    def call() -> float:
        logs, state[0] = model.train_function(state[0], batches)
        return float(logs["loss"])

    return call


def torch_step(model: Any, data: Any) -> Callable[[], Any]:
    return lambda: float(model.train_function([data])["loss"])


STEPS = {"tensorflow": tensorflow_step, "jax": jax_step, "torch": torch_step}


def measure(name: str, *, rounds: int, calls: int, jit: bool) -> None:
    build, default_calls = MODELS[name]
    seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for _ in range(rounds):
        runs = {variant: train_call(build, request, jit=jit) for variant, request in VARIANTS.items()}
        for call in range((calls or default_calls) + 10):
            for variant in generator.permutation(list(runs)):
                start = time.perf_counter()
                runs[variant]()
                if call >= 10:
                    seconds[variant].append(time.perf_counter() - start)
    print(f"\n{name}{', XLA' if jit else ''}: {rounds} x {calls or default_calls} calls")
    for variant, values in seconds.items():
        median, low = np.median(values), np.percentile(values, 10)
        ratios = median / np.median(seconds["plain"]), low / np.percentile(seconds["plain"], 10)
        print(f"  {variant:22s} {1e3 * median:8.3f} ms   median {ratios[0]:.3f}   p10 {ratios[1]:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], default=[])
    parser.add_argument("--jit", action="store_true")
    parser.add_argument("--calls", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {load}")
    backend = keras.backend.backend()
    print(f"{backend} {importlib.metadata.version(backend)}, Keras {keras.__version__}")
    for name in arguments.models or MODELS:
        measure(name, rounds=arguments.rounds, calls=arguments.calls, jit=arguments.jit)


if __name__ == "__main__":
    main()
