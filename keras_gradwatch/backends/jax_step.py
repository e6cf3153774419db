"""One training step on JAX: an instrumented copy of the user's, which also tells the gradients.

Keras trains on JAX with a state that goes from step to step; in the middle of an epoch the model's own variables are
empty. Whoever listens meets them filled (:meth:`Call.present`), without the synchronisation that Keras does when a
callback asks for its model, and which costs more than a small step.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import keras
import numpy as np
from jax import numpy as jnp
from jax.extend.core import ClosedJaxpr, Var, get_opaque_trace_state

from keras_gradwatch import capture
from keras_gradwatch.backends.jax_graph import evaluate, program_of
from keras_gradwatch.backends.jax_point import connected_values
from keras_gradwatch.backends.jax_reductions import gradient_reductions, weight_reductions
from keras_gradwatch.capture import KEEP_WEIGHTS_LIMIT, CapturedStep, Patch, optimizers_of, patched
from keras_gradwatch.records import Float64Array
from keras_gradwatch.stats import REDUCTIONS, statistics_from_reductions

#: What a train function raises when its iterator has no batch left.
END_OF_DATA = (StopIteration,)

#: Keys under which our numbers ride through the logs of a step; gone before Keras sees the logs.
_REPORT = "__gradwatch"

#: The parts of a training state, by the attribute of the model that lists their variables.
_State = tuple[list[Any], list[Any], list[Any], list[Any]]


class Call(capture.Call):
    """One call of Keras' train function with a training state, which every step takes and gives back."""

    def __init__(self, model: Any, state: _State, source: Any) -> None:
        super().__init__(model, source)
        self._model, self._state = model, state

    def run(self, function: Callable[..., Any], source: Any) -> Any:
        """Run a train function on batches, and give back its logs."""
        logs, self._state = function(self._state, iter(source))
        return logs

    def returns(self, logs: Any) -> Any:
        """Logs and state."""
        return logs, self._state

    @contextmanager
    def present(self) -> Iterator[None]:
        """While open, the model's variables hold their values of now, and what is assigned to them counts."""
        model = self._model
        optimizer = model.optimizer.variables if model.optimizer is not None else []
        groups = [model.trainable_variables, model.non_trainable_variables, optimizer, model.metrics_variables]
        variables = [variable for group in groups for variable in group]
        before = [variable._value for variable in variables]
        synced, model._jax_state_synced = model._jax_state_synced, True  # what Keras would put in is older
        for variable, value in zip(variables, (v for part in self._state for v in part), strict=True):
            variable._value = value
        try:
            yield
        finally:
            now = [[variable._value for variable in group] for group in groups]
            self._state = (now[0], now[1], now[2], now[3])
            for variable, value in zip(variables, before, strict=True):
                variable._value = value
            model._jax_state_synced = synced


def as_seen(batch: Any) -> Any:
    """A batch as ``train_step`` sees it."""
    return batch


def updates_done(model: Any) -> int | None:
    """Calls of the optimizer so far; ``None`` when it does not count them all, as under loss scaling."""
    optimizer = model.optimizer
    if not isinstance(optimizer, keras.optimizers.Optimizer) or not optimizer.built:
        return None
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return None
    return int(optimizer._iterations.value)


@dataclass(slots=True)
class _Entry:
    """One variable in the step being run: its weight before and after, and the gradient it received last."""

    variable: Any
    before: Any
    after: Any = None
    gradient: Any = None
    scale: Any = None


@dataclass(slots=True)
class _Sink:
    """What the optimizers and the loss of one running step handed over, at the level of tracing it began on."""

    state: Any = None
    entries: dict[int, _Entry] = field(default_factory=dict)
    loss: Any = None
    failed: bool = False

    def handed_over(self) -> list[Any]:
        """All arrays, gradients first; what is missing is left out."""
        entries = self.entries.values()
        columns = [[getattr(e, name) for e in entries] for name in ("gradient", "scale", "before", "after")]
        return [*columns, self.loss]

    def take_back(self, arrays: list[Any]) -> None:
        """The same arrays, from another level of tracing."""
        *columns, self.loss = arrays
        for entry, values in zip(self.entries.values(), zip(*columns, strict=True), strict=True):
            entry.gradient, entry.scale, entry.before, entry.after = values

    def takes(self) -> bool:
        """Whether what is made now may leave with the logs; not from inside a branch, loop or gradient."""
        return bool(get_opaque_trace_state() == self.state)


@dataclass(frozen=True, slots=True)
class _Layout:
    """What the numbers of one trace stand for."""

    variables: tuple[Any, ...]
    connected: tuple[bool, ...]
    sizes: tuple[int, ...]
    loss_known: bool

    @property
    def measured(self) -> list[int]:
        """Rows that have gradient reductions."""
        return [row for row, size in enumerate(self.sizes) if self.connected[row] and size > 0]

    def statistics(self, gradients: Float64Array, weights: Float64Array) -> Float64Array:
        """From reductions ``[5, measured]`` and ``[2, V]``."""
        table = np.zeros((len(REDUCTIONS), len(self.sizes)))
        table[0, self.measured] = gradients[0] ** 2 * gradients[1]
        table[1:4, self.measured] = gradients[2:]
        table[4:] = weights
        return statistics_from_reductions(table, self.sizes, self.connected)


_NOTHING_SEEN = _Layout(variables=(), connected=(), sizes=(), loss_known=False)


class TrackedStep:
    """An instrumented copy of a model's train function.

    It is built by Keras itself around a wrapper of the user's ``train_step``, so that compilation, donation and
    distribution are as they are without us. The wrapper returns our numbers among the logs. While the step runs in
    Python (eagerly, or to be traced), stand-ins for the optimizers' ``stateless_apply`` and for the loss tracker tell
    it what passes through them.
    """

    def __init__(self, model: Any, original: Callable[..., Any]) -> None:
        self._model = model
        self._running = threading.local()
        self._layouts: list[_Layout] = []
        self._patches = [
            Patch(owner=each, name="stateless_apply", replacement=self._apply_of(each)) for each in optimizers_of(model)
        ]
        tracker = model._loss_tracker
        if tracker is not None:
            self._patches.append(Patch(owner=tracker, name="update_state", replacement=self._update_state_of(tracker)))
        self._function = self._function_of(model)

    def run(self, call: Call, source: Any) -> tuple[Any, CapturedStep]:
        """One step on the next batch of an iterator, or on the only batch of a list.

        Returns:
            The step's logs, and what was seen of it, its batch included.

        Raises:
            StopIteration: there is no batch left.
        """
        batch = next(iter(source))
        with patched(self._patches):
            logs = call.run(self._function, [batch])
        report = logs.pop(_REPORT, None) if isinstance(logs, dict) else None
        return logs, self._opened(report, batch)

    def release(self) -> None:
        """Let go of the data: there is none."""

    def _opened(self, report: Any, batch: Any) -> CapturedStep:
        layout, loss, previous = _NOTHING_SEEN, None, None
        statistics = layout.statistics(np.zeros((5, 0)), np.zeros((2, 0)))
        if report is not None:
            numbers = np.asarray(report["numbers"], np.float64)
            layout = self._layouts[int(numbers[0])]
            count = 5 * len(layout.measured)
            gradients, weights = numbers[2 : 2 + count], numbers[2 + count :]
            statistics = layout.statistics(gradients.reshape(5, -1), weights.reshape(2, -1))
            loss, previous = float(numbers[1]) if layout.loss_known else None, report.get("weights")
        return CapturedStep(
            variables=layout.variables, statistics=statistics, connected=layout.connected, loss=loss,
            previous_weights=previous, batch=batch,
        )  # fmt: skip

    def _function_of(self, model: Any) -> Callable[..., Any]:
        """The function Keras builds around our wrapper of the user's ``train_step``."""
        in_place, own_step = model.train_function, model.__dict__.get("train_step")
        model.__dict__["train_step"] = self._step_of(model)
        try:
            model.make_train_function(force=True)
            function: Callable[..., Any] = model.train_function
            return function
        finally:
            model.train_function = in_place
            del model.__dict__["train_step"]
            if own_step is not None:
                model.__dict__["train_step"] = own_step

    def _step_of(self, model: Any) -> Callable[[Any, Any], Any]:
        train_step = model.train_step

        def step(state: Any, data: Any) -> Any:
            sink = _Sink()
            if not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((state, data))):
                logs, after = self._listened(sink, train_step, state, data)
            else:
                logs, after = self._traced(sink, train_step, state, data)
            report: dict[str, Any] = {}
            with _unharmed(sink):
                report = self._report(sink)
            return ({**logs, **report} if isinstance(logs, dict) else logs), after

        return step

    def _listened(self, sink: _Sink, train_step: Callable[[Any, Any], Any], state: Any, data: Any) -> Any:
        """The user's own step, its optimizers and its loss overheard."""
        sink.state, self._running.sink = get_opaque_trace_state(), sink
        try:
            return train_step(state, data)
        finally:
            self._running.sink = None

    def _traced(self, sink: _Sink, train_step: Callable[[Any, Any], Any], state: Any, data: Any) -> Any:
        """The same, traced by itself, so that gradients that are missing can be told from those that are zero."""
        values, structure = jax.tree.flatten((state, data))

        def step(*values: Any) -> Any:
            made = self._listened(sink, train_step, *jax.tree.unflatten(structure, values))
            return made, sink.handed_over()

        program, shapes = jax.make_jaxpr(step, return_shape=True)(*values)
        found = evaluate(program, values)
        made, handed = jax.tree.unflatten(jax.tree.structure(shapes), found)
        sink.take_back(handed)
        with _unharmed(sink):
            nothing = _zeros(program)
            gradients = program.jaxpr.outvars[len(found) - len(jax.tree.leaves(handed)) :]
            known = [row for row, entry in enumerate(sink.entries.values()) if entry.gradient is not None]
            missing = [row for row, variable in zip(known, gradients, strict=False) if variable in nothing]
            if missing:
                self._forget(sink, missing, state, data)
        return made

    def _forget(self, sink: _Sink, missing: Sequence[int], state: Any, data: Any) -> None:
        """Drop gradients that the loss does not reach. One that a hand-written backward sets to zero is kept."""
        reached: set[int] = set()
        if type(self._model).train_step is keras.Model.train_step:
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)

            def loss(*weights: Any) -> Any:
                return self._model.compute_loss_and_updates(
                    list(weights), state[1], state[3], x, y, sample_weight, training=True, optimizer_variables=state[2]
                )[0]

            connected = connected_values(program_of(loss, state[0]), len(state[0]))
            reached = {id(v) for v, c in zip(self._model.trainable_variables, connected, strict=True) if c}
        entries = list(sink.entries.values())
        for row in missing:
            if id(entries[row].variable) not in reached:
                entries[row].gradient = None

    def _apply_of(self, optimizer: Any) -> Callable[..., Any]:
        apply = optimizer.stateless_apply

        def watched(optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
            after, state = apply(optimizer_variables, grads, trainable_variables)
            sink = self._sink()
            if sink is not None and sink.takes():
                with _unharmed(sink):
                    scale = _scale_of(optimizer, optimizer_variables)
                    _collect(sink, optimizer._trainable_variables, scale, grads, trainable_variables, after)
            return after, state

        return watched

    def _update_state_of(self, tracker: Any) -> Callable[..., Any]:
        update_state = tracker.update_state

        def watched(values: Any, *args: Any, **kwargs: Any) -> Any:
            sink = self._sink()
            if sink is not None and sink.takes():
                sink.loss = values
            return update_state(values, *args, **kwargs)

        return watched

    def _sink(self) -> _Sink | None:
        return getattr(self._running, "sink", None)

    def _report(self, sink: _Sink) -> dict[str, Any]:
        """The numbers of one step, packed: layout, loss, gradient reductions, weight reductions."""
        if sink.failed:
            return {}
        entries = list(sink.entries.values())
        layout = _Layout(
            variables=tuple(entry.variable for entry in entries),
            connected=tuple(entry.gradient is not None for entry in entries),
            sizes=tuple(int(np.prod(entry.variable.shape, dtype=np.int64)) for entry in entries),
            loss_known=sink.loss is not None,
        )
        loss = jnp.zeros(()) if sink.loss is None else jnp.mean(jnp.asarray(sink.loss))
        parts = [jnp.stack([self._index_of(layout), loss.astype(np.float32)])]
        if rows := layout.measured:
            parts.append(gradient_reductions([_unscaled(entries[row]) for row in rows]).ravel())
        parts.append(weight_reductions([e.before for e in entries], [e.after for e in entries]).ravel())
        report: dict[str, Any] = {"numbers": jnp.concatenate(parts)}
        if 0 < sum(layout.sizes) <= KEEP_WEIGHTS_LIMIT:
            report["weights"] = [entry.before for entry in entries]
        return {_REPORT: report}

    def _index_of(self, layout: _Layout) -> Any:
        """Which layout the numbers of this trace have. Every trace, and without ``jit`` every step, asks anew."""
        if layout not in self._layouts:
            self._layouts.append(layout)
        return jnp.full((), self._layouts.index(layout), np.float32)


@contextmanager
def _unharmed(sink: _Sink) -> Iterator[None]:
    """A failure of ours, while the user's step is traced, costs the statistics and not the training."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  any failure is told, and the step goes on as if not watched
        sink.failed = True
        message = f"GradWatch could not read the gradients of this train_step: {type(error).__name__}: {error}."
        warnings.warn(f"{message} Training goes on, its gradients are not tracked.", RuntimeWarning, stacklevel=2)


def _collect(
    sink: _Sink, variables: Sequence[Any], scale: Any, gradients: Sequence[Any], before: Sequence[Any],
    after: Sequence[Any],
) -> None:  # fmt: skip
    """Note what an optimizer was given to apply, with the loss scale divided out, and what became of the weights."""
    for variable, gradient, old, new in zip(variables, gradients, before, after, strict=True):
        if "float" not in variable.dtype or getattr(variable, "overwrite_with_gradient", False):
            continue  # float8 bookkeeping: what arrives as its gradient is its new value
        entry = sink.entries.setdefault(id(variable), _Entry(variable, old))
        entry.after, entry.gradient, entry.scale = new, gradient, scale


def _unscaled(entry: _Entry) -> Any:
    return entry.gradient if entry.scale is None else entry.gradient / jnp.asarray(entry.scale, entry.gradient.dtype)


def _scale_of(optimizer: Any, values: Sequence[Any]) -> Any:
    """The factor on the loss in this step; None without one."""
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer.loss_scale_factor
    places = [n for n, variable in enumerate(optimizer.variables) if variable is optimizer.dynamic_scale]
    return values[places[0]]


def _zeros(program: ClosedJaxpr) -> set[Any]:
    """Variables of a program that are zero whatever comes in: JAX makes such a gradient where none is."""
    found: set[Any] = {
        variable for variable, value in zip(program.jaxpr.constvars, program.consts, strict=True)
        if not isinstance(value, jax.core.Tracer) and np.size(value) and not np.any(value)
    }  # fmt: skip

    def is_zero(atom: Any) -> bool:
        return atom in found if isinstance(atom, Var) else not np.any(atom.val)

    for equation in program.jaxpr.eqns:
        if equation.primitive.name in _COPIES and is_zero(equation.invars[0]):
            found.update(equation.outvars)
    return found


_COPIES = frozenset({"broadcast_in_dim", "convert_element_type", "reshape", "copy", "copy_p", "squeeze", "transpose"})
