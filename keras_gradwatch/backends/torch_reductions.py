"""Reduces gradients and weights to a few numbers each, with as few operations as possible.

Run eagerly, a training step of a small model is a race against the launch of its operations, and these come on top.
Measured (``benchmarks/RESULTS.md``): on a CPU it is cheapest to lay all tensors end to end and let NumPy, which shares
their memory, reduce stretches of them; on an accelerator, torch's functions for lists of tensors, read at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch._utils import _flatten_dense_tensors

from keras_gradwatch.records import Float64Array

#: A float32 square sum in this range has neither overflowed nor lost its digits to underflow.
_SMALLEST, _LARGEST = 1e-30, 1e36


class Gradients:
    """Some gradients: what is to be known of them is computed at once, since what comes later may write into them.

    Args:
        gradients: dense floating tensors, none of them empty.
    """

    def __init__(self, gradients: Sequence[Any]) -> None:
        self._gradients = gradients
        self._pending: list[Any] = []
        if gradients[0].is_cuda:
            wide = [_widened(gradient) for gradient in gradients]
            self._pending = [number for order in (2, float("inf"), 0) for number in torch._foreach_norm(wide, order)]
        else:
            self._numbers = _on_cpu(gradients)

    def numbers(self) -> Float64Array:
        """Square sum, largest magnitude, non-zero and non-finite count: shape ``[4, len(gradients)]``."""
        if self._pending:
            norms, largest, nonzero = _read(self._pending).reshape(3, -1)
            self._numbers = np.stack([norms * norms, largest, nonzero, np.zeros_like(norms)])
        squares, nonzero = self._numbers[0], self._numbers[2]
        ordinary = (squares < _LARGEST) & ((squares > _SMALLEST) | (nonzero == 0.0))  # False for a NaN
        if not ordinary.all():
            for column in np.flatnonzero(~ordinary):
                self._numbers[:, column] = _careful(self._gradients[int(column)])
        return self._numbers


class Weights:
    """Copies of some weights, end to end in one tensor: copying them one by one takes five times as long.

    Args:
        variables: Keras variables.
    """

    def __init__(self, variables: Sequence[Any]) -> None:
        self._tensors = [variable._value for variable in variables]  # .value takes as long as a copy
        self.sizes = [tensor.numel() for tensor in self._tensors]
        flat = _flatten_dense_tensors(self._tensors)
        self._flat = flat.clone() if len(self._tensors) == 1 else flat  # a single tensor is not copied

    def part(self, index: int) -> Any:
        """One copy, in its shape."""
        return self._flat.split(self.sizes)[index].view(self._tensors[index].shape)

    def numbers(self) -> Float64Array:
        """Square sum of each copy, and of what has been added to its weight since: shape ``[2, len(variables)]``."""
        flat = _widened(self._flat)
        update = _widened(_flatten_dense_tensors(self._tensors)) - flat
        if flat.is_cuda:
            norms = [norm for each in (flat, update) for norm in torch._foreach_norm(each.split(self.sizes))]
            return _read(norms).reshape(2, -1) ** 2
        return np.stack([_square_sums(each.numpy(), self.sizes) for each in (flat, update)])


def dense(gradient: Any, shape: Sequence[int]) -> Any:
    """A dense tensor of the variable's shape."""
    if gradient.layout != torch.strided:
        gradient = gradient.to_dense()
    return gradient if gradient.shape == shape else gradient.expand(shape)


def _on_cpu(gradients: Sequence[Any]) -> Float64Array:
    values = _widened(_flatten_dense_tensors(gradients)).numpy()
    sizes = [gradient.numel() for gradient in gradients]
    starts = np.cumsum([0, *sizes[:-1]])
    found = np.zeros((4, len(sizes)))
    found[0] = _square_sums(values, sizes)
    with np.errstate(all="ignore"):
        found[1] = np.maximum(np.maximum.reduceat(values, starts), -np.minimum.reduceat(values, starts))
    nonzero = values != 0.0
    every = np.count_nonzero(nonzero) == len(values)
    found[2] = sizes if every else np.add.reduceat(nonzero, starts, dtype=np.int64)
    return found


def _square_sums(values: npt.NDArray[Any], sizes: Sequence[int]) -> npt.NDArray[Any]:
    """Per stretch, summed pairwise, so that float32 loses nothing; 0 for an empty one."""
    size = np.array(sizes)
    starts = np.cumsum(size) - size
    found = np.zeros(len(size), values.dtype)
    with np.errstate(all="ignore"):
        if size.all():
            return np.add.reduceat(values * values, starts)
        filled = size > 0  # where a stretch is empty, reduceat gives the entry at its start
        if filled.any():
            found[filled] = np.add.reduceat(values * values, starts[filled])
    return found


def _read(scalars: Sequence[Any]) -> Float64Array:
    """Scalars from the device, at once."""
    if any(scalar.dtype != scalars[0].dtype for scalar in scalars):
        scalars = [scalar.double() for scalar in scalars]
    found: Float64Array = torch.stack(list(scalars)).cpu().numpy().astype(np.float64)
    return found


def _widened(value: Any) -> Any:
    """float32 at least: the norm of a float16 would be rounded to three digits."""
    return value if value.dtype in (torch.float32, torch.float64) else value.float()


def _careful(gradient: Any) -> list[float]:
    wide = gradient.double()
    finite = torch.isfinite(wide)
    return [float(v) for v in (wide.square().sum(), wide.abs().max(), torch.count_nonzero(wide), (~finite).sum())]
