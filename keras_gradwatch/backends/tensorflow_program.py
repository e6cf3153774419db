"""A loss as a traced TensorFlow graph: its value, its gradients, its values along lines, and its layers each alone.

One trace gives everything. The graph holds forward and backward pass; *pruning* it (a feed for any tensor, a fetch of
any other) gives the forward pass alone, the forward pass with every ``stop_gradient`` and random draw frozen at its
base value, and all layers at once, each cut off from the others.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from keras_gradwatch.backends.points import Line, Point
from keras_gradwatch.backends.tensorflow_graph import (
    LayerCall,
    called_flat,
    carries_floats,
    compiled,
    falls,
    feeds_behind,
    inside,
    is_draw,
    is_stop,
    leaves_floats,
    pruned,
    recording,
    to_tensor,
    upstream,
)
from keras_gradwatch.backends.tensorflow_point import Traced, fetches
from keras_gradwatch.records import Float64Array

__all__ = ["LayerCall", "Line", "Parts", "Point", "Program", "Traced", "in_float32", "location_of"]

#: Operations with float outputs and no gradient. ``Sign`` has one: zero.
_CUTTING_OPS = frozenset({"StopGradient", "Round", "Floor", "Ceil", "Rint", "ArgMax", "ArgMin", "OneHot"})
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
#: Index of what lies outside of all layers: the loss.
OUTSIDE = -1


@dataclass(frozen=True)
class Parts:
    """All layers at once, each cut off from the others: Σ scale · ⟨random cotangent, output⟩ over all their outputs.

    Attributes:
        traced: that sum as a function of the borders between layers, then of the weights.
        borders: tensors that enter a layer's own operations, fed one by one.
        owners: per border the index of the call it enters (:data:`OUTSIDE`: the loss).
        labels: per border what it is to that call, where that needs saying.
        weights: indices of the moving tensors among ``traced.moving``, after the borders.
        makers: per output the index of the call that makes it; the first output is the loss itself.
        norms: norm of each output at the base point, a tensor.
    """

    traced: Traced
    borders: list[Any]
    owners: list[int]
    labels: list[str]
    weights: list[int]
    makers: list[int]
    norms: Any

    def point(self, borders: Sequence[Any], scales: Float64Array, moving: Sequence[Any], fixed: Sequence[Any]) -> Point:
        """The sum at a point, for given scales of the outputs."""
        return self.traced.point([*borders, *moving], [tf.constant(scales, tf.float64), *fixed])


@dataclass(frozen=True)
class _Seen:
    """What one trace found: the loss, its gradients, what is held along lines, and the layers called."""

    loss: Any
    gradients: list[Any]
    stops: list[Any]
    draws: list[Any]
    calls: list[LayerCall]


class Program:
    """The traced loss of one batch as a function of ``moving`` (weights, float inputs) and ``fixed`` tensors.

    Args:
        loss: ``loss(moving, fixed) -> scalar tensor``; run while tracing.
        moving, fixed: arrays or tensors giving shapes and dtypes (and nothing else).
        dtype: float dtype of the moving tensors, ``None`` to keep their own.
        surroundings: opened while the code runs, which here is while it is traced.
    """

    def __init__(
        self, loss: Callable[[list[Any], list[Any]], Any], moving: Sequence[Any], fixed: Sequence[Any],
        dtype: str | None, surroundings: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:  # fmt: skip
        values = [*moving, *fixed]
        self._count = len(moving)
        self._dtypes = [_float_dtype(value, dtype) for value in values]
        self._signature = [tf.TensorSpec(np.shape(v), d) for v, d in zip(values, self._dtypes, strict=True)]
        self._casts: dict[tuple[Any, ...], Any] = {}
        with surroundings():
            self._wrapped, self._seen = self._trace(loss)
            if any(op.type in _CALLS and any(is_stop(o) or is_draw(o) for o in inside(op)) for op in self._all()):
                self._trace_inline(loss)
        seen = self._seen
        self.calls, self._loss, self._stops, self._draws = seen.calls, seen.loss, seen.stops, seen.draws
        self._feeds = list(self._wrapped.graph.inputs)[: len(values)]
        self._moving, self._fixed = self._feeds[: self._count], self._feeds[self._count :]
        self._operations = self._all()
        self._places = {op.name: i for i, op in enumerate(self._operations)}
        self._reach = feeds_behind(self._operations, self._moving)
        self._upstream = upstream(self._loss.op)
        self._float_upstream = upstream(self._loss.op, floats_only=True)
        self.main = Traced(
            self._wrapped, self._moving, self._fixed, self._loss, seen.gradients, self._stops, self._draws,
            full=called_flat(self._wrapped),
        )  # fmt: skip

    def _trace(self, loss: Callable[[list[Any], list[Any]], Any]) -> tuple[Any, _Seen]:
        made: list[_Seen] = []

        def traced(*arguments: Any) -> Any:
            calls: list[LayerCall] = []
            moving, fixed = list(arguments[: self._count]), list(arguments[self._count :])
            with recording(calls, taps=True):
                value = tf.convert_to_tensor(loss(moving, fixed))
            if value.shape.rank != 0:
                raise ValueError(f"the loss has shape {tuple(value.shape)}; a scalar was expected")
            stops, draws = _held(moving, value)
            gradients = tf.gradients(value, moving)
            made.append(_Seen(value, gradients, stops, draws, calls))
            return fetches(value, moving, gradients, stops, draws)

        wrapped = tf.compat.v1.wrap_function(traced, self._signature)
        return wrapped, made[-1]

    def _cast(self, *values: Any) -> list[Any]:
        return [to_tensor(v, d) for v, d in zip(values, self._dtypes, strict=True)]

    def _trace_inline(self, loss: Callable[[list[Any], list[Any]], Any]) -> None:
        """Trace again with nested ``tf.function`` inlined, so that what they hide can be seen and held."""
        eagerly = tf.config.functions_run_eagerly()
        tf.config.run_functions_eagerly(True)
        try:
            self._wrapped, self._seen = self._trace(loss)
        except Exception:  # noqa: BLE001  some code needs to be a function (autograph): the first trace serves then
            return
        finally:
            tf.config.run_functions_eagerly(eagerly)

    def _all(self) -> list[Any]:
        found: list[Any] = self._wrapped.graph.get_operations()
        return found

    @property
    def connected(self) -> tuple[bool, ...]:
        """Per moving tensor: False where the gradient is None."""
        return self.main.connected

    @property
    def reached(self) -> tuple[bool, ...]:
        """Per moving tensor: does the loss *value* depend on it, gradient or not?"""
        return tuple(self._depends(self._loss, i) for i in range(self._count))

    @functools.cached_property
    def declares(self) -> bool:
        """True when a ``stop_gradient`` that may matter lies between a moving tensor and the loss."""
        return any(is_stop(stop.op) for stop in self._stops)

    @functools.cached_property
    def draws(self) -> bool:
        """True when random numbers are drawn past Keras' seeds: another trace draws others."""
        return bool(self._draws) or any(is_draw(o) for op in self._operations for o in inside(op))

    def feed(self, moving: Sequence[Any], fixed: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Cast values to what the graph expects."""
        values = [tf.convert_to_tensor(value) for value in (*moving, *fixed)]
        dtypes = tuple(value.dtype for value in values)
        if dtypes not in self._casts:
            self._casts[dtypes] = compiled(self._cast, values)  # one by one, casts cost as much as a small model
        values = list(self._casts[dtypes](*values)) if values else []
        return values[: self._count], values[self._count :]

    @functools.cached_property
    def leaks(self) -> list[str]:
        """Per moving tensor: the operation through which it falls below float64 on its way to the loss, or ''."""
        found = [""] * self._count
        for op in self._operations:
            if op.name not in self._float_upstream or not falls(op):
                continue
            lost = [value for value in op.inputs if value.dtype == tf.float64]
            for i in range(self._count):
                if not found[i] and any(self._depends(value, i) for value in lost):
                    call = self._call_of(op)
                    found[i] = f"{op.type} ({op.name})" + (f" in layer {call.operation.name}" if call else "")
        return found

    @functools.cached_property
    def hidden_stops(self) -> list[bool]:
        """Per moving tensor: does it pass a loop or branch with a stop_gradient in it, which cannot be held?"""
        hiding = [
            op for op in self._operations if op.name in self._float_upstream and any(is_stop(o) for o in inside(op))
        ]
        return [any(self._reach.get(op.name, 0) >> i & 1 for op in hiding) for i in range(self._count)]

    def stop_call(self, index: int) -> LayerCall | None:
        """The call that holds the first stop_gradient a moving tensor meets."""
        return next((self._call_of(s.op) for s in self._stops if self._depends(s, index) and is_stop(s.op)), None)

    def cut(self, index: int) -> tuple[LayerCall | None, str]:
        """Where the gradient of a moving tensor stops: ``(layer call or None, operation type)``; type '' if nowhere."""
        passed = {self._moving[index].op.name}
        cuts = []
        for op in self._operations:
            if not any(carries_floats(value) and value.op.name in passed for value in op.inputs):
                continue
            if op.type in _CUTTING_OPS or leaves_floats(op, lambda value: value.op.name in passed):
                cuts.append(op)
            else:
                passed.add(op.name)
        cuts = [op for op in cuts if op.name in self._upstream]
        cuts = [op for op in cuts if op.type in _CUTTING_OPS] or cuts
        return (self._call_of(cuts[0]), cuts[0].type) if cuts else (None, "")

    def values(self, tensors: Sequence[Any], moving: Sequence[Any], fixed: Sequence[Any]) -> list[Any]:
        """Values of any tensors of the graph at a point."""
        return list(pruned(self._wrapped, self._feeds, list(tensors))(*moving, *fixed)) if tensors else []

    @functools.cached_property
    def parts(self) -> Parts | None:
        """Every layer and the loss, each between its own inputs and outputs; None for a graph without layers."""
        calls = [OUTSIDE, *(k for k, call in enumerate(self.calls) if self._matters(call))]
        borders, owners, labels = [], [], []
        for k in calls:
            for border, label in self._entries(k):
                borders.append(border)
                owners.append(k)
                labels.append(label)
        fed = {id(border) for border in borders}
        outputs = [(OUTSIDE, self._loss)]
        outputs += [(k, t) for k in calls for t in self._exits(k) if id(t) not in fed and t is not self._loss]
        if not borders:
            return None
        with self._wrapped.graph.as_default():
            scales = tf.compat.v1.placeholder(tf.float64, [len(outputs)])
            dots = [tf.cast(self._loss, tf.float64)]
            dots += [_random_dot(t, n) for n, (_, t) in enumerate(outputs[1:])]
            total = tf.tensordot(scales, tf.stack(dots), 1)
            gradients = tf.gradients(total, [*borders, *self._moving], stop_gradients=borders)
            norms = tf.stack([tf.norm(tf.cast(t, tf.float64)) for _, t in outputs])
        traced = Traced(
            self._wrapped, [*borders, *self._moving], [scales, *self._fixed], total, gradients, self._stops, self._draws
        )
        return Parts(traced, borders, owners, labels, list(range(self._count)), [k for k, _ in outputs], norms)

    def consumers(self, index: int) -> list[int]:
        """The innermost calls that read a moving tensor directly."""
        found = {self._call_index(op) for op in self._moving[index].consumers() if op.name in self._upstream}
        return sorted(found)

    def finite(self, moving: Sequence[Any], fixed: Sequence[Any]) -> list[tuple[int, tuple[bool, bool, bool, bool]]]:
        """Per call (the loss last): are its inputs, outputs, output gradients and input gradients finite?"""
        indices = [*(k for k, call in enumerate(self.calls) if self._matters(call)), OUTSIDE]
        groups: list[list[Any]] = []
        with self._wrapped.graph.as_default():
            crossings = [tap for call in self.calls for tap in (*call.inputs, *call.outputs)]
            wanted = [*crossings, *self._moving]
            slopes = {id(t): g for t, g in zip(wanted, tf.gradients(self._loss, wanted), strict=True)}
            for k in indices:
                entries = [border for border, _ in self._entries(k)]
                weights = [self._moving[i] for i in range(self._count) if self.consumers(i) == [k]]
                backward = [slopes[id(t)] for t in self._beyond(k)]
                inner = [slopes[id(t)] for t in (*entries, *weights)]
                groups += [entries, self._exits(k), backward, inner]
            flags = [_all_finite(group) for group in groups]
        found = [bool(v) for v in self.values(flags, moving, fixed)]
        return [(k, tuple(found[4 * n : 4 * n + 4])) for n, k in enumerate(indices)]  # type: ignore[misc]

    def compiled_summaries(self, moving: Sequence[Any], fixed: Sequence[Any]) -> Float64Array | None:
        """What ``Point.summaries`` holds, with XLA compiling the step; None where it cannot."""
        run = tf.function(lambda *values: self.main.full(*values)[2], jit_compile=True, autograph=False)
        try:
            return np.asarray(run.get_concrete_function(*moving, *fixed)(*moving, *fixed), np.float64)
        except (tf.errors.OpError, ValueError, TypeError, NotImplementedError):
            return None

    def uses(self, k: int) -> bool:
        """Does the loss depend on what a call returns?"""
        return self._matters(self.calls[k])

    def _matters(self, call: LayerCall) -> bool:
        return any(t.op.name in self._upstream for t in call.results)

    def _children(self, parent: int) -> list[LayerCall]:
        return [call for call in self.calls if call.parent == parent and self._matters(call)]

    def _entries(self, k: int) -> list[tuple[Any, str]]:
        """What enters a call's own operations: its inputs, and what the layers within it return."""
        own = self.calls[k].inputs if k != OUTSIDE else ()
        found = [(tap, "" if len(own) == 1 else f"its input {n} of 0…{len(own) - 1}") for n, tap in enumerate(own)]
        for child in self._children(k):
            found += [(t, f"the output of {child.operation.name}" if k != OUTSIDE else "") for t in child.outputs]
        return found

    def _exits(self, k: int) -> list[Any]:
        """What a call's own operations make: its results, and what it hands to the layers within it."""
        found = [self._loss] if k == OUTSIDE else list(self.calls[k].results)
        return found + [source for child in self._children(k) for source in child.sources]

    def _beyond(self, k: int) -> list[Any]:
        """The copies of a call's exits that are seen from the other side, where their gradients are told apart."""
        found = [] if k == OUTSIDE else list(self.calls[k].outputs)
        return found + [tap for child in self._children(k) for tap in child.inputs]

    def _depends(self, value: Any, index: int) -> bool:
        return bool(self._reach.get(value.op.name, 0) >> index & 1)

    def _call_index(self, op: Any) -> int:
        """Index of the innermost recorded call that made an operation."""
        place = self._places.get(op.name, -1)
        around = [k for k, call in enumerate(self.calls) if call.first_op <= place < call.last_op]
        return min(around, key=lambda k: self.calls[k].last_op - self.calls[k].first_op) if around else OUTSIDE

    def _call_of(self, op: Any) -> LayerCall | None:
        index = self._call_index(op)
        return None if index == OUTSIDE else self.calls[index]


def in_float32() -> AbstractContextManager[None]:
    """Random functions draw inside as they do in training: nothing needs to be done for it here."""
    return nullcontext()


def location_of(error: BaseException) -> str:
    """File and line of the innermost frame of an error that lies outside Keras, TensorFlow and this package."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not any(f"/{name}/" in frame.filename for name in ("keras", "tensorflow", "keras_gradwatch")):
            return f"{frame.filename}:{frame.lineno}"
    return ""


def _held(moving: Sequence[Any], loss: Any) -> tuple[list[Any], list[Any]]:
    """Outputs of the stop_gradients that moving tensors pass on their way to the loss, and of the random draws."""
    needed = upstream(loss.op)
    operations = loss.graph.get_operations()
    behind = feeds_behind(operations, moving)
    operations = [op for op in operations if op.name in needed]
    stops = [op.outputs[0] for op in operations if op.type == "StopGradient" and behind.get(op.name, 0)]
    draws = [output for op in operations if is_draw(op) for output in op.outputs if output.dtype != tf.resource]
    return stops, draws


def _random_dot(tensor: Any, seed: int) -> Any:
    cotangent = tf.random.stateless_normal(tf.shape(tensor), [17, seed], dtype=tf.float64)
    return tf.reduce_sum(tf.cast(tensor, tf.float64) * cotangent)


def _all_finite(tensors: Sequence[Any]) -> Any:
    known = [tf.reduce_all(tf.math.is_finite(tf.convert_to_tensor(t))) for t in tensors if t is not None]
    return tf.reduce_all(tf.stack(known)) if known else tf.constant(True)


def _float_dtype(value: Any, dtype: str | None) -> Any:
    own = tf.as_dtype(value.dtype)
    return tf.as_dtype(dtype) if dtype and own.is_floating else own
