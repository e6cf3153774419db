import math

import pytest

from keras_gradwatch.records import Culprit, TensorInfo
from keras_gradwatch.words import WIDTH, counted, culprit_words, factor_words, folded, plain, short, wrapped

ORDER = ["dense", *(f"dense_{k}" for k in range(1, 20))]


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (1.1, "1.10 × the true slope"),
        (0.5, "0.50 × the true slope"),
        (1.002, "1.0020 × the true slope"),
        (1.0, "1.0000 × the true slope, but in a wrong direction"),
        (0.0123, "1.2e-02 × the true slope"),
        (250.0, "2.5e+02 × the true slope"),
        (-1.0, "sign flipped"),
        (-1.0004, "sign flipped"),
        (0.0, "zero"),
        (-0.0, "zero"),
        (-9e-7, "zero"),
        (math.nan, "NaN"),
        (math.inf, "infinite"),
        (-math.inf, "infinite"),
        (-0.7, "−0.70 × the true slope: looks like a gradient reversal; declare it in surrogates if meant"),
    ],
)
def test_factor_in_words(factor: float, words: str) -> None:
    """Each kind of wrong slope has its own words."""
    assert factor_words(factor) == words


def culprit(factor: float = math.nan, **fields: object) -> Culprit:
    return Culprit(**{"layer": "scale_1", "layer_class": "Scale", "parts": ("input",), "factor": factor} | fields)


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (1.1, "scale_1 (Scale): its backward gives 1.10 × the true slope w.r.t. its input"),
        (0.0, "scale_1 (Scale): its backward gives zero where the true slope is not zero w.r.t. its input"),
        (math.nan, "scale_1 (Scale): its backward is wrong w.r.t. its input"),
        (math.inf, "scale_1 (Scale): its backward gives infinite slopes w.r.t. its input"),
    ],
)
def test_backward_culprit_in_words(factor: float, words: str) -> None:
    """The sentence names layer, class, what is wrong and with respect to what."""
    assert culprit_words(culprit(factor)) == words


@pytest.mark.parametrize("factor", [-1.0, -0.3])
def test_reversal_is_told_how_to_be_declared(factor: float) -> None:
    """A negative factor may be meant, and the reader learns how to say so, once and at the end."""
    words = culprit_words(culprit(factor, error=2.0, bar=1e-7))
    assert words.endswith(
        "(error 2.0e+00, bar 1e-07); looks like a gradient reversal; declare it in surrogates if meant"
    )
    assert words.count("reversal") == 1


def test_parts_and_detail_are_named() -> None:
    """Several parts are joined, the detail comes last."""
    words = culprit_words(culprit(2.0, parts=("input", "scale_1/gain"), detail="seen alone"))
    assert words.endswith("2.00 × the true slope w.r.t. its input and scale_1/gain; seen alone")


def test_other_culprits_in_words() -> None:
    """A forward fault and a cut have words of their own, with and without detail."""
    assert (
        culprit_words(culprit(kind="forward")) == "scale_1 (Scale): the first value that is NaN or Inf comes from here"
    )
    assert culprit_words(Culprit(layer="data", kind="forward", detail="row 3")) == "data: row 3"
    assert culprit_words(culprit(kind="cut")) == "scale_1 (Scale): lets no gradient through"


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([], ""),
        (["dense_3"], "dense_3"),
        (["dense", "dense_1"], "dense, dense_1"),
        (ORDER[:8], "dense … dense_7"),
        (ORDER[7::-1], "dense … dense_7"),
        (["dense", "dense_2", "dense_3"], "dense, dense_2, dense_3"),
        (ORDER[::2], "dense, dense_2, dense_4 and 7 more"),
        (["loss", "dense", "dense_1"], "loss, dense, dense_1"),
    ],
)
def test_lists_of_names_are_folded(names: list[str], words: str) -> None:
    """Neighbours are named by the ends of their run; names with gaps, or unknown ones, are listed."""
    assert folded(names, ORDER) == words


def test_long_names_keep_both_ends() -> None:
    """A name too long for its column loses its middle, so that kernel and bias still differ."""
    assert short("abcdefghij", 5) == "ab…ij"
    assert short("abcdefghij", 4) == "ab…j"
    assert short("abcdefghij", 10) == "abcdefghij"
    assert len(short("x" * 1000)) <= 40


def test_control_characters_are_written_out() -> None:
    """A name cannot break a line or colour the terminal; letters of any script stay."""
    assert plain("a\nb\x1b[31m") == "a\\nb\\x1b[31m"
    assert plain("Schicht_é ×") == "Schicht_é ×"


def test_wrapped_lines_fit() -> None:
    """Lines stay within the width, unbreakable words included, and numbers are not cut at their minus."""
    lines = wrapped(f"{'error 9.1e-02, ' * 30}{'x' * 300}", first="    try: ", rest="         ")
    assert max(len(line) for line in lines) <= WIDTH
    assert lines[0].startswith("    try: error")
    assert not any(line.endswith("e-") for line in lines)


def test_tensors_are_counted_by_role() -> None:
    """Weights come before inputs, plurals and thousands are set right, and nothing is nothing."""
    weight = TensorInfo(layer="a", tensor="a", role="weight", depth=0, shape=())
    given = TensorInfo(layer="b", tensor="b", role="input", depth=0, shape=())
    assert counted([given, weight]) == "1 weight, 1 input"
    assert counted([weight] * 2000) == "2,000 weights"
    assert counted([]) == ""
