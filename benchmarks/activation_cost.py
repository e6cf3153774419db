"""What looking at the activations costs: a look in training steps, and the share of a fit of 200 steps per epoch.

    python benchmarks/activation_cost.py

A convolutional net and a small MLP; medians of each, looks and steps alternating in one process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from keras import layers

from keras_gradwatch import GradWatch
from keras_gradwatch.activations import ActivationReader
from keras_gradwatch.probe import Batch

BATCH = 32


def convolutions() -> tuple[keras.Model, tuple[int, ...]]:
    parts = [layers.Conv2D(width, 3, padding="same", activation="relu") for width in (32, 32, 64, 64)]
    parts = [*parts[:2], layers.MaxPooling2D(), *parts[2:], layers.GlobalAveragePooling2D(), layers.Dense(10)]
    return keras.Sequential([keras.Input((32, 32, 3)), *parts]), (32, 32, 3)


def mlp() -> tuple[keras.Model, tuple[int, ...]]:
    parts = [layers.Dense(64, activation="relu") for _ in range(4)]
    return keras.Sequential([keras.Input((32,)), *parts, layers.Dense(10)]), (32,)


def seconds(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def measure(name: str, model: keras.Model, shape: tuple[int, ...]) -> None:
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(200 * BATCH, *shape)).astype("float32"), rng.integers(0, 10, 200 * BATCH)
    parts = [slice(i, i + BATCH) for i in range(0, 128, BATCH)]
    data = [Batch(*map(keras.ops.convert_to_tensor, (x[part], y[part]))) for part in parts]
    reader = ActivationReader(model)

    def look() -> None:
        reader.read(data, step=1)

    def step() -> None:
        model.train_on_batch(x[:BATCH], y[:BATCH])

    first = seconds(look)
    step()
    look_seconds, step_seconds = np.median([(seconds(look), seconds(step)) for _ in range(30)], axis=0)
    watch, spent = GradWatch(check_freq=None, verbose=0), list[float]()
    told = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: spent.append(watch.cost["activations_seconds"])
    )
    started = time.perf_counter()
    model.fit(x, y, batch_size=BATCH, epochs=3, verbose=0, callbacks=[watch, told])
    share = (spent[-1] - spent[0]) / ((time.perf_counter() - started) * 2 / 3)
    print(
        f"{name}: first look {first:.2f} s; a look at 128 samples {1e3 * look_seconds:.1f} ms = "
        f"{look_seconds / step_seconds:.2f} training steps of {BATCH}; {share:.2%} of a fit, epochs of 200 steps"
    )


def main() -> None:
    for name, make in (("CNN", convolutions), ("MLP", mlp)):
        keras.utils.set_random_seed(0)
        measure(name, *make())


if __name__ == "__main__":
    main()
