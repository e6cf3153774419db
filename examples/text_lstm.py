"""Real text, character by character: a recurrent layer whose gradient never reaches the text, and one that reads it.

The text is what scikit-learn ships about its data sets; the task is to tell from 120 characters, of which the last 60
are blanked out, which data set they describe. Gradients must reach 60 steps back.

Run with ``python examples/text_lstm.py``; needs ``keras-gradwatch[tensorflow,examples]``, no download.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from keras import layers
from sklearn import datasets

from keras_gradwatch import GradWatch

LENGTH, BLANKED = 120, 60


def texts() -> tuple[np.ndarray, np.ndarray, int]:
    """Pieces of the descriptions as character codes ``[pieces, LENGTH]``, which one they are from, number of codes."""
    loaders = (datasets.load_breast_cancer, datasets.load_diabetes, datasets.load_digits, datasets.load_wine)
    documents = [" ".join(loader().DESCR.split()) for loader in loaders]
    alphabet = sorted(set("".join(documents)))
    code = {character: place + 1 for place, character in enumerate(alphabet)}
    pieces, labels = [], []
    for label, document in enumerate(documents):
        for start in range(0, len(document) - LENGTH, 8):
            pieces.append([code[character] for character in document[start : start + LENGTH]])
            labels.append(label)
    x = np.array(pieces, "int32")
    x[:, -BLANKED:] = 0
    return x, np.array(labels, "int32"), len(alphabet) + 1


def reader(recurrent: list[layers.Layer], codes: int) -> keras.Model:
    """Embedding, what reads, four classes."""
    model = keras.Sequential(
        [
            keras.Input((LENGTH,), dtype="int32", name="text"),
            layers.Embedding(codes, 16, name="embedding"),
            *recurrent,
            layers.Dense(4, name="data_set"),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(1e-2), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    return model


def train(title: str, recurrent: list[layers.Layer]) -> GradWatch:
    """One run; what GradWatch says is printed."""
    print(f"\n━━━ {title}")
    x, y, codes = texts()
    watch = GradWatch(check_freq="start", verbose=0)
    log = reader(recurrent, codes).fit(x, y, batch_size=32, epochs=3, verbose=0, callbacks=[watch])
    print(watch.summary())
    losses = ", ".join(f"{loss:.2f}" for loss in log.history["loss"])
    print(f"loss by epoch: {losses}; of a guess {np.log(4):.2f}")
    return watch


def main() -> None:
    """A layer that forgets, then what the summary advises."""
    keras.utils.set_random_seed(2)
    forgetful = layers.SimpleRNN(24, activation="sigmoid", name="rnn")
    train("1 · SimpleRNN with sigmoid: the gradient fades over the time steps", [forgetful])
    keras.utils.set_random_seed(2)
    lstm = layers.LSTM(24, return_sequences=True, name="lstm")
    train("2 · LSTM, with pooling over time, as advised", [lstm, layers.GlobalAveragePooling1D(name="average")])


if __name__ == "__main__":
    main()
