"""What is wrong in a run is found in time, named, and ends the run when asked: wrong backward passes, NaN and Inf."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops
from per_backend import ours, planted

from keras_gradwatch import GradientCheckError, GradientError, GradWatch, NonFiniteGradientError
from keras_gradwatch.records import Finding


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


X, Y = floats(24, 4), floats(24, 1, seed=1)


@pytest.fixture(autouse=True)
def _clean_start() -> None:
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(5)


Backward = Callable[[Any, Any, Any], tuple[Any, Any, Any]]


@keras.saving.register_keras_serializable("tests")
class Mixing(keras.layers.Layer):
    """x · kernel + bias with a backward pass written by hand: ``backward(upstream, x, kernel)`` gives all three."""

    def __init__(self, backward: Backward, **settings: Any) -> None:
        super().__init__(**settings)
        self.backward = backward

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(name="kernel", shape=(shape[-1], shape[-1]), initializer="orthogonal")
        self.bias = self.add_weight(name="bias", shape=(shape[-1],), initializer="zeros")

    def call(self, inputs: Any) -> Any:
        mixed = planted(
            lambda x, kernel, bias: x @ kernel + bias, lambda upstream, *parts: self.backward(upstream, *parts[:2])
        )
        return mixed(inputs, ops.convert_to_tensor(self.kernel), ops.convert_to_tensor(self.bias))


def right(upstream: Any, x: Any, kernel: Any) -> tuple[Any, Any, Any]:
    return upstream @ ops.transpose(kernel), ops.transpose(x) @ upstream, ops.sum(upstream, 0)


def of_right(change: Callable[[Any, Any, Any], tuple[Any, Any, Any]]) -> Backward:
    return lambda upstream, x, kernel: change(*right(upstream, x, kernel))


def transposed(upstream: Any, x: Any, kernel: Any) -> tuple[Any, Any, Any]:
    return upstream @ kernel, ops.transpose(upstream) @ x, ops.sum(upstream, 0)


def last_sample_only(upstream: Any, x: Any, kernel: Any) -> tuple[Any, Any, Any]:
    return upstream @ ops.transpose(kernel), ops.transpose(x) @ upstream, upstream[-1]


#: Each with the weights and the input that must be called wrong; everything after the layer must be called right.
UPSTREAM = {"features", "before/kernel", "before/bias"}
FAULTS: dict[str, tuple[Backward, set[str]]] = {
    "input_gradient_too_large": (of_right(lambda dx, dk, db: (1.1 * dx, dk, db)), UPSTREAM),
    "kernel_gradient_too_large": (of_right(lambda dx, dk, db: (dx, 1.1 * dk, db)), {"faulty/kernel"}),
    "sign_flipped": (of_right(lambda dx, dk, db: (-dx, dk, db)), UPSTREAM),
    "batch_sum_missing": (last_sample_only, {"faulty/bias"}),
    "zero": (of_right(lambda dx, dk, db: (ops.zeros_like(dx), dk, db)), UPSTREAM),
    "transposed": (transposed, {*UPSTREAM, "faulty/kernel"}),
}


def network(*middle: keras.layers.Layer, rate: float = 0.05) -> keras.Model:
    """Dense → the layers given → Dense → Dense."""
    flow = features = keras.Input((4,), name="features")
    for layer in (layers.Dense(4, activation="tanh", name="before"), *middle, layers.Dense(3, "tanh", name="after")):
        flow = layer(flow)
    model = keras.Model(features, layers.Dense(1, name="last")(flow), name="model")
    model.compile(keras.optimizers.SGD(rate), "mse")
    return model


def fit(
    model: keras.Model, *callbacks: keras.callbacks.Callback, epochs: int = 1, **settings: Any
) -> dict[str, list[float]]:
    """Three steps of 8 samples an epoch, in the order of the data."""
    data = {"x": X, "y": Y, "batch_size": 8, "epochs": epochs, "shuffle": False, "verbose": 0} | settings
    history: dict[str, list[float]] = model.fit(callbacks=list(callbacks), **data).history
    return history


def checks(watch: GradWatch) -> dict[str, str]:
    frame = watch.history
    first = frame[frame.step == frame.step.min()]
    return dict(zip(first.tensor, first.check, strict=True))


def finding(watch: GradWatch, kind: str) -> Any:
    (row,) = watch.findings[watch.findings.finding == kind].itertuples()
    return row


def test_a_right_backward_pass_by_hand_is_right() -> None:
    """The layer used here, with its right backward pass, is found right: what the other tests find is the fault."""
    watch = GradWatch(verbose=0)
    fit(network(Mixing(right, name="faulty")), watch)
    assert set(checks(watch).values()) == {"ok"}
    assert watch.findings.empty


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_backward_pass_is_found_in_the_first_check(fault: str) -> None:
    """The finding of step 1 names the layer, the tensors it spoils are called wrong and all others right."""
    backward, wrong = FAULTS[fault]
    watch = GradWatch(verbose=0)
    fit(network(Mixing(backward, name="faulty")), watch, epochs=2)
    found = finding(watch, "mismatch")
    assert (found.layer, found.first_step, found.severity) == ("faulty", 1, "error")
    assert "faulty" in found.message
    assert found.advice
    verdicts = checks(watch)
    assert {tensor for tensor, verdict in verdicts.items() if verdict != "ok"} == wrong
    assert {verdicts[tensor] for tensor in wrong} == {"mismatch"}
    assert "faulty" in watch.summary()
    frame = watch.history
    assert set(frame.tensor[frame.findings.str.contains("mismatch")]) == wrong
    assert set(watch.findings.finding) == {"mismatch"}


def test_a_nan_in_the_backward_pass_is_found_in_the_first_check() -> None:
    """A layer whose backward gives NaN at finite values is named as what made it, at step 1."""
    watch = GradWatch(verbose=0)
    fit(network(Mixing(of_right(lambda dx, dk, db: (dx * np.nan, dk, db)), name="faulty")), watch)
    found = finding(watch, "nonfinite")
    assert (found.layer, found.first_step) == ("faulty", 1)
    verdicts = checks(watch)
    assert {tensor for tensor, verdict in verdicts.items() if verdict == "nonfinite"} == UPSTREAM


# -- NaN and Inf in training -------------------------------------------------------------------------------------------


def broken(values: np.ndarray, row: int, value: float = np.nan) -> np.ndarray:
    return np.where(np.arange(len(values))[:, None] == row, np.float32(value), values)


def test_a_bad_label_is_found_at_its_step() -> None:
    """A NaN among the labels of batch 2 is found at step 2, blamed on the labels, with its row."""
    watch = GradWatch(verbose=0)
    fit(network(), watch, y=broken(Y, 13))
    found = finding(watch, "nonfinite")
    assert (found.layer, found.first_step) == ("labels", 2)
    assert "row 5" in found.message
    frame = watch.history
    assert np.isnan(frame.loss[frame.step == 2]).all()
    assert (frame.nonfinite_count[(frame.step == 1)] == 0).all()
    assert (frame.nonfinite_count[(frame.step == 2)] == frame["size"][frame.step == 2]).all()


def test_a_bad_input_is_found_at_its_step() -> None:
    """An infinite input in batch 3 is found at step 3 and blamed on the data, with its row."""
    watch = GradWatch(verbose=0)
    fit(network(), watch, x=broken(X, 16, np.inf))
    found = finding(watch, "nonfinite")
    assert (found.layer, found.first_step) == ("data", 3)
    assert "row 0" in found.message


def test_a_bad_sample_weight_is_found_at_its_step() -> None:
    """A NaN among the sample weights of batch 2 is found at step 2 and not blamed on a layer."""
    watch = GradWatch(verbose=0)
    fit(network(), watch, sample_weight=np.where(np.arange(24) == 9, np.nan, 1.0))
    found = finding(watch, "nonfinite")
    assert found.first_step == 2
    assert found.layer in ("labels", "sample_weight")
    assert "row 1" in found.message


def test_the_logarithm_of_zero_is_found_where_it_is_taken() -> None:
    """A layer that meets log(0) in batch 2 only is named at step 2."""
    x = np.abs(X) + 1
    x[12] = 0
    logarithm = layers.Lambda(keras.ops.log, name="logarithm")
    flow = features = keras.Input((4,), name="features")
    for layer in (logarithm, layers.Dense(3, name="after"), layers.Dense(1, name="last")):
        flow = layer(flow)
    model = keras.Model(features, flow)
    model.compile(keras.optimizers.SGD(0.01), "mse")
    watch = GradWatch(verbose=0)
    fit(model, watch, x=x)
    found = finding(watch, "nonfinite")
    assert (found.layer, found.first_step) == ("logarithm", 2)


def test_an_exploding_run_is_found_before_it_breaks() -> None:
    """With far too high a learning rate the gradients explode, then the first step that is not finite is named."""
    watch = GradWatch(verbose=0)
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(8, name="one"), layers.Dense(1, name="two")], name="model"
    )
    model.compile(keras.optimizers.SGD(5.0), "mse")
    fit(model, watch, epochs=4)
    frame = watch.history
    bad = frame.step[(frame.nonfinite_count > 0) | ~np.isfinite(frame.loss)].min()
    assert finding(watch, "nonfinite").first_step == bad
    assert finding(watch, "exploding").first_step < bad


def test_without_checks_the_batch_is_still_searched() -> None:
    """Without checks a NaN is traced to its layer all the same."""
    watch = GradWatch(check_freq=None, verbose=0)
    fit(network(), watch, y=broken(Y, 13))
    assert (finding(watch, "nonfinite").layer, finding(watch, "nonfinite").first_step) == ("labels", 2)


def test_steps_skipped_by_the_loss_scaling_are_no_finding() -> None:
    """Overflow while a LossScaleOptimizer looks for its scale is normal: no finding, and the rows show it."""
    model = network()
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=2.0**127), "mse")
    watch = GradWatch(verbose=0)
    fit(model, watch, y=1000 * Y)
    frame = watch.history
    assert (frame.nonfinite_count[frame.step == 1] > 0).any()
    assert "nonfinite" not in set(watch.findings.finding)


# -- stopping ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop_on", ["errors", "nonfinite", ("mismatch", "nonfinite")])
def test_a_finding_stops_training(stop_on: Any) -> None:
    """With action="stop" the step with the finding is the last, and fit returns as usual."""
    watch = GradWatch(stop_on=stop_on, verbose=0)
    history = fit(network(), watch, y=broken(Y, 13), epochs=3)
    assert len(history["loss"]) == 1
    assert watch.history.step.max() == 2
    assert history["grad_findings"] == [1.0]


def test_other_findings_do_not_stop_training() -> None:
    """What stop_on does not name is told and training goes on."""
    watch = GradWatch(stop_on="mismatch", verbose=0)
    fit(network(), watch, y=broken(Y, 13))
    assert watch.history.step.max() == 3
    assert list(watch.findings.finding) == ["nonfinite"]


@pytest.mark.parametrize("eagerly", [False, True])
def test_a_finding_raises_when_asked(eagerly: bool) -> None:
    """With action="raise" the error has its own type, carries the finding, and leaves nothing on the model."""
    model = network()
    model.compile(keras.optimizers.SGD(0.05), "mse", run_eagerly=eagerly)
    model.fit(X, Y, verbose=0)
    before, own_step = dict(vars(model)), model.train_function
    optimizer = dict(vars(model.optimizer))
    watch = GradWatch(stop_on="errors", action="raise", verbose=0)
    with pytest.raises(NonFiniteGradientError, match="labels") as raised:
        fit(model, watch, y=broken(Y, 13))
    assert isinstance(raised.value, GradientError)
    assert isinstance(raised.value.finding, Finding)
    assert raised.value.finding.first_step == watch.history.step.max() == 3
    assert model.train_function is own_step
    changed = {name for name, value in vars(model).items() if value is not before.get(name)}
    assert changed <= {"_history", "history", "stop_training", "_current_epoch", "_initial_epoch"}
    assert set(vars(model.optimizer)) == set(optimizer)
    rows = len(watch.history)
    model.set_weights([np.zeros_like(weight) for weight in model.get_weights()])
    assert np.isfinite(fit(model)["loss"]).all()
    assert len(watch.history) == rows


def test_a_wrong_backward_pass_raises_with_its_check() -> None:
    """A mismatch raises GradientCheckError before any weight has moved twice, with the check's numbers attached."""
    watch = GradWatch(stop_on="errors", action="raise", verbose=0)
    with pytest.raises(GradientCheckError, match="faulty") as raised:
        fit(network(Mixing(FAULTS["sign_flipped"][0], name="faulty")), watch)
    assert raised.value.result is not None
    assert raised.value.result.verdict == "mismatch"
    assert watch.history.step.max() == 1


def test_a_finding_at_an_epochs_end_raises_too() -> None:
    """A rule that speaks when the epoch ends can raise, and the model is released then as well."""

    def late(window: Any) -> list[Finding]:
        last = int(window.steps[-1])
        return (
            [Finding(finding="late", layer="before", first_step=last, last_step=last, message="late")]
            if last == 3
            else []
        )

    model = network()
    watch = GradWatch(check_freq=None, rules=[late], stop_on=["late"], action="raise", verbose=0)
    with pytest.raises(GradientError, match="late in before at step 3"):
        fit(model, watch)
    assert type(model.train_function).__module__.partition(".")[0] != "keras_gradwatch"


# -- telling others ----------------------------------------------------------------------------------------------------


def test_a_callable_is_told_of_findings() -> None:
    """Each new finding reaches the alert once, while training runs."""
    model, told = network(), []
    watch = GradWatch(sinks=[lambda found: told.append((found.finding, int(model.optimizer.iterations)))], verbose=0)
    fit(model, watch, y=broken(Y, 13), epochs=2)
    assert told[0] == ("nonfinite", 2)
    assert [kind for kind, _ in told].count("nonfinite") == 1


def test_a_raising_sink_warns_once_and_training_goes_on() -> None:
    """A broken alert is told once, points at the fit, and neither training nor the history suffers."""

    def alert(found: Finding) -> None:
        raise OSError("no network")

    plain = network()
    expected = fit(plain, y=broken(Y, 13), epochs=2)
    keras.utils.set_random_seed(5)
    watch = GradWatch(sinks=[alert], verbose=0)
    with pytest.warns(RuntimeWarning, match="alert raised OSError") as caught:
        history = fit(network(), watch, y=broken(Y, 13), epochs=2)
    assert len(ours(caught)) == 1
    np.testing.assert_array_equal(history["loss"], expected["loss"])
    assert watch.history.step.max() == 6
    assert "nonfinite" in set(watch.findings.finding)


def test_findings_are_printed_as_they_come(capsys: pytest.CaptureFixture[str]) -> None:
    """By default a line per finding appears during training, with step, severity and culprit."""
    fit(network(), GradWatch(check_freq=None), y=broken(Y, 13))
    assert "GradWatch · step 2 · error" in capsys.readouterr().out
