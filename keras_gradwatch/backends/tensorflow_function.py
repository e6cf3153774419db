"""A plain function in TensorFlow: its Jacobians by backpropagation and by differences, in float64 where it can be.

A function with float32 constants or variables inside cannot simply be called with float64. Its traced graph can: every
float type in it is widened, constants included, and the wider graph is imported. Only the forward pass is rebuilt;
the gradient stays the one the user's own code computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

_WIDER = {
    tf.float16.as_datatype_enum: tf.float64.as_datatype_enum,
    tf.bfloat16.as_datatype_enum: tf.float64.as_datatype_enum,
    tf.float32.as_datatype_enum: tf.float64.as_datatype_enum,
    tf.complex64.as_datatype_enum: tf.complex128.as_datatype_enum,
}

#: Doubles that one call may hold for perturbed copies of an argument: 16 MB.
_CHUNK_ELEMENTS = 2_000_000


class Function:
    """``f`` traced once at its arguments.

    Attributes:
        rows: real numbers in its result.
        wide: numeric differences are taken in float64.
        sizes: number of elements per argument.
        used: per argument, whether the result depends on it.
    """

    def __init__(self, f: Callable[..., Any], arguments: Sequence[Any]) -> None:
        self._arguments = [tf.convert_to_tensor(value) for value in arguments]
        self._f = f
        signature = [tf.TensorSpec(value.shape, value.dtype) for value in self._arguments]
        self._concrete = tf.function(self._called, autograph=False).get_concrete_function(*signature)
        self.sizes = [int(value.shape.num_elements() or 0) for value in self._arguments]
        self.used = self._dependence()
        self.rows = _reals(self._concrete.outputs[0])
        wide = _widened(self._concrete, [_wider(value.dtype) for value in self._arguments])
        self.wide = wide is not None or all(value.dtype in (tf.float64, tf.complex128) for value in self._arguments)
        self._forward = wide or self._concrete
        outputs = (tensor for op in self._concrete.graph.get_operations() for tensor in op.outputs)
        self._largest = max((int(t.shape.num_elements() or 0) for t in outputs if t.shape.rank is not None), default=1)

    def analytic(self) -> list[npt.NDArray[Any]]:
        """Jacobians ``[y.size, x.size]`` by backpropagation; zero where the gradient is None."""
        arguments = self._arguments
        probe = self._concrete(*arguments)
        rows = int(np.prod(probe.shape, dtype=int)) * (2 if probe.dtype.is_complex else 1)
        real = probe.dtype.real_dtype

        def row(cotangent: Any) -> list[Any]:
            with tf.GradientTape() as tape:
                tape.watch(arguments)
                result = self._called(*arguments)
            cotangent = tf.reshape(_joined(cotangent, probe.dtype), tf.shape(result))
            gradients = tape.gradient(result, arguments, output_gradients=cotangent)
            return [
                tf.zeros([_reals(a)], a.dtype.real_dtype) if g is None else _flat(tf.convert_to_tensor(g))
                for g, a in zip(gradients, arguments, strict=True)
            ]

        compiled = tf.function(row, autograph=False).get_concrete_function(tf.TensorSpec([rows], real))
        found = [compiled(tf.one_hot(i, rows, dtype=real)) for i in range(rows)]
        return [
            np.stack([np.asarray(gradients[k]) for gradients in found])
            if found
            else np.zeros((0, _reals(a)), a.dtype.real_dtype.as_numpy_dtype)
            for k, a in enumerate(arguments)
        ]

    def numeric(self, index: int, steps: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Jacobian ``[y.size, x.size]`` of one argument by central differences with a step per real entry."""
        plus, minus, width = self._moved(index, steps)
        return np.ascontiguousarray((plus - minus) / width)

    def sides(self, index: int, steps: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], ...]:
        """Left and right slopes ``[y.size, x.size]`` of one argument, and the results ``[y.size]`` at its base."""
        plus, minus, width = self._moved(index, steps)
        base = np.asarray(_flat(self._forward(*self._points())), np.float64)
        return 2 * (base[:, None] - minus) / width, 2 * (plus - base[:, None]) / width, base

    def _points(self) -> list[Any]:
        return [tf.cast(value, _wider(value.dtype)) if self.wide else value for value in self._arguments]

    def _moved(self, index: int, steps: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], ...]:
        """Results ``[y.size, x.size]`` on both sides of each real entry, and the distances between the sides."""
        points = self._points()
        base = _flat(points[index])

        def moved(entry: Any) -> Any:
            shift = tf.one_hot(entry, len(steps), dtype=base.dtype) * tf.cast(tf.gather(deltas, entry), base.dtype)

            def at(flat: Any) -> Any:
                value = tf.reshape(_joined(flat, points[index].dtype), points[index].shape)
                return _flat(self._forward(*points[:index], value, *points[index + 1 :]))

            return at(base + shift), at(base - shift), tf.reduce_sum((base + shift) - (base - shift))

        deltas = tf.constant(steps, tf.float64)
        chunk = max(1, min(256, _CHUNK_ELEMENTS // max(len(steps), self._largest)))
        evaluate: Any = None
        found = []
        for start in range(0, len(steps), chunk):
            # The last chunk is filled up, so that one trace serves all.
            entries = tf.constant(np.minimum(np.arange(start, start + chunk), len(steps) - 1))
            if evaluate is None:
                evaluate = _mapped(moved, entries, self._forward.graph)
            found.append([np.asarray(part, np.float64)[: len(steps) - start] for part in evaluate(entries)])
        if not found:
            return (*(np.zeros((_reals(self._concrete(*self._arguments)), 0)) for _ in range(2)), np.zeros(0))
        plus, minus, width = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return plus.T, minus.T, width

    def entries(self, index: int) -> npt.NDArray[np.float64]:
        """The real entries of an argument, flat."""
        return np.asarray(tf.cast(_flat(self._arguments[index]), tf.float64))

    def epsilon(self, index: int) -> float:
        """Unit of rounding of an argument's dtype."""
        real = self._arguments[index].dtype.real_dtype
        return 2.0**-8 if real == tf.bfloat16 else float(np.finfo(real.as_numpy_dtype).eps)

    def _called(self, *values: Any) -> Any:
        result = self._f(*values)
        if not isinstance(result, tf.Tensor | tf.Variable):
            result = tf.convert_to_tensor(result)
        if not (result.dtype.is_floating or result.dtype.is_complex):
            raise TypeError(f"f returned dtype {result.dtype.name}. Expected one float or complex tensor.")
        return tf.convert_to_tensor(result)

    def _dependence(self) -> list[bool]:
        graph = self._concrete.graph
        waiting = [tensor.op for tensor in graph.outputs]
        seen = {op.name for op in waiting}
        while waiting:
            for value in waiting.pop().inputs:
                if value.op.name not in seen:
                    seen.add(value.op.name)
                    waiting.append(value.op)
        return [placeholder.op.name in seen for placeholder in graph.inputs[: len(self._arguments)]]


def gradient_of(f: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient of a function with a scalar result, as a function: by all its arguments, in one flat vector."""

    def gradient(*values: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(values)
            result = f(*values)
        found = tape.gradient(result, values, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        widest = max((value.dtype for value in values), key=lambda dtype: dtype.size)
        return tf.concat([tf.reshape(tf.cast(tf.convert_to_tensor(g), widest), [-1]) for g in found], 0)

    return gradient


def _mapped(function: Callable[[Any], Any], entries: Any, graph: Any) -> Callable[[Any], Any]:
    """A compiled map over entries: all at once where TensorFlow can vectorise the function, else one by one."""
    # get_concrete_function everywhere: calling a fresh tf.function again and again makes TensorFlow warn of retracing.
    if not _branches(graph):  # vectorising loops fails, and logs pages about it
        try:
            at_once = tf.function(lambda these: tf.vectorized_map(function, these), autograph=False)
            compiled = at_once.get_concrete_function(entries)
            compiled(entries)
        except Exception:  # noqa: BLE001  vectorisation fails in many ways on foreign operations
            pass
        else:
            return compiled  # type: ignore[no-any-return]
    outputs = tf.function(function, autograph=False).get_concrete_function(entries[0]).structured_outputs
    signature = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), outputs)
    one_by_one = tf.function(lambda these: tf.map_fn(function, these, fn_output_signature=signature), autograph=False)
    return one_by_one.get_concrete_function(entries)  # type: ignore[no-any-return]


def _branches(graph: Any) -> bool:
    """Does a graph, or a function it calls, hold a loop or a condition?"""
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
    return any(node.op.removeprefix("Stateless") in ("While", "If", "Case") for node in nodes)


def _wider(dtype: Any) -> Any:
    return tf.as_dtype(_WIDER.get(dtype.as_datatype_enum, dtype.as_datatype_enum))


def _reals(value: Any) -> int:
    return int(value.shape.num_elements() or 0) * (2 if value.dtype.is_complex else 1)


def _flat(value: Any) -> Any:
    """A tensor as a flat vector of reals, real and imaginary parts side by side."""
    if value.dtype.is_complex:
        value = tf.stack([tf.math.real(value), tf.math.imag(value)], axis=-1)
    return tf.reshape(value, [-1])


def _joined(flat: Any, dtype: Any) -> Any:
    """The inverse of :func:`_flat`, but for the shape."""
    if not dtype.is_complex:
        return flat
    pairs = tf.reshape(flat, [-1, 2])
    return tf.complex(pairs[:, 0], pairs[:, 1])


def _widened(concrete: Any, dtypes: Sequence[Any]) -> Any:
    """The forward pass of a traced function in float64, or ``None`` where some operation has no float64 form."""
    graph = concrete.graph
    definition = graph.as_graph_def()
    suffix = "_in_float64"
    names = {function.signature.name for function in definition.library.function}
    nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
    for node in nodes:
        if node.op in names:
            node.op += suffix
        if node.op != "ReadVariableOp":  # its output is replaced by a cast, below
            for attribute in node.attr.values():
                _widen_attribute(attribute, names, suffix)
        # The rebuilt forward pass is never differentiated, and a Python gradient would refer to the old graph.
        node.attr.pop("_gradient_op_type", None)
    for function in definition.library.function:
        function.signature.name += suffix
        for argument in (*function.signature.input_arg, *function.signature.output_arg):
            argument.type = _WIDER.get(argument.type, argument.type)
    definition.library.ClearField("gradient")
    count = len(dtypes)
    captured = list(zip(graph.inputs[count:], concrete.captured_inputs, strict=True))

    def rebuilt(*values: Any) -> Any:
        inputs = {p.name: v for p, v in zip(graph.inputs[:count], values, strict=True)}
        for placeholder, value in captured:
            held = tf.identity(value)  # an eager value becomes part of the new graph
            if value.dtype != tf.resource:
                inputs[placeholder.name] = tf.cast(held, _wider(value.dtype))
                continue
            inputs[placeholder.name] = held
            for read in placeholder.consumers():
                if read.type == "ReadVariableOp":
                    current = tf.raw_ops.ReadVariableOp(resource=held, dtype=read.outputs[0].dtype)
                    inputs[read.outputs[0].name] = tf.cast(current, _wider(current.dtype))
        return tf.graph_util.import_graph_def(
            definition, input_map=inputs, return_elements=[graph.outputs[0].name], name=""
        )[0]

    signature = [tf.TensorSpec(p.shape, d) for p, d in zip(graph.inputs[:count], dtypes, strict=True)]
    try:
        wide = tf.compat.v1.wrap_function(rebuilt, signature)
    except (ValueError, TypeError, tf.errors.OpError):
        return None
    return wide if wide.outputs[0].dtype in (tf.float64, tf.complex128) and _loses_nothing(wide.graph) else None


def _widen_attribute(attribute: Any, names: set[str], suffix: str) -> None:
    if attribute.HasField("type"):
        attribute.type = _WIDER.get(attribute.type, attribute.type)
    elif attribute.HasField("tensor"):
        if attribute.tensor.dtype in _WIDER:
            dtype = tf.as_dtype(_WIDER[attribute.tensor.dtype])
            values = tf.make_ndarray(attribute.tensor)
            attribute.tensor.CopyFrom(tf.make_tensor_proto(values.astype(dtype.as_numpy_dtype), dtype, values.shape))
    elif attribute.HasField("func"):
        if attribute.func.name in names:
            attribute.func.name += suffix
    elif attribute.HasField("list"):
        widened = [_WIDER.get(kind, kind) for kind in attribute.list.type]
        del attribute.list.type[:]
        attribute.list.type.extend(widened)


def _loses_nothing(graph: Any) -> bool:
    """No operation left that turns float64 into a smaller float (some kernels always return float32)."""
    low = (tf.float32, tf.float16, tf.bfloat16)
    return not any(
        any(v.dtype == tf.float64 for v in op.inputs) and any(o.dtype in low for o in op.outputs)
        for op in graph.get_operations()
    )
