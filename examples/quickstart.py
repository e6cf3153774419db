"""Train on real handwritten digits and let GradWatch name the culprit: four short runs, one healthy, three not.

Run with ``python examples/quickstart.py [output folder]``; needs ``keras-gradwatch[tensorflow,examples]``, no download.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

from keras_gradwatch import GradWatch, read_history
from keras_gradwatch.files import write_history


def digits() -> tuple[np.ndarray, np.ndarray]:
    """1,797 real 8×8 handwritten digits, pixels 0–1, with their labels."""
    data = load_digits()
    return (data.images[..., None] / 16).astype("float32"), data.target.astype("int32")


@keras.saving.register_keras_serializable("quickstart")
class Scale(layers.Layer):
    """A learnable scale per channel with a hand-written backward pass, off by a factor (1.0 would be right)."""

    def __init__(self, factor: float = 1.0, **settings):
        super().__init__(**settings)
        self.factor = factor

    def build(self, shape):
        self.scale = self.add_weight(name="scale", shape=(shape[-1],), initializer="ones")

    def call(self, inputs):
        @keras.ops.custom_gradient
        def scaled(x, scale):
            def backward(*arguments, upstream=None):
                upstream = arguments[0] if upstream is None else upstream
                axes = tuple(range(len(x.shape) - 1))
                return self.factor * upstream * scale, keras.ops.sum(upstream * x, axis=axes)

            return x * scale, backward

        return scaled(inputs, keras.ops.convert_to_tensor(self.scale))


def convolutional(middle: list[layers.Layer] | None = None) -> keras.Model:
    """A small CNN with BatchNormalization, max-pooling and dropout, and room for layers in the middle."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1), name="image"),
            layers.Conv2D(16, 3, padding="same", use_bias=False, name="conv_1"),
            layers.BatchNormalization(name="norm_1"),
            layers.ReLU(name="relu_1"),
            *(middle or []),
            layers.MaxPooling2D(name="pool"),
            layers.Conv2D(32, 3, padding="same", activation="relu", name="conv_2"),
            layers.GlobalAveragePooling2D(name="average"),
            layers.Dropout(0.2, name="dropout"),
            layers.Dense(10, activation="softmax", name="classes"),
        ]
    )


def deep_sigmoid() -> keras.Model:
    """Ten sigmoid layers with the default initialiser: gradients fade on the way to the input."""
    hidden = [layers.Dense(32, activation="sigmoid", name=f"sigmoid_{i}") for i in range(1, 11)]
    return keras.Sequential(
        [keras.Input((8, 8, 1)), layers.Flatten(), *hidden, layers.Dense(10, activation="softmax", name="classes")]
    )


def without_epsilon() -> keras.Model:
    """A layer that takes the logarithm of a ReLU: log(0) is infinite as soon as one unit is off."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Flatten(),
            layers.Dense(32, activation="relu", name="features"),
            layers.Lambda(lambda x: keras.ops.log(x), name="log"),
            layers.Dense(10, activation="softmax", name="classes"),
        ]
    )


def train(title: str, model: keras.Model, optimizer, **settings) -> GradWatch:
    """Fit with one more line than usual, and print what was found."""
    print(f"\n━━━ {title} " + "━" * max(0, 96 - len(title)))
    x, y = digits()
    keras.utils.set_random_seed(7)
    model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    watch = GradWatch(verbose=0, **settings)
    model.fit(x, y, batch_size=32, epochs=5, verbose=0, callbacks=[watch])
    print(watch.summary())
    return watch


def main(folder: Path) -> None:
    """All four runs."""
    keras.utils.set_random_seed(7)
    healthy = train("1 · a healthy CNN", convolutional(), keras.optimizers.Adam(3e-3))
    train(
        "2 · the same, with one layer whose backward is wrong by 10 %",
        convolutional([Scale(1.1, name="scale")]), keras.optimizers.Adam(3e-3),
    )  # fmt: skip
    train("3 · ten sigmoid layers", deep_sigmoid(), keras.optimizers.SGD(0.1))
    train("4 · a run that goes to NaN, stopped early", without_epsilon(), keras.optimizers.Adam(3e-3), stop_on="errors")

    path = folder / "healthy.csv"
    write_history(healthy.history, path)
    frame = read_history(path)
    print(f"\nhistory of run 1: {len(frame):,} rows in {path}; mean gradient norm per layer and epoch:")
    print(frame[frame.role == "weight"].pivot_table("grad_norm", "layer", "epoch", observed=True).round(4).to_string())


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    target.mkdir(parents=True, exist_ok=True)
    main(target)
