"""A model's forward pass on torch, recorded, and a few numbers per activation in place of the activations.

Every look runs the model's own code under a tape. Its operations are searched for activation functions, wherever they
are called: in a layer that has one, in a layer of their own, or somewhere inside a custom layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

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
from keras_gradwatch.backends.torch_graph import Graph, LayerCall, Node, Tape, recording, to_tensor, undisturbed
from keras_gradwatch.backends.torch_point import gradients_of
from keras_gradwatch.records import Float64Array

_KINDS = {
    "relu": "relu", "relu_": "relu", "sigmoid": "sigmoid", "sigmoid_": "sigmoid", "tanh": "tanh", "tanh_": "tanh",
    "hardsigmoid": "hard_sigmoid",
}  # fmt: skip
_SHAPE_OPS = frozenset({"view", "_unsafe_view", "reshape", "_to_copy", "squeeze", "unsqueeze", "permute", "transpose"})


class Forward:
    """The forward pass of a batch as a function of ``moving`` (weights, float inputs) and ``fixed`` tensors.

    Args:
        losses: ``losses(moving, fixed) -> (loss, loss with shuffled predictions)``; run at every look.
        moving, fixed: values to find the activation functions with.
        weights: number of moving tensors that are weights; the others are float inputs.
        state: number of fixed tensors that are not data.
        any_batch: of no matter here, where nothing is traced.
    """

    def __init__(
        self, losses: Callable[[list[Any], list[Any]], Any], moving: Sequence[Any], fixed: Sequence[Any], *,
        weights: int, state: int, any_batch: bool = True,
    ) -> None:  # fmt: skip
        self._losses, self._weights = losses, weights
        first = _Pass(losses, moving, fixed, weights)
        self.sites = [replace(site, tensors=()) for site in first.sites]  # of no further use, and large
        self.sequences = [replace(sequence, tensor=None) for sequence in first.sequences]

    def read(self, moving: Sequence[Any], fixed: Sequence[Any]) -> Readings:
        """One pass at given values.

        Raises:
            RuntimeError: the model called other activation functions than the first time.
        """
        seen = _Pass(self._losses, moving, fixed, self._weights)
        if [(id(s.operation), s.kind) for s in seen.sites] != [(id(s.operation), s.kind) for s in self.sites]:
            raise RuntimeError("the model calls other activation functions from one batch to the next")
        return seen.readings()


class _Pass:
    """One recorded run."""

    def __init__(
        self, losses: Callable[[list[Any], list[Any]], Any], moving: Sequence[Any], fixed: Sequence[Any], weights: int
    ) -> None:
        from keras.src.backend.torch.core import get_device

        values = [torch.as_tensor(value) for value in (*moving, *fixed)]
        values = [to_tensor(value, value.dtype, get_device()) for value in values]
        leaves = [value.requires_grad_() for value in values[: len(moving)]]
        self._inputs = leaves[weights:]
        calls: list[LayerCall] = []
        taps: list[Any] = []
        tape = Tape()

        def tap(number: int, call: int, value: Any) -> Any:
            taps.append(value)
            return value

        with torch.enable_grad(), undisturbed(), recording(calls, tap, tape), tape:
            found = losses(leaves, values[len(moving) :])
        for generator, state in tape.generators:
            generator.set_state(state)
        self._loss, self._shuffled = (torch.as_tensor(value) for value in found)
        self._nodes, self._calls, self._taps = tape.nodes, calls, taps
        self._makers = {id(value): node for node in tape.nodes for value in node.outputs}
        self._graph = Graph(tape, leaves, self._loss)
        self.sites = list(self._sites(weights))
        self.sequences = list(self._sequences())

    def readings(self) -> Readings:
        """Everything to read, as small arrays."""
        gradients = gradients_of(self._loss, [sequence.tensor for sequence in self.sequences])
        with torch.no_grad():
            return Readings(
                limits=[_numbers(sum(_at_limit(tensor, site) for tensor in site.tensors)) for site in self.sites],
                entries=[float(sum(tensor.numel() for tensor in site.tensors)) for site in self.sites],
                ceilings=[_numbers(self._ceiling(site)) for site in self.sites],
                times=[_times(s.tensor, gradient) for s, gradient in zip(self.sequences, gradients, strict=True)],
                inputs=[_scale(value) for value in self._inputs],
                loss=float(self._loss), shuffled_loss=float(self._shuffled),
            )  # fmt: skip

    def _sites(self, weights: int) -> Iterator[Site]:
        """Every activation function called inside a layer, in network order."""
        outputs = self._outputs()
        for group in site_groups(self._found(), self._calls):
            operation, kind, first = group[0]
            axis = unit_axis(operation, first.dim())
            tensors = tuple(tensor for _, _, tensor in group if tensor.dim() == first.dim())
            if first.dim() < 2 or not first.shape[axis]:
                continue
            bits = self._graph.depends(first)
            upstream = tuple(i for i in range(weights) if bits >> i & 1)
            yield Site(operation, kind, tensors, axis, any(id(t) in outputs for t in tensors), upstream)

    def _found(self) -> Iterator[tuple[int, str, Any]]:
        """``(call index, kind, output tensor)`` of every activation function, in the order in which they ran."""
        recurrent = recurrent_inside(self._calls)
        declared = [declared_kind(call.operation) for call in self._calls]
        seen: list[tuple[int, int, str, Any]] = []
        for index, call in enumerate(self._calls):
            if index in recurrent and not is_recurrent(call.operation):
                continue
            if declared[index] in RANGES and call.outputs:
                seen.append((call.last_op, index, str(declared[index]), self._taps[call.outputs[0]]))
        for position, node in enumerate(self._nodes):
            if node.call < 0 or node.call in recurrent or declared[node.call] is not None or not node.outputs:
                continue
            kind = _kind_of(node)
            if kind and (kind == "relu" or not self._is_part_of_another(position)):
                seen.append((position, node.call, kind, node.outputs[0]))
        for _, index, kind, tensor in sorted(seen, key=lambda entry: entry[0]):
            yield index, kind, tensor

    def _sequences(self) -> Iterator[Recurrence]:
        """What enters the outermost recurrent layers, if it is a sequence."""
        for call in sequence_calls(self._calls):
            tensor = self._taps[call.inputs[0]]
            if tensor.dim() == 3 and tensor.shape[1]:
                yield Recurrence(call.operation, tensor, getattr(tensor, "_keras_mask", None) is not None)

    def _outputs(self) -> set[int]:
        """The model's outputs, and what they are but for their shape, by id."""
        roots = [call for call in self._calls if call.parent == -1]
        found: set[int] = set()
        waiting = [self._taps[number] for number in roots[-1].outputs] if roots else []
        while waiting:
            tensor = waiting.pop()
            found.add(id(tensor))
            maker = self._makers.get(id(tensor))
            if maker is not None and maker.kind in _SHAPE_OPS:
                waiting.append(maker.inputs[0])
        return found

    def _is_part_of_another(self, position: int) -> bool:
        """A gate (``sigmoid(x) * y``) or the tanh of a written-out gelu."""
        output = self._nodes[position].outputs[0]
        readers = [node for node in self._nodes[position + 1 :] if any(value is output for value in node.inputs)]
        return any(node.kind == "mul" or (node.kind == "add" and _has_constant(node, 1.0)) for node in readers)

    def _ceiling(self, site: Site) -> Any:
        """Per unit the largest value that enters a relu; NaN where it was not seen."""
        makers = [self._makers.get(id(tensor)) for tensor in site.tensors]
        entering = [
            node.inputs[0] if node.inputs[0].shape == tensor.shape else node.inputs[-1]
            for node, tensor in zip(makers, site.tensors, strict=True)
            if node is not None and _kind_of(node) == "relu" and not node.function._schema.is_mutable
        ]
        if site.kind != "relu" or len(entering) < len(site.tensors):
            return torch.full((int(site.tensors[0].shape[site.axis]),), torch.nan)
        return torch.stack([value.float().amax(dim=_other_axes(value, site.axis)) for value in entering]).amax(dim=0)


def _kind_of(node: Node) -> str | None:
    """Kind of activation function that an operation is, also written out as a maximum."""
    if node.kind in ("hardtanh", "hardtanh_"):
        low, high = node.numbers if len(node.numbers) == 2 else (-1.0, 1.0)
        return "relu" if low == 0 else "hard_tanh" if (low, high) == (-1.0, 1.0) else None
    if node.kind in ("maximum", "clamp", "clamp_min") and _has_constant(node, 0.0):
        return "relu"
    return _KINDS.get(node.kind)


def _has_constant(node: Node, number: float) -> bool:
    constants = [value for value in node.inputs if value.numel() == 1 and not value.requires_grad]
    return number in node.numbers or any(float(value.detach()) == number for value in constants)


def _at_limit(tensor: Any, site: Site) -> Any:
    """Per unit the number of entries at a limit of the range."""
    low, high = RANGES[site.kind]
    if site.kind == "relu":
        hits = tensor == 0
    else:
        margin = MARGIN * (high - low)
        hits = (tensor < low + margin) | (tensor > high - margin)
    return hits.sum(dim=_other_axes(tensor, site.axis))


def _times(tensor: Any, gradient: Any) -> Float64Array:
    """Norm of the gradient at every time step."""
    if gradient is None:
        return np.full(int(tensor.shape[1]), np.nan)
    return _numbers(gradient.detach().double().square().sum(dim=(0, 2)).sqrt())


def _scale(value: Any) -> Float64Array:
    wide = value.detach().float()
    return _numbers(torch.stack([wide.mean(), wide.std(correction=0), wide.abs().max()]))


def _numbers(value: Any) -> Float64Array:
    found: Float64Array = value.detach().double().cpu().numpy()
    return found


def _other_axes(tensor: Any, axis: int) -> list[int]:
    return [i for i in range(tensor.dim()) if i != axis % tensor.dim()]
