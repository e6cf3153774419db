"""Names, numbers and verdicts in words, for lines that fit a terminal."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Sequence

from keras_gradwatch.records import Culprit, TensorInfo
from keras_gradwatch.signals import listed

#: Marks of the severities.
MARKS = {"error": "✗", "warning": "!", "info": "·"}

#: What a finding means, for readers who meet the word for the first time.
MEANINGS = {
    "mismatch": "The backward pass gives another gradient than the slope of the loss: a formula is wrong.",
    "nonfinite": "The loss or a gradient became NaN or infinite.",
    "disconnected": "The loss does not reach this weight: it has no gradient and never learns.",
    "imprecise": "The formula is right, but the training dtype loses it: overflow, underflow or cancellation.",
    "zero_gradient": "The gradient is exactly zero, though the weight is connected.",
    "exploding": "Gradients, updates or the loss run away.",
    "vanishing": "Gradients fade on their way from the loss to the first layers, until those no longer learn.",
    "dead_units": "Units of this layer no longer get any gradient.",
    "saturated": "The activations of this layer sit at their limits, where the gradient is almost zero.",
    "oscillating": "Loss and gradients swing instead of settling.",
    "stalled": "The weights hardly move, for their size.",
}

#: Columns of a terminal that every line fits into.
WIDTH = 100

_NAME_WIDTH = 40
_REVERSAL = "looks like a gradient reversal; declare it in surrogates if meant"


def factor_words(factor: float) -> str:
    """What analytic / numeric slope says, in words.

    Args:
        factor: the ratio along the gradient; NaN when it means nothing.

    Returns:
        ``"NaN"``, ``"infinite"``, ``"zero"`` (below 1e-6), ``"sign flipped"`` (−1 within 1e-3) or a multiple of the
        true slope. Both thresholds are our choice: far above the errors of a float64 check.

    Example:
        >>> factor_words(1.1)
        '1.10 × the true slope'
        >>> factor_words(-0.7)
        '−0.70 × the true slope: looks like a gradient reversal; declare it in surrogates if meant'
    """
    if math.isnan(factor):
        return "NaN"
    if math.isinf(factor):
        return "infinite"
    if abs(factor) < 1e-6:
        return "zero"
    if abs(factor + 1) < 1e-3:
        return "sign flipped"
    digits = 4 if abs(abs(factor) - 1) < 0.005 else 2  # 1.00 would look right
    size = f"{abs(factor):.{digits}f}" if 0.1 <= abs(factor) < 100 else f"{abs(factor):.1e}"
    words = f"{'−' if factor < 0 else ''}{size} × the true slope"
    if factor < 0:
        return f"{words}: {_REVERSAL}"
    return f"{words}, but in a wrong direction" if abs(factor - 1) < 1e-3 else words


def culprit_words(culprit: Culprit) -> str:
    """Which layer is at fault and what it does, in one line of words.

    Args:
        culprit: the layer and the evidence.

    Returns:
        The layer and what is wrong with it; with numbers where there are any.

    Example:
        >>> culprit_words(Culprit(layer="s", layer_class="Scale", parts=("input",), factor=1.1, error=0.091, bar=3e-7))
        's (Scale): its backward gives 1.10 × the true slope w.r.t. its input (error 9.1e-02, bar 3e-07)'
    """
    title = f"{culprit.layer} ({culprit.layer_class})" if culprit.layer_class else culprit.layer
    if culprit.kind == "forward":
        return f"{title}: {culprit.detail or 'the first value that is NaN or Inf comes from here'}"
    if culprit.kind == "cut":
        return f"{title}: {culprit.detail or 'lets no gradient through'}"
    if math.isnan(culprit.error) and math.isnan(culprit.factor) and culprit.detail:
        return f"{title}: {culprit.detail}"
    parts = " and ".join("its input" if part == "input" else part for part in culprit.parts)
    words = f"{title}: its backward {_backward_words(culprit.factor)}{f' w.r.t. {parts}' if parts else ''}"
    if not math.isnan(culprit.error):
        words += f" (error {culprit.error:.1e}, bar {culprit.bar:.0e})"
    hints = [_REVERSAL] if culprit.factor < 0 and abs(culprit.factor) >= 1e-6 else []
    return "; ".join([words, *hints, *([culprit.detail] if culprit.detail else [])])


def folded(names: Sequence[str], order: Sequence[str]) -> str:
    """Names in short: a run of neighbours by its ends, others listed.

    Args:
        names: what to name, without repeats.
        order: all such names, in network order.

    Example:
        >>> order = ["dense", "dense_1", "dense_2", "dense_3"]
        >>> folded(["dense_2", "dense_1", "dense"], order), folded(["dense", "dense_3"], order)
        ('dense … dense_2', 'dense, dense_3')
    """
    places = sorted(order.index(name) for name in names if name in order)
    is_run = len(places) == len(names) >= 3 and places[-1] - places[0] == len(places) - 1
    if is_run:
        return f"{short(order[places[0]])} … {short(order[places[-1]])}"
    return listed(tuple(short(name) for name in names))


def counted(tensors: Sequence[TensorInfo]) -> str:
    """``"18 weights, 1 input"``; empty when there are none."""
    counts = Counter(tensor.role for tensor in tensors)
    return ", ".join(number(counts[role], role) for role in ("weight", "input") if counts[role])


def number(count: int, noun: str) -> str:
    """``"1 weight"``, ``"2,000 weights"``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def short(name: str, width: int = _NAME_WIDTH) -> str:
    """The name without control characters, its middle left out when it is longer than ``width``."""
    name = plain(name)
    if len(name) <= width:
        return name
    tail = (width - 1) // 2
    return f"{name[: width - 1 - tail]}…{name[len(name) - tail :]}"


def plain(text: str) -> str:
    """Control characters written out, so that a name can neither break a line nor steer the terminal."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def wrapped(text: str, *, first: str, rest: str) -> list[str]:
    """Lines of up to 100 columns, the first one begun with ``first``, the others with ``rest``."""
    # Not at hyphens: a line that ends in "9.1e-" cannot be read.
    return textwrap.wrap(plain(text), WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)


def _backward_words(factor: float) -> str:
    if math.isnan(factor):
        return "is wrong"
    if abs(factor) < 1e-6:
        return "gives zero where the true slope is not zero"
    if abs(factor + 1) < 1e-3:
        return "gives the true slope with its sign flipped"
    if math.isinf(factor):
        return "gives infinite slopes"
    return f"gives {factor_words(factor).removesuffix(f': {_REVERSAL}')}"
