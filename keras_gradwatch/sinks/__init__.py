"""Where rows and findings also go while training. A sink is any callable that takes a finding.

A sink may also have ``open(tensors, attributes)``, called when a run begins, ``write(record)``, called with each
sampled step, ``sum_up(account)``, called at the end of each epoch and of the run with what the rows do not say, and
``close()``, called when the run ends.

A sink that wants to keep whole steps has ``wants_incidents()``, asked when a run begins and after each incident, and
``incident(finding, incident)``: what it gets writes the step, with everything needed to run it again, into a folder.
Only while some sink says yes is the state of the model held for it.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

from keras_gradwatch.records import Finding, StepRecord, TensorInfo

if TYPE_CHECKING:
    from keras_gradwatch.sinks.incident import Incident, IncidentSink
    from keras_gradwatch.sinks.live_plot import LivePlot
    from keras_gradwatch.sinks.tables import CSVSink, ParquetSink
    from keras_gradwatch.sinks.trackers import MLflowSink, TensorBoardSink, TrackioSink, WandbSink

__all__ = [
    "CSVSink",
    "IncidentSink",
    "LivePlot",
    "MLflowSink",
    "ParquetSink",
    "Sink",
    "SinkSet",
    "TensorBoardSink",
    "TrackioSink",
    "WandbSink",
    "user_stacklevel",
]

#: Module of each sink, loaded when it is first used.
_MODULES = {
    "CSVSink": "tables",
    "IncidentSink": "incident",
    "LivePlot": "live_plot",
    "MLflowSink": "trackers",
    "ParquetSink": "tables",
    "TensorBoardSink": "trackers",
    "TrackioSink": "trackers",
    "WandbSink": "trackers",
}

Sink = Callable[[Finding], object]


class SinkSet:
    """Sinks called together, none of which can disturb the training run.

    A sink that raises is closed and not called again until the next :meth:`open`; one ``RuntimeWarning`` says so.
    The set is a sink itself.

    Args:
        sinks: called in this order.

    Raises:
        TypeError: if one of them is not callable.

    Example:
        >>> findings = []
        >>> sinks = SinkSet([findings.append])
        >>> sinks.open((), {})
        >>> sinks(Finding(finding="vanishing", layer="dense", first_step=1, last_step=9, message="falls by 10^6"))
        >>> sinks.close()
        >>> findings[0].layer
        'dense'
    """

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self._sinks = tuple(sinks)
        self._active = list(self._sinks)
        for sink in self._sinks:
            if not callable(sink):
                raise TypeError(
                    f"Received {sink!r} of type {type(sink).__name__} among the sinks. Expected callables that take a "
                    "finding. Pass a sink of keras_gradwatch.sinks, or a function of one argument."
                )

    def open(self, tensors: tuple[TensorInfo, ...], attributes: Mapping[str, Any]) -> None:
        """Begin a run: every sink gets a new chance.

        Args:
            tensors: the weights and inputs watched, in network order.
            attributes: what ``history.attrs`` will hold.
        """
        self._active = list(self._sinks)
        self._each("open", tensors, attributes)

    def write(self, record: StepRecord) -> None:
        """Hand a sampled step to the sinks that take steps."""
        self._each("write", record)

    def __call__(self, finding: Finding) -> None:
        """Hand a finding to every sink."""
        self._each("__call__", finding)

    def sum_up(self, account: Mapping[str, Any]) -> None:
        """Hand over what the rows do not say: findings with their last steps, cost, notes."""
        self._each("sum_up", account)

    def wants_incidents(self) -> bool:
        """Whether any sink wants the next step that goes wrong."""
        return any(self._ask(sink) for sink in tuple(self._active) if hasattr(sink, "wants_incidents"))

    def incident(self, finding: Finding, incident: Incident) -> None:
        """Hand a step that went wrong to the sinks that want it."""
        self._each("incident", finding, incident)

    def _ask(self, sink: Any) -> bool:
        try:
            return bool(sink.wants_incidents())
        except Exception as error:  # noqa: BLE001  whatever a sink raises, training goes on
            self._disable(sink, "wants_incidents", error)
            return False

    def close(self) -> None:
        """End the run."""
        self._each("close")

    def _each(self, method: str, *arguments: object) -> None:
        for sink in self._active:
            try:
                _method(sink, method)(*arguments)
            except Exception as error:  # noqa: BLE001  whatever a sink raises, training goes on
                self._disable(sink, method, error)

    def _disable(self, sink: Sink, method: str, error: Exception) -> None:
        self._active = [other for other in self._active if other is not sink]
        if method not in ("open", "close"):
            # What was written before the error should stay readable. The user hears of the first error only.
            with contextlib.suppress(Exception):
                _method(sink, "close")()
        warnings.warn(
            f"The sink {_name(sink)} raised {type(error).__name__} in {method}: {error}. Training goes on and "
            "the history stays complete, but this sink gets nothing more in this run. Mend it or take it out of sinks.",
            RuntimeWarning,
            stacklevel=user_stacklevel(sys._getframe()),
        )


def _method(sink: Sink, name: str) -> Callable[..., object]:
    """The method, or one that does nothing: a plain function is a sink and has no ``open``, ``write`` or ``close``."""
    return getattr(sink, name, lambda *arguments: None)


def _name(sink: Sink) -> str:
    return getattr(sink, "__qualname__", type(sink).__name__)


def user_stacklevel(frame: FrameType) -> int:
    """The stacklevel that points a warning issued in ``frame`` at the user's line, such as ``model.fit(…)``."""
    level, caller = 1, frame
    while caller.f_back is not None and _package(caller) in ("keras_gradwatch", "keras", "contextlib"):
        level, caller = level + 1, caller.f_back
    return level


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def __getattr__(name: str) -> object:
    """Load a sink on first use (PEP 562): some need packages that are not always installed."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
