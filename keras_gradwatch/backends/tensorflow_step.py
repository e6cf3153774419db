"""One training step on the TensorFlow backend: pulling its batch, and an instrumented copy that also reports gradients."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_gradwatch.capture import KEEP_WEIGHTS_LIMIT, CapturedStep, Patch, optimizers_of
from keras_gradwatch.stats import REDUCTIONS, statistics_from_reductions

#: Keys under which our numbers ride through the logs of a step; gone before Keras sees the logs.
_NUMBERS = "__gradwatch_numbers"
_WEIGHTS = "__gradwatch_weights"


def batches(iterator: Any) -> Iterator[Any]:
    """The batches of a train function's argument, one by one, as ``train_step`` will see them; stops with the data."""
    if not isinstance(iterator, tf.data.Iterator | tf.distribute.DistributedIterator):
        yield from iterator
        return
    while (batch := iterator.get_next_as_optional()).has_value():
        yield keras.tree.map_structure(_none_for_optional, batch.get_value())


def _none_for_optional(value: Any) -> Any:
    """Keras wraps a missing sample weight in an Optional, and unwraps it in front of ``train_step``."""
    return None if isinstance(value, tf.experimental.Optional) else value


def updates_done(model: Any) -> int | None:
    """Calls of the optimizer so far; ``None`` when it does not count them all (loss scaling skips some, or there is none)."""
    if not isinstance(model.optimizer, keras.optimizers.Optimizer) or not model.optimizer.built:
        return None
    if isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
        return None
    return int(model.optimizer._iterations.numpy())


@dataclass(frozen=True, slots=True)
class _Layout:
    """What the rows of one traced step stand for."""

    variables: tuple[Any, ...]
    connected: tuple[bool, ...]
    sizes: tuple[int, ...]
    keeps_weights: bool
    loss_known: bool

    @property
    def key(self) -> tuple[Any, ...]:
        return (*map(id, self.variables), self.connected, self.loss_known)


@dataclass(slots=True)
class _Entry:
    """One variable in the step being run: its weight before the step, and the gradient it received last."""

    variable: Any
    before: Any
    gradient: Any


@dataclass(slots=True)
class _Sink:
    """What the optimizers and the loss of one running step handed over."""

    entries: dict[int, _Entry] = field(default_factory=dict)
    loss: Any = None


class TrackedStep:
    """An instrumented copy of a model's train function.

    Attributes:
        function: takes what ``model.train_function`` takes and returns its logs, with our numbers among them. Runs one
            step when it is given a list of one batch. To be called while ``patches`` are in place.
        patches: what must stand in for the optimizers' ``apply`` meanwhile.
    """

    def __init__(self, model: Any) -> None:
        self._running = threading.local()  # MirroredStrategy runs one thread per replica, interleaved.
        self._layouts: dict[tuple[Any, ...], int] = {}
        self._layout_list: list[_Layout] = []
        self.patches = [
            Patch(owner=each, name="apply", replacement=self._watched_apply(each)) for each in optimizers_of(model)
        ]
        if model._loss_tracker is not None:
            self.patches.append(
                Patch(
                    owner=model._loss_tracker, name="update_state", replacement=self._watched_loss(model._loss_tracker)
                )
            )
        self.function = self._make_function(model)

    def _make_function(self, model: Any) -> Callable[[Any], Any]:
        """Let Keras build its function around our wrapper of the user's ``train_step``."""
        in_place, own = model.train_function, model.__dict__.get("train_step")
        model.__dict__["train_step"] = self._watched_step(model.train_step)
        try:
            model.make_train_function(force=True)
            return model.train_function  # type: ignore[no-any-return]
        finally:
            model.train_function = in_place
            if own is None:
                del model.__dict__["train_step"]
            else:
                model.__dict__["train_step"] = own

    def _watched_step(self, train_step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def step(data: Any) -> Any:
            sink = self._running.sink = _Sink()
            try:
                logs = train_step(data)
            finally:
                self._running.sink = None
            return {**logs, **self._report(sink)} if isinstance(logs, dict) else logs

        return step

    def _watched_apply(self, optimizer: Any) -> Callable[..., Any]:
        apply = optimizer.apply

        def watched(grads: Iterable[Any], trainable_variables: Iterable[Any] | None = None) -> Any:
            gradients = list(grads)
            variables = None if trainable_variables is None else list(trainable_variables)
            sink: _Sink | None = getattr(self._running, "sink", None)
            if sink is not None:
                known = optimizer._trainable_variables if variables is None else variables
                _collect(sink, optimizer, gradients, known)
            return apply(gradients, variables)

        return watched

    def _watched_loss(self, tracker: Any) -> Callable[..., Any]:
        update_state = tracker.update_state

        def watched(values: Any, *args: Any, **kwargs: Any) -> Any:
            sink: _Sink | None = getattr(self._running, "sink", None)
            if sink is not None:
                sink.loss = values
            return update_state(values, *args, **kwargs)

        return watched

    def _report(self, sink: _Sink) -> dict[str, Any]:
        entries = [entry for entry in sink.entries.values() if _reachable(entry.gradient) and _reachable(entry.before)]
        loss = sink.loss if _reachable(sink.loss) else None
        layout = _layout_of(entries, loss)
        index = self._layouts.setdefault(layout.key, len(self._layout_list))
        if index == len(self._layout_list):
            self._layout_list.append(layout)
        numbers = [tf.constant(index, tf.float64), tf.cast(0.0 if loss is None else loss, tf.float64)]
        report = {_NUMBERS: tf.concat([tf.stack(numbers), *map(_reductions, entries)], axis=0)}
        if layout.keeps_weights:
            report[_WEIGHTS] = tuple(entry.before for entry in entries)
        return report

    def open(self, logs: Any) -> tuple[Any, CapturedStep]:
        """Part our numbers from the user's logs."""
        numbers = logs.pop(_NUMBERS, None)
        if numbers is None:
            return logs, CapturedStep(
                variables=(),
                statistics=statistics_from_reductions([], [], []),
                connected=(),
                loss=None,
                previous_weights=None,
                batch=None,
            )
        weights = logs.pop(_WEIGHTS, None)
        values = np.asarray(numbers.numpy())
        layout = self._layout_list[int(values[0])]
        return logs, CapturedStep(
            variables=layout.variables,
            statistics=statistics_from_reductions(values[2:], layout.sizes, layout.connected),
            connected=layout.connected,
            loss=float(values[1]) if layout.loss_known else None,
            previous_weights=None if weights is None else tuple(weights),
            batch=None,
        )


def _collect(sink: _Sink, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    scale = _gradient_scale(optimizer)
    for gradient, variable in zip(gradients, variables, strict=True):
        if not tf.as_dtype(variable.dtype).is_floating or getattr(variable, "overwrite_with_gradient", False):
            continue  # float8 bookkeeping: what arrives as its gradient is its new value
        entry = sink.entries.setdefault(id(variable), _Entry(variable, tf.convert_to_tensor(variable), None))
        entry.gradient = gradient if scale is None or gradient is None else gradient / scale
    return None


def _gradient_scale(optimizer: Any) -> Any:
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer.dynamic_scale.value if optimizer.built else optimizer.initial_scale
    return optimizer.loss_scale_factor


def _reachable(tensor: Any) -> bool:
    """Whether a tensor may leave through the logs: one made inside a ``tf.cond`` or a loop of the train_step may not."""
    if tf.executing_eagerly() or not tf.is_tensor(tensor):
        return True
    return tensor.graph is tf.compat.v1.get_default_graph()


def _layout_of(entries: Sequence[_Entry], loss: Any) -> _Layout:
    sizes = tuple(int(np.prod(entry.variable.shape, dtype=np.int64)) for entry in entries)
    return _Layout(
        variables=tuple(entry.variable for entry in entries),
        connected=tuple(entry.gradient is not None for entry in entries),
        sizes=sizes,
        keeps_weights=0 < sum(sizes) <= KEEP_WEIGHTS_LIMIT,
        loss_known=loss is not None,
    )


def _reductions(entry: _Entry) -> Any:
    before = tf.cast(entry.before, tf.float64)
    update = tf.cast(tf.convert_to_tensor(entry.variable), tf.float64) - before
    weight_sums = [tf.reduce_sum(tf.square(before)), tf.reduce_sum(tf.square(update))]
    if entry.gradient is None:
        gradient_sums = [tf.zeros((), tf.float64)] * (len(REDUCTIONS) - 2)
    else:
        gradient = tf.cast(_compact(entry.gradient), tf.float64)
        gradient_sums = [
            tf.reduce_sum(tf.square(gradient)),
            tf.reduce_max(tf.abs(gradient)),
            tf.reduce_sum(tf.cast(gradient != 0.0, tf.float64)),
            tf.reduce_sum(tf.cast(~tf.math.is_finite(gradient), tf.float64)),
        ]
    return tf.stack(gradient_sums + weight_sums)


def _compact(gradient: Any) -> Any:
    """A dense tensor with the same norm: a sparse gradient's repeated rows are summed, and missing rows stay missing."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    order = tf.argsort(gradient.indices)
    rows = tf.gather(gradient.indices, order)
    is_new = tf.concat([[0], tf.cast(rows[1:] != rows[:-1], tf.int32)], axis=0)
    return tf.math.unsorted_segment_sum(tf.gather(gradient.values, order), tf.cumsum(is_new), tf.shape(rows)[0])
