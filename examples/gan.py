"""A small GAN on real handwritten digits, in one ``fit``: declare what is reversed on purpose, see who learns faster.

The generator sits behind a gradient reversal, so that one loss trains both sides against each other, on any backend. A
reversal is a backward pass that is wrong on purpose. GradWatch finds it, says that it looks like one, and takes your
word once you declare it.

Run with ``python examples/gan.py``; needs ``keras-gradwatch[tensorflow,examples]``, no download.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from keras import layers, ops
from sklearn.datasets import load_digits

from keras_gradwatch import GradWatch

NOISE = 16


class Reversal(layers.Layer):
    """The identity, with a gradient of the other sign (Ganin and Lempitsky, 2015)."""

    def call(self, inputs):
        @ops.custom_gradient
        def reversed_gradient(x):
            def backward(*arguments, upstream=None):
                return -(arguments[0] if upstream is None else upstream)

            return x * 1, backward

        return reversed_gradient(inputs)


def adversaries() -> keras.Model:
    """Generator and discriminator in one model with two outputs: what is said of real images, and of fake ones."""
    generator = keras.Sequential(
        [
            keras.Input((NOISE,)),
            layers.Dense(64, activation="relu", name="hidden"),
            layers.Dense(64, activation="sigmoid", name="pixels"),
        ],
        name="generator",
    )
    discriminator = keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(64, activation="leaky_relu", name="hidden"),
            layers.Dense(1, name="is_real"),
        ],
        name="discriminator",
    )
    image, noise = keras.Input((64,), name="image"), keras.Input((NOISE,), name="noise")
    fake = Reversal(name="reversal")(generator(noise))
    return keras.Model(
        {"image": image, "noise": noise}, {"real": discriminator(image), "fake": discriminator(fake)}, name="gan"
    )


def train(title: str, **settings) -> GradWatch:
    """One run; what GradWatch says is printed."""
    print(f"\n━━━ {title}")
    keras.utils.set_random_seed(3)
    images = (load_digits().data / 16).astype("float32")
    noise = np.random.default_rng(3).standard_normal((len(images), NOISE)).astype("float32")
    truth = {"real": np.ones((len(images), 1), "float32"), "fake": np.zeros((len(images), 1), "float32")}
    model = adversaries()
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(1e-3, beta_1=0.5), loss={"real": loss, "fake": loss})
    watch = GradWatch(verbose=0, **settings)
    model.fit({"image": images, "noise": noise}, truth, batch_size=64, epochs=3, verbose=0, callbacks=[watch])
    print(watch.summary())
    return watch


def main() -> None:
    """Undeclared, then declared; then who learns faster."""
    train("1 · the reversal undeclared", check_freq="start", track_freq=None)
    watch = train("2 · the reversal declared", check_freq="epoch", surrogates=["reversal"])

    rows = watch.history.query("role == 'weight'")
    side = rows["tensor"].astype(str).str.extract("(generator|discriminator)")[0].rename("side")
    table = rows.groupby([side, "epoch"], observed=True)[["grad_norm", "update_ratio"]].median()
    print("\nwho learns faster: medians of gradient norm and of update/weight per step")
    print(table.unstack("epoch").to_string(float_format="%.1e"))


if __name__ == "__main__":
    main()
