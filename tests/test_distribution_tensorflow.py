"""Training on two replicas (``tf.distribute.MirroredStrategy`` on two logical CPU devices) is watched like on one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")

#: Runs in a process of its own: logical devices must be set before TensorFlow starts.
PROGRAM = """
import contextlib, json, os, sys, warnings
os.environ["KERAS_BACKEND"] = "tensorflow"
import tensorflow as tf, numpy as np, keras
from keras_gradwatch import GradWatch
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)

@tf.custom_gradient
def off(x):
    return 1.0 * x, lambda upstream: 1.1 * upstream

class Off(keras.layers.Layer):
    def call(self, x):
        return off(x)

def run(replicas, watch, *, layer=None, bad_row=None, batches=8):
    keras.utils.set_random_seed(0)
    generator = np.random.default_rng(0)
    x = generator.standard_normal((16 * batches, 8), dtype="float32")
    y = generator.standard_normal((16 * batches, 1), dtype="float32")
    if bad_row is not None:
        y[bad_row] = np.nan
    strategy = tf.distribute.MirroredStrategy([f"CPU:{k}" for k in range(replicas)]) if replicas > 1 else None
    with strategy.scope() if strategy else contextlib.nullcontext():
        middle = [layer()] if layer else []
        model = keras.Sequential(
            [keras.Input((8,)), keras.layers.Dense(8, "tanh", name="d0"), *middle, keras.layers.Dense(1, name="d1")]
        )
        model.compile(keras.optimizers.SGD(0.1), "mse")
    history = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0, callbacks=[watch] if watch else [])
    return model, history

def equal(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one.get_weights(), other.get_weights()))

two, one = GradWatch(verbose=0), GradWatch(verbose=0)
watched, alone = run(2, two), run(2, None)
run(1, one)
ratio = two.history.gradwatch.wide().to_numpy() / one.history.gradwatch.wide().to_numpy()
told = {
    "no trace": equal(watched[0], alone[0]) and watched[1].history["loss"] == alone[1].history["loss"],
    "norms differ by": float(np.abs(ratio - 1).max()),
    "verdicts": sorted(set(two.history.check.dropna())),
    "findings": list(two.findings.finding),
}
watch = GradWatch(verbose=0, stop_on="errors")
model, history = run(2, watch, layer=Off)
told["wrong layer"] = watch.findings[["finding", "layer", "first_step"]].values.tolist()
told["stopped after"] = len(history.epoch)
watch = GradWatch(verbose=0, check_freq=None)
run(2, watch, bad_row=16 * 2 + 13)
told["bad label"] = watch.findings[["finding", "layer", "first_step", "message"]].values.tolist()
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow", "PYTHONPATH": str(Path(__file__).parents[1])}
    result = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return dict(json.loads(result.stdout.strip().splitlines()[-1]))


def test_two_replicas_are_watched_without_a_trace(told: dict[str, Any]) -> None:
    """Weights and metrics are bit for bit those of the same run without the callback."""
    assert told["no trace"]


def test_norms_are_of_the_gradient_that_is_applied(told: dict[str, Any]) -> None:
    """The norms of all replicas together are those of the same batch on one device."""
    assert told["norms differ by"] < 1e-5


def test_a_healthy_model_on_two_replicas_is_healthy(told: dict[str, Any]) -> None:
    """Every tensor is certified, and nothing is found."""
    assert told["verdicts"] == ["ok"]
    assert told["findings"] == []


def test_a_wrong_layer_is_named_and_stops_all_replicas(told: dict[str, Any]) -> None:
    """A backward pass that is wrong by 10 % is found at the first step; the first epoch is the last."""
    assert told["wrong layer"] == [["mismatch", "off", 1]]
    assert told["stopped after"] == 1


def test_a_bad_label_is_named_whichever_replica_meets_it(told: dict[str, Any]) -> None:
    """Rows are those of the whole batch: number 13 of 16 lies on the second replica."""
    ((finding, layer, step, message),) = told["bad label"]
    assert (finding, layer, step) == ("nonfinite", "labels", 3)
    assert "13" in message
