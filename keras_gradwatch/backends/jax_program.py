"""A loss as a traced JAX program: its value, its gradients, its values along lines, and its layers each alone.

One trace of the user's code gives everything. The program is run by an interpreter that may put other values in place
of any: held ones behind every ``stop_gradient``, or given ones between the layers, which cuts them off from each other.
"""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.extend.core import Var
from jax.interpreters import partial_eval

from keras_gradwatch.backends.jax_graph import (
    TAP,
    LayerCall,
    evaluate,
    falls,
    in_float64,
    inside,
    is_stop,
    leaves_floats,
    line_of,
    program_of,
    recording,
    upstream,
)
from keras_gradwatch.backends.jax_point import Traced, compiled
from keras_gradwatch.backends.points import Line, Point
from keras_gradwatch.records import Float64Array

__all__ = ["LayerCall", "Line", "Parts", "Point", "Program", "Traced", "in_float32", "location_of"]

#: Operations with float outputs and no gradient.
_CUTTING_OPS = frozenset({"stop_gradient", "round", "floor", "ceil", "sign", "argmax", "argmin", "nextafter"})
_NAMES = {"argmax": "ArgMax", "argmin": "ArgMin", "convert_element_type": "Cast"}
#: Index of what lies outside of all layers: the loss.
OUTSIDE = -1


@dataclass(frozen=True)
class _Norms:
    """Stands for the norm of each of several values."""

    variables: list[Any]


@dataclass(frozen=True)
class Parts:
    """All layers at once, each cut off from the others: Σ scale · ⟨random cotangent, output⟩ over all their outputs.

    Attributes:
        traced: that sum as a function of the borders between layers, then of the weights.
        borders: values that enter a layer's own operations, given one by one.
        owners: per border the index of the call it enters (:data:`OUTSIDE`: the loss).
        labels: per border what it is to that call, where that needs saying.
        makers: per output the index of the call that makes it; the first output is the loss itself.
        norms: stands for the norm of each output at the base point.
    """

    traced: Traced
    borders: list[Any]
    owners: list[int]
    labels: list[str]
    makers: list[int]
    norms: Any

    def point(self, borders: Sequence[Any], scales: Float64Array, moving: Sequence[Any], fixed: Sequence[Any]) -> Point:
        """The sum at a point, for given scales of the outputs."""
        return self.traced.point([*borders, *moving], [np.asarray(scales, np.float64), *fixed])


class Program:
    """The traced loss of one batch as a function of ``moving`` (weights, float inputs) and ``fixed`` tensors.

    Args:
        loss: ``loss(moving, fixed) -> scalar tensor``; run while tracing.
        moving, fixed: arrays or tensors giving shapes and dtypes (and nothing else).
        dtype: float dtype of the moving tensors, ``None`` to keep their own.
        surroundings: opened while the code runs, which here is while it is traced.
    """

    #: JAX draws no random number without a key, so that another trace draws the same ones.
    draws = False

    def __init__(
        self, loss: Callable[[list[Any], list[Any]], Any], moving: Sequence[Any], fixed: Sequence[Any],
        dtype: str | None, surroundings: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:  # fmt: skip
        self._count = count = len(moving)
        self._dtypes = [_own_dtype(value, dtype) for value in (*moving, *fixed)]
        shapes = [np.shape(value) for value in (*moving, *fixed)]
        self._wide = dtype == "float64" or bool(jax.config.jax_enable_x64)
        self.calls: list[LayerCall] = []

        def traced(*arguments: Any) -> Any:
            with recording(self.calls):
                value = jnp.asarray(loss(list(arguments[:count]), list(arguments[count:])))
            if value.shape:
                raise ValueError(f"the loss has shape {tuple(value.shape)}; a scalar was expected")
            return value

        with in_float64(self._wide):
            values = [jax.ShapeDtypeStruct(shape, d) for shape, d in zip(shapes, self._dtypes, strict=True)]
            with surroundings(), _wide_attention() if dtype == "float64" else nullcontext():
                program = program_of(traced, values)
        for equation in program.jaxpr.eqns:
            if equation.primitive is TAP:
                call = self.calls[equation.params["call"]]
                call.add(equation.params["side"], equation.invars[0], equation.outvars[0])
        self._program = program
        self._moving = list(program.jaxpr.invars[:count])
        self._loss = program.jaxpr.outvars[0]
        self.main = Traced(program, count, wide=self._wide)
        self._flat = self.main.flat
        self._upstream = upstream(program)
        self._cast = jax.jit(lambda values: [v.astype(d) for v, d in zip(values, self._dtypes, strict=True)])
        self._compiled: dict[Any, Any] = {}

    @property
    def connected(self) -> tuple[bool, ...]:
        """Per moving tensor: False where the gradient is None."""
        return self.main.connected

    @functools.cached_property
    def reached(self) -> tuple[bool, ...]:
        """Per moving tensor: does the loss *value* depend on it, gradient or not?"""
        used = partial_eval.dce_jaxpr(self._flat.program.jaxpr, [True])[1]
        return tuple(used[: self._count])

    @functools.cached_property
    def declares(self) -> bool:
        """True when a ``stop_gradient`` that may matter lies between a moving tensor and the loss."""
        return bool(self._flat.stops)

    def feed(self, moving: Sequence[Any], fixed: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Cast values to what the program expects."""
        with in_float64():
            values = self._cast([jnp.asarray(value) for value in (*moving, *fixed)])
        return values[: self._count], values[self._count :]

    @functools.cached_property
    def leaks(self) -> list[str]:
        """Per moving tensor: the operation through which it falls below float64 on its way to the loss, or ''."""
        found = [""] * self._count
        for n, equation in enumerate(self._flat.equations):
            if not self._flat.matters(n) or not falls(equation):
                continue
            lost = [a for a in equation.invars if str(getattr(a.aval, "dtype", "")) == "float64"]
            for i in range(self._count):
                if not found[i] and any(self._flat.mask(atom) >> i & 1 for atom in lost):
                    call, line = self._call(self._flat.owner(n)), line_of(next(_falling(equation)))
                    place = f" in layer {call.operation.name}" if call else ""
                    found[i] = _name_of(next(_falling(equation))) + (f" ({line})" if line else "") + place
        return found

    @functools.cached_property
    def hidden_stops(self) -> list[bool]:
        """Per moving tensor: does it pass a loop or branch with a stop_gradient in it, which cannot be held?"""
        hiding = [
            equation for n, equation in enumerate(self._flat.equations)
            if self._flat.matters(n) and any(is_stop(inner) for inner in inside(equation))
        ]  # fmt: skip
        return [any(self._flat.mask(a) >> i & 1 for e in hiding for a in e.invars) for i in range(self._count)]

    def stop_call(self, index: int) -> LayerCall | None:
        """The call that holds the first stop_gradient a moving tensor meets."""
        for n in self._flat.stops:
            if self._flat.mask(self._flat.equations[n].invars[0]) >> index & 1:
                return self._call(self._flat.owner(n))
        return None

    def cut(self, index: int) -> tuple[LayerCall | None, str]:
        """Where the gradient of a moving tensor stops: ``(layer call or None, operation)``; operation '' if nowhere."""
        passed = {self._flat.moving[index]}
        cuts = []
        for n, equation in enumerate(self._flat.equations):
            if not any(isinstance(atom, Var) and atom in passed for atom in equation.invars):
                continue
            if equation.primitive.name in _CUTTING_OPS or leaves_floats(equation, lambda atom: atom in passed):
                cuts.append(n)
            else:
                passed.update(equation.outvars)
        cuts = [n for n in cuts if self._flat.matters(n, floats_only=False)]
        cuts = [n for n in cuts if self._flat.equations[n].primitive.name in _CUTTING_OPS] or cuts
        if not cuts:
            return None, ""
        return self._call(self._flat.owner(cuts[0])), _name_of(self._flat.equations[cuts[0]])

    def values(self, tensors: Sequence[Any], moving: Sequence[Any], fixed: Sequence[Any]) -> list[Any]:
        """Values of any variables of the program at a point, or norms of them."""
        if not tensors:
            return []

        def read(moving: list[Any], fixed: list[Any]) -> list[Any]:
            plain = [v for t in tensors for v in (t.variables if isinstance(t, _Norms) else [t])]
            found = iter(evaluate(self._program, [*moving, *fixed], wanted=plain)[1:])
            made = []
            for tensor in tensors:
                if isinstance(tensor, _Norms):
                    made.append(jnp.stack([jnp.linalg.norm(_wide(next(found))) for _ in tensor.variables]))
                else:
                    made.append(next(found))
            return made

        made: list[Any] = self._run(("values", tuple(map(id, tensors))), read, list(moving), list(fixed))
        return made

    @functools.cached_property
    def parts(self) -> Parts | None:
        """Every layer and the loss, each between its own inputs and outputs; None for a program without layers."""
        calls = [OUTSIDE, *(k for k, call in enumerate(self.calls) if self._matters(call))]
        borders: list[Any] = []
        owners: list[int] = []
        labels: list[str] = []
        for k in calls:
            for border, label in self._entries(k):
                borders.append(border)
                owners.append(k)
                labels.append(label)
        if not borders:
            return None
        given = set(borders)
        outputs = [(OUTSIDE, self._loss)]
        outputs += [(k, v) for k in calls for v in self._exits(k) if v not in given and v is not self._loss]
        exits = [v for _, v in outputs]

        def total(*values: Any) -> Any:
            entering, moving = values[: len(borders)], values[len(borders) : len(borders) + self._count]
            scales, *fixed = values[len(borders) + self._count :]
            found = self._evaluated(dict(zip(borders, entering, strict=True)), [*moving, *fixed], exits)
            dots = [_wide(found[0])] + [_random_dot(value, n) for n, value in enumerate(found[1:])]
            return jnp.dot(scales, jnp.stack(dots))

        inputs = [v.aval for v in self._program.jaxpr.invars]
        with in_float64():
            scales = jax.ShapeDtypeStruct((len(exits),), np.dtype("float64"))
            shapes = [*(b.aval for b in borders), *inputs[: self._count], scales, *inputs[self._count :]]
            traced = Traced(program_of(total, shapes), len(borders) + self._count, wide=True, fast=False)
        return Parts(traced, borders, owners, labels, [k for k, _ in outputs], _Norms(exits))

    def consumers(self, index: int) -> list[int]:
        """The innermost calls that read a moving tensor directly."""
        variable = self._flat.moving[index]
        return sorted(
            {
                self._flat.owner(n) for n, equation in enumerate(self._flat.equations)
                if variable in [a for a in equation.invars if isinstance(a, Var)]
                and self._flat.matters(n, floats_only=False)
            }
        )  # fmt: skip

    def finite(self, moving: Sequence[Any], fixed: Sequence[Any]) -> list[tuple[int, tuple[bool, bool, bool, bool]]]:
        """Per call (the loss last): are its inputs, outputs, output gradients and input gradients finite?"""
        indices = [*(k for k, call in enumerate(self.calls) if self._matters(call)), OUTSIDE]
        taps = [copy for call in self.calls for copy in (*call.inputs, *call.outputs)]
        owned = {k: [i for i in range(self._count) if self.consumers(i) == [k]] for k in indices}
        wanted = list(dict.fromkeys(v for k in indices for v in [e for e, _ in self._entries(k)] + self._exits(k)))

        def flags(moving: list[Any], fixed: list[Any]) -> Any:
            def shifted(moving: list[Any], shifts: list[Any]) -> Any:
                by_tap = dict(zip(taps, shifts, strict=True))
                loss, *found = evaluate(
                    self._program, [*moving, *fixed],
                    lambda e, inputs: [inputs[0] + by_tap[e.outvars[0]]] if e.primitive is TAP else None, wanted,
                )  # fmt: skip
                return loss, found

            zeros = [jnp.zeros(tap.aval.shape, tap.aval.dtype) for tap in taps]
            gradients, found = jax.grad(shifted, argnums=(0, 1), has_aux=True)(moving, zeros)
            values, slopes = dict(zip(wanted, found, strict=True)), dict(zip(taps, gradients[1], strict=True))
            rows = []
            for k in indices:
                entries = [border for border, _ in self._entries(k)]
                inner = [*(slopes[v] for v in entries), *(gradients[0][i] for i in owned[k])]
                groups = [values[v] for v in entries], [values[v] for v in self._exits(k)]
                rows.append([*groups, [slopes[v] for v in self._beyond(k)], inner])
            return jnp.stack([jnp.stack([_all_finite(group) for group in row]) for row in rows])

        with in_float64(self._wide):  # hand-written gradients run here
            found = np.asarray(compiled(flags, fast=False)(list(moving), list(fixed)))
        return [(k, tuple(bool(flag) for flag in row)) for k, row in zip(indices, found, strict=True)]  # type: ignore[misc]

    def _run(self, key: Any, function: Callable[..., Any], *values: Any) -> Any:
        with in_float64():
            if key not in self._compiled:
                self._compiled[key] = compiled(function, fast=False)
            return self._compiled[key](*values)

    def _evaluated(self, given: dict[Any, Any], values: list[Any], wanted: list[Any]) -> list[Any]:
        """Some values of the program, with others given."""

        def cut(equation: Any, inputs: list[Any]) -> Any:
            return [given[equation.outvars[0]]] if equation.outvars[0] in given else None

        return evaluate(self._program, values, cut, wanted)[1:]

    def compiled_summaries(self, moving: Sequence[Any], fixed: Sequence[Any]) -> Float64Array | None:
        """None: every step is compiled by XLA, there are no two modes to compare."""
        return None

    def uses(self, k: int) -> bool:
        """Does the loss depend on what a call returns?"""
        return self._matters(self.calls[k])

    def _matters(self, call: LayerCall) -> bool:
        return any(v is not None and v in self._upstream for v in call.results)

    def _children(self, parent: int) -> list[LayerCall]:
        return [call for call in self.calls if call.parent == parent and self._matters(call)]

    def _entries(self, k: int) -> list[tuple[Any, str]]:
        """What enters a call's own operations: its inputs, and what the layers within it return."""
        own = self.calls[k].inputs if k != OUTSIDE else []
        found = [(tap, "" if len(own) == 1 else f"its input {n} of 0…{len(own) - 1}") for n, tap in enumerate(own)]
        for child in self._children(k):
            found += [(v, f"the output of {child.operation.name}" if k != OUTSIDE else "") for v in child.outputs]
        return found

    def _exits(self, k: int) -> list[Any]:
        """What a call's own operations make: its results, and what it hands to the layers within it."""
        found = [self._loss] if k == OUTSIDE else list(self.calls[k].results)
        found += [source for child in self._children(k) for source in child.sources]
        return [variable for variable in found if isinstance(variable, Var)]

    def _beyond(self, k: int) -> list[Any]:
        """The copies of a call's exits that are seen from the other side, where their gradients are told apart."""
        found = [] if k == OUTSIDE else list(self.calls[k].outputs)
        return found + [tap for child in self._children(k) for tap in child.inputs]

    def _call(self, index: int) -> LayerCall | None:
        return None if index == OUTSIDE else self.calls[index]


def in_float32() -> AbstractContextManager[None]:
    """Random functions draw inside as they do in training."""
    return in_float64(False)


def location_of(error: BaseException) -> str:
    """File and line of the innermost frame of an error that lies outside Keras, JAX and this package."""
    import keras

    packages = (os.path.dirname(module.__file__) for module in (keras, jax))
    own = (*packages, os.path.dirname(os.path.dirname(__file__)))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(own):
            return f"{frame.filename}:{frame.lineno}"
    return ""


@contextmanager
def _wide_attention() -> Iterator[None]:
    """JAX computes the softmax of an attention in float32 whatever comes in; here it is computed as it is written."""
    original = jax.nn.dot_product_attention

    def attention(
        query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, *, scale: float | None = None,
        is_causal: bool = False, **others: Any,
    ) -> Any:  # fmt: skip
        if query.dtype != np.float64 or query.ndim != 4 or any(v not in (None, "xla", False) for v in others.values()):
            return original(query, key, value, bias, mask, scale=scale, is_causal=is_causal, **others)
        heads = query.shape[2] // key.shape[2]  # grouped queries share keys and values
        key, value = jnp.repeat(key, heads, axis=2), jnp.repeat(value, heads, axis=2)
        scores = jnp.einsum("btnh,bsnh->bnts", query, key) * (1 / np.sqrt(query.shape[-1]) if scale is None else scale)
        scores = scores if bias is None else scores + bias
        allowed = jnp.ones(scores.shape[-2:], bool)
        allowed = jnp.tril(allowed) if is_causal else allowed
        allowed = allowed if mask is None else allowed & mask
        scores = jnp.where(allowed, scores, -0.7 * float(np.finfo(np.float32).max))  # JAX' own number
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, axis=-1), value)

    jax.nn.dot_product_attention = attention
    try:
        yield
    finally:
        jax.nn.dot_product_attention = original


def _own_dtype(value: Any, dtype: str | None) -> Any:
    """The dtype a value has in training; floats are given another if asked for."""
    with in_float64(bool(jax.config.jax_enable_x64)):
        own = jax.dtypes.canonicalize_dtype(value.dtype)
    return np.dtype(dtype) if dtype and jax.dtypes.issubdtype(own, np.floating) else own


def _falling(equation: Any) -> Iterator[Any]:
    """The innermost equations that lose float64."""
    return (each for each in (*inside(equation), equation) if falls(each) and not any(map(falls, inside(each))))


def _name_of(equation: Any) -> str:
    name = equation.primitive.name
    return _NAMES.get(name) or "".join(part.capitalize() for part in name.split("_"))


def _wide(value: Any) -> Any:
    return jnp.asarray(value).astype(np.float64)


def _random_dot(tensor: Any, seed: int) -> Any:
    key = np.array([17, seed], np.uint32)
    return jnp.sum(_wide(tensor) * jax.random.normal(key, tensor.shape, np.float64))


def _all_finite(tensors: Sequence[Any]) -> Any:
    known = [jnp.isfinite(tensor).all() for tensor in tensors]
    return jnp.stack(known).all() if known else jnp.asarray(True)
