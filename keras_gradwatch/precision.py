"""How a training dtype, or a way of compiling, loses a gradient that is right: in words and figures."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from keras_gradwatch.records import Float64Array

#: Share of entries that must be flushed to zero before that is called the cause. Our choice.
_FLUSHED = 1e-2
#: Norms of two modes further apart than this, relatively, are told: far beyond the 1e-7…1e-5 by which they differ
#: through the order of their sums alone. Our choice.
_APART = 1e-3


def lost_words(exact: npt.ArrayLike, low: npt.ArrayLike, dtype: str) -> str:
    """How the training dtype loses a gradient: overflow, underflow or cancellation, and by how much.

    Args:
        exact: the gradient in float64, any shape.
        low: the same as training computes it, unscaled.
        dtype: the training dtype.

    Returns:
        One phrase that begins with the kind of loss.

    Example:
        >>> lost_words([1e-9, 1.0], [0.0, 1.0], "float16")
        'underflow: 50 % of its entries are flushed to zero in float16: 1.0e-09 of its norm is lost'
    """
    exact, low = np.asarray(exact, np.float64), np.asarray(low, np.float64)
    bad = int(np.sum(~np.isfinite(low)))
    if bad:
        peak = float(np.max(np.abs(exact)))
        share = f"{bad:,} of {low.size:,} entries are NaN or Inf"
        return f"overflow: {share} in {dtype} training, not in float64 (largest {peak:.1e})"
    norm = float(np.linalg.norm(exact))
    error = float(np.linalg.norm(low - exact)) / norm if norm else np.nan
    lost = f"{error:.1e} of its norm is lost"
    flushed = float(np.mean((low == 0) & (exact != 0)))
    if flushed == 1:
        return f"underflow: all of it is flushed to zero in {dtype}: {lost}"
    if flushed > _FLUSHED:
        return f"underflow: {100 * flushed:.0f} % of its entries are flushed to zero in {dtype}: {lost}"
    return f"cancellation in {dtype}: {lost}, no entry is flushed to zero or overflows"


def mode_words(plain: Float64Array, compiled: Float64Array, trains_compiled: bool) -> str:
    """What XLA changes in one gradient, in words; empty when both ways agree.

    Args:
        plain: norm and number of NaN or Inf entries of the gradient in eager and graph mode.
        compiled: the same where XLA compiles it.
        trains_compiled: the model trains with ``jit_compile=True``.

    Example:
        >>> mode_words(np.array([2.0, 0.0]), np.array([2.0, 0.0]), False)
        ''
    """
    bad = plain[1] > 0, compiled[1] > 0
    if all(bad) or (not any(bad) and abs(plain[0] - compiled[0]) <= _APART * max(plain[0], compiled[0])):
        return ""
    eager, xla = (
        "NaN or Inf" if b else f"a finite gradient of norm {n[0]:.1e}"
        for b, n in zip(bad, (plain, compiled), strict=True)
    )
    here = "with" if trains_compiled else "without"
    return f"eager and XLA disagree: {eager} without jit_compile, {xla} with it; this model trains {here}"
