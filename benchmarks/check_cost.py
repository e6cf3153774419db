"""What one gradient check costs: in training steps of a ResNet, and in forward+backward passes of a small MLP.

    python benchmarks/check_cost.py [resnet] [mlp]

Training step (or forward+backward) and check run alternately in one process; medians of each, and their ratio.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

from keras_gradwatch.checks import Checker
from keras_gradwatch.probe import Batch, arrays_of


def resnet(stages: int = 3, blocks: int = 3, width: int = 16) -> keras.Model:
    """ResNet-20 for 32×32 pictures (He et al., 2016, section 4.2): 61 trainable tensors, 0.27 million weights."""
    layers = keras.layers
    inputs = keras.Input((32, 32, 3))
    x = layers.Conv2D(width, 3, padding="same", use_bias=False)(inputs)
    x = layers.ReLU()(layers.BatchNormalization()(x))
    for stage in range(stages):
        for block in range(blocks):
            filters, strides = width * 2**stage, 2 if stage and not block else 1
            y = layers.Conv2D(filters, 3, strides, padding="same", use_bias=False)(x)
            y = layers.ReLU()(layers.BatchNormalization()(y))
            y = layers.Conv2D(filters, 3, padding="same", use_bias=False)(y)
            y = layers.BatchNormalization()(y)
            if strides > 1:
                x = layers.Conv2D(filters, 1, strides, use_bias=False)(x)
            x = layers.ReLU()(layers.Add()([x, y]))
    outputs = layers.Dense(10)(layers.GlobalAveragePooling2D()(x))
    model = keras.Model(inputs, outputs)
    model.compile(
        keras.optimizers.SGD(0.01, momentum=0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    return model


def mlp() -> keras.Model:
    """32-96-64-8, tanh: 9,896 weights."""
    layers = [keras.layers.Dense(96, "tanh"), keras.layers.Dense(64, "tanh"), keras.layers.Dense(8)]
    model = keras.Sequential([keras.Input((32,)), *layers])
    model.compile("sgd", "mse")
    return model


def seconds(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def alternating(first: Callable[[], Any], second: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """Median seconds of two actions that take turns."""
    times = np.array([(seconds(first), seconds(second)) for _ in range(rounds)])
    return float(np.median(times[:, 0])), float(np.median(times[:, 1]))


def report_resnet() -> Iterator[str]:
    keras.utils.set_random_seed(0)
    generator = np.random.default_rng(0)
    x, y = generator.standard_normal((32, 32, 32, 3), dtype="float32"), generator.integers(0, 10, (32,))
    model = resnet()
    data = tf.data.Dataset.from_tensors((x, y)).repeat()
    model.fit(data, steps_per_epoch=3, verbose=0)
    iterator = iter(data)

    def step() -> None:
        float(model.train_function(iterator)["loss"])

    once = float(np.median([seconds(step) for _ in range(15)]))
    batch = arrays_of(Batch(x[:8], y[:8]))
    checker = Checker(model)
    first = seconds(lambda: checker.check(batch))
    size = f"{len(model.trainable_variables)} tensors, {model.count_params():,} weights"
    yield f"ResNet, {size}; training batch 32, probe 8"
    yield f"  first check  {first:6.2f} s = {first / once:.1f} training steps"
    result = checker.check(batch, seed=1)
    yield f"  verdict {result.verdict}, {result.evaluations} losses along directions"
    seeds = iter(range(2, 1000))

    def two_checks() -> None:  # every second one leaves out the gradient in float32
        checker.check(batch, seed=next(seeds))
        checker.check(batch, seed=next(seeds))

    step_time, check_time = alternating(step, two_checks, 25)
    ratio = f"{check_time / 2 / step_time:.2f} training steps"
    yield f"  training step {1e3 * step_time:.0f} ms, later check {1e3 * check_time / 2:.0f} ms (mean of two): {ratio}"


def report_mlp() -> Iterator[str]:
    keras.utils.set_random_seed(0)
    generator = np.random.default_rng(0)
    x, y = generator.standard_normal((32, 32), dtype="float32"), generator.standard_normal((32, 8), dtype="float32")
    model = mlp()

    @tf.function
    def forward_backward(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - model(x, training=True)))
        return loss, tape.gradient(loss, [v.value for v in model.trainable_variables])

    tensors = tf.constant(x), tf.constant(y)
    batch = arrays_of(Batch(x, y))
    checker = Checker(model)
    first = seconds(lambda: checker.check(batch))
    forward_backward(*tensors)
    seeds = iter(range(1, 10000))

    def unit() -> None:
        float(forward_backward(*tensors)[0])

    unit_time, check_time = alternating(unit, lambda: checker.check(batch, seed=next(seeds)), 200)
    yield f"MLP, {model.count_params():,} weights, batch 32: first check {first:.2f} s"
    yield (
        f"  forward+backward {1e3 * unit_time:.2f} ms, later check {1e3 * check_time:.1f} ms: "
        f"{check_time / unit_time:.1f} forward+backward"
    )


if __name__ == "__main__":
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    print(f"{machine}, TensorFlow {tf.__version__}, Keras {keras.__version__}")
    chosen = sys.argv[1:] or ["resnet", "mlp"]
    for name, report in (("resnet", report_resnet), ("mlp", report_mlp)):
        if name in chosen:
            for line in report():
                print(line, flush=True)
