"""A transformer on handwritten digits, read row by row, with an attention mask that one empty image turns to NaN.

Run with ``python examples/transformer.py``; needs ``keras-gradwatch[tensorflow,examples]``, no download.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from keras import layers, ops
from sklearn.datasets import load_digits

from keras_gradwatch import GradWatch, check_gradients

BLOCKS = 1  # more take longer to trace, and show the same


class Attention(layers.Layer):
    """Self-attention that ignores empty rows; with ``-inf`` for what is masked, as often seen, or a finite number."""

    def __init__(self, masked: float, size: int = 16, **settings):
        super().__init__(**settings)
        self.masked, self.size = masked, size
        self.query, self.key, self.value = (layers.Dense(size, name=name) for name in ("query", "key", "value"))

    def build(self, shape):
        for part in (self.query, self.key, self.value):
            part.build(shape[0] if isinstance(shape, list) else shape)

    def call(self, inputs):
        rows, has_ink = inputs
        scores = ops.matmul(self.query(rows), ops.swapaxes(self.key(rows), 1, 2)) / self.size**0.5
        scores = ops.where(has_ink[:, None, :], scores, ops.cast(self.masked, scores.dtype))
        # Where every row is empty, all scores are the same: -inf - -inf is NaN, -1e9 - -1e9 is 0.
        return ops.matmul(ops.softmax(scores), self.value(rows))


def transformer(masked: float) -> keras.Model:
    """Blocks with pre-normalisation, over eight rows of eight pixels."""
    image = keras.Input((8, 8), name="rows")
    has_ink = layers.Lambda(lambda x: ops.any(x > 0, axis=-1), name="has_ink")(image)
    x = layers.Dense(16, name="embed")(image)
    for block in range(1, BLOCKS + 1):
        normed = layers.LayerNormalization(name=f"norm_{block}a")(x)
        x = layers.Add(name=f"add_{block}a")([x, Attention(masked, name=f"attention_{block}")([normed, has_ink])])
        normed = layers.LayerNormalization(name=f"norm_{block}b")(x)
        wide = layers.Dense(32, activation="gelu", name=f"wide_{block}")(normed)
        x = layers.Add(name=f"add_{block}b")([x, layers.Dense(16, name=f"narrow_{block}")(wide)])
    classes = layers.Dense(10, name="classes")(layers.GlobalAveragePooling1D(name="average")(x))
    model = keras.Model(image, classes, name="transformer")
    model.compile(
        optimizer=keras.optimizers.Adam(3e-3), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    return model


def data() -> tuple[np.ndarray, np.ndarray]:
    """1,797 real digits, and among them one empty image, as a scanner may deliver it."""
    digits = load_digits()
    x, y = (digits.images / 16).astype("float32"), digits.target
    x[1000] = 0
    return x, y


def train(title: str, model: keras.Model) -> GradWatch:
    """Two epochs, in the given order, stopped where something breaks; what GradWatch says is printed."""
    print(f"\n━━━ {title}")
    x, y = data()
    watch = GradWatch(check_freq="start", stop_on="errors", verbose=0)
    model.fit(x, y, batch_size=32, epochs=2, verbose=0, shuffle=False, callbacks=[watch])
    print(watch.summary())
    return watch


def main() -> None:
    """The run that breaks, the run that does not, and a check of the finished model."""
    keras.utils.set_random_seed(5)
    train("1 · masked with -inf: training breaks at the batch with the empty image", transformer(float("-inf")))
    keras.utils.set_random_seed(5)
    model = transformer(-1e9)
    watch = train("2 · masked with -1e9", model)

    rows = watch.history.query("role == 'weight'")
    rates = rows.groupby("layer", observed=True, sort=False)["update_ratio"].median().sort_values()
    print(f"\nslowest to learn: {', '.join(f'{layer} {rate:.0e}' for layer, rate in rates.head(3).items())}")
    x, y = data()
    report = check_gradients(model, x[996:1004], y[996:1004])
    worst = report.frame["check_error"].max()
    print(f"\nafter training, on eight images, one of them empty: ok={report.ok}, worst error {worst:.0e}")


if __name__ == "__main__":
    main()
