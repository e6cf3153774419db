"""A traced scalar in JAX at a point: its gradients, and its values along lines, each in one compiled call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.interpreters import partial_eval

from keras_gradwatch.backends.jax_graph import Flat, evaluate, in_float64, program_of
from keras_gradwatch.backends.points import Point
from keras_gradwatch.records import Float64Array

#: What runs the model; the rest is a few sums.
_OFTEN = frozenset({"point", "along True", "along False"})

#: Points along lines that one compiled call takes at most.
_MOST_POINTS = 32


class Traced:
    """A scalar as a function of ``moving`` and ``fixed`` values.

    Values and gradients of all moving tensors travel as one flat float64 vector each. Whatever the dtypes of the
    program, it is run with 64 bits allowed; its gradient is traced as training would, since a hand-written one may
    make arrays of the default dtype.

    Args:
        program: gives the scalar from the moving and the fixed values.
        count: number of moving values.
        wide: whether 64 bits are allowed where the user's own code runs.
        fast: compiled to run often, rather than to be compiled soon.
    """

    def __init__(self, program: ClosedJaxpr, count: int, *, wide: bool, fast: bool = True) -> None:
        self.program, self._count, self._fast = program, count, fast
        avals = [v.aval for v in program.jaxpr.invars]
        self.moving = avals[:count]
        self.sizes = [int(np.prod(aval.shape, dtype=np.int64)) for aval in self.moving]
        with in_float64(wide):
            self._gradient = program_of(_with_gradients(program, count), avals)
            self.connected = connected_values(program, count)
            self.flat = Flat(program, count)
        # Compiled on first use, once.
        self._compiled: dict[str, Any] = {}

    def point(self, moving: Sequence[Any], fixed: Sequence[Any]) -> Point:
        """Loss and gradients at a point, kept on the device."""
        loss, slopes, summaries, frozen = self._run("point", self._fetches, list(moving), list(fixed))
        return Point(self, list(moving), list(fixed), float(loss), slopes, np.asarray(summaries), frozen)

    def directions(self, slopes: Any, seed: int, part: tuple[int, int, int] | None) -> tuple[Any, Any, Any]:
        """Random and aligned direction as flat vectors, and the slopes ``[2, T]`` along them."""
        offsets = np.cumsum([0, *self.sizes])
        j, start, stop = part or (0, 0, 0)
        bounds = [offsets[j], offsets[j] + start, offsets[j] + stop, offsets[j + 1]] if part else [0, 0, 0, 0]
        made: tuple[Any, Any, Any] = self._run("directions", self._directions, slopes, _key(seed), np.array(bounds))
        return made

    def losses(self, point: Point, directions: tuple[Any, Any], coefficients: Any, naive: bool) -> Float64Array:
        """Losses at several moved points, in one call where they are not too many."""
        table = np.asarray(coefficients, np.float64)
        found = []
        for start in range(0, len(table), _MOST_POINTS):
            part = table[start : start + _MOST_POINTS]
            padded = np.zeros((_MOST_POINTS, *table.shape[1:]))
            padded[: len(part)] = part
            made = self._run(
                f"along {naive}", self._along(naive), len(part), padded, directions, point.moving, point.fixed,
                point.frozen,
            )  # fmt: skip
            found.append(np.asarray(made)[: len(part)])
        return np.concatenate(found) if found else np.zeros(0)

    def moved(self, moving: list[Any], sizes: Float64Array, seed: int) -> list[Any]:
        """The moving tensors, each jittered by its size (rms)."""
        return list(self._run("moved", self._moved, moving, np.asarray(sizes, np.float64), _key(seed)))

    def distances(self, slopes: Any, other: Any, scale: float) -> Float64Array:
        """Per tensor ‖other / scale − slopes‖."""
        return np.asarray(self._run("distances", self._distances, slopes, other, float(scale)))

    def split(self, flat: Any) -> list[Any]:
        """A flat vector as one tensor per moving tensor."""
        with in_float64():
            return [part.reshape(aval.shape) for part, aval in zip(self._parts(flat), self.moving, strict=True)]

    def _run(self, key: str, function: Callable[..., Any], *values: Any) -> Any:
        with in_float64():
            if key not in self._compiled:
                self._compiled[key] = compiled(function, fast=self._fast and key in _OFTEN)
            return self._compiled[key](*values)

    def _parts(self, flat: Any) -> list[Any]:
        offsets = np.cumsum([0, *self.sizes])
        return [flat[offsets[i] : offsets[i + 1]] for i in range(len(self.sizes))]

    def _fetches(self, moving: list[Any], fixed: list[Any]) -> tuple[Any, Any, Any, list[Any]]:
        loss, *gradients = evaluate(self._gradient, [*moving, *fixed])
        slopes = _flat(gradients)
        return loss, slopes, self._summaries(_flat(moving), slopes), self._frozen([*moving, *fixed])

    def _frozen(self, values: list[Any]) -> list[Any]:
        """What the stop_gradients of the program give at a point."""
        stops = [self.flat.equations[n].outvars[0] for n in self.flat.stops]
        return evaluate(self.flat.program, values, wanted=stops)[1:] if stops else []

    def _summaries(self, values: Any, slopes: Any) -> Any:
        """Per tensor the rms of its value, the norm of its gradient, and how many entries of that are not finite."""
        if not self.sizes:
            return jnp.zeros((0, 3))
        squares = [jnp.sum(part) for part in self._parts(jnp.square(values))]
        bad = [jnp.sum(part) for part in self._parts((~jnp.isfinite(slopes)).astype(np.float64))]
        norms = [jnp.linalg.norm(part) for part in self._parts(slopes)]
        roots = jnp.sqrt(jnp.stack(squares) / np.maximum(self.sizes, 1))
        return jnp.stack([roots, jnp.stack(norms), jnp.stack(bad)], axis=1)

    def _directions(self, slopes: Any, key: Any, bounds: Any) -> tuple[Any, Any, Any]:
        slopes = jnp.where(jnp.isfinite(slopes), slopes, 0.0)  # NaN · 0 would reach every tensor
        # Sizes between 0.5 and 1.5 with random signs: unlike normal numbers none is near zero, so every entry is seen.
        random = jax.random.uniform(key, slopes.shape, np.float64, -1.0, 1.0)
        random = random + 0.5 * jnp.sign(random)
        places = jnp.arange(slopes.size)
        outside = (places >= bounds[0]) & (places < bounds[3]) & ~((places >= bounds[1]) & (places < bounds[2]))
        random = jnp.where(outside, 0.0, random)
        gradients = self._parts(slopes)
        norms = [jnp.linalg.norm(gradient) for gradient in gradients]
        along = [jnp.sum(part) for part in self._parts(slopes * random)]
        aligned = [jnp.where(n > 0, g / jnp.where(n > 0, n, 1.0), 0.0) for g, n in zip(gradients, norms, strict=True)]
        return random, _flat(aligned), jnp.stack([_flat(along), _flat(norms)])

    def _along(self, naive: bool) -> Callable[..., Any]:
        stops = {} if naive else {self.flat.equations[n].outvars[0]: k for k, n in enumerate(self.flat.stops)}

        def along(
            count: Any, table: Any, directions: Any, moving: list[Any], fixed: list[Any], frozen: list[Any]
        ) -> Any:
            def held(equation: Any, inputs: list[Any]) -> Any:
                return [frozen[stops[equation.outvars[0]]]] if equation.outvars[0] in stops else None

            def one(k: Any, found: Any) -> Any:
                pairs = zip(*(self._parts(direction) for direction in directions), strict=True)
                moved = [
                    value
                    + (table[k, 0, i] * random + table[k, 1, i] * aligned).reshape(value.shape).astype(value.dtype)
                    for i, (value, (random, aligned)) in enumerate(zip(moving, pairs, strict=True))
                ]
                loss = evaluate(self.flat.program, [*moved, *fixed], held)[0]
                return found.at[k].set(jnp.asarray(loss, np.float64))

            return jax.lax.fori_loop(0, count, one, jnp.zeros(len(table), np.float64))

        return along

    def _moved(self, moving: list[Any], sizes: Any, key: Any) -> list[Any]:
        noise = self._parts(jax.random.normal(key, (sum(self.sizes),), np.float64))
        return [
            value + (sizes[i] * part).reshape(value.shape).astype(value.dtype)
            for i, (value, part) in enumerate(zip(moving, noise, strict=True))
        ]

    def _distances(self, slopes: Any, other: Any, scale: Any) -> Any:
        return jnp.stack([jnp.linalg.norm(part) for part in self._parts(other / scale - slopes)])


def compiled(function: Callable[..., Any], *, fast: bool) -> Any:
    """A function for ``jax.jit``; what runs seldom on a processor is compiled in two thirds of the time."""
    options = {"xla_backend_optimization_level": 0} if not fast and jax.default_backend() == "cpu" else None
    return jax.jit(function, compiler_options=options)


def _with_gradients(program: ClosedJaxpr, count: int) -> Callable[..., list[Any]]:
    """The scalar and its gradient by each moving value."""

    def scalar(moving: list[Any], fixed: list[Any]) -> Any:
        return evaluate(program, [*moving, *fixed])[0]

    def both(*values: Any) -> list[Any]:
        value, gradients = jax.value_and_grad(scalar)(list(values[:count]), list(values[count:]))
        return [value, *gradients]

    return both


def connected_values(program: ClosedJaxpr, count: int) -> tuple[bool, ...]:
    """Per moving value, whether a change of it reaches the loss as a tangent: zero is told from None here.

    A hand-written gradient counts as reaching, also where it gives zero: a dropped gradient is wrong, not missing.
    """
    found: list[bool] = []

    def linear(*values: Any) -> Any:
        moving, fixed = values[:count], values[count:]
        loss, push = jax.linearize(lambda *m: evaluate(program, [*m, *fixed])[0], *moving)
        tangents = program_of(push, moving)
        found.extend(partial_eval.dce_jaxpr(tangents.jaxpr, [True])[1])
        return loss

    if count:
        program_of(linear, [v.aval for v in program.jaxpr.invars])
    return tuple(found)


def _flat(tensors: Sequence[Any]) -> Any:
    parts = [jnp.ravel(jnp.asarray(t)).astype(np.float64) for t in tensors]
    return jnp.concatenate(parts) if parts else jnp.zeros(0, np.float64)


def _key(seed: int) -> Any:
    return np.array([seed >> 31 & 0x7FFFFFFF, seed & 0x7FFFFFFF], np.uint32)
