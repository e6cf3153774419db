"""A point of a traced scalar and the lines through it: the same on every backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from keras_gradwatch.records import Float64Array


@dataclass(frozen=True)
class Point:
    """Loss and gradients of a traced scalar at one point, on the device.

    Attributes:
        traced: the scalar, as the running backend has it.
        slopes: all gradients as one flat float64 vector, zero where a gradient is None.
        summaries: shape ``[T, 3]``: rms of the value; norm and non-finite count of the gradient.
        frozen: base values of what is held along lines: stop_gradients, and random draws where they must be.
    """

    traced: Any
    moving: list[Any]
    fixed: list[Any]
    loss: float
    slopes: Any
    summaries: Float64Array
    frozen: list[Any]

    @property
    def gradients(self) -> list[Any]:
        """One gradient per moving tensor, float64; None where the loss does not reach it."""
        parts = self.traced.split(self.slopes)
        return [part if known else None for part, known in zip(parts, self.traced.connected, strict=True)]

    def difference(self, other: Point, scale: float = 1.0) -> Float64Array:
        """Per tensor ‖other/scale − self‖, float64; NaN where a gradient is None."""
        distances = self.traced.distances(self.slopes, other.slopes, scale) if self.moving else np.zeros(0)
        return np.where(self.traced.connected, distances, np.nan)

    def line(self, seed: int, part: tuple[int, int, int] | None = None) -> Line:
        """Directions through this point: per tensor one random (entries of size 1) and one along the gradient."""
        return Line(self, seed, part)

    def moved(self, sizes: Float64Array, seed: int) -> Point:
        """The same scalar at a point where every tensor is jittered by ``sizes`` (rms per tensor)."""
        point: Point = self.traced.point(self.traced.moved(self.moving, sizes, seed), self.fixed)
        return point


class Line:
    """A point with directions through it: the loss as a function of two coefficients per tensor."""

    def __init__(self, point: Point, seed: int, part: tuple[int, int, int] | None) -> None:
        self._point = point
        random, aligned, slopes = point.traced.directions(point.slopes, seed, part)
        self._directions = random, aligned
        self.slopes: Float64Array = np.asarray(slopes)

    def losses(self, coefficients: Float64Array, *, naive: bool = False) -> Float64Array:
        """Losses at ``base + c[0] · random + c[1] · aligned``; ``coefficients`` has shape ``[K, 2, T]``.

        With ``naive`` the values of ``stop_gradient`` move too.
        """
        losses: Float64Array = self._point.traced.losses(self._point, self._directions, coefficients, naive)
        return losses

    def entry(self, j: int, index: int) -> float:
        """The random direction's value at one flat entry of tensor ``j``."""
        return float(self._directions[0][sum(self._point.traced.sizes[:j]) + index])
