"""Reading a TensorFlow graph: which layer made an operation, what depends on what, where float64 is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

_LOW_FLOATS = (tf.float32, tf.float16, tf.bfloat16)
_HARMLESS_STOPS = (
    "moments/StopGradient",  # tf.nn.moments stops the mean, whose derivative there is zero
    "labels_stop_gradient",  # of the cross entropies, which know no gradient for labels anyway
)


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer (or functional operation) seen while tracing, at the top level of the graph.

    Attributes:
        operation: the layer.
        inputs: float tensors as the call sees them; copies of their own (taps) when recorded with ``taps``.
        sources: the tensors behind ``inputs``.
        results: float tensors as the call makes them.
        outputs: the tensors its caller goes on with; copies of ``results`` when recorded with ``taps``.
        first_op, last_op: range of its operations in the graph.
        parent: index of the call it was made in, −1 at the top.
    """

    operation: Any
    inputs: tuple[Any, ...]
    sources: tuple[Any, ...]
    results: tuple[Any, ...]
    outputs: tuple[Any, ...]
    first_op: int
    last_op: int
    parent: int


@contextmanager
def recording(calls: list[LayerCall], *, taps: bool = False) -> Iterator[None]:
    """Record every operation call of this thread whose tensors live in the graph being built.

    With ``taps`` every float tensor that enters or leaves a call is copied on the way (an identity), so that each call
    can later be cut out of the graph on its own.
    """
    import keras

    graph, thread = tf.compat.v1.get_default_graph(), threading.get_ident()
    original = keras.Operation.__call__
    open_calls: list[int] = []

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread or tf.compat.v1.get_default_graph() is not graph:
            return original(self, *args, **kwargs)
        index, first = len(calls), graph.version
        calls.append(LayerCall(self, (), (), (), (), first, first, open_calls[-1] if open_calls else -1))
        (args, kwargs), sources, inputs = _crossing((args, kwargs), graph, copy=taps)
        open_calls.append(index)
        try:
            made = original(self, *args, **kwargs)
        finally:
            open_calls.pop()
        made, results, outputs = _crossing(made, graph, copy=taps)
        calls[index] = LayerCall(self, inputs, sources, results, outputs, first, graph.version, calls[index].parent)
        return made

    keras.Operation.__call__ = recorded
    try:
        yield
    finally:
        keras.Operation.__call__ = original


def _crossing(structure: Any, graph: Any, *, copy: bool) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
    """A structure with each float tensor of the graph copied (once), the tensors, and their copies."""
    import keras

    found: dict[int, tuple[Any, Any]] = {}

    def visit(value: Any) -> Any:
        if not (is_in(value, graph) and value.dtype.is_floating):
            return value
        if id(value) not in found:
            found[id(value)] = value, _tap(value) if copy else value
        return found[id(value)][1]

    leaves = [visit(leaf) for leaf in keras.tree.flatten(structure)]
    if copy and found:
        structure = keras.tree.pack_sequence_as(structure, leaves)
    pairs = list(found.values())
    return structure, tuple(value for value, _ in pairs), tuple(tap for _, tap in pairs)


def _tap(tensor: Any) -> Any:
    """An identity of a tensor, with what Keras has pinned to it (masks, logits behind a softmax)."""
    tap = tf.identity(tensor)
    for name, value in getattr(tensor, "__dict__", {}).items():
        if name.startswith("_keras"):
            setattr(tap, name, value)
    return tap


def pruned(wrapped: Any, feeds: Sequence[Any], fetches: Any) -> Any:
    """Part of a graph as a function of a flat list of tensors."""
    return called_flat(wrapped.prune(feeds, fetches))


def compiled(function: Any, values: Sequence[Any], *more: Any) -> Any:
    """A function of tensors like these (and of specs given as such), compiled once, called with a flat list.

    ``tf.function`` would do, but it warns of retracing when many models are checked, each with functions of its own.
    """
    signature = [*(tf.TensorSpec(v.shape, v.dtype) for v in values), *more]
    return called_flat(tf.compat.v1.wrap_function(function, signature))


def called_flat(function: Any) -> Any:
    """The same function, called with a flat list of tensors only.

    Otherwise every call first tries a structured signature, fails, and prints all its inputs into the error message it
    then drops: 30 ms a call (TensorFlow 2.21, ConcreteFunction._call_impl).
    """
    function._arg_keywords, function._signature = None, [None] * len(function.inputs)
    return function


def is_in(value: Any, graph: Any) -> bool:
    """Is it a tensor of this graph?"""
    return isinstance(value, tf.Tensor) and getattr(value, "graph", None) is graph


def to_tensor(value: Any, dtype: Any) -> Any:
    """A value as a tensor of a dtype."""
    tensor = tf.convert_to_tensor(value)
    return tensor if tensor.dtype == dtype else tf.cast(tensor, dtype)


def feeds_behind(operations: Sequence[Any], feeds: Sequence[Any]) -> dict[str, int]:
    """Per operation a bit mask of the feeds its value depends on. Operations come in topological order."""
    bits = {feed.op.name: 1 << i for i, feed in enumerate(feeds)}
    for op in operations:
        mask = bits.get(op.name, 0)
        for value in op.inputs:
            mask |= bits.get(value.op.name, 0)
        if mask:
            bits[op.name] = mask
    return bits


def carries_floats(value: Any) -> bool:
    """Can a gradient pass here? Variants hold lists of floats: the tensor arrays of loops."""
    return bool(value.dtype.is_floating or value.dtype == tf.variant)


def upstream(op: Any, *, floats_only: bool = False) -> set[str]:
    """Names of all operations a value depends on (through floats alone: what passes integers carries no gradient)."""
    seen, waiting = {op.name}, [op]
    while waiting:
        for value in waiting.pop().inputs:
            if value.op.name not in seen and (carries_floats(value) or not floats_only):
                seen.add(value.op.name)
                waiting.append(value.op)
    return seen


def is_draw(op: Any) -> bool:
    """Does an operation draw random numbers from a state of its own, other than a Keras seed?"""
    kind = op.type
    named = any(word in kind for word in ("Random", "Normal", "Rng")) or kind in ("Multinomial", "StatefulUniform")
    return named and bool(op.op_def.is_stateful)


def is_stop(op: Any) -> bool:
    """Is it a stop_gradient that may matter?"""
    return op.type == "StopGradient" and not op.name.endswith(_HARMLESS_STOPS)


def inside(op: Any) -> Iterator[Any]:
    """All operations within the functions an operation calls: bodies of loops, branches, nested functions."""
    waiting, seen = [op], set()
    while waiting:
        for name in _called(waiting.pop()):
            function = getattr(op.graph, "_functions", {}).get(name)
            graph = getattr(function, "graph", None)
            if graph is None or name in seen:
                continue
            seen.add(name)
            operations = graph.get_operations()
            yield from operations
            waiting += operations


def _called(op: Any) -> Iterator[str]:
    for name in ("f", "body", "cond", "then_branch", "else_branch"):
        if name in op.node_def.attr and op.node_def.attr[name].HasField("func"):
            yield op.node_def.attr[name].func.name


def falls(op: Any) -> bool:
    """Does an operation (or one inside it) take float64 and give a smaller float?"""
    return any(_falls(each) for each in (op, *inside(op)))


def _falls(op: Any) -> bool:
    takes = any(value.dtype == tf.float64 for value in op.inputs)
    return takes and any(output.dtype in _LOW_FLOATS for output in op.outputs)


def leaves_floats(op: Any, depends: Callable[[Any], bool]) -> bool:
    """Does an operation turn a float that depends on something into integers or booleans?"""
    enters = any(carries_floats(value) and depends(value) for value in op.inputs)
    return enters and bool(op.outputs) and not any(carries_floats(output) for output in op.outputs)
