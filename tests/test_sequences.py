"""Gradients over time, on looks built by hand."""

from dataclasses import replace

import numpy as np
import pytest

from keras_gradwatch.records import STATISTICS, ActivationRecord, TimeGradient, Window
from keras_gradwatch.rules import DEFAULT_RULES
from keras_gradwatch.sequences import VanishingInTime


def window(norms: np.ndarray, *, loss: float = 0.69, shuffled: float = 0.69, **fields: object) -> Window:
    """A recurrent layer seen three times, in a run of 60 steps that goes nowhere."""
    sequence = TimeGradient(layer="lstm", layer_class="LSTM", norms=norms, weights=("lstm/kernel",), **fields)
    looks = tuple(
        ActivationRecord(step=step, samples=128, sequences=(sequence,), loss=loss, shuffled_loss=shuffled)
        for step in (8, 16, 32)
    )
    return Window(
        tensors=(),
        steps=np.arange(1, 61),
        epochs=np.zeros(60, dtype=np.int64),
        losses=np.full(60, 0.69),
        loss_known=np.ones(60, dtype=bool),
        learning_rates=np.full(60, 0.01),
        statistics=np.ones((60, 0, len(STATISTICS))),
        connected=np.ones((60, 0), dtype=bool),
        activations=looks,
        planned_steps=120,
    )


FADING = 0.5 ** np.arange(40)[::-1]


def test_a_gradient_that_fades_over_time_names_the_layer() -> None:
    """Half per step over 40 steps is 10^-11.7: the layer, the steps and the fall are told."""
    (found,) = VanishingInTime()(window(FADING))
    assert (found.finding, found.layer, found.tensors) == ("vanishing", "lstm", ("lstm/kernel",))
    assert found.value == pytest.approx(39 * np.log10(0.5))
    assert "over the 40 time steps of lstm (LSTM) the gradient falls by 10^11.7" in found.message
    assert (found.first_step, found.last_step) == (1, 32)


def test_backwards_is_the_same() -> None:
    """A layer that reads backwards fades towards the last step."""
    assert len(VanishingInTime()(window(FADING[::-1]))) == 1


def test_an_even_gradient_is_healthy() -> None:
    """A fall by a hundred over 40 steps is none."""
    assert not VanishingInTime()(window(0.9 ** np.arange(40)))


def test_a_model_that_learns_may_forget() -> None:
    """A task may need the last steps only."""
    assert not VanishingInTime()(window(FADING, loss=0.3))


def test_it_takes_patience() -> None:
    """Before half of the run is over it is too soon, and two looks are not enough."""
    assert not VanishingInTime()(replace(window(FADING), planned_steps=1000))
    assert not VanishingInTime()(replace(window(FADING), activations=window(FADING).activations[1:]))


def test_masked_steps_have_no_gradient_by_right() -> None:
    """Zeros at padded steps do not count where a mask may explain them, and do where none can."""
    padded = np.concatenate([np.zeros(20), np.ones(20)])
    assert not VanishingInTime()(window(padded, masked=True))
    (found,) = VanishingInTime()(window(padded))
    assert "more than the dtype can hold" in found.message


def test_no_gradient_at_all_is_another_fault() -> None:
    """Edges: all zero, NaN, one step."""
    for norms in (np.zeros(5), np.full(5, np.nan), np.ones(1)):
        assert not VanishingInTime()(window(norms))


def test_the_default_rules_hold_it() -> None:
    """The rule is asked by default."""
    assert VanishingInTime() in DEFAULT_RULES
