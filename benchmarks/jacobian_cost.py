"""Cost of checking all 9,896 weights of an MLP 32-96-64-8: ours against ``tf.test.compute_gradient``.

Prints seconds (read them as ratios: the peer runs once, ours several times before and after it) for

* ``tf.test.compute_gradient`` on a compiled float32 loss: full Jacobian, 19,799 calls of f;
* ``compute_gradient``: the same Jacobian, differences in float64, in compiled blocks;
* ``check_gradients``: the verdict per tensor with an error bar, by directions (first call, and steady state).

Run with ``python benchmarks/jacobian_cost.py``. Figures: ``benchmarks/RESULTS.md``.
"""

import os
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

from keras_gradwatch import compute_gradient
from keras_gradwatch.checks import Checker, check_gradients
from keras_gradwatch.probe import Batch, arrays_of


def seconds(call, repeats: int = 1) -> float:
    """Median wall time of a call."""
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def main() -> None:
    """Measure and print one table."""
    keras.utils.set_random_seed(0)
    widths = [keras.layers.Dense(n, activation="tanh") for n in (96, 64)]
    model = keras.Sequential([keras.Input((32,)), *widths, keras.layers.Dense(8)])
    model.compile("sgd", "mse")
    generator = np.random.default_rng(0)
    x, y = (generator.standard_normal((32, n)).astype("float32") for n in (32, 8))
    values = [tf.convert_to_tensor(v.value) for v in model.trainable_variables]

    @tf.function
    def loss(*weights):
        return tf.reduce_mean(tf.square(model.stateless_call(list(weights), [], x)[0] - y))

    @tf.function
    def forward_backward():
        with tf.GradientTape() as tape:
            tape.watch(values)
            result = loss(*values)
        return tape.gradient(result, values)

    checker, batch = Checker(model), arrays_of(Batch(x, y))
    rows = {"one forward + backward": seconds(forward_backward, 200)}
    rows["check_gradients, first call"] = seconds(lambda: check_gradients(model, x, y).raise_if_failed())
    checker.check(batch)
    steady = [seconds(lambda: checker.check(batch), 20)]
    rows["compute_gradient"] = seconds(lambda: compute_gradient(loss, values))
    rows["tf.test.compute_gradient"] = peer = seconds(lambda: tf.test.compute_gradient(loss, values))
    steady.append(seconds(lambda: checker.check(batch), 20))
    rows["one forward + backward"] = unit = (rows["one forward + backward"] + seconds(forward_backward, 200)) / 2
    rows["check_gradients, steady"] = statistics.mean(steady)
    print(f"TensorFlow {tf.__version__}, Keras {keras.__version__}, {os.cpu_count()} cores")
    print(f"{'':32}{'seconds':>12}{'forward+backward':>20}{'peer / this':>14}")
    for name, spent in rows.items():
        print(f"{name:32}{spent:12.4g}{spent / unit:20.0f}{peer / spent:14.0f}")


if __name__ == "__main__":
    main()
