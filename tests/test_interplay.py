"""Stopping, raising and going back beside the callbacks that Keras comes with, in either order."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from keras_gradwatch import GradWatch, NonFiniteGradientError, Rollback


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


def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Three epochs of five batches; from the second epoch on the third batch has a NaN among its targets."""
    for step in range(1, 16):
        rows = slice(8 * ((step - 1) % 5), 8 * ((step - 1) % 5) + 8)
        targets = Y[rows].copy()
        if step in (8, 13):
            targets[4] = np.nan
        yield X[rows], targets


DATA: dict[str, Any] = {"epochs": 3, "steps_per_epoch": 5, "verbose": 0, "shuffle": False}


in_either_order = pytest.mark.parametrize("first", [True, False], ids=["first", "last"])


def beside(folder: Path) -> list[keras.callbacks.Callback]:
    """All the callbacks that act on a run, those that store something at every batch."""
    each_batch = {"save_weights_only": True, "save_freq": 1}
    return [
        keras.callbacks.EarlyStopping("loss", patience=5, restore_best_weights=True),
        keras.callbacks.ModelCheckpoint(str(folder / "{epoch}-{batch}.weights.h5"), **each_batch),
        keras.callbacks.BackupAndRestore(str(folder / "backup"), save_freq=1, delete_checkpoint=False),
        keras.callbacks.TerminateOnNaN(),
        keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=10.0),
    ]


def fit(watch: GradWatch, folder: Path, *, first: bool) -> tuple[keras.Model, Callable[[], Any]]:
    model, others = network(), beside(folder)
    callbacks = [watch, *others] if first else [*others, watch]
    return model, lambda: model.fit(batches(), callbacks=callbacks, **DATA)


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
def test_rolling_back_beside_other_callbacks(first: bool, tmp_path: Path) -> None:
    """Training runs to its end; no callback acts on the bad step or stores it, and both cuts of the rate multiply."""
    watch = GradWatch(stop_on="errors", action=Rollback(factor=0.5), check_freq=None, verbose=0)
    model, run = fit(watch, tmp_path, first=first)
    history = run().history
    assert len(history["loss"]) == 3
    assert np.isfinite(history["loss"]).all()
    assert finite(model)
    assert watch.findings["first_step"].tolist() == [8, 13]
    assert float(model.optimizer.learning_rate) < 0.01
    files = stored(tmp_path)
    assert len(files) > 15
    assert all(finite(each) for each in files)


@in_either_order
def test_raising_beside_other_callbacks(first: bool, tmp_path: Path) -> None:
    """The error comes before any callback sees the step: nothing broken is stored."""
    watch = GradWatch(stop_on="errors", action="raise", check_freq=None, verbose=0)
    model, run = fit(watch, tmp_path, first=first)
    with pytest.raises(NonFiniteGradientError, match="at step 8"):
        run()
    files = stored(tmp_path)
    assert len(files) >= 7
    assert all(finite(each) for each in files)
    assert not finite(model)


@in_either_order
def test_stopping_beside_other_callbacks(first: bool, tmp_path: Path) -> None:
    """Training ends after the bad step, which a callback may have stored; the best weights are put back."""
    watch = GradWatch(stop_on="errors", action="stop", check_freq=None, verbose=0)
    model, run = fit(watch, tmp_path, first=first)
    assert len(run().history["loss"]) == 2
    assert watch.history["step"].max() == 8
    assert finite(model)
    assert not all(finite(each) for each in stored(tmp_path))


def test_a_run_raised_out_of_is_resumed_before_the_bad_step(tmp_path: Path) -> None:
    """BackupAndRestore keeps its backup when an error ends training, and the next fit starts from healthy weights."""
    watch = GradWatch(stop_on="errors", action="raise", check_freq=None, verbose=0)
    backup = keras.callbacks.BackupAndRestore(str(tmp_path))
    model = network()
    with pytest.raises(NonFiniteGradientError):
        model.fit(batches(), callbacks=[watch, backup], **DATA)
    resumed = network()
    history = resumed.fit(X, Y, batch_size=8, epochs=3, verbose=0, callbacks=[watch, backup])
    assert history.epoch == [1, 2]
    assert finite(resumed)
    assert watch.history["step"].tolist()[0] == 6
