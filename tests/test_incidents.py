"""An incident is written whole or not at all, holds plain files, and replays to the last bit in a fresh process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from keras_gradwatch import GradWatch, IncidentSink, replay_incident
from keras_gradwatch.cli import main
from keras_gradwatch.files import read_history


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


X, Y = floats(40, 4), floats(40, 1, seed=1)
BAD_ROW = 21


@pytest.fixture(autouse=True)
def _clean_start() -> None:
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(5)


@keras.saving.register_keras_serializable("incident_tests")
class SquareRoot(layers.Layer):
    """√|x| without an epsilon: its slope at 0 is infinite."""

    def call(self, x: Any) -> Any:
        return keras.ops.sqrt(keras.ops.abs(x))


def network() -> keras.Model:
    """Dropout, averages and Adam: much that a replay must bring back. Zero features reach the root at zero."""
    inputs = keras.Input((4,), name="features")
    hidden = layers.Dropout(0.3)(layers.BatchNormalization()(layers.Dense(6, "tanh", name="first")(inputs)))
    root = SquareRoot(name="root")(layers.Dense(3, use_bias=False, name="second")(inputs))
    model = keras.Model(inputs, layers.Dense(1, name="last")(layers.Concatenate()([hidden, root])), name="model")
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


@keras.saving.register_keras_serializable("incident_tests")
class Wrong(layers.Layer):
    """Doubles, but sends back three times the gradient."""

    def call(self, x: Any) -> Any:
        return tripled(x)


def tripled(x: Any) -> Any:
    import tensorflow as tf

    @tf.custom_gradient
    def double(x: Any) -> Any:
        return 2.0 * x, lambda upstream: 3.0 * upstream

    return double(x)


def model_with_wrong_scale() -> keras.Model:
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(1)(Wrong(name="wrong")(layers.Dense(4, "tanh", name="before")(inputs))))
    model.compile("sgd", "mse")
    return model


def write_incident(folder: Path, **settings: Any) -> Path:
    data = X.copy()
    data[BAD_ROW] = 0.0
    watch = GradWatch(stop_on="errors", check_freq=None, sinks=(IncidentSink(folder, **settings),), verbose=0)
    weights = np.linspace(0.5, 1.5, 40).astype("float32")
    network().fit(data, Y, sample_weight=weights, batch_size=8, shuffle=False, verbose=0, callbacks=[watch])
    assert watch.findings["finding"].tolist() == ["nonfinite"]
    return next(folder.iterdir())


def test_an_incident_replays_to_the_last_bit_in_a_fresh_process(tmp_path: Path) -> None:
    """Another process finds the same numbers, and names layer, direction and sample again."""
    folder = write_incident(tmp_path / "incidents")
    code = (
        "import sys; sys.path.insert(0, 'tests'); import test_incidents\n"
        "from keras_gradwatch import replay_incident\n"
        f"replay = replay_incident({str(folder)!r})\n"
        "print(replay); print(replay.same, replay.shows_again, replay.samples, replay.findings[0].layer)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().endswith(f"True True ({BAD_ROW - 16},) root")
    assert "its backward gives NaN or Inf" in done.stdout
    assert f"row {BAD_ROW - 16} of the batch" in done.stdout
    assert "numbers are the same to the last bit" in done.stdout


def test_an_incident_holds_plain_files(tmp_path: Path) -> None:
    """JSON, arrays without pickles, a Keras model with the weights of before, and a history."""
    folder = write_incident(tmp_path)
    assert sorted(file.name for file in folder.iterdir()) == [
        "batch.npz",
        "incident.json",
        "model.keras",
        "rows.csv",
        "state.npz",
    ]
    content = json.loads((folder / "incident.json").read_text())
    assert (content["step"], content["finding"]["finding"], content["finding"]["samples"]) == (3, "nonfinite", [5])
    for name in ("batch.npz", "state.npz"):
        with np.load(folder / name, allow_pickle=False) as arrays:
            assert all(arrays[key].dtype.kind in "biuf" for key in arrays.files)
    with np.load(folder / "batch.npz") as arrays:
        np.testing.assert_array_equal(arrays["batch/1"], Y[16:24])
        np.testing.assert_allclose(arrays["batch/2"], np.linspace(0.5, 1.5, 40)[16:24], rtol=1e-6)
    model = keras.saving.load_model(folder / "model.keras", safe_mode=True)
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    assert int(model.optimizer.iterations) == 2
    assert read_history(folder / "rows.csv")["step"].unique().tolist() == [1, 2, 3]


def test_the_run_goes_on_as_if_nothing_had_been_written(tmp_path: Path) -> None:
    """Writing the model of before leaves the weights of now in place."""
    weights = []
    for sinks in ((), (IncidentSink(tmp_path),)):
        keras.utils.set_random_seed(3)
        model = network()
        targets = Y.copy()
        targets[BAD_ROW] = np.nan
        model.layers[3].trainable = False
        model.fit(X, targets, batch_size=8, shuffle=False, verbose=0,
                  callbacks=[GradWatch(check_freq=None, sinks=sinks, verbose=0)])  # fmt: skip
        weights.append(model.get_weights())
    for plain, written in zip(*weights, strict=True):
        np.testing.assert_array_equal(plain, written)
    assert len(list(tmp_path.iterdir())) == 1


def test_an_unknown_class_is_told_with_the_way_out(tmp_path: Path) -> None:
    """Without its class the model cannot be loaded; with custom_objects, or the model itself, it can."""
    folder = write_incident(tmp_path)
    registered = keras.saving.get_custom_objects()
    own = registered.pop("incident_tests>SquareRoot")
    try:
        with pytest.raises(ValueError, match=r"pass custom_objects=.*state\.npz and batch\.npz can be read"):
            replay_incident(folder)
        assert replay_incident(folder, custom_objects={"incident_tests>SquareRoot": own}).same
        assert replay_incident(folder, model=network()).same
    finally:
        registered["incident_tests>SquareRoot"] = own


def test_a_wrong_backward_replays_its_check(tmp_path: Path) -> None:
    """A mismatch comes again with the same errors, on the same probe and directions."""
    model = model_with_wrong_scale()
    watch = GradWatch(stop_on="mismatch", sinks=(IncidentSink(tmp_path),), verbose=0, seed=11)
    model.fit(X, Y, batch_size=8, verbose=0, callbacks=[watch])
    (folder,) = tmp_path.iterdir()
    replay = replay_incident(folder, model=model_with_wrong_scale())
    assert replay.same
    assert replay.shows_again
    assert "check_error" in set(replay.frame["number"])
    assert replay.findings[0].layer == "wrong"


def test_an_explosion_is_replayed_with_its_sample(tmp_path: Path) -> None:
    """The step with the largest gradient is kept, and the sample behind it is named."""
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(1, name="only")(layers.Dense(4, "tanh")(inputs)))
    model.compile(keras.optimizers.SGD(10.0), "mse")
    targets = Y.copy()
    targets[3] = 1e5
    watch = GradWatch(stop_on="exploding", check_freq=None, sinks=(IncidentSink(tmp_path),), verbose=0)
    model.fit(X, targets, batch_size=40, epochs=30, verbose=0, callbacks=[watch], shuffle=False)
    assert watch.findings["finding"][0] in ("exploding", "nonfinite")
    folder = next(path for path in tmp_path.iterdir())
    replay = replay_incident(folder)
    assert replay.same


def test_number_and_size_are_bounded(tmp_path: Path) -> None:
    """A folder that is full takes no further incident, and one that is too large is told once."""
    write_incident(tmp_path / "few", max_incidents=1)
    data = X.copy()
    data[BAD_ROW] = 0.0
    sink = IncidentSink(tmp_path / "few", max_incidents=1)
    network().fit(data, Y, batch_size=8, verbose=0, callbacks=[GradWatch(sinks=(sink,), check_freq=None, verbose=0)])
    assert len(list((tmp_path / "few").iterdir())) == 1
    sink = IncidentSink(tmp_path / "small", max_bytes=100)
    watch = GradWatch(sinks=(sink,), check_freq=None, verbose=0)
    with pytest.warns(RuntimeWarning, match="does not fit into max_bytes=100"):
        network().fit(data, Y, batch_size=8, verbose=0, callbacks=[watch])
    assert list((tmp_path / "small").iterdir()) == []


def test_a_disk_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the middle of writing is one warning; no half folder stays, and training goes on."""
    from keras_gradwatch import incidents

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(incidents, "write_json", full)
    data = X.copy()
    data[BAD_ROW] = 0.0
    watch = GradWatch(check_freq=None, sinks=(IncidentSink(tmp_path),), verbose=0)
    with pytest.warns(RuntimeWarning, match="No space left on device") as caught:
        network().fit(data, Y, batch_size=8, shuffle=False, verbose=0, callbacks=[watch])
    assert [str(w.message) for w in caught][1:] == []
    assert list(tmp_path.iterdir()) == []
    assert watch.history["step"].max() == 5


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path: Path) -> None:
    """A file in the place of the folder: one warning as training begins, and no more."""
    (tmp_path / "taken").touch()
    watch = GradWatch(check_freq=None, sinks=(IncidentSink(tmp_path / "taken"),), verbose=0)
    with pytest.warns(RuntimeWarning, match="IncidentSink raised"):
        network().fit(X, Y, batch_size=8, verbose=0, callbacks=[watch])


def test_replay_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 1 when the fault shows again, 2 when there is no incident."""
    folder = write_incident(tmp_path)
    assert main(["replay", str(folder)]) == 1
    assert "all" in capsys.readouterr().out
    assert main(["replay", str(folder), "--json", "--fail-on", "never"]) == 0
    assert json.loads(capsys.readouterr().out)["same"] is True
    assert main(["replay", str(tmp_path / "nothing")]) == 2
    assert os.listdir(folder)
