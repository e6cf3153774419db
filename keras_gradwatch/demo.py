"""A run to look at: a small model with one wrong backward pass, trained on spirals for a few seconds."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from keras_gradwatch.callback import GradWatch


class WrongScale(keras.layers.Layer):  # type: ignore[misc]  # Keras ships no types
    """Scales its input by a learnable factor; its hand-written backward forgets a tenth of the gradient."""

    def build(self, shape: Any) -> None:
        """One weight."""
        self.scale = self.add_weight(name="scale", shape=(shape[-1],), initializer="ones")

    def call(self, inputs: Any) -> Any:
        """The right forward with a wrong backward."""

        @keras.ops.custom_gradient  # type: ignore[untyped-decorator]  # Keras ships no types
        def scaled(x: Any, scale: Any) -> Any:
            def backward(*arguments: Any, upstream: Any = None) -> Any:
                upstream = arguments[0] if upstream is None else upstream
                return 0.9 * upstream * scale, keras.ops.sum(upstream * x, axis=0)

            return x * scale, backward

        return scaled(inputs, keras.ops.convert_to_tensor(self.scale))


def run_demo() -> GradWatch:
    """Trains the model under the eyes of the callback.

    Returns:
        The callback, with everything it saw.
    """
    keras.utils.set_random_seed(1)
    x, y = _spirals(np.random.default_rng(1))
    model = keras.Sequential(
        [
            keras.Input((2,), name="point"),
            keras.layers.Dense(32, activation="tanh", name="first"),
            keras.layers.Dense(32, activation="tanh", name="second"),
            WrongScale(name="scale"),
            keras.layers.Dense(1, activation="sigmoid", name="answer"),
        ],
        name="demo",
    )
    model.compile(keras.optimizers.Adam(1e-2), "binary_crossentropy")
    watch = GradWatch(verbose=0)
    model.fit(x, y, batch_size=32, epochs=5, verbose=0, callbacks=[watch])
    return watch


def _spirals(random: np.random.Generator) -> tuple[Any, Any]:
    """Two interleaved spirals of 640 points."""
    turn = np.sqrt(random.uniform(0.05, 1, 640)) * 3 * np.pi
    side = random.integers(0, 2, 640)
    angle = turn + side * np.pi
    points = np.stack([turn * np.cos(angle), turn * np.sin(angle)], axis=1) / 10 + random.normal(0, 0.02, (640, 2))
    return points.astype("float32"), side[:, None].astype("float32")
