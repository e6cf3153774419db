"""The step that is run again when something is found: the one with the largest gradient since the rules were asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras

from keras_gradwatch.capture import CapturedStep
from keras_gradwatch.epochs import global_norm
from keras_gradwatch.probe import Batch
from keras_gradwatch.records import StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A step that can be run again: its batch, and the weights from before it, by ``id`` of the variable."""

    step: int
    batch: Batch
    weights: Mapping[int, Any]


class Suspects:
    """Holds one batch and one set of weights, on the device."""

    def __init__(self) -> None:
        self._largest = -1.0
        self._held: tuple[int, CapturedStep] | None = None

    def add(self, record: StepRecord, captured: CapturedStep | None) -> None:
        """Take in a step. One whose gradient is not finite is no suspect: it is run again at once."""
        norm = global_norm(record)
        if captured is None or captured.batch is None or captured.previous_weights is None or not norm > self._largest:
            return
        self._largest, self._held = norm, (record.step, captured)

    def take(self) -> Suspect | None:
        """The step with the largest gradient since the last call; ``None`` when no gradient was seen."""
        held, self._largest, self._held = self._held, -1.0, None
        if held is None:
            return None
        return Suspect(step=held[0], batch=batch_seen(held[1]), weights=weights_before(held[1]))


def batch_seen(captured: CapturedStep) -> Batch:
    """The batch of a step."""
    return Batch(*keras.utils.unpack_x_y_sample_weight(captured.batch))


def weights_before(captured: CapturedStep) -> dict[int, Any]:
    """The weights from before a step, by ``id`` of the variable; empty when they were not kept."""
    previous = captured.previous_weights
    return {} if previous is None else {id(v): w for v, w in zip(captured.variables, previous, strict=True)}
