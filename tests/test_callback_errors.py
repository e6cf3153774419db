"""Bad arguments and bad data are told in three parts, and whatever fails inside the watcher leaves training alone."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers
from per_backend import BACKEND, only, ours

from keras_gradwatch import GradWatch, check_gradients
from keras_gradwatch.checks import Checker
from keras_gradwatch.history import History
from keras_gradwatch.probe import batch_of
from keras_gradwatch.run import Run


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


X, Y = floats(24, 4), floats(24, 1, seed=1)


@pytest.fixture(autouse=True)
def _clean_start() -> None:
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(5)


def network() -> keras.Model:
    features = keras.Input((4,), name="features")
    flow = layers.Dense(1, name="last")(layers.Dense(6, activation="tanh", name="first")(features))
    model = keras.Model(features, flow, name="model")
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def fit(model: keras.Model, *callbacks: keras.callbacks.Callback, **settings: Any) -> dict[str, list[float]]:
    """Three steps of 8 samples."""
    data = {"x": X, "y": Y, "batch_size": 8, "shuffle": False, "verbose": 0} | settings
    history: dict[str, list[float]] = model.fit(callbacks=list(callbacks), **data).history
    return history


# -- arguments ---------------------------------------------------------------------------------------------------------

WRONG_ARGUMENTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "probe_zero": ({"probe": 0}, ValueError, r"Received probe=0\. Expected at least 1 sample\. Use probe=8"),
    "probe_true": (
        {"probe": True},
        TypeError,
        r"Received probe=True of type bool\. Expected a number of samples, or data",
    ),
    "probe_none": ({"probe": None}, TypeError, r"Received probe=None.*Use probe=8 if in doubt"),
    "probe_float": ({"probe": 0.5}, TypeError, r"Received probe=0\.5 of type float"),
    "probe_word": ({"probe": "8"}, TypeError, r"Received probe='8' of type str"),
    "probe_object": ({"probe": object()}, TypeError, r"Received probe of type object\. Expected a number of samples"),
    "probe_empty": ({"probe": (X[:0], Y[:0])}, ValueError, r"Received a batch without samples\. Expected at least one"),
    "probe_no_parts": ({"probe": ()}, TypeError, r"Received a tuple of 0 parts"),
    "probe_list": ({"probe": []}, ValueError, r"Received a batch without samples"),
    "probe_ragged": ({"probe": (X[:5], Y[:4])}, ValueError, r"different lengths: \[4, 5\] samples\. Expected the same"),
    "probe_four_parts": (
        {"probe": (X, Y, Y, Y)},
        TypeError,
        r"Received a tuple of 4 parts\. Expected \(x, y\[, sample",
    ),
    "check_freq_zero": ({"check_freq": 0}, ValueError, r"Received check_freq=0\. Expected an int of at least 1"),
    "check_freq_word": ({"check_freq": "often"}, ValueError, r'Received check_freq=.often.\. Expected one of "epoch"'),
    "check_freq_true": ({"check_freq": True}, TypeError, r"Received check_freq=True of type bool"),
    "check_freq_float": ({"check_freq": 1.5}, TypeError, r"Received check_freq=1\.5 of type float"),
    "track_freq_negative": (
        {"track_freq": -1},
        ValueError,
        r"Received track_freq=-1.*track_freq=None to switch it off",
    ),
    "track_freq_word": ({"track_freq": "epoch"}, TypeError, r"Received track_freq='epoch' of type str"),
    "rules_word": ({"rules": "strict"}, TypeError, r"Received rules='strict'\. Expected \"default\" or a sequence"),
    "rules_objects": ({"rules": [3]}, TypeError, r"Received rules=\[3\].*See keras_gradwatch\.rules"),
    "rules_one": ({"rules": len}, TypeError, r"Received rules=.*Expected \"default\" or a sequence"),
    "stop_on_unknown": (
        {"stop_on": ["nan"]},
        ValueError,
        r"Received stop_on with 'nan'\. Expected \"errors\" or names",
    ),
    "stop_on_unknown_word": (
        {"stop_on": "error"},
        ValueError,
        r"Received stop_on with 'error'.*nonfinite.*Correct the",
    ),
    "stop_on_number": ({"stop_on": 3}, TypeError, r"Received stop_on=3\. Expected a sequence of names"),
    "action": ({"action": "halt"}, ValueError, r"Received action='halt'\. Expected one of 'stop', 'raise'"),
    "action_number": ({"action": 1}, ValueError, r"Received action=1\. Expected one of 'stop'"),
    "surrogates_word": ({"surrogates": "gate"}, TypeError, r"Received surrogates='gate'.*Write it as \('gate',\)"),
    "surrogates_layers": (
        {"surrogates": [layers.Dense(1)]},
        TypeError,
        r"Received surrogates=.*Expected a sequence of na",
    ),
    "sinks_path": ({"sinks": ["run.parquet"]}, TypeError, r"Received 'run\.parquet' of type str among the sinks"),
    "sinks_one": ({"sinks": print}, TypeError, r"Received sinks=.*Expected a sequence of callables"),
    "seed_float": ({"seed": 0.5}, TypeError, r"Received seed=0\.5 of type float\. Expected an int"),
    "seed_none": ({"seed": None}, TypeError, r"Received seed=None.*Use seed=0"),
    "verbose_two": ({"verbose": 2}, ValueError, r"Received verbose=2\. Expected one of 0, 1"),
    "verbose_true": ({"verbose": True}, ValueError, r"Received verbose=True\. Expected one of 0, 1"),
}


@pytest.mark.parametrize("name", WRONG_ARGUMENTS)
def test_a_wrong_argument_is_refused_at_construction(name: str) -> None:
    """The error says what was received, what was expected and what to do."""
    settings, kind, message = WRONG_ARGUMENTS[name]
    with pytest.raises(kind, match=message) as raised:
        GradWatch(**settings)
    assert str(raised.value).count(". ") >= 1


def test_numpy_numbers_are_numbers() -> None:
    """Integers that come out of NumPy are taken as integers, and saved as such."""
    config = GradWatch(np.int64(4), check_freq=np.int32(10), track_freq=np.int64(2), seed=np.int64(1)).get_config()
    assert (config["probe"], config["check_freq"], config["track_freq"], config["seed"]) == (4, 10, 2, 1)
    assert {type(config[name]) for name in ("probe", "check_freq", "track_freq", "seed")} == {int}


def test_a_rule_of_ones_own_may_have_its_own_name() -> None:
    """With custom rules any finding name can be stopped on."""
    assert GradWatch(rules=[lambda window: ()], stop_on="mine").stop_on == ("mine",)


@pytest.mark.parametrize(("name", "value"), [("probe", (X, Y)), ("rules", (lambda window: (),)), ("sinks", (print,))])
def test_what_has_no_json_form_is_not_serialised(name: str, value: Any) -> None:
    """Data, rule objects and sinks cannot be saved: the error names the argument and the way out."""
    watch = GradWatch(**{name: value})
    with pytest.raises(TypeError, match=f"Received {name} of type tuple.*Build the callback without {name}"):
        watch.get_config()


# -- probes that turn out bad ------------------------------------------------------------------------------------------


class Empty(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: int) -> Any:
        raise IndexError(index)


def empty_dataset() -> Any:
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((X[:0], Y[:0])).batch(4)


LATE: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "generator": (lambda: iter(()), ValueError, r"Received a \w*iterator that yields no batch\. Expected at least one"),
    "pydataset": (Empty, ValueError, r"Received a Empty that yields no batch"),
    "dataset": (lambda: empty_dataset(), ValueError, r"yields no batch"),
    "callable_of_nothing": (lambda: lambda: (X[:0], Y[:0]), ValueError, r"Received a batch without samples"),
    "callable_of_words": (lambda: lambda: "words", TypeError, r"Received data of type str\. Expected \(x, y"),
    "words": (lambda: (np.array([["a"] * 4] * 5), Y[:5]), TypeError, r"Received data of dtype <U1\. Expected numbers"),
    "objects": (
        lambda: (np.array([[None] * 4] * 5), Y[:5]),
        TypeError,
        r"Received data of dtype object\. Expected num",
    ),
    "too_wide": (
        lambda: (floats(5, 7), Y[:5]),
        ValueError,
        r"shapes \(5, 7\)\. Expected \(None, 4\).*Give the probe the",
    ),
    "too_deep": (lambda: (floats(5, 4, 4), Y[:5]), ValueError, r"shapes \(5, 4, 4\)\. Expected \(None, 4\)"),
    "two_inputs": (
        lambda: ([X[:5], X[:5]], Y[:5]),
        ValueError,
        r"shapes \[\(5, 4\), \(5, 4\)\]\. Expected \(None, 4\)",
    ),
}
if BACKEND != "tensorflow":
    del LATE["dataset"]


@pytest.mark.filterwarnings("ignore:The structure of `inputs`")
@pytest.mark.parametrize("name", LATE)
def test_a_bad_probe_is_refused_before_the_first_step(name: str) -> None:
    """The error comes out of fit, in three parts; no weight has moved and the model can train on."""
    make, kind, message = LATE[name]
    model = network()
    before = model.get_weights()
    with pytest.raises(kind, match=message):
        fit(model, GradWatch(make(), verbose=0))
    for weight, expected in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, expected)
    assert np.isfinite(fit(model)["loss"]).all()


def test_a_probe_with_other_targets_is_told_once() -> None:
    """Targets that do not fit the loss fail the check alone: one warning with the remedy, and training goes on."""
    watch = GradWatch((X[:5], floats(5, 3, 2)), verbose=0)
    with pytest.warns(RuntimeWarning, match="failed in checks at step 1") as caught:
        fit(network(), watch, epochs=2)
    assert len(ours(caught)) == 1
    (finding,) = watch.findings.itertuples()
    assert "probe" in finding.advice
    assert watch.history.step.max() == 6


# -- check_gradients ---------------------------------------------------------------------------------------------------

CHECKS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "not_a_model": (lambda: check_gradients(len, X, Y), TypeError, r"builtin.*Expected a compiled keras\.Model"),
    "a_layer": (lambda: check_gradients(layers.Dense(1), X, Y), TypeError, r"use check_layer\(layer, x\)"),
    "uncompiled": (
        lambda: check_gradients(keras.Sequential([keras.Input((4,)), layers.Dense(1)]), X, Y),
        ValueError,
        r"is not compiled\. Expected a model with a loss\. Call model\.compile",
    ),
    "empty": (lambda: check_gradients(network(), X[:0], Y[:0]), ValueError, r"Received a batch without samples"),
    "ragged": (lambda: check_gradients(network(), X[:5], Y[:4]), ValueError, r"different lengths: \[4, 5\]"),
    "words": (
        lambda: check_gradients(network(), np.array([["a"] * 4] * 5), Y[:5]), TypeError, r"dtype <U1\. Expected numbers"
    ),
    "wrt": (lambda: check_gradients(network(), X[:5], Y[:5], wrt="weights"), ValueError, r"wrt='weights'"),
    "wrt_unknown": (lambda: check_gradients(network(), X[:5], Y[:5], wrt=("bias",)), ValueError, r"wrt=\('bias',\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHECKS)
def test_check_gradients_refuses_what_it_cannot_check(name: str) -> None:
    """Wrong models, data and choices are told clearly."""
    call, kind, message = CHECKS[name]
    with pytest.raises(kind, match=message):
        call()


def test_check_gradients_builds_an_unbuilt_model() -> None:
    """A compiled model that has no weights yet is built on the batch, and nothing else about it changes."""
    model = keras.Sequential([layers.Dense(3), layers.BatchNormalization(), layers.Dropout(0.5), layers.Dense(1)])
    model.compile("sgd", "mse")
    report = check_gradients(model, X[:6], Y[:6])
    assert report.ok, str(report)
    averages = {v.path.split("/")[-1]: np.asarray(v) for v in model.non_trainable_variables}
    assert (averages["moving_mean"] == 0).all()
    assert (averages["moving_variance"] == 1).all()


def test_plain_lists_are_data() -> None:
    """Nested lists of numbers are converted once, at the door."""
    model = network()
    report = check_gradients(model, np.asarray(X[:3].tolist()), np.asarray(Y[:3].tolist()))
    assert report.ok
    assert batch_of((X[:3], Y[:3])).x.shape == (3, 4)


# -- failures inside ---------------------------------------------------------------------------------------------------


def fail(*args: Any, **kwargs: Any) -> Any:
    raise ZeroDivisionError("the inside is broken")


BREAKAGES: dict[str, tuple[Any, str, str]] = {
    "check": (Checker, "check", "checks"),
    "record": (Run, "_record", "capture"),
    "history": (History, "append", "capture"),
    "describe": (Run, "_describe", "capture"),
    "window": (Run, "_window", "rules"),
}


@pytest.mark.parametrize("name", BREAKAGES)
def test_an_internal_failure_leaves_training_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It warns once, at the line of the fit, names itself in the findings, and the weights are those of a plain run."""
    owner, method, part = BREAKAGES[name]
    plain = network()
    expected = fit(plain, epochs=2)
    keras.utils.set_random_seed(5)
    monkeypatch.setattr(owner, method, fail)
    model, watch = network(), GradWatch(verbose=0)
    with pytest.warns(
        RuntimeWarning, match=f"GradWatch itself failed in {part} at step 1: ZeroDivisionError"
    ) as caught:
        history = fit(model, watch, epochs=2)
    assert len(ours(caught)) == 1
    assert ours(caught)[0].filename == __file__
    monkeypatch.undo()
    np.testing.assert_array_equal(history["loss"], expected["loss"])
    for weight, same in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, same)
    assert {"grad_norm", "grad_check_error", "grad_findings"} <= set(history)
    found = watch.findings
    assert list(found.finding) == ["watcher_failed"]
    assert "the inside is broken" in found.message[0]
    assert "training goes on" in found.advice[0]
    assert "the inside is broken" in watch.summary()


def test_a_rule_of_ones_own_that_raises_is_told() -> None:
    """The history stays complete, and the advice points at the rule."""
    watch = GradWatch(rules=[fail], check_freq=None, verbose=0)
    with pytest.warns(RuntimeWarning, match="failed in rules"):
        fit(network(), watch)
    assert watch.history.step.max() == 3
    assert "one of your own rules" in watch.findings.advice[0]


def test_a_failed_summary_does_not_reach_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """When the closing summary cannot be made, fit still returns."""
    monkeypatch.setattr(Run, "summary", fail)
    with pytest.warns(RuntimeWarning, match="failed in summary"):
        history = fit(network(), GradWatch(check_freq=None))
    assert np.isfinite(history["loss"]).all()


@only("tensorflow", reason="feeds a ragged tensor")
def test_ragged_batches_are_told_once() -> None:
    """What cannot be cut into a probe fails the check alone, with the remedy in the warning; the norms go on."""
    import tensorflow as tf

    model = keras.Sequential(
        [keras.Input((None,), dtype="int32"), layers.Embedding(9, 2), layers.GlobalAveragePooling1D(), layers.Dense(1)]
    )
    model.compile("sgd", "mse")
    watch = GradWatch(rules=[], verbose=0)
    with pytest.warns(RuntimeWarning, match="holds a RaggedTensor. Expected dense arrays. Give a probe") as caught:
        fit(model, watch, x=tf.ragged.constant([[1, 2], [3], [4, 5, 6]] * 8, dtype=tf.int32))
    assert len(ours(caught)) == 1
    assert watch.history.grad_norm.notna().all()


def test_an_error_of_the_users_own_comes_through() -> None:
    """What another callback raises is not touched, and the next plain fit is not watched."""

    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            raise KeyboardInterrupt

    model, watch = network(), GradWatch(verbose=0)
    with pytest.raises(KeyboardInterrupt):
        fit(model, watch, Stops())
    rows = len(watch.history)
    fit(model)
    assert len(watch.history) == rows
    fit(model, watch)
    assert len(set(watch.history.step)) == 3
