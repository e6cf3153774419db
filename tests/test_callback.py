"""The callback in a training run: what it records and when, what it tells others, and how it comes and goes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pandas as pd
import pytest
from keras import layers
from per_backend import BACKEND, only, planted

from keras_gradwatch import GradWatch
from keras_gradwatch.schema import SCHEMA

LOGS = ("grad_norm", "grad_check_error", "grad_findings")
PATHS = ["first/kernel", "first/bias", "last/kernel", "last/bias"]


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


X, Y = floats(24, 4), floats(24, 1, seed=1)


@pytest.fixture(autouse=True)
def _clean_start() -> None:
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(5)


def network(*middle: keras.layers.Layer, rate: float = 0.1) -> keras.Model:
    flow = features = keras.Input((4,), name="features")
    for layer in middle or (layers.Dense(6, activation="tanh", name="first"),):
        flow = layer(flow)
    model = keras.Model(features, layers.Dense(1, name="last")(flow), name="model")
    model.compile(keras.optimizers.SGD(rate), "mse")
    return model


def fit(
    model: keras.Model, *callbacks: keras.callbacks.Callback, epochs: int = 1, **settings: Any
) -> dict[str, list[float]]:
    """Three steps of 8 samples an epoch."""
    data = {"x": X, "y": Y, "batch_size": 8, "epochs": epochs, "shuffle": False, "verbose": 0} | settings
    history: dict[str, list[float]] = model.fit(callbacks=list(callbacks), **data).history
    return history


def checked_steps(watch: GradWatch) -> list[int]:
    frame = watch.history
    return sorted(set(frame.step[frame.check.notna()]))


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> tuple[GradWatch, dict[str, list[float]], pd.DataFrame]:
    """Two epochs of three steps with everything at its default, and a CSV log placed after the callback."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(5)
    path = tmp_path_factory.mktemp("logs") / "log.csv"
    watch = GradWatch(verbose=0)
    history = fit(network(), watch, keras.callbacks.CSVLogger(path), epochs=2)
    return watch, history, pd.read_csv(path)


Healthy = tuple[GradWatch, dict[str, list[float]], pd.DataFrame]


def test_the_history_has_the_columns_of_the_schema(healthy: Healthy) -> None:
    """Columns and dtypes are those documented, and the attributes say what was watched and with what."""
    frame = healthy[0].history
    assert list(frame.columns) == [column.name for column in SCHEMA]
    text = str(pd.Series(dtype="str").dtype)  # "object" before pandas 3
    expected = [text if column.dtype == "str" else column.dtype for column in SCHEMA]
    assert [str(dtype) for dtype in frame.dtypes] == expected
    assert frame.attrs["keras"] == keras.__version__
    assert frame.attrs["backend"] == keras.backend.backend()
    assert (frame.attrs["model"], frame.attrs["check_freq"], frame.attrs["probe"]) == ("model", "epoch", 8)
    pd.testing.assert_frame_equal(frame, healthy[0].to_frame())


def test_every_step_has_a_row_per_weight(healthy: Healthy) -> None:
    """Six steps of two epochs give a measured row for each weight, in network order."""
    frame = healthy[0].history
    weights = frame[frame.role == "weight"]
    assert list(weights.tensor) == PATHS * 6
    assert list(weights.step) == [step for step in range(1, 7) for _ in PATHS]
    assert list(weights.epoch) == [0] * 12 + [1] * 12
    assert list(weights.layer[:4]) == ["first", "first", "last", "last"]
    assert list(weights.depth[:4]) == [0, 0, 1, 1]
    assert list(weights["size"][:4]) == [24, 6, 6, 1]
    measured = weights[["loss", "grad_norm", "grad_rms", "grad_absmax", "zero_fraction", "weight_norm", "update_ratio"]]
    assert measured.iloc[4:].notna().all(axis=None)  # a bias is zero before step 1, and so has no update ratio there


def test_checks_come_at_each_epochs_first_step(healthy: Healthy) -> None:
    """Steps 1 and 4 are checked, find every weight and the input right, and only they have a row for the input."""
    watch = healthy[0]
    frame = watch.history
    assert checked_steps(watch) == [1, 4]
    assert list(frame.step[frame.role == "input"]) == [1, 4]
    assert set(frame.tensor[frame.role == "input"]) == {"features"}
    checked = frame[frame.check.notna()]
    assert len(checked) == 2 * (len(PATHS) + 1)
    assert set(checked.check) == {"ok"}
    assert checked.check_error.max() <= 1e-6
    assert checked.rounding_error.max() <= 1e-5


def test_a_healthy_run_has_no_findings(healthy: Healthy) -> None:
    """Nothing is found, the summary says so, and the cost is told in seconds and shares."""
    watch = healthy[0]
    assert watch.findings.empty
    assert {
        "finding",
        "layer",
        "tensor",
        "first_step",
        "last_step",
        "severity",
        "value",
        "limit",
        "message",
        "advice",
    } == set(watch.findings.columns)
    assert (watch.history.findings == "").all()
    assert "no findings" in watch.summary()
    assert "6 steps" in watch.summary()
    assert "checked twice" in watch.summary() or "checked 2 times" in watch.summary()
    cost = watch.cost
    seconds = {name.removesuffix("_seconds"): cost[name] for name in cost if name.endswith("_seconds")}
    training = seconds.pop("training")
    assert {"capture", "checks", "sinks"} <= set(seconds)
    assert all(cost[f"{part}_share"] == pytest.approx(spent / training) for part, spent in seconds.items())
    assert cost["share"] == pytest.approx(sum(seconds.values()) / training)


def test_the_logs_get_three_keys(healthy: Healthy) -> None:
    """Mean global norm, worst check error and number of findings reach the history and loggers placed after."""
    watch, history, log = healthy
    assert set(history) == {"loss", *LOGS}
    assert set(log.columns) >= {"epoch", "loss", *LOGS}
    frame = watch.history[watch.history.role == "weight"]
    norms = np.sqrt((frame.grad_norm**2).groupby([frame.epoch, frame.step]).sum()).groupby("epoch").mean()
    np.testing.assert_allclose(history["grad_norm"], norms, rtol=1e-12)
    np.testing.assert_allclose(log["grad_norm"], norms, rtol=1e-12)
    errors = watch.history.groupby("epoch").check_error.max()
    np.testing.assert_allclose(history["grad_check_error"], errors, rtol=0)
    assert history["grad_findings"] == [0.0, 0.0]


def test_the_epochs_mean_covers_long_epochs() -> None:
    """In an epoch longer than the rules' window, the mean norm and the error of its first step are still told."""
    x, y = np.tile(X, (20, 1)), np.tile(Y, (20, 1))
    watch = GradWatch(verbose=0)
    history = fit(network(), watch, x=x, y=y, batch_size=2)
    frame = watch.history[watch.history.role == "weight"]
    assert frame.step.max() == 240
    norms = np.sqrt((frame.grad_norm**2).groupby(frame.step).sum())
    assert history["grad_norm"] == pytest.approx([norms.mean()], rel=1e-12)
    assert history["grad_check_error"] == [watch.history.check_error.max()]


def test_keys_are_there_when_nothing_is_measured() -> None:
    """With tracking and checks off the three keys are present: NaN, NaN and no findings."""
    watch = GradWatch(check_freq=None, track_freq=None, verbose=0)
    history = fit(network(), watch)
    assert np.isnan([history["grad_norm"], history["grad_check_error"]]).all()
    assert history["grad_findings"] == [0.0]
    assert watch.history.empty
    assert "not checked" in watch.summary()


def test_early_stopping_can_watch_the_gradient_norm() -> None:
    """EarlyStopping placed after the callback stops on grad_norm."""
    stop = keras.callbacks.EarlyStopping(monitor="grad_norm", mode="min", min_delta=1e3)
    history = fit(network(), GradWatch(check_freq=None, verbose=0), stop, epochs=5)
    assert len(history["loss"]) == 2


@pytest.mark.parametrize(
    ("check_freq", "expected"), [(2, [1, 3, 5]), (100, [1]), ("start", [1]), ("epoch", [1, 4]), (None, [])]
)
def test_check_freq_says_which_steps_are_checked(check_freq: int | str | None, expected: list[int]) -> None:
    """Every N steps from the first on, the first step of each epoch, the first step alone, or none; rows say which."""
    watch = GradWatch(check_freq=check_freq, verbose=0)
    fit(network(), watch, epochs=2)
    assert checked_steps(watch) == expected


def test_auto_checks_again_when_the_time_allows() -> None:
    """check_freq="auto" checks the first step, and again once checks have cost less than 2 % of the training time."""
    watch = GradWatch(check_freq="auto", verbose=0)
    schedule_told = []
    model = network()
    fit(model, watch)
    assert checked_steps(watch) == [1]

    class Slow(keras.callbacks.Callback):
        """Training time passes: the schedule is told of it with each step."""

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            watch._run._costs._began -= 1000.0
            schedule_told.append(batch)

    fit(model, watch, Slow())
    assert checked_steps(watch) == [4, 6]


@pytest.mark.parametrize(("track_freq", "expected"), [(2, [1, 3, 5]), (100, [1]), (None, [])])
def test_track_freq_says_which_steps_have_statistics(track_freq: int | None, expected: list[int]) -> None:
    """Gradient norms come every N steps from the first on; a checked step has its rows all the same."""
    watch = GradWatch(check_freq="epoch", track_freq=track_freq, verbose=0)
    fit(network(), watch, epochs=2)
    frame = watch.history
    assert sorted(set(frame.step[frame.grad_norm.notna()])) == expected
    assert checked_steps(watch) == [1, 4]


def test_a_second_fit_starts_afresh() -> None:
    """Rows, findings and checks are those of the last run; steps go on counting with the optimizer."""
    model, watch = network(), GradWatch(verbose=0)
    fit(model, watch)
    first = watch.history
    fit(model, watch)
    assert list(first.step.unique()) == [1, 2, 3]
    assert list(watch.history.step.unique()) == [4, 5, 6]
    assert checked_steps(watch) == [4]
    assert "3 steps" in watch.summary()


def test_the_callback_moves_on_to_another_model() -> None:
    """A callback used with a second model describes the second model."""
    watch = GradWatch(verbose=0)
    fit(network(), watch)
    fit(network(layers.Dense(3, name="other")), watch)
    assert "other/kernel" in set(watch.history.tensor)
    assert "first/kernel" not in set(watch.history.tensor)


def test_two_callbacks_watch_the_same_run() -> None:
    """Each follows its own schedule, and both see the same numbers."""
    model, every, second = network(), GradWatch(verbose=0), GradWatch(check_freq=None, track_freq=2, verbose=0)
    model.make_train_function()
    own_step = model.train_function
    fit(model, every, second, epochs=2)
    assert checked_steps(every) == [1, 4]
    frames = [watch.history[watch.history.role == "weight"].set_index(["step", "tensor"]) for watch in (every, second)]
    assert sorted(set(frames[1].index.get_level_values("step"))) == [1, 3, 5]
    np.testing.assert_array_equal(frames[0].loc[[1, 3, 5]].grad_norm, frames[1].grad_norm)
    assert model.train_function is own_step


def test_a_loop_of_train_on_batch_can_be_watched() -> None:
    """Driven by hand, the callback sees every step and gives the model back."""
    model, watch = network(), GradWatch(verbose=0)
    watch.set_model(model)
    watch.on_train_begin()
    for step in range(3):
        rows = slice(8 * step, 8 * step + 8)
        watch.on_train_batch_begin(step)
        model.train_on_batch(X[rows], Y[rows])
        watch.on_train_batch_end(step)
    watch.on_train_end()
    model.train_on_batch(X[:8], Y[:8])
    assert list(watch.history.step.unique()) == [1, 2, 3]
    assert checked_steps(watch) == [1]
    assert set(watch.history.check.dropna()) == {"ok"}


def test_evaluate_and_predict_are_left_alone() -> None:
    """Given to evaluate and predict, the callback changes nothing in the model and keeps its history."""
    model, watch = network(), GradWatch(verbose=0)
    fit(model, watch)
    loss, guesses = model.evaluate(X, Y, verbose=0), model.predict(X, verbose=0)
    before, rows = dict(vars(model)), len(watch.history)
    assert model.evaluate(X, Y, verbose=0, callbacks=[watch]) == loss
    np.testing.assert_array_equal(model.predict(X, verbose=0, callbacks=[watch]), guesses)
    assert {name: value for name, value in vars(model).items() if value is not before.get(name)} == {}
    assert len(watch.history) == rows


def test_settings_survive_serialization() -> None:
    """The callback goes through keras.saving and comes back with the same settings."""
    watch = GradWatch(
        4,
        check_freq=10,
        track_freq=None,
        stop_on=("nonfinite",),
        action="raise",
        surrogates=("gate",),
        seed=3,
        verbose=0,
    )
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(watch))
    assert isinstance(again, GradWatch)
    assert again.get_config() == watch.get_config()
    assert GradWatch.from_config(watch.get_config()).get_config() == watch.get_config()
    assert (again.probe, again.check_freq, again.stop_on, again.surrogates) == (4, 10, ("nonfinite",), ("gate",))


# -- what is probed ----------------------------------------------------------------------------------------------------


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return X[8 * index : 8 * index + 5], Y[8 * index : 8 * index + 5]


def generated() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    yield X[:5], Y[:5]
    raise AssertionError("only the first batch is for the probe")


def dataset() -> Any:
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(5)


PROBES = {
    "samples": (lambda: 5, (5, 4)),
    "more_samples_than_the_batch": (lambda: 99, (8, 4)),
    "arrays": (lambda: (X[:5], Y[:5]), (5, 4)),
    "arrays_of_doubles": (lambda: (X[:5].astype("float64"), Y[:5].astype("float64")), (5, 4)),
    "weighted": (lambda: (X[:5], Y[:5], np.ones(5)), (5, 4)),
    "dataset": (lambda: dataset(), (5, 4)),
    "pydataset": (Batches, (5, 4)),
    "generator": (generated, (5, 4)),
    "callable": (lambda: lambda: (X[:5], Y[:5]), (5, 4)),
}
if BACKEND != "tensorflow":
    del PROBES["dataset"]


@pytest.mark.parametrize("kind", PROBES)
def test_the_probe_comes_in_many_forms(kind: str) -> None:
    """Whatever feeds fit can be the probe; its size shows in the row of the input, and all is found right."""
    make, shape = PROBES[kind]
    watch = GradWatch(make(), check_freq="start", track_freq=None, verbose=0)
    fit(network(), watch)
    frame = watch.history
    assert list(frame["size"][frame.role == "input"]) == [np.prod(shape)]
    assert set(frame.check.dropna()) == {"ok"}


def test_named_inputs_have_a_row_each() -> None:
    """A probe of named arrays, some of them integers, gives a row to each float input, under its name."""
    sizes, kinds = keras.Input((4,), name="sizes"), keras.Input((2,), dtype="int32", name="kinds")
    extra = keras.Input((3,), name="extra")
    flow = layers.Concatenate()([sizes, layers.Flatten()(layers.Embedding(5, 2)(kinds)), extra])
    model = keras.Model({"sizes": sizes, "kinds": kinds, "extra": extra}, layers.Dense(1)(flow))
    model.compile("sgd", "mse")
    data = {"sizes": X, "kinds": np.arange(48).reshape(24, 2) % 5, "extra": X[:, :3]}
    for probe in (({name: value[:5] for name, value in data.items()}, Y[:5]), 5):
        watch = GradWatch(probe, verbose=0)
        fit(model, watch, x=data)
        inputs = watch.history[watch.history.role == "input"].set_index("tensor")
        assert inputs["size"].to_dict() == {"extra": 15, "sizes": 20}
        assert set(watch.history.check.dropna()) == {"ok"}


def test_a_generator_serves_several_runs() -> None:
    """The first batch of a generator is kept: a second fit is checked on it as well."""
    model, watch = network(), GradWatch(generated(), verbose=0)
    for _ in range(2):
        fit(model, watch)
        assert set(watch.history.check.dropna()) == {"ok"}


def test_fixed_data_are_checked_instead_of_the_batch() -> None:
    """A NaN in the training data does not reach a check on fixed data."""
    broken = np.where(np.arange(24)[:, None] == 0, np.nan, X)
    watch = GradWatch((X[:5], Y[:5]), check_freq="start", track_freq=None, verbose=0)
    fit(network(), watch, x=broken)
    assert set(watch.history.check.dropna()) == {"ok"}


# -- unusual models ----------------------------------------------------------------------------------------------------


def test_integer_inputs_have_no_row() -> None:
    """With an embedding in front there is no input gradient: only weights are checked, and they are right."""
    model = keras.Sequential(
        [
            keras.Input((3,), dtype="int32"),
            layers.Embedding(9, 2, name="table"),
            layers.Flatten(),
            layers.Dense(1, name="last"),
        ]
    )
    model.compile("sgd", "mse")
    watch = GradWatch(verbose=0)
    fit(model, watch, x=np.random.default_rng(0).integers(0, 9, (24, 3)))
    frame = watch.history
    assert set(frame.role) == {"weight"}
    assert set(frame.check.dropna()) == {"ok"}
    assert frame.zero_fraction[frame.tensor == "table/embeddings"].notna().all()


def test_frozen_layers_have_no_rows() -> None:
    """What is not trainable is not watched, and what lies before it still is."""
    frozen = layers.Dense(6, activation="tanh", name="frozen", trainable=False)
    watch = GradWatch(verbose=0)
    fit(network(layers.Dense(5, name="first"), frozen), watch)
    frame = watch.history
    assert list(dict.fromkeys(frame.tensor[frame.role == "weight"])) == PATHS
    assert set(frame.check.dropna()) == {"ok"}
    assert watch.findings.empty


def test_a_model_without_trainable_weights_is_survived() -> None:
    """When everything is frozen there is nothing but the input to check."""
    model = network()
    model.trainable = False
    model.compile("sgd", "mse")
    watch = GradWatch(verbose=0)
    with pytest.warns(UserWarning, match="does not have any trainable weights"):
        fit(model, watch)
    assert set(watch.history.role) <= {"input"}
    assert watch.findings.empty


def test_a_model_made_for_one_batch_size_is_checked_on_whole_batches() -> None:
    """A stateful network takes no smaller batch: its probe is the whole one, and its state stays what it was."""
    model = keras.Sequential([keras.Input(batch_shape=(12, 3, 4)), layers.LSTM(2, stateful=True), layers.Dense(1)])
    model.compile("sgd", "mse")
    watch = GradWatch(probe=4, verbose=0)
    fit(model, watch, x=np.stack([X] * 3, axis=1), batch_size=12)
    frame = watch.history
    assert list(frame["size"][frame.role == "input"]) == [12 * 3 * 4]
    assert set(frame.check.dropna()) == {"ok"}


class Unused(keras.layers.Layer):
    def build(self, shape: Any) -> None:
        self.spare = self.add_weight(name="spare", shape=(2,), initializer="ones")

    def call(self, inputs: Any) -> Any:
        return inputs


def test_a_weight_the_loss_does_not_reach_is_disconnected() -> None:
    """A weight whose gradient is None has NaN norms, the verdict disconnected and a finding that names it."""
    watch = GradWatch(verbose=0)
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        fit(network(layers.Dense(6, name="first"), Unused(name="unused")), watch)
    frame = watch.history[watch.history.tensor == "unused/spare"]
    assert frame.grad_norm.isna().all()
    assert set(frame.check.dropna()) == {"disconnected"}
    assert set(watch.history.check[watch.history.tensor != "unused/spare"].dropna()) == {"ok"}
    (finding,) = watch.findings.itertuples()
    assert (finding.finding, finding.layer, finding.tensor, finding.first_step) == (
        "disconnected",
        "unused",
        "unused/spare",
        1,
    )
    assert set(frame.findings) == {"disconnected"}


class Reversed(keras.layers.Layer):
    """The identity with its gradient reversed, on purpose."""

    def call(self, inputs: Any) -> Any:
        return planted(lambda x: x * 1, lambda upstream, x: [-upstream])(inputs)


def test_a_named_surrogate_is_declared() -> None:
    """A layer named in surrogates makes what it spoils declared: no finding, and what lies after it is right."""
    watch = GradWatch(surrogates=("reversal",), verbose=0)
    fit(network(layers.Dense(6, name="first"), Reversed(name="reversal")), watch)
    checks = watch.history.dropna(subset="check").set_index("tensor").check
    assert list(checks.index) == ["features", *PATHS]
    assert list(checks) == ["declared", "declared", "declared", "ok", "ok"]
    assert watch.findings.empty
    assert "reversal" in watch.summary()


class ByHand(keras.Model):
    """Its train_step moves the weights without any Keras optimizer."""

    def __init__(self) -> None:
        super().__init__(name="by_hand")
        self.dense = layers.Dense(1, name="dense")

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)

    def train_step(self, data: Any) -> dict[str, Any]:
        import tensorflow as tf

        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        for variable, gradient in zip(
            self.trainable_variables, tape.gradient(loss, self.trainable_variables), strict=True
        ):
            variable.assign_sub(0.1 * gradient)
        return {"loss": loss}


@only("tensorflow", reason="a train_step is written for one engine")
def test_a_train_step_without_a_keras_optimizer_falls_back_to_the_probe() -> None:
    """The norms are then those of the compiled loss on the probe, from step 2 on, every ten steps, and it is said."""
    model, watch = ByHand(), GradWatch(probe=8, verbose=0)
    model.compile("sgd", "mse")
    weights: list[np.ndarray] = []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: weights.append(model.get_weights()[0].astype("float64"))
    )
    fit(model, watch, note, epochs=5)
    frame = watch.history[watch.history.tensor == "by_hand/dense/kernel"].set_index("step")
    assert list(frame.index[frame.grad_norm.notna()]) == [2, 12]
    # The step is w ← w − 0.1 g on the same eight samples; float32 weights hold a change of 0.05 to about 1e-6.
    assert frame.grad_norm[2] == pytest.approx(np.linalg.norm(weights[0] - weights[1]) / 0.1, rel=1e-5)
    assert set(watch.history.check.dropna()) == {"ok"}
    assert "no Keras optimizer" in watch.summary()
    assert watch.history.attrs["gradients"] == "probe"
    assert any("no Keras optimizer" in text for text in watch.history.attrs["notes"])


class OwnLoss(ByHand):
    """Its train_step minimises something other than what was compiled."""

    def train_step(self, data: Any) -> dict[str, Any]:
        import tensorflow as tf

        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.abs(self(x, training=True) - y))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


@only("tensorflow", reason="a train_step is written for one engine")
@pytest.mark.parametrize("loss", ["mse", None])
def test_a_train_step_with_a_loss_of_its_own_is_inconclusive(loss: str | None) -> None:
    """Such a step does not train the compiled loss: no verdict is ok, the reason is told, norms are the real ones."""
    model, watch = OwnLoss(), GradWatch(verbose=0)
    model(X)
    model.compile("sgd", loss)
    fit(model, watch)
    frame = watch.history
    assert set(frame.check.dropna()) == {"inconclusive"}
    assert frame.grad_norm[frame.role == "weight"].notna().all()
    assert "does not call compute_loss" in watch.summary()
    assert watch.findings.empty


def test_a_model_built_by_its_first_step_is_watched_from_there() -> None:
    """A subclassed model that has no weights before fit has a checked row for each of them in step 1."""
    model = keras.Sequential([layers.Dense(6, name="first"), layers.BatchNormalization(), layers.Dense(1, name="last")])
    model.compile("sgd", "mse")
    watch = GradWatch(verbose=0)
    fit(model, watch)
    frame = watch.history[watch.history.step == 1]
    assert len(frame) == 7
    assert set(frame.check) <= {"ok", "zero"}


# -- verbose -----------------------------------------------------------------------------------------------------------


def test_the_summary_closes_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    """By default a run ends with its summary; with verbose=0 nothing is printed."""
    fit(network(), GradWatch(check_freq=None))
    assert "GradWatch   3 steps" in capsys.readouterr().out
    fit(network(), GradWatch(check_freq=None, verbose=0))
    assert capsys.readouterr().out == ""


def test_nothing_is_there_before_a_run() -> None:
    """A callback that has seen no run has an empty history and no findings, and says so."""
    watch = GradWatch()
    assert watch.history.empty
    assert list(watch.history.columns) == [column.name for column in SCHEMA]
    assert watch.findings.empty
    assert "nothing" in watch.summary()


def test_a_checkpoint_taken_while_watched_is_the_models_own(tmp_path: Path) -> None:
    """A model saved by ModelCheckpoint during a watched run loads and predicts as the model does."""
    path, model = tmp_path / "best.keras", network()
    fit(model, GradWatch(verbose=0), keras.callbacks.ModelCheckpoint(path))
    loaded = keras.saving.load_model(path)
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), model.predict(X, verbose=0))
