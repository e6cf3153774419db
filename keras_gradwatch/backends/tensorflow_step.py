"""One training step on the TensorFlow backend: an instrumented copy of the user's, which also tells the gradients."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_gradwatch.backends.tensorflow_reductions import dense_or_compact, gradient_reductions, weight_reductions
from keras_gradwatch.capture import KEEP_WEIGHTS_LIMIT, Call, CapturedStep, Patch, optimizers_of, patched
from keras_gradwatch.records import Float64Array
from keras_gradwatch.stats import REDUCTIONS, statistics_from_reductions

__all__ = ["END_OF_DATA", "Call", "TrackedStep", "as_seen", "updates_done"]

#: What a train function raises when its iterator has no batch left.
END_OF_DATA = (StopIteration, tf.errors.OutOfRangeError)

#: Keys under which our numbers ride through the logs of a step; gone before Keras sees the logs.
_NUMBERS = "__gradwatch_numbers"
_WEIGHTS = "__gradwatch_weights"

_ITERATORS = (tf.data.Iterator, tf.distribute.DistributedIterator)


def as_seen(batch: Any) -> Any:
    """A batch from an iterator as ``train_step`` sees it; where replicas share one, all their parts together."""
    if type(batch) is tuple and all(isinstance(part, tf.Tensor) for part in batch):
        return batch  # nothing to unwrap, told without a walk through the structure
    return keras.tree.map_structure(_leaf_seen, batch)


def _leaf_seen(leaf: Any) -> Any:
    if isinstance(leaf, tf.experimental.Optional):  # Keras wraps a missing sample weight
        return None
    if isinstance(leaf, tf.distribute.DistributedValues):
        parts = [_leaf_seen(part) for part in leaf.values]
        return None if parts[0] is None else tf.concat(parts, axis=0)
    return leaf


def updates_done(model: Any) -> int | None:
    """Calls of the optimizer so far; ``None`` when it does not count them all, as under loss scaling."""
    optimizer = model.optimizer
    if not isinstance(optimizer, keras.optimizers.Optimizer) or not optimizer.built:
        return None
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return None
    return int(optimizer._iterations.numpy())


@dataclass(slots=True)
class _Entry:
    """One variable in the step being run: its weight before the step, and the gradient it received last."""

    variable: Any
    before: Any
    gradient: Any = None


@dataclass(slots=True)
class _Sink:
    """What the optimizers and the loss of one running step handed over."""

    entries: dict[int, _Entry] = field(default_factory=dict)
    tracked_loss: Any = None
    computed_losses: list[Any] = field(default_factory=list)
    failed: bool = False

    @property
    def loss(self) -> Any:
        """What the loss tracker was told, else what ``compute_loss`` returned if it was called once."""
        if self.tracked_loss is not None or len(self.computed_losses) != 1:
            return self.tracked_loss
        return self.computed_losses[0]


@dataclass(frozen=True, slots=True)
class _Layout:
    """What the numbers of one trace stand for. A trace is told from another by the index it sends along."""

    variables: tuple[Any, ...]
    connected: tuple[bool, ...]
    sizes: tuple[int, ...]
    loss_known: bool

    @property
    def measured(self) -> list[int]:
        """Rows that have gradient reductions."""
        return [row for row, size in enumerate(self.sizes) if self.connected[row] and size > 0]

    def is_same(self, other: _Layout) -> bool:
        """Whether both stand for the same; variables are compared by identity."""
        mine, theirs = map(id, self.variables), map(id, other.variables)
        return (*mine, self.connected, self.loss_known) == (*theirs, other.connected, other.loss_known)

    def statistics(self, numbers: Float64Array) -> Float64Array:
        """Undo the packing of :meth:`TrackedStep._report`."""
        rows, count = self.measured, len(self.sizes)
        if count and len(rows) == count:
            return statistics_from_reductions(numbers.reshape(-1, count), self.sizes, self.connected)
        table = np.zeros((len(REDUCTIONS), count))
        table[:4, rows] = numbers[: 4 * len(rows)].reshape(4, len(rows))
        table[4:] = numbers[4 * len(rows) :].reshape(2, count)
        return statistics_from_reductions(table, self.sizes, self.connected)


class TrackedStep:
    """An instrumented copy of a model's train function.

    It is built by Keras itself around a wrapper of the user's ``train_step``, so that compilation, distribution and
    eager mode are as they are without us. The wrapper returns our numbers among the logs. While the step runs in Python
    (eagerly, or to be traced), stand-ins for the optimizers' ``apply`` and the loss tell it what passes through them.
    """

    def __init__(self, model: Any, original: Callable[[Any], Any]) -> None:
        self._running = threading.local()  # MirroredStrategy runs one thread per replica, interleaved.
        self._layouts: list[_Layout] = []
        self._patches = [
            Patch(owner=each, name="apply", replacement=self._apply_of(each)) for each in optimizers_of(model)
        ]
        self._patches.append(Patch(owner=model, name="compute_loss", replacement=self._compute_loss_of(model)))
        tracker = model._loss_tracker
        if tracker is not None:
            self._patches.append(Patch(owner=tracker, name="update_state", replacement=self._update_state_of(tracker)))
        self._run_eagerly = bool(model.run_eagerly)
        self._function = self._function_of(model)
        # Keras' own function hands its logs over in an Optional, which costs more than our numbers do.
        self._step = tf.function(self._next_step, autograph=False, reduce_retracing=True)
        self._iterator: Any = None
        self._step_on_iterator: Any = None

    def run(self, call: Call, source: Any) -> tuple[Any, CapturedStep]:
        """One step on the next batch of an iterator, or on the only batch of a list.

        An iterator is pulled inside the graph, next to operations that do not wait for it: at the end of the data some
        of them (the sample count of a metric) have run. Keras does the same with one step per execution, and only then
        may it be done here.

        Returns:
            The step's logs, and what was seen of it, its batch included.

        Raises:
            StopIteration, tf.errors.OutOfRangeError: there is no batch left.
        """
        if isinstance(source, _ITERATORS) and not self._run_eagerly:
            logs, batch = self._on_iterator(source)(source)
        else:
            batch = next(iter(source))
            with patched(self._patches):
                logs = self._function([batch])
        numbers = logs.pop(_NUMBERS, None) if isinstance(logs, dict) else None
        weights = logs.pop(_WEIGHTS, None) if isinstance(logs, dict) else None
        return logs, self._opened(numbers, weights, as_seen(batch))

    def release(self) -> None:
        """Let go of the data."""
        self._iterator = self._step_on_iterator = None

    def _on_iterator(self, iterator: Any) -> Callable[[Any], Any]:
        """The step traced for an iterator, looked up once per epoch: the look-up takes a tenth of a small step."""
        if iterator is not self._iterator:
            with patched(self._patches):
                self._step_on_iterator = self._step.get_concrete_function(iterator)
            self._iterator = iterator
        function: Callable[[Any], Any] = self._step_on_iterator
        return function

    def _next_step(self, iterator: Any) -> tuple[Any, Any]:
        batch = iterator.get_next()
        return self._function([batch]), batch

    def _opened(self, numbers: Any, weights: Any, batch: Any) -> CapturedStep:
        values = np.zeros(2) if numbers is None else np.asarray(numbers.numpy(), dtype=np.float64)
        layout = _NOTHING_SEEN if numbers is None else self._layouts[int(values[0])]
        return CapturedStep(
            variables=layout.variables, statistics=layout.statistics(values[2:]), connected=layout.connected,
            loss=float(values[1]) if layout.loss_known else None, previous_weights=weights, batch=batch,
        )  # fmt: skip

    def _function_of(self, model: Any) -> Callable[[Any], Any]:
        """The function Keras builds around our wrapper of the user's ``train_step``."""
        in_place, own_step = model.train_function, model.__dict__.get("train_step")
        model.__dict__["train_step"] = self._step_of(model)
        try:
            model.make_train_function(force=True)
            function: Callable[[Any], Any] = model.train_function
            return function
        finally:
            model.train_function = in_place
            del model.__dict__["train_step"]
            if own_step is not None:
                model.__dict__["train_step"] = own_step

    def _step_of(self, model: Any) -> Callable[[Any], Any]:
        train_step = model.train_step

        def step(data: Any) -> Any:
            sink = self._running.sink = _Sink()
            try:
                logs = train_step(data)
            finally:
                self._running.sink = None
            report: dict[str, Any] = {}
            with _unharmed(sink):
                report = self._report(sink)
            return {**logs, **report} if isinstance(logs, dict) else logs

        return step

    def _apply_of(self, optimizer: Any) -> Callable[..., Any]:
        apply = optimizer.apply

        def watched(grads: Iterable[Any], trainable_variables: Iterable[Any] | None = None) -> Any:
            gradients = list(grads)
            variables = None if trainable_variables is None else list(trainable_variables)
            if (sink := self._sink()) is not None:
                with _unharmed(sink):
                    _collect(sink, optimizer, gradients, variables or optimizer._trainable_variables)
            return apply(gradients, variables)

        return watched

    def _update_state_of(self, tracker: Any) -> Callable[..., Any]:
        update_state = tracker.update_state

        def watched(values: Any, *args: Any, **kwargs: Any) -> Any:
            if (sink := self._sink()) is not None:
                sink.tracked_loss = values
            return update_state(values, *args, **kwargs)

        return watched

    def _compute_loss_of(self, model: Any) -> Callable[..., Any]:
        compute_loss = model.compute_loss

        def watched(*args: Any, **kwargs: Any) -> Any:
            loss = compute_loss(*args, **kwargs)
            if (sink := self._sink()) is not None:
                sink.computed_losses.append(loss)
            return loss

        return watched

    def _sink(self) -> _Sink | None:
        return getattr(self._running, "sink", None)

    def _report(self, sink: _Sink) -> dict[str, Any]:
        """The numbers of one step, packed: layout, loss, gradient reductions, weight reductions."""
        if sink.failed:
            return {}
        entries = [entry for entry in sink.entries.values() if _may_leave(entry.gradient) and _may_leave(entry.before)]
        loss = sink.loss if _may_leave(sink.loss) else None
        layout = _layout_of(entries, loss)
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        gradients = _global([entries[row].gradient for row in layout.measured], replicas)
        variables = [entries[row].variable for row in layout.measured]
        dense = [dense_or_compact(gradient, variable) for gradient, variable in zip(gradients, variables, strict=True)]
        before = [entry.before for entry in entries]
        after = [tf.convert_to_tensor(entry.variable) for entry in entries]
        numbers = [self._index_of(layout), 0.0 if loss is None else tf.reduce_mean(tf.cast(loss, tf.float64))]
        parts = [tf.stack(numbers), *([gradient_reductions(dense)] if dense else []), weight_reductions(before, after)]
        report: dict[str, Any] = {_NUMBERS: tf.concat(parts, axis=0)}
        if 0 < sum(layout.sizes) <= KEEP_WEIGHTS_LIMIT:  # the mean over equal copies, under replicas
            report[_WEIGHTS] = tuple(before)
        return report

    def _index_of(self, layout: _Layout) -> Any:
        """Which layout the numbers of this trace have. Every trace, and in eager mode every step, asks anew."""
        index = next((k for k, known in enumerate(self._layouts) if known.is_same(layout)), len(self._layouts))
        if index == len(self._layouts):
            self._layouts.append(layout)
        return tf.constant(index, tf.float64)


_NOTHING_SEEN = _Layout(variables=(), connected=(), sizes=(), loss_known=False)


@contextmanager
def _unharmed(sink: _Sink) -> Iterator[None]:
    """A failure of ours, while the user's step is traced, costs the statistics and not the training."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  any failure is told, and the step goes on as if not watched
        sink.failed = True
        message = f"GradWatch could not read the gradients of this train_step: {type(error).__name__}: {error}."
        warnings.warn(f"{message} Training goes on, its gradients are not tracked.", RuntimeWarning, stacklevel=2)


def _collect(sink: _Sink, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Note what an optimizer is about to apply, divided by the loss scale as it is now: the optimizer may change it."""
    scale = optimizer.loss_scale_factor
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        scale = tf.convert_to_tensor(optimizer.dynamic_scale) if optimizer.built else optimizer.initial_scale
    for gradient, variable in zip(gradients, variables, strict=True):
        if not tf.as_dtype(variable.dtype).is_floating or getattr(variable, "overwrite_with_gradient", False):
            continue  # float8 bookkeeping: what arrives as its gradient is its new value
        if id(variable) not in sink.entries:
            sink.entries[id(variable)] = _Entry(variable, tf.convert_to_tensor(variable))
        unscaled = gradient if scale is None or gradient is None else gradient / tf.cast(scale, gradient.dtype)
        sink.entries[id(variable)].gradient = unscaled


def _may_leave(tensor: Any) -> bool:
    """Whether a tensor may go out through the logs: one made in a ``tf.cond`` or loop of the train_step may not."""
    return tf.executing_eagerly() or not tf.is_tensor(tensor) or tensor.graph is tf.compat.v1.get_default_graph()


def _layout_of(entries: Sequence[_Entry], loss: Any) -> _Layout:
    return _Layout(
        variables=tuple(entry.variable for entry in entries),
        connected=tuple(entry.gradient is not None for entry in entries),
        sizes=tuple(int(np.prod(entry.variable.shape, dtype=np.int64)) for entry in entries),
        loss_known=loss is not None,
    )


def _global(gradients: list[Any], replicas: int) -> list[Any]:
    """The sum over replicas, which is what the optimizer applies; each replica's own gradient is local."""
    if replicas == 1 or not gradients:
        return gradients
    context = tf.distribute.get_replica_context()
    return list(context.all_reduce(tf.distribute.ReduceOp.SUM, gradients))
