"""Stopping, raising and going back beside the callbacks that Keras comes with, in either order."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from keras_gradwatch import GradWatch, NonFiniteGradientError


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


X, Y = floats(40, 4), floats(40, 1, seed=1)


@pytest.fixture(autouse=True)
def _clean_start() -> None:
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(5)


def network() -> keras.Model:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(8, "tanh"), layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


class BadLater(keras.utils.PyDataset):
    """Five batches an epoch; from the second epoch on the third batch has a NaN among its targets."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rows = slice(8 * index, 8 * index + 8)
        targets = Y[rows].copy()
        if self.epoch > 0 and index == 2:
            targets[4] = np.nan
        return X[rows], targets

    def on_epoch_end(self) -> None:
        self.epoch += 1


Made = Callable[[Path], keras.callbacks.Callback]
BESIDE: dict[str, Made] = {
    "stopping": lambda _: keras.callbacks.EarlyStopping("loss", patience=5, restore_best_weights=True),
    "checkpoint": lambda at: keras.callbacks.ModelCheckpoint(
        str(at / "{epoch}-{batch}.weights.h5"), save_weights_only=True, save_freq=1
    ),
    "backup": lambda at: keras.callbacks.BackupAndRestore(str(at / "backup"), save_freq=1, delete_checkpoint=False),
    "nan": lambda _: keras.callbacks.TerminateOnNaN(),
    "plateau": lambda _: keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=10.0),
}
in_either_order = pytest.mark.parametrize("first", [True, False], ids=["first", "last"])
beside_each = pytest.mark.parametrize("name", list(BESIDE))


def fit(watch: GradWatch, other: keras.callbacks.Callback, *, first: bool) -> tuple[keras.Model, Any]:
    model = network()
    callbacks = [watch, other] if first else [other, watch]
    return model, lambda: model.fit(BadLater(), epochs=3, verbose=0, shuffle=False, callbacks=callbacks)


def finite(model: keras.Model) -> bool:
    return all(np.isfinite(weight).all() for weight in model.get_weights())


def stored(folder: Path) -> list[keras.Model]:
    """Models with the weights of every file written."""
    models = []
    for path in folder.rglob("*.weights.h5"):
        model = network()
        model.optimizer.build(model.trainable_variables)
        model.load_weights(path)
        models.append(model)
    return models


@in_either_order
@beside_each
def test_rolling_back_beside_another_callback(name: str, first: bool, tmp_path: Path) -> None:
    """Training runs to its end; no callback acts on the bad step or stores it."""
    watch = GradWatch(stop_on="errors", action="rollback", check_freq=None, verbose=0)
    model, run = fit(watch, BESIDE[name](tmp_path), first=first)
    history = run()
    assert len(history.history["loss"]) == 3
    assert np.isfinite(history.history["loss"]).all()
    assert finite(model)
    assert watch.findings["first_step"].tolist() == [8, 13]
    assert all(finite(each) for each in stored(tmp_path))


@in_either_order
@beside_each
def test_raising_beside_another_callback(name: str, first: bool, tmp_path: Path) -> None:
    """The error comes before any callback sees the step: nothing broken is stored."""
    watch = GradWatch(stop_on="errors", action="raise", check_freq=None, verbose=0)
    model, run = fit(watch, BESIDE[name](tmp_path), first=first)
    with pytest.raises(NonFiniteGradientError, match="at step 8"):
        run()
    assert all(finite(each) for each in stored(tmp_path))
    assert not finite(model)


@in_either_order
@beside_each
def test_stopping_beside_another_callback(name: str, first: bool, tmp_path: Path) -> None:
    """Training ends after the bad step; best weights are put back by the callback that keeps them."""
    watch = GradWatch(stop_on="errors", action="stop", check_freq=None, verbose=0)
    model, run = fit(watch, BESIDE[name](tmp_path), first=first)
    history = run()
    assert len(history.history["loss"]) == 2
    assert watch.history["step"].max() == 8
    assert finite(model) == (name == "stopping")


def test_a_run_raised_out_of_is_resumed_before_the_bad_step(tmp_path: Path) -> None:
    """BackupAndRestore keeps its backup when an error ends training, and the next fit starts from healthy weights."""
    watch = GradWatch(stop_on="errors", action="raise", check_freq=None, verbose=0)
    backup = keras.callbacks.BackupAndRestore(str(tmp_path))
    model = network()
    with pytest.raises(NonFiniteGradientError):
        model.fit(BadLater(), epochs=3, verbose=0, shuffle=False, callbacks=[watch, backup])
    resumed = network()
    history = resumed.fit(X, Y, batch_size=8, epochs=3, verbose=0, callbacks=[watch, backup])
    assert history.epoch == [1, 2]
    assert finite(resumed)
    assert watch.history["step"].tolist()[0] == 6
