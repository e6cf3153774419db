"""A plain function in JAX: its Jacobians by backpropagation and by differences, in float64 where it can be.

A function with float32 constants or variables inside cannot simply be called with float64. Its traced program can: it
is run equation by equation, every small float widened, and every request for a small float type asks for the wider one.
Only the forward pass runs that way; the gradient stays the one the user's own code computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax import numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.interpreters import partial_eval

from keras_gradwatch.backends.jax_graph import bound, evaluate, falls, in_float64, inlined, program_of

_WIDER = {
    np.dtype("float16"): np.dtype("float64"), np.dtype(jnp.bfloat16): np.dtype("float64"),
    np.dtype("float32"): np.dtype("float64"), np.dtype("complex64"): np.dtype("complex128"),
}  # fmt: skip

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
        asks = any(np.dtype(value.dtype) in _WIDER.values() for value in arguments)
        self._x64 = asks or bool(jax.config.jax_enable_x64)
        self._f = f
        with in_float64(self._x64):
            self._arguments = [jnp.asarray(value) for value in arguments]
            self._program = program_of(self._called, self._arguments)
        self.sizes = [value.size for value in self._arguments]
        self.used = list(partial_eval.dce_jaxpr(self._program.jaxpr, [True])[1])
        self._result = self._program.jaxpr.outvars[0].aval
        self.rows = _reals(self._result)
        wide = self._widened()
        self.wide = wide is not None or all(value.dtype in _WIDER.values() for value in self._arguments)
        self._forward = wide or self._program

    def analytic(self) -> list[npt.NDArray[Any]]:
        """Jacobians ``[y.size, x.size]`` by backpropagation; zero where the gradient is None."""
        rows, real = self.rows, np.dtype(self._result.dtype).type(0).real.dtype

        def row(cotangent: Any) -> list[Any]:
            parts = [_flat(a) for a in self._arguments]
            back = jax.vjp(lambda *flat: _flat(self._called(*self._shaped(flat, self._arguments))), *parts)[1]
            return list(back(cotangent))

        if not rows:
            return [np.zeros((0, _reals(a)), _flat(a).dtype) for a in self._arguments]
        with in_float64(self._x64):
            compiled = jax.jit(row)
            found = [compiled(np.eye(1, rows, i, dtype=real)[0]) for i in range(rows)]
        return [np.stack([np.asarray(gradients[k]) for gradients in found]) for k in range(len(self._arguments))]

    def numeric(self, index: int, steps: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Jacobian ``[y.size, x.size]`` of one argument by central differences with a step per real entry."""
        plus, minus, width, _ = self._moved(index, steps)
        return np.ascontiguousarray((plus - minus) / width)

    def sides(self, index: int, steps: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], ...]:
        """Left and right slopes ``[y.size, x.size]`` of one argument, and the results ``[y.size]`` at its base."""
        plus, minus, width, base = self._moved(index, steps)
        return 2 * (base[:, None] - minus) / width, 2 * (plus - base[:, None]) / width, base

    def _moved(self, index: int, steps: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], ...]:
        """Results ``[y.size, x.size]`` on both sides of each entry, distances between them, results at the base."""
        with in_float64(self.wide):
            points = [a.astype(_WIDER.get(a.dtype, a.dtype)) if self.wide else a for a in self._arguments]
            base = _flat(points[index])
            deltas = jnp.asarray(steps, base.dtype)

            def at(flat: Any) -> Any:
                value = self._shaped([flat], [points[index]])[0]
                return _flat(evaluate(self._forward, [*points[:index], value, *points[index + 1 :]])[0])

            def moved(entry: Any) -> tuple[Any, Any, Any]:
                shift = jnp.zeros_like(base).at[entry].set(deltas[entry])
                return at(base + shift), at(base - shift), jnp.sum((base + shift) - (base - shift))

            chunk = max(1, min(256, len(steps), _CHUNK_ELEMENTS // max(len(steps), 1)))
            evaluated = jax.jit(jax.vmap(moved))
            found = []
            for start in range(0, len(steps), chunk):
                # The last chunk is filled up, so that one compilation serves all.
                entries = np.minimum(np.arange(start, start + chunk), len(steps) - 1)
                found.append([np.asarray(part, np.float64)[: len(steps) - start] for part in evaluated(entries)])
            here = np.asarray(jax.jit(at)(base), np.float64)
        if not found:
            return np.zeros((self.rows, 0)), np.zeros((self.rows, 0)), np.zeros(0), here
        plus, minus, width = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return plus.T, minus.T, width, here

    def entries(self, index: int) -> npt.NDArray[np.float64]:
        """The real entries of an argument, flat."""
        return np.asarray(_flat(self._arguments[index]), np.float64)

    def epsilon(self, index: int) -> float:
        """Unit of rounding of an argument's dtype."""
        return float(jnp.finfo(self._arguments[index].dtype).eps)

    def _called(self, *values: Any) -> Any:
        result = self._f(*values)
        result = jnp.asarray(getattr(result, "value", result))
        if not jnp.issubdtype(result.dtype, jnp.inexact):
            raise TypeError(f"f returned dtype {result.dtype.name}. Expected one float or complex tensor.")
        return result

    def _shaped(self, flat: Sequence[Any], like: Sequence[Any]) -> list[Any]:
        return [_joined(part, value.dtype).reshape(value.shape) for part, value in zip(flat, like, strict=True)]

    def _widened(self) -> Any:
        """The forward pass in float64, or ``None`` where some operation has no float64 form."""
        try:
            with in_float64():
                shapes = [jax.ShapeDtypeStruct(a.shape, _WIDER.get(a.dtype, a.dtype)) for a in self._arguments]
                wide = program_of(lambda *values: inlined(self._program, values, _wide)[0], shapes)
        except Exception:  # noqa: BLE001  whatever cannot run in float64 is differenced in its own precision
            return None
        loses = any(falls(equation) for equation in wide.jaxpr.eqns)
        return None if loses or wide.jaxpr.outvars[0].aval.dtype not in _WIDER.values() else wide


def gradient_of(scalar: Callable[..., Any]) -> Callable[..., Any]:
    """The function that gives the gradient of a scalar function by all its arguments, as one flat vector."""

    def gradient(*values: Any) -> Any:
        found = jax.grad(scalar, argnums=tuple(range(len(values))))(*values)
        return jnp.concatenate([part.reshape(-1) for part in found])

    return gradient


def _cast(value: Any) -> Any:
    dtype = np.dtype(getattr(value, "dtype", np.int32))
    return jnp.asarray(value).astype(_WIDER[dtype]) if dtype in _WIDER else value


def _wide(equation: Any, inputs: list[Any]) -> Any:
    """One equation in float64: what enters is widened, and so are the types it asks for and its loops' bodies."""
    parameters = {name: _wide_parameter(value) for name, value in equation.params.items()}
    if equation.primitive.name == "bitcast_convert_type":
        parameters = dict(equation.params)  # the bits of a random number
    return bound(equation.replace(params=parameters), [_cast(value) for value in inputs])


def _wide_parameter(value: Any) -> Any:
    if isinstance(value, np.dtype):
        return _WIDER.get(value, value)
    if isinstance(value, ClosedJaxpr):
        shapes = [jax.ShapeDtypeStruct(a.shape, _WIDER.get(a.dtype, a.dtype)) for a in value.in_avals]
        return program_of(lambda *values: inlined(value, values, _wide), shapes)
    if isinstance(value, tuple) and value and all(isinstance(each, ClosedJaxpr) for each in value):
        return tuple(map(_wide_parameter, value))
    return value


def _reals(value: Any) -> int:
    return int(np.prod(value.shape, dtype=np.int64)) * (2 if jnp.issubdtype(value.dtype, jnp.complexfloating) else 1)


def _flat(value: Any) -> Any:
    """An array as a flat vector of reals, real and imaginary parts side by side."""
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        value = jnp.stack([jnp.real(value), jnp.imag(value)], axis=-1)
    return value.reshape(-1)


def _joined(flat: Any, dtype: Any) -> Any:
    """The inverse of :func:`_flat`, but for the shape."""
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        return flat
    pairs = flat.reshape(-1, 2)
    return jax.lax.complex(pairs[:, 0], pairs[:, 1])
