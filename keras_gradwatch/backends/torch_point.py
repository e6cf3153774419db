"""A scalar that code on torch computes, at a point: its gradients, and its values along lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from keras_gradwatch.backends.points import Point
from keras_gradwatch.backends.torch_graph import Held, Place
from keras_gradwatch.records import Float64Array

#: ``scalar(moving, fixed, mode) -> tensor``; the mode is one under which the code must run, or None.
Scalar = Callable[[list[Any], list[Any], Any], Any]


class Traced:
    """A scalar as a function of moving and fixed tensors; every evaluation runs the code again.

    All gradients travel as one flat float64 vector.

    Args:
        scalar: runs the code.
        shapes: of the moving tensors.
        surroundings: opened around every run, backward pass included.
        stops: places whose values are held along lines, as :class:`Held` takes them.
    """

    def __init__(
        self, scalar: Scalar, shapes: Sequence[tuple[int, ...]],
        surroundings: Callable[[], AbstractContextManager[Any]], stops: Sequence[tuple[Place, int]] = (),
    ) -> None:  # fmt: skip
        self.sizes = [int(np.prod(shape, dtype=np.int64)) for shape in shapes]
        self.connected: tuple[bool, ...] = (True,) * len(self.sizes)
        self.stops = list(stops)
        self.astray = False
        self._shapes, self._scalar, self._surroundings = list(shapes), scalar, surroundings

    def point(self, moving: Sequence[Any], fixed: Sequence[Any]) -> Point:
        """Loss and gradients at a point."""
        leaves = [value.detach().requires_grad_() for value in moving]
        held = Held(self.stops) if self.stops else None
        with self._surroundings(), torch.enable_grad():
            loss = self._scalar(leaves, list(fixed), held)
            gradients = gradients_of(loss, leaves)
        self.connected = tuple(gradient is not None for gradient in gradients)
        slopes = self._flat([torch.zeros_like(v) if g is None else g for v, g in zip(moving, gradients, strict=True)])
        if held is not None and held.missed:
            self.astray = True
        frozen = held.collected if held is not None and not self.astray else []
        summaries = self._summaries(self._flat(moving), slopes)
        return Point(self, list(moving), list(fixed), float(loss.detach()), slopes, summaries, frozen)

    def nowhere(self, moving: Sequence[Any], fixed: Sequence[Any]) -> Point:
        """A point at which the scalar could not be computed."""
        slopes = torch.zeros(sum(self.sizes), dtype=torch.float64)
        return Point(self, list(moving), list(fixed), float("nan"), slopes, np.zeros((len(self.sizes), 3)), [])

    def directions(self, slopes: Any, seed: int, part: tuple[int, int, int] | None) -> tuple[Any, Any, Float64Array]:
        """Random and aligned direction as flat vectors, and the slopes ``[2, T]`` along them."""
        slopes = torch.where(torch.isfinite(slopes), slopes, 0.0)  # NaN · 0 would reach every tensor
        # Sizes between 0.5 and 1.5 with random signs: unlike normal numbers none is near zero, so every entry is seen.
        random = torch.rand(slopes.shape, generator=_generator(slopes, seed), dtype=slopes.dtype, device=slopes.device)
        random = 2.0 * random - 1.0
        random = random + 0.5 * torch.sign(random)
        if part:
            offsets = np.cumsum([0, *self.sizes])
            j, start, stop = part
            begin, end = int(offsets[j]), int(offsets[j + 1])
            random[begin : begin + start] = 0.0
            random[begin + stop : end] = 0.0
        gradients = slopes.split(self.sizes) if self.sizes else []
        norms = [torch.linalg.vector_norm(gradient) for gradient in gradients]
        aligned = [torch.where(n > 0, g / n, 0.0) for g, n in zip(gradients, norms, strict=True)]
        along = [part_.sum() for part_ in (slopes * random).split(self.sizes)] if self.sizes else []
        table = torch.stack([*along, *norms]).cpu().numpy().reshape(2, -1) if along else np.zeros((2, 0))
        return random, torch.cat(aligned) if aligned else slopes, table

    def losses(
        self, point: Point, directions: tuple[Any, Any], coefficients: Float64Array, naive: bool
    ) -> Float64Array:
        """Losses at several moved points."""
        random, aligned = directions
        sizes = torch.tensor(self.sizes, device=random.device)
        found = []
        with self._surroundings(), torch.enable_grad():
            for row in torch.as_tensor(np.asarray(coefficients, np.float64), device=random.device):
                spread = torch.repeat_interleave(row, sizes, dim=1)
                move = spread[0] * random + spread[1] * aligned
                moved = [
                    (value + step.to(value.dtype)).requires_grad_()
                    for value, step in zip(point.moving, self.split(move), strict=True)
                ]
                held = Held(self.stops, point.frozen) if point.frozen and not naive else None
                found.append(float(self._scalar(moved, point.fixed, held).detach()))
                if held is not None and held.missed:
                    self.astray = True
        return np.array(found, dtype=np.float64)

    def moved(self, moving: Sequence[Any], sizes: Float64Array, seed: int) -> list[Any]:
        """The moving tensors, each jittered by its size (rms)."""
        generator = _generator(moving[0], seed) if moving else None
        found = []
        for value, size in zip(moving, sizes, strict=True):
            noise = torch.randn(value.shape, generator=generator, dtype=torch.float64, device=value.device)
            found.append(value + (float(size) * noise).to(value.dtype))
        return found

    def distances(self, slopes: Any, other: Any, scale: float) -> Float64Array:
        """Per tensor ‖other / scale − slopes‖."""
        parts = (other / scale - slopes).split(self.sizes)
        norms: Float64Array = torch.stack([torch.linalg.vector_norm(part) for part in parts]).cpu().numpy()
        return norms

    def split(self, flat: Any) -> list[Any]:
        """A flat vector as one tensor per moving tensor."""
        parts = flat.split(self.sizes) if self.sizes else []
        return [part.reshape(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def _flat(self, tensors: Sequence[Any]) -> Any:
        parts = [(t.to_dense() if t.layout != torch.strided else t).detach().double().reshape(-1) for t in tensors]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)

    def _summaries(self, values: Any, slopes: Any) -> Float64Array:
        """Per tensor the rms of its value, the norm of its gradient, and how many entries of that are not finite."""
        if not self.sizes:
            return np.zeros((0, 3))
        norms = [[torch.linalg.vector_norm(part) for part in flat.split(self.sizes)] for flat in (values, slopes)]
        bad = [part.sum(dtype=torch.float64) for part in (~torch.isfinite(slopes)).split(self.sizes)]
        table: Float64Array = torch.stack([torch.stack(column) for column in (*norms, bad)], dim=1).cpu().numpy()
        table[:, 0] /= np.sqrt(np.maximum(self.sizes, 1))
        return table


def gradients_of(loss: Any, tensors: Sequence[Any]) -> list[Any]:
    """Gradients of a scalar, None where it does not depend on a tensor through autograd."""
    if not loss.requires_grad or not tensors:
        return [None] * len(tensors)
    return list(torch.autograd.grad(loss, list(tensors), allow_unused=True))


def running(mode: Any) -> AbstractContextManager[Any]:
    """The context of a mode, or none."""
    return nullcontext() if mode is None else mode


def _generator(like: Any, seed: int) -> Any:
    return torch.Generator(device=like.device).manual_seed(seed & 0x7FFFFFFFFFFFFFFF)
