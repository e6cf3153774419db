"""Reduces gradients and weights to a few numbers each, inside a compiled JAX step.

XLA on a processor runs one loop per reduction. Sums of squares are cheap; the rest would cost a small model a tenth of
its step, so that all four numbers of a gradient are taken in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

#: The square of a float32 in this range neither overflows in a sum of 1e8 such, nor loses its digits to underflow.
_SMALLEST, _LARGEST = 1e-15, 1e15


def gradient_reductions(gradients: Sequence[Any]) -> Any:
    """Square sum (as a scale and a sum), largest magnitude, non-zero and non-finite count of each gradient.

    Args:
        gradients: floating arrays, none of them empty.

    Returns:
        Float array of shape ``[5, len(gradients)]``: ‖g‖² is ``scale² · sum``, for it may be too large for a float32.
        Counts beyond 2**24 are rounded.
    """
    return jnp.stack([_reduced(_at_least_float32(gradient)) for gradient in gradients], axis=1)


def weight_reductions(before: Sequence[Any], after: Sequence[Any]) -> Any:
    """Square sum of each weight and of its update, float array of shape ``[2, V]``."""
    if not before:
        return jnp.zeros((2, 0))
    pairs = [(_at_least_float32(old), _at_least_float32(new)) for old, new in zip(before, after, strict=True)]
    return jnp.stack(
        [
            jnp.stack([jnp.sum(jnp.square(old)) for old, _ in pairs]),
            jnp.stack([jnp.sum(jnp.square(new - old)) for old, new in pairs]),
        ]
    )


def _reduced(gradient: Any) -> Any:
    """Scale, square sum in that scale, largest magnitude, non-zero and non-finite count."""
    square_sum = jnp.sum(jnp.square(gradient))
    largest = jnp.max(jnp.abs(gradient))
    nonzero = jnp.sum((gradient != 0).astype(gradient.dtype))
    one = jnp.ones((), gradient.dtype)
    ordinary = ((largest > _SMALLEST) | (largest == 0)) & (square_sum < _LARGEST**2)  # False for a NaN

    def careful() -> tuple[Any, Any, Any]:
        scale = jnp.where((largest > 0) & jnp.isfinite(largest), largest, one)
        bad = jnp.sum((~jnp.isfinite(gradient)).astype(gradient.dtype))
        return scale, jnp.sum(jnp.square(gradient / scale)), bad

    scale, square_sum, bad = jax.lax.cond(ordinary, lambda: (one, square_sum, 0 * one), careful)
    return jnp.stack([scale, square_sum, largest, nonzero, bad])


def _at_least_float32(value: Any) -> Any:
    """The squares of a float16 overflow."""
    return value if value.dtype in (np.float32, np.float64) else value.astype(np.float32)
