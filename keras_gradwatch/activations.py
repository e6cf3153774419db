"""Looks at the activations of a model: which units are silent, which layers saturated, how far gradients reach in time.

A look is a forward pass in the training dtype over the newest samples seen, about 128 of them. No variable, metric,
seed or average moves, and only a few numbers per unit leave the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from keras_gradwatch.backends import forward_backend
from keras_gradwatch.errors import gist
from keras_gradwatch.probe import (
    Batch,
    Subject,
    accepts,
    build_loss,
    build_model,
    has_loss,
    layer_paths,
    trains_compiled_loss,
)
from keras_gradwatch.records import Activation, ActivationRecord, Float64Array, InputScale, TensorInfo, TimeGradient
from keras_gradwatch.shadow import losses_of

#: Samples in a look: a unit that answers to one sample in twenty is silent on 8 of them two times in three, on 128 once
#: in a thousand.
SAMPLES = 128

#: Small batches are put together until they have this many samples; larger ones are passed as they came, so that a
#: pass takes no more memory than a training step.
LEAST_TOGETHER = 16

#: Most bytes of data held for a look; large samples are held in smaller numbers.
MOST_BYTES = 64_000_000

#: Looks that are kept: the first one and the latest.
KEPT = 32

#: Data of this many different shapes are traced; other shapes are not looked at.
MOST_SHAPES = 3


class SamplePool:
    """The newest samples seen in training, as they came in batches."""

    def __init__(self) -> None:
        self._batches: deque[tuple[Batch, int]] = deque()

    def add(self, batch: Batch) -> None:
        """Hold a batch, and let go of those that are no longer needed. Nothing is copied."""
        count = _samples(batch)
        if not count:
            return
        self._batches.append((batch, count))
        held = sum(n for _, n in self._batches)
        while len(self._batches) > 1 and held - self._batches[0][1] >= SAMPLES:
            held -= self._batches.popleft()[1]

    def batches(self) -> list[Batch]:
        """The samples in batches as trained with, but of 16 at least; those of another form are left out."""
        if not self._batches:
            return []
        newest, count = self._batches[-1]
        most = _most_samples(newest, count)
        if count >= most:
            return [newest.head(most)]
        alike = [batch for batch, _ in self._batches if _form(batch) == _form(newest)][-_ceil(most, count) :]
        together = _ceil(LEAST_TOGETHER, count)
        return [_joined(alike[i : i + together]) for i in range(0, len(alike), together)]


class ActivationReader:
    """Looks at one model again and again: traced passes are kept between calls."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._passes: dict[Any, _Pass] = {}
        self._any_batch = True

    def read(self, batches: Sequence[Batch], *, step: int) -> ActivationRecord | None:
        """One look.

        Args:
            batches: the samples to look at, all of one form.
            step: for the record.

        Returns:
            What was seen; ``None`` when there is no batch, or for data of yet another shape.
        """
        pairs = [pair for batch in batches if (pair := self._pair(batch)) is not None]
        if not pairs:
            return None
        counts = [_samples(batch) for _, batch in pairs]
        readings = merged([traced.read(batch) for traced, batch in pairs], counts)
        return pairs[0][0].record(readings, step=step, samples=sum(counts))

    def _pair(self, batch: Batch) -> tuple[_Pass, Batch] | None:
        """A traced pass, and as many samples of a batch as it takes."""
        traced = self._pass_for(batch)
        if traced is not None or self._any_batch:
            return None if traced is None else (traced, batch)
        form = _form(batch)
        fitting = [n for known, n in self._passes if known == form and n <= _samples(batch)]
        return (self._passes[form, max(fitting)], batch.head(max(fitting))) if fitting else None

    def _pass_for(self, batch: Batch) -> _Pass | None:
        form = _form(batch) if self._any_batch else (_form(batch), _samples(batch))
        if form not in self._passes and len(self._passes) < MOST_SHAPES:
            traced = self._traced(batch)
            form = _form(batch) if self._any_batch else (_form(batch), _samples(batch))
            self._passes[form] = traced
        return self._passes.get(form)

    def _traced(self, batch: Batch) -> _Pass:
        try:
            return _Pass(self._model, batch, any_batch=self._any_batch)
        except Exception:
            if not self._any_batch:
                raise
            self._any_batch = False  # the model needs to know how many samples come
            return _Pass(self._model, batch, any_batch=False)


class Looks:
    """Decides when to look during one training run, and keeps the latest looks.

    Before the first step, before each check and at the end of each epoch; besides whenever twice as many steps are done
    as at the last look, so that trouble from the start is seen early and a long epoch is not slept through.
    """

    def __init__(self, model: Any, *, offset: int = 0) -> None:
        # The last look's step, and the steps done by then: the same weights need no second look.
        self._offset, self._last, self._done, self._taken = offset, 0, -1, 0
        self.records: list[ActivationRecord] = []
        self.failure = ""
        self._reader, self._pool = ActivationReader(model), SamplePool()

    def before_step(self, step: int, batch: Batch, *, due: bool) -> None:
        """Take in the batch of the coming step, and look if it is time.

        Args:
            step: the coming step, from 1.
            batch: its samples.
            due: look now, whatever the step.
        """
        self._take(step, batch)
        if (due or step >= 2 * self._last) and self._done != step - 1:
            self._look(step, done=step - 1)

    def after_step(self, step: int, batch: Batch) -> None:
        """Take in the batch of a step that has run, and look if it is time."""
        self._take(step, batch)
        if step >= 2 * self._last and self._done != step:
            self._look(step, done=step)

    def forget(self) -> None:
        """Training goes on from an earlier state: drop the looks at the one that is given up."""
        self.records = []

    def _take(self, step: int, batch: Batch) -> None:
        if step != self._taken and not batch.loose_parts:
            self._pool.add(batch)
            self._taken = step

    def end_epoch(self, step: int) -> None:
        """Look after the last step of an epoch."""
        self._look(step, done=step)

    def _look(self, step: int, *, done: int) -> None:
        if self.failure:
            return
        self._last, self._done = step, done
        try:
            record = self._reader.read(self._pool.batches(), step=self._offset + step)
        except Exception as error:  # noqa: BLE001  a model that cannot be called on a batch alone is a remark, not a fault
            self.failure = gist(error)
            return
        if record is not None:
            self.records.append(record)
            del self.records[1 : max(1, len(self.records) - KEPT + 1)]


class _Pass:
    """A traced forward pass, and what its numbers belong to."""

    def __init__(self, model: Any, batch: Batch, *, any_batch: bool) -> None:
        self._subject = _losses_subject(model, batch)
        self._paths = layer_paths(model)
        moving, fixed = self._subject.values(batch)
        self._forward = forward_backend().Forward(
            self._subject.loss, moving, fixed, weights=len(self._subject.variables), state=len(self._subject.state),
            any_batch=any_batch,
        )  # fmt: skip

    def read(self, batch: Batch) -> Any:
        return self._forward.read(*self._subject.values(batch))

    def record(self, readings: Any, *, step: int, samples: int) -> ActivationRecord:
        numbers = zip(self._forward.sites, readings.limits, readings.entries, readings.ceilings, strict=True)
        times = zip(self._forward.sequences, readings.times, strict=True)
        inputs = self._subject.tensors[len(self._subject.variables) :]
        return ActivationRecord(
            step=step,
            samples=samples,
            activations=tuple(self._activation(*row) for row in numbers),
            sequences=tuple(self._sequence(sequence, norms) for sequence, norms in times if np.isfinite(norms).all()),
            inputs=tuple(
                InputScale(name=info.tensor, mean=float(mean), std=float(std), largest=float(largest))
                for info, (mean, std, largest) in zip(inputs, readings.inputs, strict=True)
            ),
            loss=readings.loss,
            shuffled_loss=readings.shuffled_loss if samples > 1 else float("nan"),
        )

    def _activation(self, site: Any, limits: Float64Array, entries: float, ceilings: Float64Array) -> Activation:
        per_unit = entries / max(len(limits), 1)
        silent = (limits >= per_unit) & (per_unit > 0) & (site.kind == "relu")
        upstream = [self._subject.tensors[i] for i in site.upstream]
        owner = max(upstream, key=lambda info: info.depth).layer if upstream else ""
        own = [i for i in site.upstream if self._subject.tensors[i].layer == owner]
        return Activation(
            layer=self._path(site.operation),
            layer_class=type(site.operation).__name__,
            kind=site.kind,
            silent=silent,
            at_limit=float(limits.sum() / entries) if entries else 0.0,
            ceiling=ceilings,
            bias=self._bias(own, len(limits)) if silent.any() else np.full(len(limits), np.nan),
            output=site.output,
            owner=owner,
            own=_names(self._subject.tensors[i] for i in own),
            upstream=_names(upstream),
        )

    def _bias(self, own: Sequence[int], units: int) -> Float64Array:
        """What the layer adds to each unit."""
        for i in own:
            variable = self._subject.variables[i]
            if variable.name in ("bias", "beta") and tuple(variable.shape) == (units,):
                return np.asarray(keras.ops.convert_to_numpy(variable.value), dtype=np.float64)
        return np.full(units, np.nan)

    def _sequence(self, sequence: Any, norms: Float64Array) -> TimeGradient:
        own = {id(variable) for variable in sequence.operation.trainable_variables}
        weights = zip(self._subject.tensors, self._subject.variables, strict=False)
        return TimeGradient(
            layer=self._path(sequence.operation),
            layer_class=type(sequence.operation).__name__,
            norms=norms,
            masked=sequence.masked,
            weights=_names(info for info, variable in weights if id(variable) in own),
        )

    def _path(self, operation: Any) -> str:
        return self._paths.get(id(operation), str(operation.name))


def _losses_subject(model: Any, batch: Batch) -> Subject:
    """Two losses of a batch: with the model's predictions, and with each of them given to another sample."""
    build_model(model, batch)
    if not has_loss(model) or not trains_compiled_loss(model):
        return Subject(model, batch, lambda x, y, weight: (_called(model, x), (float("nan"), float("nan")))[1])
    build_loss(model, batch)

    def losses(x: Any, y: Any, sample_weight: Any) -> Any:
        y_pred = _called(model, x)
        settings = {"training": True} if accepts(model.compute_loss, "training") else {}
        shuffled = keras.tree.map_structure(_reversed, y_pred)
        return [
            model.compute_loss(x=x, y=y, y_pred=predictions, sample_weight=sample_weight, **settings)
            for predictions in (y_pred, shuffled)
        ]

    return Subject(model, batch, losses, losses_of(model))


def merged(readings: Sequence[Any], counts: Sequence[int]) -> Any:
    """The readings of several batches as one: what one pass over all samples would give, but for batch statistics.

    Args:
        readings: of one form, at least one.
        counts: number of samples behind each.
    """
    first, share = readings[0], np.asarray(counts) / sum(counts)

    def across(name: str) -> list[Any]:
        """One array ``[batches, …]`` per entry of a list of the readings."""
        return [np.stack(column) for column in zip(*(getattr(r, name) for r in readings), strict=True)]

    def scale(column: Any) -> Float64Array:
        mean = share @ column[:, 0]
        variance = share @ (column[:, 1] ** 2 + column[:, 0] ** 2) - mean**2
        return np.array([mean, np.sqrt(max(variance, 0.0)), column[:, 2].max()])

    return replace(
        first,
        limits=[column.sum(axis=0) for column in across("limits")],
        entries=[float(column.sum()) for column in across("entries")],
        ceilings=[column.max(axis=0) for column in across("ceilings")],
        times=[np.sqrt(share @ column**2) for column in across("times")],
        inputs=[scale(column) for column in across("inputs")],
        loss=float(share @ [r.loss for r in readings]),
        shuffled_loss=float(share @ [r.shuffled_loss for r in readings]),
    )


def _called(model: Any, x: Any) -> Any:
    return model(x, training=True) if accepts(model.call, "training") else model(x)


def _reversed(leaf: Any) -> Any:
    """The predictions in reverse order: each goes to another sample."""
    return keras.ops.flip(leaf, axis=0) if len(leaf.shape) else leaf


def _names(tensors: Iterable[TensorInfo]) -> tuple[str, ...]:
    return tuple(info.tensor for info in tensors)


def _joined(batches: Sequence[Batch]) -> Batch:
    """Several batches as one."""
    if len(batches) == 1:
        return batches[0]
    parts = [keras.tree.flatten((batch.x, batch.y, batch.sample_weight)) for batch in batches]
    leaves = [
        None if column[0] is None else column[-1] if not np.ndim(column[0]) else keras.ops.concatenate(column)
        for column in zip(*parts, strict=True)
    ]
    return Batch(*keras.tree.pack_sequence_as((batches[0].x, batches[0].y, batches[0].sample_weight), leaves))


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _samples(batch: Batch) -> int:
    """Number of samples; 0 when the data cannot be held, such as ragged or sparse ones."""
    counts = [np.shape(leaf)[0] for leaf in _leaves(batch) if len(np.shape(leaf))]
    return int(counts[0]) if counts else 0


def _leaves(batch: Batch) -> list[Any]:
    return [leaf for leaf in keras.tree.flatten((batch.x, batch.y, batch.sample_weight)) if leaf is not None]


def _form(batch: Batch) -> tuple[Any, ...]:
    """Shapes and dtypes, but for the number of samples."""
    leaves = keras.tree.flatten((batch.x, batch.y, batch.sample_weight))
    return tuple(None if leaf is None else (tuple(np.shape(leaf))[1:], str(leaf.dtype)) for leaf in leaves)


def _most_samples(batch: Batch, count: int) -> int:
    size = sum(int(np.prod(np.shape(leaf))) * 4 for leaf in _leaves(batch)) / max(count, 1)
    return max(1, min(SAMPLES, int(MOST_BYTES / max(size, 1))))
