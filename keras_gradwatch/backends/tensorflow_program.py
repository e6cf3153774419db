"""A loss as a traced TensorFlow graph: its value, its gradients, its values along lines, and its layers one by one.

One trace gives everything. The graph holds forward and backward pass; *pruning* it (a feed for any tensor, a fetch of
any other) gives the forward pass alone, the forward pass with every ``stop_gradient`` and random draw frozen at its
base value, and each layer alone between its own inputs and outputs.
"""

from __future__ import annotations

import functools
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from keras_gradwatch.records import Float64Array

_LOW_FLOATS = (tf.float32, tf.float16, tf.bfloat16)
_CUTTING_OPS = frozenset({"StopGradient", "Round", "Floor", "Ceil", "Rint", "Sign", "ArgMax", "ArgMin", "OneHot"})
_HARMLESS_STOPS = ("moments/StopGradient",)  # tf.nn.moments stops the mean, whose derivative there is zero


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer (or functional operation) seen while tracing, at the top level of the graph."""

    operation: Any
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    first_op: int
    last_op: int
    parent: int


class Program:
    """The traced loss of one batch as a function of ``moving`` (weights, float inputs) and ``fixed`` tensors.

    Args:
        loss: ``loss(moving, fixed) -> scalar tensor``; run once, while tracing.
        moving, fixed: arrays or tensors giving shapes and dtypes (and nothing else).
        dtype: float dtype of the moving tensors, ``None`` to keep their own.
    """

    def __init__(
        self, loss: Callable[[list[Any], list[Any]], Any], moving: Sequence[Any], fixed: Sequence[Any], dtype: str | None
    ) -> None:
        self._dtypes = [_float_dtype(value, dtype) for value in (*moving, *fixed)]
        self._moving_count = len(moving)
        signature = [tf.TensorSpec(np.shape(v), d) for v, d in zip((*moving, *fixed), self._dtypes, strict=True)]
        self.calls: list[LayerCall] = []

        def traced(*arguments: Any) -> Any:
            with _recording(self.calls):
                value = loss(list(arguments[: len(moving)]), list(arguments[len(moving) :]))
            self._loss = tf.convert_to_tensor(value)
            if self._loss.shape.rank != 0:
                raise ValueError(f"the loss has shape {tuple(self._loss.shape)}; a scalar was expected")
            return self._loss

        self._wrapped = tf.compat.v1.wrap_function(traced, signature)
        graph = self._wrapped.graph
        self._feeds = list(graph.inputs)[: len(signature)]
        self._operations = graph.get_operations()
        self._reach = _reach(self._operations, self._feeds[: self._moving_count])
        self._upstream = _upstream(self._loss.op)
        self._float_upstream = _upstream(self._loss.op, floats_only=True)
        self._stops = [
            op.outputs[0]
            for op in self._operations
            if op.type == "StopGradient" and self._reach.get(op.name, 0) and op.name in self._upstream
        ]
        self._draws = [
            output
            for op in self._operations
            if op.op_def.is_stateful and _is_random(op.type) and op.name in self._upstream
            for output in op.outputs
        ]
        with graph.as_default():
            gradients = tf.gradients(self._loss, self._feeds[: self._moving_count])
        self.main = Traced(
            self._wrapped, self._feeds[: self._moving_count], self._feeds[self._moving_count :],
            self._loss, gradients, self._stops, self._draws,
        )  # fmt: skip

    @property
    def connected(self) -> tuple[bool, ...]:
        """Per moving tensor: False where the gradient is None."""
        return tuple(gradient is not None for gradient in self.main.gradients)

    @property
    def reached(self) -> tuple[bool, ...]:
        """Per moving tensor: does the loss *value* depend on it, gradient or not?"""
        bits = self._reach.get(self._loss.op.name, 0)
        return tuple(bool(bits >> i & 1) for i in range(self._moving_count))

    @property
    def declares(self) -> bool:
        """True when a ``stop_gradient`` that may matter lies between a moving tensor and the loss."""
        return any(not stop.op.name.endswith(_HARMLESS_STOPS) for stop in self._stops)

    def feed(self, moving: Sequence[Any], fixed: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Cast values to what the graph expects."""
        values = [_to_tensor(v, d) for v, d in zip((*moving, *fixed), self._dtypes, strict=True)]
        return values[: self._moving_count], values[self._moving_count :]

    @functools.cached_property
    def leaks(self) -> list[str]:
        """Per moving tensor: the operation through which it falls below float64 on its way to the loss, or ''."""
        found = [""] * self._moving_count
        for op in self._operations:
            if op.name not in self._float_upstream or not _falls(op):
                continue
            bits = 0
            for value in op.inputs:
                if value.dtype == tf.float64:
                    bits |= self._reach.get(value.op.name, 0)
            for i in range(self._moving_count):
                if bits >> i & 1 and not found[i]:
                    layer = self._layer_of(op)
                    found[i] = f"{op.type} ({op.name})" + (f" in layer {layer}" if layer else "")
        return found

    def hidden_stops(self) -> bool:
        """True when a loop or nested function contains a stop_gradient, which pruning cannot freeze."""
        library = self._wrapped.graph.as_graph_def().library.function
        return any(
            node.op == "StopGradient" and "custom_gradient" not in node.name
            for function in library
            for node in function.node_def
        )

    def moving_above(self, index: int) -> set[int]:
        """Moving tensors that the outputs of a call depend on."""
        bits = 0
        for output in self.calls[index].outputs:
            bits |= self._reach.get(output.op.name, 0)
        return {i for i in range(self._moving_count) if bits >> i & 1}

    def stop_call(self, index: int) -> LayerCall | None:
        """The call that holds the first stop_gradient a moving tensor meets."""
        for stop in self._stops:
            if self._reach.get(stop.op.name, 0) >> index & 1 and not stop.op.name.endswith(_HARMLESS_STOPS):
                return self._call_of(stop.op)
        return None

    def cut(self, index: int) -> tuple[Any, str]:
        """Where the gradient of a moving tensor stops: ``(layer call or None, operation type)``; type '' if nowhere."""
        bit = 1 << index
        for op in self._operations:
            if not self._reach.get(op.name, 0) & bit or op.name not in self._upstream:
                continue
            if op.type in _CUTTING_OPS or _leaves_floats(op, self._reach, bit):
                return self._call_of(op), op.type
        return None, ""

    def children(self, parent: int) -> list[int]:
        """Indices of the calls made directly inside a call (−1: at the top)."""
        return [i for i, call in enumerate(self.calls) if call.parent == parent]

    def layer(self, index: int, seed: int) -> Traced | None:
        """One layer call alone: random cotangent · outputs as a function of its float inputs and own weights."""
        call = self.calls[index]
        outputs = [t for t in call.outputs if t.dtype.is_floating]
        weights = self._weights_inside(call)
        moving = [*call.inputs, *(self._feeds[i] for i in weights)]
        if not outputs or not moving:
            return None
        generator = np.random.default_rng(seed)
        with self._wrapped.graph.as_default():
            parts = [
                tf.reduce_sum(tf.cast(t, tf.float64) * generator.standard_normal([int(d) for d in t.shape]))
                if t.shape.is_fully_defined()
                else tf.reduce_sum(tf.cast(t, tf.float64) * tf.random.stateless_normal(tf.shape(t), [seed, k], dtype=tf.float64))
                for k, t in enumerate(outputs)
            ]
            dot = tf.add_n(parts)
            gradients = tf.gradients(dot, moving, stop_gradients=list(call.inputs))
        inside = range(call.first_op, call.last_op)
        names = {self._operations[i].name for i in inside if i < len(self._operations)}
        return Traced(
            self._wrapped, moving, [f for f in self._feeds if not any(f is m for m in moving)], dot, gradients,
            [t for t in self._stops if t.op.name in names], [t for t in self._draws if t.op.name in names],
            weights=weights, inputs=len(call.inputs),
        )  # fmt: skip

    def loss_alone(self) -> Traced | None:
        """The loss as a function of the model's outputs only."""
        roots = [c for c in self.calls if c.parent == -1]
        if not roots:
            return None
        outputs = [t for t in roots[-1].outputs if t.dtype.is_floating]
        if not outputs:
            return None
        with self._wrapped.graph.as_default():
            gradients = tf.gradients(self._loss, outputs)
        return Traced(self._wrapped, outputs, self._feeds, self._loss, gradients, [], [], inputs=len(outputs))

    def values(self, tensors: Sequence[Any], moving: Sequence[Any], fixed: Sequence[Any]) -> list[Any]:
        """Values of any tensors of the graph at a point."""
        if not tensors:
            return []
        function = _pruned(self._wrapped, self._feeds, list(tensors))
        return list(function(*moving, *fixed))

    def finite(self, moving: Sequence[Any], fixed: Sequence[Any]) -> list[tuple[bool, bool, bool, bool]]:
        """Per layer call: are its inputs, outputs, output gradients and input gradients finite?"""
        groups: list[list[Any]] = []
        with self._wrapped.graph.as_default():
            for call in self.calls:
                inputs, outputs = list(call.inputs), [t for t in call.outputs if t.dtype.is_floating]
                weights = [self._feeds[i] for i in self._weights_inside(call)]
                backward = tf.gradients(self._loss, outputs) if outputs else []
                inner = (
                    tf.gradients(outputs, [*inputs, *weights], grad_ys=[
                        tf.zeros_like(o) if g is None else g for o, g in zip(outputs, backward, strict=True)
                    ], stop_gradients=inputs)
                    if outputs and (inputs or weights)
                    else []
                )  # fmt: skip
                for group in (inputs, outputs, backward, inner):
                    groups.append([tf.reduce_all(tf.math.is_finite(tf.convert_to_tensor(t))) for t in group if t is not None])
            flags = [tf.reduce_all(tf.stack(group)) if group else tf.constant(True) for group in groups]
        values = [bool(v) for v in self.values(flags, moving, fixed)]
        return [tuple(values[i : i + 4]) for i in range(0, len(values), 4)]  # type: ignore[misc]

    def _weights_inside(self, call: LayerCall) -> list[int]:
        """Moving tensors that enter a call directly: read by an operation inside it without passing its inputs."""
        names = {self._operations[i].name for i in range(call.first_op, min(call.last_op, len(self._operations)))}
        found = []
        for i, feed in enumerate(self._feeds[: self._moving_count]):
            if any(feed is t for t in call.inputs):
                continue
            if any(consumer.name in names for consumer in feed.consumers()):
                found.append(i)
        return found

    def _call_of(self, op: Any) -> LayerCall | None:
        """The innermost recorded call that made an operation."""
        position = next((i for i, other in enumerate(self._operations) if other is op), -1)
        inside = [c for c in self.calls if c.first_op <= position < c.last_op]
        return min(inside, key=lambda c: c.last_op - c.first_op) if inside else None

    def _layer_of(self, op: Any) -> str:
        call = self._call_of(op)
        return call.operation.name if call is not None else ""


class Traced:
    """A scalar in a graph as a function of some of its tensors."""

    def __init__(
        self, wrapped: Any, moving: Sequence[Any], fixed: Sequence[Any], loss: Any, gradients: Sequence[Any],
        stops: Sequence[Any], draws: Sequence[Any], *, weights: Sequence[int] = (), inputs: int = 0,
    ) -> None:  # fmt: skip
        self.moving, self.fixed, self.loss = list(moving), list(fixed), loss
        self.gradients = [None if g is None else tf.convert_to_tensor(g) for g in _densified(wrapped, gradients)]
        self.weights, self.inputs = tuple(weights), inputs
        self._stops, self._draws = list(stops), list(draws)
        held = [g for g in self.gradients if g is not None]
        feeds = [*self.moving, *self.fixed]
        self._full = _pruned(wrapped, feeds, [loss, *held, *self._stops, *self._draws])
        self._held = len(held)
        self._wrapped = wrapped
        self._forward = _pruned(wrapped, [*feeds, *self._stops, *self._draws], loss)
        self._naive: Any = None

    def point(self, moving: Sequence[Any], fixed: Sequence[Any], loss_scale: float = 1.0) -> Point:
        """Loss and gradients at a point, kept on the device."""
        values = self._full(*moving, *fixed)
        values = values if isinstance(values, list | tuple) else [values]
        loss, found = values[0], iter(values[1 : 1 + self._held])
        frozen = list(values[1 + self._held :])
        gradients = [None if g is None else next(found) for g in self.gradients]
        return Point(self, list(moving), list(fixed), loss, gradients, frozen)

    def naive(self) -> Any:
        """The forward pass with stop_gradient as the identity it is (random draws stay frozen)."""
        if self._naive is None:
            self._naive = _pruned(self._wrapped, [*self.moving, *self.fixed, *self._draws], self.loss)
        return self._naive

    @property
    def stop_count(self) -> int:
        """Number of frozen stop_gradient outputs."""
        return len(self._stops)

    def forward(self, moving: Sequence[Any], fixed: Sequence[Any], frozen: Sequence[Any]) -> Any:
        """The loss with ``stop_gradient`` outputs and random draws fixed at given values."""
        return self._forward(*moving, *fixed, *frozen)


@dataclass(frozen=True)
class Point:
    """Loss and gradients of a traced scalar at one point, on the device."""

    traced: Traced
    moving: list[Any]
    fixed: list[Any]
    loss_tensor: Any
    gradients: list[Any]
    frozen: list[Any]

    @property
    def loss(self) -> float:
        """The loss as a Python float."""
        return float(self.loss_tensor)

    def summaries(self) -> Float64Array:
        """Per moving tensor: rms of the value, norm, largest entry and non-finite count of the gradient; NaN if None."""
        rows = []
        for value, gradient in zip(self.moving, self.gradients, strict=True):
            rms = tf.sqrt(tf.reduce_mean(tf.square(tf.cast(value, tf.float64)))) if value.shape.num_elements() else tf.zeros((), tf.float64)
            if gradient is None:
                rows.append(tf.stack([rms, np.nan, np.nan, np.nan]))
                continue
            wide = tf.cast(gradient, tf.float64)
            bad = tf.reduce_sum(tf.cast(~tf.math.is_finite(wide), tf.float64))
            largest = tf.reduce_max(tf.abs(wide)) if gradient.shape.num_elements() else tf.zeros((), tf.float64)
            rows.append(tf.stack([rms, tf.norm(wide), largest, bad]))
        return np.asarray(tf.stack(rows)) if rows else np.zeros((0, 4))

    def difference(self, other: Point, scale: float = 1.0) -> Float64Array:
        """Per tensor ‖other/scale − self‖, float64; NaN where a gradient is None."""
        found = np.full(len(self.gradients), np.nan)
        for i, (mine, theirs) in enumerate(zip(self.gradients, other.gradients, strict=True)):
            if mine is not None and theirs is not None:
                found[i] = float(tf.norm(tf.cast(theirs, tf.float64) / scale - tf.cast(mine, tf.float64)))
        return found

    def line(self, seed: int, part: tuple[int, int, int] | None = None) -> Line:
        """Directions through this point: per tensor one random (entries of size 1) and one along the gradient."""
        return Line(self, seed, part)

    def moved(self, sizes: Float64Array, seed: int) -> Point:
        """The same scalar at a point where every tensor is jittered by ``sizes`` (rms per tensor)."""
        moving = [
            value + tf.cast(size * tf.random.stateless_normal(value.shape, [seed, i], dtype=tf.float64), value.dtype)
            for i, (value, size) in enumerate(zip(self.moving, sizes, strict=True))
        ]
        return self.traced.point(moving, self.fixed)


class Line:
    """A point with directions through it: the loss as a function of two coefficients per tensor."""

    def __init__(self, point: Point, seed: int, part: tuple[int, int, int] | None = None) -> None:
        self._point = point
        self._random = [
            tf.random.stateless_normal(value.shape, [seed, i], dtype=tf.float64) for i, value in enumerate(point.moving)
        ]
        if part is not None:
            j, start, stop = part
            mask = np.zeros(point.moving[j].shape.num_elements())
            mask[start:stop] = 1.0
            self._random[j] *= mask.reshape(point.moving[j].shape)
        self._aligned = []
        slopes = []
        for random, gradient in zip(self._random, point.gradients, strict=True):
            if gradient is None:
                self._aligned.append(tf.zeros_like(random))
                slopes.append(tf.zeros(2, tf.float64))
                continue
            norm = tf.norm(gradient)
            self._aligned.append(tf.math.divide_no_nan(gradient, norm))
            slopes.append(tf.stack([tf.reduce_sum(gradient * random), norm]))
        self.slopes: Float64Array = np.asarray(tf.stack(slopes, axis=1)) if slopes else np.zeros((2, 0))

    def losses(self, coefficients: Float64Array, *, naive: bool = False) -> Float64Array:
        """Losses at ``base + c[0] · random + c[1] · aligned``; ``coefficients`` has shape ``[K, 2, T]``."""
        point = self._point
        function = point.traced.naive() if naive else None
        draws = point.frozen[point.traced.stop_count :]
        found = []
        for rows in coefficients:
            moving = [
                value if not (a or b) else value + a * random + b * aligned
                for value, random, aligned, a, b in zip(
                    point.moving, self._random, self._aligned, rows[0], rows[1], strict=True
                )
            ]
            if function is not None:
                found.append(function(*moving, *point.fixed, *draws))
            else:
                found.append(point.traced.forward(moving, point.fixed, point.frozen))
        return np.asarray(tf.stack(found), dtype=np.float64) if found else np.zeros(0)


def location_of(error: BaseException) -> str:
    """File and line of the last frame of a trace that lies outside Keras, TensorFlow and this package."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not any(f"/{name}/" in frame.filename for name in ("keras", "tensorflow", "keras_gradwatch")):
            return f"{frame.filename}:{frame.lineno}"
    return ""


@contextmanager
def _recording(calls: list[LayerCall]) -> Iterator[None]:
    """Record every operation call of this thread whose tensors live in the graph being built."""
    import keras

    graph, thread = tf.compat.v1.get_default_graph(), threading.get_ident()
    original = keras.Operation.__call__
    open_calls: list[int] = []

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread or tf.compat.v1.get_default_graph() is not graph:
            return original(self, *args, **kwargs)
        index, first = len(calls), graph.version
        calls.append(LayerCall(self, (), (), first, first, open_calls[-1] if open_calls else -1))
        open_calls.append(index)
        try:
            outputs = original(self, *args, **kwargs)
        finally:
            open_calls.pop()
        inputs = [t for t in keras.tree.flatten((args, kwargs)) if _is_float_in(t, graph)]
        calls[index] = LayerCall(
            self, tuple(_unique(inputs)), tuple(t for t in keras.tree.flatten(outputs) if _is_in(t, graph)),
            first, graph.version, calls[index].parent,
        )  # fmt: skip
        return outputs

    keras.Operation.__call__ = recorded
    try:
        yield
    finally:
        keras.Operation.__call__ = original


def _pruned(wrapped: Any, feeds: Sequence[Any], fetches: Any) -> Any:
    """Part of a graph as a function of a flat list of tensors."""
    function = wrapped.prune(feeds, fetches)
    # Without this every call first tries a structured signature, fails, and prints all its inputs into the error
    # message it then drops: 30 ms a call (TensorFlow 2.21, ConcreteFunction._call_impl).
    function._arg_keywords, function._signature = None, [None] * len(function.inputs)
    return function


def _unique(tensors: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for tensor in tensors:
        if not any(tensor is seen for seen in found):
            found.append(tensor)
    return found


def _is_in(value: Any, graph: Any) -> bool:
    return isinstance(value, tf.Tensor) and getattr(value, "graph", None) is graph


def _is_float_in(value: Any, graph: Any) -> bool:
    return _is_in(value, graph) and value.dtype.is_floating


def _float_dtype(value: Any, dtype: str | None) -> Any:
    own = tf.as_dtype(value.dtype)
    return tf.as_dtype(dtype) if dtype and own.is_floating else own


def _to_tensor(value: Any, dtype: Any) -> Any:
    tensor = tf.convert_to_tensor(value)
    return tensor if tensor.dtype == dtype else tf.cast(tensor, dtype)


def _densified(wrapped: Any, gradients: Sequence[Any]) -> list[Any]:
    with wrapped.graph.as_default():
        return [None if g is None else tf.convert_to_tensor(g) for g in gradients]


def _reach(operations: Sequence[Any], feeds: Sequence[Any]) -> dict[str, int]:
    """Per operation a bit mask of the feeds its value depends on. Operations come in topological order."""
    bits = {feed.op.name: 1 << i for i, feed in enumerate(feeds)}
    for op in operations:
        mask = bits.get(op.name, 0)
        for value in op.inputs:
            mask |= bits.get(value.op.name, 0)
        if mask:
            bits[op.name] = mask
    return bits


def _upstream(op: Any, *, floats_only: bool = False) -> set[str]:
    """Names of all operations a value depends on (through floats alone: what passes integers carries no gradient)."""
    seen, waiting = {op.name}, [op]
    while waiting:
        for value in waiting.pop().inputs:
            if value.op.name not in seen and (value.dtype.is_floating or not floats_only):
                seen.add(value.op.name)
                waiting.append(value.op)
    return seen


def _is_random(kind: str) -> bool:
    return "Random" in kind or "Normal" in kind or kind in ("Multinomial", "StatefulUniform")


def _falls(op: Any) -> bool:
    """Does an operation take float64 and give a smaller float? Bodies of loops and functions are searched too."""
    takes = any(value.dtype == tf.float64 for value in op.inputs)
    if not takes:
        return False
    if any(output.dtype in _LOW_FLOATS for output in op.outputs):
        return True
    library = op.graph
    for name in ("f", "body", "then_branch", "else_branch"):
        try:
            attribute = op.get_attr(name)
        except ValueError:
            continue
        function = library._functions.get(getattr(attribute, "name", "")) if hasattr(library, "_functions") else None
        inner = getattr(function, "graph", None)
        if inner is not None and any(_falls(child) for child in inner.get_operations()):
            return True
    return False


def _leaves_floats(op: Any, reach: dict[str, int], bit: int) -> bool:
    """Does an operation turn a float that depends on a tensor into integers or booleans?"""
    enters = any(v.dtype.is_floating and reach.get(v.op.name, 0) & bit for v in op.inputs)
    return enters and bool(op.outputs) and not any(o.dtype.is_floating for o in op.outputs)
