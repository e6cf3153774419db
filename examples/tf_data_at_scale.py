"""A stream that never ends, many steps per call, and a budget: how to watch a long run for about 2 % of its time.

Run with ``python examples/tf_data_at_scale.py [output folder]``; needs ``keras-gradwatch[tensorflow,examples]``, no
download. ``tf.data`` feeds any backend as long as TensorFlow is installed.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits

from keras_gradwatch import GradWatch, read_history
from keras_gradwatch.files import write_history

EPOCHS, STEPS = 4, 200


def stream(batch_size: int = 64) -> tf.data.Dataset:
    """Digits without end, shuffled, each moved by up to a pixel: no two epochs see the same numbers."""
    digits = load_digits()
    x, y = (digits.images[..., None] / 16).astype("float32"), digits.target

    def moved(image, label):
        return tf.image.random_crop(tf.pad(image, [[1, 1], [1, 1], [0, 0]]), [8, 8, 1]), label

    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(2_000, seed=1).repeat()
    return data.map(moved, num_parallel_calls=2).batch(batch_size, drop_remainder=True).prefetch(2)


def network() -> keras.Model:
    """A small CNN; eight steps of the optimizer per call of the compiled function."""
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1), name="image"),
            layers.Conv2D(16, 3, padding="same", activation="relu", name="conv_1"),
            layers.Conv2D(16, 3, strides=2, padding="same", activation="relu", name="conv_2"),
            layers.Flatten(name="flat"),
            layers.Dense(10, name="classes"),
        ],
        name="digits",
    )
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3), steps_per_execution=8,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"],
    )  # fmt: skip
    return model


def main(folder: Path) -> None:
    """Train, then say what watching cost and what it left behind."""
    keras.utils.set_random_seed(4)
    watch = GradWatch(
        check_freq="auto",  # as often as 2 % of the training time allows: in a run of seconds, once
        track_freq=10,  # statistics of every tenth step
        verbose=0,
    )
    network().fit(stream(), epochs=EPOCHS, steps_per_epoch=STEPS, verbose=0, callbacks=[watch])
    print(watch.summary())

    cost = watch.cost
    print(f"\ntraining took {cost['training_seconds']:.1f} s, checks {cost['checks_seconds']:.1f} s", end="")
    print(", nearly all of it the first check, which traces the model in float64")
    path = folder / "stream.csv"
    write_history(watch.history, path)
    frame = read_history(path)
    print(f"{frame.step.nunique()} of {EPOCHS * STEPS} steps are in {path.name}, {path.stat().st_size / 1024:.0f} kB")
    weights = frame[frame.role == "weight"]
    table = weights.pivot_table("grad_rms", "layer", "epoch", observed=True)
    print(f"gradient rms by layer and epoch:\n{table.to_string(float_format='%.1e')}")


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    target.mkdir(parents=True, exist_ok=True)
    main(target)
