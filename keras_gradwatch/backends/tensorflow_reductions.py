"""Reduces gradients and weights to a few numbers each, inside a TensorFlow graph, with as few operations as possible.

A training step of a small model is a race against the launch of its operations, and these come on top: nine per weight.
Measured in ``benchmarks/RESULTS.md``: concatenating small weights first, a compiled (XLA) reduction, or ``tf.cond`` in
place of :func:`_choose` were all slower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

#: A sparse gradient of a variable up to this many elements is summed into a dense tensor: cheaper than sorting rows.
_DENSE_LIMIT = 1 << 20

#: The square of a float32 in this range neither overflows in a sum of 1e8 such, nor loses its digits to underflow.
_SMALLEST, _LARGEST = 1e-15, 1e15


def dense_or_compact(gradient: Any, variable: Any) -> Any:
    """A dense tensor with the same norm, maximum and number of non-zero elements as the gradient.

    The rows of a sparse gradient are summed where they repeat, as the optimizer will do. For a large variable the rows
    it does not mention stay unmentioned: sorted and summed, they take no more room than the gradient itself.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        # A custom gradient of another shape, which the optimizer broadcasts; the common case costs nothing.
        same = gradient.shape == tf.TensorShape(variable.shape)
        return gradient if same else tf.broadcast_to(gradient, variable.shape)
    if variable.shape[0] * gradient.values.shape[1:].num_elements() <= _DENSE_LIMIT:
        return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, variable.shape[0])
    order = tf.argsort(gradient.indices)
    rows = tf.gather(gradient.indices, order)
    is_new = tf.not_equal(rows, tf.concat([rows[:1], rows[:-1]], axis=0))
    segments = tf.cumsum(tf.cast(is_new, tf.int32))
    return tf.math.unsorted_segment_sum(tf.gather(gradient.values, order), segments, tf.shape(rows)[0])


def gradient_reductions(gradients: Sequence[Any]) -> Any:
    """Square sum, largest magnitude, non-zero and non-finite count of each gradient.

    Args:
        gradients: dense floating tensors, none of them empty.

    Returns:
        Float64 tensor of shape ``[4 * len(gradients)]``, the four reductions one after the other. Counts beyond 2**24
        are rounded to float32.
    """
    gradients = _in_one_dtype(gradients)
    half_squares = tf.stack([tf.nn.l2_loss(gradient) for gradient in gradients])
    largest = tf.stack([tf.reduce_max(tf.abs(gradient)) for gradient in gradients])
    half_nonzero = tf.stack([tf.nn.l2_loss(tf.sign(gradient)) for gradient in gradients])
    ordinary = tf.reduce_all(
        ((largest > _SMALLEST) | tf.equal(largest, 0.0)) & (half_squares < _LARGEST**2)  # False for a NaN
    )
    quick = tf.cast(tf.concat([2.0 * half_squares, 2.0 * half_nonzero, tf.zeros_like(largest)], axis=0), tf.float64)
    sums, nonzero, nonfinite = tf.split(_choose(ordinary, quick, _careful_reductions, gradients), 3)
    return tf.concat([sums, tf.cast(largest, tf.float64), nonzero, nonfinite], axis=0)


def weight_reductions(before: Sequence[Any], after: Sequence[Any]) -> Any:
    """Square sum of each weight and of its update: float64 tensor of shape ``[2 * V]``, all weights first."""
    if not before:
        return tf.zeros((0,), tf.float64)
    before, after = _in_one_dtype(before), _in_one_dtype(after)
    weights = [tf.nn.l2_loss(old) for old in before]
    updates = [tf.nn.l2_loss(new - old) for old, new in zip(before, after, strict=True)]
    return 2.0 * tf.cast(tf.stack(weights + updates), tf.float64)


def _careful_reductions(gradients: Sequence[Any]) -> Any:
    """Square sum, non-zero and non-finite count for any values: ‖g‖² = m²‖g/m‖² with m = max|g|."""
    sums = []
    for gradient in gradients:
        largest = tf.reduce_max(tf.abs(gradient))
        scale = tf.where((largest > 0.0) & tf.math.is_finite(largest), largest, tf.ones_like(largest))
        half_square = tf.cast(tf.nn.l2_loss(gradient / scale), tf.float64)
        sums.append(2.0 * half_square * tf.square(tf.cast(scale, tf.float64)))
    nonzero = [_count(tf.not_equal(gradient, 0.0)) for gradient in gradients]
    nonfinite = [_count(~tf.math.is_finite(gradient)) for gradient in gradients]
    return tf.stack(sums + nonzero + nonfinite)


def _count(condition: Any) -> Any:
    return tf.cast(tf.reduce_sum(tf.cast(condition, tf.float32)), tf.float64)


def _choose(ordinary: Any, quick: Any, careful: Callable[[Sequence[Any]], Any], gradients: Sequence[Any]) -> Any:
    """``quick`` if ``ordinary``, else ``careful(gradients)``.

    ``tf.cond`` would be lowered to a switch per gradient and walk the branch not taken every step: 3–5 % of a step of
    a small model. The plain ``If`` operation calls one of two functions.
    """
    if tf.executing_eagerly():
        return quick if ordinary else careful(gradients)

    def take_quick(quick: Any, *gradients: Any) -> Any:
        return quick

    def take_care(quick: Any, *gradients: Any) -> Any:
        return careful(gradients)

    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in (quick, *gradients)]
    branches = [tf.function(take, autograph=False).get_concrete_function(*specs) for take in (take_quick, take_care)]
    return tf.raw_ops.StatelessIf(
        cond=ordinary, input=[quick, *gradients], Tout=[quick.dtype], then_branch=branches[0], else_branch=branches[1],
        output_shapes=[quick.shape],
    )[0]  # fmt: skip


def _in_one_dtype(tensors: Sequence[Any]) -> list[Any]:
    """float64 if any is, else float32: the squares of a float16 overflow."""
    wide = any(tensor.dtype == tf.float64 for tensor in tensors)
    return [tf.cast(tensor, tf.float64 if wide else tf.float32) for tensor in tensors]
