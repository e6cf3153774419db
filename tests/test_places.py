"""Where inside a wrong tensor, on small analytic problems: no framework, the faults are known."""

import numpy as np
import pytest
from test_check import FAULTS, Toy, planted, quartic, values

from keras_gradwatch.check import CheckSettings
from keras_gradwatch.places import Place, locate

SHAPES = ((4, 5), (5,), (24, 16), (2,))


def place(fault, index: int = 2) -> tuple[Place, Toy]:
    loss, gradient = quartic()
    toy = Toy(loss, planted(gradient, index, fault), values(3, SHAPES))
    return locate(toy, index, "kernel", SHAPES[index], CheckSettings(), 0), toy


def masked(mask: np.ndarray, factor: float):
    return lambda g: np.where(mask, factor * g, g)


def test_one_entry_of_hundreds_is_named() -> None:
    """The only wrong entry is found and named, with its two slopes, for far fewer losses than 2N."""
    mask = np.zeros(SHAPES[2], bool)
    mask[3, 5] = True
    found, toy = place(masked(mask, 2.0))
    assert found.words == "wrong only in [3, 5]"
    entry = found.evidence[-1]
    truth = toy.claimed[2][3, 5] / 2
    assert entry.along == "[3, 5]"
    assert entry.numeric == pytest.approx(truth, abs=entry.bar)
    assert entry.analytic == pytest.approx(2 * truth)
    assert found.evaluations < SHAPES[2][0] * SHAPES[2][1] / 4


@pytest.mark.parametrize(("index", "words"), [((7, slice(None)), "[7, :]"), ((slice(None), 7), "[:, 7]")])
def test_a_row_or_column_is_named(index, words) -> None:
    """A fault in one row or one column is told as that."""
    mask = np.zeros(SHAPES[2], bool)
    mask[index] = True
    found, _ = place(masked(mask, 0.0))
    assert found.words.startswith(f"wrong in {words}, worst seen [")


def test_a_fault_everywhere_is_told_as_such() -> None:
    """A factor on the whole tensor is wrong in every entry tried, and along its gradient."""
    found, toy = place(FAULTS["times 1.01"])
    assert found.words.startswith("wrong in 8 of 8 entries tried at random")
    along = found.evidence[1]
    assert along.along == "gradient"
    assert along.analytic == pytest.approx(toy.norms[2])
    assert along.numeric == pytest.approx(toy.norms[2] / 1.01, abs=along.bar)


def test_a_right_tensor_has_no_wrong_entries() -> None:
    """Nothing is named in a tensor whose gradient is right, and its slopes agree within their bars."""
    found, _ = place(lambda g: g)
    assert found.words == ""
    assert [e.along for e in found.evidence] == ["random", "gradient"]
    assert all(e.error <= e.bar for e in found.evidence)


def test_a_scalar_needs_no_place() -> None:
    """A tensor of one entry is wrong as a whole."""
    loss, gradient = quartic()
    toy = Toy(loss, planted(gradient, 1, lambda g: 1.1 * g), [v.reshape(()) if v.size == 1 else v for v in values(
        0, ((2, 3), (), (2,), (2,)))])  # fmt: skip
    found = locate(toy, 1, "scale", (), CheckSettings(), 0)
    assert found.words == ""
    assert found.evidence[-1].along == "[]"
