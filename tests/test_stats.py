"""The statistics of one step, against NumPy formulas written out here."""

import numpy as np
import pytest

from keras_gradwatch.records import STATISTICS
from keras_gradwatch.stats import REDUCTIONS, reductions_of, statistics_from_reductions, statistics_of


def row(**expected: float) -> list[float]:
    return [expected[name] for name in STATISTICS]


def test_a_row_is_what_the_names_say() -> None:
    """Norm, rms, largest magnitude, zeros, weight norm and update ratio follow their definitions."""
    generator = np.random.default_rng(0)
    gradient, weight, update = generator.normal(size=(3, 4, 5))
    gradient[0, :2] = 0.0
    expected = row(
        grad_norm=np.linalg.norm(gradient), grad_rms=np.sqrt(np.mean(gradient**2)), grad_absmax=np.abs(gradient).max(),
        zero_fraction=0.1, nonfinite_count=0, weight_norm=np.linalg.norm(weight),
        update_ratio=np.linalg.norm(update) / np.linalg.norm(weight),
    )  # fmt: skip
    np.testing.assert_allclose(statistics_of(gradient, weight, update), expected, rtol=1e-14)


@pytest.mark.parametrize(("moved", "ratio"), [(0.0, 0.0), (1e-30, 1.0), (3.0, 1.0)])
def test_a_weight_at_zero_moves_by_all_or_nothing(moved: float, ratio: float) -> None:
    """The update ratio of a weight of norm 0 is 0 when it stays and 1 when it moves, never infinite."""
    assert statistics_of([1.0], [0.0], [moved])[STATISTICS.index("update_ratio")] == ratio


def test_an_empty_tensor_has_zeros() -> None:
    """A tensor without elements has norm, rms, maximum and zero fraction 0."""
    assert statistics_of([], [], []).tolist() == [0.0] * len(STATISTICS)


def test_all_zero_gradient() -> None:
    """A gradient of zeros has a zero fraction of 1 and a norm of 0."""
    values = dict(zip(STATISTICS, statistics_of(np.zeros(7), np.ones(7), np.zeros(7)), strict=True))
    assert (values["zero_fraction"], values["grad_norm"], values["update_ratio"]) == (1.0, 0.0, 0.0)


def test_nonfinite_elements_are_counted_and_show() -> None:
    """NaN and Inf are counted; a NaN makes norm and maximum NaN, an Inf makes them infinite."""
    nan, inf = (
        statistics_of([np.nan, np.inf, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, np.nan]),
        statistics_of([np.inf], [1.0], [1.0]),
    )
    assert nan[4] == 2
    assert np.isnan(nan[[0, 1, 2, 6]]).all()
    assert nan[3] == pytest.approx(1 / 3)
    assert inf[:3].tolist() == [np.inf] * 3


def test_float16_squares_do_not_overflow() -> None:
    """Whatever the dtype that came in, squares are summed in float64."""
    assert statistics_of(np.full(4, 60_000, np.float16), np.ones(4), np.zeros(4))[0] == pytest.approx(120_000, rel=1e-3)


def test_without_a_gradient_only_the_weight_is_known() -> None:
    """The row of a variable that the loss does not reach is NaN but for its weight norm."""
    table = np.stack([reductions_of([1.0, 2.0], [3.0, 4.0], [0.0, 0.0])] * 2, axis=1)
    first, second = statistics_from_reductions(table, [2, 2], [True, False])
    assert np.isfinite(first).all()
    assert second[STATISTICS.index("weight_norm")] == 5.0
    assert np.isnan(second).sum() == len(STATISTICS) - 1


def test_no_tensors() -> None:
    """A step in which no optimizer was seen has no rows."""
    assert statistics_from_reductions(np.zeros((len(REDUCTIONS), 0)), [], []).shape == (0, len(STATISTICS))
