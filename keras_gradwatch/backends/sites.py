"""Which activation functions are looked for in a forward pass, and what is read of them: the same on every backend."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from keras_gradwatch.records import Float64Array

#: Range of each kind of activation; a relu has one limit, zero.
RANGES = {
    "relu": (0.0, np.inf),
    "sigmoid": (0.0, 1.0),
    "tanh": (-1.0, 1.0),
    "softsign": (-1.0, 1.0),
    "hard_sigmoid": (0.0, 1.0),
    "hard_tanh": (-1.0, 1.0),
}
#: Share of the range that counts as its limit.
MARGIN = 0.01


@dataclass(frozen=True)
class Site:
    """One activation function in a forward pass; a layer called twice has one site with two tensors.

    Attributes:
        operation: the innermost layer in which it is called.
        kind: key of :data:`RANGES`.
        tensors: its outputs.
        axis: axis of the units.
        output: the model's output passes no further layer.
        upstream: indices of the moving tensors on which it depends.
    """

    operation: Any
    kind: str
    tensors: tuple[Any, ...]
    axis: int
    output: bool
    upstream: tuple[int, ...]


@dataclass(frozen=True)
class Recurrence:
    """What enters a recurrent layer."""

    operation: Any
    tensor: Any
    masked: bool


@dataclass(frozen=True)
class Readings:
    """What one pass gave, in the order of ``Forward.sites``, ``sequences`` and the inputs."""

    limits: list[Float64Array]
    entries: list[float]
    ceilings: list[Float64Array]
    times: list[Float64Array]
    inputs: list[Float64Array]
    loss: float
    shuffled_loss: float


def declared_kind(operation: Any) -> str | None:
    """Kind of activation with which a layer of Keras' own ends; ``""`` if of no interest, ``None`` if unknown."""
    import keras

    layers = keras.layers
    if isinstance(operation, layers.RNN):
        cell = getattr(operation, "cell", None)
        return _name_of(getattr(operation, "activation", None) or getattr(cell, "activation", None))
    if not type(operation).__module__.startswith("keras."):
        return "" if _name_of(getattr(operation, "activation", None)) in ("gelu", "silu", "mish", "hard_silu") else None
    if isinstance(operation, layers.ReLU):
        return "relu" if not operation.negative_slope and not operation.threshold else ""
    if isinstance(operation, layers.LeakyReLU | layers.PReLU | layers.ELU | layers.Softmax):
        return ""
    if not hasattr(operation, "activation"):
        return None
    name = _name_of(operation.activation)
    return None if name == "<lambda>" else name


def _name_of(function: Any) -> str:
    name = str(getattr(function, "__name__", ""))
    return "relu" if name == "relu6" else name


def is_recurrent(operation: Any) -> bool:
    """Does a layer go through time steps?"""
    import keras

    return isinstance(operation, keras.layers.RNN | keras.layers.Bidirectional)


def recurrent_inside(calls: Sequence[Any]) -> set[int]:
    """Calls made by a recurrent layer or inside of one: its gates are meant to open and close."""
    inside: set[int] = set()
    for index, call in enumerate(calls):  # a call comes after the one that makes it
        if is_recurrent(call.operation) or call.parent in inside:
            inside.add(index)
    return inside


def sequence_calls(calls: Sequence[Any]) -> Iterator[Any]:
    """Calls of the outermost recurrent layers."""
    inside = recurrent_inside(calls)
    for index in sorted(inside):
        if calls[index].parent not in inside and calls[index].inputs:
            yield calls[index]


def site_groups(found: Iterable[tuple[int, str, Any]], calls: Sequence[Any]) -> list[list[tuple[Any, str, Any]]]:
    """``(operation, kind, output)`` in network order; those of one activation function, called again, put together.

    Args:
        found: ``(call index, kind, output)`` in network order.
        calls: the calls recorded.
    """
    grouped: dict[tuple[int, int, str], list[tuple[Any, str, Any]]] = {}
    counts: dict[tuple[int, str], int] = {}
    for index, kind, tensor in found:
        operation = calls[index].operation
        ordinal = counts.get((index, kind), 0)
        counts[index, kind] = ordinal + 1
        key = (id(operation), 0 if type(operation).__name__ == "TimeDistributed" else ordinal, kind)
        grouped.setdefault(key, []).append((operation, kind, tensor))
    return list(grouped.values())


def unit_axis(operation: Any, rank: int) -> int:
    """The channels of an image come first or last, everything else ends with its units."""
    import keras

    layout = getattr(operation, "data_format", None) or keras.config.image_data_format()
    is_image = rank in (4, 5) or (rank == 3 and hasattr(operation, "data_format"))
    return 1 if is_image and layout == "channels_first" else -1
