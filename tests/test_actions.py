"""What findings do to a run: it stops, raises, or goes back to its last healthy state and on with a lower rate."""

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from keras_gradwatch import GradWatch, Rollback
from keras_gradwatch.optimizers import learning_rate


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


X, Y = floats(40, 4), floats(40, 1, seed=1)

#: Row of the data whose loss is NaN: with batches of 8 it is in batch 3, counted from 1.
BAD_ROW = 20


@pytest.fixture(autouse=True)
def _clean_start() -> None:
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(5)


def network(optimizer: Any = None, *, loss: Any = "mse", **settings: Any) -> keras.Model:
    stack = [keras.Input((4,)), layers.Dense(8, "tanh"), layers.BatchNormalization(), layers.Dropout(0.2)]
    model = keras.Sequential([*stack, layers.Dense(1)])
    model.compile(optimizer or keras.optimizers.Adam(0.01), loss, **settings)
    return model


def spoiled(rows: tuple[int, ...] = (BAD_ROW,)) -> np.ndarray:
    """Targets that make the loss of some rows infinite, though each of them is finite."""
    targets = Y.copy()
    targets[list(rows)] = 1e30
    return targets


def fit(model: keras.Model, y: np.ndarray, *callbacks: keras.callbacks.Callback, epochs: int = 2, **more: Any) -> Any:
    settings = {"batch_size": 8, "shuffle": False, "verbose": 0} | more
    return model.fit(settings.pop("x", X), y, epochs=epochs, callbacks=list(callbacks), **settings)


def all_finite(model: keras.Model) -> bool:
    return all(np.isfinite(weight).all() for weight in model.get_weights())


class Weights(keras.callbacks.Callback):
    """Weights after every batch, and the logs callbacks are given."""

    def on_train_begin(self, logs: Any = None) -> None:
        self.seen, self.logs = [self.model.get_weights()], []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(self.model.get_weights())
        self.logs.append(float(np.asarray(logs["loss"])))


def rolling(**settings: Any) -> GradWatch:
    # So small a share of the time that the state from the start stays the only copy: copies go by the clock.
    return GradWatch(stop_on="errors", action=Rollback(**{"share": 1e-9, **settings}), check_freq=None, verbose=0)


def test_a_bad_batch_is_skipped_and_training_goes_on() -> None:
    """Weights, averages and optimizer go back to the last copy, the rate is halved, and the next batch is taken."""
    model, watch, weights = network(), rolling(), Weights()
    history = fit(model, spoiled(), watch, weights, epochs=1)
    assert all_finite(model)
    assert len(weights.seen) == 6
    for restored, start in zip(weights.seen[3], weights.seen[0], strict=True):
        np.testing.assert_array_equal(restored, start)
    assert learning_rate(model.optimizer) == pytest.approx(0.005)
    assert int(model.optimizer.iterations) == 2  # steps 4 and 5
    assert np.isfinite(history.history["loss"]).all()
    assert np.isfinite(weights.logs).all()
    assert len(watch.history["step"].unique()) == 5


def test_each_rollback_is_told_as_a_finding_a_row_and_a_note() -> None:
    """Two bad batches are two findings; rows, attributes and summary say what was done about them."""
    watch = rolling()
    fit(network(), spoiled(), watch)
    assert watch.findings[["finding", "first_step", "last_step"]].to_numpy().tolist() == [
        ["nonfinite", 3, 3],
        ["nonfinite", 8, 8],
    ]
    assert "back to the state after step 0, learning rate 0.01 → 0.005 (1 of 3)" in watch.findings["message"][0]
    frame = watch.history
    assert set(frame.loc[np.isinf(frame["loss"]), "step"]) == {3, 8}
    assert [(deed["step"], deed["action"]) for deed in frame.attrs["actions"]] == [(3, "rollback"), (8, "rollback")]
    assert "learning rate 0.005 → 0.0025 (2 of 3)" in watch.summary().replace("\n      ", " ")


def test_after_the_last_rollback_training_stops_in_a_healthy_state() -> None:
    """The third bad batch is one too many for times=2: training ends there, with the last healthy weights."""
    model, watch, weights = network(), rolling(times=2), Weights()
    fit(model, spoiled((BAD_ROW, 28, 36)), watch, weights, epochs=3)
    assert len(weights.seen) == 6
    assert model.stop_training
    assert all_finite(model)
    assert [deed["action"] for deed in watch.history.attrs["actions"]] == ["rollback", "rollback", "stop"]


def test_bad_data_do_not_cut_the_learning_rate() -> None:
    """NaN in the data is no fault of the rate, which stays."""
    data = X.copy()
    data[BAD_ROW] = np.nan
    model, watch = network(), rolling()
    fit(model, Y, watch, x=data)
    assert watch.findings["layer"].tolist() == ["data", "data"]
    assert learning_rate(model.optimizer) == pytest.approx(0.01)
    assert all_finite(model)


def test_a_schedule_is_cut_for_the_rest_of_the_run_only() -> None:
    """What a schedule gives is halved in the compiled step; afterwards the schedule is the user's again."""
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([1_000], [0.1, 0.01])
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1, use_bias=False)])
    model.compile(keras.optimizers.SGD(schedule), "mse")
    plain = keras.models.clone_model(model)
    plain.set_weights(model.get_weights())
    plain.compile(keras.optimizers.SGD(0.05), "mse")
    watch, weights = rolling(), Weights()
    fit(model, spoiled(), watch, weights, epochs=1)
    plain.fit(X[24:], Y[24:], batch_size=8, shuffle=False, verbose=0)
    np.testing.assert_allclose(model.get_weights()[0], plain.get_weights()[0], rtol=1e-6)
    assert watch.history.attrs["actions"][0]["learning_rates"] == pytest.approx([0.05])
    assert float(model.optimizer.learning_rate) == pytest.approx(0.1)
    before = model.get_weights()[0]
    model.fit(X[:8], Y[:8], batch_size=8, verbose=0)
    gradient = 2 * X[:8].T @ (X[:8] @ before - Y[:8]) / 8
    np.testing.assert_allclose(model.get_weights()[0], before - 0.1 * gradient, rtol=1e-4, atol=1e-6)


def test_no_copy_is_made_for_other_actions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state is copied only when the user asked for rollbacks."""
    from keras_gradwatch.states import ModelState

    monkeypatch.setattr(ModelState, "of", lambda *_, **__: pytest.fail("copied"))
    fit(network(), Y, GradWatch(stop_on="errors", verbose=0))


def test_a_healthy_run_is_not_touched() -> None:
    """With nothing found, a run that could go back ends with the same weights as one without the callback."""
    first, second = network(), network()
    second.set_weights(first.get_weights())
    for model in (first, second):
        model.layers[2].seed_generator.state.assign([1, 2])
    fit(first, Y, rolling())
    fit(second, Y)
    for a, b in zip(first.get_weights(), second.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_block_of_steps_goes_back_in_its_middle() -> None:
    """With several steps per execution the bad step alone is taken back, and the block goes on."""
    model, watch = network(steps_per_execution=5), rolling()
    history = fit(model, spoiled(), watch)
    assert all_finite(model)
    assert watch.findings["first_step"].tolist() == [3, 8]
    assert int(model.optimizer.iterations) == 2
    assert np.isfinite(history.history["loss"]).all()


def test_loss_scaling_goes_back_with_its_scale() -> None:
    """Under mixed_float16 the loss scale is restored, and the inner optimizer's rate is cut."""
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=128.0)
    policy = keras.DTypePolicy("mixed_float16")
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(4, "tanh", dtype=policy), layers.Dense(1, dtype="float32")]
    )
    model.compile(optimizer, "mse")
    targets = Y.copy()
    targets[BAD_ROW] = np.inf
    watch = rolling()
    model.fit(X, targets, batch_size=8, shuffle=False, verbose=0, callbacks=[watch])
    assert watch.findings["finding"].tolist() == ["nonfinite"]
    assert float(optimizer.dynamic_scale) == 128.0
    assert all_finite(model)


class Adversaries(keras.Model):
    """A GAN with two optimizers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = keras.Sequential([keras.Input((2,)), layers.Dense(4)], name="generator")
        self.critic = keras.Sequential([keras.Input((4,)), layers.Dense(1)], name="critic")

    def compile(self, generator_optimizer: Any, critic_optimizer: Any) -> None:
        super().compile()
        self.generator_optimizer, self.critic_optimizer = generator_optimizer, critic_optimizer

    def call(self, x: Any) -> Any:
        return self.critic(x)

    def train_step(self, data: Any) -> Any:
        import tensorflow as tf

        noise = data[:, :2]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.critic(data)) - tf.reduce_mean(self.critic(self.generator(noise)))
        weights = self.critic.trainable_variables
        self.critic_optimizer.apply(tape.gradient(loss, weights), weights)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.critic(self.generator(noise)))
        weights = self.generator.trainable_variables
        self.generator_optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def test_every_optimizer_goes_back_and_is_cut() -> None:
    """A GAN's optimizers are all restored and cut, and the learning rate recorded is one that trains."""
    model = Adversaries()
    model.compile(keras.optimizers.Adam(0.02), keras.optimizers.Adam(0.04))
    watch = rolling()
    data = X.copy()
    data[BAD_ROW] = np.inf
    model.fit(data, batch_size=8, shuffle=False, verbose=0, callbacks=[watch])
    assert all_finite(model)
    assert [int(o.iterations) for o in (model.generator_optimizer, model.critic_optimizer)] == [2, 2]
    assert float(model.generator_optimizer.learning_rate) == pytest.approx(0.01)
    assert watch._run._recent[-1].learning_rate == pytest.approx(0.02)


@pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")
def test_what_going_back_does_not_mend_stops() -> None:
    """A weight that the loss does not reach is not mended by an earlier state: training stops, and says so."""
    inputs = keras.Input((4,))
    hidden = layers.Dense(3, name="cut")(inputs)
    outputs = layers.Dense(1)(layers.Lambda(keras.ops.stop_gradient)(hidden))
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    watch = GradWatch(stop_on="disconnected", action="rollback", verbose=0)
    fit(model, Y, watch)
    assert model.stop_training
    assert "going back does not mend it" in watch.summary().replace("\n      ", " ")


@pytest.mark.parametrize("settings", [{"factor": 0.0}, {"factor": 1.5}, {"times": 0}, {"share": 0.0}])
def test_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    """A rollback that could do nothing, or raise the rate, is refused at once."""
    with pytest.raises(ValueError, match='Use action="rollback" if in doubt'):
        Rollback(**settings)


def test_a_rollback_survives_its_configuration() -> None:
    """Settings of the rollback come back with the callback's configuration."""
    watch = GradWatch(action=Rollback(times=5))
    assert GradWatch.from_config(watch.get_config()).action == Rollback(times=5)
    assert GradWatch.from_config(GradWatch(action="rollback").get_config()).action == "rollback"
