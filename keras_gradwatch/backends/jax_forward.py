"""A model's forward pass as a JAX program that gives a few numbers per activation, instead of the activations.

The program is searched for activation functions, wherever they are called: in a layer that has one, in a layer of their
own, or somewhere inside a custom layer. Each is reduced to one number per unit on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.extend.core import Literal, Var

from keras_gradwatch.backends.jax_graph import TAP, LayerCall, evaluate, owner_of, program_of, recording, upstream
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

#: Functions of JAX that are compiled by themselves and carry their names, and single operations.
_FUNCTIONS = {"relu": "relu", "relu6": "relu", "soft_sign": "softsign", "hard_sigmoid": "hard_sigmoid"} | {
    "hard_tanh": "hard_tanh", "sigmoid": "sigmoid", "silu": "", "swish": "", "gelu": "", "hard_silu": "", "mish": "",
    "log_softmax": "", "softmax": "", "softplus": "", "leaky_relu": "", "elu": "", "selu": "", "celu": "",
}  # fmt: skip
_OPERATIONS = {"logistic": "sigmoid", "tanh": "tanh"}
_SHAPE_OPS = frozenset({"reshape", "squeeze", "expand_dims", "transpose", "convert_element_type", "copy"})


class Forward:
    """The traced forward pass of a batch as a function of ``moving`` (weights, float inputs) and ``fixed`` tensors.

    Args:
        losses: ``losses(moving, fixed) -> (loss, loss with shuffled predictions)``; run once, while tracing.
        moving, fixed: arrays or tensors giving shapes and dtypes.
        weights: number of moving tensors that are weights; the others are float inputs.
        state: number of fixed tensors that are not data.
        any_batch: cannot be had, since a JAX program is made for one number of samples.

    Raises:
        NotImplementedError: ``any_batch`` is asked for.
    """

    def __init__(
        self, losses: Callable[[list[Any], list[Any]], Any], moving: Sequence[Any], fixed: Sequence[Any], *,
        weights: int, state: int, any_batch: bool = True,
    ) -> None:  # fmt: skip
        if any_batch:
            raise NotImplementedError("a JAX program is made for one number of samples")
        self._count, self._weights = len(moving), weights
        calls: list[LayerCall] = []

        def traced(*values: Any) -> list[Any]:
            with recording(calls):
                found = losses(list(values[: self._count]), list(values[self._count :]))
            return [jnp.asarray(value) for value in found]

        values = [jnp.asarray(value) for value in (*moving, *fixed)]
        self._program = program_of(traced, values)
        reader = _Reader(self._program, calls, self._count)
        self.sites, self.sequences = list(reader.sites(weights)), list(reader.sequences())
        self._sources = reader.sources
        self._function = jax.jit(self._numbers)

    def read(self, moving: Sequence[Any], fixed: Sequence[Any]) -> Readings:
        """One pass at given values. One small array per kind of number leaves the device."""
        values = [jnp.asarray(value) for value in (*moving, *fixed)]
        limits, ceilings, times, inputs, losses = jax.device_get(
            self._function(values[: self._count], values[self._count :])
        )
        sizes = [float(sum(np.prod(t.aval.shape) for t in site.tensors)) for site in self.sites]
        wide = [[np.asarray(n, np.float64) for n in column] for column in (limits, ceilings, times, inputs)]
        return Readings(wide[0], sizes, wide[1], wide[2], wide[3], float(losses[0]), float(losses[1]))

    def _numbers(self, moving: list[Any], fixed: list[Any]) -> Any:
        """Every number to read."""
        taps = [sequence.tensor for sequence in self.sequences]
        wanted = [v for site in self.sites for t in site.tensors for v in (t, self._sources.get(t, t))]

        def run(shifts: list[Any]) -> Any:
            by_tap = dict(zip(taps, shifts, strict=True))
            loss, *rest = evaluate(
                self._program, [*moving, *fixed],
                lambda e, values: [values[0] + by_tap[e.outvars[0]]] if e.outvars[0] in by_tap else None, wanted,
            )  # fmt: skip
            return loss, (loss, *rest)

        zeros = [jnp.zeros(tap.aval.shape, tap.aval.dtype) for tap in taps]
        reaching = upstream(self._program)
        gradients, found = jax.grad(run, has_aux=True)(zeros) if taps else ([], run([])[1])
        losses, values = found[:2], iter(found[2:])
        pairs = [[(next(values), next(values)) for _ in site.tensors] for site in self.sites]
        return (
            [
                sum(_at_limit(tensor, site) for tensor, _ in found)
                for site, found in zip(self.sites, pairs, strict=True)
            ],
            [self._ceiling(site, [s for _, s in found]) for site, found in zip(self.sites, pairs, strict=True)],
            [_times(g, known=tap in reaching) for g, tap in zip(gradients, taps, strict=True)],
            [_scale(value) for value in moving[self._weights :]],
            losses,
        )

    def _ceiling(self, site: Site, entering: Sequence[Any]) -> Any:
        """Per unit the largest value that enters a relu; NaN where the program does not show what enters."""
        if site.kind != "relu" or any(tensor not in self._sources for tensor in site.tensors):
            return jnp.full((int(site.tensors[0].aval.shape[site.axis]),), np.nan)
        peaks = [jnp.max(t.astype(np.float32), axis=_other_axes(t.ndim, site.axis)) for t in entering]
        return jnp.max(jnp.stack(peaks), axis=0)


class _Reader:
    """What can be read from a traced forward pass: activation functions, and what enters recurrent layers."""

    def __init__(self, program: Any, calls: list[LayerCall], count: int) -> None:
        self.calls = calls
        self.sources: dict[Any, Any] = {}
        self._equations = list(program.jaxpr.eqns)
        self._reach = _reach(program, count)
        self._taps: dict[Any, Any] = {}
        for equation in self._equations:
            if equation.primitive is TAP:
                call = calls[equation.params["call"]]
                call.add(equation.params["side"], equation.invars[0], equation.outvars[0])
                self._taps[equation.outvars[0]] = equation.invars[0]

    def sites(self, weights: int) -> Iterator[Site]:
        """Every activation function called inside a layer, in network order."""
        outputs = self._outputs()
        for group in site_groups(self._found(), self.calls):
            operation, kind, first = group[0]
            shape = first.aval.shape
            axis = unit_axis(operation, len(shape))
            tensors = tuple(tensor for _, _, tensor in group if len(tensor.aval.shape) == len(shape))
            if len(shape) < 2 or not shape[axis]:
                continue
            bits = self._reach.get(first, 0)
            upstream = tuple(i for i in range(weights) if bits >> i & 1)
            yield Site(operation, kind, tensors, axis, any(self._behind(t) in outputs for t in tensors), upstream)

    def sequences(self) -> Iterator[Recurrence]:
        """What enters the outermost recurrent layers, if it is a sequence."""
        for call in sequence_calls(self.calls):
            tensor = call.inputs[0]
            if len(tensor.aval.shape) == 3 and tensor.aval.shape[1]:
                yield Recurrence(call.operation, tensor, call.masked)

    def _found(self) -> Iterator[tuple[int, str, Any]]:
        """``(call index, kind, output)`` of every activation function, in the order of the program."""
        recurrent = recurrent_inside(self.calls)
        declared = [declared_kind(call.operation) for call in self.calls]
        places = {v: n for n, equation in enumerate(self._equations) for v in equation.outvars}
        seen: list[tuple[int, int, str, Any]] = []
        for index, call in enumerate(self.calls):
            if index in recurrent and not is_recurrent(call.operation):
                continue
            if declared[index] in RANGES and call.outputs:
                self._note_source(call.outputs[0], str(declared[index]))
                seen.append((places[call.outputs[0]], index, str(declared[index]), call.outputs[0]))
        for position, equation in enumerate(self._equations):
            index = owner_of(equation)
            if index < 0 or index in recurrent or declared[index] is not None:
                continue
            kind = self._kind_of(equation)
            if kind and (kind == "relu" or not self._is_part_of_another(equation)):
                self._note_source(equation.outvars[0], kind)
                seen.append((position, index, kind, equation.outvars[0]))
        for _, index, kind, tensor in sorted(seen, key=lambda entry: entry[0]):
            yield index, kind, tensor

    def _note_source(self, tensor: Any, kind: str) -> None:
        """Remember what enters a relu."""
        maker = self._maker(self._behind(tensor))
        if kind != "relu" or maker is None or self._kind_of(maker) != "relu":
            return
        entering = [a for a in maker.invars if isinstance(a, Var) and a.aval.shape == tensor.aval.shape]
        if len(entering) == 1:
            self.sources[tensor] = entering[0]

    def _behind(self, variable: Any) -> Any:
        """A value before the taps it passed."""
        while variable in self._taps:
            variable = self._taps[variable]
        return variable

    def _maker(self, variable: Any) -> Any:
        return next((e for e in self._equations if variable in e.outvars), None)

    def _outputs(self) -> set[Any]:
        """The model's outputs, and what they are but for their shape."""
        roots = [call for call in self.calls if call.parent == -1]
        found: set[Any] = set()
        waiting = list(roots[-1].outputs) if roots else []
        while waiting:
            variable = self._behind(waiting.pop())
            found.add(variable)
            maker = self._maker(variable) if isinstance(variable, Var) else None
            if maker is not None and maker.primitive.name in _SHAPE_OPS:
                waiting.append(maker.invars[0])
        return found

    def _kind_of(self, equation: Any) -> str | None:
        """Kind of activation function that an equation is, also written out as a maximum."""
        name = equation.primitive.name
        if name == "max" and any(_is_constant(atom, 0.0) for atom in equation.invars):
            return "relu"
        called = str(equation.params.get("name", "")) or _called(equation)
        if called in ("clip", "maximum") and len(equation.invars) > 1 and _is_constant(equation.invars[1], 0.0):
            return "relu"
        return _FUNCTIONS.get(called) or _OPERATIONS.get(name)

    def _is_part_of_another(self, equation: Any) -> bool:
        """A gate (``sigmoid(x) * y``) or the tanh of a written-out gelu."""
        output = equation.outvars[0]
        readers = [e for e in self._equations if output in [a for a in e.invars if isinstance(a, Var)]]
        names = {reader.primitive.name for reader in readers}
        adds_one = any(r.primitive.name == "add" and any(_is_constant(a, 1.0) for a in r.invars) for r in readers)
        return "mul" in names or adds_one


def _called(equation: Any) -> str:
    """Name of the function behind a hand-written gradient."""
    body = equation.params.get("call_jaxpr")
    debug = getattr(getattr(body, "jaxpr", body), "debug_info", None)
    return str(getattr(debug, "func_name", "") or "").split(" ")[0]


def _reach(program: Any, count: int) -> dict[Any, int]:
    """Bit mask of the moving tensors on which each variable depends, at the top level."""
    found = {variable: 1 << i for i, variable in enumerate(program.jaxpr.invars[:count])}
    for equation in program.jaxpr.eqns:
        mask = 0
        for atom in equation.invars:
            mask |= found.get(atom, 0) if isinstance(atom, Var) else 0
        if mask:
            found.update(dict.fromkeys(equation.outvars, mask))
    return found


def _is_constant(atom: Any, number: float) -> bool:
    return isinstance(atom, Literal) and np.size(atom.val) == 1 and float(np.asarray(atom.val)) == number


def _at_limit(tensor: Any, site: Site) -> Any:
    """Per unit the number of entries at a limit of the range."""
    low, high = RANGES[site.kind]
    if site.kind == "relu":
        hits = tensor == 0
    else:
        margin = MARGIN * (high - low)
        hits = (tensor < low + margin) | (tensor > high - margin)
    return jnp.sum(hits.astype(np.float32), axis=_other_axes(tensor.ndim, site.axis))


def _times(gradient: Any, *, known: bool) -> Any:
    """Norm of the gradient at every time step; NaN where the loss does not depend on them."""
    norms = jnp.sqrt(jnp.sum(jnp.square(gradient.astype(np.float32)), axis=(0, 2)))
    return norms if known else jnp.full_like(norms, np.nan)


def _scale(value: Any) -> Any:
    wide = value.astype(np.float32)
    return jnp.stack([jnp.mean(wide), jnp.std(wide), jnp.max(jnp.abs(wide))])


def _other_axes(rank: int, axis: int) -> tuple[int, ...]:
    return tuple(i for i in range(rank) if i != axis % rank)
