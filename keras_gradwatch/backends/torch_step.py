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

from keras_gradwatch.backends.torch_reductions import Gradients, Weights, dense
from keras_gradwatch.capture import KEEP_WEIGHTS_LIMIT, Call, CapturedStep, Patch, optimizers_of, patched
from keras_gradwatch.stats import REDUCTIONS, statistics_from_reductions

__all__ = ["END_OF_DATA", "Call", "TrackedStep", "as_seen", "updates_done"]

#: What a train function raises when its iterator has no batch left.
END_OF_DATA = (StopIteration,)


def as_seen(batch: Any) -> Any:
    """A batch as ``train_step`` sees it."""
    return batch


def updates_done(model: Any) -> int | None:
    """Calls of the optimizer so far; ``None``, since Keras runs one step per call on torch."""
    return None


@dataclass(slots=True)
class _Sink:
    """What the optimizers and the loss of one running step handed over. A variable has the row in which it came."""

    rows: dict[int, int] = field(default_factory=dict)
    variables: list[Any] = field(default_factory=list)
    connected: list[bool] = field(default_factory=list)
    weights: list[Weights] = field(default_factory=list)
    gradients: list[tuple[list[int], Gradients]] = field(default_factory=list)
    tracked_loss: Any = None
    computed_losses: list[Any] = field(default_factory=list)
    failed: bool = False

    @property
    def loss(self) -> Any:
        """What the loss tracker was told, else what ``compute_loss`` returned if it was called once."""
        if self.tracked_loss is not None or len(self.computed_losses) != 1:
            return self.tracked_loss
        return self.computed_losses[0]

    def hold(self, variables: Sequence[Any]) -> None:
        """Keep the weights that are not kept yet as they are now."""
        new = [variable for variable in variables if id(variable) not in self.rows]
        if not new:
            return
        self.rows.update({id(variable): len(self.variables) + k for k, variable in enumerate(new)})
        self.variables += new
        self.connected += [False] * len(new)
        self.weights.append(Weights(new))


class TrackedStep:
    """A model's own train function, listened to.

    Run eagerly, its ``train_step`` meets stand-ins for the optimizers' ``apply`` and the loss. Compiled by
    ``torch.compile`` it is left alone, and the gradients that the backward pass left behind are read afterwards.
    """

    def __init__(self, model: Any, function: Callable[[Any], Any]) -> None:
        _warn_if_unsynchronised(model)
        self._model, self._function = model, function
        self._running = threading.local()
        self._patches = [
            Patch(owner=each, name="apply", replacement=self._apply_of(each)) for each in optimizers_of(model)
        ]
        self._patches.append(Patch(owner=model, name="compute_loss", replacement=self._compute_loss_of(model)))
        tracker = model._loss_tracker
        if tracker is not None:
            self._patches.append(Patch(owner=tracker, name="update_state", replacement=self._update_state_of(tracker)))

    def run(self, call: Call, source: Any) -> tuple[Any, CapturedStep]:
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
        variables, tracker = list(filter(_is_measurable, self._model.trainable_variables)), self._model._loss_tracker
        with _unharmed(sink):
            sink.hold(variables)
        scale, told = _scale_of(self._model.optimizer), _told(tracker)
        logs = self._function([batch])
        with _unharmed(sink):
            _collect(sink, scale, [variable.value.grad for variable in variables], variables)
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


def _warn_if_unsynchronised(model: Any) -> None:
    """Say that several processes train models of their own, when nothing in sight shares their gradients.

    Keras' ``fit`` shares nothing on torch, also after ``DistributedDataParallel(model)``: it never calls the wrapper
    (seen in Keras 3.15: weights drift apart without a word).
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    count = torch.distributed.get_world_size()
    held = [value for layer in model._flatten_layers() for value in vars(layer).values()]
    wrapped = any(isinstance(value, torch.nn.parallel.DistributedDataParallel) for value in held)
    hooked = any(variable._value._backward_hooks for variable in model.trainable_variables)
    if count > 1 and not wrapped and not hooked:
        warnings.warn(
            f"{count} processes train model {model.name!r} by fit, and nothing was found that shares their gradients: "
            "Keras does not on PyTorch, also when the model was wrapped in DistributedDataParallel. Call the wrapper "
            "inside the call of a subclassed model, or register hooks that all-reduce each parameter's gradient. "
            "Until then every process trains, and GradWatch watches, a model of its own.",
            RuntimeWarning,
            stacklevel=2,
        )


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


def _collect(sink: _Sink, scale: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Note what an optimizer is about to apply, with the loss scale divided out.

    Reduced at once, since what comes after may write into the gradients or the weights.
    """
    pairs = [(v, g) for v, g in zip(variables, gradients, strict=True) if _is_measurable(v)]
    sink.hold([variable for variable, _ in pairs])
    rows, group = [], []
    for variable, gradient in pairs:
        row = sink.rows[id(variable)]
        sink.connected[row] = gradient is not None
        if gradient is not None and gradient.numel():
            unscaled = gradient if scale is None else gradient / scale.to(gradient.dtype)
            rows.append(row)
            group.append(dense(unscaled, variable._value.shape))
    if group:
        sink.gradients.append((rows, Gradients(group)))


def _is_measurable(variable: Any) -> bool:
    """Not float8 bookkeeping: what arrives as the gradient of that is its new value."""
    return variable._value.is_floating_point() and not getattr(variable, "overwrite_with_gradient", False)


def _captured(sink: _Sink, batch: Any) -> CapturedStep:
    """What was seen of a step that has run."""
    table, loss = np.zeros((len(REDUCTIONS), len(sink.variables))), sink.loss
    for rows, gradients in sink.gradients:
        table[:4, rows] = gradients.numbers()
    if sink.weights:
        table[4:] = np.concatenate([weights.numbers() for weights in sink.weights], axis=1)
    sizes = [size for weights in sink.weights for size in weights.sizes]
    keep = 0 < sum(sizes) <= KEEP_WEIGHTS_LIMIT
    return CapturedStep(
        variables=tuple(sink.variables), statistics=statistics_from_reductions(table, sizes, sink.connected),
        connected=tuple(sink.connected), loss=None if loss is None else float(torch.as_tensor(loss).mean()),
        previous_weights=_Copies(sink.weights) if keep else None, batch=batch,
    )  # fmt: skip


class _Copies(Sequence[Any]):
    """The weights from before a step, cut out of what holds them when somebody asks."""

    def __init__(self, weights: Sequence[Weights]) -> None:
        self._places = [(each, k) for each in weights for k in range(len(each.sizes))]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        weights, place = self._places[index]
        return weights.part(place)


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
