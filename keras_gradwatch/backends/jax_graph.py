"""Reading a traced JAX program (a jaxpr): which layer made an equation, what depends on what, where float64 is lost."""

from __future__ import annotations

import functools
import itertools
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive, Var, get_opaque_trace_state, jaxprs_in_params

__all__ = ["Flat", "LayerCall", "evaluate", "in_float64", "inlined", "program_of", "recording"]

_LOW_FLOATS = ("float32", "float16", "bfloat16")
#: Calls whose bodies are looked into; of a hand-written gradient the body is its forward pass.
_CALLS = frozenset(
    {
        "jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_jvp_call",
        "custom_vjp_call", "custom_vjp_call_jaxpr",
    }
)  # fmt: skip
_SCOPE = re.compile(r"gradwatch_(\d+)")

#: Marks where a float enters or leaves a layer. It never runs: our interpreter takes it for the identity.
TAP = Primitive("gradwatch_tap")
TAP.def_abstract_eval(lambda value, **_: value)
TAP.def_impl(lambda value, **_: value)


@contextmanager
def in_float64(wide: bool = True) -> Iterator[None]:
    """Whether JAX keeps 64 bits inside the ``with`` block."""
    with jax.enable_x64(wide):
        yield


@dataclass(eq=False)
class LayerCall:
    """One call of a layer (or functional operation) seen while tracing, at the top level of the program.

    Attributes:
        operation: the layer.
        parent: index of the call it was made in, −1 at the top.
        last_op: grows in the order in which calls end.
        inputs: variables of the program as the call sees them; copies of their own (taps).
        sources: the variables behind ``inputs``; ``None`` for a constant.
        results: variables as the call makes them; ``None`` for a constant.
        outputs: the copies its caller goes on with.
        masked: whether Keras has pinned a mask to what enters.
    """

    operation: Any
    parent: int
    last_op: int = 0
    masked: bool = False
    inputs: list[Any] = field(default_factory=list)
    sources: list[Any] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)

    def add(self, side: str, source: Any, copy: Any) -> None:
        """Note one crossing."""
        source = source if isinstance(source, Var) else None
        (self.sources if side == "in" else self.results).append(source)
        (self.inputs if side == "in" else self.outputs).append(copy)


@contextmanager
def recording(calls: list[LayerCall]) -> Iterator[None]:
    """Record every operation call of this thread made at the present level of tracing.

    Every float tensor that enters or leaves a call passes a tap on the way, so that each call can later be cut out of
    the program on its own. What a call does stands in a name scope of its own.
    """
    import keras
    from keras.src.backend.common.masking import get_keras_mask

    state, thread = get_opaque_trace_state(), threading.get_ident()
    original = keras.Operation.__call__
    open_calls: list[int] = []
    clock = itertools.count()

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread or get_opaque_trace_state() != state:
            return original(self, *args, **kwargs)
        index = len(calls)
        calls.append(LayerCall(self, open_calls[-1] if open_calls else -1))
        calls[index].masked = any(get_keras_mask(leaf) is not None for leaf in keras.tree.flatten(args))
        args, kwargs = _tapped((args, kwargs), index, "in")
        open_calls.append(index)
        try:
            with jax.named_scope(f"gradwatch_{index}"):
                made = original(self, *args, **kwargs)
        finally:
            open_calls.pop()
            calls[index].last_op = next(clock)
        return _tapped(made, index, "out")

    keras.Operation.__call__ = recorded
    try:
        yield
    finally:
        keras.Operation.__call__ = original


def _tapped(structure: Any, call: int, side: str) -> Any:
    """A structure with each float tracer passed through a tap, once."""
    import keras
    from keras.src.backend.common.masking import get_keras_mask, set_keras_mask

    found: dict[int, Any] = {}

    def visit(value: Any) -> Any:
        if not (isinstance(value, jax.core.Tracer) and _is_float(value)):
            return value
        if id(value) not in found:
            found[id(value)] = tap = TAP.bind(value, call=call, side=side)
            if (mask := get_keras_mask(value)) is not None:
                set_keras_mask(tap, mask)
        return found[id(value)]

    leaves = [visit(leaf) for leaf in keras.tree.flatten(structure)]
    return keras.tree.pack_sequence_as(structure, leaves) if found else structure


def program_of(function: Callable[..., Any], values: Sequence[Any]) -> ClosedJaxpr:
    """A function of arrays like these (or of their shapes and dtypes), traced."""
    return jax.make_jaxpr(function)(*[jax.ShapeDtypeStruct(v.shape, v.dtype) for v in values])


def evaluate(
    program: ClosedJaxpr, arguments: Sequence[Any], handle: Callable[[Any, list[Any]], Any] | None = None,
    wanted: Sequence[Any] = (),
) -> list[Any]:  # fmt: skip
    """Run (or trace anew) a program equation by equation; taps are identities.

    Args:
        program: the program.
        arguments: one per input.
        handle: ``handle(equation, inputs)`` gives the outputs of an equation, or ``None`` to have it run as it is.
        wanted: variables whose values are given back, too.

    Returns:
        The program's outputs, then the wanted values.
    """
    jaxpr = program.jaxpr
    values = dict(zip(jaxpr.constvars, program.consts, strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        outputs = handle(equation, inputs) if handle is not None else None
        if outputs is None:
            outputs = inputs if equation.primitive is TAP else bound(equation, inputs)
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in (*jaxpr.outvars, *wanted)]


def inlined(
    program: ClosedJaxpr, arguments: Sequence[Any], handle: Callable[[Any, list[Any]], Any] | None = None
) -> list[Any]:
    """The same, looking into nested calls: what ``jax.jit``, checkpoints and hand-written gradients wrap."""

    def visit(equation: Any, inputs: list[Any]) -> Any:
        if equation.primitive.name in _CALLS:
            with _place_of(equation):
                return inlined(_body(equation), inputs, handle)
        return handle(equation, inputs) if handle is not None else None

    return evaluate(program, arguments, visit)


def bound(equation: Any, inputs: Sequence[Any]) -> list[Any]:
    """One equation, run at the present level of tracing; it keeps its place in the user's code."""
    parameters = equation.primitive.get_bind_params(equation.params)
    functions, parameters = parameters if isinstance(parameters, tuple) else ((), parameters)
    with _place_of(equation), equation.ctx.manager:
        made = equation.primitive.bind(*functions, *inputs, **parameters)
    return list(made) if equation.primitive.multiple_results else [made]


def _place_of(equation: Any) -> AbstractContextManager[None]:
    """What is traced inside is said to come from the place an equation comes from."""
    names = source_info_util.current_name_stack() + equation.source_info.name_stack
    place: AbstractContextManager[None] = source_info_util.user_context(
        equation.source_info.traceback, name_stack=names
    )
    return place


def _body(equation: Any) -> ClosedJaxpr:
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if name in equation.params:
            body = equation.params[name]
            return body if isinstance(body, ClosedJaxpr) else ClosedJaxpr(body, ())
    raise NotImplementedError(f"a call without a body: {equation.primitive.name}")


class Flat:
    """A program with all nested calls written out, and what can be read from it.

    Args:
        program: gives one scalar, the loss.
        count: number of its inputs that move.
    """

    def __init__(self, program: ClosedJaxpr, count: int) -> None:
        self.program = program_of(lambda *values: inlined(program, values), [v.aval for v in program.jaxpr.invars])
        self.moving = list(self.program.jaxpr.invars[:count])
        self.equations = list(self.program.jaxpr.eqns)
        self.loss = self.program.jaxpr.outvars[0]
        self._reach = self._reached()
        self.upstream = self._upstream(floats_only=False)
        self.float_upstream = self._upstream(floats_only=True)

    @functools.cached_property
    def stops(self) -> list[int]:
        """Places of the ``stop_gradient`` that moving tensors pass on their way to the loss."""
        return [
            n for n, equation in enumerate(self.equations)
            if is_stop(equation) and equation.outvars[0] in self.upstream and self.mask(equation.invars[0])
        ]  # fmt: skip

    def mask(self, atom: Any) -> int:
        """Bit mask of the moving tensors on which a value depends."""
        return self._reach.get(atom, 0) if isinstance(atom, Var) else 0

    def owner(self, n: int) -> int:
        """Index of the innermost recorded call that made an equation, −1 for none."""
        return owner_of(self.equations[n])

    def matters(self, n: int, *, floats_only: bool = True) -> bool:
        """Does the loss depend on what an equation makes?"""
        within = self.float_upstream if floats_only else self.upstream
        return any(variable in within for variable in self.equations[n].outvars)

    def _reached(self) -> dict[Any, int]:
        found = {variable: 1 << i for i, variable in enumerate(self.moving)}
        for equation in self.equations:
            mask = 0
            for atom in equation.invars:
                mask |= found.get(atom, 0) if isinstance(atom, Var) else 0
            if mask:
                found.update(dict.fromkeys(equation.outvars, mask))
        return found

    def _upstream(self, *, floats_only: bool) -> set[Any]:
        needed = {self.loss} if isinstance(self.loss, Var) else set()
        for equation in reversed(self.equations):
            if not needed.isdisjoint(equation.outvars):
                needed.update(
                    a for a in equation.invars if isinstance(a, Var) and (_is_float(a.aval) or not floats_only)
                )
        return needed


def owner_of(equation: Any) -> int:
    """Index of the innermost recorded call that made an equation, −1 for none."""
    found = _SCOPE.findall(str(equation.source_info.name_stack))
    return int(found[-1]) if found else -1


def is_stop(equation: Any) -> bool:
    """Is it a stop_gradient that may matter? JAX's own (of the maximum in a softmax, say) change nothing."""
    return equation.primitive.name == "stop_gradient" and not _is_of_jax(equation)


def inside(equation: Any) -> Iterator[Any]:
    """All equations within the bodies of an equation: loops, branches, nested functions."""
    for body in _bodies(equation.params):
        for inner in body.eqns:
            yield inner
            yield from inside(inner)


def _bodies(parameters: Any) -> Iterator[Jaxpr]:
    for body in jaxprs_in_params(parameters):
        yield body.jaxpr if isinstance(body, ClosedJaxpr) else body


def upstream(program: ClosedJaxpr) -> set[Any]:
    """Everything on which the first output of a program depends."""
    needed = {v for v in program.jaxpr.outvars[:1] if isinstance(v, Var)}
    for equation in reversed(program.jaxpr.eqns):
        if not needed.isdisjoint(equation.outvars):
            needed.update(atom for atom in equation.invars if isinstance(atom, Var))
    return needed


def falls(equation: Any) -> bool:
    """Does an equation (or one inside it) take float64 and give a smaller float?"""
    return any(_falls(each) for each in (equation, *inside(equation)))


def _falls(equation: Any) -> bool:
    if not any(_dtype(atom) == "float64" for atom in equation.invars):
        return False
    return not any(_bodies(equation.params)) and any(_dtype(v) in _LOW_FLOATS for v in equation.outvars)


def leaves_floats(equation: Any, depends: Callable[[Any], bool]) -> bool:
    """Does an equation turn a float that depends on something into integers or booleans?"""
    enters = any(isinstance(a, Var) and _is_float(a.aval) and depends(a) for a in equation.invars)
    return enters and not any(_is_float(v.aval) for v in equation.outvars)


def line_of(equation: Any) -> str:
    """File and line of the code that made an equation: the innermost outside of JAX, Keras' operations and us."""
    for frame in _frames(equation):
        if not frame.file_name.startswith(_operations()):
            return f"{frame.file_name}:{frame.line_num}"
    return ""


@functools.cache
def _operations() -> tuple[str, ...]:
    """Folders whose code nobody wants to be pointed at."""
    import keras

    folder = os.path.dirname(keras.__file__)
    inner = [os.path.join(folder, "src", name, "") for name in ("backend", "ops", "utils")]
    return (_JAX, os.path.join(os.path.dirname(os.path.dirname(__file__)), ""), *inner)


_JAX = os.path.join(os.path.dirname(jax.__file__), "")


def _is_of_jax(equation: Any) -> bool:
    """Whether a function of JAX' own called ``stop_gradient``, and not the user or Keras."""
    frames = _frames(equation)
    called = [n for n, f in enumerate(frames) if f.function_name == "stop_gradient" and f.file_name.startswith(_JAX)]
    return bool(called) and called[0] + 1 < len(frames) and frames[called[0] + 1].file_name.startswith(_JAX)


def _frames(equation: Any) -> list[Any]:
    traceback = equation.source_info.traceback
    return list(traceback.frames) if traceback is not None else []


def _is_float(value: Any) -> bool:
    return bool(jax.dtypes.issubdtype(value.dtype, np.floating)) if hasattr(value, "dtype") else False


def _dtype(atom: Any) -> str:
    return str(getattr(atom.aval, "dtype", ""))
