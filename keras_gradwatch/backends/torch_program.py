"""A loss that code on torch computes: its value, its gradients, its values along lines, and its layers each alone.

Nothing is compiled: every evaluation runs the user's own code again, with the random state put back, so that
hand-written gradients and branches on values are what they are in training. One recorded run tells what depends on
what.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from keras_gradwatch.backends.points import Line, Point
from keras_gradwatch.backends.torch_graph import Graph, LayerCall, Tape, recording, to_tensor, undisturbed
from keras_gradwatch.backends.torch_point import Traced, gradients_of, running
from keras_gradwatch.records import Float64Array

__all__ = ["LayerCall", "Line", "Parts", "Point", "Program", "Traced", "in_float32", "location_of"]

#: Index of what lies outside of all layers: the loss.
OUTSIDE = -1
#: Stands for the norms of all outputs among the tensors asked for.
_NORMS = "norms"

#: Operations that draw random numbers.
_DRAWS = ("bernoulli", "normal", "uniform", "rand", "multinomial", "native_dropout", "exponential", "rrelu")


@dataclass(frozen=True)
class Parts:
    """All layers at once, each cut off from the others: Σ scale · ⟨random cotangent, output⟩ over all their outputs.

    Attributes:
        traced: that sum as a function of the borders between layers, then of the weights.
        borders: numbers of the taps that enter a layer's own operations, fed one by one.
        owners: per border the index of the call it enters (:data:`OUTSIDE`: the loss).
        labels: per border what it is to that call, where that needs saying.
        weights: indices of the moving tensors among ``traced.moving``, after the borders.
        makers: per output the index of the call that makes it; the first output is the loss itself.
        norms: stands for the norm of each output.
    """

    traced: Traced
    borders: list[int]
    owners: list[int]
    labels: list[str]
    weights: list[int]
    makers: list[int]
    norms: str = _NORMS

    def point(self, borders: Sequence[Any], scales: Float64Array, moving: Sequence[Any], fixed: Sequence[Any]) -> Point:
        """The sum at a point, for given scales of the outputs; NaN for code that takes gradients across the borders."""
        values = [*borders, *moving], [torch.as_tensor(scales), *fixed]
        try:
            return self.traced.point(*values)
        except RuntimeError:
            return self.traced.nowhere(*values)


@dataclass(frozen=True, slots=True)
class _Crossing:
    """What one tap stands for: whether its tensor is itself a tap, whether the loss depends on it, and its shape."""

    passes_on: bool
    needed: bool
    shape: tuple[int, ...]


class Program:
    """The loss of one batch as a function of ``moving`` (weights, float inputs) and ``fixed`` tensors.

    Args:
        loss: ``loss(moving, fixed) -> scalar tensor``; run at every evaluation.
        moving, fixed: arrays or tensors: values to record one run at.
        dtype: float dtype of the moving tensors, ``None`` to keep their own.
        surroundings: opened around every run of the code.
    """

    def __init__(
        self, loss: Callable[[list[Any], list[Any]], Any], moving: Sequence[Any], fixed: Sequence[Any],
        dtype: str | None, surroundings: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:  # fmt: skip
        from keras.src.backend.torch.core import get_device, to_torch_dtype

        self._loss, self._surroundings = loss, surroundings
        self._device = get_device()
        self._count = len(moving)
        wide = to_torch_dtype(dtype) if dtype else None
        tensors = [torch.as_tensor(value) for value in (*moving, *fixed)]
        self._dtypes = [wide if wide is not None and t.is_floating_point() else t.dtype for t in tensors]
        self._shapes = [tuple(value.shape) for value in tensors[: self._count]]
        self.calls: list[LayerCall] = []
        self._crossings: list[_Crossing] = []
        self._generators: list[Any] = []
        values = self.feed(moving, fixed)
        connected = self._record(*values)
        self.main = Traced(self._evaluate, self._shapes, surroundings, self._stops)
        self.main.connected = connected

    # -- running the code ----------------------------------------------------------------------------------------------

    def _evaluate(self, moving: list[Any], fixed: list[Any], mode: Any) -> Any:
        if mode is not None:
            return self._tapped(moving, fixed, mode, lambda number, value: value)
        with undisturbed(self._generators):
            return self._scalar(moving, fixed)

    def _tapped(self, moving: list[Any], fixed: list[Any], mode: Any, tap: Callable[[int, Any], Any]) -> Any:
        with undisturbed(self._generators), recording([], lambda n, call, value: tap(n, value), mode), running(mode):
            return self._scalar(moving, fixed)

    def _scalar(self, moving: list[Any], fixed: list[Any]) -> Any:
        value = torch.as_tensor(self._loss(moving, fixed))
        if value.dim() != 0:
            raise ValueError(f"the loss has shape {tuple(value.shape)}; a scalar was expected")
        return value

    def _record(self, moving: list[Any], fixed: list[Any]) -> tuple[bool, ...]:
        """One run under a tape, and everything that is to be told from it."""
        tape, taps = Tape(), []
        leaves = [value.detach().requires_grad_() for value in moving]

        def tap(number: int, call: int, value: Any) -> Any:
            taps.append((value, _alias(value)))
            return taps[-1][1]

        with self._surroundings(), torch.enable_grad():
            with undisturbed(), recording(self.calls, tap, tape), tape:
                loss = self._scalar(leaves, fixed)
            for generator, state in tape.generators:
                generator.set_state(state)
            connected = tuple(gradient is not None for gradient in gradients_of(loss, leaves))
        graph = Graph(tape, leaves, loss)
        self._generators = [generator for generator, _ in tape.generators]
        copies = {id(copy) for _, copy in taps} | {id(loss)}
        self._crossings = [
            _Crossing(id(value) in copies, graph.is_needed(copy), tuple(copy.shape)) for value, copy in taps
        ]
        stops = list(graph.stops())
        self._stops = [(node.place, number) for node, number, _ in stops]
        self._stop_calls = [(mask, node.call) for node, _, mask in stops]
        self._leaks = [(mask, node.call, node.kind, node.line) for node, mask in graph.leaks()]
        reach = graph.depends(loss)
        self._reached = tuple(bool(reach >> i & 1) for i in range(self._count))
        self._cuts = [next(((n.call, n.kind) for n in graph.cuts(i)), None) for i in range(self._count)]
        self._readers = [graph.readers(leaf) for leaf in leaves]
        # Draws in float64 take other numbers from the same state than those of the training step.
        self._draws_wide = any(
            node.kind.startswith(_DRAWS) and any(v.dtype == torch.float64 for v in node.outputs) for node in graph.nodes
        )
        return connected

    # -- what the record tells -----------------------------------------------------------------------------------------

    @property
    def connected(self) -> tuple[bool, ...]:
        """Per moving tensor: False where the gradient is None."""
        return self.main.connected

    @property
    def reached(self) -> tuple[bool, ...]:
        """Per moving tensor: does the loss *value* depend on it, gradient or not?"""
        return self._reached

    @property
    def declares(self) -> bool:
        """True when something that moves is held constant (``detach``, ``no_grad``) on its way to the loss."""
        return bool(self._stops)

    @property
    def draws(self) -> bool:
        """True when random numbers are drawn in float64: training draws others."""
        return self._draws_wide

    @property
    def leaks(self) -> list[str]:
        """Per moving tensor: the operation through which it falls below float64 on its way to the loss, or ''."""
        found = [""] * self._count
        for mask, call, kind, where in self._leaks:
            layer = f" in layer {self.calls[call].operation.name}" if call != OUTSIDE else ""
            name = "cast" if kind == "_to_copy" else kind
            for i in range(self._count):
                if mask >> i & 1 and not found[i]:
                    found[i] = f"{name} to a smaller float{layer} ({where})"
        return found

    @property
    def hidden_stops(self) -> list[bool]:
        """Per moving tensor: does it pass a constant that could not be held, since the code ran differently?"""
        astray = self.main.astray
        return [astray and any(mask >> i & 1 for mask, _ in self._stop_calls) for i in range(self._count)]

    def stop_call(self, index: int) -> LayerCall | None:
        """The call that holds the first constant a moving tensor meets."""
        found = next((call for mask, call in self._stop_calls if mask >> index & 1), OUTSIDE)
        return None if found == OUTSIDE else self.calls[found]

    def cut(self, index: int) -> tuple[LayerCall | None, str]:
        """Where the gradient of a moving tensor stops: ``(layer call or None, operation)``; '' if nowhere."""
        cut = self._cuts[index]
        if cut is None:
            return None, ""
        call, kind = cut
        return None if call == OUTSIDE else self.calls[call], "StopGradient" if kind == "detach" else kind

    def consumers(self, index: int) -> list[int]:
        """The innermost calls that read a moving tensor directly."""
        return self._readers[index]

    # -- values --------------------------------------------------------------------------------------------------------

    def feed(self, moving: Sequence[Any], fixed: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Values as tensors of the dtypes the record was made with."""
        given = zip((*moving, *fixed), self._dtypes, strict=True)
        values = [to_tensor(value, dtype, self._device) for value, dtype in given]
        return values[: self._count], values[self._count :]

    def values(self, wanted: Sequence[Any], moving: Sequence[Any], fixed: Sequence[Any]) -> list[Any]:
        """Values of borders, and of the norms of all outputs, at a point."""
        leaves = [value.detach().requires_grad_() for value in moving]
        sources: dict[int, Any] = {}

        def tap(number: int, value: Any) -> Any:
            sources[number] = value.detach()
            return value

        with self._surroundings(), torch.enable_grad():
            loss = self._tapped(leaves, list(fixed), None, tap).detach()
        exits = [loss, *(sources[number] for _, number in self._outputs())]
        norms = np.array([float(torch.linalg.vector_norm(value.double())) for value in exits])
        return [norms if number == _NORMS else sources[number] for number in wanted]

    @functools.cached_property
    def parts(self) -> Parts | None:
        """Every layer and the loss, each between its own inputs and outputs; None for code without layers."""
        found = [(k, number, label) for k in self._indices() for number, label in self._entries(k)]
        if not found:
            return None
        owners, borders, labels = [k for k, _, _ in found], [n for _, n, _ in found], [label for _, _, label in found]
        outputs = self._outputs()

        def total(moving: list[Any], fixed: list[Any], mode: Any) -> Any:
            given = dict(zip(borders, moving, strict=False))
            sources: dict[int, Any] = {}

            def tap(number: int, value: Any) -> Any:
                sources[number] = value
                return given.get(number, value)

            loss = self._tapped(moving[len(borders) :], fixed[1:], mode, tap)
            dots = [loss.double(), *(_random_dot(sources[n], k) for k, (_, n) in enumerate(outputs))]
            return torch.stack(dots) @ fixed[0].to(loss.device)

        shapes = [self._crossings[number].shape for number in borders]
        traced = Traced(total, [*shapes, *self._shapes], self._surroundings, self._stops)
        makers = [OUTSIDE, *(k for k, _ in outputs)]
        return Parts(traced, borders, owners, labels, list(range(self._count)), makers)

    def finite(self, moving: Sequence[Any], fixed: Sequence[Any]) -> list[tuple[int, tuple[bool, bool, bool, bool]]]:
        """Per call (the loss last): are its inputs, outputs, output gradients and input gradients finite?"""
        leaves = [value.detach().requires_grad_() for value in moving]
        sources: dict[int, Any] = {}
        copies: dict[int, Any] = {}

        def tap(number: int, value: Any) -> Any:
            sources[number], copies[number] = value, _alias(value)
            return copies[number]

        with self._surroundings(), torch.enable_grad():
            loss = self._tapped(leaves, list(fixed), None, tap)
            wanted = {n: copy for n, copy in copies.items() if copy.requires_grad}
            found = gradients_of(loss, [*wanted.values(), *leaves])
        slopes = dict(zip(wanted, found, strict=False))
        of_weights = found[len(wanted) :]
        rows: list[tuple[int, tuple[bool, bool, bool, bool]]] = []
        for k in [*(k for k in self._indices() if k != OUTSIDE), OUTSIDE]:
            entries = [number for number, _ in self._entries(k)]
            weights = [of_weights[i] for i in range(self._count) if self.consumers(i) == [k]]
            exits = [sources[n] for n in self._exits(k)] + ([loss] if k == OUTSIDE else [])
            backward = [slopes.get(n) for n in self._exits(k)]
            inner = [*(slopes.get(n) for n in entries), *weights]
            entered = [copies[n] for n in entries]
            rows.append((k, (_all_finite(entered), _all_finite(exits), _all_finite(backward), _all_finite(inner))))
        return rows

    def _indices(self) -> list[int]:
        return [OUTSIDE, *(k for k in range(len(self.calls)) if self._matters(k))]

    def compiled_summaries(self, moving: Sequence[Any], fixed: Sequence[Any]) -> Float64Array | None:
        """None: there is no XLA, there are no two modes to compare."""
        return None

    def uses(self, k: int) -> bool:
        """Does the loss depend on what a call returns?"""
        return self._matters(k)

    def _matters(self, k: int) -> bool:
        return any(self._crossings[number].needed for number in self.calls[k].outputs)

    def _children(self, parent: int) -> list[LayerCall]:
        return [call for k, call in enumerate(self.calls) if call.parent == parent and self._matters(k)]

    def _entries(self, k: int) -> list[tuple[int, str]]:
        """What enters a call's own operations: its inputs, and what the layers within it return."""
        own = self.calls[k].inputs if k != OUTSIDE else ()
        found = [(tap, "" if len(own) == 1 else f"its input {n} of 0…{len(own) - 1}") for n, tap in enumerate(own)]
        for child in self._children(k):
            found += [(n, f"the output of {child.operation.name}" if k != OUTSIDE else "") for n in child.outputs]
        return found

    def _exits(self, k: int) -> list[int]:
        """What a call's own operations make: its results, and what it hands to the layers within it."""
        found = [] if k == OUTSIDE else list(self.calls[k].outputs)
        return found + [number for child in self._children(k) for number in child.inputs]

    def _outputs(self) -> list[tuple[int, int]]:
        """``(call, tap)`` of every exit that is not merely passed on."""
        return [(k, n) for k in self._indices() for n in self._exits(k) if not self._crossings[n].passes_on]


def in_float32() -> AbstractContextManager[None]:
    """Random functions draw inside as they do in training: nothing needs to be done for it here."""
    return nullcontext()


def location_of(error: BaseException) -> str:
    """File and line of the innermost frame of an error that lies outside Keras, torch and this package."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not any(f"/{name}/" in frame.filename for name in ("keras", "torch", "keras_gradwatch")):
            return f"{frame.filename}:{frame.lineno}"
    return ""


def _alias(value: Any) -> Any:
    """The same tensor under another name. A copy could lie differently in memory, and other operations would run."""
    return value.view_as(value)


def _random_dot(tensor: Any, seed: int) -> Any:
    generator = torch.Generator(device=tensor.device).manual_seed(seed)
    cotangent = torch.randn(tensor.shape, generator=generator, dtype=torch.float64, device=tensor.device)
    return (tensor.double() * cotangent).sum()


def _all_finite(tensors: Sequence[Any]) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors if tensor is not None)
