"""Watches training steps from inside ``fit``: the gradients the optimizer received, and the batch they came from.

``model.train_function`` is replaced by a dispatcher. On a step that a listener wants tracked, the dispatcher calls an
instrumented copy of the user's own ``train_step``, whose logs carry a few numbers per weight out of the compiled step;
on every other step it calls the user's function, untouched. The real step runs exactly once either way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from keras_gradwatch.backends import step_backend
from keras_gradwatch.records import Float64Array

#: Weights of more elements than this in total are not handed out as ``previous_weights``: they would double in memory.
KEEP_WEIGHTS_LIMIT = 50_000_000

#: The dispatcher is kept on the function it stands in for, not on the model: it lives as long as that function does,
#: and the next ``fit`` finds the instrumented function already traced.
_CACHE = "_keras_gradwatch_dispatcher"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a listener wants of the coming step.

    Attributes:
        track: gradient statistics of the step, its batch among them.
        batch: the batch before the step runs. It must then be pulled by itself, which costs a small model a tenth of
            a step; a tracked step hands over its batch afterwards at no cost.
    """

    track: bool = False
    batch: bool = False


class Listener(Protocol):
    """Whoever follows a training run. Steps are the optimizer steps one by one, counted from 1 since it was attached.

    An exception raised here reaches the caller of ``fit``; the model is left as it should be.
    """

    def wants(self, step: int) -> Request:
        """What to provide for the coming step.

        Asked before the step runs, for all steps of a ``steps_per_execution`` block before its first; must be cheap.
        The data may end inside a block, and a step that did not run is asked about again.
        """
        ...

    def before_step(self, step: int, batch: Any) -> None:
        """A step that wants its batch is about to run; no weight has moved yet.

        ``batch`` is what ``train_step`` will see: ``(x, y)`` or ``(x, y, sample_weight)``, class weights folded in.
        """
        ...

    def after_step(self, step: int, captured: CapturedStep | None) -> bool:
        """The step has run. ``captured`` is ``None`` when it was not asked to be tracked.

        Returns:
            Whether the listener has put the model back into an earlier state: the step's logs are then dropped, so that
            callbacks do not act upon them.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedStep:
    """What was seen of one training step.

    The gradients are those handed to the optimizer: loss scale divided out, before clipping, and of each micro-batch
    alone under gradient accumulation. A variable that is updated more than once in a step is listed once, with the
    gradient of the last time and the update of the whole step. An optimizer called inside a ``tf.cond`` or a loop of
    the train_step cannot be seen, nor can one that no attribute of the model leads to.

    Attributes:
        variables: Keras variables in the order in which the optimizers received them; empty when the train_step called
            no Keras optimizer that could be seen.
        statistics: shape ``[V, len(STATISTICS)]``, float64.
        connected: shape ``[V]``, False where the gradient is None (its row is NaN but for ``weight_norm``).
        loss: this batch's own loss; ``None`` when the train_step computed none that could be seen.
        previous_weights: tensors of ``variables`` from before the step; ``None`` when they are larger than
            :data:`KEEP_WEIGHTS_LIMIT` in total, or spread over several replicas.
        batch: what ``train_step`` saw.
    """

    variables: tuple[Any, ...]
    statistics: Float64Array
    connected: tuple[bool, ...]
    loss: float | None
    previous_weights: Sequence[Any] | None
    batch: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """An instance attribute that stands in for a method while a tracked step runs."""

    owner: Any
    name: str
    replacement: Any


class Call:
    """One call of Keras' train function. A backend whose steps take more than batches has its own.

    Attributes:
        source: where the batches come from.
    """

    def __init__(self, model: Any, source: Any) -> None:
        self.source = source

    def run(self, function: Callable[..., Any], source: Any) -> Any:
        """Run a train function on batches, and give back its logs."""
        return function(source)

    def returns(self, logs: Any) -> Any:
        """What the call gives back to Keras."""
        return logs

    def present(self) -> contextlib.AbstractContextManager[None]:
        """While open, the model's variables hold their values of now, and what is assigned to them counts."""
        return contextlib.nullcontext()


class Capture:
    """A listener's place in the training of one model. Several may watch the same model.

    A ``fit`` that dies leaves its callbacks without ``on_train_end``. Two signs tell the dispatcher that a capture is
    left over from such a run, and it is dropped before it sees another step: the model has a new ``History`` (each
    ``fit`` makes one), or the capture was told of batches through :meth:`begin_batch` and was not told of this one. A
    loop of ``train_on_batch`` that never calls :meth:`begin_batch` is followed until :meth:`detach`.
    """

    def __init__(self, model: Any, listener: Listener, dispatcher: _Dispatcher) -> None:
        self.listener = listener
        self._dispatcher = dispatcher
        self._steps_before = dispatcher.steps
        self._history = getattr(model, "history", None)
        self._batches_announced = False
        self._batch_begun = False

    @classmethod
    def attach(cls, model: Any, listener: Listener) -> Capture:
        """Start watching: from now on the listener is asked about every training step of the model.

        Args:
            model: a compiled Keras model. To be called when training begins, after ``compile``.
            listener: follows the run. Attached anew, it starts counting from 1 again.

        Returns:
            The capture to detach when training ends.

        Raises:
            NotImplementedError: the Keras backend is not supported yet.
        """
        dispatcher = _dispatcher_of(model)
        capture = cls(model, listener, dispatcher)
        dispatcher.add(capture)
        return capture

    def detach(self) -> None:
        """Stop watching. The last one to leave puts the model's own ``train_function`` back. May be called twice."""
        self._dispatcher.remove(self)

    def begin_batch(self) -> None:
        """Say that the next call of the train function belongs to this run (in ``on_train_batch_begin``)."""
        self._batches_announced = self._batch_begun = True

    def retrace(self) -> None:
        """Compile the steps to come anew until the last capture leaves: something a compiled one holds has changed."""
        self._dispatcher.retrace()

    @property
    def steps_seen(self) -> int:
        """Number of training steps since attaching."""
        return self._dispatcher.steps - self._steps_before

    def take_orphaned(self) -> bool:
        """Whether the coming call belongs to another run; the announcement of this batch is used up."""
        announced, self._batch_begun = self._batch_begun, False
        new_fit = getattr(self._dispatcher.model, "history", None) is not self._history
        return new_fit or (self._batches_announced and not announced)


class _Dispatcher:
    """Stands in for a model's ``train_function``: decides which function runs a step, and tells the listeners."""

    def __init__(self, model: Any, original: Callable[[Any], Any]) -> None:
        self.model = model
        self.steps = 0
        self._original = original
        self._backend = step_backend()
        self._tracked: Any = None
        self._captures: tuple[Capture, ...] = ()
        self._before_retrace: Callable[[Any], Any] | None = None
        self._good_logs: Any = None

    def add(self, capture: Capture) -> None:
        """Let one more listener in; a place it still holds from an earlier run is given up."""
        self._captures = (*(other for other in self._captures if other.listener is not capture.listener), capture)
        self.model.train_function = self

    def remove(self, capture: Capture) -> None:
        """Let a listener go."""
        self._keep([other for other in self._captures if other is not capture])

    def _keep(self, captures: Sequence[Capture]) -> None:
        self._captures = tuple(captures)
        if captures:
            return
        if self._tracked is not None:
            self._tracked.release()
        self._good_logs = None
        if self._before_retrace is not None:
            self._original, self._before_retrace, self._tracked = self._before_retrace, None, None
        if self.model.train_function is self:
            self.model.train_function = self._original

    def retrace(self) -> None:
        """Trace the user's step again. The function it has now comes back with the end of the run."""
        self._before_retrace = self._before_retrace or self._original
        self.model.make_train_function(force=True)
        self._original, self.model.train_function = self.model.train_function, self
        self._tracked = None

    def __call__(self, *arguments: Any) -> Any:
        """One call of Keras' train function: one step, or a block of ``steps_per_execution`` of them."""
        orphaned = [capture for capture in self._captures if capture.take_orphaned()]
        if orphaned:
            self._keep([capture for capture in self._captures if capture not in orphaned])
        if not self._captures:
            return self._original(*arguments)
        call: Call = self._backend.Call(self.model, *arguments)
        count = int(self.model.steps_per_execution)
        plan = [_Plan.of(self._captures, offset) for offset in range(1, count + 1)]
        if any(one.track or one.batch for one in plan):
            return call.returns(self._run_one_by_one(call, plan))
        return call.returns(self._run_untouched(call, plan))

    def _run_untouched(self, call: Call, plan: Sequence[_Plan]) -> Any:
        """The user's own function; the data may end before the block does."""
        updates_before = self._updates_done(call) if len(plan) > 1 else None
        logs = call.run(self._original, call.source)
        ran = len(plan) if updates_before is None else self._updates_done(call) - updates_before
        for one in plan[:ran]:
            self._announce(call, one, None)
        return logs

    def _updates_done(self, call: Call) -> Any:
        with call.present():
            return self._backend.updates_done(self.model)

    def _run_one_by_one(self, call: Call, plan: Sequence[_Plan]) -> Any:
        """Each step of the block by itself, on a batch pulled when its turn comes; ends with the data or a stop."""
        logs = None
        for one in plan:
            try:
                logs, captured = self._run_one(call, one)
            except self._backend.END_OF_DATA:
                if logs is None:
                    raise
                break
            if self._announce(call, one, captured):
                logs = self._good_logs or self.model.get_metrics_result()
            self._good_logs = logs
            if self.model.stop_training:
                break
        return logs

    def _run_one(self, call: Call, plan: _Plan) -> tuple[Any, CapturedStep | None]:
        in_graph = plan.track and not plan.batch and self.model.steps_per_execution == 1
        source = call.source if in_graph else [next(iter(call.source))]  # torch gives a list of one batch
        if plan.batch:
            seen = self._backend.as_seen(source[0])
            with call.present():
                for capture, request in plan.requests:
                    if request.batch:
                        capture.listener.before_step(capture.steps_seen + 1, seen)
        if not plan.track:
            return call.run(self._original, source), None
        if self._tracked is None:
            with call.present():
                self._tracked = self._backend.TrackedStep(self.model, self._original)
        result: tuple[Any, CapturedStep] = self._tracked.run(call, source)
        return result

    def _announce(self, call: Call, plan: _Plan, captured: CapturedStep | None) -> bool:
        """Tell every listener; True when one of them has taken the step back."""
        self.steps += 1
        with call.present():
            taken_back = [
                capture.listener.after_step(capture.steps_seen, captured if request.track else None)
                for capture, request in plan.requests
            ]
        return any(taken_back)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What each listener wants of one coming step, and what satisfies them all."""

    requests: tuple[tuple[Capture, Request], ...]
    track: bool
    batch: bool

    @classmethod
    def of(cls, captures: Iterable[Capture], offset: int) -> _Plan:
        """Ask every listener about the step that comes ``offset`` steps from now."""
        requests = tuple((capture, capture.listener.wants(capture.steps_seen + offset)) for capture in captures)
        return cls(requests, any(r.track for _, r in requests), any(r.batch for _, r in requests))


def _dispatcher_of(model: Any) -> _Dispatcher:
    """The dispatcher in place, or the one last used for the model's current train function, or a new one."""
    if isinstance(model.train_function, _Dispatcher):
        return model.train_function
    if model.train_function is None:
        model.make_train_function()
    original = model.train_function
    cached = getattr(original, _CACHE, None)
    if isinstance(cached, _Dispatcher):
        return cached
    dispatcher = _Dispatcher(model, original)
    with contextlib.suppress(
        AttributeError
    ):  # A callable that takes no attributes costs a second trace in the next fit.
        setattr(original, _CACHE, dispatcher)
    return dispatcher


def optimizers_of(model: Any) -> list[Any]:
    """Every Keras optimizer that the model or a part of it holds in an attribute, a list or a dict.

    The optimizer inside a ``LossScaleOptimizer`` is left out: it sees gradients only inside a branch.
    """
    import keras

    found: dict[int, Any] = {}
    pending = [vars(layer) for layer in model._flatten_layers()]
    while pending:
        for value in _items(pending.pop()):
            if isinstance(value, keras.optimizers.Optimizer):
                found[id(value)] = value
            elif isinstance(value, dict | list | tuple):
                pending.append(value)
    return list(found.values())


def _items(container: Any) -> Iterable[Any]:
    return list(container.values()) if isinstance(container, dict) else container


@contextlib.contextmanager
def patched(patches: Iterable[Patch]) -> Iterator[None]:
    """Puts replacements into instance dictionaries, past attribute tracking, and takes every one out again."""
    before = [(patch, patch.owner.__dict__.get(patch.name, _ABSENT)) for patch in patches]
    try:
        for patch, _ in before:
            patch.owner.__dict__[patch.name] = patch.replacement
        yield
    finally:
        for patch, value in before:
            if value is _ABSENT:
                patch.owner.__dict__.pop(patch.name, None)
            else:
                patch.owner.__dict__[patch.name] = value


_ABSENT = object()
