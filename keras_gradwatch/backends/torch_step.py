"""One training step on torch: the user's own, while stand-ins tell what the optimizer and the loss are handed."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import torch

from keras_gradwatch.backends.torch_reductions import dense, gradient_numbers, gradient_reductions, weight_reductions
from keras_gradwatch.capture import KEEP_WEIGHTS_LIMIT, CapturedStep, Patch, optimizers_of, patched
from keras_gradwatch.stats import REDUCTIONS, statistics_from_reductions

#: What a train function raises when its iterator has no batch left.
END_OF_DATA = (StopIteration,)


def as_seen(batch: Any) -> Any:
    """A batch as ``train_step`` sees it."""
    return batch


def updates_done(model: Any) -> int | None:
    """Calls of the optimizer so far; ``None``, since Keras runs one step per call on torch."""
    return None


@dataclass(slots=True)
class _Group:
    """The gradients of one call of an optimizer, and what they reduce to on the device."""

    gradients: list[Any]
    reductions: Any


@dataclass(slots=True)
class _Entry:
    """One variable in the step being run: its weight before the step, and where its last gradient went."""

    variable: Any
    before: Any
    connected: bool = False
    group: int = -1
    column: int = -1


@dataclass(slots=True)
class _Sink:
    """What the optimizers and the loss of one running step handed over."""

    entries: dict[int, _Entry] = field(default_factory=dict)
    groups: list[_Group] = field(default_factory=list)
    tracked_loss: Any = None
    computed_losses: list[Any] = field(default_factory=list)
    failed: bool = False

    @property
    def loss(self) -> Any:
        """What the loss tracker was told, else what ``compute_loss`` returned if it was called once."""
        if self.tracked_loss is not None or len(self.computed_losses) != 1:
            return self.tracked_loss
        return self.computed_losses[0]


class TrackedStep:
    """A model's own train function, listened to.

    Run eagerly, its ``train_step`` meets stand-ins for the optimizers' ``apply`` and the loss. Compiled by
    ``torch.compile`` it is left alone, and the gradients that the backward pass left behind are read afterwards.
    """

    def __init__(self, model: Any, function: Callable[[Any], Any]) -> None:
        self._model, self._function = model, function
        self._running = threading.local()
        self._patches = [
            Patch(owner=each, name="apply", replacement=self._apply_of(each)) for each in optimizers_of(model)
        ]
        self._patches.append(Patch(owner=model, name="compute_loss", replacement=self._compute_loss_of(model)))
        tracker = model._loss_tracker
        if tracker is not None:
            self._patches.append(Patch(owner=tracker, name="update_state", replacement=self._update_state_of(tracker)))

    def run(self, source: Any) -> tuple[Any, CapturedStep]:
        """One step on the only batch of a list.

        Returns:
            The step's logs, and what was seen of it, its batch included.
        """
        batch = next(iter(source))
        sink = _Sink()
        logs = self._listened(sink, batch) if not self._model.jit_compile else self._read(sink, batch)
        captured = None
        with _unharmed(sink):
            captured = None if sink.failed else _captured(sink, batch)
        return logs, captured or _captured(_Sink(), batch)

    def release(self) -> None:
        """Let go of the data: there is none."""

    def _listened(self, sink: _Sink, batch: Any) -> Any:
        self._running.sink = sink
        try:
            with patched(self._patches):
                return self._function([batch])
        finally:
            self._running.sink = None

    def _read(self, sink: _Sink, batch: Any) -> Any:
        """Run a compiled step, then read what it left in ``.grad``, and the loss from what the tracker has added."""
        optimizer, tracker = self._model.optimizer, self._model._loss_tracker
        variables = list(self._model.trainable_variables)
        before = {id(variable): _copy(variable) for variable in variables}
        scale = _scale_of(optimizer)
        told = _told(tracker)
        logs = self._function([batch])
        with _unharmed(sink):
            _collect(sink, scale, [variable.value.grad for variable in variables], variables, before)
            total, count = (now - then for now, then in zip(_told(tracker), told, strict=True))
            sink.tracked_loss = torch.tensor(total / count) if count else None
        return logs

    def _apply_of(self, optimizer: Any) -> Callable[..., Any]:
        apply = optimizer.apply

        def watched(grads: Iterable[Any], trainable_variables: Iterable[Any] | None = None) -> Any:
            gradients = list(grads)
            variables = None if trainable_variables is None else list(trainable_variables)
            if (sink := self._sink()) is not None:
                with _unharmed(sink):
                    _collect(sink, _scale_of(optimizer), gradients, variables or optimizer._trainable_variables)
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


@contextmanager
def _unharmed(sink: _Sink) -> Iterator[None]:
    """A failure of ours costs the statistics and not the training."""
    try:
        with torch.no_grad():
            yield
    except Exception as error:  # noqa: BLE001  any failure is told, and the step goes on as if not watched
        sink.failed = True
        message = f"GradWatch could not read the gradients of this train_step: {type(error).__name__}: {error}."
        warnings.warn(f"{message} Training goes on, its gradients are not tracked.", RuntimeWarning, stacklevel=2)


def _collect(
    sink: _Sink, scale: Any, gradients: Sequence[Any], variables: Sequence[Any], before: dict[int, Any] | None = None
) -> None:
    """Note what an optimizer is about to apply, with the loss scale divided out.

    Reduced at once, since what comes after may write into the gradients or the weights.
    """
    group: list[Any] = []
    for gradient, variable in zip(gradients, variables, strict=True):
        if "float" not in variable.dtype or getattr(variable, "overwrite_with_gradient", False):
            continue  # float8 bookkeeping: what arrives as its gradient is its new value
        if id(variable) not in sink.entries:
            sink.entries[id(variable)] = _Entry(variable, before[id(variable)] if before else _copy(variable))
        entry = sink.entries[id(variable)]
        entry.connected, entry.group, entry.column = gradient is not None, -1, -1
        if gradient is not None and gradient.numel():
            entry.group, entry.column = len(sink.groups), len(group)
            unscaled = gradient.detach() if scale is None else gradient.detach() / scale.to(gradient.dtype)
            group.append(dense(unscaled, variable))
    if group:
        sink.groups.append(_Group(group, gradient_reductions(group)))


def _captured(sink: _Sink, batch: Any) -> CapturedStep:
    """What was seen of a step that has run. Everything is read from the device at once."""
    entries, loss = list(sink.entries.values()), sink.loss
    parts = [group.reductions.reshape(-1) for group in sink.groups]
    if entries:
        after = [entry.variable.value.detach() for entry in entries]
        parts.append(weight_reductions([entry.before for entry in entries], after).reshape(-1))
    if loss is not None:
        parts.append(torch.as_tensor(loss).detach().double().mean().reshape(1).to(parts[0].device if parts else "cpu"))
    numbers = torch.cat(parts).cpu().numpy() if parts else np.zeros(0)
    table = np.zeros((len(REDUCTIONS), len(entries)))
    columns, start = [], 0
    for group in sink.groups:
        stop = start + 3 * len(group.gradients)
        columns.append(gradient_numbers(numbers[start:stop].reshape(3, -1), group.gradients))
        start = stop
    for row, entry in enumerate(entries):
        if entry.group >= 0:
            table[:4, row] = columns[entry.group][:, entry.column]
    if entries:
        table[4:] = numbers[start : start + 2 * len(entries)].reshape(2, -1) ** 2
    sizes = [int(np.prod(entry.variable.shape, dtype=np.int64)) for entry in entries]
    connected = tuple(entry.connected for entry in entries)
    keep = 0 < sum(sizes) <= KEEP_WEIGHTS_LIMIT
    return CapturedStep(
        variables=tuple(entry.variable for entry in entries),
        statistics=statistics_from_reductions(table, sizes, connected), connected=connected,
        loss=None if loss is None else float(numbers[-1]),
        previous_weights=[entry.before for entry in entries] if keep else None, batch=batch,
    )  # fmt: skip


def _copy(variable: Any) -> Any:
    return variable.value.detach().clone()


def _scale_of(optimizer: Any) -> Any:
    """The factor on the loss as it is now, a tensor; None without one. The optimizer may change it in the step."""
    scale = optimizer.loss_scale_factor
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        scale = optimizer.dynamic_scale.value.detach().clone() if optimizer.built else optimizer.initial_scale
    return None if scale is None else torch.as_tensor(scale)


def _told(tracker: Any) -> tuple[float, float]:
    """Sum and weight of the losses a tracker has seen."""
    if tracker is None:
        return 0.0, 0.0
    return float(tracker.total.value), float(tracker.count.value)
