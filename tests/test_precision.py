"""How a gradient is lost: overflow, underflow, cancellation, and eager against XLA, each with its figures."""

import numpy as np
import pytest

from keras_gradwatch.precision import lost_words, mode_words

EXACT = np.array([1.0, -2.0, 1e-9, 0.5])


@pytest.mark.parametrize(
    ("low", "words"),
    [
        ([1.0, np.inf, 1e-9, np.nan], "overflow: 2 of 4 entries are NaN or Inf in float16 training"),
        ([0.0, 0.0, 0.0, 0.0], r"underflow: all of it is flushed to zero in float16: 1\.0e\+00 of its norm"),
        ([1.0, -2.0, 0.0, 0.5], "underflow: 25 % of its entries are flushed to zero in float16: 4.4e-10 of its norm"),
        ([1.1, -2.0, 1e-9, 0.5], r"cancellation in float16: 4\.4e-02 of its norm is lost, no entry"),
    ],
)
def test_each_loss_is_told_apart(low, words) -> None:
    """Each kind of loss has its own words, with how much of the gradient it takes."""
    import re

    assert re.match(words, lost_words(EXACT, low, "float16"))


@pytest.mark.parametrize(
    ("plain", "compiled", "words"),
    [
        ((2.0, 0.0), (2.0 + 1e-6, 0.0), ""),
        ((np.nan, 3.0), (np.nan, 3.0), ""),
        ((np.nan, 3.0), (2.0, 0.0), "NaN or Inf without jit_compile, a finite gradient of norm 2.0e+00 with it"),
        ((2.0, 0.0), (1.0, 0.0), "norm 2.0e+00 without jit_compile, a finite gradient of norm 1.0e+00 with it"),
    ],
)
def test_modes_that_disagree(plain, compiled, words) -> None:
    """What differs beyond rounding between the modes is told, what agrees is not."""
    found = mode_words(np.array(plain), np.array(compiled), True)
    assert words in found
    assert bool(found) == bool(words)
