"""Per-tensor statistics of a gradient: what is summed on the device, and what the sums mean. Pure NumPy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from keras_gradwatch.records import STATISTICS, Float64Array

#: What a backend reduces each tensor to inside the compiled step, in row order. Six numbers are all that leaves the
#: device; everything that needs a root, a quotient or a convention happens here, once for all backends.
REDUCTIONS = (
    "gradient_square_sum",
    "gradient_absmax",
    "nonzero_count",
    "nonfinite_count",
    "weight_square_sum",
    "update_square_sum",
)


def statistics_from_reductions(
    reductions: npt.ArrayLike, sizes: npt.ArrayLike, connected: Sequence[bool]
) -> Float64Array:
    """The statistics of all tensors of one step.

    Args:
        reductions: shape ``[len(REDUCTIONS), V]``, over the elements of each tensor; a NaN counts as non-zero.
        sizes: shape ``[V]``, number of elements of each tensor, those a sparse gradient leaves out included.
        connected: shape ``[V]``, False where the gradient is None.

    Returns:
        Float64 array of shape ``[V, len(STATISTICS)]``. Rows without a gradient are NaN but for ``weight_norm``. An
        empty tensor has norms, rms and zero fraction 0. A weight of norm 0 has an ``update_ratio`` of 0 when it stays
        there and of 1 when it moves: it changed by all of its new size (our choice; the quotient would be infinite).

    Example:
        >>> statistics_from_reductions([[25.0], [4.0], [2], [0], [1.0], [0.25]], [4], [True])[0].tolist()
        [5.0, 2.5, 4.0, 0.5, 0.0, 1.0, 0.5]
    """
    # In few calls: this runs on every tracked step, right after a train step has emptied the processor's caches.
    table = np.asarray(reductions, dtype=np.float64).reshape(len(REDUCTIONS), -1)
    size = np.asarray(sizes, dtype=np.float64)
    norm, weight_norm, update_norm = np.sqrt(table[[0, 4, 5]])
    result = np.empty((len(STATISTICS), table.shape[1]))
    result[0] = norm
    result[1] = norm / np.sqrt(np.maximum(size, 1.0))
    result[2:5] = table[1:4]
    result[3] = 1.0 - table[2] / np.maximum(size, 1.0)
    result[5] = weight_norm
    if weight_norm.all() and np.isfinite(table).all() and size.all() and all(connected):
        result[6] = update_norm / weight_norm
        return result.T
    result[2, np.isnan(norm)] = np.nan  # whether a maximum lets a NaN through depends on the device; a sum always does
    result[3, size == 0.0] = 0.0
    result[6] = np.sign(update_norm)
    with np.errstate(invalid="ignore"):  # inf / inf: the NaN is the answer
        np.divide(update_norm, weight_norm, out=result[6], where=weight_norm != 0.0)
    disconnected = ~np.asarray(connected, dtype=np.bool_)
    result[:5, disconnected] = np.nan
    result[6, disconnected] = np.nan
    return result.T


def reductions_of(gradient: npt.ArrayLike, weight: npt.ArrayLike, update: npt.ArrayLike) -> Float64Array:
    """The numbers of :data:`REDUCTIONS` for one tensor, in float64: the slow, plain version of what a backend does.

    Args:
        gradient: array of any shape, loss units per weight unit.
        weight: array of the same shape, before the step.
        update: array of the same shape, weight after the step minus weight before it.

    Returns:
        Float64 array of shape ``[len(REDUCTIONS)]``; all zero for an empty tensor.
    """
    values, before, change = (np.asarray(array, dtype=np.float64).ravel() for array in (gradient, weight, update))
    with np.errstate(invalid="ignore", over="ignore"):
        return np.array(
            [
                np.sum(values**2),
                np.max(np.abs(values), initial=0.0),
                float(np.count_nonzero(values)),
                float(np.count_nonzero(~np.isfinite(values))),
                np.sum(before**2),
                np.sum(change**2),
            ],
            dtype=np.float64,
        )


def statistics_of(gradient: npt.ArrayLike, weight: npt.ArrayLike, update: npt.ArrayLike) -> Float64Array:
    """One row of statistics for one tensor, in float64.

    Args:
        gradient: array of any shape, loss units per weight unit.
        weight: array of the same shape, before the step.
        update: array of the same shape, weight after the step minus weight before it.

    Returns:
        Float64 array of shape ``[len(STATISTICS)]``, with the conventions of :func:`statistics_from_reductions`.

    Example:
        >>> statistics_of([3.0, 4.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.5, 0.0, 0.0, 0.0]).tolist()
        [5.0, 2.5, 4.0, 0.5, 0.0, 1.0, 0.5]
    """
    row: Float64Array = statistics_from_reductions(
        reductions_of(gradient, weight, update), [np.size(gradient)], [True]
    )[0]
    return row
