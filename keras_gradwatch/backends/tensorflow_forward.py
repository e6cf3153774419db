"""A model's forward pass as a TensorFlow graph that gives a few numbers per activation, instead of the activations.

The graph is searched for activation functions, wherever they are called: in a layer that has one, in a layer of their
own, or somewhere inside a custom layer. Each is reduced to one number per unit on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_gradwatch.backends.sites import (
    MARGIN,
    RANGES,
    Readings,
    Recurrence,
    Site,
    declared_kind,
    is_recurrent,
    recurrent_inside,
    sequence_calls,
    site_groups,
    unit_axis,
)
from keras_gradwatch.backends.tensorflow_graph import LayerCall, feeds_behind, pruned, recording, to_tensor

_KINDS = {"Relu": "relu", "Relu6": "relu", "Sigmoid": "sigmoid", "Tanh": "tanh", "Softsign": "softsign"}
_SHAPE_OPS = frozenset({"Identity", "Reshape", "Cast", "Squeeze", "ExpandDims", "Transpose"})


class Forward:
    """The traced forward pass of a batch as a function of ``moving`` (weights, float inputs) and ``fixed`` tensors.

    Args:
        losses: ``losses(moving, fixed) -> (loss, loss with shuffled predictions)``; run once, while tracing.
        moving, fixed: arrays or tensors giving shapes and dtypes.
        weights: number of moving tensors that are weights; the others are float inputs.
        state: number of fixed tensors that are not data.
        any_batch: let the graph take any number of samples.
    """

    def __init__(
        self, losses: Callable[[list[Any], list[Any]], Any], moving: Sequence[Any], fixed: Sequence[Any], *,
        weights: int, state: int, any_batch: bool = True,
    ) -> None:  # fmt: skip
        count, self._moving_count = len(moving), len(moving)
        is_data = [i >= weights for i in range(count)] + [i >= state for i in range(len(fixed))]
        values = [*moving, *fixed]
        self._dtypes = [tf.as_dtype(value.dtype) for value in values]
        signature = [
            tf.TensorSpec(_signature(np.shape(value), any_batch=any_batch and data), dtype)
            for value, data, dtype in zip(values, is_data, self._dtypes, strict=True)
        ]
        calls: list[LayerCall] = []
        found: list[Any] = []

        def traced(*arguments: Any) -> Any:
            with recording(calls):
                found[:] = [tf.convert_to_tensor(v) for v in losses(list(arguments[:count]), list(arguments[count:]))]
            return found[0]

        wrapped = tf.compat.v1.wrap_function(traced, signature)
        graph = wrapped.graph
        feeds = list(graph.inputs)[: len(signature)]
        operations = graph.get_operations()
        reached = feeds_behind(operations, feeds[:count])
        self.sites = list(_sites(calls, operations, reached, weights))
        self.sequences = list(_sequences(calls))
        self._lengths: list[int] = []
        with graph.as_default():
            parts = self._parts(found, feeds[weights:count])
            everything = tf.concat([tf.reshape(tf.cast(part, tf.float64), [-1]) for part in parts], axis=0)
        self._lengths = [int(part.shape.num_elements()) for part in parts]
        self._function = pruned(wrapped, feeds, everything)

    def read(self, moving: Sequence[Any], fixed: Sequence[Any]) -> Readings:
        """One pass at given values. One small array leaves the device."""
        values = [to_tensor(v, d) for v, d in zip((*moving, *fixed), self._dtypes, strict=True)]
        numbers = np.asarray(self._function(*values))
        parts = iter(np.split(numbers, np.cumsum(self._lengths)[:-1]))
        loss, shuffled = (float(next(parts)[0]) for _ in range(2))
        limits, entries, ceilings = [], [], []
        for _ in self.sites:
            limits.append(next(parts))
            entries.append(float(next(parts)[0]))
            ceilings.append(next(parts))
        times = [next(parts) for _ in self.sequences]
        return Readings(limits, entries, ceilings, times, list(parts), loss, shuffled)

    def _parts(self, losses: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        """Every number to read, as tensors of known size."""
        parts = [tf.reshape(loss, [1]) for loss in losses]
        for site in self.sites:
            parts += [
                tf.add_n([_at_limit(tensor, site) for tensor in site.tensors]),
                tf.add_n([tf.size(tensor, out_type=tf.int64) for tensor in site.tensors])[None],
                _ceiling(site),
            ]
        gradients = tf.gradients(losses[0], [s.tensor for s in self.sequences]) if self.sequences else []
        for sequence, gradient in zip(self.sequences, gradients, strict=True):
            steps = int(sequence.tensor.shape[1])
            if gradient is None:
                parts.append(tf.fill([steps], tf.constant(np.nan, tf.float64)))
            else:
                parts.append(tf.sqrt(tf.reduce_sum(tf.square(tf.cast(gradient, tf.float64)), axis=[0, 2])))
        for value in inputs:
            wide = tf.cast(value, tf.float32)
            parts.append(tf.stack([tf.reduce_mean(wide), tf.math.reduce_std(wide), tf.reduce_max(tf.abs(wide))]))
        return parts


def _signature(shape: Sequence[int], *, any_batch: bool) -> list[int | None]:
    return [None, *shape[1:]] if any_batch and len(shape) else list(shape)


def _sites(
    calls: Sequence[LayerCall], operations: Sequence[Any], reach: dict[str, int], weights: int
) -> Iterator[Site]:
    """Every activation function called inside a layer, in network order."""
    owners = _owners(calls, len(operations))
    outputs = _output_names(calls)
    for group in site_groups(_found(calls, operations, owners), calls):
        operation, kind, first = group[0]
        axis = unit_axis(operation, first.shape.rank)
        tensors = tuple(tensor for _, _, tensor in group if tensor.shape.rank == first.shape.rank)
        if first.shape.rank is None or first.shape.rank < 2 or not first.shape[axis]:
            continue
        bits = reach.get(first.op.name, 0)
        upstream = tuple(i for i in range(weights) if bits >> i & 1)
        yield Site(operation, kind, tensors, axis, any(t.name in outputs for t in tensors), upstream)


def _found(
    calls: Sequence[LayerCall], operations: Sequence[Any], owners: Sequence[int]
) -> Iterator[tuple[int, str, Any]]:
    """``(call index, kind, output tensor)`` of every activation function, in the order of the graph."""
    recurrent = recurrent_inside(calls)
    seen: list[tuple[int, int, str, Any]] = []
    for index, call in enumerate(calls):
        kind = declared_kind(call.operation)
        if index in recurrent and not is_recurrent(call.operation):
            continue
        if kind in RANGES and call.outputs and call.outputs[0].dtype.is_floating:
            seen.append((call.last_op, index, str(kind), call.outputs[0]))
    for position, op in enumerate(operations):
        index = owners[position]
        if index < 0 or index in recurrent or declared_kind(calls[index].operation) is not None:
            continue
        kind = _KINDS.get(op.type) or ("relu" if _is_written_relu(op) else None)
        if kind and (kind == "relu" or not _is_part_of_another(op)):
            seen.append((position, index, kind, op.outputs[0]))
    for _, index, kind, tensor in sorted(seen, key=lambda entry: entry[0]):
        yield index, kind, tensor


def _sequences(calls: Sequence[LayerCall]) -> Iterator[Recurrence]:
    """What enters the outermost recurrent layers, if it is a sequence of known length."""
    for call in sequence_calls(calls):
        tensor = call.inputs[0]
        if tensor.shape.rank == 3 and tensor.shape[1]:
            yield Recurrence(call.operation, tensor, getattr(tensor, "_keras_mask", None) is not None)


def _owners(calls: Sequence[LayerCall], count: int) -> list[int]:
    """Per operation of the graph the innermost call that made it, −1 for none."""
    owners = [-1] * count
    for index, call in enumerate(calls):  # inner calls come after outer ones
        last = min(call.last_op, count)
        owners[call.first_op : last] = [index] * (last - call.first_op)
    return owners


def _output_names(calls: Sequence[LayerCall]) -> set[str]:
    """Names of the model's outputs, and of what they are but for their shape."""
    roots = [call for call in calls if call.parent == -1]
    names: set[str] = set()
    waiting = list(roots[-1].outputs) if roots else []
    while waiting:
        tensor = waiting.pop()
        names.add(tensor.name)
        if tensor.op.type in _SHAPE_OPS:
            waiting.append(tensor.op.inputs[0])
    return names


def _is_written_relu(op: Any) -> bool:
    """Whether it is ``maximum(x, 0)``."""
    if op.type != "Maximum":
        return False
    for value in op.inputs:
        constant = tf.get_static_value(value)
        if constant is not None and np.size(constant) == 1 and float(constant) == 0.0:
            return True
    return False


def _is_part_of_another(op: Any) -> bool:
    """A gate (``sigmoid(x) * y``, silu) or the tanh of an approximate gelu."""
    return any(
        consumer.type in ("Mul", "MulNoNan") or (consumer.type in ("AddV2", "Add") and _adds_one(consumer))
        for consumer in op.outputs[0].consumers()
    )


def _adds_one(op: Any) -> bool:
    constants = [tf.get_static_value(value) for value in op.inputs]
    return any(c is not None and np.size(c) == 1 and float(c) == 1.0 for c in constants)


def _at_limit(tensor: Any, site: Site) -> Any:
    """Per unit the number of entries at a limit of the range."""
    low, high = RANGES[site.kind]
    if site.kind == "relu":
        hits = tf.equal(tensor, 0)
    else:
        margin = MARGIN * (high - low)
        hits = (tensor < low + margin) | (tensor > high - margin)
    return tf.reduce_sum(tf.cast(hits, tf.float32), axis=_other_axes(tensor, site.axis))


def _ceiling(site: Site) -> Any:
    """Per unit the largest value that enters a relu; NaN where the graph does not show what enters."""
    units = int(site.tensors[0].shape[site.axis])
    entering = [t.op.inputs[0] for t in site.tensors if t.op.type in ("Relu", "Relu6", "Maximum")]
    entering = [t for t in entering if t.shape.rank == site.tensors[0].shape.rank]
    if site.kind != "relu" or len(entering) < len(site.tensors):
        return tf.fill([units], tf.constant(np.nan, tf.float32))
    peaks = [tf.reduce_max(tf.cast(t, tf.float32), axis=_other_axes(t, site.axis)) for t in entering]
    return tf.reduce_max(tf.stack(peaks), axis=0)


def _other_axes(tensor: Any, axis: int) -> list[int]:
    rank = tensor.shape.rank
    return [i for i in range(rank) if i != axis % rank]
