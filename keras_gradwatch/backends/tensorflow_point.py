"""A scalar in a TensorFlow graph at a point: its gradients, and its values along lines, each in one compiled call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_gradwatch.backends.points import Point
from keras_gradwatch.backends.tensorflow_graph import compiled, pruned, to_tensor
from keras_gradwatch.records import Float64Array


class Traced:
    """A scalar in a graph as a function of some of its tensors.

    Values and gradients of all moving tensors travel as one flat float64 vector each: a handful of operations per
    evaluation, whatever the number of tensors.

    Args:
        wrapped: the wrapped function that owns the graph.
        moving, fixed: tensors of the graph that are fed.
        loss: the scalar.
        gradients: of the scalar by each moving tensor, or None.
        stops, draws: outputs of ``stop_gradient`` and of random operations, held at their base values along lines.
        full: function of all fed tensors that gives :func:`fetches`, if there is one already.
    """

    def __init__(
        self, wrapped: Any, moving: Sequence[Any], fixed: Sequence[Any], loss: Any, gradients: Sequence[Any],
        stops: Sequence[Any] = (), draws: Sequence[Any] = (), full: Any = None,
    ) -> None:  # fmt: skip
        self.moving, self.fixed, self.loss = list(moving), list(fixed), loss
        self.stops, self.draws = list(stops), list(draws)
        self.connected = tuple(g is not None for g in gradients)
        self.sizes = [int(t.shape.num_elements()) for t in moving]
        self._wrapped = wrapped
        self.full = full
        if full is None:
            with wrapped.graph.as_default():
                wanted = fetches(loss, moving, gradients, stops, draws)
            self.full = pruned(wrapped, [*self.moving, *self.fixed], wanted)
        self._forwards: dict[bool, Any] = {}
        # Compiled on first use, once: only the number of points along lines varies.
        self._compiled: dict[tuple[str, bool], Any] = {}

    def point(self, moving: Sequence[Any], fixed: Sequence[Any]) -> Point:
        """Loss and gradients at a point, kept on the device."""
        loss, slopes, summaries, *frozen = self.full(*moving, *fixed)
        return Point(self, list(moving), list(fixed), float(loss), slopes, np.asarray(summaries), frozen)

    def forward(self, naive: bool) -> Any:
        """The forward pass with random draws held; stop_gradient is held too, or (naive) lets its value through."""
        if naive not in self._forwards:
            held = [*([] if naive else self.stops), *self.draws]
            self._forwards[naive] = pruned(self._wrapped, [*self.moving, *self.fixed, *held], self.loss)
        return self._forwards[naive]

    def directions(self, slopes: Any, seed: int, part: tuple[int, int, int] | None) -> tuple[Any, Any, Any]:
        """Random and aligned direction as flat vectors, and the slopes ``[2, T]`` along them."""
        offsets = np.cumsum([0, *self.sizes])
        j, start, stop = part or (0, 0, 0)
        bounds = [offsets[j], offsets[j] + start, offsets[j] + stop, offsets[j + 1]] if part else []
        seeds = to_tensor(_seed(seed), tf.int32)
        return tuple(
            self._run(("directions", bool(part)), self._directions, [slopes, seeds, tf.constant(bounds, tf.int64)])
        )

    def losses(self, point: Point, directions: tuple[Any, Any], coefficients: Any, naive: bool) -> Float64Array:
        """Losses at several moved points, in one call."""
        held = point.frozen[len(self.stops) if naive else 0 :]
        values = [*point.moving, *point.fixed, *held, *directions]
        if ("along", naive) not in self._compiled:
            points = tf.TensorSpec([None, 2, len(self.sizes)], tf.float64)  # any number of them
            self._compiled["along", naive] = compiled(self._along(naive), values, points)
        return np.asarray(self._compiled["along", naive](*values, tf.constant(coefficients, tf.float64)))

    def moved(self, moving: list[Any], sizes: Float64Array, seed: int) -> list[Any]:
        """The moving tensors, each jittered by its size (rms)."""
        values = [*moving, tf.constant(sizes, tf.float64), to_tensor(_seed(seed), tf.int32)]
        return list(self._run(("moved", False), self._moved, values))

    def distances(self, slopes: Any, other: Any, scale: float) -> Float64Array:
        """Per tensor ‖other / scale − slopes‖."""
        values = [slopes, other, tf.constant(scale, tf.float64)]
        return np.asarray(self._run(("distances", False), self._distances, values))

    def split(self, flat: Any) -> list[Any]:
        """A flat vector as one tensor per moving tensor."""
        parts = tf.split(flat, self.sizes) if self.sizes else []
        return [tf.reshape(p, t.shape) for p, t in zip(parts, self.moving, strict=True)]

    def _run(self, key: tuple[str, bool], function: Any, values: list[Any]) -> Any:
        if key not in self._compiled:
            self._compiled[key] = compiled(function, values)
        return self._compiled[key](*values)

    def _directions(self, slopes: Any, seed: Any, bounds: Any) -> tuple[Any, Any, Any]:
        slopes = tf.where(tf.math.is_finite(slopes), slopes, tf.zeros_like(slopes))  # NaN · 0 would reach every tensor
        # Sizes between 0.5 and 1.5 with random signs: unlike normal numbers none is near zero, so every entry is seen.
        random = tf.random.stateless_uniform(tf.shape(slopes), seed, -1.0, 1.0, dtype=tf.float64)
        random += 0.5 * tf.sign(random)
        if bounds.shape[0]:
            places = tf.range(tf.size(slopes, tf.int64))
            begin, start, stop, end = tf.unstack(bounds)
            outside = (places >= begin) & (places < end) & ~((places >= start) & (places < stop))
            random = tf.where(outside, tf.zeros_like(random), random)
        gradients = tf.split(slopes, self.sizes)
        norms = [tf.norm(gradient) for gradient in gradients]
        along = [tf.reduce_sum(part) for part in tf.split(slopes * random, self.sizes)]
        aligned = [tf.math.divide_no_nan(g, n) for g, n in zip(gradients, norms, strict=True)]
        return random, tf.concat(aligned, 0), tf.stack([tf.stack(along), tf.stack(norms)])

    def _along(self, naive: bool) -> Any:
        forward, count = self.forward(naive), len(self.moving)

        def along(*values: Any) -> Any:
            moving, others = values[:count], values[count:-3]
            random, aligned, coefficients = values[-3:]
            owners = _owners(self.sizes)

            def one(rows: Any) -> Any:
                move = tf.gather(rows[0], owners) * random + tf.gather(rows[1], owners) * aligned
                moved = [value + tf.cast(m, value.dtype) for value, m in zip(moving, self.split(move), strict=True)]
                return tf.cast(forward(*moved, *others), tf.float64)

            return tf.map_fn(one, coefficients, parallel_iterations=1, fn_output_signature=tf.float64)

        return along

    def _moved(self, *values: Any) -> Any:
        *moving, sizes, seed = values
        jitter = tf.gather(sizes, _owners(self.sizes)) * tf.random.stateless_normal(
            [sum(self.sizes)], seed, dtype=tf.float64
        )
        return [value + tf.cast(m, value.dtype) for value, m in zip(moving, self.split(jitter), strict=True)]

    def _distances(self, slopes: Any, other: Any, scale: Any) -> Any:
        return tf.stack([tf.norm(part) for part in tf.split(other / scale - slopes, self.sizes)])


def fetches(
    loss: Any, moving: Sequence[Any], gradients: Sequence[Any], stops: Sequence[Any], draws: Sequence[Any]
) -> list[Any]:
    """What a point needs, in the graph: loss, flat gradient, summaries, and everything that is held along lines."""
    known = [tf.zeros_like(t) if g is None else tf.convert_to_tensor(g) for t, g in zip(moving, gradients, strict=True)]
    slopes = _flat(known)
    sizes = [int(t.shape.num_elements()) for t in moving]
    return [loss, slopes, _summaries(_flat(moving), slopes, sizes), *stops, *draws]


def _flat(tensors: Sequence[Any]) -> Any:
    parts = [tf.reshape(tf.cast(t, tf.float64), [-1]) for t in tensors]
    return tf.concat(parts, 0) if parts else tf.zeros([0], tf.float64)


def _summaries(values: Any, slopes: Any, sizes: Sequence[int]) -> Any:
    """Per tensor the rms of its value, the norm of its gradient, and how many entries of that are not finite."""
    if not sizes:
        return tf.zeros([0, 3], tf.float64)
    bad = tf.cast(~tf.math.is_finite(slopes), tf.float64)
    squares = [tf.reduce_sum(part) for part in tf.split(tf.square(values), sizes)]
    roots = tf.sqrt(tf.stack(squares) / np.maximum(sizes, 1))
    norms = tf.stack([tf.norm(part) for part in tf.split(slopes, sizes)])
    return tf.stack([roots, norms, tf.stack([tf.reduce_sum(part) for part in tf.split(bad, sizes)])], axis=1)


def _owners(sizes: Sequence[int]) -> Any:
    """Per entry of a flat vector the index of its tensor. ``tf.repeat`` takes room for all tensors × the largest."""
    starts = np.cumsum(sizes)[:-1]
    starts = starts[starts < sum(sizes)].reshape(-1, 1)  # an empty tensor at the end begins nowhere
    steps = tf.scatter_nd(tf.constant(starts, tf.int64), tf.ones(len(starts), tf.int32), [sum(sizes)])
    return tf.cumsum(steps)


def _seed(seed: int) -> list[int]:
    return [seed & 0x7FFFFFFF, seed >> 31 & 0x7FFFFFFF]
