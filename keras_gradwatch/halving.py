"""Which samples of a batch are at fault, found by halving it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from keras_gradwatch.records import Int64Array

#: Rows that are named, and times that a batch is tried, at most. Our choice: a tried batch costs about a step.
MOST_ROWS, MOST_TRIALS = 5, 64

#: Share of the gradient from which on one sample dominates it: more than all others together. Our choice.
DOMINANT = 0.5


def faulty_rows(is_bad: Callable[[Int64Array], bool], count: int) -> tuple[int, ...]:
    """Rows that make a batch bad, each by itself.

    Args:
        is_bad: whether the batch made of these rows alone is bad.
        count: number of rows of the whole batch, which is bad.

    Returns:
        Up to :data:`MOST_ROWS` rows, counted from 0, in order. Empty when it lies in no row: all are bad, or only
        several together.

    Example:
        >>> faulty_rows(lambda rows: 7 in rows or 20 in rows, 32)
        (7, 20)
    """
    found = list[int]()
    waiting, trials = [np.arange(count)], 0
    while waiting and len(found) <= MOST_ROWS and trials < MOST_TRIALS:
        rows = waiting.pop()
        if len(rows) == 1:
            found.append(int(rows[0]))
            continue
        halves = [half for half in np.array_split(rows, 2) if is_bad(half)]
        trials += 2
        waiting.extend(reversed(halves))
    everywhere = found == list(range(min(count, MOST_ROWS + 1)))
    return () if everywhere else tuple(found[:MOST_ROWS])


def dominant_row(norm_of: Callable[[Int64Array], float], count: int) -> tuple[int, float] | None:
    """The row whose gradient outweighs that of all others.

    Args:
        norm_of: norm of the gradient of the mean loss over these rows alone.
        count: number of rows of the whole batch.

    Returns:
        The row, counted from 0, and its share of the gradient norm; ``None`` when no row dominates.

    Example:
        >>> gradients = np.array([1.0, 1.0, 900.0, -1.0])
        >>> dominant_row(lambda rows: abs(gradients[rows].mean()), 4)
        (2, 0.998...)
    """
    whole = count * norm_of(np.arange(count))
    rows = np.arange(count)
    while len(rows) > 1:
        rows = max(np.array_split(rows, 2), key=lambda half: _sum_of(norm_of, half))
    others = np.delete(np.arange(count), rows)
    if count < 2 or not 0 < whole < math.inf:
        return None
    own, rest = _sum_of(norm_of, rows) / whole, _sum_of(norm_of, others) / whole
    return (int(rows[0]), float(min(own, 1.0))) if own > DOMINANT > rest else None


def row_words(rows: Sequence[int]) -> str:
    """Rows in words.

    Example:
        >>> row_words([3]), row_words(range(7))
        ('row 3 of the batch', 'rows 0, 1, 2, 3, 4 … of the batch')
    """
    shown = ", ".join(str(row) for row in rows[:MOST_ROWS])
    return f"row{'s' if len(rows) > 1 else ''} {shown}{' …' if len(rows) > MOST_ROWS else ''} of the batch"


def _sum_of(norm_of: Callable[[Int64Array], float], rows: Int64Array) -> float:
    """‖Σ gradient‖ over rows, from that of their mean; NaN counts as the largest."""
    norm = len(rows) * norm_of(rows)
    return math.inf if math.isnan(norm) else norm
