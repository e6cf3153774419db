"""A net that does not learn, mended in three steps: watch, read, change one thing, watch again.

Run with ``python examples/fixing_a_vanishing_net.py``; needs ``keras-gradwatch[tensorflow,examples]``, no download.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
from keras import layers
from sklearn.datasets import load_digits

from keras_gradwatch import GradWatch

DEPTH = 8


def deep(activation: str, initializer: str) -> keras.Model:
    """Eight hidden layers between 64 pixels and ten classes."""
    hidden = [
        layers.Dense(32, activation=activation, kernel_initializer=initializer, name=f"hidden_{place}")
        for place in range(1, DEPTH + 1)
    ]
    return keras.Sequential([keras.Input((64,), name="image"), *hidden, layers.Dense(10, name="classes")])


def train(title: str, model: keras.Model, learning_rate: float) -> float:
    """Accuracy after three epochs; what GradWatch says is printed."""
    print(f"\n━━━ {title}")
    digits = load_digits()
    x, y = (digits.data / 16).astype("float32"), digits.target
    model.compile(
        optimizer=keras.optimizers.SGD(learning_rate, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"],
    )  # fmt: skip
    watch = GradWatch(check_freq="start", verbose=0)
    log = model.fit(x, y, batch_size=32, epochs=3, verbose=0, callbacks=[watch])
    print(watch.summary())

    # How fast each layer moves, relative to its own size, is the question "does it learn?" in a number.
    rows = watch.history.query("role == 'weight' and update_ratio == update_ratio")
    rates = rows.groupby("layer", observed=True, sort=False)["update_ratio"].median()
    print(f"updates per step: {rates.index[0]} {rates.iloc[0]:.0e}, {rates.index[-1]} {rates.iloc[-1]:.0e} of its size")
    accuracy = float(log.history["accuracy"][-1])
    print(f"accuracy {accuracy:.0%}")
    return accuracy


def main() -> None:
    """The same net three times, each time with what the run before advised."""
    keras.utils.set_random_seed(1)
    first = train("1 · the loss is flat, and the summary says why", deep("sigmoid", "glorot_uniform"), 0.1)
    keras.utils.set_random_seed(1)
    second = train("2 · relu with he_normal, as advised: better, with another finding", deep("relu", "he_normal"), 0.1)
    keras.utils.set_random_seed(1)
    third = train("3 · and a lower learning rate, as advised", deep("relu", "he_normal"), 0.01)
    print(f"\naccuracy: {first:.0%}, then {second:.0%}, then {third:.0%}")


if __name__ == "__main__":
    main()
