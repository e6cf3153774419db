"""Reduces gradients and weights to a few numbers each on the device, with as few operations as possible.

The quick way is taken first, in float32, whose squares overflow at 1e19 and vanish below 1e-23; numbers that show this
are taken again in float64, which needs a look at the numbers and is therefore left until they have been read anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from keras_gradwatch.records import Float64Array

#: A float32 norm in this range has neither overflowed nor lost its digits to underflow.
_SMALLEST, _LARGEST = 1e-15, 1e18


def dense(gradient: Any, variable: Any) -> Any:
    """A dense tensor of the variable's shape."""
    if gradient.layout != torch.strided:
        gradient = gradient.to_dense()
    return gradient if gradient.shape == variable.shape else gradient.expand(tuple(variable.shape))


def gradient_reductions(gradients: Sequence[Any]) -> Any:
    """Norm, largest magnitude and non-zero count of each gradient.

    Args:
        gradients: dense floating tensors, none of them empty.

    Returns:
        Float64 tensor of shape ``[3, len(gradients)]``. Counts beyond 2**24 may be rounded to float32 on accelerators.
    """
    wide = _widened(gradients)
    norms = torch.stack(torch._foreach_norm(wide))
    if wide[0].is_cuda:  # one launch for all tensors is cheaper than a faster kernel for each
        largest, nonzero = (torch.stack(torch._foreach_norm(wide, order)) for order in (float("inf"), 0))
    else:
        ends = [torch.stack(column) for column in zip(*map(torch.aminmax, wide), strict=True)]
        largest = torch.maximum(-ends[0], ends[1])
        nonzero = torch.stack([torch.count_nonzero(value) for value in wide])
    return torch.stack([norms.double(), largest.double(), nonzero.double()])


def gradient_numbers(reductions: Float64Array, gradients: Sequence[Any]) -> Float64Array:
    """Square sum, largest magnitude, non-zero and non-finite count: shape ``[4, len(gradients)]``.

    Args:
        reductions: what :func:`gradient_reductions` gave for these gradients, read.
        gradients: looked at again where float32 was not good enough.
    """
    norms, largest, nonzero = reductions
    found = np.stack([norms**2, largest, nonzero, np.zeros_like(norms)])
    for column in np.flatnonzero(~((norms < _LARGEST) & ((norms > _SMALLEST) | (largest == 0.0)))):
        found[:, column] = _careful(gradients[int(column)])
    return found


def weight_reductions(before: Sequence[Any], after: Sequence[Any]) -> Any:
    """Norm of each weight and of its update: float64 tensor of shape ``[2, V]``."""
    before, after = _widened(before), _widened(after)
    norms = [torch.stack(torch._foreach_norm(each)) for each in (before, torch._foreach_sub(after, before))]
    return torch.stack(norms).double()


def _careful(gradient: Any) -> list[float]:
    wide = gradient.double()
    finite = torch.isfinite(wide)
    return [float(v) for v in (wide.square().sum(), wide.abs().max(), torch.count_nonzero(wide), (~finite).sum())]


def _widened(tensors: Sequence[Any]) -> list[Any]:
    """float32 at least: the norm of a float16 would be rounded to three digits."""
    return [t if t.dtype in (torch.float32, torch.float64) else t.float() for t in tensors]
