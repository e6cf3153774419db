"""The steps that are run again when something is found: the newest, and the one with the largest gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras

from keras_gradwatch.capture import CapturedStep
from keras_gradwatch.epochs import global_norm
from keras_gradwatch.incidents import Before
from keras_gradwatch.probe import Batch
from keras_gradwatch.records import Finding, StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A step that can be run again.

    Attributes:
        record: what was measured.
        captured: its batch, and its weights from before it.
        before: the whole state from before it, if it is wanted.
    """

    record: StepRecord
    captured: CapturedStep
    before: Before | None

    @property
    def data(self) -> Any:
        """What ``train_step`` was given."""
        return self.captured.batch

    @property
    def batch(self) -> Batch:
        """Its samples."""
        return batch_seen(self.captured)

    @property
    def weights(self) -> dict[int, Any]:
        """Weights from before it, by ``id`` of the variable; empty when they were not kept."""
        return weights_before(self.captured)


@dataclass(frozen=True, slots=True)
class Pair:
    """The newest step, and the one with the largest finite gradient since the rules were asked."""

    newest: Suspect | None = None
    largest: Suspect | None = None

    def of(self, finding: Finding) -> Suspect | None:
        """The step that shows a finding best: what explodes may be found a few steps late."""
        return (self.largest or self.newest) if finding.finding == "exploding" else self.newest


class Suspects:
    """Holds two batches and two sets of weights at most, on the device."""

    def __init__(self) -> None:
        self._norm, self._pair = -1.0, Pair()

    def add(self, record: StepRecord, captured: CapturedStep | None, before: Before | None) -> None:
        """Take in a step."""
        if captured is None or captured.batch is None:
            return
        suspect, norm = Suspect(record=record, captured=captured, before=before), global_norm(record)
        if norm > self._norm:
            self._norm, self._pair = norm, Pair(suspect, suspect)
        else:
            self._pair = Pair(suspect, self._pair.largest)

    def take(self) -> Pair:
        """The steps seen since the last call."""
        pair, self._norm, self._pair = self._pair, -1.0, Pair()
        return pair


def batch_seen(captured: CapturedStep) -> Batch:
    """The batch of a step."""
    return Batch(*keras.utils.unpack_x_y_sample_weight(captured.batch))


def weights_before(captured: CapturedStep) -> dict[int, Any]:
    """The weights from before a step, by ``id`` of the variable; empty when they were not kept."""
    previous = captured.previous_weights
    return {} if previous is None else {id(v): w for v, w in zip(captured.variables, previous, strict=True)}
