"""Samples at fault are found by halving the batch, and nothing is named when no sample is at fault."""

import numpy as np
import pytest

from keras_gradwatch.halving import MOST_ROWS, MOST_TRIALS, dominant_row, faulty_rows, row_words


@pytest.mark.parametrize("bad", [{0}, {31}, {7, 20}, {1, 2, 3}])
def test_bad_rows_are_found(bad: set[int]) -> None:
    """One bad row or a few, at either end or side by side."""
    assert set(faulty_rows(lambda rows: bool(bad & set(rows.tolist())), 32)) == bad


def test_a_single_bad_row_takes_two_trials_per_halving() -> None:
    """Of 1,024 rows one is found in 20 trials."""
    trials = []
    faulty_rows(lambda rows: trials.append(len(rows)) or 700 in rows, 1_024)  # type: ignore[func-returns-value]
    assert len(trials) == 20


def test_a_batch_that_is_bad_everywhere_names_no_row() -> None:
    """When every row is bad by itself the fault is in no sample."""
    assert faulty_rows(lambda _: True, 64) == ()
    assert faulty_rows(lambda _: True, 1) == ()


def test_rows_that_are_bad_only_together_are_not_named() -> None:
    """A batch whose halves are both fine has no sample at fault."""
    assert faulty_rows(lambda rows: len(rows) == 32, 32) == ()


def test_many_bad_rows_are_named_in_part_and_in_bounded_time() -> None:
    """Of every third row, the first few are named."""
    trials = []
    rows = faulty_rows(lambda rows: trials.append(1) or bool((rows % 3 == 2).any()), 300)  # type: ignore[func-returns-value]
    assert rows == (2, 5, 8, 11, 14)
    assert len(rows) == MOST_ROWS
    assert len(trials) <= MOST_TRIALS


def test_a_sample_that_outweighs_all_others_is_named() -> None:
    """Row 11 of 16 has a gradient 1,000 times as large as the others."""
    gradients = np.random.default_rng(0).standard_normal((16, 5))
    gradients[11] *= 1_000
    row, share = dominant_row(lambda rows: float(np.linalg.norm(gradients[rows].mean(axis=0))), 16) or (-1, 0.0)
    assert row == 11
    assert share > 0.99


def test_even_gradients_have_no_dominant_sample() -> None:
    """Samples that pull alike, or against each other, are not blamed; nor is the only one of a batch."""
    alike, against = np.ones((8, 1)), np.array([[5.0], [-5.0], [0.1], [0.1]])
    assert dominant_row(lambda rows: float(abs(alike[rows].mean())), 8) is None
    assert dominant_row(lambda rows: float(abs(against[rows].mean())), 4) is None
    assert dominant_row(lambda _: 1.0, 1) is None
    assert dominant_row(lambda _: float("nan"), 4) is None


def test_rows_in_words() -> None:
    """One row, a few, and more than fit."""
    assert row_words([3]) == "row 3 of the batch"
    assert row_words([1, 2]) == "rows 1, 2 of the batch"
    assert row_words(range(9)) == "rows 0, 1, 2, 3, 4 … of the batch"
