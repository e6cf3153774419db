"""What one run of a model's code on torch leaves behind: operations, who made them, and what depends on what.

torch has no graph to read: the code simply runs. A :class:`Tape` notes every operation below autograd while a loss is
computed once, and :class:`Graph` answers from it what depends on what, what autograd treats as a constant, and where
float64 is lost. Later runs find the same places again by counting operations.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from keras_gradwatch.backends.torch_modules import modules_bound

_LOW_FLOATS = (torch.float32, torch.float16, torch.bfloat16)

#: Operations whose result has the form of their input and nothing of its value.
_FORM_ONLY = ("empty", "zeros", "ones", "full", "rand", "new_")

#: Frames that are not the user's.
_LIBRARIES = ("keras", "torch", "keras_gradwatch")

#: ``tap(number, call, tensor) -> tensor``: what is done to a float tensor that enters or leaves a call.
Tap = Callable[[int, int, Any], Any]


@dataclass(slots=True)
class LayerCall:
    """One call of a layer (or functional operation).

    Attributes:
        operation: the layer.
        inputs, outputs: numbers of the taps through which float tensors enter and leave it.
        first_op, last_op: range of its operations.
        parent: index of the call it was made in, −1 at the top.
    """

    operation: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    first_op: int
    last_op: int
    parent: int


#: Where an operation ran: index of the innermost open call, its name, how many of that name ran in this call before.
Place = tuple[int, str, int]


@dataclass(frozen=True, slots=True)
class Node:
    """One operation that ran.

    Attributes:
        function: the ATen operation.
        inputs, outputs: its tensors.
        place: where it ran.
        hidden: it ran inside the forward pass of a hand-written gradient, of which autograd sees nothing.
        line: file and line of the user's code, noted where float64 is lost.
        numbers: plain numbers among its arguments.
    """

    function: Any
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    place: Place
    hidden: bool
    line: str
    numbers: tuple[float, ...]

    @property
    def call(self) -> int:
        """Index of the innermost open call, −1 for none."""
        return self.place[0]

    @property
    def kind(self) -> str:
        """Name of the operation, such as ``detach``."""
        return str(self.function.overloadpacket.__name__)


class Following(TorchDispatchMode):  # type: ignore[misc]
    """Runs operations below autograd one by one, and knows where each stands.

    Attributes:
        open_calls: indices of the calls that are running, the innermost last.
        tapping: what runs belongs to a tap and has no place.
    """

    def __init__(self) -> None:
        super().__init__()
        self.open_calls: list[int] = []
        self.tapping = False
        self._counts: dict[tuple[int, str], int] = {}

    def place_of(self, func: Any) -> Place:
        """Where an operation stands that runs now."""
        call, name = self.open_calls[-1] if self.open_calls else -1, str(func)
        ordinal = self._counts.get((call, name), 0)
        if not self.tapping:
            self._counts[call, name] = ordinal + 1
        return call, name, ordinal


class Tape(Following):
    """Notes every operation that runs while it is open."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.generators: list[tuple[Any, Any]] = []
        self._functions = 0

    def __enter__(self) -> Any:
        self._original = torch.autograd.Function.__dict__["apply"]
        torch.autograd.Function.apply = classmethod(self._applied)
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        torch.autograd.Function.apply = self._original
        super().__exit__(*raised)

    def _applied(self, cls: Any, *args: Any, **kwargs: Any) -> Any:
        self._functions += 1
        try:
            return self._original.__func__(cls, *args, **kwargs)
        finally:
            self._functions -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        generator = kwargs.get("generator")
        if generator is not None and not any(generator is known for known, _ in self.generators):
            self.generators.append((generator, generator.get_state()))
        made = func(*args, **kwargs)
        inputs, outputs = tuple(_tensors((*args, *kwargs.values()))), tuple(_tensors((made,)))
        line = _user_line() if _falls(inputs, outputs) else ""
        numbers = tuple(value for value in args if type(value) in (int, float))
        self.nodes.append(Node(func, inputs, outputs, self.place_of(func), self._functions > 0, line, numbers))
        return made


class Held(Following):
    """Collects the outputs of operations at given places, or puts earlier ones in their stead.

    Args:
        places: places and output numbers.
        values: what to put there; ``None`` to collect.
    """

    def __init__(self, places: Sequence[tuple[Place, int]], values: Sequence[Any] | None = None) -> None:
        super().__init__()
        self.collected: list[Any] = [None] * len(places)
        self._values, self._astray = values, False
        self._waiting: dict[Place, list[tuple[int, int]]] = {}
        for number, (place, output) in enumerate(places):
            self._waiting.setdefault(place, []).append((number, output))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for number, output in self._waiting.pop(self.place_of(func), ()) if not self.tapping else ():
            several = isinstance(made, tuple | list)
            found = made[output] if several else made
            if self._values is None:
                self.collected[number] = found.clone()
            elif self._values[number].shape != found.shape:
                self._astray = True
            elif func._schema.is_mutable:
                found.copy_(self._values[number])
            elif several:
                made = type(made)(v if k != output else self._values[number].clone() for k, v in enumerate(made))
            else:
                made = self._values[number].clone()
        return made

    @property
    def missed(self) -> bool:
        """The code did not run the operations that were looked for."""
        return self._astray or bool(self._waiting)


@contextmanager
def recording(calls: list[LayerCall], tap: Tap, mode: Any) -> Iterator[None]:
    """Record every operation call of this thread, and pass each float tensor at its border through ``tap``."""
    import keras

    thread, original = threading.get_ident(), keras.Operation.__call__
    open_calls: list[int] = mode.open_calls if mode is not None else []
    taps = 0

    def crossing(structure: Any, call: int) -> tuple[Any, tuple[int, ...]]:
        nonlocal taps
        found: dict[int, tuple[int, Any]] = {}
        leaves = keras.tree.flatten(structure)
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and id(leaf) not in found:
                tapped = _marked(tap(taps, call, leaf), leaf)
                found[id(leaf)] = taps, tapped
                taps += 1
        if found:
            leaves = [found[id(leaf)][1] if id(leaf) in found else leaf for leaf in leaves]
            structure = keras.tree.pack_sequence_as(structure, leaves)
        return structure, tuple(number for number, _ in found.values())

    def tapped(structure: Any, call: int) -> tuple[Any, tuple[int, ...]]:
        if mode is not None:
            mode.tapping = True
        try:
            return crossing(structure, call)
        finally:
            if mode is not None:
                mode.tapping = False

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread or _is_symbolic((args, kwargs)):
            return original(self, *args, **kwargs)
        index = len(calls)
        first = len(mode.nodes) if isinstance(mode, Tape) else 0
        call = LayerCall(self, (), (), first, first, open_calls[-1] if open_calls else -1)
        calls.append(call)
        open_calls.append(index)
        try:
            (args, kwargs), call.inputs = tapped((args, kwargs), index)
            made = original(self, *args, **kwargs)
        finally:
            open_calls.pop()
        made, call.outputs = tapped(made, index)
        call.last_op = len(mode.nodes) if isinstance(mode, Tape) else 0
        return made

    keras.Operation.__call__ = recorded
    try:
        yield
    finally:
        keras.Operation.__call__ = original


def _is_symbolic(structure: Any) -> bool:
    import keras

    return any(
        isinstance(leaf, keras.KerasTensor) or (isinstance(leaf, torch.Tensor) and leaf.is_meta)
        for leaf in keras.tree.flatten(structure)
    )


def _marked(tensor: Any, like: Any) -> Any:
    """A tensor with what Keras has pinned to another (masks)."""
    if tensor is not like:
        for name, value in vars(like).items():
            if name.startswith("_keras"):
                setattr(tensor, name, value)
    return tensor


@contextmanager
def undisturbed(generators: Sequence[Any] = ()) -> Iterator[None]:
    """Random numbers drawn inside are drawn again by whoever comes next, and torch modules keep their state."""
    states = [(generator, generator.get_state()) for generator in generators]
    cuda = torch.cuda.is_initialized()
    with modules_bound(), torch.random.fork_rng(devices=range(torch.cuda.device_count()) if cuda else ()):
        try:
            yield
        finally:
            for generator, state in states:
                generator.set_state(state)


class Graph:
    """What depends on what in one recorded run.

    Args:
        tape: the record, whose tensors are alive.
        moving: tensors that were moved.
        loss: the result.
    """

    def __init__(self, tape: Tape, moving: Sequence[Any], loss: Any) -> None:
        self.nodes, self._loss = tape.nodes, loss
        self._bits: dict[int, int] = {}
        for i, value in enumerate(moving):
            self._bits[_storage(value)] = self._bits.get(_storage(value), 0) | 1 << i
        for node in self.nodes:
            mask = 0
            if not node.kind.startswith(_FORM_ONLY):
                for value in node.inputs:
                    mask |= self._bits.get(_storage(value), 0)
            if mask:
                for value in node.outputs:
                    self._bits[_storage(value)] = self._bits.get(_storage(value), 0) | mask
        # What a backward pass needs is kept detached, and gets its history back when a second one asks for it.
        pairs = ((node, value) for node in self.nodes if node.kind == "detach" for value in node.inputs)
        self._resumed = {id(value) for node, value in pairs if value.is_leaf and not node.outputs[0].is_leaf}
        self.needed = self._behind(floats_only=False)
        self.needed_floats = self._behind(floats_only=True)

    def depends(self, value: Any) -> int:
        """Bit mask of the moving tensors on which a value depends."""
        return self._bits.get(_storage(value), 0)

    def is_needed(self, value: Any) -> bool:
        """Does the loss depend on this tensor?"""
        return id(value) in self.needed

    def stops(self) -> Iterator[tuple[Node, int, int]]:
        """``(node, output number, bit mask)`` of what autograd holds constant: ``detach``, ``.data``, ``no_grad``."""
        for node in self.nodes:
            mask = 0 if node.hidden else self._gradient_mask(node)
            if not mask:
                continue
            for number, value in enumerate(node.outputs):
                if value.is_floating_point() and self._ends(value) and id(value) in self.needed:
                    yield node, number, mask

    def leaks(self) -> Iterator[tuple[Node, int]]:
        """``(node, bit mask)`` of operations that take float64 and give less, on the way to the loss."""
        for node in self.nodes:
            if not node.line or not any(id(v) in self.needed_floats for v in node.outputs if v.dtype in _LOW_FLOATS):
                continue
            mask = 0
            for value in node.inputs:
                mask |= self.depends(value) if value.dtype == torch.float64 else 0
            if mask:
                yield node, mask

    def cuts(self, index: int) -> Iterator[Node]:
        """Operations that take a float with a gradient, depending on a moving tensor, and pass none on."""
        for node in self.nodes:
            if node.hidden or not self._gradient_mask(node) >> index & 1:
                continue
            if any(id(v) in self.needed for v in node.outputs) and all(map(self._ends, node.outputs)):
                yield node

    def readers(self, value: Any) -> list[int]:
        """Calls whose own operations read a tensor directly, on the way to the loss."""
        return sorted(
            {n.call for n in self.nodes if any(v is value for v in n.inputs) and any(map(self.is_needed, n.outputs))}
        )

    def _ends(self, value: Any) -> bool:
        """Does the gradient of what made this tensor end here?"""
        return value.is_leaf and id(value) not in self._resumed

    def _gradient_mask(self, node: Node) -> int:
        """Moving tensors whose gradient could enter a node."""
        if node.kind.startswith(_FORM_ONLY):
            return 0
        mask = 0
        for value in node.inputs:
            mask |= self.depends(value) if value.requires_grad and value.is_floating_point() else 0
        return mask

    def _behind(self, *, floats_only: bool) -> set[int]:
        """Tensors on which the loss depends, by id; a tensor that is written to in place depends on what is written."""
        needed, stores = {id(self._loss)}, {_storage(self._loss)}
        for node in reversed(self.nodes):
            writes = node.function._schema.is_mutable
            if not any(id(v) in needed or (writes and _storage(v) in stores) for v in node.outputs):
                continue
            for value in node.inputs:
                if value.is_floating_point() or not floats_only:
                    needed.add(id(value))
                    stores.add(_storage(value))
            if writes:
                needed.update(id(v) for v in node.outputs)
        return needed


def to_tensor(value: Any, dtype: Any, device: Any) -> Any:
    """A value as a tensor of a dtype on a device, cut off from what made it."""
    return torch.as_tensor(value).detach().to(device=device, dtype=dtype)


def _storage(value: Any) -> int:
    return int(value.untyped_storage()._cdata) if value.layout == torch.strided else id(value)


def _tensors(structure: Any) -> Iterator[Any]:
    for value in structure:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _falls(inputs: Sequence[Any], outputs: Sequence[Any]) -> bool:
    return any(v.dtype in _LOW_FLOATS for v in outputs) and any(v.dtype == torch.float64 for v in inputs)


def _user_line() -> str:
    """File and line of the innermost frame outside Keras, torch and this package."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not any(f"/{library}/" in name for library in _LIBRARIES) and "/" in name:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown"
