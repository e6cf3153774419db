"""Power and calm of the check: planted faults found, and correct models left alone, over many models and seeds.

    python benchmarks/power.py power    # 20 models × each fault, at 957 and 9,896 weights, a CNN and an attention net
    python benchmarks/power.py calm     # correct models of 24 kinds × 45 seeds

A fault is planted by changing the analytic gradient of the traced float64 problem, here and at every nearby point the
check looks at: what a wrong backward pass would give it. (Faults in real layers, with blame: tests/test_checks*.)
Models share a traced program per architecture; each seed has its own weights and data.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from keras_gradwatch.check import CheckSettings, check_problem
from keras_gradwatch.checks import Checker
from keras_gradwatch.probe import Batch, arrays_of
from keras_gradwatch.verdicts import PointProblem

Gradients = list[np.ndarray]
SEEDS = 20


def built(model: keras.Model, loss: Any = "mse") -> keras.Model:
    model.compile("sgd", loss)
    return model


def mlp(sizes: tuple[int, ...], activation: str, loss: Any = "mse", **settings: Any) -> keras.Model:
    hidden = [layers.Dense(n, activation, **settings) for n in sizes[1:-1]]
    return built(keras.Sequential([keras.Input(sizes[:1]), *hidden, layers.Dense(sizes[-1], **settings)]), loss)


def convolutional(activation: str = "relu") -> keras.Model:
    parts = [layers.Conv2D(8, 3, use_bias=False), layers.BatchNormalization(), layers.Activation(activation)]
    parts += [layers.MaxPooling2D(), layers.Conv2D(12, 3, activation=activation), layers.GlobalAveragePooling2D()]
    return built(keras.Sequential([keras.Input((12, 12, 2)), *parts, layers.Dense(5)]))


def attention() -> keras.Model:
    inputs = keras.Input((8, 16))
    h = layers.LayerNormalization()(inputs)
    h = layers.Add()([inputs, layers.MultiHeadAttention(2, 8)(h, h)])
    h = layers.Add()([h, layers.Dense(16)(layers.Dense(32, "gelu")(layers.LayerNormalization()(h)))])
    return built(keras.Model(inputs, layers.Dense(5)(layers.GlobalAveragePooling1D()(h))))


def siamese() -> keras.Model:
    encoder = keras.Sequential([keras.Input((10,)), layers.Dense(12, "tanh"), layers.Dense(6, "relu")])
    a, b = keras.Input((10,)), keras.Input((10,))
    return built(keras.Model([a, b], layers.Dense(3)(layers.Subtract()([encoder(a), encoder(b)]))))


def sequence(*parts: Any, loss: Any = "mse", units: int = 3) -> keras.Model:
    return built(keras.Sequential([keras.Input((9, 6)), *parts, layers.Dense(units)]), loss)


def masked(cell: type[layers.Layer]) -> keras.Model:
    return sequence(layers.Masking(), cell(8, dropout=0.2))


def pictures(*parts: Any) -> keras.Model:
    model = keras.Sequential([keras.Input((10, 10, 2)), *parts, layers.GlobalAveragePooling2D(), layers.Dense(3)])
    return built(model)


def penalised() -> keras.Model:
    hidden = layers.Dense(12, "tanh", kernel_regularizer="l2", activity_regularizer="l1")
    return built(keras.Sequential([keras.Input((10,)), hidden, layers.Dense(3)]))


def half(dtype: str) -> keras.Model:
    return mlp((10, 16, 8, 3), "relu", dtype=dtype)


def far(y: Any, p: Any) -> Any:
    return ops.sum(ops.square(y - p)) + 1e7


SMALL = (10, 16, 8, 3)
HEALTHY: dict[str, Callable[[], keras.Model]] = {
    "tanh": lambda: mlp(SMALL, "tanh"),
    "relu": lambda: mlp(SMALL, "relu"),
    "relu, 10k": lambda: mlp((32, 96, 64, 8), "relu"),
    "leaky relu": lambda: mlp(SMALL, "leaky_relu"),
    "gelu": lambda: mlp(SMALL, "gelu"),
    "mean absolute error": lambda: mlp(SMALL, "relu", "mae"),
    "hinge": lambda: mlp(SMALL, "tanh", "hinge"),
    "huber": lambda: mlp(SMALL, "relu", "huber"),
    "loss 1e7": lambda: mlp(SMALL, "tanh", far),
    "loss × 1e-8": lambda: mlp(SMALL, "relu", lambda y, p: 1e-8 * ops.mean(ops.square(y - p))),
    "CNN, BatchNorm, max-pool": convolutional,
    "CNN, depthwise, transposed": lambda: pictures(
        layers.DepthwiseConv2D(3, activation="relu"), layers.Conv2DTranspose(4, 3, strides=2), layers.ReLU()
    ),
    "CNN on blank pixels": lambda: pictures(layers.Conv2D(6, 3, activation="relu"), layers.MaxPooling2D()),
    "dropout": lambda: pictures(layers.Conv2D(6, 3), layers.Dropout(0.4), layers.GaussianNoise(0.2)),
    "Conv1D": lambda: sequence(layers.Conv1D(8, 3, activation="relu"), layers.GlobalMaxPooling1D()),
    "LSTM, mask": lambda: masked(layers.LSTM),
    "GRU, mask": lambda: masked(layers.GRU),
    "bidirectional": lambda: sequence(layers.Bidirectional(layers.SimpleRNN(6))),
    "attention, LayerNorm": attention,
    "siamese": siamese,
    "penalties": penalised,
    "mixed_float16": lambda: half("mixed_float16"),
    "mixed_bfloat16": lambda: half("mixed_bfloat16"),
    "float64": lambda: half("float64"),
}


def drawn_weights(checker: Checker, batch: Batch, generator: np.random.Generator) -> list[np.ndarray]:
    """New weights: glorot normal kernels; biases and scales as they are (zero biases!) or a little moved."""
    moved = generator.random() < 0.5
    found = []
    for variable in checker._traced(batch)[0].variables:
        shape, value = tuple(variable.shape), np.asarray(variable.value, np.float64)
        if len(shape) > 1:
            fans = np.prod(shape[:-1]) + np.prod(shape[:-2]) * shape[-1]
            value = generator.standard_normal(shape) * np.sqrt(2 / fans)
        elif moved:
            value = value + 0.1 * generator.standard_normal(shape)
        found.append(value.astype(np.asarray(variable.value).dtype))
    return found


def drawn_batch(model: keras.Model, generator: np.random.Generator, *, blank: bool = False, rows: int = 8) -> Batch:
    def drawn(tensor: Any) -> np.ndarray:
        values = generator.standard_normal((rows, *tensor.shape[1:]))
        if blank:
            values[:, :4] = 0.0
        return values.astype(np.float32)

    x = [drawn(tensor) for tensor in model.inputs]
    if any(isinstance(layer, layers.Masking) for layer in model.layers):
        x[0][:, 6:] = 0.0
    y = generator.standard_normal((rows, model.outputs[0].shape[-1])).astype(np.float32)
    return arrays_of(Batch(x[0] if len(x) == 1 else x, np.sign(y) if model.loss == "hinge" else y))


def place(g: Gradients, kind: str) -> int:
    """Index of the first kernel, the first or the last vector."""
    found = [k for k, each in enumerate(g) if (each.ndim > 1) == (kind == "kernel")]
    return found[-1] if kind == "last vector" else found[0]


def changed(kind: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Gradients], Gradients]:
    """A fault in one tensor."""
    return lambda g: [change(each.copy()) if k == place(g, kind) else each for k, each in enumerate(g)]


def one_entry(kernel: np.ndarray) -> np.ndarray:
    order = np.argsort(-np.abs(kernel), axis=None)
    kernel.flat[order[len(order) // 4]] *= 2  # an entry of ordinary size: the upper quartile
    return kernel


def one_branch(kernel: np.ndarray) -> np.ndarray:
    kernel[..., kernel.shape[-1] // 2 :] = 0.0
    return kernel


def one_bias(vector: np.ndarray) -> np.ndarray:
    vector[np.argmax(np.abs(vector))] *= 1.01
    return vector


FAULTS: dict[str, Callable[[Gradients], Gradients]] = {
    "everything × 1.01": lambda g: [1.01 * each for each in g],
    "first kernel × 1.01": changed("kernel", lambda k: 1.01 * k),
    "first kernel × 1.1": changed("kernel", lambda k: 1.1 * k),
    "first kernel, sign": changed("kernel", lambda k: -k),
    "first kernel, one entry doubled": changed("kernel", one_entry),
    "first kernel, rows rolled": changed("kernel", lambda k: np.roll(k, 1, axis=-2)),
    "first kernel, one branch only": changed("kernel", one_branch),
    "first vector × 1.01": changed("vector", lambda v: 1.01 * v),
    "first vector × 1.1": changed("vector", lambda v: 1.1 * v),
    "first vector zeroed": changed("vector", lambda v: 0 * v),
    "first vector, mean for sum": changed("vector", lambda v: v / 32),
    "1 % in one entry of a vector": changed("vector", one_bias),
    "last bias zeroed": changed("last vector", lambda v: 0 * v),
}


class Planted(PointProblem):
    """A traced problem whose analytic gradient of the weights is changed."""

    def __init__(self, point: Any, fault: Callable[[Gradients], Gradients], weights: int, floor: float = 0.0) -> None:
        self.fault, self.weights = fault, weights
        gradients = [np.asarray(g, np.float64) for g in point.gradients]
        wrong = [*fault(gradients[:weights]), *gradients[weights:]]
        summaries = point.summaries.copy()
        summaries[:, 1] = [np.linalg.norm(g) for g in wrong]
        slopes = tf.constant(np.concatenate([g.ravel() for g in wrong]))
        super().__init__(replace(point, slopes=slopes, summaries=summaries), floor)
        self.honest = point
        largest = max(np.linalg.norm(g) for g in gradients)  # a gradient that is zero but for rounding stays zero
        self.differs = [np.linalg.norm(a - b) > 1e-12 * largest for a, b in zip(gradients, wrong, strict=True)]

    def jittered(self, size: float, seed: int) -> Planted:
        return Planted(self.honest.moved(size * self.scales, seed), self.fault, self.weights, self.floor)


ARCHITECTURES: dict[str, Callable[[], keras.Model]] = {
    "1k tanh": lambda: mlp((16, 28, 16, 1), "tanh"),
    "1k relu": lambda: mlp((16, 28, 16, 1), "relu"),
    "10k tanh": lambda: mlp((32, 96, 64, 8), "tanh"),
    "10k relu": lambda: mlp((32, 96, 64, 8), "relu"),
    "CNN": convolutional,
    "attention": attention,
}


def tried(checker: Checker, model: keras.Model, seed: int, quick: bool) -> Iterator[tuple[str, bool, bool]]:
    """Per fault: was it found, and were exactly the right tensors named?"""
    generator = np.random.default_rng(seed)
    batch = drawn_batch(model, generator, rows=32)
    subject, shadow, _, _ = checker._traced(batch)
    values = shadow.feed(*subject.values(batch, drawn_weights(checker, batch, generator)))
    point = shadow.main.point(*values)
    for name, fault in FAULTS.items():
        problem = Planted(point, fault, len(subject.variables))
        outcome = check_problem(problem, seed, CheckSettings(quick=quick))
        named = [verdict == "mismatch" for verdict in outcome.verdicts]
        yield name, any(named), named == problem.differs


def power() -> Iterator[str]:
    yield f"found (exactly the right tensors named), of {SEEDS} models; then the same for later, one-sided checks"
    tables: dict[str, dict[str, str]] = {name: {} for name in FAULTS}
    for architecture, build in ARCHITECTURES.items():
        keras.utils.set_random_seed(0)
        model = build()
        checker = Checker(model)
        for quick in (False, True):
            rows = [row for seed in range(SEEDS) for row in tried(checker, model, seed, quick)]
            for name in FAULTS:
                hits = [(found, exact) for fault, found, exact in rows if fault == name]
                cell = f"{sum(found for found, _ in hits)} ({sum(exact for _, exact in hits)})"
                tables[name][architecture] = " / ".join(filter(None, [tables[name].get(architecture, ""), cell]))
    yield "| planted | " + " | ".join(ARCHITECTURES) + " |"
    yield "|---" * (len(ARCHITECTURES) + 1) + "|"
    for name, cells in tables.items():
        yield f"| {name} | " + " | ".join(cells.values()) + " |"


def calm(seeds: int = 45) -> Iterator[str]:
    yield "| correct models | checks | verdicts | worst error | median losses | alarms |"
    yield "|---|---|---|---|---|---|"
    alarms = checks = 0
    for name, build in HEALTHY.items():
        keras.utils.set_random_seed(1)
        model = build()
        checker = Checker(model)
        verdicts: Counter[str] = Counter()
        worst, spent, flagged = 0.0, [], 0
        for seed in range(seeds):
            generator = np.random.default_rng([seed, 7])
            batch = drawn_batch(model, generator, blank="blank" in name)
            result = checker.check(batch, seed=seed, weights=drawn_weights(checker, batch, generator))
            verdicts.update(check.verdict for check in result.checks)
            worst = max([worst, *(check.error for check in result.checks if check.verdict == "ok")])
            spent.append(result.evaluations)
            flagged += any(c.verdict not in ("ok", "zero", "kink") for c in result.checks)
        alarms, checks = alarms + flagged, checks + seeds
        counted = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
        yield f"| {name} | {seeds} | {counted} | {worst:.0e} | {np.median(spent):.0f} | {flagged} |"
    yield f"| all | {checks} | | | | {alarms} |"


if __name__ == "__main__":
    start = time.time()
    for chosen in sys.argv[1:] or ["power", "calm"]:
        for line in {"power": power, "calm": calm}[chosen]():
            print(line, flush=True)
    print(f"{time.time() - start:.0f} s")
